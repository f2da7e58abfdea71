"""Check, then time, tile shapes of the fused kernels on one GPU, beside cuDNN softmax in the same process.

    PYTHONPATH=src python benchmarks/fused_lab.py check
    PYTHONPATH=src python benchmarks/fused_lab.py sweep forward 64x64x16384 128,64,8,3,128,3 64,64,4,3
    PYTHONPATH=src python benchmarks/fused_lab.py ratios
    PYTHONPATH=src python benchmarks/fused_lab.py schedule
    PYTHONPATH=src python benchmarks/fused_lab.py turns 128x16x8192 1 2 4 16

A shape is headsize x heads x length; a tile is m,n,warps,stages[,n1,stages1[,registers[,tma]]]. Every tile is checked
against a float64 reference before it is timed; a wrong one prints its error and no time.
"""

from __future__ import annotations

import heapq
import math
import multiprocessing
import os
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
    from lssar.ops.fused.op import _backward, _forward

    q, k, v, do = inputs(d, 2, 256)
    try:
        o, rows = _forward(q, k, v, 15.0, True, None, None, None)
        if not kernel.startswith("forward"):
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


SHAPES = ("64x64x16384", "128x32x16384", "64x16x8192", "128x16x8192", "64x64x8192", "128x32x8192")


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


def decode_inputs(batch, heads, kv_heads, length, d):
    from lssar.benchmark import Case

    return Case(batch, heads, kv_heads, length, d, "bfloat16", "cuda", decode=True).inputs()[:3]


def decode(shapes=((1, 32, 8, 128), (16, 32, 8, 128), (1, 16, 16, 64), (16, 16, 16, 64)), lengths=(32768, 131072)):
    from triton.testing import do_bench_cudagraph

    from lssar.ops.fused import fused_decode

    for batch, heads, kv_heads, d in shapes:
        for length in lengths:
            q, k, v = decode_inputs(batch, heads, kv_heads, length, d)
            group = heads // kv_heads
            few = slice(0, 1)
            exact = fused_decode(q[few].double().float(), k[few].float(), v[few].float(), p=15.0, tolerance=0.0)
            got = fused_decode(q, k, v, p=15.0)[few]
            scores = F.normalize(q[0, :group].double(), dim=-1)[:, 0] @ F.normalize(k[0, 0].double(), dim=-1).mT
            a = F.softplus(scores * math.log(d) * math.log(length), threshold=60)
            z = (a - a.mean(-1, keepdim=True)).clamp_min(0)
            w = (z / z.amax(-1, keepdim=True)) ** 15
            dense_o = (w / w.sum(-1, keepdim=True)) @ v[0, 0].double()
            wrong = error(exact[0, :group, 0], dense_o), error(got[0, :group, 0], dense_o)
            share = ((w > 2**-10 / length).any(0)).double().mean().item()
            mine, all_v = (
                do_bench_cudagraph(partial(fused_decode, q, k, v, p=15.0, tolerance=t), rep=40, return_mode="median")
                for t in (2**-10, 0.0)
            )
            unit = F.normalize(k.float(), dim=-1).bfloat16()
            of_unit = partial(fused_decode, q, unit, v, p=15.0, unit_keys=True)
            unit_wrong = error(of_unit()[0, :group, 0], dense_o)
            unit_time = do_bench_cudagraph(of_unit, rep=40, return_mode="median")
            softmax = {}
            for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
                try:
                    with sdpa_kernel(backend):
                        softmax[backend.name[:5]] = do_bench_cudagraph(
                            partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=group > 1),
                            rep=40, return_mode="median",
                        )  # fmt: skip
                except RuntimeError:
                    pass
            best = min(softmax.values())
            floor = (k.nbytes + v.nbytes) / 4.3e9
            print(
                f"decode B {batch} H {heads}/{kv_heads} d {d} L {length}: "
                f"{mine * 1e3:.1f} us (tolerance 0: {all_v * 1e3:.1f}) / {best * 1e3:.1f} = {mine / best:.2f}x"
                f"  unit keys {unit_time * 1e3:.1f} = {unit_time / best:.2f}x error {unit_wrong:.1e}"
                f"  error {wrong[0]:.1e} {wrong[1]:.1e}  V rows {share:.2f}"
                f"  K+V at 4.3 TB/s {floor * 1e3:.1f} us  { ({n: round(t * 1e3, 1) for n, t in softmax.items()}) }",
                flush=True,
            )


