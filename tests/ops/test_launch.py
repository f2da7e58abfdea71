"""Launches that skip Triton's questions reach the kernel that Triton would have chosen, with the same arguments."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def test_the_same_kernels_with_the_same_arguments(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.ops.launch_without_card"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    each, launched = found["each"], found["launched"]
    by_triton, first, again = launched[:each], launched[each : 2 * each], launched[2 * each :]
    assert by_triton == first == again
    functions = {line[4] for line in by_triton}
    assert 10 < len(functions) < found["kept"] < each  # several kernels, and strides that differ share theirs
