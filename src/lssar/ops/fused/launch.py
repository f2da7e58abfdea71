"""Launching a kernel once more, with less Python.

At every launch Triton binds the arguments by name, asks each of them what to compile for, and looks the kernel up by
the answers. With thirty arguments that takes the host longer than a short kernel runs. A launch whose arguments would
answer as those of an earlier one did goes straight to the compiled kernel of that one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

AGAIN = os.environ.get("LSSAR_LAUNCH") != "0" and torch.version.hip is None
"""LSSAR_LAUNCH=0 leaves every launch to Triton. For AMD it compiles by the size of tensors too, not looked at here."""
MOST = 4096
"""Kinds of launches that are remembered."""

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""For a kind of launch: the compiled kernel, and its constants in the order of its arguments."""


def start_kernel(
    kernel: Any, programs: int | tuple[int, ...], arguments: Sequence[Any], constants: dict[str, Any]
) -> None:
    """kernel[programs](*arguments, **constants); constants include Triton's own, as num_warps."""
    grid = (programs, 1, 1) if isinstance(programs, int) else (*programs, 1, 1)[:3]
    if not AGAIN or not isinstance(kernel, JITFunction):  # it is not where kernels are interpreted
        kernel[grid](*arguments, **constants)
        return
    # Triton compiles for types, whether pointers and integers divide by 16, ones, and integers that want 64 bits.
    key = (
        id(kernel), torch.cuda.current_device(), *constants.items(),
        *[
            (x.dtype, x.data_ptr() & 15) if isinstance(x, Tensor)
            else x if x.__class__ is not int or x < 32
            else (x & 31) + (32 if x < 2**31 else 64)
            for x in arguments
        ],
    )  # fmt: skip
    known = _compiled.get(key)
    if known is not None:
        compiled, rest = known
        compiled[grid](*arguments, *rest)
        return
    compiled = kernel[grid](*arguments, **constants)
    if len(_compiled) >= MOST:
        _compiled.clear()
    _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
