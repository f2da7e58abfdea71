"""Are far tokens found? Samples of `lssar.data.tasks`, read through the model's cache and scored in two ways.

  greedy  the answer is decoded token by token and has to be the right one, whole
  choice  the right answer has to be likelier than every wrong one (others of the same context, or random numbers)

and by the answer's own likelihood. A context is read once; each question goes on from the cache, which is then wound
back, so that k questions about a context cost one reading.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lssar.data.tasks import TASKS, Query, Sample, TaskMaker
from lssar.model import GPT, Cache

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def wilson(right: int, of: int, z: float = 1.96) -> dict[str, Any]:
    """A binomial share and its 95% interval (Wilson 1927), which is sensible at 0 and at 1 too."""
    if of == 0:
        raise ValueError("a share of nothing has no interval")
    share = right / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return {"right": right, "of": of, "rate": share, "low": max(0.0, middle - half), "high": min(1.0, middle + half)}


@dataclass
class _Count:
    """What was asked about one depth, or in all."""

    greedy: list[bool] = field(default_factory=list)
    choice: list[bool] = field(default_factory=list)
    nats: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"greedy": wilson(sum(self.greedy), len(self.greedy))}
        if self.choice:
            found["choice"] = wilson(sum(self.choice), len(self.choice))
        if self.nats:
            found["nats"] = sum(self.nats) / len(self.nats)
        return found


def samples_of(
    maker: TaskMaker, task: str, length: int, count: int, depths: Sequence[float], seed: int
) -> Iterator[Sample]:
    """`count` samples, for the passkey `count` at each depth; each has a seed of its own, whatever else is asked."""
    number = list(TASKS).index(task)
    for at in depths if task == "passkey" else [None]:
        for i in range(count):
            rng = np.random.default_rng([seed, number, length, i, 0 if at is None else 1 + round(1000 * at)])
            yield maker.make(task, rng, length, depths if at is None else [at])


@torch.no_grad()
def evaluate_retrieval(
    model: GPT,
    maker: TaskMaker,
    task: str,
    length: int,
    *,
    samples: int = 16,
    depths: Sequence[float] = DEPTHS,
    seed: int = 0,
    ntk: Literal["off", "length"] = "off",
    window: int | None = None,
    batch_tokens: int = 16_384,
    dtype: torch.dtype | None = None,
    report: Callable[[int], None] = lambda samples: None,
) -> dict[str, Any]:
    """One task at one length: rates with intervals, in all and by depth. A context, a question and its answer take up
    `length` tokens at most."""
    device = next(model.parameters()).device
    every, by_depth = _Count(), defaultdict[float, _Count](_Count)
    wrong = 0
    before = model.ntk, model.window
    model.ntk, model.window = ntk, window if window is not None else model.window
    try:
        with torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            made = samples_of(maker, task, length, samples, depths, seed)
            for batch in _batches(made, max(1, batch_tokens // length)):
                for asked, answers in _read(model, batch, length, device):
                    for query, answer in zip(asked, answers):
                        wrong = len(query.others)
                        _count(query, answer, every, by_depth)
                report(len(batch))
    finally:
        model.ntk, model.window = before
    result = {"task": task, "length": length, **every.to_dict(), "answer_tokens": maker.answer_tokens(task)}
    if wrong:
        result["chance"] = 1 / (1 + wrong)
    result["cells"] = [{"depth": depth, **by_depth[depth].to_dict()} for depth in sorted(by_depth)]
    return result


@dataclass(frozen=True)
class _Answer:
    made: list[int]
    right: float  # log-likelihoods
    wrong: list[float]


def _count(query: Query, answer: _Answer, every: _Count, by_depth: dict[float, _Count]) -> None:
    tokens = [a == b for a, b in zip(answer.made, query.answer.tolist(), strict=True)]
    counts = [every]
    every.greedy.append(all(tokens))
    if len(query.depths) == 1:
        counts.append(by_depth[query.depths[0]])
        by_depth[query.depths[0]].greedy.append(all(tokens))
    else:  # each token of the answer has a place of its own
        for depth, right in zip(query.depths, tokens):
            by_depth[depth].greedy.append(right)
    for count in counts:
        count.nats.append(-answer.right)
        if answer.wrong:
            count.choice.append(answer.right > max(answer.wrong))


def _batches(samples: Iterator[Sample], size: int) -> Iterator[list[Sample]]:
    """Samples that can be read together: as many, and with contexts of one length."""
    batch: list[Sample] = []
    for sample in samples:
        if batch and (len(batch) == size or len(sample.context) != len(batch[0].context)):
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


def _read(
    model: GPT, batch: list[Sample], length: int, device: torch.device
) -> Iterator[tuple[list[Query], list[_Answer]]]:
    """Read the contexts once, then ask the first question of each, the second of each, and so on."""
    cache = model.new_cache(length)
    model.hidden(torch.from_numpy(np.stack([s.context for s in batch])).to(device), cache)
    for asked in zip(*(s.queries for s in batch), strict=True):
        yield list(asked), _ask(model, cache, list(asked), device)


def _ask(model: GPT, cache: Cache, queries: list[Query], device: torch.device) -> list[_Answer]:
    start = cache.length
    prompt = torch.from_numpy(np.stack([q.prompt for q in queries])).to(device)
    tokens = max(len(q.answer) for q in queries)

    logits = model.logits(model.hidden(prompt, cache)[:, -1]).float()  # (B, V)
    first, made = logits.log_softmax(-1), [logits.argmax(-1)]
    for _ in range(tokens - 1):
        made.append(model.logits(model.hidden(made[-1][:, None], cache)[:, -1]).argmax(-1))
    decoded = torch.stack(made, 1).tolist()

    candidates = list(zip(*([q.answer, *q.others] for q in queries), strict=True))  # the right ones come first
    scores = []
    for choice in candidates:
        cache.rewind(start + prompt.shape[1])
        scores.append(_likelihood(model, cache, first, choice))
    cache.rewind(start)
    found = torch.stack(scores, 1).tolist()
    return [
        _Answer(row[: len(query.answer)], score[0], score[1:]) for query, row, score in zip(queries, decoded, found)
    ]


def _likelihood(model: GPT, cache: Cache, first: Tensor, answers: Sequence[np.ndarray]) -> Tensor:
    """Log-likelihood of an answer in each row (B,); the cache has read up to it, and `first` is what it expects."""
    longest = max(map(len, answers))
    padded = torch.zeros(len(answers), longest, dtype=torch.int64)
    inside = torch.zeros(len(answers), longest, dtype=torch.bool)
    for row, answer in enumerate(answers):
        padded[row, : len(answer)] = torch.from_numpy(np.asarray(answer, np.int64))
        inside[row, : len(answer)] = True
    padded, inside = padded.to(first.device), inside.to(first.device)
    expected = first[:, None]
    if longest > 1:
        rest = model.logits(model.hidden(padded[:, :-1], cache)).float().log_softmax(-1)
        expected = torch.cat([expected, rest], 1)
    return (expected.gather(-1, padded[..., None])[..., 0] * inside).sum(-1)
