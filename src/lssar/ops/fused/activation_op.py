"""The kernels of activation_forward.py and activation_backward.py as PyTorch custom ops, with fakes and autograd."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lssar.ops.fused.activation_backward import key_gradient_kernel, query_gradient_kernel
from lssar.ops.fused.activation_forward import forward_kernel
from lssar.ops.fused.autograd import VISIBILITY, differentiable
from lssar.ops.fused.launch import start_kernel
from lssar.ops.fused.op import power_arguments, power_value, visibility_arguments, visibility_kind
from lssar.ops.fused.tiles import ceil_div, launch, power_of_two
from lssar.ops.numerics import scale_factor
from lssar.specs import AttentionSpec


@lru_cache(maxsize=256)
def _mechanism(literal: str, d: int) -> tuple[dict[str, Any], float | None]:
    """Constants of the kernels for a mechanism, and its power."""
    spec = AttentionSpec.from_literal(literal)
    constants = {
        "ACTIVATION": spec.activation, "DIVISOR": spec.divisor, "SIGN": -1.0 if spec.negate else 1.0,
        "SCALE": scale_factor(d, spec), "LOG_N": spec.log_n, "BIAS": spec.bias, "LENGTH": float(spec.train_length),
        "LOG_LENGTH": math.log(spec.train_length), "GAMMA": float(spec.gamma), "COSINE": spec.cosine,
        "D": d, "BLOCK_D": max(16, power_of_two(d)),
    }  # fmt: skip
    return constants, spec.p


def _arguments(
    q: Tensor, k: Tensor, spec: str, p: float | None, p_tensor: Tensor | None, causal: bool, cu_seqlens: Tensor | None,
    key_lengths: Tensor | None, window: int | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """The last arguments of all three kernels (heads, power, what rows see) and their constants.

    p or p_tensor, if given, replaces the power of the mechanism.
    """
    seen = visibility_arguments(q, k.shape[2], cu_seqlens, key_lengths, window)
    kind = visibility_kind(causal, window, cu_seqlens is not None, key_lengths is not None)
    mechanism, own_power = _mechanism(spec, q.shape[-1])
    power = power_value(own_power if p is None else p, p_tensor)
    constant_power, exponent = power_arguments(power)
    constants = {
        **mechanism, **kind, "REWEIGHT": power is not None, "P": constant_power,
        "DOT": "ieee" if q.dtype == torch.float32 else "tf32",
    }  # fmt: skip
    return (q.shape[1], k.shape[1], exponent, *seen), constants


def _launch(name: str, q: Tensor, run: Any) -> None:
    def without_descriptors(tile, constants):
        constants.pop("TMA")
        run(tile, constants)

    launch(f"activation_{name}", q.shape[-1], q.element_size(), False, without_descriptors)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, spec: str, p: float | None, p_tensor: Tensor | None, causal: bool,
    cu_seqlens: Tensor | None, key_lengths: Tensor | None, window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    B, H, L, _ = q.shape
    o = torch.empty_like(q)
    rows = q.new_zeros((4, B, H, L), dtype=torch.float32)  # inverse, shift, slope, intercept
    if o.numel() == 0:
        return o, rows
    if k.shape[2] == 0:
        return o.zero_(), rows
    shapes, constants = _arguments(q, k, spec, p, p_tensor, causal, cu_seqlens, key_lengths, window)

    arguments = (
        q, k, v, o, rows, rows.stride(0), *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3], *shapes,
    )  # fmt: skip

    def run(tile, tile_constants):
        start_kernel(forward_kernel, ceil_div(L, tile.m) * B * H, arguments, constants | tile_constants)

    _launch("forward", q, run)
    return o, rows


def _backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, rows: Tensor, spec: str, p: float | None,
    p_tensor: Tensor | None, causal: bool, cu_seqlens: Tensor | None, key_lengths: Tensor | None, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    if do.stride(-1) != 1:
        do = do.contiguous()
    delta = (do.float() * o.float()).sum(-1)
    mean = torch.empty_like(delta)
    shapes, constants = _arguments(q, k, spec, p, p_tensor, causal, cu_seqlens, key_lengths, window)
    read = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3])
    B, H, L, _ = q.shape

    def run_queries(tile, tile_constants):
        arguments = (q, k, v, do, dq, rows, delta, mean, rows.stride(0), *read, *dq.stride()[:3], *shapes)
        programs = ceil_div(L, tile.m) * B * H
        start_kernel(query_gradient_kernel, programs, arguments, constants | tile_constants)

    def run_keys(tile, tile_constants):
        arguments = (
            q, k, v, do, dk, dv, rows, delta, mean, rows.stride(0), *read, *dk.stride()[:3], *dv.stride()[:3], *shapes,
        )  # fmt: skip
        programs = ceil_div(k.shape[2], tile.n) * B * k.shape[1]
        start_kernel(key_gradient_kernel, programs, arguments, constants | tile_constants)

    _launch("query_gradient", q, run_queries)
    _launch("key_gradient", q, run_keys)
    return dq, dk, dv


def _empty_rows(q: Tensor) -> Tensor:
    return q.new_empty((4, *q.shape[:3]), dtype=torch.float32)


forward_op = differentiable(
    "activation", f"str spec, float? p, Tensor? p_tensor, {VISIBILITY}", _forward, _backward, _empty_rows
)