def cudnn_decode(q, k, v):
    """Milliseconds of softmax."""
    from triton.testing import do_bench_cudagraph

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        grouped = partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=q.shape[1] != k.shape[1])
        return do_bench_cudagraph(grouped, rep=25, return_mode="median")


def decode_norms(
    shapes=((1, 32, 8, 128, 32768), (1, 32, 8, 128, 131072), (16, 32, 8, 128, 32768), (1, 16, 16, 64, 32768),
            (1, 16, 16, 64, 131072), (16, 16, 16, 64, 32768)),
):  # fmt: skip
    """Unit keys against raw ones whose norms come by the tensor cores or in registers, and numbers of splits."""
    from triton.testing import do_bench_cudagraph

    from lssar.ops.fused import decode as module

    for batch, heads, kv_heads, d, length in shapes:
        q, k, v = decode_inputs(batch, heads, kv_heads, length, d)
        unit = F.normalize(k.float(), dim=-1).bfloat16()
        cudnn = cudnn_decode(q, k, v)
        expected = module.decode(q, k, v, 15.0, None, None, 0.0, norms="fast")
        half, twice = (max(1, n * 132 // (batch * kv_heads)) for n in (2, 8))  # of four programs a multiprocessor
        settings = {
            "unit": (unit, {"unit_keys": True}),
            "unit, not ahead": (unit, {"unit_keys": True, "ahead": False}),
            "unit half": (unit, {"unit_keys": True, "splits": half}),
            "unit twice": (unit, {"unit_keys": True, "splits": twice}),
            "product": (k, {}),
            "product w2": (k, {"warps": 2}),
            "product twice": (k, {"splits": twice}),
            "fast": (k, {"norms": "fast"}),
        }
        shown = [f"cudnn {cudnn * 1e3:.1f}"]
        for name, (keys, how) in settings.items():
            run = partial(module.decode, q, keys, v, 15.0, None, None, 2**-10, **how)
            off = float((run() - expected).float().norm() / expected.float().norm())
            time = do_bench_cudagraph(run, rep=25, return_mode="median")
            shown.append(f"{name} {time * 1e3:.1f} {time / cudnn:.2f}x ({off:.0e})")
        print(batch, heads, kv_heads, d, length, *shown, sep="  ", flush=True)


def decode_sweep(shapes=((1, 32, 8, 128, 131072), (16, 32, 8, 128, 32768), (16, 16, 16, 64, 32768))):
    """Block, warps, stages and programs a multiprocessor of the decode kernels, keys with and without their norms."""
    from triton.testing import do_bench_cudagraph

    from lssar.ops.fused import decode as module

    settings = ((64, 4, 3), (64, 2, 3), (64, 1, 3), (32, 1, 4), (32, 2, 4), (16, 1, 5), (128, 4, 3))
    for batch, heads, kv_heads, d, length in shapes:
        q, k, v = decode_inputs(batch, heads, kv_heads, length, d)
        k = F.normalize(k.float(), dim=-1).bfloat16()
        cudnn = cudnn_decode(q, k, v)
        expected = module.decode(q, k, v, 15.0, None, None, 0.0)
        times = []
        for block, warps, stages in settings:
            for programs in (8, 16, 32):
                for unit in (False, True):
                    splits = max(1, programs * 132 // (batch * kv_heads))
                    run = partial(module.decode, q, k, v, 15.0, None, None, 2**-10, unit, block, splits, warps, stages)
                    off = float((run() - expected).float().norm() / expected.float().norm())
                    time = do_bench_cudagraph(run, rep=15, return_mode="median")
                    times.append((round(time * 1e3, 1), unit, block, warps, stages, programs, f"off {off:.1e}"))
        print(f"decode B {batch} H {heads}/{kv_heads} d {d} L {length}: cuDNN {cudnn * 1e3:.1f} us")
        print("us, unit keys, block, warps, stages, programs")
        for unit in (False, True):
            print("\n".join(str(t) for t in sorted(t for t in times if t[1] == unit)[:6]), flush=True)
        profile_once(partial(module.decode, q, k, v, 15.0, None, None, 2**-10, True))


def profile_once(run):
    from torch.profiler import ProfilerActivity, profile

    run()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    for event in seen.events():
        print(f"    {event.name[:40]} {event.device_time:.1f} us")


class Spy:
    """Stands in for a kernel and keeps what it was compiled to."""

    def __init__(self, kernel):
        self.kernel, self.compiled, self.grid = kernel, None, None

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.grid, self.compiled = grid, self.kernel[grid](*arguments, **constants)

        return launch


def decode_profile(shapes=((1, 16, 16, 64, 32768), (1, 16, 16, 64, 131072), (1, 32, 8, 128, 32768))):
    """Kernel by kernel, unit keys and raw ones: raw ones are 32 us slower at batch 1, d 64, whatever the length."""
    from lssar.ops.fused import decode as module

    names = ("score_kernel", "value_kernel", "combine_kernel")
    for batch, heads, kv_heads, d, length in shapes:
        q, k, v = decode_inputs(batch, heads, kv_heads, length, d)
        for name, how in {
            "unit": {"unit_keys": True}, "unit w4": {"unit_keys": True, "warps": 4}, "product": {},
            "product w2": {"warps": 2}, "fast": {"norms": "fast"}, "fast w2": {"norms": "fast", "warps": 2},
        }.items():  # fmt: skip
            spies = {kernel: Spy(getattr(module, kernel)) for kernel in names}
            for kernel, spy in spies.items():
                setattr(module, kernel, spy)
            try:
                run = partial(module.decode, q, k, v, 15.0, None, None, 2**-10, ahead=False, **how)
                print(f"decode B {batch} H {heads}/{kv_heads} d {d} L {length}, {name}:", flush=True)
                profile_once(run)
            finally:
                for kernel, spy in spies.items():
                    setattr(module, kernel, spy.kernel)
            for kernel, spy in spies.items():
                c = spy.compiled
                print(f"    {kernel} {spy.grid}: {c.n_regs} registers, {c.n_spills} spilled, {c.metadata.shared} bytes")


def head_size_256():
    """Kernels for activations at a head size that they refuse, because they failed there on an H200; says how."""
    import traceback

    import lssar
    from lssar.ops import fused

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for length in (37, 333):
            q, k, v, do = inputs(256, 4, length, dtype)
            spec = lssar.spec("sigmoid")
            ours, exact = ([t.clone().to(kind).requires_grad_() for t in (q, k, v)] for kind in (dtype, torch.float64))
            try:
                fused.activation_attention(*ours, spec, causal=True).backward(do)
                lssar.attention(*exact, spec, impl="reference").backward(do.double())
                print(dtype, length, *(f"{error(a.grad, b.grad):.1e}" for a, b in zip(ours, exact)), flush=True)
            except Exception:
                print(dtype, length, traceback.format_exc()[-1500:], flush=True)


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
    elif command == "schedule":
        schedule()
    elif command == "turns":
        turns(*rest)
    elif command == "decode_sweep":
        decode_sweep()
    elif command == "decode_norms":
        decode_norms()
    elif command == "decode_profile":
        decode_profile()
    elif command == "head_size_256":
        head_size_256()
    elif command == "decode":
        decode()
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
        best = sweep(jobs)
        if command == "sweep_ratios":
            ratios(chosen=best)
