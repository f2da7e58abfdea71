"""The Hopper kernels on a CPU: Gluon's language in terms of Triton's interpreter, and PTX in terms of numpy.

`install(monkeypatch)` imports `lssar.ops.fused.hopper` with the modules below in place of `triton.experimental.gluon`,
so that its kernels run in the interpreter, one program after the other and each operation on whole tiles.

Copies to shared memory and products of tensor cores take effect when they are waited for, and shared memory holds NaN
before. The order of operations on shared memory is checked as if every program had several warps (`Program`): what a
program reads has arrived, and what it overwrites is no longer read. Layouts are ignored; `test_hopper.py` compiles
the kernels, which checks these.
"""

from __future__ import annotations

import importlib
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, TensorHandle, interpreter_builder
from triton.runtime.jit import mangle_type

from lssar.ops import fused
from lssar.ops.fused import op, tiles
from tests.ops.ptx import inline_asm_elementwise

GLUON = "triton.experimental.gluon"
HOPPER = "lssar.ops.fused.hopper"
BITS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


class Fault(Exception):
    """What a kernel must not do; on a GPU it may go unnoticed for millions of rows."""


@dataclass(eq=False)
class Barrier:
    phase: int = 0
    arrived: bool = False
    bytes: int = 0

    def settle(self) -> None:
        if self.arrived and self.bytes == 0:
            self.phase, self.arrived = self.phase + 1, False


@dataclass(eq=False)
class Copy:
    """A tile on its way to shared memory; `of`: its barrier, or None for a copy by pointers."""

    to: np.ndarray
    values: Any
    of: Barrier | None


@dataclass(eq=False)
class Product:
    """A product of tensor cores; `value` is there after a wait."""

    left: Any
    right: Shared
    addend: Any
    value: tl.tensor | None = None

    def reads(self) -> list[np.ndarray]:
        return [x.array for x in (self.left, self.right) if isinstance(x, Shared)]


@dataclass
class Program:
    """What is under way in one program."""

    barriers: dict[int, Barrier] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    groups: list[list[Copy]] = field(default_factory=list)
    """Copies by pointers, committed; the last list is not committed yet."""
    products: list[Product] = field(default_factory=list)
    stores: list[tuple[np.ndarray, Any]] = field(default_factory=list)
    """Tiles on their way from shared memory, each with what stores it."""
    read: list[np.ndarray] = field(default_factory=list)
    """Read since the last barrier of the program: other warps may be reading it still."""
    written: list[np.ndarray] = field(default_factory=list)
    """Written by threads since then: other warps may not see it yet."""
    not_fenced: list[np.ndarray] = field(default_factory=list)
    """Written by threads and not yet visible to tensor cores and copies."""

    def check_read(self, array: np.ndarray, by_tensor_cores: bool) -> None:
        arriving = [*self.copies, *(copy for group in self.groups for copy in group)]
        if any(np.may_share_memory(array, copy.to) for copy in arriving):
            raise Fault("read before it has arrived")
        if any(np.may_share_memory(array, other) for other in self.written):
            raise Fault("read without a barrier after other warps wrote it")
        if by_tensor_cores and any(np.may_share_memory(array, other) for other in self.not_fenced):
            raise Fault("read by tensor cores without a fence after threads wrote it")

    def check_write(self, array: np.ndarray) -> None:
        busy = [*self.read, *self.written, *(x for product in self.products for x in product.reads())]
        busy += [copy.to for copy in [*self.copies, *(copy for group in self.groups for copy in group)]]
        busy += [array for array, _ in self.stores]
        if any(np.may_share_memory(array, other) for other in busy):
            raise Fault("overwritten while it may be in use")

    def check_end(self) -> None:
        if self.copies or any(self.groups) or self.products or self.stores:
            raise Fault("the program ended before all that it started")
        if self.barriers:
            raise Fault("the program ended without end_barriers")


PROGRAM = Program()


def start_program() -> None:
    global PROGRAM
    PROGRAM = Program()


def tensor(array: np.ndarray, dtype: tl.dtype) -> tl.tensor:
    return tl.tensor(TensorHandle(array, dtype), tl.block_type(dtype, list(array.shape)))


def bits(x: tl.tensor) -> np.ndarray:
    return x.handle.data.view(BITS[x.dtype.primitive_bitwidth])


