"""The .bin format: as llm.c lays it out, and what a damaged file says."""

import errno
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lssar
from lssar.data.shards import HEADER_BYTES, Shard, ShardInProgress, open_shard, write_shard
from lssar.data.stream import TokenStream, find_shards


def by_hand(tokens, magic=20240520, version=1, count=None, code="H"):
    """llm.c's write_datafile, spelled out byte by byte."""
    header = struct.pack("<3i", magic, version, len(tokens) if count is None else count) + bytes(253 * 4)
    return header + b"".join(struct.pack(f"<{code}", token) for token in tokens)


@pytest.mark.parametrize(
    ("magic", "version", "code", "vocab_size"), [(20240520, 1, "H", 65536), (20240801, 7, "I", 65537)]
)
def test_layout_is_llmc(tmp_path, magic, version, code, vocab_size):
    tokens = [50256, 0, 1, 513, 65535]
    raw = by_hand(tokens, magic, version, code=code)
    (tmp_path / "theirs.bin").write_bytes(raw)
    shard = open_shard(tmp_path / "theirs.bin")
    assert shard.tokens.tolist() == tokens
    assert isinstance(shard.tokens, np.memmap)
    ours = write_shard(tmp_path / "ours.bin", np.array(tokens), vocab_size)
    assert ours.read_bytes() == raw


@settings(max_examples=30, deadline=None)
@given(pieces=st.lists(st.lists(st.integers(0, 99_999), max_size=20), max_size=5), wide=st.booleans())
def test_round_trip(tmp_path_factory, pieces, wide):
    vocab_size = 100_000 if wide else 65_536
    arrays = [np.array(piece, np.int64) % vocab_size for piece in pieces]
    path = tmp_path_factory.mktemp("shard") / "x.bin"
    write_shard(path, iter(arrays), vocab_size)
    assert open_shard(path).tokens.tolist() == [token for array in arrays for token in array.tolist()]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "0 bytes, expected a header of 1024"),
        (bytes(1023), "1023 bytes, expected a header"),
        (by_hand([1], magic=1), r"magic number 1, expected 20240520 \(uint16\), 20240801 \(uint32\)"),
        (by_hand([1], magic=20240522), "multiple-choice evaluation file"),
        (by_hand([1], version=2), "version 2, expected 1"),
        (by_hand([1], magic=20240801), "version 1, expected 7"),
        (by_hand([1], count=-1), "-1 tokens"),
        (by_hand([1, 2, 3])[:-1], r"truncated: 1,029 bytes found, 1,030 expected for the 3 uint16"),
        (by_hand([1, 2, 3], count=2), r"longer than its header says: 1,030 bytes found, 1,028 expected"),
    ],
)
def test_a_damaged_shard_is_named(tmp_path, raw, message):
    (tmp_path / "bad.bin").write_bytes(raw)
    with pytest.raises(ValueError, match=message) as caught:
        open_shard(tmp_path / "bad.bin")
    assert str(tmp_path / "bad.bin") in str(caught.value)


def test_ids_outside_the_vocabulary(tmp_path):
    path = write_shard(tmp_path / "x.bin", np.array([1, 2, 300, 4]), 65_536)
    open_shard(path).check_tokens(301)
    with pytest.raises(ValueError, match=r"x\.bin: token 2 is 300, but the vocabulary has 257 ids \(0 to 256\)"):
        open_shard(path).check_tokens(257)
    for tokens, message in [([257], "token 0 is 257"), ([-1], "negative"), ([0.5], "integers"), ([[1]], "row")]:
        with pytest.raises(ValueError, match=message):
            write_shard(tmp_path / "y.bin", np.array(tokens), 257)
    assert find_shards(tmp_path) == [path]


def test_larger_than_memory(tmp_path):
    """A sparse file of 4 GB is opened and read at both ends without reading what lies between."""
    path, count = tmp_path / "big.bin", 2**31 - 1
    path.write_bytes(by_hand([7], count=count))
    os.truncate(path, HEADER_BYTES + 2 * count)
    stream = TokenStream([path, path])
    assert len(stream) == 2 * count
    assert stream.read(0, 2).tolist() == [7, 0]
    assert stream.read(count - 1, 3).tolist() == [0, 7, 0]
    assert stream.place(count + 1) == (path, 1)


