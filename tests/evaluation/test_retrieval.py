"""The scores are the model's: against a model without a cache, and against models whose answers are known."""

import json
import re

import numpy as np
import pytest
import torch

from lssar.cli import main
from lssar.data.tasks import TASKS, TaskMaker
from lssar.data.tokenizers import load_tokenizer
from lssar.evaluation.retrieval import clustered, evaluate_retrieval, samples_of, wilson
from lssar.model import GPT, ModelConfig
from lssar.specs import spec

DEPTHS = (0.0, 0.5, 1.0)


@pytest.fixture
def maker() -> TaskMaker:
    return TaskMaker(load_tokenizer("bytes"), lambda rng, count: rng.integers(97, 123, count))


def model_of(attention: str = "lssar") -> GPT:
    torch.manual_seed(0)
    config = ModelConfig(layers=2, width=32, heads=2, vocab_size=257, train_length=128, attention=spec(attention))
    model = GPT(config).eval()
    with torch.no_grad():  # an untrained model is nearly uniform, which gives ties; larger weights avoid them
        model.embed.weight *= 10
    return model


def test_wilson():
    """Values of the R package `binom`, method "wilson"."""
    found = wilson(8, 10)
    assert (found["low"], found["high"]) == pytest.approx((0.4901625, 0.9433178), abs=1e-4)
    assert wilson(0, 16)["low"] == 0.0
    assert wilson(0, 16)["high"] == pytest.approx(0.1936, abs=1e-3)
    assert wilson(16, 16)["high"] == 1.0
    with pytest.raises(ValueError, match="nothing"):
        wilson(0, 0)


def test_intervals_count_contexts_as_clusters():
    alone = clustered([[True]] * 8 + [[False]] * 2)
    assert alone == wilson(8, 10) | {"contexts": 10}
    alike = clustered([[True] * 4] * 8 + [[False] * 4] * 2)  # four questions of a context that say the same
    assert alike["of"] == 40
    assert alike["low"] == pytest.approx(alone["low"], abs=0.03)
    mixed = clustered([[True, True, True, True, False]] * 8)  # all contexts alike: no sign of clusters
    assert mixed["low"] == pytest.approx(wilson(32, 40)["low"])
    agreed = clustered([[True] * 5] * 8)
    assert agreed["low"] == pytest.approx(wilson(8, 8)["low"])


def test_a_hopeless_cell_stops_early_and_chunks_change_nothing(maker):
    model = model_of()
    settings = {"samples": 6, "depths": DEPTHS, "choice": False}
    whole = evaluate_retrieval(model, maker, "passkey", 300, **settings)
    assert "choice" not in whole
    assert whole["greedy"]["of"] == 18
    stopped = evaluate_retrieval(model, maker, "passkey", 300, **settings, give_up=4, batch_tokens=600)
    assert whole["greedy"]["right"] == 0
    assert stopped["greedy"]["of"] == 4
    chunked = evaluate_retrieval(model, maker, "passkey", 300, **settings, chunk=70)
    assert chunked["nats"] == pytest.approx(whole["nats"], rel=1e-4)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("ntk", ["off", "length"])
def test_the_cache_equals_a_full_forward(maker, task, ntk):
    model, length = model_of(), 256
    found = evaluate_retrieval(model, maker, task, length, samples=2, depths=DEPTHS, batch_tokens=3 * length, ntk=ntk)
    nats, greedy, choice = [], [], []
    model.ntk = 2.0 if ntk == "length" else "off"
    for sample in samples_of(maker, task, length, 2, DEPTHS, seed=0):
        for query in sample.queries:
            scores = [direct(model, sample.context, query.prompt, a) for a in (query.answer, *query.others)]
            nats.append(-scores[0][0])
            greedy.append(scores[0][1])
            choice.append(scores[0][0] > max((s for s, _ in scores[1:]), default=-np.inf))
    assert found["nats"] == pytest.approx(np.mean(nats), rel=1e-3)
    assert found["greedy"]["right"] == sum(greedy)
    assert found["greedy"]["of"] == len(greedy)
    if task == "copy":
        assert "choice" not in found
    else:
        assert found["choice"]["right"] == sum(choice)
        assert found["chance"] == pytest.approx(1 / (1 + len(query.others)))
        assert sum(cell["choice"]["right"] for cell in found["cells"]) == sum(choice)
    assert len(found["cells"]) == (8 if task == "copy" else 3)
    assert (model.ntk, model.window) == (2.0 if ntk == "length" else "off", None)


