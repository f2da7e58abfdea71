"""lm-eval itself drives our models, with the network cut off, and asks and scores as the built-in harness does."""

import json
import socket

import pytest
import torch

from lssar.cli import main
from lssar.data.tokenizers import load_tokenizer
from lssar.evaluation.benchmarks import BENCHMARKS, RULER, evaluate_benchmark
from lssar.evaluation.likelihood import likelihoods
from tests.evaluation.test_benchmarks import EXAMPLES, small_model, write_examples

pytest.importorskip("lm_eval")
BYTES = load_tokenizer("bytes")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch, tmp_path):
    def refuse(*arguments, **more):
        raise OSError("the network is cut off")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")


def make_lm(**changes):
    from lssar.hf.lm_eval import LssarLM

    return LssarLM(small_model(), BYTES, device="cpu", **({"max_length": 256} | changes))


def test_lm_eval_asks_what_the_builtin_harness_asks_and_scores_as_it_does(tmp_path):
    from lm_eval.tasks import TaskManager

    from lssar.hf.lm_eval import metrics_of, run_tasks, write_tasks

    folder = write_tasks(EXAMPLES, tmp_path / "tasks")
    tasks = TaskManager(include_path=str(folder), include_defaults=False).load(list(EXAMPLES))["tasks"]
    for name, task in tasks.items():
        task.build_all_requests(rank=0, world_size=1)
        asked = [pair for document in EXAMPLES[name] for pair in BENCHMARKS[name].question(document).pairs]
        assert [instance.args for instance in task.instances] == asked, name

    lm = make_lm()
    found = run_tasks(lm, list(EXAMPLES), folder)
    for name, documents in EXAMPLES.items():
        ours = evaluate_benchmark(small_model(), BYTES, name, documents, 256)["metrics"]
        theirs = metrics_of(found, name)
        assert set(ours) == set(theirs), name
        for metric, value in ours.items():
            assert theirs[metric]["value"] == pytest.approx(value["value"], rel=1e-6), (name, metric)
            if metric != "perplexity":  # theirs is drawn by bootstrap
                assert theirs[metric]["stderr"] == pytest.approx(value["stderr"], abs=1e-9), (name, metric)


class Request:
    def __init__(self, *args):
        self.args = args


def test_rolling_predicts_each_token_once():
    lm = make_lm(max_length=16)
    text = "The grass is green. The sky is blue."
    ids = BYTES.encode(text).tolist()
    (found,) = lm.loglikelihood_rolling([Request(text)])
    first = likelihoods(lm.model, [([256], ids[:16])], 16)[0][0]
    rest = likelihoods(lm.model, [(ids[15:16], ids[16:32]), (ids[19:32], ids[32:])], 16)
    assert found == pytest.approx(first + sum(score for score, _ in rest), rel=1e-3)


def test_generation_is_greedy_and_stops():
    lm = make_lm(max_length=96)
    prompts = ["abc", "xyz", "a longer one", "abc"]
    settings = {"until": [], "max_gen_toks": 12, "do_sample": False}
    made = lm.generate_until([Request(prompt, settings) for prompt in prompts])
    for prompt, text in zip(prompts, made):
        ids = torch.tensor([BYTES.encode(prompt).tolist()])
        steps = []
        for _ in range(12):  # without a cache
            token = lm.model(ids)[0, -1].argmax()
            if token == BYTES.eot:
                break
            steps.append(int(token))
            ids = torch.cat([ids, token[None, None]], 1)
        assert text == BYTES.decode(steps)
    assert made[0] == made[3]
    stop = made[0][3]
    (cut,) = lm.generate_until([Request("abc", {**settings, "until": [stop]})])
    assert cut == made[0][: made[0].index(stop)]
    with pytest.raises(ValueError, match="asks for sampling"):
        lm.generate_until([Request("abc", {"do_sample": True, "temperature": 0.7})])
    with pytest.raises(ValueError, match="leaves no room"):
        lm.generate_until([Request("abc", {"max_gen_toks": 96})])


@pytest.mark.slow  # lm-eval sorts some millions of words first
def test_needles_of_ruler_are_made_here(monkeypatch):
    """And one who says what he has read gets them right."""
    pytest.importorskip("wonderwords")
    from lssar.hf.lm_eval import LssarLM, metrics_of, run_ruler

    asked = []

    def parrot(self, requests, disable_tqdm=False):
        asked.extend(request.args[0] for request in requests)
        return [request.args[0] for request in requests]

    lm = make_lm(max_length=1024)
    found = run_ruler(lm, "niah_single_1", 1024, 2)
    assert 0 <= metrics_of(found, "niah_single_1_1024")["acc"]["value"] <= 1
    monkeypatch.setattr(LssarLM, "generate_until", parrot)
    for name in RULER:
        found = metrics_of(run_ruler(lm, name, 1500, 2), f"{name}_1500")
        assert found["acc"]["value"] == 1.0
    assert all(len(BYTES.encode(text)) <= 1500 for text in asked)
    with pytest.raises(ValueError, match="unknown RULER task"):
        run_ruler(lm, "niah_single_2", 512, 1)


def test_the_command_through_lm_eval(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_examples(tmp_path / "bench")
    main(["train", "tiny-cpu", "--steps", "1", "--size", "tiny", "--out", "run"])
    arguments = ["eval", "downstream", "run", "--data", "bench", "--device", "cpu", "--tasks", "copa", "blimp"]
    for harness in ("lm-eval", "builtin"):
        main([*arguments, "--harness", harness, "--out", "d"])
    pytest.importorskip("transformers")
    main(["export", "run", "hf"])  # the same weights through transformers and lm-eval's own model for it
    main(["eval", "downstream", "hf", *arguments[3:], "--max-length", "128", "--out", "d"])
    theirs, ours, transformers = json.loads((tmp_path / "d.json").read_text())["arms"]
    assert theirs["harness"].startswith("lm-eval 0.")
    for task in ("copa", "blimp"):
        assert theirs["tasks"][task]["metrics"]["acc"]["value"] == ours["tasks"][task]["metrics"]["acc"]["value"]
        assert transformers["tasks"][task]["metrics"] == theirs["tasks"][task]["metrics"]
        assert theirs["tasks"][task]["chance"] == 0.5
    with pytest.raises(SystemExit, match=r"[12]"):
        main(["eval", "downstream", "hf", *arguments[3:], "--harness", "builtin", "--out", "d"])
    assert "needs --harness lm-eval" in " ".join(capsys.readouterr().err.split())


def test_what_cannot_be_made_is_reported(tmp_path):
    from lssar.hf.lm_eval import LssarLM

    with pytest.raises(ValueError, match="needs its tokenizer"):
        LssarLM(small_model())
    with pytest.raises(FileNotFoundError, match="no run folder"):
        LssarLM(tmp_path)
    with pytest.raises(ValueError, match="ntk must be"):
        make_lm(ntk="on")
