"""From sources to shards and back: every format, and what is set apart."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lssar.data.batches import TokenBatches
from lssar.data.decode import decode_shards, decoded, manifest_tokenizer
from lssar.data.shards import open_shard
from lssar.data.stream import TokenStream
from lssar.data.tokenizers import Gpt2Tokenizer
from lssar.records import checksum
from tests.data.preparing import BYTES, SOURCES, TEXTS, files, interrupted, made, tokens_of, write_jsonl


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("skip", range(len(TEXTS) + 1))
def test_a_source_can_start_anywhere(tmp_path, kind, skip):
    from lssar.data.readers import ReadOptions, find_units

    units = find_units([str(SOURCES[kind](tmp_path))], ReadOptions(separator="<|endoftext|>", eot=256, vocab_size=257))
    if kind == "folder":
        assert len(units) == len(TEXTS)
        return
    (unit,) = units
    documents = list(unit.documents(skip))
    texts = [d.content if isinstance(d.content, str) else BYTES.decode(d.content) for d in documents]
    assert texts == TEXTS[skip:]
    assert all(str(tmp_path) in d.place and 0 < d.read <= unit.bytes for d in documents)


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source(tmp_path, kind):
    separator = "<|endoftext|>" if kind == "separated" else None
    out = made(SOURCES[kind](tmp_path), tmp_path / "out", separator=separator)
    stream = TokenStream(out)
    assert stream.read(0, len(stream)).tolist() == tokens_of(TEXTS)
    assert [len(shard) for shard in stream.shards] == [50, 50, len(stream) - 100]
    manifest = json.loads((out / "manifest.json").read_text())
    names = ["x_train_000001.bin", "x_train_000002.bin", "x_train_000003.bin"]
    sums = [checksum(out / name) for name in names]
    train = {"documents": 5, "tokens": len(stream), "shards": names, "sha256": sums}
    assert manifest["splits"]["train"] == train
    assert manifest["tokenizer"] == {"kind": "bytes"} and manifest["eot"] == 256
    assert manifest["settings"]["shard_tokens"] == 50 and manifest["environment"]["python"]
    assert {path.name for path in out.iterdir()} == {"manifest.json", *manifest["splits"]["train"]["shards"]}
    assert list(decoded(out, manifest_tokenizer(out))) == TEXTS


def test_a_dataset_by_name(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    out = made("hf:HuggingFaceFW/fineweb:sample-10BT", tmp_path / "out")
    assert asked == [(("HuggingFaceFW/fineweb", "sample-10BT"), {"split": "train", "streaming": True})]
    assert list(decoded(out, BYTES)) == TEXTS
    straight = files(out)
    interrupted(tmp_path / "again", "hf:HuggingFaceFW/fineweb:sample-10BT", after=3)
    assert files(made("hf:HuggingFaceFW/fineweb:sample-10BT", tmp_path / "again")) == straight
    with pytest.raises(ValueError, match="expected hf:OWNER/NAME"):
        made("hf:a:b:c:d", tmp_path / "bad")


def test_gpt2_ids_without_gpt2s_files(tmp_path):
    (tmp_path / "a.u16").write_bytes(np.array([1, 2, 50256, 3], "<u2").tobytes())
    out = made(tmp_path / "a.u16", tmp_path / "out", Gpt2Tokenizer())
    assert open_shard(out / "x_train_000001.bin").tokens.tolist() == [50256, 1, 2, 50256, 3]
    with pytest.raises(ValueError, match=r"a\.u16: token 2 is 50256, but the vocabulary has 257"):
        made(tmp_path / "a.u16", tmp_path / "bytes")


def test_back_and_forth(tmp_path):
    out = made(SOURCES["jsonl"](tmp_path), tmp_path / "out")
    for name, separator in (("back.jsonl", None), ("back.txt", "<|endoftext|>")):
        back = decode_shards(out, BYTES, tmp_path / name)
        assert files(made(back, tmp_path / f"from-{name}", separator=separator)) == files(out)
    with pytest.raises(FileExistsError):
        decode_shards(out, BYTES, back)


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.text(min_size=1), min_size=1, max_size=6), shard_tokens=st.integers(1, 30))
def test_any_text_comes_back(tmp_path_factory, texts, shard_tokens):
    folder = tmp_path_factory.mktemp("any")
    out = made(write_jsonl(folder / "a.jsonl", texts), folder / "out", shard_tokens=shard_tokens)
    assert list(decoded(out, BYTES)) == texts


def test_documents_held_out_for_validation(tmp_path):
    texts = [f"document {number}" for number in range(300)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)

    def split(name, **changes):
        out = made(source, tmp_path / name, shard_tokens=1000, **changes)
        val = sorted(out.glob("*_val_*.bin"))
        assert not val or val[0].name == "x_val_000000.bin"
        return [list(decoded(part, BYTES)) if part else [] for part in (sorted(out.glob("*_train_*.bin")), val)]

    assert split("none") == [texts, []]
    assert split("documents", val_documents=7) == [texts[7:], texts[:7]]
    train, val = split("share", val_share=0.1)
    assert val == texts[9::10]
    assert sorted(train + val) == sorted(texts)
    extra = write_jsonl(tmp_path / "val.jsonl", ["held", "out"])
    assert split("sources", val_sources=[str(extra)]) == [texts, ["held", "out"]]
    out = made(source, tmp_path / "shard", shard_tokens=1000, val_shard=True)  # as llm.c: cut wherever the shard ends
    assert [path.name for path in sorted(out.glob("*.bin"))][-1] == "x_val_000000.bin"
    assert len(open_shard(out / "x_val_000000.bin")) == 1000
    both = TokenStream([out / "x_val_000000.bin", *sorted(out.glob("*_train_*.bin"))])
    assert both.read(0, len(both)).tolist() == tokens_of(texts)

    for changes in (dict(val_documents=300), dict(val_shard=True, shard_tokens=10**6)):
        with pytest.raises(ValueError, match=r"300 documents \(.*\) went to validation"):
            made(source, tmp_path / "all", **changes)
    assert not (tmp_path / "all").exists()


def test_max_tokens(tmp_path):
    out = made(write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "out", max_tokens=5)
    assert list(decoded(out, BYTES)) == TEXTS[:2]


def test_glob(tmp_path):
    (tmp_path / "a.py").write_text("code")
    (tmp_path / "a.txt").write_text("text")
    out = made(tmp_path, tmp_path / "out", glob="*.py")
    assert list(decoded(out, BYTES)) == ["code"]


def test_prepared_shards_train(tmp_path):
    out = made(write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "out")
    batch = next(TokenBatches(out, batch=2, length=8, pack=True, eot=256, vocab_size=257, shuffle=False))
    assert batch.inputs[0, :6].tolist() == tokens_of(TEXTS)[:6]
