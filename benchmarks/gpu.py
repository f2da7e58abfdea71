"""Run the benchmarks of docs/performance.md and the GPU tests one after the other, the most important first.

    python benchmarks/gpu.py out/gpu                  # all jobs; JOBS has their time limits
    python benchmarks/gpu.py out/gpu --limit 550      # start no job that may exceed 550 s in all; repeat to resume
    python benchmarks/gpu.py out/gpu --only flex ratios

Every job writes its output to OUT/JOB.txt; benchmarks also write OUT/CARD-JOB.json, .csv and .png. A job that succeeds
leaves OUT/JOB.done and is not run again. The package need not be installed: this runs the source tree it is in. To
publish a table, copy its files to benchmarks/results and run benchmarks/report.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))

from lssar.experiments.queue import JobFailed, Queue, Say, work_through  # noqa: E402 (the package need not be installed)


@dataclass(frozen=True)
class Job:
    name: str
    words: str
    """After `python`; OUT stands for the output folder, CARD for the card's name."""
    seconds: int
    """Time limit; a job is not started when less time is left. Most of it is spent compiling."""


def bench(name: str, seconds: int, words: str) -> Job:
    return Job(name, f"-m lssar.cli bench --device cuda {words} --out OUT/CARD-{name} --overwrite", seconds)


def tests(name: str, seconds: int, words: str) -> Job:
    """With one line per test, so that the output of a job that exceeds its limit shows how far it came."""
    return Job(f"test-{name}", f"-m pytest -v --tb=short -p no:cacheprovider {words}", seconds)


PARTS = "benchmarks/fused_lab.py parts 64x256x1024 64x128x2048 128x128x2048 64x16x8192 128x16x8192 64x64x16384"
DECODE = "--lengths 32768 131072 --budget 0.1 --contestants fused:lssar unit_cache:lssar cudnn:softmax flash:softmax"

JOBS = (
    tests("window", 200, "-m 'gpu or not gpu' tests/ops/test_window.py"),
    tests(
        "decode", 180, "-m 'gpu or not gpu' tests/ops/test_scaled_unit.py tests/ops/test_decode_softmax.py "
        "tests/ops/test_decode_path.py tests/ops/test_linear.py",
    ),
    Job("parts", PARTS, 60),
    Job("mixed-train", "benchmarks/mixed_model.py train --out OUT/CARD-mixed-train.json", 240),
    Job("mixed-decode", "benchmarks/mixed_model.py decode --compiled --out OUT/CARD-mixed-decode.json", 120),
    Job("window-lab", "benchmarks/window_lab.py 128x8x8x8192@128 128x8x8x8192@512 --no-flex", 150),
    bench(
        "window", 240, "--contestants flex:softmax fused:softmax fused:cosine_softmax fused:lssar --lengths 1024 8192 "
        "--head-sizes 64 128 --windows 128 512 --tokens 65536 --heads 16 --modes forward both --budget 0.2",
    ),
    bench(
        "short", 90, "--cuda-graph --contestants cudnn:softmax fused:lssar fused:cosine_softmax --lengths 1024 2048 "
        "--head-sizes 64 128 --tokens 32768 --heads 8 --modes forward both --budget 0.2",
    ),
    bench(
        "flex", 200, "--contestants flex:softmax flex:lssa flex:lssar fused:lssar fused:lssa cudnn:softmax "
        "flash:softmax --lengths 8192 --heads 16 --modes forward both --head-sizes 64 128 --budget 0.1",
    ),
    Job("ratios", "benchmarks/fused_lab.py ratios", 90),
    Job("host", "benchmarks/fused_lab.py host", 60),
    tests("loss", 60, "-m gpu tests/ops/test_loss.py"),
    Job("step", "benchmarks/training_step.py books-51m lssar", 60),
    tests(
        "fused", 500, '-m "gpu or not gpu" tests/ops/test_fused.py tests/ops/test_decode.py tests/ops/test_steep.py '
        "tests/ops/test_not_finite.py tests/ops/test_power_and_gain.py",
    ),
    Job("fuzz", "-m tests.fuzz_fused --cases 10000 --seconds 540 --out OUT/CARD-fuzz-fused.json", 580),
    tests("model", 200, "-m gpu tests/test_model.py tests/ops/test_compiled_strips.py"),
    tests("activations", 300, "-m gpu tests/ops/test_activations.py"),
    tests("tiled", 200, "-m gpu tests/ops/test_tiled.py"),
    tests("others", 200, "-m gpu tests/hf tests/evaluation tests/experiments"),
    bench(
        "eager", 90, "--contestants eager:lssar compiled:lssar fused:lssar cudnn:softmax --lengths 1024 8192 "
        "--head-sizes 64 --heads 16 --budget 0.05",
    ),
    bench(
        "bfloat16", 120, "--contestants fused:lssar fused:lssa cudnn:softmax flash:softmax --lengths 1024 2048 4096 "
        "8192 16384 32768 65536 --head-sizes 64 128 --heads 16 --budget 0.08",
    ),
    Job("check", "benchmarks/fused_lab.py check", 90),
    Job("decode-profile", "benchmarks/decode_lab.py profile", 60),
    bench("decode-b1-d64", 60, f"--decode --batch 1 --heads 16 --key-heads 16 --head-sizes 64 {DECODE}"),
    bench("decode-b16-d64", 60, f"--decode --batch 16 --heads 16 --key-heads 16 --head-sizes 64 {DECODE}"),
    bench("decode-b1-d128", 60, f"--decode --batch 1 --heads 32 --key-heads 8 --head-sizes 128 {DECODE}"),
    bench("decode-b16-d128", 60, f"--decode --batch 16 --heads 32 --key-heads 8 --head-sizes 128 {DECODE}"),
    bench(
        "activations", 90, "--contestants fused:sigmoid compiled:sigmoid fused:l1_gelu cudnn:softmax fused:lssar "
        "--batch 64 --heads 8 --head-sizes 64 --lengths 1024 --budget 0.05",
    ),
    Job(
        "sweep-1024", "benchmarks/fused_lab.py sweep forward 64x256x1024 128,64,8,3,128,3,128,1 64,64,4,3,128,3,128,1 "
        "64,64,4,3,64,3,128,1 64,32,4,3,64,3,128,1 / query_gradient_hopper 64x256x1024 64,64,4,2,0,0,0,1 "
        "64,32,4,2,0,0,0,1 / key_gradient_hopper 64x256x1024 64,64,4,2,0,0,0,1 32,64,4,2,0,0,0,1", 120,
    ),
)  # fmt: skip


