"""From sources to shards: every format, every way to stop, every error that a user can make."""

import gzip
import importlib
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lssar
from lssar.data.batches import TokenBatches
from lssar.data.decode import decode_shards, decoded, tokenizer_of
from lssar.data.prepare import Settings, prepare
from lssar.data.shards import ShardInProgress, open_shard
from lssar.data.stream import TokenStream
from lssar.data.tokenizers import BytesTokenizer, Gpt2Tokenizer

module = importlib.import_module("lssar.data.prepare")  # the package's own name `prepare` is the function
TEXTS = ["one", "zwei\nlines", "drei ünïcode \U0001f600", "four" * 20, "5"]
BYTES = BytesTokenizer()


def tokens_of(texts):
    return [token for text in texts for token in [256, *text.encode()]]


def made(source, out, tokenizer=BYTES, workers=1, report=None, overwrite=False, **changes):
    sources = [str(source)] if not isinstance(source, list) else list(map(str, source))
    chosen = Settings(**(dict(name="x", sources=sources, shard_tokens=50) | changes))
    return prepare(chosen, tokenizer, out, workers=workers, report=report, overwrite=overwrite).parent


def files(folder):
    """Name and content of all but the manifest, which holds a date."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "manifest.json"}


def write_jsonl(path, texts, opener=open):
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"id": 1, "text": text}) + "\n" for text in texts)
    return path


def a_folder(path):
    for number, text in enumerate(TEXTS):
        file = path / ("ab"[number // 3]) / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
    (path / "picture.png").write_bytes(b"\x89PNG")
    (path / ".hidden.txt").write_text("not me")
    return path


def a_parquet(path, rows_in_group=2):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"n": range(len(TEXTS)), "text": TEXTS}), path, row_group_size=rows_in_group)
    return path


def separated(path):
    path.write_bytes("<|endoftext|>".join(TEXTS).encode())
    return path


def ids_after(path):
    """uint16 ids with the end-of-document id after each document."""
    ids = np.array([token for text in TEXTS for token in [*text.encode(), 256]], "<u2")
    with lzma.open(path, "wb") as file:
        file.write(ids.tobytes())
    return path


SOURCES = {
    "folder": lambda p: a_folder(p / "folder"),
    "jsonl": lambda p: write_jsonl(p / "a.jsonl", TEXTS),
    "jsonl.gz": lambda p: write_jsonl(p / "a.jsonl.gz", TEXTS, gzip.open),
    "jsonl.xz": lambda p: write_jsonl(p / "a.jsonl.xz", TEXTS, lzma.open),
    "parquet": lambda p: a_parquet(p / "a.parquet"),
    "separated": lambda p: separated(p / "a.txt"),
    "u16.xz": lambda p: ids_after(p / "a.u16.xz"),
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("skip", range(len(TEXTS) + 1))
def test_a_source_can_start_anywhere(tmp_path, kind, skip):
    from lssar.data.sources import Reading, find_units

    units = find_units([str(SOURCES[kind](tmp_path))], Reading(separator="<|endoftext|>", eot=256, vocab_size=257))
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
    assert manifest["splits"]["train"] == {
        "documents": 5,
        "tokens": len(stream),
        "shards": ["x_train_000001.bin", "x_train_000002.bin", "x_train_000003.bin"],
    }
    assert manifest["tokenizer"] == {"kind": "bytes"} and manifest["eot"] == 256
    assert manifest["settings"]["shard_tokens"] == 50 and manifest["environment"]["python"]
    assert {path.name for path in out.iterdir()} == {"manifest.json", *manifest["splits"]["train"]["shards"]}
    assert list(decoded(out, tokenizer_of(out))) == TEXTS


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


# --- what is set apart


def test_validation(tmp_path):
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
    assert list((tmp_path / "all").iterdir()) == []


def test_max_tokens(tmp_path):
    out = made(write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "out", max_tokens=5)
    assert list(decoded(out, BYTES)) == TEXTS[:2]


# --- workers and interruptions


@pytest.fixture
def findable(monkeypatch):
    """Other processes import lssar from where this one does."""
    monkeypatch.setenv("PYTHONPATH", str(Path(lssar.__file__).parents[1]))


def test_workers_change_nothing(tmp_path, monkeypatch, findable):
    monkeypatch.setattr("lssar.data.workers._BATCH_CHARACTERS", 100)
    texts = [f"{number} " * (number % 50) for number in range(400)]
    source = [write_jsonl(tmp_path / "a.jsonl", texts), SOURCES["u16.xz"](tmp_path)]
    changes = dict(val_share=0.05, shard_tokens=999)
    one = made(source, tmp_path / "one", **changes)
    three = made(source, tmp_path / "three", workers=3, **changes)
    assert files(one) == files(three)
    assert len(files(one)) > 10


class Stop(BaseException):
    pass


def interrupted(out, source, after, **changes):
    """Stops after some documents, as Ctrl-C would."""
    seen = 0

    def report(status):
        nonlocal seen
        seen += 1
        if seen == after:
            raise Stop

    with pytest.raises(Stop):
        made(source, out, report=report, **changes)


@pytest.mark.parametrize("changes", [dict(), dict(val_share=0.4), dict(val_documents=3), dict(val_shard=True)], ids=str)
@pytest.mark.parametrize("seconds", [0.0, 1e9])  # a safe point after each document, or after each shard
def test_interrupted_anywhere(tmp_path, monkeypatch, changes, seconds):
    monkeypatch.setattr(module, "_SAFE_POINT_SECONDS", seconds)
    texts = ["x" * (7 * number % 23) for number in range(30)]
    source = [write_jsonl(tmp_path / "a.jsonl", texts[:20]), write_jsonl(tmp_path / "b.jsonl", texts[20:])]
    straight = files(made(source, tmp_path / "straight", **changes))
    for after in range(1, 31, 9):
        out = tmp_path / f"after-{after}"
        interrupted(out, source, after, **changes)
        interrupted(out, source, 1, **changes)  # and again at once
        assert files(made(source, out, **changes)) == straight


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("moment", ["append", "flush", "finish", "finished", "saved"])
def test_killed_at_the_worst_moment(tmp_path, monkeypatch, moment):
    """kill -9 within a process that shares nothing but the disk with the one that goes on."""
    monkeypatch.setattr(module, "_SAFE_POINT_SECONDS", 0.0)
    source = write_jsonl(tmp_path / "a.jsonl", ["x" * (7 * number % 23) for number in range(30)])
    straight = files(made(source, tmp_path / "straight", val_share=0.2))

    for count in (1, 4):
        out = tmp_path / str(count)
        child = os.fork()
        if child == 0:
            try:
                _die_at(moment, count)
                made(source, out, val_share=0.2)
            finally:
                os._exit(1)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        assert not (out / "manifest.json").exists()
        assert files(made(source, out, val_share=0.2)) == straight


def _die_at(moment, count):
    owner, name = (module, "write_json") if moment == "saved" else (ShardInProgress, moment.removesuffix("ed"))
    original = getattr(owner, name)
    calls = 0

    def deadly(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == count and not moment.endswith("ed"):
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **options)
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


SLOW = """
import importlib, sys, time
module = importlib.import_module("lssar.data.prepare")
from lssar.data import workers
from lssar.data.tokenizers import BytesTokenizer
if __name__ == "__main__":
    module._SAFE_POINT_SECONDS, workers._BATCH_CHARACTERS = 0.0, 100
    settings = module.Settings("x", [sys.argv[1]], shard_tokens=50)
    def report(status):
        print(status.total_tokens, flush=True)
        time.sleep(0.01)
    module.prepare(settings, BytesTokenizer(), sys.argv[2], workers=2, report=report)
