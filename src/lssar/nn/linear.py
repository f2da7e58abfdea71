"""A linear layer with the norm before it and what follows it, which a decode step computes in one launch."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from lssar.nn.norms import LayerNorm, RMSNorm
from lssar.ops import fused

Activation = Literal["gelu", "swiglu"]
LINEAR = (nn.Linear, nn.Embedding)
NORMS = (nn.LayerNorm, nn.RMSNorm, LayerNorm, RMSNorm)


def fused_linear(
    x: Tensor, linear: nn.Linear | nn.Embedding, *, norm: nn.Module | None = None, activation: Activation | None = None,
    residual: Tensor | None = None, step: bool = False,
) -> Tensor:  # fmt: skip
    """activation(linear(norm(x))) + residual. step: this is part of a decode step (`LayerCache.stepping`).

    An embedding stands for the head that is tied to it; the first half of a `swiglu` layer's outputs is the gate.
    In a decode step the weights may be read before kernels that were launched earlier have ended. What writes weights
    must not come right before the first call; the operations of a layer that precede it are enough.
    """
    if activation not in (None, "gelu", "swiglu"):
        raise ValueError(f"activation must be 'gelu', 'swiglu' or None; got {activation!r}")
    if step and _in_one_launch(x, linear, norm, activation, residual):
        options: dict[str, Any] = {}
        if norm is not None:
            options["norm"] = "rms" if isinstance(norm, nn.RMSNorm) else "layer"
            options |= {"norm_weight": norm.weight, "norm_bias": getattr(norm, "bias", None), "eps": norm.eps}
        bias = getattr(linear, "bias", None)
        return fused.small_linear(
            x, linear.weight, bias, residual=residual, activation=activation or "none", ahead=True, **options
        )
    x = x if norm is None else norm(x)
    y = F.linear(x, linear.weight) if isinstance(linear, nn.Embedding) else linear(x)
    if activation == "gelu":
        y = F.gelu(y, approximate="tanh")
    elif activation == "swiglu":
        gate, y = y.chunk(2, -1)
        y = F.silu(gate) * y
    return y if residual is None else residual + y


def plain(*modules: nn.Module) -> bool:
    """Whether calling these modules does no more than the forward of their class: no hooks, no forward of their own."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return False
    return not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in modules)


def _in_one_launch(
    x: Tensor,
    linear: nn.Linear | nn.Embedding,
    norm: nn.Module | None,
    activation: Activation | None,
    residual: Tensor | None,
) -> bool:
    """Whether the kernel computes what the modules would: they are known, and every tensor has one dtype and device."""
    if not fused.has_small_linear(x) or torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return False
    modules = [linear] if norm is None else [linear, norm]
    # subclasses, parametrised modules included, may compute something else
    if type(linear) not in LINEAR or (norm is not None and type(norm) not in NORMS) or not plain(*modules):
        return False
    if norm is not None and (norm.normalized_shape != x.shape[-1:] or norm.weight is None or norm.eps is None):
        return False
    made = linear.weight.shape[0] // (2 if activation == "swiglu" else 1)
    if residual is not None and residual.shape != (*x.shape[:-1], made):  # it broadcasts
        return False
    tensors = [x, residual] + [t for m in modules for t in (m.weight, getattr(m, "bias", None))]
    return all(
        type(t) in (Tensor, nn.Parameter) and t.dtype == x.dtype and t.device == x.device
        for t in tensors
        if t is not None
    )
