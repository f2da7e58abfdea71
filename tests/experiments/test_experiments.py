"""Experiments as a user runs them: what is declared, what would run, what is read."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
import torch

from lssar.cli import main
from lssar.commands.train import Train
from lssar.data.folder import write_stdlib
from lssar.evaluation.overflow import model_overflow, synthetic_overflow
from lssar.experiments import EXPERIMENTS, SCALES, arms_of
from lssar.experiments.arms import Row
from lssar.experiments.dry_run import plan
from lssar.experiments.evaluations import Benchmarks, HeldOut, Length, reweighted
from lssar.experiments.published import LOSSES, PASSKEY
from lssar.model import GPT, model_config
from lssar.specs import spec
from tests.experiments.reproduce import reproduce

ROOT = Path(__file__).parent.parent.parent
H200 = SCALES["h200"]


def test_arms_are_known_by_their_content():
    table4, figure2 = (set(arms_of([EXPERIMENTS[name]], H200)) for name in ("table4", "figure2"))
    shared = {arm.name for arm in table4 & figure2}
    assert shared == {"softmax-p3", "softmax-p15", "lssar-p3", "lssar"}  # p = 15 is lssar itself
    everything = arms_of(EXPERIMENTS.values(), H200, EXPERIMENTS.values())
    assert len({arm.key for arm in everything}) == len(everything) == len(set(everything))
    softmax = [arm for arm in everything if arm.name == "softmax" and arm.recipe.steps == H200.base.steps]
    assert [arm.recipe.seed for arm in softmax] == [0, 1, 2]

    arm = H200.arm(Row(label="x", attention="lssa"), 0)
    moved = dataclasses.replace(
        arm, recipe=arm.recipe.replace(data="/elsewhere", compile=False, micro_batch=32, keep=9)
    )
    assert moved.key == arm.key
    assert H200.with_tokens(10_000_000).arm(Row(label="x", attention="lssa"), 0).key != arm.key
    with pytest.raises(ValueError, match="at least one step of 65,536"):
        H200.with_tokens(1000)


def test_first_seeds_come_first_and_all_evaluations_are_made_at_once():
    arms = arms_of([EXPERIMENTS["controls"]], H200, EXPERIMENTS.values())
    assert [arm.recipe.seed for arm in arms] == sorted(arm.recipe.seed for arm in arms)
    assert arms[0].name == "lssar"
    keys = {evaluation.key for evaluation in next(arm for arm in arms if arm.name == "softmax").evaluations}
    assert {"length-64x", "length-64x-window", "length-16x", "length-16x-ntk", "length-16x-posthoc-p15"} <= keys
    smoke = arms_of([EXPERIMENTS["table1"]], SCALES["smoke"], EXPERIMENTS.values())
    assert all([evaluation.key for evaluation in arm.evaluations] == ["length-16x"] for arm in smoke)


def test_every_row_of_the_papers_tables_is_declared():
    assert {row.paper for row in EXPERIMENTS["passkey"].rows} > set(PASSKEY)
    for name, rows in LOSSES.items():
        assert [row.paper for row in EXPERIMENTS[name].rows] == list(rows)
    powers = [(row.attention, row.p) for row in EXPERIMENTS["figure2"].rows]
    assert powers == [(a, p) for a in ("lssar", "softmax") for p in (1, 3, 5, 9, 15, 31, 63)]


def test_the_papers_scale_as_it_would_run():
    scale = SCALES["paper"]
    arms = arms_of([EXPERIMENTS["table4"]], scale)
    assert len(arms) == 15
    arm = next(arm for arm in arms if arm.name == "softmax-p3")
    p = plan(arm, scale)
    assert (p["steps"], p["tokens_per_step"], p["tokens"]) == (18_865, 524_288, 9_890_693_120)
    assert p["parameters"] == 123_689_472
    assert (p["processes"], p["micro_steps"], p["hidden"]) == (8, 2, [32, 1024, 768])
    assert p["logits"] == [32, 1024, 50257]
    logits = 32 * 1024 * 50257
    assert logits * 10 / 2**30 < p["activations_gib"] < 80  # logits alone: bfloat16, float32 and their gradients
    assert p["state_gib"] == pytest.approx(16 * 123_689_472 / 2**30, abs=0.01)
    launcher, _, words = p["command"].partition(" -m lssar.cli train ")
    assert launcher == "torchrun --nproc-per-node 8"
    made = Train.parse(shlex.split(words))  # the line that is printed trains this arm, where the queue looks for it
    assert made.recipe == arm.recipe
    assert made.out == scale.runs / arm.key


def test_dry_run_is_printed_and_runs_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["reproduce", "table2", "--scale", "paper", "--dry-run"])
    said = capsys.readouterr().out
    assert said.count("torchrun --nproc-per-node 8") == 4
    assert said.count("9,890,693,120 in all") == 4
    assert not any(tmp_path.iterdir())


def test_fewer_seeds_of_every_row(capsys):
    main(["reproduce", "mixed", "--scale", "laptop", "--seeds", "1", "--dry-run"])
    said = capsys.readouterr().out
    assert said.count("parameters") == len(EXPERIMENTS["mixed"].rows_at(SCALES["laptop"]))
    assert "-seed0-" in said and "-seed1-" not in said


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("table9",), "unknown experiment 'table9'; known: mixed"),
        (("table1", "--scale", "h200"), "lssar data prepare"),
        (("table1", "--workers", "0"), "--workers must be at least 1"),
        (("table1", "--seeds", "0"), "--seeds must be at least 1"),
        (("larger", "--scale", "laptop"), "larger has no arms at scale laptop"),
        (("downstream", "--bench", "nowhere"), "say with --bench FOLDER"),
    ],
    ids=str,
)
def test_mistakes_get_one_line(words, answer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert reproduce(*words) in (1, 2)
    assert answer in capsys.readouterr().err


def test_power_put_on_after_training_is_the_reweighted_model(tmp_path):
    write_stdlib(tmp_path)
    recipe = SCALES["smoke"].base.replace(attention="lssa")
    plain, trained_in = (GPT(recipe.replace(attention=name).model()) for name in ("lssa", "lssar"))
    trained_in.load_state_dict(plain.state_dict())
    held_out = HeldOut(tmp_path, recipe, 1024, "cpu")
    after = Length(to=2, p=15).evaluate(plain, held_out)
    assert after["by_length"] == Length(to=2).evaluate(trained_in, held_out)["by_length"]
    assert after["by_length"] != Length(to=2).evaluate(plain, held_out)["by_length"]
    with reweighted(plain, 15):
        assert plain.layers()[0].attention.spec.p == 15
    assert plain.layers()[0].attention.spec == recipe.model().layer_specs[0]


def test_pieces_come_from_many_documents(tmp_path):
    write_stdlib(tmp_path)
    held_out = HeldOut(tmp_path, SCALES["smoke"].base, 16 * 1024, "cpu")
    pieces = held_out.pieces(1024)
    assert len(pieces) == 16
    assert all(int(piece[0]) == 256 for piece in pieces)  # each the beginning of a document


def test_what_textbook_arithmetic_loses():
    rows = {(r["attention"], r["p"], r["keys"]): r for r in synthetic_overflow((1, 15), lengths=(1024,), rows=8)}
    matched = rows["softmax", 15, "one match"]
    assert matched["textbook"] == {"float16": 8, "bfloat16": 8, "float32": 8}  # (n A - 1)^15, with A near 1, is 1e45
    assert rows["softmax", 1, "one match"]["textbook"]["float32"] == 0
    assert all(count == 0 for row in rows.values() for count in row["stable"].values())
    model = GPT(model_config("tiny", attention=spec("lssar"), vocab_size=64, train_length=32)).eval()
    counts = model_overflow(model, torch.randint(64, (3, 32)))
    assert counts["rows"] == 3 * 2 * 4
    assert set(counts["stable"].values()) == {0}
    with pytest.raises(ValueError, match="no re-weighting"):
        model_overflow(GPT(model_config("tiny", attention=spec("lssa"), vocab_size=64)), torch.zeros(1, 8).long())


def test_passkey_arms_are_trained_on_retrieval_and_evaluated_on_it(small, monkeypatch, capsys):
    """Two rows at two lengths; the mixture has a length of its own, which a passkey of bytes needs."""
    passkey = EXPERIMENTS["passkey"]
    short = {"multiples": (1, 1.5)}
    rows = tuple(
        dataclasses.replace(
            row,
            evaluation=dataclasses.replace(row.evaluation, **short),
            also=tuple(dataclasses.replace(evaluation, **short) for evaluation in row.also),
        )
        for row in passkey.rows
        if row.label in ("softmax", "softmax, window")
    )
    monkeypatch.setitem(EXPERIMENTS, "passkey", dataclasses.replace(passkey, rows=rows))
    assert reproduce("passkey", "--scale", "smoke", "--out", str(small), "--tokens", "6144") == 0
    said = capsys.readouterr().out
    assert "Passkey: share of correct answers" in said
    assert "Needles" not in said  # only what is taught is asked
    table = json.loads((small / "results/tables-6144/passkey.json").read_text())
    found = {row["label"]: row for row in table["rows"] if row["main"]}
    assert list(found["softmax"]["rate"]) == ["1", "1.5"]
    assert found["softmax"]["rate"]["1"]["of"] >= 20
    assert found["softmax"]["paper"]["1.5"] == 0.0
    assert found["softmax"]["arms"] == found["softmax, window"]["arms"]
    assert (small / "results/tables-6144/passkey.png").stat().st_size > 10_000


def test_downstream_from_local_files(small, tmp_path, monkeypatch):
    downstream = EXPERIMENTS["downstream"]
    rows = tuple(dataclasses.replace(row, evaluation=Benchmarks(tasks=("piqa",))) for row in downstream.rows[:2])
    monkeypatch.setitem(EXPERIMENTS, "downstream", dataclasses.replace(downstream, rows=rows))
    bench = tmp_path / "bench"
    bench.mkdir()
    question = {"goal": "open a jar", "sol1": "turn the lid", "sol2": "sing to it", "label": 0}
    (bench / "piqa.jsonl").write_text((json.dumps(question) + "\n") * 3)
    assert reproduce("downstream", "--scale", "smoke", "--out", str(small), "--bench", str(bench)) == 0
    table = json.loads((small / "results/tables/downstream.json").read_text())
    found = table["rows"][0]["accuracy"]["piqa"]
    assert (found["metric"], found["chance"], found["documents"]) == ("acc_norm", 0.5, 3)
    assert 0 <= found["mean"] <= 1
    assert (small / "results/tables/downstream.png").stat().st_size > 5_000
