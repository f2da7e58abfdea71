"""Time the windowed kernels one by one, tile by tile, beside FlexAttention's sliding window, on one GPU.

    PYTHONPATH=src python benchmarks/window_lab.py 128x8x8x8192@128 128x8x8x8192@512
    PYTHONPATH=src python benchmarks/window_lab.py 64x8x16x8192@128 --kinds lssar --parts key_gradient --tiles 64,64,4,2 64,128,8,2

A shape is headsize x batch x heads x length @ window; a tile is m,n,warps,stages[,registers[,tma]]. All tiles
compile in parallel first. A tile whose results differ from the first one's prints the difference and no time. Without
--tiles every kernel tries those of CANDIDATES that fit. "gluon": with the kernels for Hopper, as far as there are any.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from typing import Any

import torch

SPECS = {"softmax": "softmax", "cosine": "cosine_softmax", "lssar": "lssar"}
PARTS = ("forward", "query_gradient", "key_gradient")
CANDIDATES: dict[str, tuple[str, ...]] = {
    "forward": ("64,32,4,3,168,1", "64,32,4,3,0,1", "64,64,4,2,0,1", "128,64,8,2,0,1"),
    "query_gradient": ("64,32,4,3", "64,32,4,3,0,1", "64,64,4,2,0,1"),
    "key_gradient": ("64,64,4,2,0,1", "64,64,8,2", "64,128,8,2,0,1"),
}


def parse_shape(text: str) -> tuple[int, ...]:
    sizes, _, window = text.partition("@")
    return (*map(int, sizes.split("x")), int(window))


def inputs(d: int, batch: int, heads: int, length: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, heads, length, d)
    return [torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16) for _ in range(4)]


def call(
    kind: str, tensors: list[torch.Tensor], window: int, tile: tuple[str, str] | None, gluon: bool = False
) -> tuple[list, list]:  # fmt: skip
    """Results (o, dq, dk, dv) and launches (kernel, grid, arguments, constants) with the tile of one kernel changed."""
    import lssar
    from lssar.ops.fused import op, tiles, window_op
    from lssar.ops.fused.launch import start_kernel

    q, k, v, do = tensors
    spec = lssar.spec(SPECS[kind]).literal
    launches: list[tuple[Any, ...]] = []

    def record(kernel: Any, grid: Any, arguments: Any, constants: Any) -> None:
        launches.append((kernel, grid, arguments, constants))
        start_kernel(kernel, grid, arguments, constants)

    tiles.CHOSEN.clear()
    found = op.hopper_kernels = getattr(op.hopper_kernels, "found", op.hopper_kernels)
    if not gluon:
        op.hopper_kernels = lambda *_: None
        op.hopper_kernels.found = found
    if tile is not None:
        part, text = tile
        m, n, warps, stages, registers, tma = ([int(x) for x in text.split(",")] + [0, 0])[:6]
        name = {"softmax": "softmax", "cosine": "cosine", "lssar": "softplus"}[kind]
        name = f"window_{part}_{name}" + ("_long" if window > tiles.LONG_WINDOW else "")
        made = tiles.Tile(m, n, warps, stages, registers=registers or None, tma=bool(tma))
        tiles.CHOSEN[tiles.key_of(name, q.shape[-1], 2)] = made
    window_op.start_kernel = record
    options = (None, None, spec, True, None, None, window)
    o, rows, scale = window_op._forward(q, k, v, *options)
    grads = window_op._backward(q, k, v, o, do, rows, scale, *options)
    window_op.start_kernel = start_kernel
    if tile is not None and tiles.CHOSEN[tiles.key_of(name, q.shape[-1], 2)] != made:
        raise MemoryError("too large")
    return [o, *grads[:3]], launches


def compile_one(job: tuple[Any, ...]) -> str:
    kind, d, heads, window, tile, gluon = job
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        call(kind, inputs(d, 2, heads, 256), window, tile, gluon)
        torch.cuda.synchronize()
    except Exception as problem:
        return f"{job}: {type(problem).__name__} {str(problem)[:100]}"
    return ""


def flex(job: tuple[int, ...]) -> str:
    """Forward and forward + backward of FlexAttention, ms; a process of its own also to fill the compiler's cache."""
    from triton.testing import do_bench

    from lssar.benchmark.contestants import Case, build

    d, batch, heads, length, window = job
    case = Case(batch, heads, heads, length, d, "bfloat16", "cuda", window=window)
    function, _ = build("flex:softmax", case)
    q, k, v, do = (x.requires_grad_() for x in inputs(d, batch, heads, length))

    def both() -> None:
        torch.autograd.grad(function(q, k, v), (q, k, v), do)

    def forward() -> None:
        with torch.no_grad():
            function(q, k, v)

    both()
    forward()
    with LOCK:
        times = [do_bench(f, warmup=10, rep=60, return_mode="median") for f in (forward, both)]
    return f"flex {job}: forward {times[0]:.3f} both {times[1]:.3f}"


