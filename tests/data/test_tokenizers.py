"""Tokenizers: the protocol, each kind, their records."""

import base64
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lssar.data.tokenizers import (
    BytesTokenizer,
    Gpt2Tokenizer,
    JsonTokenizer,
    load_tokenizer,
    save_tokenizer,
    tokenizer_from_dict,
)


@pytest.fixture(scope="session")
def ranks_file(tmp_path_factory):
    """A stand-in for GPT-2's ranks, which no test may download: as many ranks, but mostly of nonsense."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [b"th", b"the"] + [bytes([0xFF, number >> 8, number & 255]) for number in range(50256 - 258)]
    path = tmp_path_factory.mktemp("ranks") / "gpt2.tiktoken"
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)))
    return path


@pytest.fixture(scope="session")
def json_file(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end_of_text|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat and the hat, the bat"] * 4, trainer)
    path = tmp_path_factory.mktemp("json") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = BytesTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16 and len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_bytes_between_documents():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eot) == (257, 256)
    assert tokenizer.decode([256, 97, 256, 98]) == "<|endoftext|>a<|endoftext|>b"
    assert tokenizer.decode([0xC3]) == "\ufffd"
    for bad in (257, -1):
        with pytest.raises(ValueError, match=f"token {bad} is outside the vocabulary of bytes, 0 to 256"):
            tokenizer.decode([97, bad])


def test_gpt2_from_ranks(ranks_file):
    pytest.importorskip("tiktoken")
    tokenizer = load_tokenizer(ranks_file)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eot) == ("gpt2", 50257, 50256)
    assert tokenizer.encode("the").tolist() == [257]
    text = "The thé,\n\n<|endoftext|> 12\r\n\U0001f600"
    ids = tokenizer.encode(text)
    assert 50256 not in ids  # spelled out in a document, it is text
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([50256, 257]) == "<|endoftext|>the"
    assert pickle.loads(pickle.dumps(tokenizer)).encode(text).tolist() == ids.tolist()


def test_a_ranks_file_that_changed_is_read_again(ranks_file, tmp_path, monkeypatch):
    pytest.importorskip("tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))  # tiktoken's cache knows files by their path
    copy = tmp_path / "gpt2.tiktoken"
    copy.write_bytes(ranks_file.read_bytes())
    assert load_tokenizer(copy).encode("the").tolist() == [257]
    lines = copy.read_text().splitlines()
    lines[256], lines[257] = (lines[i].split()[0] + f" {rank}" for i, rank in ((257, 256), (256, 257)))
    copy.write_text("\n".join(lines) + "\n")
    assert load_tokenizer(copy).ranks[b"the"] == 256


def test_gpt2_ids_need_no_files():
    assert (load_tokenizer("gpt2").vocab_size, load_tokenizer("gpt2").eot) == (50257, 50256)


def test_gpt2_without_a_network(monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")

    def unreachable(name):
        raise ConnectionError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(OSError, match=r"could not download.*ranks file"):
        load_tokenizer("gpt2").encode("a")


@pytest.mark.parametrize(
    ("content", "message"),
    [("IQ== 0\n", "1 ranks, expected GPT-2's 50,256"), ("IQ== 0\nnonsense\n", "Error parsing line b'nonsense'")],
)
def test_a_bad_ranks_file(tmp_path, content, message):
    (tmp_path / "bad.tiktoken").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path / "bad.tiktoken")


def test_tokenizer_json(json_file):
    tokenizer = load_tokenizer(json_file)
    assert tokenizer.eot == 0 and tokenizer.vocab_size >= 257
    text = "the cat <|end_of_text|> naïve"
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16 and tokenizer.eot not in ids
    assert tokenizer.decode(ids) == text
    assert load_tokenizer(json_file.parent).encode(text).tolist() == ids.tolist()
    assert pickle.loads(pickle.dumps(tokenizer)).encode(text).tolist() == ids.tolist()
    named = load_tokenizer(json_file, eot="t")
    assert named.eot == tokenizer.encode("t")[0]
    with pytest.raises(ValueError, match="no token 'nope'"):
        load_tokenizer(json_file, eot="nope")


def test_a_bad_tokenizer(tmp_path, json_file):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match=r"x\.json: not a tokenizer\.json"):
        load_tokenizer(tmp_path / "x.json")
    with pytest.raises(FileNotFoundError, match="neither bytes nor gpt2"):
        load_tokenizer("gpt3")
    content = json.loads(json_file.read_text().replace("<|end_of_text|>", "<|fin|>"))
    (tmp_path / "y.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="cannot tell the end-of-document token"):
        load_tokenizer(tmp_path / "y.json")
    assert load_tokenizer(tmp_path / "y.json", eot="<|fin|>").eot == 0


def test_tokenizers_load_from_their_records(tmp_path, ranks_file, json_file):
    for tokenizer in (BytesTokenizer(), Gpt2Tokenizer(), Gpt2Tokenizer(ranks_file), JsonTokenizer(json_file)):
        record = json.loads(json.dumps(tokenizer.to_dict()))
        again = tokenizer_from_dict(record)
        assert type(again) is type(tokenizer)
        assert (again.vocab_size, again.eot) == (tokenizer.vocab_size, tokenizer.eot)
        folder = tmp_path / tokenizer.name
        record = json.loads(json.dumps(save_tokenizer(tokenizer, folder)))
        assert str(tmp_path) not in str(record)
        moved = folder.rename(tmp_path / f"{tokenizer.name}-moved") if folder.exists() else None
        assert tokenizer_from_dict(record, moved).vocab_size == tokenizer.vocab_size
        if moved is not None:
            moved.rename(folder)
    with pytest.raises(ValueError, match="not the record of a tokenizer"):
        tokenizer_from_dict({"kind": "words"})


def test_a_changed_file_is_not_taken_for_the_recorded_one(tmp_path, json_file):
    record = save_tokenizer(JsonTokenizer(json_file), tmp_path)
    (tmp_path / "tokenizer.json").write_text(json_file.read_text() + "\n")
    with pytest.raises(ValueError, match=r"not the tokenizer file recorded: sha256"):
        tokenizer_from_dict(record, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="is gone"):
        tokenizer_from_dict(record | {"file": "/nowhere/tokenizer.json"}, tmp_path)
