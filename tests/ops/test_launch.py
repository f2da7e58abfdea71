"""Launches that skip Triton's questions reach the kernel that Triton would have chosen, with the same arguments."""

import pytest

from tests.helpers import outside_the_interpreter

pytest.importorskip("triton")


def test_the_same_kernels_with_the_same_arguments(tmp_path):
    found = outside_the_interpreter("tests.ops.launch_without_card", cache=tmp_path)
    each, launched = found["each"], found["launched"]
    by_triton, first, again = launched[:each], launched[each : 2 * each], launched[2 * each :]
    assert by_triton == first == again
    functions = {line[4] for line in by_triton}
    assert 10 < len(functions) < found["kept"] < each  # several kernels, and strides that differ share theirs