LOCK: Any = None


def _share(lock: Any) -> None:
    global LOCK
    LOCK = lock


def sweep(kind: str, shape: tuple[int, ...], parts: list[str], given: list[str] | None, out: list[dict]) -> None:
    from triton.testing import do_bench

    from lssar.ops.fused.launch import start_kernel

    d, batch, heads, length, window = shape
    tensors = inputs(d, batch, heads, length)
    expected, _ = call(kind, tensors, window, None)
    for name in ("triton", "gluon"):
        found, launches = call(kind, tensors, window, None, name == "gluon")
        off = [float((a - b).float().norm() / b.float().norm()) for a, b in zip(found, expected)]
        now = [do_bench(lambda x=x: start_kernel(*x), warmup=5, rep=25, return_mode="median") for x in launches]
        line = " ".join(f"{x[0].fn.__name__.removesuffix('_kernel')} {t:.3f}" for x, t in zip(launches, now))
        print(f"{kind} {shape} {name}: {line} sum {sum(now):.3f}", f"differs by {max(off):.1e}", flush=True)
        out.append({"kind": kind, "shape": shape, "part": name, "ms": round(sum(now), 4)})
    for part in parts:
        line = []
        for text in given or CANDIDATES[part]:
            try:
                found, launches = call(kind, tensors, window, (part, text))
            except Exception as problem:
                line.append(f"{text} {type(problem).__name__}")
                continue
            off = max(float((a - b).float().norm() / b.float().norm()) for a, b in zip(found, expected))
            if not off < 2e-2:
                line.append(f"{text} WRONG by {off:.1g}")
                continue
            launch = launches[len(launches) - len(PARTS) + PARTS.index(part)]
            ms = do_bench(lambda x=launch: start_kernel(*x), warmup=5, rep=25, return_mode="median")
            line.append(f"{text} {ms:.3f}")
            out.append({"kind": kind, "shape": shape, "part": part, "tile": text, "ms": round(ms, 4)})
        print(f"  {part}: " + " | ".join(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", type=parse_shape)
    parser.add_argument("--kinds", nargs="+", default=list(SPECS), choices=list(SPECS))
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--tiles", nargs="+")
    parser.add_argument("--no-flex", action="store_true")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--compiled", action="store_true", help="skip compiling: Triton's cache has all tiles")
    parser.add_argument("--out", help="JSON file")
    options = parser.parse_args()
    jobs: set[tuple[Any, ...]] = {
        (kind, shape[0], shape[2], shape[-1], None, gluon)
        for kind in options.kinds
        for shape in options.shapes
        for gluon in (False, True)
    }
    jobs |= {
        (kind, shape[0], shape[2], shape[-1], (part, text), False)
        for kind in options.kinds
        for shape in options.shapes
        for part in options.parts
        for text in options.tiles or CANDIDATES[part]
    }
    context = multiprocessing.get_context("spawn")
    if not options.compiled:
        with context.Pool(14, _share, (context.Lock(),)) as pool:
            peers = [] if options.no_flex else [pool.apply_async(flex, (shape,)) for shape in options.shapes]
            print(*filter(None, pool.map(compile_one, sorted(jobs, key=str), chunksize=1)), sep="\n", flush=True)
            for peer in peers:
                print(peer.get(), flush=True)
    out: list[dict] = []
    for shape in () if options.compile_only else options.shapes:
        for kind in options.kinds:
            sweep(kind, shape, options.parts, options.tiles, out)
    if options.out:
        with open(options.out, "w") as file:
            json.dump(out, file)


if __name__ == "__main__":
    main()
