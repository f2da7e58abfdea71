"""Kernel launches with less Python than Triton's own.

At every launch Triton binds the arguments by name, computes a specialisation key from each of them (dtype, alignment,
divisibility) and looks up the compiled kernel. With thirty arguments this takes longer on the host than a short kernel
runs on the GPU. `start_kernel` keeps its own cache with a cheaper key and calls the compiled kernel directly on a hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

CACHE_LAUNCHES = torch.version.hip is None
"""False on AMD, where Triton also specialises on the sizes of tensors, which the key below does not contain."""
LAUNCH_CACHE_SIZE = 4096

LAUNCH_CACHE: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""By specialisation key: the compiled kernel, and the values of its constexpr parameters in order."""


def start_kernel(
    kernel: Any, programs: int | tuple[int, ...], arguments: Sequence[Any], constants: dict[str, Any]
) -> None:
    """kernel[programs](*arguments, **constants); constants include Triton's own options, such as num_warps.

    Products and sums are contracted to fused multiply-adds, whatever the default of the installed Triton is.
    """
    grid = (programs, 1, 1) if isinstance(programs, int) else (*programs, 1, 1)[:3]
    if not CACHE_LAUNCHES or not isinstance(kernel, JITFunction):  # the interpreter's kernels are of another class
        kernel[grid](*arguments, **constants, enable_fp_fusion=True)
        return
    # Triton specialises on dtypes, on pointers and integers divisible by 16, on integers equal to 1 and on their width.
    key = (
        id(kernel), torch.cuda.current_device(), *constants.items(),
        *[
            (x.dtype, x.data_ptr() & 15) if isinstance(x, Tensor)
            else float if x.__class__ is float
            else (x.base.dtype, *x.block_shape) if not isinstance(x, int)  # a descriptor that the host made
            else x if x < 32
            else (x & 31) + (32 if x < 2**31 else 64)
            for x in arguments
        ],
    )  # fmt: skip
    known = LAUNCH_CACHE.get(key)
    if known is not None:
        compiled, rest = known
        compiled[grid](*arguments, *rest)
        return
    compiled = kernel[grid](*arguments, **constants, enable_fp_fusion=True)
    if len(LAUNCH_CACHE) >= LAUNCH_CACHE_SIZE:
        LAUNCH_CACHE.clear()
    LAUNCH_CACHE[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
