"""The attention function that transformers calls in every layer, for each of our mechanisms."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from lssar.attention import attention
from lssar.hf.masks import CODE, FEWEST_KEYS
from lssar.layouts import spec_text
from lssar.specs import AttentionSpec, parse_spec, spec

REFUSED = {
    "softcap": "a soft cap on the scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a bias on the scores",
    "alibi": "a bias on the scores",
    "head_mask": "a head mask",
    "cache": "continuous batching with a paged cache",
}
"""Arguments that some models pass to their attention and that change its numbers."""


def attention_function(name: str, spec_name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function to register as `attn_implementation=name`; it runs the mechanism `spec_name`."""

    def lssar_attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        _refuse_unsupported(name, dropout, kwargs)
        if attention_mask is None:
            _check_missing_mask(name, module, kwargs)
        if not torch.compiler.is_compiling():
            _warn_of_shared_config(name, module)
        mechanism = mechanism_of(spec_name, module)
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if scaling is not None and not mechanism.cosine and mechanism.scale == "rsqrt_d":
            factor = scaling * math.sqrt(query.shape[-1])  # under cosine a factor of q is divided out again
            query = query if math.isclose(factor, 1.0) else query * factor
        o, weights = masked_attention(
            query, key, value, mechanism, mask=attention_mask, causal=causal, cu_seqlens=kwargs.get("cu_seq_lens_q"),
            return_weights=bool(kwargs.get("output_attentions")),
        )  # fmt: skip
        return o.transpose(1, 2).contiguous(), weights

    lssar_attention.__name__ = f"{name}_attention"
    return lssar_attention


