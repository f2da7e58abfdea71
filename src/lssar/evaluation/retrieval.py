"""Retrieval: does a model find what is far back? Scores samples of `lssar.data.tasks` through the model's cache.

  greedy  every token of the answer is the most likely one after those before it: greedy decoding gives the answer
  choice  the right answer is more likely than every wrong one (others of the same context, or random numbers)

and by the log-likelihood of the answer. A context is read once; all its questions continue from the same cache, so the
questions of one context are not independent: intervals count contexts as clusters.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from lssar.data.tasks import TASKS, Query, Sample, TaskMaker
from lssar.model import GPT, Cache

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def wilson(right: float, of: float, z: float = 1.96) -> dict[str, Any]:
    """A binomial share and its 95% interval (Wilson 1927), which is sensible at 0 and at 1 too."""
    if of <= 0:
        raise ValueError("a share of nothing has no interval")
    share = right / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return {"right": right, "of": of, "rate": share, "low": max(0.0, middle - half), "high": min(1.0, middle + half)}


def clustered(groups: Sequence[Sequence[bool]]) -> dict[str, Any]:
    """A share over all answers, and its 95% Wilson interval with contexts as clusters; `groups` has a list for each.

    The interval is that of so many independent answers as have the variance found between contexts. Where all answers
    agree that variance is unknown, and each context counts as one answer.
    """
    right, of, contexts = sum(map(sum, groups)), sum(map(len, groups)), len(groups)
    found = wilson(right, of)
    if of > contexts:
        effective = float(contexts)
        if 0 < right < of and contexts > 1:
            share = right / of
            spread = sum((sum(group) - share * len(group)) ** 2 for group in groups)
            variance = contexts / (contexts - 1) * spread / of**2
            effective = min(float(of), share * (1 - share) / variance) if variance > 0 else float(of)
        found |= {key: wilson(found["rate"] * effective, effective)[key] for key in ("low", "high")}
    return found | {"contexts": contexts}


@dataclass
class _Count:
    """Answers about one depth, or all; by context."""

    greedy: dict[int, list[bool]] = field(default_factory=lambda: defaultdict(list))
    choice: dict[int, list[bool]] = field(default_factory=lambda: defaultdict(list))
    nats: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"greedy": clustered(list(self.greedy.values()))}
        if self.choice:
            found["choice"] = clustered(list(self.choice.values()))
        if self.nats:
            found["nats"] = sum(self.nats) / len(self.nats)
        return found

    @property
    def hopeless(self) -> bool:
        return not any(map(any, self.greedy.values()))

    def __len__(self) -> int:
        return sum(map(len, self.greedy.values()))


def samples_of(
    maker: TaskMaker, task: str, length: int, count: int, depths: Sequence[float], seed: int, others: bool = True
) -> Iterator[Sample]:
    """`count` samples, for the passkey `count` at each depth. A sample does not depend on the others."""
    number = list(TASKS).index(task)
    for i in range(count):
        for at in depths if task == "passkey" else [None]:
            rng = np.random.default_rng([seed, number, length, i, 0 if at is None else 1 + round(1000 * at)])
            yield maker.make(task, rng, length, depths if at is None else [at], others=others)


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
    chunk: int | None = None,
    choice: bool = True,
    give_up: int | None = None,
    dtype: torch.dtype | None = None,
    report: Callable[[int], None] = lambda samples: None,
) -> dict[str, Any]:
    """One task at one length: rates with intervals, in all and by depth.

    A context, a question and its answer take `length` tokens at most.

    samples: contexts; for the passkey at each depth.
    batch_tokens: contexts are evaluated together up to this many tokens.
    chunk: contexts longer than this are read in chunks of so many tokens, to bound memory.
    choice: whether to compare the answers with wrong ones too.
    give_up: stop after at least so many answers if none of them was right.
    """
    device = next(model.parameters()).device
    every, by_depth = _Count(), defaultdict[float, _Count](_Count)
    wrong = context = 0
    before = model.ntk, model.window
    model.ntk, model.window = ntk, window if window is not None else model.window
    try:
        with torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            made = samples_of(maker, task, length, samples, depths, seed, choice)
            for batch in _batches(made, max(1, batch_tokens // length)):
                for asked, answers in _read(model, batch, length, chunk, device):
                    for row, (query, answer) in enumerate(zip(asked, answers)):
                        wrong = len(query.others)
                        _count(query, answer, context + row, every, by_depth)
                context += len(batch)
                report(len(batch))
                if give_up is not None and len(every) >= give_up and every.hopeless:
                    break
    finally:
        model.ntk, model.window = before
    result = {"task": task, "length": length, **every.to_dict(), "answer_tokens": maker.answer_tokens(task)}
    if wrong:
        result["chance"] = 1 / (1 + wrong)
    result["cells"] = [{"depth": depth, **by_depth[depth].to_dict()} for depth in sorted(by_depth)]
    return result


@dataclass(frozen=True)
class _Answer:
    tokens: list[bool]  # whether each token is the most likely one
    right: float  # log-likelihoods
    wrong: list[float]


def _count(query: Query, answer: _Answer, context: int, every: _Count, by_depth: dict[float, _Count]) -> None:
    counts = [every]
    every.greedy[context].append(all(answer.tokens))
    if len(query.depths) == 1:
        counts.append(by_depth[query.depths[0]])
        by_depth[query.depths[0]].greedy[context].append(all(answer.tokens))
    else:  # each token of the answer has its own place in the context
        for depth, right in zip(query.depths, answer.tokens):
            by_depth[depth].greedy[context].append(right)
    for count in counts:
        count.nats.append(-answer.right)
        if answer.wrong:
            count.choice[context].append(answer.right > max(answer.wrong))


def _batches(samples: Iterator[Sample], size: int) -> Iterator[list[Sample]]:
    """Samples that can be evaluated together: as many as fit, with contexts of one length."""
    batch: list[Sample] = []
    for sample in samples:
        if batch and (len(batch) == size or len(sample.context) != len(batch[0].context)):
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


def _read(
    model: GPT, batch: list[Sample], length: int, chunk: int | None, device: torch.device
) -> Iterator[tuple[list[Query], list[_Answer]]]:
    """Read the contexts once, then ask the first question of each, the second of each, and so on."""
    cache = model.new_cache(length)
    context = torch.from_numpy(np.stack([s.context for s in batch])).to(device)
    model.prefill(context, cache, chunk or context.shape[1])
    for asked in zip(*(s.queries for s in batch), strict=True):
        yield list(asked), _ask(model, cache, list(asked))


def _ask(model: GPT, cache: Cache, queries: list[Query]) -> list[_Answer]:
    """Score the right answers and the wrong ones; the cache is left as it was."""
    right = _score(model, cache, queries, [query.answer for query in queries])
    wrong = [_score(model, cache, queries, list(others)) for others in zip(*(q.others for q in queries), strict=True)]
    return [_Answer(tokens, score, [others[row][1] for others in wrong]) for row, (tokens, score) in enumerate(right)]


def _score(model: GPT, cache: Cache, queries: list[Query], answers: list[np.ndarray]) -> list[tuple[list[bool], float]]:
    """For the answer of each row, whether each token is the most likely one, and their log-likelihood.

    One forward over prompt and answer. Rows are padded at their end, which causal attention never sees.
    """
    asked, longest = len(queries[0].prompt), max(map(len, answers))
    padded = np.zeros((len(answers), longest), np.int64)
    for row, answer in enumerate(answers):
        padded[row, : len(answer)] = answer
    device = next(model.parameters()).device
    targets = torch.from_numpy(padded).to(device)
    prompt = torch.from_numpy(np.stack([query.prompt for query in queries])).to(device)
    before = cache.snapshot()
    hidden = model.hidden(torch.cat([prompt, targets[:, :-1]], 1), cache)
    cache.restore(before)
    logits = model.logits(hidden[:, asked - 1 :]).float()  # (B, tokens of the longest answer, V)
    scores = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    most_likely = (logits.argmax(-1) == targets).tolist()
    return [
        (most_likely[row][: len(answer)], float(scores[row, : len(answer)].sum())) for row, answer in enumerate(answers)
    ]
