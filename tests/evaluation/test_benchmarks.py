"""The built-in harness: likelihoods are the model's, files are read or refused, chance is reported."""

import json
import lzma
import math

import numpy as np
import pytest
import torch

from lssar.cli import main
from lssar.data.tokenizers import load_tokenizer
from lssar.evaluation.benchmarks import BENCHMARKS, chance, evaluate_benchmark, find_file, read_documents
from lssar.evaluation.likelihood import encode_pair, likelihoods
from lssar.model import GPT, ModelConfig

BYTES = load_tokenizer("bytes")

EXAMPLES = {  # two documents each, in the fields of the hub
    "hellaswag": [
        {"activity_label": "Roof removal", "ctx_a": "A man is on a roof [step] now.", "ctx_b": "he", "label": "3",
         "endings": ["is using wrap.", "is ripping [title] tiles off.", "holds  a cube.", "starts pulling."]},
        {"activity_label": "Cooking", "ctx_a": "A pan.", "ctx_b": "", "label": "0", "endings": ["a", "b", "c", "d"]},
    ],
    "arc_easy": [
        {"question": "What melts?", "choices": {"text": ["ice", "stone", "wood"], "label": ["A", "B", "C"]},
         "answerKey": "A"},
        {"question": "Which is new?", "choices": {"text": ["a phone", "a wheel", "fire", "soup"],
         "label": ["1", "2", "3", "4"]}, "answerKey": "1"},
    ],
    "piqa": [
        {"goal": "open a jar", "sol1": "twist the lid", "sol2": "twist the glass", "label": 0},
        {"goal": "dresser", "sol1": "replace drawer ", "sol2": "finish, woodgrain with  pin ", "label": 1},
    ],
    "sciq": [
        {"question": "Who?", "distractor1": "Linnaeus", "distractor2": "shaw", "distractor3": "Scopes",
         "correct_answer": "darwin", "support": ""},
        {"question": "What?", "distractor1": "a", "distractor2": "bb", "distractor3": "c", "correct_answer": "d",
         "support": " A text. "},
    ],
    "winogrande": [
        {"sentence": "Sarah beat Maria so _ got easy cases.", "option1": "Sarah", "option2": "Maria", "answer": "2"},
        {"sentence": "The cup fit the bag as _ was small.", "option1": "cup", "option2": "bag", "answer": "1"},
    ],
    "openbookqa": [
        {"question_stem": "Sharks are known as", "choices": {"text": ["sea animals", "fish"], "label": ["A", "B"]},
         "answerKey": "A"},
        {"question_stem": "Gas can", "choices": {"text": ["fill", "sink"], "label": ["A", "B"]}, "answerKey": " B"},
    ],
    "boolq": [
        {"passage": "All biomass is grown.", "question": "is biomass grown", "label": 1},
        {"passage": "Tax is a levy.", "question": "is tax a fruit", "label": 0},
    ],
    "copa": [
        {"premise": "The man turned on the tap.", "choice1": "The bath filled.", "choice2": "Water flowed.",
         "question": "effect", "label": 1},
        {"premise": "It broke.", "choice1": "I fell.", "choice2": "I sat.", "question": "cause", "label": 0},
    ],
    "lambada_openai": [{"text": "I look at him, and I do not care about signs"}, {"text": "\"On my own,\" said Shane"}],
    "blimp": [
        {"sentence_good": "Who should hug?", "sentence_bad": "Who hug should?"},
        {"sentence_good": "Cats sleep.", "sentence_bad": "Cats sleeps."},
    ],
}  # fmt: skip
EXAMPLES["arc_challenge"] = EXAMPLES["arc_easy"]


def write_examples(folder, compressed=False):
    folder.mkdir(parents=True, exist_ok=True)
    for name, documents in EXAMPLES.items():
        text = "".join(json.dumps(document) + "\n" for document in documents)
        if compressed:
            (folder / f"{name}.jsonl.xz").write_bytes(lzma.compress(text.encode()))
        else:
            (folder / f"{name}.jsonl").write_text(text)
    return folder


