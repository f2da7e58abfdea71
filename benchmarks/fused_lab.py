"""Check, then time, tile shapes of the fused kernels on one GPU, beside cuDNN softmax in the same process.

    PYTHONPATH=src python benchmarks/fused_lab.py check
    PYTHONPATH=src python benchmarks/fused_lab.py sweep forward 64x64x16384 128,64,8,3,128,3 64,64,4,3
    PYTHONPATH=src python benchmarks/fused_lab.py ratios
    PYTHONPATH=src python benchmarks/fused_lab.py parts 64x256x1024
    PYTHONPATH=src python benchmarks/fused_lab.py schedule
    PYTHONPATH=src python benchmarks/fused_lab.py turns 128x16x8192 1 2 4 16

A shape is headsize x heads x length; a tile is m,n,warps,stages[,n1,stages1[,registers[,tma]]]. Every tile is checked
against a float64 reference before it is timed; a wrong one prints its error and no time.
"""

from __future__ import annotations

import heapq
import multiprocessing
import os
import statistics
import sys
import time
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = ("forward", "query_gradient", "key_gradient")


def inputs(d, heads, length, dtype=torch.bfloat16, batch=1, kv_heads=None, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    make = lambda h: torch.randn(batch, h, length, d, device="cuda", generator=generator).to(dtype)  # noqa: E731
    return make(heads), make(kv_heads or heads), make(kv_heads or heads), make(heads)


def dense(q, k, v, p=15.0):
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

    values = [int(x) for x in text.split(",")] + [0, 0, 0, 0]
    m, n, warps, stages, n1, stages1, registers, tma = values[:8]
    return Tile(m, n, warps, stages, n1, stages1, registers or None, bool(tma))


def choose(kernel, d, text, itemsize=2):
    from lssar.ops.fused import tiles

    tiles.CHOSEN.clear()
    if text:
        tiles.CHOSEN[tiles.key_of(kernel, d, itemsize)] = parse_tile(text)
    return tiles


def _compile(job):
    kernel, d, text = job
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    started = time.time()
    choose(kernel, d, text)
    from lssar.ops.fused.op import run_backward, run_forward
    from lssar.ops.fused.tune import OPTIONS

    q, k, v, do = inputs(d, 2, 256)
    try:
        o, rows = run_forward(q, k, v, *OPTIONS)
        if not kernel.startswith("forward"):
            run_backward(q, k, v, o, do, rows, *OPTIONS)
        torch.cuda.synchronize()
    except Exception as problem:
        return f"{job}: {type(problem).__name__} {str(problem)[:200]}"
    return f"{time.time() - started:.0f}s"


def precompile(jobs, workers=14):
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers) as pool:
        done = pool.map(_compile, jobs, chunksize=1)
    print("compiled:", " ".join(done), flush=True)


def peak(f):
    f()
    torch.cuda.reset_peak_memory_stats()
    f()
    return torch.cuda.max_memory_allocated()


def bench(f, ms=60):
    from triton.testing import do_bench

    return do_bench(f, warmup=15, rep=ms, return_mode="median")


