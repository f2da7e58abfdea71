"""Optimiser steps of small models on a GPU: compiled blocks, and a whole step as one CUDA graph.

A step of the 10M model is some 650 kernels of a few microseconds (1,050 with `cosine_softmax`): launching them one by
one takes longer than running them, and most of what they do is to read and write the same activations again.
`torch.compile` of a block, which all layers, models and seeds of a mechanism share, cuts the second; a graph cuts the
first, since forward, backward, clipping and the optimiser become one launch. Neither changes what is computed, but for
rounding, and where one is not available training continues without it, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from lssar.experiments.newton.model import OrbitModel
from lssar.model import ModelConfig

Batch = tuple[Tensor, ...]

WORTH_COMPILING = 1_000_000
"""Tokens of a training run from which on compiling its blocks, some seconds for a new shape, pays."""
BACKEND = "inductor"
WARM_UP = 3
"""Steps before the graph is made: what is compiled, loaded or allocated at first use is there by then."""
RECOMPILE_LIMIT = 64
"""Mechanisms times shapes of one process; beyond its limit dynamo stops compiling without a warning."""

given_up: set[tuple[str, ModelConfig]] = set()
"""`compile` or `graph`, and the models with which it failed in this process: it is not tried again."""


@dataclass(frozen=True)
class Execution:
    """How steps are carried out."""

    dtype: str = "float32"
    compile: bool = False
    graph: bool = False
    """On a GPU only."""

    def for_tokens(self, tokens: int) -> Execution:
        """Without compiling where a run is too short for it."""
        return replace(self, compile=self.compile and tokens >= WORTH_COMPILING)

    def autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16, enabled=self.dtype == "bfloat16")


EAGER = Execution()


def has_graphs(device: torch.device) -> bool:
    return device.type == "cuda"


class Steps:
    """`steps(rate, batch)`: one step with a learning rate on `loss_of(*batch)`; returns the loss, until the next step.

    All that differs from step to step must be in `batch`: a graph keeps everything else as it was when it was made.
    Batches must have one shape. As a context manager, it leaves model and optimiser as they would be without it.
    """

    def __init__(
        self, model: OrbitModel, optimiser: torch.optim.Optimizer, loss_of: Callable[..., Tensor], clip: float,
        how: Execution,
    ) -> None:  # fmt: skip
        self.model, self.optimiser, self.loss_of, self.clip, self.how = model, optimiser, loss_of, clip, how
        self.device = next(model.parameters()).device
        self.compiled = how.compile and ("compile", model.gpt.config) not in given_up
        self.graphed = how.graph and has_graphs(self.device) and ("graph", model.gpt.config) not in given_up
        self.taken = 0
        self.graph: Any = None
        self.inputs: Batch = ()
        self.loss: Tensor | None = None
        if self.compiled:
            from torch._dynamo import config  # only where it is needed: the import takes a second

            config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
            for block in model.gpt.layers():
                block.compile(dynamic=False, backend=BACKEND)
        if self.graphed:
            self.aside = torch.cuda.Stream()
            for group in optimiser.param_groups:  # the graph reads the rate from memory
                group.update(lr=torch.zeros((), device=self.device), capturable=True)

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, kind: type | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self._without_compiling()
        self._without_graph()

    def __call__(self, rate: float, batch: Batch) -> Tensor:
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self.graphed and self.taken == WARM_UP:
            self._make_graph(batch)
        self.taken += 1
        if self.graph is not None:
            return self._replay(batch)
        if self.graphed and self.taken == WARM_UP:
            self.inputs = tuple(x.clone() for x in batch)  # for the rehearsal
        if not (self.compiled and self.taken == 1):
            return self._step(batch)
        try:
            return self._step(batch)
        except Exception as problem:  # compilers raise many kinds
            self._give_up("compile", problem)
            self._without_compiling()
            return self._step(batch)

    def _step(self, batch: Batch) -> Tensor:
        if not self.graphed:
            return self._update(batch)
        now = torch.cuda.current_stream()  # no capture on the default stream, and the steps before it where it will be
        self.aside.wait_stream(now)
        with torch.cuda.stream(self.aside):
            loss = self._update(batch)
        now.wait_stream(self.aside)
        return loss

    def _update(self, batch: Batch) -> Tensor:
        with self.how.autocast(self.device):
            loss = self.loss_of(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return loss.detach()

    def _replay(self, batch: Batch) -> Tensor:
        for kept, x in zip(self.inputs, batch, strict=True):
            kept.copy_(x)
        self.graph.replay()
        assert self.loss is not None
        return self.loss

    def _make_graph(self, batch: Batch) -> None:
        """Make the graph of a step, and rehearse: two steps with it must lead where two without it do."""
        now = torch.cuda.current_stream()
        state = [*self.model.parameters(), *(x for kept in self.optimiser.state.values() for x in kept.values())]
        before = [x.detach().clone() for x in state]
        batches = [tuple(x.clone() for x in self.inputs), batch]
        try:
            wanted = self._rehearse(self._step, batches, state, before)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.aside, capture_error_mode="thread_local"):
                self.loss = self._update(self.inputs)
            self.graph = graph
            got = self._rehearse(self._replay, batches, state, before)
            off = [float((a - b).norm() / b.norm()) for a, b in zip(got, wanted)]
            if not (off[0] < 0.01 and off[1] < 0.2):  # the gradients of a few weights are noise, and Adam makes it big
                raise RuntimeError(f"losses are off by {off[0]:.2g} of their size, changes of weights by {off[1]:.2g}")
        except Exception as problem:  # a stream that cannot be captured has many names
            torch.cuda.set_stream(now)  # which torch.cuda.graph does not do when a capture fails
            torch.cuda.synchronize()
            self._give_up("graph", problem)
            self._without_graph()
            self._restore(state, before)

    def _rehearse(
        self, step: Callable[[Batch], Tensor], batches: list[Batch], state: list[Tensor], before: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Losses and changes of weights by some steps, which are then undone."""
        losses = torch.stack([step(batch).clone() for batch in batches])
        moved = torch.cat([(x.detach() - y).flatten() for x, y in zip(state, before) if x.requires_grad])
        self._restore(state, before)
        return losses, moved

    @torch.no_grad()
    def _restore(self, state: list[Tensor], before: list[Tensor]) -> None:
        for x, kept in zip(state, before, strict=True):
            x.copy_(kept)

    def _without_compiling(self) -> None:
        self.compiled = False
        for block in self.model.gpt.layers():
            block._compiled_call_impl = None

    def _without_graph(self) -> None:
        if not self.graphed:
            return
        for group in self.optimiser.param_groups:
            group.update(lr=float(group["lr"]), capturable=False)
        self.optimiser.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        self.graph = self.loss = None
        self.graphed = False
        torch.cuda.empty_cache()  # a graph has memory of its own

    def _give_up(self, what: str, problem: BaseException) -> None:
        given_up.add((what, self.model.gpt.config))
        self.optimiser.zero_grad(set_to_none=True)
        cause = problem.__context__ or problem  # a failed capture also fails to end
        warnings.warn(f"training continues without {what}: {type(cause).__name__}: {cause}", stacklevel=2)
