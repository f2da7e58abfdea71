"""The protocol for long readers: which lengths, which text, and how many questions.

Loss is evaluated at 1, 4, 16, 64, ... times the training length. No held-out document may be as long as the farthest
of these, so whole documents are joined in their order: every length sees the same tokens, and a boundary between two
documents can only make more context harder to use.

Retrieval is evaluated with at least 100 questions at each length. A passkey has a context of its own. Needles share
contexts: as many as fit at the training length, at most 8, the same number at every length. So do 16 pairs to recall.
Intervals count contexts as clusters (`lssar.evaluation.retrieval.clustered`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lssar.data.folder import DataFolder
from lssar.data.stream import TokenStream
from lssar.data.tasks import PAIRS, TaskMaker
from lssar.evaluation.retrieval import DEPTHS
from lssar.model import ModelConfig

FARTHEST = 512
QUESTIONS = 100
NEEDLES = 8
"""Largest number of needles in a context."""
GIVE_UP = 32
"""Answers after which a cell stops if none was right: the rate is then below 0.11 (95%)."""


def is_long_reader(config: ModelConfig) -> bool:
    """Whether a model has local layers, with a window, and global ones without."""
    windows = {layer.window for layer in config.layer_configs}
    return None in windows and len(windows) > 1


def far_multiples(farthest: int = FARTHEST) -> list[int]:
    """1, 4, 16, ... up to the farthest multiple, which is the last."""
    return [4**i for i in range(10) if 4**i < farthest] + [farthest]


def retrieval_multiples(farthest: int = FARTHEST) -> list[int]:
    """Those of `far_multiples` at which retrieval is evaluated: 256 says little beside 512."""
    return [multiple for multiple in far_multiples(farthest) if multiple != 256]


def joined_pieces(folder: Path, length: int, tokens: int) -> list[Tensor]:
    """About `tokens` held-out tokens in pieces of `length` + 1, evenly spaced over the joined documents."""
    stream = TokenStream(DataFolder(folder).held_out_shards())
    whole = (len(stream) - 1) // length
    if whole < 2:
        raise ValueError(f"{str(folder)!r} holds out {len(stream):,} tokens; pieces of {length:,} need twice as many")
    count = min(whole, max(2, tokens // length))
    starts = [i * whole // count * length for i in range(count)]
    return [torch.from_numpy(stream.read(start, length + 1).astype(np.int64)) for start in starts]


def needles_of(maker: TaskMaker, train_length: int) -> int:
    """Needles in a context: as many as fit at the training length, at least one."""
    return next((load for load in range(NEEDLES, 0, -1) if maker.shortest("needles", load) <= train_length), 1)


def retrieval_settings(maker: TaskMaker, task: str, train_length: int, questions: int = QUESTIONS) -> dict[str, Any]:
    """Arguments of `evaluate_retrieval` for at least so many questions: contexts, depths and when to stop."""
    depths: Sequence[float] = DEPTHS
    each = {"passkey": len(DEPTHS), "recall": PAIRS}.get(task, 1)
    if task == "needles":
        each = needles_of(maker, train_length)
        depths = tuple((i + 0.5) / each for i in range(each))
    return {"samples": -(-questions // each), "depths": depths, "choice": False, "give_up": GIVE_UP}


def shortest_context(maker: TaskMaker, task: str, train_length: int) -> int:
    """Tokens that a context of the protocol needs at least."""
    return maker.shortest(task, needles_of(maker, train_length) if task == "needles" else None)
