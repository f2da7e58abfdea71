"""The attention explorer: a page that shows, for every token of a text, which tokens it attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lssar.data.tokenizers import Tokenizer
from lssar.model import GPT
from lssar.report.page import document, embedded_bytes, embedded_json, text, write_page
from lssar.report.rows import HeadRows, LayerRows, attention_rows

BYTES_A_KEY = 6
"""Bytes of an entry in the page before compression: distance, weight, weight before re-weighting."""

MOST_MIB = 256
"""Largest page, before compression: browsers run out of memory soon after."""


@dataclass(frozen=True)
class Subject:
    """A model to look into."""

    name: str
    model: GPT
    tokenizer: Tokenizer


def page_mib(model: GPT, tokens: int, top: int, layers: Sequence[int] | None) -> float:
    """Upper bound of what one model's weights take in the page, before compression."""
    count = model.config.layers if layers is None else len(layers)
    return tokens * count * model.config.heads * top * BYTES_A_KEY / 2**20


def check_size(subjects: Sequence[Subject], lengths: Sequence[int], top: int, layers: Sequence[int] | None) -> None:
    needed = sum(page_mib(s.model, length, top, layers) for s, length in zip(subjects, lengths))
    if needed > MOST_MIB:
        fits = int(max(lengths) * MOST_MIB / needed)
        raise ValueError(
            f"the weights of {max(lengths):,} tokens may take {needed:,.0f} MiB, more than the {MOST_MIB} MiB that a "
            f"browser holds; give --tokens {fits}, fewer --layers or a smaller --top"
        )


def token_ids(tokenizer: Tokenizer, content: str, most: int) -> tuple[Tensor, bool]:
    """The first `most` ids of a text after the tokenizer's end-of-text token, and whether that is the whole text."""
    ids = np.concatenate([[tokenizer.eot], tokenizer.encode(content)]).astype(np.int64)
    return torch.from_numpy(ids[:most]), len(ids) <= most


def write_explorer(
    subjects: Sequence[Subject], content: str, out: Path, *, title: str, tokens: int = 4096, top: int = 32,
    layers: Sequence[int] | None = None, overwrite: bool = False, report: Any = lambda: None,
) -> Path:  # fmt: skip
    """One self-contained HTML page with the attention of each model over the text."""
    if not content:
        raise ValueError("the text is empty")
    if not 1 <= top <= 255:
        raise ValueError(f"top must lie in 1..255; got {top}")
    cut = [token_ids(s.tokenizer, content, tokens) for s in subjects]
    check_size(subjects, [len(ids) for ids, _ in cut], top, layers)
    panes, blobs = [], []
    for number, (subject, (ids, _)) in enumerate(zip(subjects, cut)):
        rows = attention_rows(subject.model, ids, top=top, layers=layers, report=report)
        losses = subject.model.token_losses(ids[None, :-1], ids[None, 1:])[0] if len(ids) > 1 else torch.zeros(0)
        described, data = _pane(number, subject, ids, rows, losses)
        panes.append(described)
        blobs += data
    shown = " and ".join(
        dict.fromkeys(f"{len(ids):,} tokens" if whole else f"the first {len(ids):,} tokens" for ids, whole in cut)
    )
    body = _body([s.name for s in subjects])
    data_html = embedded_json("panes", panes) + "".join(embedded_bytes(name, data) for name, data in blobs)
    page = document(
        title, shown, body, data_html, scripts=("page.js", "explorer.js"), styles=("page.css", "explorer.css")
    )
    return write_page(out, page, overwrite)


def _pane(
    number: int, subject: Subject, ids: Tensor, rows: Sequence[LayerRows], losses: Tensor
) -> tuple[dict[str, Any], list[tuple[str, bytes]]]:
    """What the page needs to know about one model, and its packed weights."""
    blobs = []
    described = []
    for layer in rows:
        heads = []
        for index, head in enumerate(layer.heads):
            name = f"rows-{number}-{layer.layer}-{index}"
            blobs.append((name, pack_rows(head)))
            heads.append({"blob": name, "mechanism": mechanism_text(head), "entries": len(head.keys),
                          "window": head.window, "p": head.spec.p, "threshold": head.threshold})  # fmt: skip
        described.append({"layer": layer.layer, "heads": heads})
    pieces = token_texts(subject.tokenizer, ids)
    pane = {
        "name": subject.name, "layers": described, "tokens": pieces, "trained": subject.model.config.train_length,
        "losses": [None, *(round(float(loss), 3) for loss in losses)],
    }  # fmt: skip
    return pane, blobs


def mechanism_text(head: HeadRows) -> str:
    power = "" if head.spec.p is None else f", p = {head.spec.p:g}"
    window = "" if head.window is None else f", window {head.window}"
    return head.spec.name + power + window


def pack_rows(head: HeadRows) -> bytes:
    """Little-endian arrays one after the other; explorer.js reads them in this order."""
    positions = torch.arange(len(head.counts)).repeat_interleave(head.counts)
    parts = [
        head.above.to(torch.int32), _bfloat16(head.left_out), _bfloat16(head.effective), _bfloat16(head.weights),
        _bfloat16(head.before) if head.before is not None else torch.zeros(0, dtype=torch.int16),
    ]  # fmt: skip
    distance = (positions - head.keys).numpy().astype("<u4")
    low, high = (distance & 0xFFFF).astype("<u2"), (distance >> 16).astype("u1")
    counts = head.counts.numpy().astype("u1")
    return b"".join([*(part.numpy().tobytes() for part in parts), low.tobytes(), high.tobytes(), counts.tobytes()])


def _bfloat16(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).view(torch.int16)


def token_texts(tokenizer: Tokenizer, ids: Tensor) -> list[str]:
    """The text of each token; bytes that are no whole character are shown in hexadecimal."""
    known: dict[int, str] = {tokenizer.eot: "⟨end of text⟩"}
    out = []
    for token in ids.tolist():
        if token not in known:
            shown = tokenizer.decode([token])
            known[token] = shown if "\ufffd" not in shown else f"⟨{token:02x}⟩"
        out.append(known[token])
    return out


def _body(names: Sequence[str]) -> str:
    panes = "".join(
        f'<section class="pane" data-pane="{i}" aria-label="{text(name)}"><h2>{text(name)}</h2>'
        '<div class="controls"><label>Layer <select class="layer"></select></label>'
        '<label>Head <select class="head"></select></label></div>'
        '<div class="tokens" tabindex="0" role="application" aria-roledescription="text" '
        'aria-label="Tokens. Arrow keys move, Escape releases."></div>'
        '<div class="facts"></div><div class="chart" role="img" aria-label="Weights by position of the key"></div>'
        '<ol class="keys" aria-label="Keys with the largest weights"></ol></section>'
        for i, name in enumerate(names)
    )
    help_text = (
        '<p class="help">Point at a token, or tap it, to see what it attends to. A tap or click holds it; Escape or a '
        "second click releases it. With the keyboard: Tab to a text, then the arrow keys, Home and End.</p>"
    )
    return f'<main>{help_text}<div class="panes" data-count="{len(names)}">{panes}</div>' + (
        '<p id="spoken" class="hidden" aria-live="polite"></p></main>'
    )
