"""The commands as a user runs them."""

import csv
import dataclasses
import io
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lssar.commands.common import Progress, duration, field_docs
from lssar.commands.train import Train, sections
from lssar.training.recipes import Recipe
from lssar_cli import COMMANDS, Command, load, main


def test_rows(tmp_path, capsys):
    main(["rows", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "rows.json").read_text())
    assert (tmp_path / "rows.png").stat().st_size > 10_000
    by = {(row["mechanism"], row["multiple"]): row for row in result["rows"]}
    assert by["softmax", 64]["effective"] > 20 * by["softmax", 1]["effective"]
    assert by["lssar", 64]["effective"] < 2 * by["lssar", 1]["effective"]
    for row in result["rows"]:
        assert 0 < row["peak"] <= 1
        assert 0 <= row["entropy"] <= math.log(row["n"])
    assert result["environment"]["torch"]
    assert "rows.png" in capsys.readouterr().out


def test_demo_train_eval_generate_diagnose(tmp_path, capsys):
    """The newcomer's path, made small: demo, then every command that takes a run."""
    arguments = [
        "demo-train",
        "--steps",
        "3",
        "--size",
        "tiny",
        "--length",
        "32",
        "--multiples",
        "1",
        "2",
        "--pieces",
        "2",
    ]
    main([*arguments, "--attention", "softmax", "lssar", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "demo.json").read_text())
    assert [curve["label"] for curve in result["curves"]] == ["softmax", "lssar"]
    assert all(point["loss"] > 0 for curve in result["curves"] for point in curve["by_length"])
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    said = capsys.readouterr().out
    assert "softmax: loss" in said
    assert "demo.png" in said.replace("\n", "")

    runs = sorted(str(path) for path in (tmp_path / "runs").iterdir())
    main(["train", runs[0]])  # a finished run has nothing left to do
    assert "finished" in capsys.readouterr().out
    out = str(tmp_path / "length")
    main(["eval", "length", *runs, "--multiples", "1", "4", "--ntk", "off", "length", "--pieces", "2", "--out", out])
    assert len(json.loads((tmp_path / "length.json").read_text())["curves"]) == 4
    assert (tmp_path / "length.svg").exists()
    both = [str(tmp_path / "demo.json"), str(tmp_path / "length.json")]
    main(["plot", *both, "--out", str(tmp_path / "both")])
    alone, together = ((tmp_path / name).read_text() for name in ("length.svg", "both.svg"))
    assert together.count("PolyCollection") > alone.count("PolyCollection")  # a band a curve
    capsys.readouterr()
    main(["diagnose", runs[0], "--multiples", "1", "2", "--rows", "2", "--out", str(tmp_path / "diagnose")])
    assert (tmp_path / "diagnose.png").stat().st_size > 10_000
    said = capsys.readouterr().out
    assert "effective keys" in said and "64 tokens" in said and Path(runs[0]).name in said
    for_programs(runs, tmp_path, capsys)
    main(["generate", runs[0], "--prompt", "def f(", "--tokens", "5"])
    main(["generate", runs[0], "--prompt", "def f(", "--tokens", "5", "--dtype", "bfloat16"])
    assert capsys.readouterr().out.startswith("def f(")


def for_programs(runs, tmp_path, capsys):
    """With --json or --csv stdout holds that alone."""
    short = ["--multiples", "1", "2", "--pieces", "2"]
    main(["eval", "length", *runs, *short, "--json", "--out", str(tmp_path / "json")])
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((tmp_path / "json.json").read_text())
    main(["eval", "length", *runs, *short, "--csv", "--out", str(tmp_path / "csv")])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["label"], row["length"]) for row in rows[:2]] == [
        (result["curves"][0]["label"], n) for n in ("32", "64")
    ]
    retrieval = ["eval", "retrieval", runs[0], "--multiples", "1", "--samples", "1", "--tasks", "copy"]
    main([*retrieval, "--json", "--out", str(tmp_path / "r")])
    assert json.loads(capsys.readouterr().out)["arms"][0]["rows"]
    main([*retrieval, "--csv", "--out", str(tmp_path / "r")])
    assert capsys.readouterr().out.startswith("run,label,step,")
    main(["diagnose", runs[0], "--multiples", "1", "--rows", "1", "--json", "--out", str(tmp_path / "d")])
    assert json.loads(capsys.readouterr().out)["statistics"]["entropy"]


