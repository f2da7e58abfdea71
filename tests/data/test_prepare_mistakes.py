"""Every error that a user can make: what is in the way, bad input, missing sources, bad settings."""

import gzip
import lzma

import numpy as np
import pytest

from lssar.data.decode import decoded
from lssar.data.prepare import Settings
from lssar.data.tokenizers import Gpt2Tokenizer
from tests.data.preparing import BYTES, TEXTS, files, interrupted, made, prepare_module, write_jsonl

# --- what is in the way


def test_only_one_at_a_time(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)

    def report(status):
        with pytest.raises(FileExistsError, match="is in use by process"):
            made(source, tmp_path / "out")

    made(source, tmp_path / "out", report=report)


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
    monkeypatch.setattr(prepare_module, "_SAFE_POINT_SECONDS", 0.0)
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


def test_a_resumed_run_checks_what_it_builds_on(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "_SAFE_POINT_SECONDS", 0.0)
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    out = tmp_path / "out"
    interrupted(out, source, 4)
    finished, progress = out / "x_train_000001.bin", out / ".x_progress.json"
    shard, notes = finished.read_bytes(), progress.read_text()
    finished.write_bytes(shard[:-1] + b"x")
    with pytest.raises(ValueError, match=r"x_train_000001\.bin is damaged or was replaced"):
        made(source, out)
    finished.unlink()
    with pytest.raises(FileNotFoundError, match=r"x_train_000001\.bin is missing"):
        made(source, out)
    finished.write_bytes(shard)
    for text in ("", "[]", "{}", notes.replace('"document": ', '"document": 1'), '{"status": 3, "identity": {}}'):
        progress.write_text(text)
        with pytest.raises(ValueError, match=r"x_progress\.json"):
            made(source, out)
    progress.write_text(notes)
    assert list(decoded(made(source, out), BYTES)) == TEXTS
    progress.write_text(notes)  # as a process leaves it that is killed after it has written the manifest
    with pytest.raises(FileExistsError, match="a dataset is finished there"):
        made(source, out)
    assert not progress.exists()


def test_a_run_that_failed_at_once_may_be_repeated_with_other_settings(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(ValueError, match="no field 'body'"):
        made(source, tmp_path / "out", text_field="body")
    assert list(decoded(made(source, tmp_path / "out"), BYTES)) == TEXTS


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_failed_under_another_name_is_removed(tmp_path, overwrite):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(ValueError, match="no field 'body'"):
        made(source, tmp_path / "out", name="y", text_field="body")
    out = made(source, tmp_path / "out", overwrite=overwrite)
    assert not [path.name for path in out.iterdir() if "y_" in path.name]


def test_what_was_begun_under_another_name_is_not_lost_unasked(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "_SAFE_POINT_SECONDS", 0.0)
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    out = tmp_path / "out"
    interrupted(out, source, 4, name="y")
    before = files(out)
    with pytest.raises(FileExistsError, match="an unfinished run named 'y'"):
        made(source, out)
    assert files(out) == before
    assert list(decoded(made(source, out, name="y"), BYTES)) == TEXTS
    interrupted(tmp_path / "other", source, 4, name="y")
    made(source, tmp_path / "other", overwrite=True)
    assert not [path.name for path in (tmp_path / "other").iterdir() if "y_" in path.name]


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
        ("a.jsonl", b'{"text": ' + b"[" * 100_000, r"line 1: JSON that is nested too deeply"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ' + b"1" * 10_000 + b"}\n", r"line 2: JSON with a number that is too"),
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


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.txt"])
@pytest.mark.parametrize("separator", [None, "<|endoftext|>"])
def test_a_document_that_would_fill_memory(tmp_path, monkeypatch, name, separator):
    monkeypatch.setattr("lssar.data.readers._MOST_BYTES", 1 << 20)
    monkeypatch.setattr("lssar.data.readers._PIECE", 1 << 16)
    bomb = b" " * (4 << 20)
    (tmp_path / name).write_bytes(gzip.compress(bomb) if name.endswith("gz") else bomb)
    with pytest.raises(ValueError, match=rf"{name}.*: a document of more than 1,048,576 bytes"):
        made(tmp_path / name, tmp_path / "out", separator=separator)


@pytest.mark.parametrize("target", ["gone.txt", "link.txt"])
def test_links_that_lead_nowhere(tmp_path, target):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "good.txt").write_text("text")
    (folder / "link.txt").symlink_to(target)
    for source in (folder, folder / "link.txt"):
        with pytest.raises(FileNotFoundError, match=r"link\.txt: a link to .*, which is missing or leads back"):
            made(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


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
    with pytest.raises(ValueError, match=r"--glob /\*: must be relative"):
        made(tmp_path / "empty", tmp_path / "out", glob="/*")
    with pytest.raises(ValueError, match="no source"):
        made([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bad_settings():
    for change, message in [
        (dict(name="a/b"), "name 'a/b'"),
        (dict(shard_tokens=0), "shard_tokens"),
        (dict(shard_tokens=2**31), "shard_tokens"),
        (dict(val_share=1.0), "val_share"),
        (dict(val_documents=-1), "val_documents"),
        (dict(separator=""), "separator"),
        (dict(max_tokens=-1), "max_tokens"),
        (dict(val_share=0.1, val_shard=True), "val_share and val_shard: choose one"),
    ]:
        with pytest.raises(ValueError, match=message):
            Settings(**(dict(name="x", sources=["a"]) | change))
