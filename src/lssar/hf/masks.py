"""Masks of transformers as a few integers, where possible.

transformers makes one mask for each forward pass and hands it to every layer. A bool mask (B, 1, Lq, Lk) would take
memory of Lq x Lk and rule out the fused kernels. Where each row sees one range of keys (padding, packs, windows,
partly filled caches: nearly always) our mask function returns integers instead, as a tensor of four dimensions, which
transformers passes on unchanged. B may be 1 for all.

    None                      what SDPA takes it for: causal if the layer is, and a single query sees all keys
    (B, 1, 1, 1)   int32      number of keys; the queries are the last ones of all keys there is room for, and causal
    (B, 1, Lq, 1)  int32      Lq > 1 queries at the first Lq keys, causal; the number is where the row's document starts
    (B, 1, Lq, 2)  int32      first key and one past the last that each row sees
    (B, 1, Lq, Lk) bool       anything else

n_i, the number of keys that row i may see, follows from each; neither padding nor unused slots of a cache count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask
from transformers.utils.import_utils import is_tracing

from lssar.visibility import query_positions

CODE = torch.int32
FEWEST_KEYS = 3
"""With fewer keys a mask of integers could be mistaken for a code, so there are none."""
CHUNK = {"cpu": 2**22, "cuda": 2**26}
"""Elements of a mask that are looked at together."""


def visible_keys(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask function of every mechanism of ours; arguments as transformers' `sdpa_mask` has them."""
    device = torch.device(device)
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(f"attention_mask must be (batch, keys) or 4-dimensional; got {tuple(attention_mask.shape)}")
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length].to(device=device, dtype=torch.bool)

    def dense(rows: slice = slice(0, q_length)) -> Tensor:
        made = sdpa_mask(
            batch_size=batch_size, q_length=rows.stop - rows.start, kv_length=kv_length, q_offset=q_offset + rows.start,
            kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip
        assert made is not None
        return made

    plain = mask_function is causal_mask_function
    if kv_length < FEWEST_KEYS or (plain and q_length > 1 and not allow_is_causal_skip):
        return dense()  # the latter: a model that wants to see its mask
    if local_size is not None and allow_is_causal_skip and kv_length < local_size:
        plain = True  # the window is wider than all there is, and nothing else was asked for
    if is_tracing(padding) or is_tracing(q_offset if isinstance(q_offset, Tensor) else None):
        custom = use_vmap or local_size is not None
        return _traced(q_length, kv_length, q_offset - kv_offset, padding, dense, plain, custom, device)
    if plain:
        return _causal(q_length, kv_length, q_offset - kv_offset, padding, dense, device)
    first, end, whole = _ranges_of(dense, batch_size, q_length, kv_length, device)
    return _encode(first, end, kv_length, q_offset - kv_offset, padding, device) if bool(whole) else dense()


def _causal(
    q_length: int, kv_length: int, before: int | Tensor, padding: Tensor | None, dense: Callable[[], Tensor],
    device: torch.device,
) -> Tensor | None:  # fmt: skip
    """Causal order and padding; `before` keys of the cache come before the first query. No mask is made."""
    last = before + q_length
    if padding is not None:
        j = torch.arange(kv_length, device=device)
        real = padding & (j < last)
        count, first = real.sum(-1), real.int().argmax(-1)
        end = torch.where(count > 0, kv_length - real.flip(-1).int().argmax(-1), 0)
        unpadded, whole = torch.stack([(count == last).all(), (end - first == count).all()]).tolist()
        if not whole:
            return dense()
        if not unpadded:
            ends = torch.minimum(torch.arange(q_length, device=device) + before + 1, end[:, None])
            return _encode(first[:, None].expand(-1, q_length), ends, kv_length, before, padding, device)
    if q_length == 1 and isinstance(before, Tensor):  # a static cache: its length stays on the device
        return (before + 1).to(CODE).reshape(1, 1, 1, 1)
    before = int(before)
    if before == 0 or (q_length == 1 and before + 1 == kv_length):
        return None
    if before + q_length == kv_length:
        return torch.full((1, 1, 1, 1), kv_length, dtype=CODE, device=device)
    end = torch.arange(before + 1, before + q_length + 1, device=device)[None]
    return _pair(torch.zeros_like(end), end)


def _ranges_of(
    dense: Callable, batch: int, q_length: int, kv_length: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """First key and one past the last of each row (B, Lq), and whether all between them is seen in every row."""
    rows = max(1, CHUNK.get(device.type, CHUNK["cpu"]) // max(1, batch * kv_length))
    parts = [_row_ranges(dense(slice(i, min(i + rows, q_length)))) for i in range(0, q_length, rows)]
    first, end, whole = (torch.cat(part, 1) for part in zip(*parts))
    return first, end, whole.all()


def _row_ranges(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    count = mask.sum(-1)[:, 0]
    first = mask.int().argmax(-1)[:, 0]
    end = torch.where(count > 0, mask.shape[-1] - mask.flip(-1).int().argmax(-1)[:, 0], 0)
    return first, end, (mask.shape[1] == 1) & (end - first == count)


def _encode(
    first: Tensor, end: Tensor, kv_length: int, before: int | Tensor, padding: Tensor | None, device: torch.device
) -> Tensor:
    """The shortest code for ranges (B, Lq); the fused kernels take the first two kinds."""
    q_length = first.shape[1]
    if fused_on(device):
        lengths = end[:, -1]
        rows = query_positions(q_length, kv_length, device, lengths)
        causal = ((first == 0) | (first >= end)) & (end == torch.minimum(rows + 1, lengths[:, None]).clamp_min(0))
        if bool(causal.all()):
            return lengths.to(CODE)[:, None, None, None]
        if q_length > 1 and int(before) == 0:  # query i stands at key i
            start, documents = _documents(first, end, None if padding is None else padding[:, :q_length])
            if bool(documents.all()):
                return start.to(CODE)[:, None, :, None]
    return _pair(first, end)


def _documents(first: Tensor, end: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where each row's document starts, and whether rows see their documents up to themselves and nothing else.

    Rows that are padding are made documents of their own, so that no other row sees them.
    """
    rows = torch.arange(first.shape[1], device=first.device).expand_as(first)
    real = torch.ones_like(rows, dtype=torch.bool) if padding is None else padding
    changed = torch.cat([torch.ones_like(real[:, :1]), real[:, 1:] != real[:, :-1]], 1)
    start = torch.where(real, first, torch.where(changed, rows, 0).cummax(1).values)
    own = start.gather(1, start.clamp(max=rows.shape[1] - 1)) == start
    return start, own & (start <= rows) & (~real | (end == rows + 1))


def _traced(
    q_length: int, kv_length: int, before: int | Tensor, padding: Tensor | None, dense: Callable[[], Tensor],
    plain: bool, custom: bool, device: torch.device,
) -> Tensor | None:  # fmt: skip
    """Under torch.compile values cannot be looked at, only shapes."""
    if plain and padding is None:
        if not isinstance(before, Tensor) and before == 0 and q_length == kv_length:
            return None
        end = (torch.arange(1, q_length + 1, device=device) + before)[None]
        return end.to(CODE)[:, None, :, None] if q_length == 1 else _pair(torch.zeros_like(end), end)
    mask = dense()
    if not fused_on(device) or custom or q_length != kv_length:
        return mask
    # Training: padding at the sides or a pack, which is what the kernels take; anything else is an error when it runs.
    first, end, whole = _row_ranges(mask)
    start, ok = _documents(first, end, padding)
    message = "under torch.compile lssar takes padding at the sides and packs; for other masks, give a 4D bool mask"
    torch._assert_async((whole & ok).all(), message)
    return start.to(CODE)[:, None, :, None]


def _pair(first: Tensor, end: Tensor) -> Tensor:
    return torch.stack([first, end], -1).to(CODE)[:, None]


def fused_on(device: torch.device) -> bool:
    return device.type == "cuda"
