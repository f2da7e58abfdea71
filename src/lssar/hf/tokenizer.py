"""Our tokenizers as transformers' own, token for token."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lssar.data.tokenizers import END_OF_TEXT, BytesTokenizer, Gpt2Tokenizer, JsonTokenizer, Tokenizer


def to_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The same ids for the same text; the end-of-document token is its bos, eos and pad, and is not added by itself."""
    made: Any
    if isinstance(tokenizer, BytesTokenizer):
        made = _byte_level({bytes([value]): value for value in range(256)}, split=False)
    elif isinstance(tokenizer, Gpt2Tokenizer):
        made = _byte_level(tokenizer.ranks, split=True)
    elif isinstance(tokenizer, JsonTokenizer):
        made = tokenizers.Tokenizer.from_file(str(tokenizer.file))
    else:
        raise ValueError(f"cannot export a tokenizer of kind {type(tokenizer).__name__}")
    end = made.id_to_token(tokenizer.eot)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=end, eos_token=end, pad_token=end, padding_side="left",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def _byte_level(ranks: dict[bytes, int], split: bool) -> Any:
    """Byte-pair encoding with these ranks; `split`: words are cut apart first, as in GPT-2."""
    names = _byte_names()

    def name(token: bytes) -> str:
        return "".join(names[byte] for byte in token)

    merges = [(name(a), name(b)) for a, b in _merges(ranks)]
    made = tokenizers.Tokenizer(models.BPE({name(token): rank for token, rank in ranks.items()}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return made


def _byte_names() -> list[str]:
    """The printable character that represents each byte in a byte-level vocabulary: itself, or one from 256 on."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pair of tokens from which each token of several bytes was merged: its encoding by tokens of lower rank."""
    pairs = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            joined = [ranks.get(a + b, rank) for a, b in pairwise(parts)]
            best = min(range(len(joined)), key=joined.__getitem__)
            if joined[best] >= rank:
                raise ValueError(f"{token!r} cannot be made from tokens of lower rank")
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            pairs.append((parts[0], parts[1]))
    return pairs
