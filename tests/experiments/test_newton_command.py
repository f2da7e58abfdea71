"""`lssar newton` as users run it, and the report that it makes."""

import json

import numpy as np
import pytest

from lssar.cli import main
from lssar.experiments.newton.families import families_in
from lssar.experiments.newton.report import TABLES, filled, source


def test_newton_in_short(tmp_path, capsys):
    """The smoke run in a shorter form: seconds of training in place of minutes, so exponents have not converged."""
    pytest.importorskip("pyoperon")
    out = tmp_path / "ci"
    main(["newton", "--scale", "ci", "--out", str(out), "--workers", "1", "--no-laws"])
    result = json.loads((out / "newton.json").read_text())
    arm = result["arms"][0]
    assert arm["r"] == pytest.approx(-2, abs=0.2)
    assert 0.3 < arm["m1"] < 1.2
    assert 0.3 < arm["m2"] < 1.2
    assert arm["r2"] > 0.7
    for name in ("errors", "forces", "orbits"):
        assert (out / f"newton-{name}.png").stat().st_size > 10_000
    assert {"command", "environment", "settings", "identifiability", "oracles"} <= set(result)

    main(["newton", "read-law", str(out), "--draws", "1", "--operators", "arithmetic"])
    laws = json.loads((out / "newton.json").read_text())["laws"]
    assert [row["arm"] for row in laws] == ["wellposed-true-forces", arm["arm"]]
    assert laws[0]["laws"][0]["newton"]
    said = capsys.readouterr().out
    assert "wellposed-true-forces: m1 m2 / r^2 in 1 of 1 draws (arithmetic operators)" in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--pretrain-steps", "0"], "steps, batch and warmup must be at least 1"),
        (["--labels", "1"], "must be at least 2"),
        (["--mechanisms", "lsar"], "unknown attention spec 'lsar'"),
        (["--mechanisms", "lssar,p=many"], "expected NAME or NAME,FIELD=NUMBER"),
        (["read-law", "NEW"], "holds no sweep"),
        (["publish", "NEW", "NEW"], "holds no sweep"),
        (["report", "NEW"], "does not exist"),
    ],
    ids=str,
)
def test_mistakes_get_one_line_and_leave_nothing(flags, words, tmp_path, capsys):
    flags = [str(tmp_path / "new") if word == "NEW" else word for word in flags]
    named = flags[0] in ("read-law", "publish", "report")
    with pytest.raises(SystemExit, match=r"[12]"):
        main(["newton", *flags, *([] if named else ["--scale", "ci", "--out", str(tmp_path / "new")])])
    assert words in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_flags_change_the_scale(tmp_path):
    out = tmp_path / "few"
    flags = ["newton", "--scale", "ci", "--out", str(out), "--pretrain-steps", "2", "--finetune-steps", "2",
             "--no-laws", "--labels", "4", "--mechanisms", "lssar,p=3", "--seeds", "5", "--workers", "1"]  # fmt: skip
    main(flags)
    (arm,) = json.loads((out / "newton.json").read_text())["arms"]
    assert (arm["mechanism"], arm["seed"], arm["labels"]) == ("lssar,p=3", 5, 4)
    about = (out / "run.json").read_text()
    main(flags)
    assert (out / "run.json").read_text() == about  # nothing was left to run: its origin stays
    (out / "arms" / f"{arm['arm']}.json").unlink()
    main(flags)
    result = json.loads((out / "newton.json").read_text())
    first = json.loads(about)
    assert result["earlier"] == [{"command": first["command"], "environment": first["environment"]}]
    assert "1 of 1 arms, in 2 sessions:\n\n- " in source(result)
    (family,) = families_in(out)
    assert (family.pretrain.steps, family.finetune.steps) == (2, 2)


def test_the_report_is_made_from_the_results(finished_sweep, tmp_path, capsys):
    from lssar.commands.newton import finish

    finish(finished_sweep)
    main(["newton", "publish", str(finished_sweep), str(tmp_path / "results/small")])
    assert json.loads((tmp_path / "results/small.json").read_text()) == json.loads(
        (finished_sweep / "newton.json").read_text()
    )
    names = {"small.json", *(f"small-{name}.png" for name in ("errors", "forces", "orbits", "probe"))}
    assert {path.name for path in (tmp_path / "results").iterdir()} == names
    with pytest.raises(SystemExit, match="1"):
        main(["newton", "publish", str(finished_sweep), str(tmp_path / "results/small")])
    page = tmp_path / "page.md"
    names = " ".join(name for name in TABLES if name != "source")
    page.write_text(
        f"# Page\n<!-- newton: {finished_sweep / 'newton.json'} {names} -->\nold\n<!-- end newton -->\nlast\n"
    )
    main(["newton", "report", str(page)])
    text = page.read_text()
    assert "old" not in text
    assert text.endswith("<!-- end newton -->\nlast\n")
    arm = json.loads((finished_sweep / "newton.json").read_text())["arms"]
    rows = [row["error"] for row in arm if (row["mechanism"], row["start"], row["labels"]) == ("lssar", "fresh", 4)]
    assert f"{np.mean(rows):.3f} ± {np.std(rows, ddof=1):.3f}" in text
    main(["newton", "report", str(page), "--check"])
    page.write_text(text.replace("0.", "1."))
    with pytest.raises(SystemExit, match=r"[12]"):
        main(["newton", "report", str(page), "--check"])
    assert "does not match the results" in capsys.readouterr().err
    page.write_text("<!-- newton: nothing.json exponents -->\n<!-- end newton -->")
    assert "Not run yet" in filled(page)
    page.write_text(f"<!-- newton: {finished_sweep / 'newton.json'} weather -->\n<!-- end newton -->")
    with pytest.raises(ValueError, match="unknown table weather"):
        filled(page)
