"""Log-likelihoods of continuations, in batches, for multiple-choice benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lssar.data.tokenizers import Tokenizer
from lssar.model import GPT

Pair = tuple[list[int], list[int]]
"""Ids of a context, at least one, and of its continuation."""


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Pair:
    """Encodes as lm-eval does: spaces at the end of the context belong to the continuation; both are encoded at once.

    An empty context is the token between documents."""
    if not context:
        return [tokenizer.eot], tokenizer.encode(continuation).tolist()
    bare = context.rstrip()
    continuation = context[len(bare) :] + continuation
    whole, before = tokenizer.encode(bare + continuation).tolist(), tokenizer.encode(bare).tolist()
    return (before, whole[len(before) :]) if before else ([tokenizer.eot], whole)


@torch.no_grad()
def likelihoods(
    model: GPT,
    pairs: Sequence[Pair],
    max_length: int,
    batch_tokens: int = 16_384,
    dtype: torch.dtype | None = None,
    report: Callable[[int], None] = lambda pairs: None,
) -> list[tuple[float, bool]]:
    """The log-likelihood of each continuation, and whether greedy decoding would give it.

    A pair longer than `max_length` loses its beginning; of a continuation that is itself longer, the last `max_length`
    tokens are scored. Rows are padded at their end, which causal attention never sees.
    """
    device = next(model.parameters()).device
    found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
    longest_first = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
    start = 0
    while start < len(longest_first):
        longest = min(max_length, sum(map(len, pairs[longest_first[start]])) - 1)
        batch = longest_first[start : start + max(1, batch_tokens // max(1, longest))]
        start += len(batch)
        rows = [_row(*pairs[i], max_length) for i in batch]
        with torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            scores, greedy = _score(model, rows, device)
        for i, score, right in zip(batch, scores, greedy):
            found[i] = (score, right)
        report(len(batch))
    return found


def _row(context: list[int], continuation: list[int], max_length: int) -> tuple[list[int], list[int]]:
    """Inputs, and the targets of the last of them."""
    if not context:
        raise ValueError("a context needs at least one token")
    return (context + continuation)[-(max_length + 1) :][:-1], continuation[-max_length:]


def _score(model: GPT, rows: list[tuple[list[int], list[int]]], device: torch.device) -> tuple[list[float], list[bool]]:
    longest = max(len(inputs) for inputs, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    wanted: list[int] = []  # places in the flattened batch whose next token is asked for
    for i, (inputs, targets) in enumerate(rows):
        ids[i, : len(inputs)] = torch.tensor(inputs)
        wanted += range(i * longest + len(inputs) - len(targets), i * longest + len(inputs))
    answers = torch.tensor([t for _, each in rows for t in each], dtype=torch.int64, device=device)
    hidden = model.hidden(ids.to(device)).flatten(0, 1)[torch.tensor(wanted, dtype=torch.int64, device=device)]
    scores, right = _of_tokens(model, hidden, answers)
    counts = [len(each) for _, each in rows]
    return (
        [float(part.sum()) for part in scores.cpu().double().split(counts)],
        [bool(part.all()) for part in right.cpu().split(counts)],
    )


def _of_tokens(model: GPT, hidden: Tensor, targets: Tensor, rows: int = 8192) -> tuple[Tensor, Tensor]:
    """Log-likelihood of each target, and whether it is the most likely one; logits are made `rows` tokens at a time."""
    scores, right = [], []
    for h, t in zip(hidden.split(rows), targets.split(rows)):
        logits = model.logits(h).float()
        scores.append(-F.cross_entropy(logits, t, reduction="none"))
        right.append(logits.argmax(-1) == t)
    if not scores:
        return hidden.new_zeros(0), hidden.new_zeros(0, dtype=torch.bool)
    return torch.cat(scores), torch.cat(right)