def card() -> str:
    """The last word of the GPU's name: h200, 4090."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device; `make bench` runs the CPU benchmarks")
    return torch.cuda.get_device_name().split()[-1].lower()


@dataclass(frozen=True, kw_only=True)
class Benchmarks(Queue[Job]):
    """One job at a time in a folder: each needs the machine to itself, and its own process, which can be killed."""

    out: Path
    card: str
    whole_jobs: bool = True

    def key(self, job: Job) -> str:
        return job.name

    def folder(self, job: Job) -> Path:
        return self.out

    def finished(self, job: Job) -> bool:
        return (self.out / f"{job.name}.done").exists()

    def expected_seconds(self, job: Job) -> float:
        return job.seconds

    def run(self, job: Job, say: Say) -> None:
        words = shlex.split(job.words.replace("OUT", str(self.out)).replace("CARD", self.card))
        if words[:2] == ["-m", "pytest"] and importlib.util.find_spec("xdist"):
            words += ["-n", str(max(1, (os.cpu_count() or 1) // 3))]  # mostly compiling
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
        with open(self.out / f"{job.name}.txt", "w") as log:
            process = subprocess.Popen(
                [sys.executable, *words], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(job.seconds)
            except subprocess.TimeoutExpired:
                raise JobFailed(f"{job.name}: cut off after {job.seconds} s") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)  # with the compilers that it started
                    process.wait()
        if code:
            raise JobFailed(f"{job.name}: failed with {code}, see {job.name}.txt")
        (self.out / f"{job.name}.done").touch()


def main(jobs: tuple[Job, ...] = JOBS) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit", type=float, help="seconds in all")
    parser.add_argument("--only", nargs="+", choices=[job.name for job in jobs])
    asked = parser.parse_args()
    chosen = tuple(job for job in jobs if job.name in (asked.only or [job.name]))
    deadline = None if asked.limit is None else time.time() + asked.limit
    return int(bool(work_through(Benchmarks(jobs=chosen, deadline=deadline, out=asked.out.resolve(), card=card()))))


if __name__ == "__main__":
    sys.exit(main())