"""


@pytest.mark.parametrize("how", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_stopped_command_leaves_no_workers_and_goes_on(tmp_path, how, findable):
    source = write_jsonl(tmp_path / "a.jsonl", ["x" * (7 * number % 23) for number in range(500)])
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    process = subprocess.Popen(
        [sys.executable, script, source, tmp_path / "out"],
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for _ in range(20):
        assert process.stdout.readline()
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does: the workers get it too
    else:
        process.kill()
    process.stdout.close()
    process.wait(timeout=20)
    for _ in range(100):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    else:
        pytest.fail("processes were left behind")
    assert (tmp_path / "out" / ".x_progress.json").exists()
    again = []
    out = made(source, tmp_path / "out", report=lambda status: again.append(status.total_tokens))
    assert again[0] > 100  # it did go on, not begin again
    assert files(out) == files(made(source, tmp_path / "straight"))


def test_a_killed_worker_is_an_error_not_a_hang(tmp_path, monkeypatch, findable):
    monkeypatch.setattr("lssar.data.workers._BATCH_CHARACTERS", 100)
    source = write_jsonl(tmp_path / "a.jsonl", ["x" * 50] * 2000)

    class Deadly(BytesTokenizer):
        def __setstate__(self, state):  # the worker that receives it dies, as for lack of memory
            os.kill(os.getpid(), signal.SIGKILL)

        def __getstate__(self):
            return {"a": 1}

    globals()["Deadly"] = Deadly
    Deadly.__qualname__ = "Deadly"
    with pytest.raises(ChildProcessError, match="worker was killed"):
        made(source, tmp_path / "out", Deadly(), workers=2)


def test_only_one_at_a_time(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)

    def report(status):
        with pytest.raises(FileExistsError, match="another process is preparing data"):
            made(source, tmp_path / "out")

    made(source, tmp_path / "out", report=report)


def test_a_full_disk(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    source = write_jsonl(tmp_path / "a.jsonl", ["x" * 1000] * 400)
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("cannot mount a small tmpfs here")
    try:
        with pytest.raises(OSError, match=r"No space left on device; .* is not lost.*x_train_00000[1-9]\.bin"):
            made(source, mount / "out", shard_tokens=30_000)
        finished = sorted((mount / "out").glob("*.bin"))
        assert finished and all(len(open_shard(path)) == 30_000 for path in finished)
        subprocess.run(["mount", "-o", "remount,size=8m", str(mount)], check=True)
        made(source, mount / "out", shard_tokens=30_000)  # space was made: it goes on
        assert files(mount / "out") == files(made(source, tmp_path / "straight", shard_tokens=30_000))
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


# --- what is in the way


def test_nothing_is_overwritten_unasked(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    out = made(source, tmp_path / "out")
    (out / "x_train_notes.bin").write_bytes(b"mine")
    before = files(out)
    with pytest.raises(FileExistsError, match=r"manifest\.json exists"):
        made(source, out)
    (out / "manifest.json").unlink()
    with pytest.raises(FileExistsError, match=r"x_train_000001\.bin exists"):
        made(source, out)
    assert files(out) == before
    with pytest.raises(FileNotFoundError):  # asked, but with sources that are not there
        made(tmp_path / "b.jsonl", out, overwrite=True)
    assert files(out) == before
    made(source, out, overwrite=True, shard_tokens=10**6)  # the second and third shard must not stay
    assert set(files(out)) == {"x_train_000001.bin", "x_train_notes.bin"}


def test_an_unfinished_run_is_not_continued_with_other_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SAFE_POINT_SECONDS", 0.0)
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    interrupted(tmp_path / "out", source, 3)
    with pytest.raises(FileExistsError, match="shard_tokens was 50, is 51"):
        made(source, tmp_path / "out", shard_tokens=51)
    with pytest.raises(FileExistsError, match="another tokenizer"):
        made(source, tmp_path / "out", Gpt2Tokenizer())
    write_jsonl(source, [*TEXTS, "more"])
    with pytest.raises(FileExistsError, match="files were added, removed or changed"):
        made(source, tmp_path / "out")
    out = made(source, tmp_path / "out", overwrite=True)
    assert list(decoded(out, BYTES)) == [*TEXTS, "more"]


def test_a_run_that_failed_at_once_may_be_repeated_with_other_settings(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(ValueError, match="no field 'body'"):
        made(source, tmp_path / "out", text_field="body")
    assert list(decoded(made(source, tmp_path / "out"), BYTES)) == TEXTS


# --- bad input


CUT_GZIP = gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-9]  # with a time in it, the name of its test would change


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good \xff bad", r"a\.txt: byte 5 \(0xff\) is not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "\xe9"}\n', r"a\.jsonl, line 3: byte 25 \(0xe9\) is not UTF-8"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"txt": "b", "id": 1}\n',
            r"a\.jsonl, line 2: no field 'text', found fields txt, id",
        ),
        ("a.jsonl", b'["text"]\n', r"line 1: no field 'text', found list"),
        ("a.jsonl", b'{"text": 3}\n', r"line 1: field 'text' is int, expected text"),
        ("a.jsonl", b'{"text": "a"\n', r"line 1: not JSON"),
        ("a.jsonl", b'{"text": "a\\ud800"}\n', r"line 1: character 1 is a lone surrogate"),
        ("a.jsonl", b"", r"no text in .*a\.jsonl: 0 empty documents"),
        ("a.txt", b"", r"no text in .*a\.txt: 1 empty documents"),
        ("a.jsonl.gz", CUT_GZIP, r"a\.jsonl\.gz: damaged or truncated \.gz"),
        ("a.jsonl.gz", b"plain", r"a\.jsonl\.gz: damaged or truncated \.gz"),
        ("a.txt.xz", lzma.compress(b"text")[:-9], r"a\.txt\.xz: damaged or truncated \.xz"),
        ("a.u16", b"abc", r"a\.u16: an odd number of bytes"),
        ("a.parquet", b"PAR1 nonsense", r"a\.parquet: damaged or not a parquet file"),
    ],
)
def test_bad_input_is_named(tmp_path, name, content, message):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        made(tmp_path / name, tmp_path / "out", Gpt2Tokenizer() if "u16" in name else BYTES)


def test_bad_parquet_columns(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    broken = pyarrow.StringArray.from_buffers(
        1, pyarrow.py_buffer(np.array([0, 2], "<i4")), pyarrow.py_buffer(b"a\xff")
    )
    for column, message in [
        ({"body": ["a"]}, r"no column 'text', found body"),
        ({"text": [1]}, r"column 'text' is int64, expected string"),
        ({"text": ["a", None]}, r"a\.parquet, row 2: field 'text' is null"),
        ({"text": broken}, r"a\.parquet, row 1: byte 1 \(0xff\) is not UTF-8"),
    ]:
        parquet.write_table(pyarrow.table(column), path)
        with pytest.raises(ValueError, match=message):
            made(path, tmp_path / "out")


def test_undecodable_bytes_can_be_replaced(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfgood \xff bad")  # with a byte order mark, which is not text
    write_jsonl(tmp_path / "b.jsonl", ["a\ud800b"])
    out = made([tmp_path / "a.txt", tmp_path / "b.jsonl"], tmp_path / "out", undecodable="replace")
    assert list(decoded(out, BYTES)) == ["good \ufffd bad", "a\ufffdb"]


def test_missing_and_empty_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.txt: no such file.*hf:OWNER/NAME"):
        made(tmp_path / "gone.txt", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.png").touch()
    with pytest.raises(ValueError, match=r"empty: a folder with no files that end in \.txt.*--glob"):
        made(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(ValueError, match="no source"):
        made([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_glob(tmp_path):
    (tmp_path / "a.py").write_text("code")
    (tmp_path / "a.txt").write_text("text")
    out = made(tmp_path, tmp_path / "out", glob="*.py")
    assert list(decoded(out, BYTES)) == ["code"]


def test_bad_settings():
    for change, message in [
        (dict(name="a/b"), "name 'a/b'"),
        (dict(shard_tokens=0), "shard_tokens"),
        (dict(shard_tokens=2**31), "shard_tokens"),
        (dict(val_share=1.0), "val_share"),
        (dict(val_documents=-1), "val_documents"),
        (dict(separator=""), "separator"),
        (dict(val_share=0.1, val_shard=True), "val_share and val_shard: choose one"),
    ]:
        with pytest.raises(ValueError, match=message):
            Settings(**(dict(name="x", sources=["a"]) | change))


def test_prepared_shards_train(tmp_path):
    out = made(write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "out")
    batch = next(TokenBatches(out, batch=2, length=8, pack=True, eot=256, vocab_size=257, shuffle=False))
    assert batch.inputs[0, :6].tolist() == tokens_of(TEXTS)[:6]
