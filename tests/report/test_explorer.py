"""Sparse attention rows against dense ones, and the explorer page: what it holds, and what it says about bad input."""

import base64
import gzip
import json
import re

import numpy as np
import pytest
import torch

from lssar.attention import attention
from lssar.cli import main
from lssar.data.tokenizers import load_tokenizer
from lssar.model import GPT
from lssar.report import rows as rows_module
from lssar.report.explorer import MOST_MIB, Subject, check_size, pack_rows, token_texts, write_explorer
from lssar.report.rows import AT_LEAST, attention_rows
from lssar.training import recipe, train

LAYOUT = "softmax@8 lssa+lssar/none"
TEXT = "for i in range(10):\n    print(i, 'é')\n"


def model(**changes) -> GPT:
    torch.manual_seed(0)
    made = GPT(recipe("tiny-cpu", size="tiny", **changes).model()).eval()
    for parameter in made.parameters():  # rows of a fresh model are nearly uniform
        parameter.data *= 4
    return made


def dense_rows(gpt: GPT, ids: torch.Tensor) -> list[torch.Tensor]:
    """Weights (H, N, N) of each layer, from the reference."""
    found = []

    def look(module, inputs):
        q, k, v = module.qkv(*inputs[:2])

        def weights(q, k, v, spec, **others):
            return attention(q, k, v, spec, **others, window=module.window, return_weights=True, impl="reference")[1]

        found.append(module.attend(q, k, v, function=weights)[0])

    hooks = [block.attention.register_forward_pre_hook(look) for block in gpt.layers()]
    with torch.no_grad():
        gpt.hidden(ids[None])
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("block", [1 << 20, 64])
def test_sparse_rows_are_the_dense_ones(block, monkeypatch):
    monkeypatch.setattr(rows_module, "BLOCK_WEIGHTS", block)  # small: many blocks of one row
    gpt = model(layout=LAYOUT)
    ids = torch.randint(0, 257, (75,))
    found = attention_rows(gpt, ids, top=16, floor=1e-3)
    assert [layer.layer for layer in found] == [0, 1]
    for layer, dense in zip(found, dense_rows(gpt, ids)):
        assert len(layer.heads) == len(dense)
        for head, full in zip(layer.heads, dense):
            starts = torch.cat([torch.zeros(1, dtype=torch.int64), head.counts.cumsum(0)])
            for i, row in enumerate(full):
                keys, kept = (x[starts[i] : starts[i + 1]] for x in (head.keys, head.weights))
                assert (keys <= i).all() and len(set(keys.tolist())) == len(keys)
                torch.testing.assert_close(kept, row[keys], atol=1e-6, rtol=1e-4)
                assert (kept.diff() <= 1e-6).all()
                torch.testing.assert_close(head.left_out[i] + kept.sum(), row.sum(), atol=1e-5, rtol=1e-4)
                seen = min(i + 1, head.window or i + 1)
                assert len(keys) >= min(AT_LEAST, seen)
                others = row.clone()
                others[keys] = 0
                assert len(keys) == 16 or (others < 1e-3 + 1e-6).all()
                if head.spec.p is not None and i >= 3:  # what survives the threshold has weight
                    assert head.above[i] >= (row > 1e-6).sum()
                torch.testing.assert_close(head.effective[i], torch.special.entr(row).sum().exp(), atol=1e-3, rtol=1e-3)


def test_first_rows_have_no_threshold():
    head = attention_rows(model(attention="lssar"), torch.randint(0, 257, (5,)))[0].heads[0]
    assert head.above[:3].tolist() == [1, 2, 3]
    assert head.counts.tolist() == [1, 2, 3, 4, 5]


def test_packed_rows_come_back():
    """As explorer.js reads them."""
    head = attention_rows(model(attention="lssar"), torch.randint(0, 257, (50,)))[1].heads[2]
    data, n, entries = pack_rows(head), 50, len(head.keys)
    at = 0

    def take(dtype, count):
        nonlocal at
        part = np.frombuffer(data, dtype, count, at)
        at += part.nbytes
        return part

    def floats(count):
        return torch.from_numpy((take("<u2", count).astype("<u4") << 16).view("<f4").copy())

    assert take("<i4", n).tolist() == head.above.tolist()
    for value in (head.left_out, head.effective):
        torch.testing.assert_close(floats(n), value, atol=1e-6, rtol=2**-8)
    torch.testing.assert_close(floats(entries), head.weights, atol=1e-6, rtol=2**-8)
    torch.testing.assert_close(floats(entries), head.before, atol=1e-6, rtol=2**-8)
    low, high, counts = take("<u2", entries), take("u1", entries), take("u1", n)
    keys = np.repeat(np.arange(n), counts) - low.astype(int) - 65536 * high.astype(int)
    assert keys.tolist() == head.keys.tolist()
    assert at == len(data)


