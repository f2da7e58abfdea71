"""Samples are what they say: as long as asked, with the answer where it should be, and the same for the same seed."""

import json

import numpy as np
import pytest

from lssar.data.batches import TokenBatches
from lssar.data.shards import write_shard
from lssar.data.stream import TokenStream
from lssar.data.tasks import ITEMS, NEEDLES, PAIRS, TASKS, TaskMaker, TrainingDocuments, background_of
from lssar.data.tokenizers import JsonTokenizer, load_tokenizer
from lssar.ops.loss import IGNORE

DEPTHS = [0.0, 0.25, 0.5, 0.75, 1.0]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Documents of letters, an eot before each."""
    path = tmp_path_factory.mktemp("shards") / "text_train_000000.bin"
    rng = np.random.default_rng(0)
    documents = [np.concatenate([[256], rng.integers(97, 123, rng.integers(50, 400))]) for _ in range(60)]
    return write_shard(path, np.concatenate(documents), 257) or path


@pytest.fixture(scope="module")
def wordy(tmp_path_factory):
    """A word-piece vocabulary: words and digit groups of several lengths are single tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    rng = np.random.default_rng(1)
    alphabet = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    text = [" ".join("".join(rng.choice(alphabet, 4)) for _ in range(2000)) + " 10 200 345 99 123" for _ in range(8)]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=6000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([*text, *(f" {n}" for n in range(0, 1000, 7))], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return JsonTokenizer(path)


def maker_for(tokenizer) -> TaskMaker:
    return TaskMaker(tokenizer, lambda rng, count: rng.integers(97, 123, count))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("vocabulary", ["bytes", "wordy"])
def test_samples_fit_and_hold_their_answers(task, vocabulary, request):
    tokenizer = load_tokenizer("bytes") if vocabulary == "bytes" else request.getfixturevalue("wordy")
    maker = maker_for(tokenizer)
    sizes, prompts = set(), set()
    for seed in range(20):
        length = 400
        sample = maker.make(task, np.random.default_rng(seed), length, DEPTHS)
        again = maker.make(task, np.random.default_rng(seed), length, DEPTHS)
        assert np.array_equal(sample.context, again.context)
        assert sample.context[0] == tokenizer.eot
        assert tokenizer.eot not in sample.context[1:]
        assert len(sample.queries) == {"passkey": 1, "needles": NEEDLES, "recall": PAIRS, "copy": 1}[task]
        sizes.add(len(sample.context))
        for query in sample.queries:
            prompts.add(len(query.prompt))
            assert len(sample.context) + len(query.prompt) + len(query.answer) <= length
            assert_answer_is_there(task, sample.context, query)
            candidates = [query.answer.tolist(), *(other.tolist() for other in query.others)]
            assert len({tuple(c) for c in candidates}) == len(candidates)  # one is right
    assert len(sizes) == len(prompts) == 1  # they batch


def assert_answer_is_there(task, context, query):
    """Found by looking: the needle's own words, the key's own token, the tokens in their order."""
    if task == "copy":
        blank = np.bincount(context).argmax()
        assert context[1:][context[1:] != blank].tolist() == query.answer.tolist()
        assert len(query.depths) == ITEMS
        return
    asked = query.prompt[-3:] if task == "passkey" else query.prompt
    text, ask = context.tolist(), asked.tolist()
    places = [i for i in range(len(text)) if text[i : i + len(ask)] == ask]
    answers = [text[i + len(ask) : i + len(ask) + len(query.answer)] for i in places]
    assert query.answer.tolist() in answers
    if task == "recall":
        assert len(places) == 1
    place = places[answers.index(query.answer.tolist())] / len(text)
    assert abs(place - query.depths[0]) < 0.35  # needles are not points; the order is checked elsewhere


def test_depth_orders_the_needles():
    sample = maker_for(load_tokenizer("bytes")).make("needles", np.random.default_rng(0), 4000, DEPTHS)
    text = bytes(sample.context[1:].astype(np.uint8))
    places = [text.index(bytes(query.prompt.astype(np.uint8))) / len(text) for query in sample.queries]
    np.testing.assert_allclose(places, DEPTHS, atol=0.05)


def test_what_does_not_fit_is_reported():
    maker = maker_for(load_tokenizer("bytes"))
    for task in TASKS:
        length = maker.shortest(task)
        maker.make(task, np.random.default_rng(0), length, DEPTHS)
        with pytest.raises(ValueError, match=f"{task}: a context of .* too short"):
            maker.make(task, np.random.default_rng(0), length - 1, DEPTHS)
    with pytest.raises(ValueError, match="unknown retrieval task 'fly'"):
        maker.make("fly", np.random.default_rng(0), 100, DEPTHS)
    with pytest.raises(ValueError, match="need real text"):
        TaskMaker(load_tokenizer("bytes")).make("needles", np.random.default_rng(0), 400, DEPTHS)


def test_background_is_the_text(shards):
    stream = TokenStream(shards)
    text = background_of(stream, 256)(np.random.default_rng(3), 3 * len(stream))  # round and round
    assert len(text) == 3 * len(stream)
    whole = stream.read(0, len(stream))
    whole = whole[whole != 256].astype(np.uint8).tobytes()
    assert text[:500].astype(np.uint8).tobytes() in whole + whole


def test_training_windows_hold_answered_questions():
    documents = TrainingDocuments(maker_for(load_tokenizer("bytes")), list(TASKS), seed=0)
    seen = 0
    for number in range(40):
        tokens, counted = documents.window(number, 513)
        assert len(tokens) == len(counted) == 513
        assert tokens[0] == 256
        assert np.array_equal(tokens, documents.window(number, 513)[0])
        seen += b"What is the pass key? The pass key is " in bytes(np.where(tokens == 256, 0, tokens).astype(np.uint8))
    assert 5 < seen < 40
    with pytest.raises(ValueError, match="a window of 40 tokens is too short for passkey"):
        TrainingDocuments(maker_for(load_tokenizer("bytes")), ["passkey"], 0).window(0, 40)


def mixed(shards, share, seed=0, **changes) -> TokenBatches:
    mixture = TrainingDocuments(maker_for(load_tokenizer("bytes")), ["recall", "copy"], seed) if share else None
    settings = dict(batch=4, length=64, seed=seed, eot=256, mixture=mixture, share=share) | changes
    return TokenBatches(shards, **settings)


def test_long_windows_recall_no_more_pairs_than_there_are_symbols():
    """Keys and values are different numbers of symbols: 32 and 31 with bytes."""
    maker = TaskMaker(load_tokenizer("bytes"))
    most = maker.most("recall")
    assert most == min(map(len, maker.symbols[:2]))
    maker.make("recall", np.random.default_rng(0), 1024, [0.5], load=most)


def test_a_mixture_leaves_no_real_window_out(shards):
    share = 0.3
    plain, both = mixed(shards, 0.0), mixed(shards, share)
    real = np.concatenate([next(plain).inputs for _ in range(20)])
    batches = [next(both) for _ in range(20)]
    rows = np.concatenate([b.inputs for b in batches])
    made = np.concatenate([b.targets for b in batches])
    is_made = (made == IGNORE).any(1)
    assert is_made.sum() == int(80 * share)
    assert max(np.diff(np.flatnonzero(is_made))) <= 4  # spread evenly
    assert np.array_equal(rows[~is_made], real[: (~is_made).sum()])
    assert both.epoch == (80 - 24) // both.windows


def test_a_mixture_resumes_where_it_was(shards):
    whole = mixed(shards, 0.4)
    batches = [next(whole) for _ in range(9)]
    half = mixed(shards, 0.4)
    for _ in range(5):
        next(half)
    state = json.loads(json.dumps(half.state_dict()))
    later = mixed(shards, 0.4)
    later.load_state_dict(state)
    for expected in batches[5:]:
        found = next(later)
        assert found.inputs.equal(expected.inputs)
        assert found.targets.equal(expected.targets)
    ranks = [mixed(shards, 0.4, batch=2, rank=r, world=2) for r in range(2)]  # two processes see what one sees
    for expected in batches:
        assert np.array_equal(np.concatenate([next(r).inputs for r in ranks]), expected.inputs)
    for other in (mixed(shards, 0.5), mixed(shards, 0.0), mixed(shards, 0.4, seed=1)):
        with pytest.raises(ValueError, match="other data or settings"):
            other.load_state_dict(state)


def test_a_share_needs_a_mixture(shards):
    for share, mixture in ((0.1, None), (-1.0, None), (1.5, object()), (0.0, object())):
        with pytest.raises(ValueError, match="share must lie in 0 to 1"):
            TokenBatches(shards, batch=1, length=8, share=share, mixture=mixture)
