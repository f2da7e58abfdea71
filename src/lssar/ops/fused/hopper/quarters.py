"""Tiles in registers as four parts, so that arithmetic on one part after the other needs fewer registers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def quarters(x):
    """[N, M] as four [N, M / 4] of neighbouring columns. No data moves: they lie in different registers."""
    N: gl.constexpr = x.shape[0]
    M: gl.constexpr = x.shape[1]
    x = x.reshape([N, 4, M // 4]).permute((0, 2, 1)).reshape([N, M // 4, 2, 2])
    even, odd = gl.split(x)
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return x0, x1, x2, x3


@gluon.jit
def from_quarters(x0, x1, x2, x3, layout: gl.constexpr):
    N: gl.constexpr = x0.shape[0]
    M: gl.constexpr = x0.shape[1] * 4
    x = gl.join(gl.join(x0, x2), gl.join(x1, x3))
    return gl.convert_layout(x.reshape([N, M // 4, 4]).permute((0, 2, 1)).reshape([N, M]), layout)