def versus(ours, theirs, rounds=5):
    """Medians of both, taken in turns: what runs first on a cool card would look faster."""
    times = [(bench(ours, 30), bench(theirs, 30)) for _ in range(rounds)]
    return [sorted(column)[rounds // 2] for column in zip(*times)]


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
    from lssar.ops.fused.tune import record

    best = {}
    for kernel, (d, heads, length), tile_list in parsed:
        q, k, v, do = inputs(d, heads, length)
        softmax_forward, softmax_both = softmax_times(q, k, v, do)
        print(
            f"\n{kernel} d {d} heads {heads} length {length}: "
            f"cuDNN forward {softmax_forward:.3f} both {softmax_both:.3f}"
        )
        results = []
        for text in tile_list:
            tiles = choose(kernel, d, text)
            want = tiles.tile_for(kernel, d, 2)
            try:
                mine, _ = errors(d, length=333)
                if tiles.tile_for(kernel, d, 2) != want:
                    print(f"  {text}: does not fit")
                    continue
                if not max(mine) < 0.03:
                    print(f"  {text}: WRONG {mine}")
                    continue
                launches = record(q, k, v, do)
                ms = bench(lambda: launches[kernel]())  # noqa: B023
            except Exception as problem:
                print(f"  {text}: {type(problem).__name__} {str(problem)[:150]}")
                continue
            base = softmax_forward if kernel.startswith("forward") else softmax_both - softmax_forward
            results.append((ms, f"  {text or 'table':24s} {ms:.3f} ms  {ms / base:.2f}x of cuDNN's part"))
        print("\n".join(line for _, line in sorted(results)), flush=True)
        if results:
            best[tiles.key_of(kernel, d, 2)] = parse_tile(min(results)[1].split()[0])
    return best


SHAPES = ("128x16x8192", "64x16x8192", "64x64x16384", "128x32x16384", "64x64x8192", "128x32x8192", "64x256x1024")


def ratios(shapes=SHAPES, chosen=None):
    """Forward, and forward with backward, against cuDNN softmax; peak memory of the latter."""
    from lssar.ops.fused import fused_attention

    choose(None, 0, "").CHOSEN.update(chosen or {})

    def softmax(*x):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*x, is_causal=True)

    for shape in shapes:
        d, heads, length = (int(x) for x in shape.split("x"))
        q, k, v, do = inputs(d, heads, length)
        x = [t.clone().requires_grad_() for t in (q, k, v)]
        ours = partial(fused_attention, p=15.0, causal=True)

        def both(attention, x=x, do=do):
            for t in x:
                t.grad = None
            attention(*x).backward(do)

        forward = versus(partial(ours, q, k, v), partial(softmax, q, k, v))
        total = versus(partial(both, ours), partial(both, softmax))
        memory = [peak(partial(both, attention)) for attention in (ours, softmax)]
        show = lambda a, b: f"{a:.3f} / {b:.3f} = {a / b:.2f}x"  # noqa: E731
        print(
            f"{shape}: forward {show(*forward)}   both {show(*total)}   memory {memory[0] / memory[1]:.2f}x", flush=True
        )


def groupings(heads, most):
    """Sizes of the groups whose blocks take turns: head by head, groups as large as they may be, groups of one size."""
    found = {"head by head": [1] * heads}
    for together in most:
        groups = -(-heads // together)
        even = [(g + 1) * heads // groups - g * heads // groups for g in range(groups)]
        full = [min(together, heads - first) for first in range(0, heads, together)]
        found[f"at most {together}"] = even
        if full != even:
            found[f"{together} and a rest of {full[-1]}"] = full
    return found


def schedule():
    """How much longer than evenly spread work a causal forward takes by the order of its blocks; needs no GPU.

    A block of 128 rows takes a unit of time for every 64 keys, and four before and after. Slots: blocks that 132
    multiprocessors hold at once.
    """
    for heads, length, slots in ((16, 8192, 132), (32, 8192, 132), (64, 16384, 264), (256, 1024, 264)):
        blocks = length // 128
        shown = []
        for name, groups in groupings(heads, (2, 4, 5, 8, 16)).items():
            busy = [0.0] * slots
            work = [2 * (blocks - i) + 4 for size in groups for i in range(blocks) for _ in range(size)]
            for units in work:
                heapq.heapreplace(busy, busy[0] + units)
            shown.append(f"{name} +{max(busy) / (sum(work) / slots) - 1:.1%}")
        print(f"{heads} heads of {length}, {slots} slots:", ", ".join(shown))


def parts(shapes=SHAPES):
    """Milliseconds of each kernel by itself; normalisation is what is left of the whole, timed as a CUDA graph."""
    from triton.testing import do_bench_cudagraph

    from lssar.ops.fused.op import run_backward, run_forward
    from lssar.ops.fused.tune import OPTIONS, record

    for shape in shapes:
        d, heads, length = (int(x) for x in shape.split("x"))
        q, k, v, do = inputs(d, heads, length)
        times = {kernel: bench(run) for kernel, run in record(q, k, v, do).items()}

        def both(q=q, k=k, v=v, do=do):
            o, rows = run_forward(q, k, v, *OPTIONS)
            run_backward(q, k, v, o, do, rows, *OPTIONS)

        whole = do_bench_cudagraph(both, rep=60, return_mode="median")
        times |= {"normalisation": whole - sum(times.values()), "both": whole}
        print(shape, *(f"{name} {ms:.3f}" for name, ms in times.items()), sep="  ", flush=True)


def turns(shape, *at_most):
    """Each kernel by itself, in turns, by how many heads take turns at most (1: head by head)."""
    from lssar.ops.fused import tiles
    from lssar.ops.fused.tune import record

    d, heads, length = (int(x) for x in shape.split("x"))
    runs = record(*inputs(d, heads, length))
    times = {}
    for _ in range(3):
        for most in map(int, at_most):
            tiles.cached_elements = lambda itemsize, most=most: most * d * length
            for kernel, run in runs.items():
                times.setdefault(kernel, {}).setdefault(most, []).append(bench(run, 25))
    for kernel, by_most in times.items():
        print(shape, kernel, *(f"{most}: {sorted(ms)[1]:.3f}" for most, ms in by_most.items()), sep="  ")


def host():
    """Host microseconds of a tiny call with Triton's launcher and with the launch cache, alternating."""
    import lssar
    from lssar.ops.fused import fused_attention, fused_decode, launch, window_attention

    q, k, v, do = inputs(64, 4, 128)
    x = [t.clone().requires_grad_() for t in (q, k, v)]
    cosine = lssar.spec("cosine_softmax")
    calls = {
        "forward": lambda: fused_attention(q, k, v, p=15.0, causal=True),
        "both": lambda: fused_attention(*x, p=15.0, causal=True).backward(do),
        "decode": lambda: fused_decode(q[:, :, :1], k, v, p=15.0),
        "window forward": lambda: window_attention(q, k, v, cosine, causal=True, window=64),
        "window both": lambda: window_attention(*x, cosine, causal=True, window=64).backward(do),
    }
    times = {}
    for _ in range(9):
        for name, call in calls.items():
            for cached in (False, True):
                launch.CACHE_LAUNCHES = cached
                for _ in range(5):
                    call()
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(50):  # fewer than the queue to the card holds
                    call()
                times.setdefault((name, cached), []).append((time.perf_counter() - began) / 50)
                torch.cuda.synchronize()
    for name in calls:
        plain, short = (1e6 * statistics.median(times[name, cached]) for cached in (False, True))
        print(f"{name}: {plain:.0f} us by Triton, {short:.0f} us with the cache", flush=True)


def check():
    for d, dtype, p in ((64, torch.bfloat16, 15.0), (128, torch.bfloat16, 15.0), (80, torch.float16, 3.0),
                        (64, torch.float32, 15.0), (64, torch.bfloat16, None), (128, torch.bfloat16, 1.5)):  # fmt: skip
        mine, eager = errors(d, p=p, dtype=dtype)
        show = lambda e: " ".join(f"{x:.1e}" for x in e)  # noqa: E731
        bad = "" if all(a <= 2 * b for a, b in zip(mine, eager)) else "   MORE THAN TWICE EAGER"
        print(f"d {d} {dtype} p {p}: fused {show(mine)}  eager {show(eager)}{bad}", flush=True)


def sweeps(words):
    """kernel shape tile ... / kernel shape tile ...; the best tiles."""
    jobs, current = [], []
    for word in [*words, "/"]:
        if word == "/":
            jobs.append((current[0], current[1], [*current[2:]] or [""]))
            current = []
        else:
            current.append(word)
    return sweep(jobs)


COMMANDS = {
    "check": check,
    "host": host,
    "parts": lambda *shapes: parts(shapes or SHAPES),
    "ratios": lambda *shapes: ratios(shapes or SHAPES),
    "schedule": schedule,
    "sweep": lambda *words: sweeps(words),
    "sweep_ratios": lambda *words: ratios(chosen=sweeps(words)),
    "turns": turns,
}

if __name__ == "__main__":
    command, *rest = sys.argv[1:] or [""]
    if command not in COMMANDS:
        sys.exit(f"{__doc__}\ncommands: {', '.join(COMMANDS)}")
    COMMANDS[command](*rest)
