# mypy: ignore-errors
"""Rings of tiles in shared memory with their barriers, and loads and stores of rows in device memory."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from lssar.ops.fused.primitives import saturate

# These names changed after Triton 3.6.
tile_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tile_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
tile_store_wait = tma.store_wait
pointer_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
program_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def tile_ring(dtype: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr):
    """Shared memory for STAGES tiles [ROWS, D]."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    return gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], layout)


@gluon.jit
def tile_barriers(STAGES: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), count=1)
    fence_async_shared()  # the copies that arrive at a barrier must not come before its start
    return barriers


@gluon.jit
def end_barriers(barriers):
    """End the use of barriers; the last thing that a kernel does.

    Without it the compiler takes a barrier for dead after its last wait and puts the exchange of a layout conversion in
    its place. The hardware still writes there, and now and then a row became NaN.
    """
    STAGES: gl.constexpr = barriers.shape[0]
    program_barrier()
    for stage in gl.static_range(STAGES):
        mbarrier.invalidate(barriers.index(stage))


@gluon.jit
def tile_descriptor(ptr, length, stride, ROWS: gl.constexpr, D: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], ptr.dtype.element_ty)
    return tma.make_tensor_descriptor(
        ptr, [gl.maximum(length, 1), D], [gl.cast(stride, gl.int64), 1], [ROWS, D], layout
    )


@gluon.jit
def announce(tiles, barriers, stage, wanted):
    """Make the stage's barrier expect a tile. Apart from load_tile, so that a program barrier can come between the two.

    It may be called as soon as the stage's last tile has arrived: the new phase ends only when the new tile does.
    """
    if isinstance(tiles, tl.tuple):
        mbarrier.expect(barriers.index(stage), tiles[0].block_type.nbytes, pred=wanted)
    else:
        mbarrier.expect(barriers.index(stage), tiles.block_type.nbytes, pred=wanted)


@gluon.jit
def fetch_tiles(tiles, ring, FIRST: gl.constexpr, COUNT: gl.constexpr, barrier, row):
    """Start loading COUNT tiles from row on into the stages FIRST.. of the ring; one barrier waits for all.

    tiles: a descriptor that the host made, with the batch and the head.
    """
    ROWS: gl.constexpr = ring.shape[1]
    D: gl.constexpr = ring.shape[2]
    mbarrier.expect(barrier, COUNT * tiles[0].block_type.nbytes)
    for i in gl.static_range(COUNT):
        tile = ring.index(FIRST + i).reshape([1, 1, ROWS, D])
        tile_load(tiles[0], [tiles[1], tiles[2], row + i * ROWS, 0], barrier, tile)


@gluon.jit
def fetch_tile(tiles, tile, barrier, row):
    """Start loading rows from row on into a tile of shared memory; the caller makes the barrier expect its bytes.

    tiles: a descriptor that the host made, with the batch and the head.
    """
    ROWS: gl.constexpr = tile.shape[0]
    D: gl.constexpr = tile.shape[1]
    tile_load(tiles[0], [tiles[1], tiles[2], row, 0], barrier, tile.reshape([1, 1, ROWS, D]))


@gluon.jit
def write_tile(tiles, tile, value, row):
    """Start storing value [ROWS, D] as rows from row on, by way of a tile of shared memory; rows past the last are left
    out. The tile may be used again after tile_store_wait and a barrier. tiles: as for fetch_tile."""
    ROWS: gl.constexpr = tile.shape[0]
    D: gl.constexpr = tile.shape[1]
    tile.store(value)
    fence_async_shared()
    program_barrier()
    tile_store(tiles[0], [tiles[1], tiles[2], row, 0], tile.reshape([1, 1, ROWS, D]))


@gluon.jit
def load_tile(tiles, ring, barriers, row, stage, wanted):
    """tiles: a descriptor of one head's rows (tile_descriptor), or one of all heads that the host made, with the batch
    and the head: (descriptor, b, h)."""
    if isinstance(tiles, tl.tuple):
        ROWS: gl.constexpr = ring.shape[1]
        D: gl.constexpr = ring.shape[2]
        tile = ring.index(stage).reshape([1, 1, ROWS, D])
        tile_load(tiles[0], [tiles[1], tiles[2], row, 0], barriers.index(stage), tile, pred=wanted)
    else:
        tile_load(tiles, [row, 0], barriers.index(stage), ring.index(stage), pred=wanted)


@gluon.jit
def announce_pair(a, b, barriers, stage, wanted):
    if isinstance(a, tl.tuple):
        bytes: gl.constexpr = a[0].block_type.nbytes + b[0].block_type.nbytes
    else:
        bytes: gl.constexpr = a.block_type.nbytes + b.block_type.nbytes
    mbarrier.expect(barriers.index(stage), bytes, pred=wanted)


@gluon.jit
def load_pair(a, a_ring, b, b_ring, barriers, row, stage, wanted):
    load_tile(a, a_ring, barriers, row, stage, wanted)
    load_tile(b, b_ring, barriers, row, stage, wanted)


@gluon.jit
def fetch_pair(a, a_ring, b, b_ring, barriers, start, stage, pred):
    """Start loading the tiles of a and b from row start on; one barrier waits for both."""
    announce_pair(a, b, barriers, stage, pred)
    load_pair(a, a_ring, b, b_ring, barriers, start, stage, pred)


@gluon.jit
def load_rows(ptr, start, stop, stride, layout: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr):
    """[ROWS, D] in registers, zeros past stop."""
    rows = start + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, D, gl.SliceLayout(0, layout))
    pointers = ptr + rows.to(gl.int64)[:, None] * stride + columns[None, :]
    return gl.load(pointers, mask=(rows < stop)[:, None], other=0.0)


@gluon.jit
def store_rows(ptr, value, start, stop, stride, layout: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr):
    rows = start + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, D, gl.SliceLayout(0, layout))
    pointers = ptr + rows.to(gl.int64)[:, None] * stride + columns[None, :]
    if ptr.dtype.element_ty == gl.float16:  # whose range a gradient may leave
        value = saturate(value, ptr.dtype.element_ty)
    gl.store(pointers, value.to(ptr.dtype.element_ty), mask=(rows < stop)[:, None])