def test_specs_and_doctor_for_programs(capsys):
    main(["specs", "--json"])
    assert json.loads(capsys.readouterr().out)["lssar"]["p"] == 15
    main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert set(found) >= {"versions", "devices", "kernels", "extras"}
    main(["doctor"])
    assert f"native           {found['kernels']['native']}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "folder"),
    [
        (["--attention", "lssar"], "long-tiny-lssar-seed0"),
        (["--attention", "lssar", "--layout", "mixed@8"], "long-tiny-lssar-mixed@8-seed0"),
        (["--layout", "softmax@16 ssmax/none"], "long-tiny-softmax@16-ssmax-none-seed0"),
    ],
)
def test_a_run_folder_is_named_after_what_is_trained(flags, folder):
    assert Train.parse(["long-tiny", *flags]).out == Path("runs") / folder


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
@pytest.mark.parametrize("words", [["bench", "--lengths", "16"], ["newton"]], ids=str)
def test_a_device_that_is_not_there(words, capsys):
    with pytest.raises(SystemExit, match="1"):
        main([*words, "--device", "cuda"])
    assert "no CUDA device here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("total", "steps", "lines"), [(40, range(1, 41), 20), (None, range(1, 9), 0), (1, (0.5, 1.0), 2)], ids=str
)
def test_progress_without_a_terminal(total, steps, lines, capsys):
    with Progress("working", total, seconds=0) as bar:
        for step in steps:
            bar.update(step, "all is well")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines
    if lines:
        assert said[-1] == "working: 100%, all is well, 0 s left"


