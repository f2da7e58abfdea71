"""Memory and memory traffic of a forward and backward pass, found with fake tensors: nothing is computed or allocated.

Without torch.compile every tensor that PyTorch would allocate is followed from its creation to its end. With it, the
graphs that Inductor would compile are taken from the compiler after it has chosen what to keep for the backward, and
followed with element-wise operations fused into the kernels that need them. Layers repeat, so a deep model is traced
with few of them and the rest is added.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lssar.context import Context
from lssar.model import GPT, ModelConfig


@dataclass(frozen=True)
class Footprint:
    """Bytes of one forward and backward of one process, weights, old gradients and optimiser not included."""

    kept: float
    """Activations that the forward leaves for the backward."""
    weight_copies: float
    """Half-precision copies of weights that it leaves."""
    peak: float
    """The most that is allocated at once, new gradients included."""
    traffic: float
    """Read and written by element-wise kernels and reductions; 0 without torch.compile."""

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other))))

    def __mul__(self, times: int) -> Footprint:
        return Footprint(*(times * a for a in dataclasses.astuple(self)))


@functools.cache
def footprint(
    config: ModelConfig, batch: int, length: int, *, half: bool, compiled: bool, sharded: bool, loss: bool,
    context: int = 1,
) -> Footprint:  # fmt: skip
    """Of a model on `batch` sequences of `length` tokens, of which each of `context` processes holds an equal part.

    half: under autocast to bfloat16. sharded: gradients leave as soon as they are complete, and no copies of weights
    are kept. loss: with the logits and the loss as a CPU computes them; otherwise up to the last hidden state.
    """
    period = max(1, len(config.pattern))

    def trace(layers: int) -> Footprint:
        return _trace(config, layers, batch, length, half, compiled, sharded, loss, context)

    if config.layers <= 2 * period:
        return trace(config.layers)
    repeats, rest = divmod(config.layers, period)
    once, twice = trace(period), trace(2 * period)
    total = once + (twice + once * -1) * (repeats - 1)
    return total if not rest else total + trace(period + rest) + once * -1


def _trace(
    config: ModelConfig, layers: int, batch: int, length: int, half: bool, compiled: bool, sharded: bool, loss: bool,
    context: int = 1,
) -> Footprint:  # fmt: skip
    with torch.device("meta"):
        model = GPT(dataclasses.replace(config, layers=layers))
    model.context = _TracedContext(context) if context > 1 else None
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", torch.bfloat16, enabled=half):
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty(weight.shape)))
        ids = torch.zeros(batch, length if loss else length // context, dtype=torch.int64)
        return (_compiled if compiled else _eager)(model, ids, sharded, loss)


@torch.library.custom_op("lssar::traced_exchange", mutates_args=())
def _exchanged(x: Tensor, rows: int) -> Tensor:
    """What a collective returns for x, with `rows` rows; only its shape is known."""
    raise NotImplementedError("this operator is traced and never run")


_exchanged.register_fake(lambda x, rows: x.new_empty(rows, *x.shape[1:]))


def _remember_rows(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.rows = inputs[0].shape[0]


_exchanged.register_autograd(
    lambda ctx, gradient: (_exchanged(gradient.contiguous(), ctx.rows), None), setup_context=_remember_rows
)


class _TracedContext(Context):
    """The last process of a context, without the others; it receives the most."""

    def __init__(self, size: int):
        self.rank, self.size = size - 1, size

    def _all_to_all(self, x: Tensor, received: list[int] | None = None, sent: list[int] | None = None) -> Tensor:
        return _exchanged(x.contiguous(), x.shape[0] if received is None else sum(received))

    def _all_gather(self, x: Tensor) -> Tensor:
        return _exchanged(x.contiguous(), x.shape[0] * self.size)


def _forward(model: GPT, ids: Tensor, loss: bool) -> Tensor:
    return model(ids, targets=ids) if loss else model.hidden(ids)


def _eager(model: GPT, ids: Tensor, sharded: bool, loss: bool) -> Footprint:
    for parameter in model.parameters() if sharded else ():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with _Allocations(model) as allocated:
        y = _forward(model, ids, loss)
        kept, copies = allocated.live, allocated.copies
        y.backward(None if loss else torch.empty_like(y))
    gone = copies if sharded else 0
    return Footprint(kept - copies, copies - gone, allocated.peak - gone, 0.0)


class _Allocations(TorchDispatchMode):
    """Follows the storages that operations create, until they are freed."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.live = self.peak = self.copies = 0
        self.weights = {p.untyped_storage()._cdata for p in model.parameters()}
        self.known: dict[weakref.ref, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for x in _tensors(result):
            storage = x.untyped_storage()
            reference = weakref.ref(storage, self._freed)
            if storage._cdata not in given and reference not in self.known:
                self.known[reference] = storage.nbytes()
                self.live += storage.nbytes()
                if func is torch.ops.aten._to_copy.default and given <= self.weights:
                    self.copies += storage.nbytes()  # autocast keeps them as long as the graph
        self.peak = max(self.peak, self.live)
        return result

    def _freed(self, reference: weakref.ref) -> None:
        self.live -= self.known.pop(reference, 0)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, Tensor))