def test_tokens_are_shown_as_text():
    tokenizer = load_tokenizer("bytes")
    ids = torch.from_numpy(np.concatenate([[tokenizer.eot], tokenizer.encode("a\né")]).astype(np.int64))
    assert token_texts(tokenizer, ids) == ["⟨end of text⟩", "a", "\n", "⟨c3⟩", "⟨a9⟩"]


def test_a_page_of_two_models(tmp_path):
    tokenizer = load_tokenizer("bytes")
    subjects = [
        Subject("mixed", model(layout=LAYOUT), tokenizer),
        Subject("soft", model(attention="softmax"), tokenizer),
    ]
    page = write_explorer(subjects, TEXT, tmp_path / "x.html", title="<T>", tokens=30).read_text()
    assert "the first 30 tokens" in page and "<title>&lt;T&gt;</title>" in page
    panes = json.loads(re.search(r'id="panes">(.*?)</script>', page, re.S).group(1))
    assert [pane["name"] for pane in panes] == ["mixed", "soft"]
    assert "".join(panes[0]["tokens"][1:]) == TEXT[:29]
    kinds = [[head["mechanism"] for head in layer["heads"]] for layer in panes[0]["layers"]]
    assert kinds == [["softmax, window 8"] * 4, ["lssa", "lssa", "lssar, p = 15", "lssar, p = 15"]]
    blob = re.search(rf'id="{panes[0]["layers"][1]["heads"][3]["blob"]}">(.*?)</script>', page).group(1)
    assert gzip.decompress(base64.b64decode(blob))
    assert not re.search(r'(src|href)="(?!#|data:)', page)


def test_a_text_too_long_for_a_browser_is_refused_before_the_work():
    subject = Subject("x", model(), load_tokenizer("bytes"))
    with pytest.raises(ValueError, match=rf"more than the {MOST_MIB} MiB .*--tokens \d+"):
        check_size([subject], [10_000_000], 32, None)
    check_size([subject], [4096], 32, None)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    train(recipe("tiny-cpu", size="tiny", length=32, micro_batch=4, batch_tokens=128, steps=2, eval_batches=1), folder)
    return folder


def test_command(run, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    main(
        ["explore", str(run), "--text", str(tmp_path / "text.txt"), "--layers", "1", "--out", str(tmp_path / "x.html")]
    )
    assert "x.html" in capsys.readouterr().out.replace("\n", "")
    assert (tmp_path / "x.html").stat().st_size > 1e6


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no text", "--text FILE"), ("missing text", "is not a file"), ("empty", "empty"), ("no run", "config.json"),
        ("no checkpoint", "no finished checkpoint"), ("too long", "--tokens"), ("three", "one run or two"),
        ("layer", "layers 0 to 1"), ("exists", "exists"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line(case, words, run, tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "x.html"
    text.write_text("" if case == "empty" else TEXT if case != "too long" else "x" * 3_000_000)
    (tmp_path / "started").mkdir()
    (tmp_path / "started" / "config.json").write_text((run / "config.json").read_text())
    if case == "exists":
        out.write_text("mine")
    folder = {"no run": tmp_path, "no checkpoint": tmp_path / "started"}.get(case, run)
    arguments = {
        "no text": [], "missing text": ["--text", str(tmp_path / "no.txt")],
        "too long": ["--text", str(text), "--tokens", "3000000"], "three": [str(run), str(run), "--text", str(text)],
        "layer": ["--text", str(text), "--layers", "7"],
    }.get(case, ["--text", str(text)])  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main(["explore", str(folder), *arguments, "--out", str(out)])
    assert ended.value.code in (1, 2)
    said = capsys.readouterr().err.strip()
    assert words in said and said.count("\n") == 0
    assert not out.exists() or out.read_text() == "mine"