class Shared:
    """A view of shared memory, as bits."""

    def __init__(self, array: np.ndarray, dtype: tl.dtype) -> None:
        self.array, self.dtype = array, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def index(self, i) -> Shared:
        return Shared(self.array[_in_range(i, self.shape[0])], self.dtype)

    def slice(self, start, length) -> Shared:
        start, length = _int(start), _int(length)
        _in_range(start + length - 1, self.shape[0])
        return Shared(self.array[start : start + length], self.dtype)

    def permute(self, order) -> Shared:
        return Shared(self.array.transpose(order), self.dtype)

    def reshape(self, shape) -> Shared:
        return Shared(self.array.reshape([_int(n) for n in shape]), self.dtype)

    def _value(self) -> tl.tensor:
        numbers = np.ascontiguousarray(self.array)
        return tensor(
            numbers.view({"fp32": np.float32, "fp16": np.float16}.get(self.dtype.name, numbers.dtype)), self.dtype
        )

    def load(self, layout) -> tl.tensor:
        PROGRAM.check_read(self.array, by_tensor_cores=False)
        PROGRAM.read.append(self.array)
        return self._value()

    def store(self, value: tl.tensor) -> None:
        PROGRAM.check_write(self.array)
        assert value.dtype == self.dtype, f"{value.dtype} stored as {self.dtype}"
        self.array[...] = bits(value)
        PROGRAM.written.append(self.array)
        PROGRAM.not_fenced.append(self.array)


def _int(x) -> int:
    return (
        int(x.value)
        if isinstance(x, tl.constexpr)
        else int(x.handle.data.item())
        if isinstance(x, tl.tensor)
        else int(x)
    )


def _in_range(i, n: int) -> int:
    i = _int(i)
    if not 0 <= i < n:
        raise Fault(f"index {i} of {n} in shared memory")
    return i


# Operations of triton.experimental.gluon.language


def allocate_shared_memory(dtype, shape, layout) -> Shared:
    array = np.empty([_int(n) for n in shape], BITS[dtype.primitive_bitwidth])
    array.view(np.uint8)[...] = 0xFF  # NaN in every type
    return Shared(array, dtype)


def barrier() -> None:
    PROGRAM.read.clear()
    PROGRAM.written.clear()


class Layout:
    """Any layout; `get_default_for` is NVMMASharedLayout's."""

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def get_default_for(cls, *_: Any) -> Layout:
        return cls()


LAYOUTS = (
    "BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout",
    "SwizzledSharedLayout",
)  # fmt: skip