def _compiled(model: GPT, ids: Tensor, sharded: bool, loss: bool) -> Footprint:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    graphs: list[fx.GraphModule] = []

    def record(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=record, bw_compiler=record, partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )  # fmt: skip
    torch._dynamo.reset()  # earlier traces of the same code would count as recompilations
    try:
        y = torch.compile(partial(_forward, model, loss=loss), backend=backend, fullgraph=True)(ids)
        y.backward(None if loss else torch.empty_like(y))
    finally:
        torch._dynamo.reset()
    forward, backward = (_Graph(graph) for graph in graphs)
    kept = forward.kept()
    copies = sum(size for node, size in kept.items() if forward.only_weights(node))
    gone = copies if sharded else 0
    sizes = forward.shown(kept)
    counted = {node: sizes.get(node.name, 0) for node in backward.nodes if node.op == "placeholder"}
    if not loss:  # the gradient of the hidden state, which is the last argument
        counted[list(counted)[-1]] = y.numel() * y.element_size()
    peak = max(forward.peak({}, set()), backward.peak(counted, backward.outputs() if sharded else set()))
    return Footprint(sum(kept.values()) - copies, copies - gone, peak - gone, forward.traffic() + backward.traffic())


class _Graph:
    """A forward or backward graph as Inductor would run it.

    A node is a tensor in memory if it is not element-wise, or is an output, or is read by an operation into which
    nothing is fused (matrix products, attention), or would be computed from many tensors wherever it is used. All
    others are computed where they are used.
    """

    def __init__(self, graph: fx.GraphModule):
        self.nodes = list(graph.graph.nodes)
        self.written: dict[fx.Node, bool] = {}
        for node in self.nodes:
            self.written[node] = self._is_written(node)

    def outputs(self) -> set[fx.Node]:
        return set(self.nodes[-1].all_input_nodes)

    def kept(self) -> dict[fx.Node, int]:
        """What a forward graph leaves for the backward, inputs and the result (the first output) not included."""
        result = {self.base(x) for x in self.nodes[-1].args[0][:1] if isinstance(x, fx.Node)}
        bases = {self.base(node) for node in self.outputs()} - result
        return {node: _bytes(node) for node in bases if node.op != "placeholder"}

    def shown(self, kept: dict[fx.Node, int]) -> dict[str, int]:
        """Bytes that each output of a forward graph keeps alive, by its name; views of one tensor count it once."""
        left = dict(kept)
        return {node.name: left.pop(self.base(node), 0) for node in self.nodes[-1].all_input_nodes}

    def only_weights(self, node: fx.Node) -> bool:
        """Whether a node is computed from inputs of the graph that are matrices of weights."""
        if node.op == "placeholder":
            value = node.meta.get("val")
            return isinstance(value, Tensor) and value.is_floating_point()
        return bool(node.all_input_nodes) and all(map(self.only_weights, node.all_input_nodes))

    def base(self, node: fx.Node) -> fx.Node:
        """The node whose memory a view shows."""
        while _is_view(node) and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return node

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """Nodes that read a tensor when they run: its users, through views and through what is fused into them."""
        found = []
        for user in node.users:
            found += self.readers(user) if not self.written[user] and user.op != "output" else [user]
        return found

    def sources(self, node: fx.Node) -> set[fx.Node]:
        """Tensors in memory that a kernel reads for a node."""
        found: set[fx.Node] = set()
        for x in node.all_input_nodes:
            found |= {x} if self.written[x] or x.op == "placeholder" else self.sources(x)
        return found

    def peak(self, arguments: dict[fx.Node, int], leaving: set[fx.Node]) -> int:
        """The most bytes at once. `arguments` are freed after their last use; nodes that are `leaving` at once too.

        An element-wise kernel writes over a tensor of the same size that it is the last to read, as Inductor's do.
        """
        order = {node: i for i, node in enumerate(self.nodes)}
        end = len(self.nodes) - 1

        def last_use(node: fx.Node) -> int:
            last = max((order[reader] for reader in self.readers(node)), default=order[node])
            return order[node] + 1 if last == end and node in leaving else last

        live = dict(arguments)
        ends = {node: last_use(node) for node in arguments}
        total = peak = sum(live.values())
        for i, node in enumerate(self.nodes):
            if node.op == "call_function" and self.written[node]:
                size = _bytes(node)
                if _is_elementwise(node):
                    spent = (x for x in self.sources(node) if ends.get(x) == i and live.get(x) == size)
                    total -= live.pop(next(spent, node), 0)
                live[node], ends[node] = size, last_use(node)
                total += size
            peak = max(peak, total)
            for done in [x for x in live if ends[x] <= i]:
                total -= live.pop(done)
        return peak

    def traffic(self) -> int:
        """Bytes that kernels other than matrix products and attention read and write.

        Inductor fuses what lies between two products or calls of attention into one kernel, which reads a tensor once
        for all that is computed from it; sums over tokens, such as the gradients of biases, take another one.
        """
        kernel: dict[fx.Node, tuple[int, bool]] = {}
        depth: dict[fx.Node, int] = {}
        reads: dict[tuple[int, bool], set[fx.Node]] = {}
        for node in self.nodes:
            depth[node] = max((depth[x] + _is_heavy(x) for x in node.all_input_nodes), default=0)
            if node.op == "call_function" and self.written[node] and not _is_heavy(node):
                kernel[node] = place = (depth[node], _sums_tokens(node))
                reads.setdefault(place, set()).update(x for x in self.sources(node) if kernel.get(x) != place)
        written = [node for node in kernel if any(kernel.get(x) != kernel[node] for x in self.readers(node))]
        return sum(map(_bytes, written)) + sum(_bytes(x) for sources in reads.values() for x in sources)

    def _is_written(self, node: fx.Node) -> bool:
        if node.op != "call_function" or _is_view(node):
            return False
        if not _is_elementwise(node):
            return True
        if any(user.op == "output" or _is_heavy(user) for user in self._direct(node)):
            return True
        return len(node.users) > 1 and len(self.sources(node)) > MOST_READS

    def _direct(self, node: fx.Node) -> Iterator[fx.Node]:
        """Users of a node, through views."""
        for user in node.users:
            if _is_view(user):
                yield from self._direct(user)
            else:
                yield user


