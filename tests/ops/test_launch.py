"""Launches that skip Triton's questions reach the kernel that Triton would have chosen, with the same arguments."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

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


@pytest.mark.parametrize("current", [0, 1])
def test_operators_launch_on_the_device_of_their_tensors(current, monkeypatch):
    """Triton launches on the current device, wherever the tensors are."""
    from lssar.ops.fused.autograd import on_its_device

    entered = []

    @contextmanager
    def device(which):
        entered.append(which.index)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", device)
    tensor = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))
    assert on_its_device(lambda x, y: (x, y))(tensor, 5) == (tensor, 5)
    assert entered == ([1] if current == 0 else [])


def test_kernels_are_chosen_by_the_current_device(monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    from lssar.ops.fused import op

    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ((9, 0), (8, 0))[index])
    op._kernels_of_device.cache_clear()
    found = []
    for index in (0, 1, 0):
        current.append(index)
        found.append([op.hopper_kernels(d, part) for d, part in ((64, "forward"), (64, "backward"), (128, "forward"))])
    op._kernels_of_device.cache_clear()
    hopper = found[0][1]
    assert hopper.__name__ == "lssar.ops.fused.hopper"
    assert found == [[None, hopper, hopper], [None] * 3, [None, hopper, hopper]]


@pytest.mark.slow
def test_launches_on_hopper_fit_the_kernels(tmp_path):
    """Four calls: new kernels, the same from the cache, then dO and then values with a stride of 0."""
    made = outside_the_interpreter("tests.ops.launch_hopper_without_card", "64", cache=tmp_path)["launched"]
    assert len(made) == 4 * 6  # normalisation twice, forward, dq, dk and dv, repair
    assert not any(one["wrong"] or one["missing"] for one in made), made
    counts = {name: [one["descriptors"] for one in made if one["kernel"] == name] for name in KERNELS}
    repair = {"key_gradient_kernel": [4, 0, 4, 0, 4, 0, 0, 0]}  # which has none
    assert counts == {"query_gradient_kernel": [7, 7, 7, 5], "forward_kernel": [3, 3, 3, 0]} | repair


@pytest.mark.slow
@pytest.mark.parametrize(("D", "mechanism"), [("64", "lssar"), ("128", "softmax"), ("128", "cosine_softmax")])
def test_launches_of_windows_on_hopper_fit_the_kernels(D, mechanism, tmp_path):
    """Two calls in Triton and two in Gluon."""
    words = "tests.ops.launch_hopper_without_card", D, mechanism
    made = outside_the_interpreter(*words, cache=tmp_path)["launched"]
    assert not any(one["wrong"] or one["missing"] for one in made), made
    counts = {one["kernel"]: one["descriptors"] for one in made if "repair" not in one["kernel"]}
    gluon = {"window_forward_kernel": 3, "window_query_gradient_kernel": 4, "window_key_gradient_kernel": 3}
    assert counts.items() >= gluon.items()
    assert counts["key_gradient_kernel"] == (2 if D == "128" else 0)


@pytest.mark.slow
def test_calls_of_one_form_share_what_was_compiled(tmp_path):
    """Alignment, strides, lengths and windows are of a form: each gets the kernels and arguments of a first call."""
    found = outside_the_interpreter("tests.ops.launch_hopper_without_card", "64", "forms", cache=tmp_path)
    forms = list(zip(found[::3], found[1::3], found[2::3], strict=True))
    for first, again, alone in forms:
        assert first == again == alone
    assert len({str(first) for first, *_ in forms}) == len(forms)