def small_model() -> GPT:
    torch.manual_seed(0)
    model = GPT(ModelConfig(layers=1, width=32, heads=2, vocab_size=257, train_length=64)).eval()
    with torch.no_grad():
        model.embed.weight *= 8
    return model


@torch.no_grad()
def test_likelihoods_are_those_of_one_row_alone():
    model, rng = small_model(), np.random.default_rng(0)
    pairs = [(rng.integers(256, size=a).tolist(), rng.integers(256, size=b).tolist()) for a, b in
             ((1, 3), (30, 1), (7, 7), (90, 4), (64, 1), (3, 60))]  # fmt: skip
    found = likelihoods(model, pairs, max_length=64, batch_tokens=150)
    for (context, continuation), (score, greedy) in zip(pairs, found):
        ids = torch.tensor([context + continuation])[:, -65:]
        logits = model(ids[:, :-1])[0, -len(continuation) :].log_softmax(-1)
        right = torch.tensor(continuation)
        assert score == pytest.approx(float(logits.gather(1, right[:, None]).sum()), rel=1e-4)
        assert greedy == bool((logits.argmax(-1) == right).all())
    best = model(torch.tensor([[5, 6]]))[0, -1].argmax().item()
    assert likelihoods(model, [([5, 6], [best])], 64)[0][1]
    # Of a continuation that is longer than the context, the last tokens are scored.
    assert likelihoods(model, [([1], [1, 2, 3])], 2) == likelihoods(model, [([1], [2, 3])], 2)


def test_spaces_belong_to_what_follows():
    assert encode_pair(BYTES, "a b ", "c") == ([97, 32, 98], [32, 99])
    assert encode_pair(BYTES, "", " c") == ([256], [32, 99])
    assert encode_pair(BYTES, "  ", "c") == ([256], [32, 32, 99])


@pytest.mark.parametrize("compressed", [False, True])
def test_files_are_read(tmp_path, compressed):
    folder = write_examples(tmp_path, compressed)
    for name, documents in EXAMPLES.items():
        assert read_documents(name, folder) == documents
        assert len(read_documents(name, folder, limit=1)) == 1


def test_other_fields_are_understood(tmp_path):
    others = {
        "boolq": {"passage": "p", "question": "q", "answer": True},
        "lambada_openai": {"context": "In my palm is a", "continuation": "stone"},
        "arc_easy_llmfoundry": {"query": "Question: Why?", "choices": ["a", "b"], "gold": 1},
    }
    for name, document in others.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(document))
    assert read_documents("boolq", tmp_path)[0]["label"] == 1
    assert read_documents("lambada_openai", tmp_path) == [{"text": "In my palm is a stone"}]
    question = BENCHMARKS["arc_easy"].question(read_documents("arc_easy", tmp_path)[0])
    assert question.pairs == (("Question: Why?\nAnswer:", " a"), ("Question: Why?\nAnswer:", " b"))
    assert question.gold == 1


def test_bad_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"piqa: none of piqa\.jsonl"):
        find_file("piqa", tmp_path)
    with pytest.raises(ValueError, match="unknown benchmark 'mmlu'"):
        find_file("mmlu", tmp_path)
    (tmp_path / "piqa.jsonl").write_text(json.dumps(EXAMPLES["piqa"][0]) + "\n" + '{"goal": 1}\n')
    with pytest.raises(ValueError, match=r"piqa\.jsonl, line 2: not a document of piqa"):
        read_documents("piqa", tmp_path)
    (tmp_path / "piqa.jsonl").write_text("")
    with pytest.raises(ValueError, match="is empty"):
        read_documents("piqa", tmp_path)


def test_chance():
    of = {name: chance([b.question(doc) for doc in EXAMPLES[name]]) for name, b in BENCHMARKS.items()}
    assert of["piqa"] == {"chance": 0.5}
    assert of["arc_easy"] == {"chance": pytest.approx((1 / 3 + 1 / 4) / 2)}
    assert of["boolq"] == {"chance": 0.5, "constant": 0.5}
    assert of["lambada_openai"] == {}


