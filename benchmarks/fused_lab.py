"""Check, then time, tile shapes of the fused kernels on one GPU, beside cuDNN softmax in the same process.

    PYTHONPATH=src python benchmarks/fused_lab.py check
    PYTHONPATH=src python benchmarks/fused_lab.py sweep forward 64x64x16384 128,64,8,3,128,3 64,64,4,3
    PYTHONPATH=src python benchmarks/fused_lab.py ratios

A shape is headsize x heads x length; a tile is m,n,warps,stages[,n1,stages1[,registers]]. Every tile is checked against
a float64 reference before it is timed; a wrong one prints its error and no time.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = ("forward", "query_gradient", "key_gradient")


def inputs(d, heads, length, dtype=torch.bfloat16, batch=1, kv_heads=None, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    make = lambda h: torch.randn(batch, h, length, d, device="cuda", generator=generator).to(dtype)  # noqa: E731
    return make(heads), make(kv_heads or heads), make(kv_heads or heads), make(heads)


def dense(q, k, v, p=15.0, uniform=True):
    """Float64 causal LSSAR (p None: LSSA) by the formula; differentiable."""
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    length, d = q.shape[-2:]
    n = torch.arange(1, length + 1, device=q.device, dtype=q.dtype)[:, None]
    s = (q @ k.mT) * n.log() * torch.log(torch.tensor(float(d)))
    seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    a = torch.where(seen, F.softplus(s, threshold=60), 0)
    if p is not None:
        tau = torch.where(n > 3, a.sum(-1, keepdim=True) / n, 0)
        z = F.relu(a - tau)
        z = z / z.amax(-1, keepdim=True).detach().clamp_min(1e-30)
        a = torch.where(seen, z**p, 0)
    return (a / a.sum(-1, keepdim=True)) @ v


def error(x, ref):
    return ((x.double() - ref).norm() / ref.norm()).item()


def errors(d, length=700, heads=2, p=15.0, dtype=torch.bfloat16):
    """Relative errors of o, dq, dk, dv of the fused kernels, and of the same formula in the inputs' own precision."""
    from lssar.ops.fused import fused_attention

    q, k, v, do = inputs(d, heads, length, dtype)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    ref = dense(*exact, p)
    ref.backward(do.double())
    mine = [x.clone().requires_grad_() for x in (q, k, v)]
    o = fused_attention(*mine, p=p, causal=True)
    o.backward(do)
    same = [x.clone().requires_grad_() for x in (q, k, v)]
    eager = dense(*same, p)
    eager.backward(do)
    pairs = lambda out, xs: [error(out, ref)] + [error(x.grad, e.grad) for x, e in zip(xs, exact)]  # noqa: E731
    return pairs(o, mine), pairs(eager, same)


def parse_tile(text):
    from lssar.ops.fused.tiles import Tile

    values = [int(x) for x in text.split(",")] + [0, 0, 0]
    m, n, warps, stages, n1, stages1, registers = values[:7]
    return Tile(m, n, warps, stages, n1, stages1, registers or None)


def choose(kernel, d, text, itemsize=2):
    from lssar.ops.fused import tiles

    tiles.CHOSEN.clear()
    if text:
        tiles.CHOSEN[(kernel, max(64, 1 << (d - 1).bit_length()), itemsize)] = parse_tile(text)
    return tiles


def _compile(job):
    kernel, d, text = job
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    started = time.time()
    choose(kernel, d, text)
    from lssar.ops.fused.op import _backward, _forward

    q, k, v, do = inputs(d, 2, 256)
    try:
        o, rows = _forward(q, k, v, 15.0, True, None, None, None)
        if kernel != "forward":
            _backward(q, k, v, o, do, rows, 15.0, True, None, None, None)
        torch.cuda.synchronize()
    except Exception as problem:
        return f"{job}: {type(problem).__name__} {str(problem)[:200]}"
    return f"{time.time() - started:.0f}s"


def precompile(jobs, workers=14):
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers) as pool:
        done = pool.map(_compile, jobs, chunksize=1)
    print("compiled:", " ".join(done), flush=True)


def bench(f, ms=60):
    from triton.testing import do_bench

    return do_bench(f, warmup=15, rep=ms, return_mode="median")


