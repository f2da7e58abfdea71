"""Time the decode kernels on one GPU beside softmax: settings, kinds of keys, kernel by kernel.

PYTHONPATH=src python benchmarks/decode_lab.py decode|norms|sweep|profile
PYTHONPATH=src python benchmarks/decode_lab.py turns|softmax [--old FOLDER] [--compile]

turns and softmax compare plans, and with --old decode.py, decode_op.py and decode_softmax.py of another commit, in one
process; --compile only compiles what they run, in a process for each shape.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fused_lab import error

CALL = (None, 15.0, None, None, None)
"""Arguments of `decode` after the tensors: no gain, p, whole cache, not paged."""


def decode_inputs(batch, heads, kv_heads, length, d):
    from lssar.benchmark import Case

    if "--compile" in sys.argv:  # beside other processes: the numbers do not matter, their memory does
        shapes = (batch, heads, 1, d), *[(batch, kv_heads, length, d)] * 2
        return [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
    return Case(batch, heads, kv_heads, length, d, "bfloat16", "cuda", decode=True).inputs()[:3]


def dense_decode(q, k, v):
    """In float64, for the first key head of the first batch row: the output of LSSAR and its weights."""
    group, length, d = q.shape[1] // k.shape[1], *k.shape[2:]
    scores = F.normalize(q[0, :group].double(), dim=-1)[:, 0] @ F.normalize(k[0, 0].double(), dim=-1).mT
    a = F.softplus(scores * math.log(d) * math.log(length), threshold=60)
    z = (a - a.mean(-1, keepdim=True)).clamp_min(0)
    w = (z / z.amax(-1, keepdim=True)) ** 15
    return (w / w.sum(-1, keepdim=True)) @ v[0, 0].double(), w


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
            dense_o, w = dense_decode(q, k, v)
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


def norms(
    shapes=((1, 32, 8, 128, 32768), (1, 32, 8, 128, 131072), (16, 32, 8, 128, 32768), (1, 16, 16, 64, 32768),
            (1, 16, 16, 64, 131072), (16, 16, 16, 64, 32768)),
):  # fmt: skip
    """Unit keys against raw ones whose norms come by the tensor cores or in registers, and numbers of splits."""
    from triton.testing import do_bench_cudagraph

    from lssar.ops.fused import decode_op as module

    for batch, heads, kv_heads, d, length in shapes:
        q, k, v = decode_inputs(batch, heads, kv_heads, length, d)
        unit = F.normalize(k.float(), dim=-1).bfloat16()
        cudnn = cudnn_decode(q, k, v)
        expected = module.decode(q, k, v, *CALL, 0.0, norms="fast")
        half, twice = (max(1, n * 132 // (batch * kv_heads)) for n in (2, 8))  # of four programs a multiprocessor
        settings = {
            "unit": (unit, {"unit_keys": True}),
            "unit, not ahead": (unit, {"unit_keys": True, "ahead": False}),
            "unit half": (unit, {"unit_keys": True, "splits": half}),
            "unit twice": (unit, {"unit_keys": True, "splits": twice}),
            "product w2": (k, {"warps": 2}),
            "product w4": (k, {"warps": 4}),
            "product twice": (k, {"splits": twice}),
            "fast": (k, {"norms": "fast"}),
        }
        shown = [f"cudnn {cudnn * 1e3:.1f}"]
        for name, (keys, how) in settings.items():
            run = partial(module.decode, q, keys, v, *CALL, 2**-10, **how)
            off = float((run() - expected).float().norm() / expected.float().norm())
            time = do_bench_cudagraph(run, rep=25, return_mode="median")
            shown.append(f"{name} {time * 1e3:.1f} {time / cudnn:.2f}x ({off:.0e})")
        print(batch, heads, kv_heads, d, length, *shown, sep="  ", flush=True)


def sweep(shapes=((1, 32, 8, 128, 131072), (16, 32, 8, 128, 32768), (16, 16, 16, 64, 32768))):
    """Block, warps, stages and programs a multiprocessor of the decode kernels, keys with and without their norms."""
    from triton.testing import do_bench_cudagraph

    from lssar.ops.fused import decode_op as module

    settings = ((64, 4, 3), (64, 2, 3), (64, 1, 3), (32, 1, 4), (32, 2, 4), (16, 1, 5), (128, 4, 3))
    for batch, heads, kv_heads, d, length in shapes:
        q, k, v = decode_inputs(batch, heads, kv_heads, length, d)
        k = F.normalize(k.float(), dim=-1).bfloat16()
        cudnn = cudnn_decode(q, k, v)
        expected = module.decode(q, k, v, *CALL, 0.0)
        times = []
        for block, warps, stages in settings:
            for programs in (8, 16, 32):
                for unit in (False, True):
                    splits = max(1, programs * 132 // (batch * kv_heads))
                    how = {"block": block, "splits": splits, "warps": warps, "stages": stages}
                    run = partial(module.decode, q, k, v, *CALL, 2**-10, unit, **how)
                    off = float((run() - expected).float().norm() / expected.float().norm())
                    time = do_bench_cudagraph(run, rep=15, return_mode="median")
                    times.append((round(time * 1e3, 1), unit, block, warps, stages, programs, f"off {off:.1e}"))
        print(f"decode B {batch} H {heads}/{kv_heads} d {d} L {length}: cuDNN {cudnn * 1e3:.1f} us")
        print("us, unit keys, block, warps, stages, programs")
        for unit in (False, True):
            print("\n".join(str(t) for t in sorted(t for t in times if t[1] == unit)[:6]), flush=True)
        profile_once(partial(module.decode, q, k, v, *CALL, 2**-10, True))


def profile_once(run):
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    run()
    with watch(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    for event in seen.events():
        print(f"    {event.name[:40]} {event.device_time:.1f} us")


SHAPES = tuple(
    (batch, *heads, length) for heads in ((32, 8, 128), (16, 16, 64)) for batch in (1, 16) for length in (32768, 131072)
)
"""Those of docs/performance.md: batch, heads, key heads, head size, keys."""


def load_version(folder):
    """Modules that have `decode` for LSSAR and for softmax, of another commit, whose files are in `folder`."""
    from lssar.ops.fused import autograd

    files = "decode", "decode_op", "decode_softmax"  # each imports from those before it
    names = {file: f"lssar.ops.fused.{file}" for file in files}
    kept = {name: importlib.import_module(name) for name in names.values()}
    operators, made = (autograd.operator, autograd.refuse_gradient), []
    try:  # the operators are registered once
        autograd.operator, autograd.refuse_gradient = (lambda *a: None), (lambda *a: None)
        for file in files:
            if not Path(folder, f"{file}.py").exists():  # older commits have all of decode_op.py in decode.py
                continue
            spec = importlib.util.spec_from_file_location(f"another_{file}", f"{folder}/{file}.py")
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses look for it
            spec.loader.exec_module(module)
            made.append(module)
            sys.modules[names[file]] = module
    finally:
        autograd.operator, autograd.refuse_gradient = operators
        sys.modules.update(kept)
    return made[-2:]


def in_turns(title, runs, expected, inputs):
    """Every setting once a turn, so that clocks and temperature are the same for all: medians of three turns.

    runs: functions by name, of which `expected` is what the first rows should be; inputs: q, k, v."""
    from triton.testing import do_bench_cudagraph

    rows = slice(0, expected.shape[0])
    off = {name: error(run()[0, rows, 0], expected) for name, run in runs.items()}
    if "--compile" in sys.argv:
        return
    times = {name: [] for name in runs}
    for _ in range(3):
        for name, run in runs.items():
            times[name].append(do_bench_cudagraph(run, rep=10, return_mode="median"))
    baseline = cudnn_decode(*inputs)
    print(f"{title}: cuDNN softmax {baseline * 1e3:.1f} us", flush=True)
    for name, found in times.items():
        time = statistics.median(found)
        print(f"    {name}: {time * 1e3:.1f} us {time / baseline:.2f}x, error {off[name]:.1e}", flush=True)


def each_shape(shapes):
    """Those that a process is to run; with --compile, first a process for each."""
    if "--shape" in sys.argv:
        return shapes[int(sys.argv[sys.argv.index("--shape") + 1]) :][:1]
    if "--compile" in sys.argv:
        running = [subprocess.Popen([sys.executable, *sys.argv, "--shape", str(i)]) for i in range(len(shapes))]
        sys.exit(max(process.wait() for process in running))
    return shapes


def turns():
    """LSSAR with raw keys: plans, and another commit's version."""
    from lssar.ops.fused import decode_op as module

    old = load_version(sys.argv[sys.argv.index("--old") + 1])[0] if "--old" in sys.argv else None
    for batch, heads, kv_heads, d, length in each_shape(SHAPES):
        q, k, v = decode_inputs(batch, heads, kv_heads, length, d)
        plan = module.plan_for(q, kv_heads, length, False)
        settings = {
            "now": {}, "fetched": {"fetch": True}, "not fetched": {"fetch": False}, "not ahead": {"ahead": False},
            "splits x 2": {"splits": 2 * plan.splits}, "other warps": {"warps": 6 - plan.warps, "splits": plan.splits},
        }  # fmt: skip
        runs = {name: partial(module.decode, q, k, v, *CALL, 2**-10, **how) for name, how in settings.items()}
        runs["tolerance 0"] = partial(module.decode, q, k, v, *CALL, 0.0)
        if old is not None:
            runs["old"] = partial(old.decode, q, k, v, *CALL, 2**-10)
        title = f"decode B {batch} H {heads}/{kv_heads} d {d} L {length}, {plan.splits} splits, {plan.warps} warps"
        in_turns(title, runs, dense_decode(q, k, v)[0], (q, k, v))
        if "--compile" not in sys.argv:
            profile_once(runs["not ahead"])


