"""Run forward and backward as on Hopper with something in the place of a card, and print what reached it as JSON.

`python -m tests.ops.launch_hopper_without_card HEAD_SIZE [MECHANISM]`: kernels are compiled for sm_90, and each launch
is compared with the signature of its kernel. With a mechanism, the windowed kernels run, in Gluon and in Triton. With
`forms`, calls of the windowed kernels with tensors of several forms are made twice, and a third time from scratch.
"""

from __future__ import annotations

import json
import sys

import torch
import triton

import lssar
from lssar.ops.fused import hopper, op, tiles, window_op
from tests.ops import launch_without_card

LAUNCHED: list[dict] = []


def fits(kind: str, value) -> bool:
    """Whether an argument is what the compiled kernel's signature says."""
    if kind.startswith("tensordesc"):
        return str(getattr(value, "block_shape", None)) in kind
    if kind.startswith("*"):
        return isinstance(value, torch.Tensor)
    wanted = {"i": int, "f": float}.get(kind[0])
    return kind == "constexpr" or (wanted is not None and isinstance(value, wanted))


def show(value) -> str:
    """What a kernel gets of an argument, but for addresses: outputs are at others in every call."""
    if isinstance(value, torch.Tensor):
        return repr((value.dtype, value.shape, value.stride()))
    if hasattr(value, "block_shape"):
        return repr((show(value.base), value.shape, value.strides, value.block_shape, getattr(value, "layout", None)))
    return repr(value)


class Launcher:
    """As launch_without_card.Launcher, with the signature."""

    def __init__(self, source, metadata):
        self.signature, self.name = dict(source.signature), metadata.name

    def __call__(self, *arguments):
        values = arguments[9:]
        wrong = [name for (name, kind), value in zip(self.signature.items(), values) if not fits(kind, value)]
        descriptors = sum(kind.startswith("tensordesc") for kind in self.signature.values())
        missing = len(self.signature) - len(values)
        LAUNCHED.append({
            "kernel": self.name, "wrong": wrong, "missing": missing, "descriptors": descriptors,
            "call": [show(x) for x in (*arguments[:3], arguments[4], *values)],
        })  # fmt: skip


class Driver(launch_without_card.Driver):
    launcher_cls = Launcher


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def tile_for(kernel: str, d: int, itemsize: int) -> tiles.Tile:
    return tiles.HOPPER[tiles.key_of(kernel, d, itemsize)]


def run_windows(D: int, mechanism: str) -> None:
    window_op.tile_for = tile_for
    q, k, v = draw(2, 64, 4, D).transpose(1, 2), draw(2, 64, 2, D).transpose(1, 2), draw(2, 2, 64, D)
    do = draw(2, 4, 64, D)
    options = (None, None, lssar.spec(mechanism).literal, True, None, None, 50)
    in_gluon = op.hopper_kernels
    for kernels in (lambda *_: None, in_gluon):
        op.hopper_kernels = kernels
        for _ in range(2):
            o, rows, key_scale = window_op._forward(q, k, v, *options)
            window_op._backward(q, k, v, o, do, rows, key_scale, *options)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same numbers two bytes off an address that 16 divides."""
    moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    return moved.copy_(x)


def run_forms(D: int) -> list[list[dict]]:
    """The launches of each form: two calls, and one without what was remembered of them."""
    window_op.tile_for = tile_for
    options = (None, None, lssar.spec("softmax").literal, True, None)
    found = []
    for length, window, form in (
        (64, 50, lambda x: x), (64, 60, lambda x: x), (64, 50, shifted), (80, 50, lambda x: x),
        (64, 50, lambda x: torch.cat((x, x), -1)[..., :D]),
    ):  # fmt: skip
        q, k, v, do = (form(draw(1, 2, length, D)) for _ in range(4))
        for plan in (window_op._plan, window_op._plan, window_op._Plan):
            LAUNCHED.clear()
            remembered, window_op._plan = window_op._plan, plan
            o, rows, key_scale = window_op._forward(q, k, v, *options, None, window)
            window_op._backward(q, k, v, o, do, rows, key_scale, *options, None, window)
            window_op._plan = remembered
            found.append(LAUNCHED.copy())
    return found


def main(D: int, mechanism: str | None = None) -> None:
    triton.runtime.driver.set_active(Driver())
    torch.cuda.current_device = lambda: 0
    op.hopper_kernels = lambda d, part: hopper if d == 128 or part != "forward" else None
    tiles.tile_for = tile_for
    if mechanism == "forms":
        print(json.dumps(run_forms(D)))
        return
    if mechanism is not None:
        run_windows(D, mechanism)
        print(json.dumps({"launched": LAUNCHED}))
        return
    q, k, v = draw(2, 64, 4, D).transpose(1, 2), draw(2, 64, 2, D).transpose(1, 2), draw(2, 2, 64, D)
    options = (None, 15.0, None, True, None, None, None)
    do = draw(2, 4, 64, D)
    same_do, same_v = do[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1)
    for values, gradient in ((v, do), (v, do), (v, same_do), (same_v, do)):
        o, rows = op.run_forward(q, k, values, *options)
        op.run_backward(q, k, values, o, gradient, rows, *options)
    print(json.dumps({"launched": LAUNCHED}))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
