"""Kernel launches with less Python than Triton's own.

At every launch Triton binds the arguments by name, computes a specialisation key from each of them (dtype, alignment,
divisibility) and looks up the compiled kernel. With thirty arguments this takes longer on the host than a short kernel
runs on the GPU. `start_kernel` keeps its own cache with a cheaper key and calls the compiled kernel directly on a hit.
An operator that has seen tensors of the same form before (`form_of`) gives it the `Constants` of that time, which know
the compiled kernel, and needs no key at all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

CACHE_LAUNCHES = torch.version.hip is None
"""False on AMD, where Triton also specialises on the sizes of tensors, which the key below does not contain."""
LAUNCH_CACHE_SIZE = 4096

LAUNCH_CACHE: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""By specialisation key: the compiled kernel, and the values of its constexpr parameters in order."""


class Constants(dict[str, Any]):
    """Constants of a launch that is repeated with arguments of the same form: Triton would compile all alike."""

    compiled: tuple[Any, tuple[Any, ...]] | None = None


class LaunchPlan:
    """Base of what an operator remembers of calls with tensors of the same form."""

    def __init__(self) -> None:
        self._constants: dict[tuple[Hashable, ...], Constants] = {}

    def launch_constants(self, *launch: Hashable, make: Callable[[], dict[str, Any]]) -> Constants:
        """Constants of one of the launches, made once. launch: its name and what they depend on besides the plan."""
        known = self._constants.get(launch)
        if known is None:
            known = self._constants[launch] = Constants(make())
        return known


class Form(NamedTuple):
    """What kernels are specialised on, of a tensor."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    misalignment: int
    device: torch.device


def form_of(x: Tensor) -> Form:
    return Form(x.dtype, x.shape, x.stride(), x.data_ptr() & 15, x.device)


def form_of_some(x: Tensor | None) -> Form | None:
    return None if x is None else form_of(x)


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
    repeated = constants if isinstance(constants, Constants) else None
    if repeated is not None and repeated.compiled is not None:
        compiled, rest = repeated.compiled
        compiled[grid](*arguments, *rest)
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
    else:
        compiled = kernel[grid](*arguments, **constants, enable_fp_fusion=True)
        known = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
        if len(LAUNCH_CACHE) >= LAUNCH_CACHE_SIZE:
            LAUNCH_CACHE.clear()
        LAUNCH_CACHE[key] = known
    if repeated is not None:
        repeated.compiled = known