MOST_READS = 4
"""Inductor writes an element-wise result that is used several times to memory if it is computed from more tensors than
this (its setting `realize_reads_threshold`)."""
_VIEWS = {
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "slice", "split",
    "split_with_sizes", "select", "alias", "as_strided", "unbind", "detach",
}  # fmt: skip
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "embedding_dense_backward", "index_put"}
_FUSED = {
    "clone", "cat", "full", "arange", "iota", "full_like", "constant_pad_nd", "convert_element_type", "empty", "gather",
    "scatter", "embedding", "index",
}  # fmt: skip
"""Besides those that PyTorch marks as pointwise."""


def _name(node: fx.Node) -> str:
    return node.target._schema.name.split("::")[-1] if isinstance(node.target, torch._ops.OpOverload) else ""


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and (_name(node) in _VIEWS or getattr(node.target, "__name__", "") == "getitem")


def _is_elementwise(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or _name(node) in _FUSED


def _is_heavy(node: fx.Node) -> bool:
    """Operations that Inductor fuses nothing into: matrix products and operators of ours."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return _name(node) in _PRODUCTS or node.target.namespace not in ("aten", "prims")


def _sums_tokens(node: fx.Node) -> bool:
    return _name(node) == "sum" and len(node.args) > 1 and 0 in _listed(node.args[1])


def _listed(dimensions: Any) -> list[int]:
    return list(dimensions) if isinstance(dimensions, (list, tuple)) else [dimensions]


def _bytes(node: fx.Node) -> int:
    return sum(x.numel() * x.element_size() for x in _tensors(node.meta.get("val")))