class Language(types.ModuleType):
    """gluon.language: what is not defined here is Triton's own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)


def language() -> Language:
    made = Language(f"{GLUON}.language")
    made.arange = lambda start, stop, layout=None: tl.arange(start, stop)
    made.zeros = lambda shape, dtype, layout=None: tl.zeros(shape, dtype)
    made.convert_layout = lambda x, layout: x
    made.num_warps = lambda: 4
    made.allocate_shared_memory = allocate_shared_memory
    made.barrier = barrier
    for name in LAYOUTS:
        setattr(made, name, Layout)
    return made


# Operations of triton.experimental.gluon.language.nvidia.hopper


def _barrier_of(shared: Shared) -> Barrier:
    place = shared.array.__array_interface__["data"][0]
    if place not in PROGRAM.barriers:
        raise Fault("a barrier that is not initialised")
    return PROGRAM.barriers[place]


def barrier_init(shared: Shared, count: int) -> None:
    assert _int(count) == 1
    PROGRAM.barriers[shared.array.__array_interface__["data"][0]] = Barrier()
    PROGRAM.not_fenced.append(shared.array)


def barrier_invalidate(shared: Shared) -> None:
    _barrier_of(shared)
    del PROGRAM.barriers[shared.array.__array_interface__["data"][0]]


def barrier_expect(shared: Shared, bytes, pred=True) -> None:
    if not pred:
        return
    barrier = _barrier_of(shared)
    if barrier.arrived:
        raise Fault("a second tile is announced before the first was waited for")
    barrier.arrived, barrier.bytes = True, barrier.bytes + _int(bytes)
    barrier.settle()


def barrier_wait(shared: Shared, phase, pred=True) -> None:
    if not pred:
        return
    barrier = _barrier_of(shared)
    while barrier.phase % 2 == _int(phase):
        copy = next((copy for copy in PROGRAM.copies if copy.of is barrier), None)
        if copy is None:
            raise Fault("waits for a tile that was not asked for")
        PROGRAM.copies.remove(copy)
        copy.to[...] = bits(copy.values())
        barrier.bytes -= copy.to.nbytes
        barrier.settle()


class Tiles:
    """A descriptor of tiles [1, .., rows, columns], made by a program or by the host."""

    def __init__(self, base, shape, strides, block_shape, layout) -> None:
        self.base, self.shape, self.block_shape = base, [_int(n) for n in shape], [_int(n) for n in block_shape]
        self.strides = [_int(n) for n in strides]
        address = base.data_ptr() if isinstance(base, torch.Tensor) else _int(base)
        size = base.element_size() if isinstance(base, torch.Tensor) else base.dtype.element_ty.primitive_bitwidth // 8
        if address % 16 or any(stride * size % 16 for stride in self.strides[:-1]) or self.strides[-1] != 1:
            raise Fault("the tensor memory accelerator cannot take this start or these strides")
        self.block_type = types.SimpleNamespace(nbytes=int(np.prod(self.block_shape)) * size)

    @property
    def pointer(self) -> tl.tensor:
        if isinstance(self.base, tl.tensor):
            return self.base
        element = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[self.base.dtype]
        handle = TensorHandle(np.array([self.base.data_ptr()], np.uint64), tl.pointer_type(element))
        return tl.tensor(handle, tl.pointer_type(element))

    def values(self, start: list[int]) -> tl.tensor:
        """The tile from there on, zeros outside the tensor."""
        pointers, inside = self.places(start)
        return tl.load(pointers, mask=inside, other=0.0)

    def store(self, start: list[int], value: tl.tensor) -> None:
        """What lies outside the tensor is left out."""
        pointers, inside = self.places(start)
        tl.store(pointers, value, mask=inside)

    def places(self, start: list[int]) -> tuple[tl.tensor, tl.tensor]:
        offset, inside = np.zeros(self.block_shape, np.int64), np.ones(self.block_shape, bool)
        for axis, (first, n, stride) in enumerate(zip(start, self.shape, self.strides)):
            shape = [1] * len(self.shape)
            shape[axis] = -1
            at = (first + np.arange(self.block_shape[axis])).reshape(shape)
            offset, inside = offset + at * stride, inside & (at >= 0) & (at < n)
        return self.pointer + tensor(offset, tl.int64), tensor(inside, tl.int1)


def tile_load(tiles: Tiles, start, barrier: Shared, to: Shared, pred=True) -> None:
    if not pred:
        return
    PROGRAM.check_write(to.array)
    if to.array.nbytes != tiles.block_type.nbytes:
        raise Fault(f"a tile of {tiles.block_type.nbytes} bytes in a place for {to.array.nbytes}")
    if any(np.may_share_memory(barrier.array, other) for other in PROGRAM.not_fenced):
        raise Fault("a copy without a fence after its barrier was initialised")
    if any(np.may_share_memory(to.array, other) for other in PROGRAM.not_fenced):
        raise Fault("a copy without a fence to where threads wrote")
    start = [_int(i) for i in start]
    PROGRAM.copies.append(Copy(to.array, lambda: tiles.values(start), _barrier_of(barrier)))


def tile_store(tiles: Tiles, start, source: Shared) -> None:
    PROGRAM.check_read(source.array, by_tensor_cores=True)
    if source.array.nbytes != tiles.block_type.nbytes:
        raise Fault(f"a tile of {tiles.block_type.nbytes} bytes from {source.array.nbytes}")
    start = [_int(i) for i in start]
    PROGRAM.stores.append((source.array, lambda: tiles.store(start, source._value())))


def tile_store_wait(pending) -> None:
    """Wait until the tiles have been read; the threads that started the stores wait, so a barrier has to follow."""
    assert _int(pending) == 0
    for array, store in PROGRAM.stores:
        store()
        PROGRAM.read.append(array)
    PROGRAM.stores.clear()


def pointer_load(to: Shared, pointers: tl.tensor) -> None:
    PROGRAM.check_write(to.array)
    if not PROGRAM.groups:
        PROGRAM.groups.append([])
    PROGRAM.groups[-1].append(Copy(to.array, lambda: tl.load(pointers), None))


def commit_group() -> None:
    PROGRAM.groups.append([])


def wait_group(pending) -> None:
    """Wait for all committed groups but the last `pending`."""
    done, PROGRAM.groups = PROGRAM.groups[: -1 - _int(pending)], PROGRAM.groups[-1 - _int(pending) :]
    for copy in (copy for group in done for copy in group):
        copy.to[...] = bits(copy.values())
        PROGRAM.written.append(copy.to)  # each warp has waited for its own part


def fence_async_shared() -> None:
    PROGRAM.not_fenced.clear()


def warpgroup_mma(left, right: Shared, addend, use_acc=True, is_async=False) -> Product:
    assert is_async, "all products of these kernels are asynchronous"
    product = Product(left, right, addend if use_acc else None)
    for array in product.reads():
        PROGRAM.check_read(array, by_tensor_cores=True)
    PROGRAM.products.append(product)
    return product


def warpgroup_mma_wait(pending, deps) -> Any:
    assert _int(pending) == 0
    for product in PROGRAM.products:
        if isinstance(product.left, tl.tensor) and not any(x is product.left for x in deps):
            raise Fault("the registers of a factor may be used for something else before the product is done")
        left, right = (x._value() if isinstance(x, Shared) else x for x in (product.left, product.right))
        addend = product.addend.value if isinstance(product.addend, Product) else product.addend
        with np.errstate(all="ignore"):
            value = np.matmul(left.to(tl.float32).handle.data, right.to(tl.float32).handle.data)
            product.value = tensor(value if addend is None else value + addend.handle.data, tl.float32)
        PROGRAM.read.extend(product.reads())
    PROGRAM.products.clear()
    done = tuple(x.value if isinstance(x, Product) else x for x in deps)
    return done[0] if len(done) == 1 else done


def hopper_language() -> types.ModuleType:
    made = types.ModuleType(f"{GLUON}.language.nvidia.hopper")
    made.mbarrier = types.SimpleNamespace(
        MBarrierLayout=Layout, init=barrier_init, invalidate=barrier_invalidate, expect=barrier_expect,
        wait=barrier_wait,
    )  # fmt: skip
    made.tma = types.SimpleNamespace(
        async_load=tile_load, async_store=tile_store, store_wait=tile_store_wait, make_tensor_descriptor=Tiles
    )
    made.async_copy = types.SimpleNamespace(async_load=pointer_load, commit_group=commit_group, wait_group=wait_group)
    made.fence_async_shared = fence_async_shared
    made.warpgroup_mma, made.warpgroup_mma_wait = warpgroup_mma, warpgroup_mma_wait
    made.warpgroup_mma_init = lambda x: x
    return made


def jit(fn=None, **options):
    return Kernel if fn is None else InterpretedFunction(fn)


class Kernel(InterpretedFunction):
    """A kernel whose programs each start with nothing under way, and are checked when they end."""

    def rewrite(self):
        function = super().rewrite()  # its annotations are text, of which the interpreter knows `tl.constexpr` only
        function.__annotations__ = {name: kind.removeprefix("gl.") for name, kind in function.__annotations__.items()}
        return function

    def run(self, *args, **options):
        set_place = interpreter_builder.set_grid_idx

        def begin(*place) -> None:
            PROGRAM.check_end()
            start_program()
            set_place(*place)

        start_program()
        interpreter_builder.set_grid_idx = begin
        try:
            super().run(*args, **options)
            PROGRAM.check_end()
        finally:
            interpreter_builder.set_grid_idx = set_place


def modules() -> dict[str, types.ModuleType]:
    """What takes the place of Gluon."""
    gluon = types.ModuleType(GLUON)
    gluon.jit, gluon.language = jit, language()
    nvidia = types.ModuleType(f"{GLUON}.language.nvidia")
    return {module.__name__: module for module in (gluon, gluon.language, nvidia, hopper_language())}


def install(monkeypatch) -> None:
    """Make fused attention run the Hopper kernels on the CPU until monkeypatch is undone.

    Inline assembly runs too, in place of what the interpreter takes for it elsewhere.
    """
    from triton.experimental.gluon.nvidia import hopper as descriptors

    mangle_type(0)  # Triton looks up the classes of descriptors once, and must find its own
    monkeypatch.setattr(descriptors, "TensorDescriptor", Tiles)
    for name in [name for name in sys.modules if name.startswith(HOPPER)]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.import_module("triton.experimental"), "gluon", sys.modules[GLUON], raising=False)
    hopper = importlib.import_module(HOPPER)
    monkeypatch.setattr(fused, "hopper", hopper, raising=False)
    for name in (
        "memory", "forward", "quarters", "key_gradient", "query_gradient", "window_forward", "window_key_gradient",
        "window_query_gradient",
    ):  # fmt: skip
        module = sys.modules[f"{HOPPER}.{name}"]
        module.triton_language = tl  # the interpreter looks for it among the globals of a kernel
    sys.modules[f"{HOPPER}.memory"].tl = types.SimpleNamespace(tuple=tuple)
    for name, module in list(sys.modules.items()):
        if name.startswith("lssar.ops.fused") and hasattr(module, "USE_PTX"):
            monkeypatch.setattr(module, "USE_PTX", tl.constexpr(True))
    monkeypatch.setattr(tl, "inline_asm_elementwise", inline_asm_elementwise)
    monkeypatch.setattr(tl.dtype, "layout", None, raising=False)
    monkeypatch.setattr(op, "hopper_kernels", lambda d, part: hopper if d in (64, 128) else None)
    for key, tile in tiles.HOPPER.items():
        if key[0].endswith("_hopper"):
            monkeypatch.setitem(tiles.CHOSEN, key, tile)