@torch.no_grad()
def direct(model, context, prompt, answer) -> tuple[float, bool]:
    """Log-likelihood of the answer, and whether it is the most likely one at each token, in one forward."""
    ids = torch.from_numpy(np.concatenate([context, prompt, answer]))[None]
    logits = model(ids[:, :-1])[0, -len(answer) :].log_softmax(-1)
    right = torch.from_numpy(np.asarray(answer))
    return float(logits.gather(1, right[:, None]).sum()), bool((logits.argmax(-1) == right).all())


class Oracle(GPT):
    """Answers every question right, by looking for the prompt's last tokens in what it has read."""

    def __init__(self, depth_it_sees: float = 0.0):
        super().__init__(ModelConfig(layers=1, width=8, heads=1, vocab_size=257, train_length=128))
        self.sees = depth_it_sees

    def hidden(self, ids, cache=None, cu_seqlens=None):
        kept = cache.layers[0]
        if not kept.tensors:
            kept.tensors = [torch.zeros(ids.shape[0], kept.room, dtype=torch.int64)]
        kept.tensors[0][:, kept.length : kept.length + ids.shape[1]] = ids
        kept.length += ids.shape[1]
        return torch.stack([self._next(kept.tensors[0][:, : kept.length - i]) for i in range(ids.shape[1])][::-1], 1)

    def _next(self, seen):
        rows = []
        for row in seen.tolist():
            places = [i for i in range(int(self.sees * len(row)), len(row) - 1) if row[i - 8 : i] == row[-8:]]
            rows.append(row[places[0]] if places else 0)
        return torch.tensor(rows)

    def logits(self, hidden):
        return 20.0 * torch.nn.functional.one_hot(hidden, 257).float()


def test_one_who_sees_all_is_right_and_one_who_sees_half_is_half_right(maker):
    found = evaluate_retrieval(Oracle(), maker, "needles", 400, samples=3, depths=DEPTHS)
    assert found["greedy"]["rate"] == found["choice"]["rate"] == 1.0
    assert found["nats"] < 1e-3
    half = evaluate_retrieval(Oracle(0.4), maker, "needles", 400, samples=3, depths=DEPTHS)
    assert [cell["greedy"]["rate"] for cell in half["cells"]] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("attention", ["softmax", "lssar", "cosine_softmax"])
def test_a_window_hides_what_is_behind_it(maker, attention):
    """Through a window of 20 over two layers nothing further back than 38 tokens can matter."""
    model = model_of(attention)
    rows = []
    for fill in (98, 99):
        plain = TaskMaker(load_tokenizer("bytes"), lambda rng, count, fill=fill: np.full(count, fill))
        rows.append(evaluate_retrieval(model, plain, "needles", 400, samples=1, depths=(0.1, 0.9), window=20))
    assert rows[0]["nats"] != rows[1]["nats"]  # the question itself stands near the text
    near = evaluate_retrieval(model, maker, "recall", 600, samples=2, window=20)
    whole = evaluate_retrieval(model, maker, "recall", 600, samples=2)
    assert near["nats"] != whole["nats"]
    model.window = 20
    assert evaluate_retrieval(model, maker, "recall", 600, samples=2) == near  # as trained
    assert model.window == 20