def test_nothing_is_overwritten_unasked(tmp_path):
    path = write_shard(tmp_path / "x.bin", np.array([1]), 257)
    with pytest.raises(FileExistsError, match=r"x\.bin exists"):
        write_shard(path, np.array([2]), 257)
    write_shard(path, np.array([2]), 257, overwrite=True)
    assert open_shard(path).tokens.tolist() == [2]  # not a mapping of the old file


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    path = write_shard(tmp_path / "x.bin", np.array([1, 2]), 257)

    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left.*x\.bin") as caught:
        write_shard(path, np.array([3]), 257, overwrite=True)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match=r"No space left.*y\.bin"):
        write_shard(tmp_path / "y.bin", np.array([3]), 257)
    assert list(tmp_path.iterdir()) == [path]
    assert open_shard(path).tokens.tolist() == [1, 2]


def test_a_really_full_disk(tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount a small tmpfs here")
    try:
        path = write_shard(tmp_path / "x.bin", np.array([1, 2]), 257)
        with pytest.raises(OSError, match=r"No space left.*y\.bin"):
            write_shard(tmp_path / "y.bin", np.zeros(10**5, np.uint16), 257)
        assert list(tmp_path.iterdir()) == [path]
        assert open_shard(path).tokens.tolist() == [1, 2]
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_in_progress(tmp_path):
    path = tmp_path / "x.bin"
    shard = ShardInProgress(path, 257)
    shard.append(np.array([1, 2]))
    shard.flush()
    shard.append(np.array([3]))
    shard.close()
    with pytest.raises(FileNotFoundError):
        find_shards(tmp_path / "*.bin")
    shard = ShardInProgress(path, 257, tokens=2)  # 3 came after the safe point
    shard.append(np.array([4]))
    shard.finish()
    assert open_shard(path).tokens.tolist() == [1, 2, 4]
    shard = ShardInProgress(path, 257, tokens=1)  # finished after the safe point
    shard.finish()
    assert path.read_bytes() == by_hand([1])
    os.replace(path, shard.partial)
    with pytest.raises(ValueError, match="truncated"):
        ShardInProgress(path, 257, tokens=9)


def test_finding_shards(tmp_path):
    b, a = (write_shard(tmp_path / name, np.array([1]), 257) for name in ("b.bin", "a.bin"))
    assert find_shards(tmp_path) == find_shards(str(tmp_path / "*.bin")) == [a, b]
    assert find_shards([b, str(a)]) == [b, a]
    with pytest.raises(FileNotFoundError, match=r"nothing matches .*c\.bin"):
        find_shards([tmp_path / "c.bin"])
    with pytest.raises(ValueError, match="no shards"):
        find_shards([])


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=5), data=st.data())
def test_the_stream_has_no_seams(sizes, data):
    tokens = np.arange(sum(sizes), dtype=np.uint16)
    stream = object.__new__(TokenStream)
    parts = np.split(tokens, np.cumsum(sizes)[:-1])
    stream.shards = [_InMemory(part, Path(str(number))) for number, part in enumerate(parts)]
    stream._ends = np.cumsum(sizes)
    start = data.draw(st.integers(0, len(tokens)))
    count = data.draw(st.integers(0, len(tokens) + 3))
    assert stream.read(start, count).tolist() == tokens[start : start + count].tolist()
    for position in range(len(tokens)):
        path, offset = stream.place(position)
        assert parts[int(str(path))][offset] == position


class _InMemory(Shard):
    def __init__(self, tokens, path):
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "count", len(tokens))
        object.__setattr__(self, "held", tokens)

    tokens = property(lambda self: self.held)


def test_import_needs_no_extras():
    blocked = "tiktoken", "tokenizers", "pyarrow", "datasets", "rich", "tyro"
    code = f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\nimport lssar.data\n"
    code += "try: lssar.data.load_tokenizer('gpt2').encode('a')\nexcept ImportError as e: print(e)"
    environment = os.environ | {"PYTHONPATH": str(Path(lssar.__file__).parents[1])}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert "the gpt2 tokenizer needs the package tiktoken: pip install 'lssar[data]'" in result.stdout