def softmax(shapes=((1, 12, 12, 64, 131072), (8, 12, 12, 64, 131072))):
    """Softmax and cosine softmax, at the shapes of the mixed 124M model: plans, and another commit's version."""
    import lssar
    from lssar.ops.fused import decode_op as plans
    from lssar.ops.fused import decode_softmax as module

    old = load_version(sys.argv[sys.argv.index("--old") + 1])[1] if "--old" in sys.argv else None
    for (batch, heads, kv_heads, d, length), name in each_shape([*itertools.product(shapes, SOFTMAX)]):
        q, k, v = decode_inputs(batch, heads, kv_heads, length, d)
        spec = lssar.spec(name)
        plan = plans.plan_for(q, kv_heads, length, False, tiles=module.TILES)
        settings = {
            "now": {}, "splits x 4/3": {"splits": 4 * plan.splits // 3},
            "splits x 2/3": {"splits": 2 * plan.splits // 3},
            "other warps": {"warps": 6 - plan.warps, "splits": plan.splits},
        }  # fmt: skip
        call = (q, k, v, None, spec.literal, None, None)
        runs = {name: partial(module.decode, *call, **how) for name, how in settings.items()}
        if old is not None:
            runs["old"] = partial(old.decode, *call)
        first = (x[:1, :1].double() for x in (q, k, v))
        expected = lssar.attention(*first, spec, causal=False, impl="reference")[0, :, 0]
        title = f"{name} B {batch} H {heads} d {d} L {length}, {plan.splits} splits, {plan.warps} warps"
        in_turns(title, runs, expected, (q, k, v))


SOFTMAX = ("cosine_softmax", "softmax")


class Spy:
    """Stands in for a kernel and keeps what it was compiled to."""

    def __init__(self, kernel):
        self.kernel, self.compiled, self.grid = kernel, None, None

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.grid, self.compiled = grid, self.kernel[grid](*arguments, **constants)

        return launch


def profile(shapes=((1, 16, 16, 64, 32768), (1, 16, 16, 64, 131072), (1, 32, 8, 128, 32768))):
    """Kernel by kernel, unit keys and raw ones."""
    from lssar.ops.fused import decode_op as module

    names = ("score_kernel", "value_kernel", "combine_kernel")
    for batch, heads, kv_heads, d, length in shapes:
        q, k, v = decode_inputs(batch, heads, kv_heads, length, d)
        unit = F.normalize(k.float(), dim=-1).bfloat16()
        kinds = {"unit": (unit, {"unit_keys": True}), "product": (k, {}), "fast": (k, {"norms": "fast"})}
        for (kind, (keys, how)), warps in itertools.product(kinds.items(), (2, 4)):
            spies = {kernel: Spy(getattr(module, kernel)) for kernel in names}
            for kernel, spy in spies.items():
                setattr(module, kernel, spy)
            try:
                run = partial(module.decode, q, keys, v, *CALL, 2**-10, ahead=False, warps=warps, **how)
                print(f"decode B {batch} H {heads}/{kv_heads} d {d} L {length}, {kind}, {warps} warps:", flush=True)
                profile_once(run)
            finally:
                for kernel, spy in spies.items():
                    setattr(module, kernel, spy.kernel)
            for kernel, spy in spies.items():
                c = spy.compiled
                print(f"    {kernel} {spy.grid}: {c.n_regs} registers, {c.n_spills} spilled, {c.metadata.shared} bytes")


COMMANDS = {"decode": decode, "norms": norms, "sweep": sweep, "profile": profile, "turns": turns, "softmax": softmax}

if __name__ == "__main__":
    if sys.argv[1:2] not in [[name] for name in COMMANDS]:
        sys.exit(f"{__doc__}\ncommands: {', '.join(COMMANDS)}")
    COMMANDS[sys.argv[1]]()