def test_command_resumes_adds_and_refuses(tmp_path, capsys, monkeypatch):
    """An untrained run, evaluated at 1x and 2x; then the same command resumes, adds an arm, and refuses bad flags."""
    monkeypatch.chdir(tmp_path)
    main(["train", "retrieval-tiny", "--steps", "1", "--length", "256", "--micro-batch", "8", "--out", "run"])
    arguments = ["eval", "retrieval", "run", "--multiples", "1", "2", "--samples", "2", "--device", "cpu", "--out", "r"]
    main([*arguments, "--tasks", "passkey", "recall"])
    result = json.loads((tmp_path / "r.json").read_text())
    (arm,) = result["arms"]
    assert [(row["task"], row["length"]) for row in arm["rows"]] == [
        ("passkey", 256), ("recall", 256), ("passkey", 512), ("recall", 512),
    ]  # fmt: skip
    assert arm["rows"][0]["greedy"]["of"] == 10
    assert {"torch", "commit"} <= set(arm["environment"])
    assert (tmp_path / "r.png").stat().st_size > 10_000
    assert (tmp_path / "r.svg").exists()

    main([*arguments, "--window", "64"])
    result = json.loads((tmp_path / "r.json").read_text())
    assert [arm["label"] for arm in result["arms"]] == ["lssar", "lssar, window 64"]
    assert result["arms"][0] == arm
    assert len(result["arms"][1]["rows"]) == 2 * len(TASKS)
    said = capsys.readouterr().out
    assert "window 64" in said
    assert "chance 10" in said

    for words, message in (
        (["--samples", "3"], "holds results with other settings"),
        (["--tasks", "fly"], "unknown retrieval task 'fly'"),
        (["--depths", "2"], "depths must lie in 0 to 1"),
        (["--out", "new", "--stop-after", "-1"], "--stop-after is too short"),
    ):
        with pytest.raises(SystemExit, match=r"[12]"):
            main([*arguments, *words])
        assert message in " ".join(capsys.readouterr().err.split())
    assert json.loads((tmp_path / "r.json").read_text()) == result

    # a later step in another file takes the place of the earlier one; lengths that it lacks stay empty
    later = {**result, "arms": [{**arm, "step": arm["step"] + 1, "label": "the later", "rows": arm["rows"][:2]}]}
    (tmp_path / "later.json").write_text(json.dumps(later))
    main(["plot", "r.json", "later.json", "--out", "both"])
    drawn = re.findall(r"<!-- (.*?) -->", (tmp_path / "both.svg").read_text())
    assert "the later" in drawn
    assert "lssar, window 64" in drawn
    assert "lssar" not in drawn
    (tmp_path / "other.json").write_text('{"curves": []}')
    with pytest.raises(SystemExit, match=r"[12]"):
        main(["plot", "r.json", "other.json"])
    assert "other.json holds no results of retrieval" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("attention", ["lssar", "cosine_softmax"])
def test_fused_prefill_and_decode_give_the_same(maker, attention, monkeypatch):
    """What a GPU would run, in Triton's interpreter and PyTorch's kernels: prefill, a few rows, single rows."""
    import lssar.nn.layers

    model = model_of(attention)
    tiled = evaluate_retrieval(model, maker, "copy", 40, samples=1)
    shapes = []

    def fused(q, k, v, *rest, **options):
        shapes.append((q.shape[2], k.shape[2]))
        return lssar.attention(q, k, v, *rest, **options, impl="fused")

    monkeypatch.setattr(lssar.nn.layers, "attention", fused)
    found = evaluate_retrieval(model, maker, "copy", 40, samples=1)
    assert {(31, 31), (8, 39)} <= set(shapes)
    assert found["nats"] == pytest.approx(tiled["nats"], rel=1e-3)
    assert found["greedy"] == tiled["greedy"]


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["lssar", "lssa", "softmax", "cosine_softmax"])
@pytest.mark.parametrize("window", [None, 300])
def test_on_a_gpu(maker, attention, window):
    """Half precision, the fused kernels and the cache against float32 on a CPU, over several tiles."""
    torch.manual_seed(0)
    config = ModelConfig(layers=2, width=128, heads=2, vocab_size=257, train_length=128, attention=spec(attention))
    model = GPT(config).eval()
    settings = {"samples": 2, "depths": DEPTHS, "window": window}
    for task in TASKS:
        on_cpu = evaluate_retrieval(model.cpu(), maker, task, 1400, **settings)
        on_gpu = evaluate_retrieval(
            model.cuda(), maker, task, 1400, **settings, dtype=torch.bfloat16, batch_tokens=2**16
        )
        assert on_gpu["nats"] == pytest.approx(on_cpu["nats"], rel=2e-2)


@pytest.mark.gpu
def test_64k_on_a_gpu():
    """At 64 times a length of 1,024 memory is the cache's and the activations', not the square's."""
    config = ModelConfig(layers=2, width=128, heads=2, vocab_size=257, train_length=1024)
    model = GPT(config).eval().cuda()
    torch.cuda.reset_peak_memory_stats()
    found = evaluate_retrieval(
        model, TaskMaker(load_tokenizer("bytes")), "recall", 65_536, samples=1, dtype=torch.bfloat16
    )
    assert found["greedy"]["of"] == 16
    assert torch.cuda.max_memory_allocated() < 2**30