def test_metrics_by_hand():
    """With likelihoods that are known: the first choice is more likely, the second more likely per character."""
    model = small_model()
    documents = [{"goal": "g", "sol1": "ab", "sol2": "abcdefgh", "label": 1}] * 3
    question = BENCHMARKS["piqa"].question(documents[0])
    scores = [likelihoods(model, [encode_pair(BYTES, *pair)], 64)[0][0] for pair in question.pairs]
    found = evaluate_benchmark(model, BYTES, "piqa", documents, 64)
    assert found["metrics"]["acc"]["value"] == float(scores[1] > scores[0])
    assert found["metrics"]["acc_norm"]["value"] == float(scores[1] / 8 > scores[0] / 2)
    word = evaluate_benchmark(model, BYTES, "lambada_openai", EXAMPLES["lambada_openai"], 64)["metrics"]
    pairs = [encode_pair(BYTES, *BENCHMARKS["lambada_openai"].question(d).pairs[0]) for d in EXAMPLES["lambada_openai"]]
    mean = sum(score for score, _ in likelihoods(model, pairs, 64)) / 2
    assert word["perplexity"]["value"] == pytest.approx(math.exp(-mean), rel=1e-6)


def test_the_command_without_lm_eval(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_examples(tmp_path / "bench")
    main(["train", "tiny-cpu", "--steps", "1", "--size", "tiny", "--out", "run"])
    arguments = ["eval", "downstream", "run", "--data", "bench", "--harness", "builtin", "--device", "cpu"]
    main([*arguments, "--tasks", "piqa", "boolq", "--out", "d"])
    main([*arguments, "--out", "d"])  # the others are added
    main([*arguments, "--out", "d", "--max-length", "256", "--tasks", "piqa"])
    result = json.loads((tmp_path / "d.json").read_text())
    assert [(arm["max_length"], len(arm["tasks"])) for arm in result["arms"]] == [(128, len(BENCHMARKS)), (256, 1)]
    piqa = result["arms"][0]["tasks"]["piqa"]
    assert (piqa["documents"], piqa["chance"], piqa["file"]) == (2, 0.5, "piqa.jsonl")
    assert set(piqa["metrics"]) == {"acc", "acc_norm"}
    said = capsys.readouterr().out
    assert "lambada_openai" in said
    assert "perplexity" in said
    for words, message in (
        (["--limit", "1", "--out", "d"], "holds results with other settings"),
        (["--tasks", "mmlu", "--out", "e"], "unknown benchmark 'mmlu'"),
        (["--data", "nowhere", "--out", "e"], "no folder 'nowhere'"),
        (["--ruler", "512", "--out", "e"], "--ruler needs lm-eval"),
    ):
        with pytest.raises(SystemExit, match=r"[12]"):
            main([*arguments, *words])
        assert message in " ".join(capsys.readouterr().err.split())


def test_an_answer_longer_than_the_context_keeps_the_other_tasks(tmp_path, monkeypatch, capsys):
    """The last tokens are scored, with a warning; a file that cannot be read costs its own task alone."""
    monkeypatch.chdir(tmp_path)
    train = ["train", "tiny-cpu", "--size", "tiny", "--steps", "1", "--length", "32", "--batch-tokens", "64"]
    main([*train, "--micro-batch", "2", "--out", "run"])
    bench = tmp_path / "bench"
    bench.mkdir()
    line = json.dumps({"goal": "Wait.", "sol1": "a" * 99, "sol2": "b", "label": 0})
    (bench / "piqa.jsonl").write_text(line + "\n")
    (bench / "copa.jsonl").write_text("{}\n")
    (bench / "blimp.jsonl").write_text(json.dumps({"sentence_good": "I am.", "sentence_bad": "I is."}) + "\n")
    with pytest.raises(SystemExit, match="1"):
        main(["eval", "downstream", "run", "--data", "bench", "--harness", "builtin", "--out", "d"])
    err = capsys.readouterr().err
    assert "piqa: 1 answers are longer than the context of 32 tokens" in err and "--max-length" in err
    assert "copa is left out: " in err and "error: without copa" in err
    assert set(json.loads((tmp_path / "d.json").read_text())["arms"][0]["tasks"]) == {"piqa", "blimp"}
