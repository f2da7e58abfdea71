"""Launches that skip Triton's questions reach the kernel that Triton would have chosen, with the same arguments."""

import pytest

from tests.helpers import outside_the_interpreter

pytest.importorskip("triton")

KERNELS = ("query_gradient_kernel", "key_gradient_kernel", "forward_kernel")


def test_the_same_kernels_with_the_same_arguments(tmp_path):
    found = outside_the_interpreter("tests.ops.launch_without_card", cache=tmp_path)
    each, launched = found["each"], found["launched"]
    by_triton, first, again = launched[:each], launched[each : 2 * each], launched[2 * each :]
    assert by_triton == first == again
    functions = {line[4] for line in by_triton}
    assert 10 < len(functions) < found["kept"] < each  # several kernels, and strides that differ share theirs


@pytest.mark.slow
@pytest.mark.parametrize(("D", "save_lower"), [("64", "0"), ("128", "1")])
def test_launches_on_hopper_fit_the_kernels(D, save_lower, tmp_path):
    """Three calls: new kernels, the same from the cache, and gradients of the output with a stride of 0."""
    made = outside_the_interpreter("tests.ops.launch_hopper_without_card", D, save_lower, cache=tmp_path)["launched"]
    # normalisation twice, forward, dq, dk and dv, repair; and values of rows from what the forward saves
    assert len(made) == 3 * (6 + int(save_lower))
    assert not any(one["wrong"] or one["missing"] for one in made), made
    counts = {name: [one["descriptors"] for one in made if one["kernel"] == name] for name in KERNELS}
    repair = {"key_gradient_kernel": [3, 0, 3, 0, 0, 0]}  # which has none
    forward = {"forward_kernel": [3] * 3 if D == "128" else [0] * 3}  # at head size 64 that of Triton
    assert counts == {"query_gradient_kernel": [4, 4, 0]} | forward | repair