def softmax_times(q, k, v, do):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        x = [t.clone().requires_grad_() for t in (q, k, v)]
        forward = bench(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))

        def both():
            for t in x:
                t.grad = None
            F.scaled_dot_product_attention(*x, is_causal=True).backward(do)

        return forward, bench(both)


def sweep(jobs):
    """jobs: (kernel, 'dxheadsxlength', [tile, ...])."""
    parsed = [(kernel, tuple(int(x) for x in shape.split("x")), tile_list) for kernel, shape, tile_list in jobs]
    precompile(sorted({(kernel, shape[0], t) for kernel, shape, tile_list in parsed for t in tile_list}))
    from lssar.ops.fused.op import _backward, _forward

    for kernel, (d, heads, length), tile_list in parsed:
        q, k, v, do = inputs(d, heads, length)
        softmax_forward, softmax_both = softmax_times(q, k, v, do)
        print(f"\n{kernel} d {d} heads {heads} length {length}: cuDNN forward {softmax_forward:.3f} both {softmax_both:.3f}")
        results = []
        for text in tile_list:
            tiles = choose(kernel, d, text)
            want = tiles.tile_for(kernel, d, 2)
            try:
                mine, _ = errors(d)
                if tiles.tile_for(kernel, d, 2) != want:
                    print(f"  {text}: does not fit")
                    continue
                if not max(mine) < 0.03:
                    print(f"  {text}: WRONG {mine}")
                    continue
                o, rows = _forward(q, k, v, 15.0, True, None, None, None)
                if kernel == "forward":
                    run = lambda: _forward(q, k, v, 15.0, True, None, None, None)  # noqa: E731
                else:
                    run = lambda: _backward(q, k, v, o, do, rows, 15.0, True, None, None, None)  # noqa: E731
                ms = bench(run)
            except Exception as problem:
                print(f"  {text}: {type(problem).__name__} {str(problem)[:150]}")
                continue
            base = softmax_forward if kernel == "forward" else softmax_both - softmax_forward
            results.append((ms, f"  {text or 'table':24s} {ms:.3f} ms  {ms / base:.2f}x of cuDNN's part"))
        print("\n".join(line for _, line in sorted(results)), flush=True)


def ratios(shapes=("64x64x16384", "128x32x16384", "64x16x8192", "128x16x8192", "64x64x8192", "128x32x8192")):
    from lssar.ops.fused import fused_attention

    choose(None, 0, "")
    for shape in shapes:
        d, heads, length = (int(x) for x in shape.split("x"))
        q, k, v, do = inputs(d, heads, length)
        softmax_forward, softmax_both = softmax_times(q, k, v, do)
        x = [t.clone().requires_grad_() for t in (q, k, v)]

        def both(x=x, do=do):
            for t in x:
                t.grad = None
            fused_attention(*x, p=15.0, causal=True).backward(do)

        forward = bench(lambda: fused_attention(q, k, v, p=15.0, causal=True))  # noqa: B023
        total = bench(both)
        print(
            f"{shape}: forward {forward:.3f} / {softmax_forward:.3f} = {forward / softmax_forward:.2f}x   "
            f"both {total:.3f} / {softmax_both:.3f} = {total / softmax_both:.2f}x",
            flush=True,
        )


def check():
    for d, dtype, p in ((64, torch.bfloat16, 15.0), (128, torch.bfloat16, 15.0), (80, torch.float16, 3.0),
                        (64, torch.float32, 15.0), (64, torch.bfloat16, None), (128, torch.bfloat16, 1.5)):  # fmt: skip
        mine, eager = errors(d, p=p, dtype=dtype)
        show = lambda e: " ".join(f"{x:.1e}" for x in e)  # noqa: E731
        bad = "" if all(a <= 2 * b for a, b in zip(mine, eager)) else "   MORE THAN TWICE EAGER"
        print(f"d {d} {dtype} p {p}: fused {show(mine)}  eager {show(eager)}{bad}", flush=True)


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "check":
        check()
    elif command == "ratios":
        ratios(rest) if rest else ratios()
    else:  # sweep kernel shape tile ... / kernel shape tile ...
        jobs, current = [], []
        for word in [*rest, "/"]:
            if word == "/":
                jobs.append((current[0], current[1], [*current[2:]] or [""]))
                current = []
            else:
                current.append(word)
        sweep(jobs)
