"""Launch a small kernel in many ways with something in the place of a card: `python -m tests.ops.launch_without_card`.

Prints as JSON what reached the card.
"""

from __future__ import annotations

import itertools
import json

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from lssar.ops.fused import launch

LAUNCHED: list[list[str]] = []


class Launcher:
    """What is compiled gets one of these, and calls it with grid, stream, function, four of Triton's, arguments."""

    def __init__(self, source, metadata):
        pass

    def __call__(self, *arguments):
        LAUNCHED.append([repr(x) for x in (*arguments[:5], *arguments[9:])])


class Utilities:
    functions = itertools.count()

    def load_binary(self, *_):
        return "module", next(self.functions), 32, 0, 1024

    def get_device_properties(self, _):
        return {"max_shared_mem": 2**17, "warpSize": 32}


class Driver:
    launcher_cls, utils = Launcher, Utilities()

    def get_current_device(self):
        return 0

    def get_current_stream(self, _):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")


@triton.jit(do_not_specialize=["length"])
def kernel(x_ptr, stride, length, share, BLOCK: tl.constexpr, SCALE: tl.constexpr):
    at = tl.program_id(0) * stride + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < length) * share * SCALE, mask=at < length)


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    torch.cuda.current_device = lambda: 0
    x = torch.zeros(64)
    calls = [
        (y, stride, length, share, block, warps)
        for y in (x, x[1:], x[4:], x.half())
        for stride in (1, 2, 16, 17, 24, 32, 33, 40, 48, 2**31 - 1, 2**31, 2**31 + 16)
        for length, share, block, warps in ((5, 0.5, 16, 1), (2**31, 0.25, 16, 1), (5, 0.5, 32, 2))
    ]
    for cached in (False, True, True):
        launch.CACHE_LAUNCHES = cached
        for y, stride, length, share, block, warps in calls:
            constants = {"BLOCK": block, "SCALE": 2.0, "num_warps": warps}
            launch.start_kernel(kernel, 3, (y, stride, length, share), constants)
    print(json.dumps({"each": len(calls), "launched": LAUNCHED, "kept": len(launch.LAUNCH_CACHE)}))


if __name__ == "__main__":
    main()