def _refuse_unsupported(name: str, dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(
            f"{name!r} attention has no dropout; got {dropout}. Set the model's attention dropout to 0: "
            "config.attention_dropout, config.attn_pdrop (GPT-2) or config.attention_probs_dropout_prob (BERT)"
        )
    for argument, what in REFUSED.items():
        if kwargs.get(argument) is not None:
            raise ValueError(f"{name!r} attention does not support {what}, which this model asks for ({argument})")


def _check_missing_mask(name: str, module: nn.Module, kwargs: dict[str, Any]) -> None:
    """transformers passes no mask where it need not, and also where no mask function is registered."""
    if name not in ALL_MASK_ATTENTION_FUNCTIONS._global_mapping:
        raise RuntimeError(f"{name!r} has no mask function, so padding would be visible; `import lssar.hf` adds it")
    if kwargs.get("cu_seq_lens_q") is None and getattr(module, "layer_idx", 0) == 0:
        _refuse_ignored_pack(kwargs.get("position_ids"))


_FIRST_LAYERS: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
"""id of a config -> the first causal layer that ran with it."""


def _warn_of_shared_config(name: str, module: nn.Module) -> None:
    """transformers keeps the mechanism in the config object: models made from one object share the last one set."""
    config = getattr(module, "config", None)
    if config is None or getattr(module, "layer_idx", None) != 0 or not getattr(module, "is_causal", False):
        return
    first = _FIRST_LAYERS.setdefault(id(config), module)
    if first is module:
        return
    if first.config is config:
        warnings.warn(
            f"two models share one config object, so both run {name!r}, the mechanism that was set last; give each "
            "model its own copy: copy.deepcopy(config)",
            stacklevel=2,
        )
    _FIRST_LAYERS[id(config)] = module


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mechanism: AttentionSpec, *, mask: Tensor | None, causal: bool = True,
    cu_seqlens: Tensor | None = None, return_weights: bool = False, **learned: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`lssar.attention` under a mask as transformers hands it to a layer: a code of `masks.py` or the user's own.

    `learned` are the mechanism's learned numbers, `head_scale` and `threshold`.
    """
    q, k, v, view = _arguments(query, key, value, mask, causal, cu_seqlens)
    batch, _, queries, _ = query.shape
    packed = q.shape[0] != batch
    if return_weights:
        if packed:
            raise ValueError(
                "the weights of a packed batch are not kept; ask for output_attentions a document at a time"
            )
        o, weights = attention(q, k, v, mechanism, return_weights=True, **learned, **view)
        return o, nn.functional.pad(weights, (0, key.shape[2] - weights.shape[-1]))
    o = attention(q, k, v, mechanism, **learned, **view)
    return (o[0].unflatten(1, (batch, queries)).transpose(0, 1) if packed else o), None


def mechanism_of(spec_name: str, module: nn.Module) -> AttentionSpec:
    """The named mechanism as `config.lssar` changes it: fields of the spec, or a mechanism for each layer type."""
    config = getattr(module, "config", None)
    changes = getattr(config, "lssar", None)
    if not changes:
        return spec(spec_name)
    if not isinstance(changes, dict) or not all(isinstance(key, str) for key in changes):
        raise ValueError(
            f"config.lssar must be a dict, such as {{'p': 3}} or {{'full_attention': 'lssar'}}; got {changes!r}"
        )
    if all(key.endswith(LAYER_TYPE_SUFFIX) for key in changes):
        chosen = changes.get(_layer_type(config, module, changes), spec_name)
        return spec(spec_name) if chosen == spec_name else getattr(_CHANGED, _remember(chosen, ()))
    return getattr(_CHANGED, _remember(spec_name, tuple(changes.items())))


LAYER_TYPE_SUFFIX = "_attention"
"""`config.lssar = {"full_attention": "lssar", "sliding_attention": "softmax"}`: keys are transformers' layer types."""


def _layer_type(config: Any, module: nn.Module, named: Iterable[str]) -> str:
    """The type of the layer; ValueError if `named` has a type that no layer of the model is of."""
    types, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if types is None or index is None:
        raise ValueError(f"config.lssar names layer types, but {type(config).__name__} has none (no layer_types)")
    for name in named:
        if name not in types:
            known = ", ".join(dict.fromkeys(types))
            raise ValueError(f"config.lssar names the layer type {name!r}; the layers of this model are {known}")
    return types[index]


_CHANGED = SimpleNamespace()
"""Mechanisms with changes, one attribute each: torch.compile can follow an attribute but cannot construct a spec."""


@torch.compiler.assume_constant_result
def _remember(text: str, changes: tuple[tuple[str, Any], ...]) -> str:
    """The attribute of _CHANGED that holds the mechanism `text` (as in `lssar,p=3`) with these fields changed."""
    if not isinstance(text, str):
        raise ValueError(f"config.lssar needs a mechanism for each layer type, such as 'lssar,p=3'; got {text!r}")
    made = parse_spec(text).replace(**dict(changes))
    if made.learns:
        raise ValueError(
            f"config.lssar asks for {spec_text(made)!r}, which learns numbers for each head, and a transformers model "
            "has no weights for them (no ssmax, head_scale or learned_threshold here)"
        )
    for known, value in vars(_CHANGED).items():
        if value == made:
            return known
    attribute = f"{made.name}_{len(vars(_CHANGED))}"
    setattr(_CHANGED, attribute, made)
    return attribute


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """q, k, v and the options of `lssar.attention` that describe their masks."""
    (B, _, Lq, _), Lk = q.shape, k.shape[2]
    if mask is None:
        return _unmasked(q, k, v, causal, cu_seqlens)
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        raise ValueError(f"an attention mask must have four dimensions here; got {_show(mask)}")
    if mask.dtype == torch.bool:
        return q, k, v, {"causal": False, "mask": mask[..., :Lk]}
    if mask.is_floating_point():
        return q, k, v, {"causal": False, "mask": _from_additive(mask)[..., :Lk]}
    if mask.dtype == CODE and Lk >= FEWEST_KEYS and mask.shape[0] in (1, B) and mask.shape[1] == 1:
        rows, numbers = mask.shape[2:]
        if (rows, numbers) == (1, 1):
            return q, k, v, {"causal": Lq > 1, "key_lengths": mask.reshape(-1).expand(B)}
        if (rows, numbers) == (Lq, 2):
            return q, k, v, {"causal": False, "key_ranges": mask[:, 0]}
        if (rows, numbers) == (Lq, 1) and Lq <= Lk:  # slots of a cache beyond the queries are empty
            return _as_pack(q, k[:, :, :Lq], v[:, :, :Lq], mask[:, 0, :, 0].expand(B, Lq))
    raise ValueError(
        f"a mask must be bool (batch, heads or 1, {Lq}, {Lk}), True where a row may see; got {_show(mask)}"
    )


def _unmasked(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    queries = q.shape[2]
    if cu_seqlens is not None and q.shape[0] == 1 and queries == k.shape[2]:
        return q, k, v, {"causal": causal, "cu_seqlens": cu_seqlens}
    if causal and queries > 1:  # the keys beyond are slots of a static cache that is still empty
        k, v = k[:, :, :queries], v[:, :, :queries]
    return q, k, v, {"causal": causal and queries > 1}


def _as_pack(q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """All documents of the batch in one row, as the fused kernels take them; `start` (B, L), within each batch row."""
    B, L = start.shape
    rows = torch.arange(B * L, device=start.device)
    start = start.flatten() + rows // L * L
    # Starts in order, then the total again and again: empty documents at the end, and a shape that no value decides.
    bounds = torch.where(start == rows, rows, B * L).sort().values
    bounds = torch.cat([bounds, bounds.new_full((1,), B * L)])
    q, k, v = (x if B == 1 else x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k, v))
    return q, k, v, {"causal": True, "cu_seqlens": bounds}


def _refuse_ignored_pack(position_ids: Tensor | None) -> None:
    """ValueError for packed documents that transformers did not recognise: it would let them see each other."""
    if position_ids is None or position_ids.dim() != 2 or torch.compiler.is_compiling():
        return
    if bool((position_ids[:, 1:] == 0).any()):
        raise ValueError(
            "position_ids restart, as those of packed documents do, but transformers takes them for that only with "
            "use_cache=False and without an attention_mask"
        )


def _from_additive(mask: Tensor) -> Tensor:
    """A float mask of zeros and very negative numbers as a bool one."""
    if torch.compiler.is_compiling():
        raise ValueError("under torch.compile give a 4-dimensional attention mask as bool, True where a row may see")
    seen = mask == 0
    if bool((~seen & (mask > torch.finfo(mask.dtype).min / 2)).any()):
        raise ValueError(
            "this attention adds no bias to its scores: a float mask may hold 0 and the dtype's lowest only"
        )
    return seen


def _show(x: Any) -> str:
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