@pytest.mark.parametrize(("seconds", "words"), [(5, "5 s"), (170, "3 min"), (7800, "2 h 10 min")])
def test_durations(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["fly"], 2, "unknown command 'fly'"),
        (["train", "gpt5"], 2, "'gpt5' is neither a recipe"),
        (["train", "--steps", "5"], 2, "needs a recipe"),
        (["train", "tiny-cpu", "--stepz", "5"], 2, "stepz"),
        (["train", "books-51m", "--out", "NEW"], 1, "no training shards"),
        (["train", "tiny-cpu", "--attention", "lsar"], 1, "unknown attention spec 'lsar'"),
        (
            ["train", "long-tiny", "--attention", "lssar", "--layout", "softmax@9 ssmax"],
            1,
            "--attention does not apply",
        ),
        (["train", "long-tiny", "--attention=cosine_softmax", "--layout", "lssar"], 1, "--attention does not apply"),
        (["eval", "speed"], 2, "`lssar eval` has length, retrieval, downstream"),
        (["eval", "length", "NEW"], 1, "no run folder"),
        (["generate", "NEW"], 1, "no run folder"),
        (["plot"], 2, "give one or more JSON files"),
        (["eval", "length"], 2, "give one or more run folders"),
        (["eval", "length", "NEW", "--multiples", "0"], 2, "--multiples must be at least 1; got 0"),
        (["eval", "length", "NEW", "--pieces", "-1"], 2, "--pieces must be at least 1"),
        (["eval", "length", "NEW", "--batch-tokens", "-1"], 2, "--batch-tokens must be at least 1"),
        (["train", "tiny-cpu", "--heads", "4", "--key-heads", "1", "--projection", "tpa"], 1, "must equal heads"),
        (["generate", "NEW", "--seed", str(10**23)], 2, "--seed must be"),
        (["diagnose", "NEW", "--documents", "0"], 2, "--documents must be at least 1"),
        (["eval", "retrieval"], 2, "give one or more run folders"),
        (["eval", "downstream", "--data", "NEW"], 2, "give one or more run or model folders"),
        (["data", "prepare"], 2, "give one or more files"),
        (["data", "prepare", "NEW", "--name", ".."], 1, "name '..'"),
        (["reproduce", "report", "--out", "NEW"], 1, "run this in a checkout"),
        (["demo-train", "--text", "NEW", "--out", "NEW"], 1, "does not exist"),
    ],
    ids=str,
)
def test_mistakes_get_one_line_on_stderr(arguments, code, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        main([str(tmp_path / "new") if word == "NEW" else word for word in arguments])
    assert exit.value.code == code
    out, err = capsys.readouterr()
    assert words in " ".join(err.replace("│", " ").split())  # tyro frames its errors
    assert "Traceback" not in err and "error" not in out


def lssar(*words, module="lssar_cli", **options):
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.mark.parametrize("words", [["--help"], ["eval", "--help"], ["data", "--help"], ["--version"], ["fly"]], ids=str)
def test_help_imports_neither_torch_nor_tyro(words):
    """Importing torch takes seconds."""
    code = f"import sys, lssar_cli\ntry: lssar_cli.main({words})\nexcept SystemExit: pass\nprint(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert not {"torch", "tyro", "numpy", "lssar"} & set(said.splitlines()[-1].split())


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = capsys.readouterr().out
    assert all(name in said for section in COMMANDS.values() for name in section)
    assert all(len(line) <= 80 for line in said.splitlines())


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["train", "--help"], ["tiny-cpu", "--attention", "--steps", "--out"]),
        (["train", "tiny-cpu", "--help"], ["model options", "optimisation options", "(default: 600)"]),
        (["eval", "--help"], ["lssar eval length", "lssar eval downstream"]),
        (["eval", "length", "--help"], ["--multiples"]),
        (["newton", "--help"], ["read-law", "publish", "--scale"]),
        (["reproduce", "--help"], ["report", "--scale"]),
        (["data", "prepare", "--help"], ["--val-share"]),
    ],
    ids=str,
)
def test_help(words, shown, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(words)
    said = capsys.readouterr().out
    assert all(word in said for word in shown)
    assert not any(f"{leak} (default" in said for leak in ("optimisation", "running", "model", "data"))  # comments


def test_every_command_and_flag_has_help():
    """Every class of the table can be imported, and every flag is explained; those of `train` are each in one group."""
    for section in COMMANDS.values():
        for entry in section.values():
            commands = [entry] if isinstance(entry, Command) else [*entry.commands.values(), entry.default]
            for kind in (load(command) for command in commands if command is not None):
                assert hasattr(kind, "run")
                fields = Recipe if kind is Train else kind
                missing = [f.name for f in dataclasses.fields(fields) if f.name not in field_docs(fields)]
                assert not missing, f"{kind.__name__}: no help for {missing}"
    grouped = [name for names in sections().values() for name in names]
    assert len(grouped) == len(set(grouped))
    assert {field.name for field in dataclasses.fields(Recipe)} | {"out", "stop_after"} <= set(grouped)


@pytest.mark.parametrize("module", ["lssar", "lssar.cli"])
def test_as_a_module(module):
    made = lssar("--version", module=module)
    assert made.returncode == 0 and made.stdout.startswith("lssar ")


@pytest.mark.parametrize("words", [["--help"], ["specs"], ["train", "tiny-cpu", "--help"]], ids=str)
def test_a_closed_pipe_is_no_traceback(words):
    """`lssar specs | head -1`."""
    command = [sys.executable, "-u", "-m", "lssar_cli", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_ctrl_c_says_that_the_same_command_resumes(tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "lssar_cli", "train", "tiny-cpu", "--size", "tiny", "--out", str(out)]
    process = subprocess.Popen(
        [*command, "--steps", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; the same command resumes" in errors and "Traceback" not in errors
    assert "stopped and saved" in said and any((out / "checkpoints").iterdir())


def test_training_on_data_with_nothing_held_out_warns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text " * 200)
    main(["data", "prepare", "a.txt", "--tokenizer", "bytes", "--name", "a", "--val-share", "0"])
    capsys.readouterr()
    train = ["train", "tiny-cpu", "--size", "tiny", "--steps", "1", "--length", "32", "--batch-tokens", "64"]
    main([*train, "--micro-batch", "2", "--data", "data/a", "--out", "run"])
    assert f"nothing in {tmp_path}/data/a is held out" in capsys.readouterr().err


def test_a_missing_held_out_shard_is_one_error(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some text " * 200)
    data = ["data", "prepare", str(tmp_path / "a.txt"), "--tokenizer", "bytes", "--out", str(tmp_path / "data")]
    main(data)
    (tmp_path / "data" / "data_val_000000.bin").unlink()
    capsys.readouterr()
    with pytest.raises(SystemExit, match="1"):
        main(["train", "tiny-cpu", "--data", str(tmp_path / "data"), "--out", str(tmp_path / "run")])
    said = capsys.readouterr().err
    assert "data_val_000000.bin is missing" in said and "held out" not in said


def test_ctrl_c_outside_of_training(monkeypatch, capsys):
    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr("lssar.commands.specs.Specs.run", interrupt)
    with pytest.raises(SystemExit, match="130"):
        main(["specs"])
    assert capsys.readouterr().err == "interrupted\n"


def test_specs(capsys):
    main(["specs"])
    assert "AttentionSpec('lssar'" in capsys.readouterr().out.replace("\n", "")


def test_bench_checks_then_times(tmp_path, capsys):
    out = tmp_path / "figures"
    arguments = ["bench", "--lengths", "64", "--heads", "2", "--head-sizes", "8", "--budget", "0.01", "--device", "cpu"]
    main(
        [
            *arguments,
            "--contestants",
            "tiled:lssar",
            "tiled:lssar,p=3",
            "sdpa:softmax",
            "fused:lssar",
            "--out",
            str(out),
        ]
    )
    result = json.loads(out.with_suffix(".json").read_text())
    figures = {row["contestant"]: row for row in result["rows"]}
    assert figures["tiled:lssar"]["both_ms"] > 0
    assert figures["tiled:lssar"]["errors"]["dq"] < 1e-4
    assert figures["fused:lssar"] | {"unavailable": "needs a GPU"} == figures["fused:lssar"]
    assert {"cpu", "torch", "commit", "date"} <= set(result["environment"])
    assert out.with_suffix(".csv").read_text().count("\n") == 5
    assert out.with_suffix(".png").stat().st_size > 10_000

    with pytest.raises(SystemExit, match="1"):  # nothing is overwritten without being asked
        main([*arguments, "--contestants", "tiled:lssar", "--out", str(out)])
    assert "exists" in capsys.readouterr().err
    assert json.loads(out.with_suffix(".json").read_text()) == result


@pytest.mark.parametrize("name", ["tiled", "tiled:", "fast:lssar", "tiled:lsar"])
def test_bench_refuses_an_unknown_contestant(name, capsys):
    with pytest.raises(SystemExit, match="1"):
        main(["bench", "--contestants", name, "--lengths", "16"])
    assert "unknown" in capsys.readouterr().err
