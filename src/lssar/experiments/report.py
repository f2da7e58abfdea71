"""docs/results.md and docs/results-mixed.md from the JSON files of the arms: tables, figures, verdicts on claims."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from lssar.data.folder import STDLIB
from lssar.experiments import EXPERIMENTS, collect
from lssar.experiments.arms import SCALES, Scale
from lssar.experiments.claims import CLAIMS, decide
from lssar.records import write_file, write_json
from lssar.tables import markdown_table

HEAD = """# Results{at}

<!-- Written by `lssar reproduce report` from the JSON files under results/; do not edit. -->

This page tests the claims of the paper at a smaller scale, beside controls that the paper does not have. Every number
below is in the JSON files under `{results}`, one for each trained arm, with its recipe, seed, data, machine, versions
and commit. [reproduce.md](reproduce.md) says how to run the experiments.

"""


MIXED_HEAD = """# Results of mixed layouts{at}

<!-- Written by `lssar reproduce report` from the JSON files under results/; do not edit. -->

This page has the results of models with local layers (softmax, rotary positions, a window of {window} tokens) and
global layers without positions ([long-reader.md](long-reader.md)). They are trained at {length} tokens and evaluated to
{farthest} times that length. Every number below is in the JSON files under `{results}`, one for each trained arm, with
its recipe, seed, data, machine, versions and commit. The rules below were written before the runs, unless they say
otherwise.

- Loss: held-out documents are joined and cut into pieces of {longest:,} {units}. Every length sees the same tokens, and
  a document boundary can only make more context harder to use.
- Retrieval: every passkey has a context of its own (from 256x on, each seed is asked a third of the passkeys). Up to 8
  needles share a context, and so do 16 pairs to recall; intervals count contexts as clusters. If the first 32 answers
  of a cell are wrong, no more are asked.

"""


MAIN = "h200"
"""The scale whose page is docs/results.md; the claims there have the verdicts of `BESIDE` next to them."""
BESIDE = "laptop"


def usual_page(scale: Scale, page: str = "results") -> Path:
    return Path(f"docs/{page}.md" if scale.name == MAIN else f"docs/{page}-{scale.name}.md")


def tables_of(scale: Scale) -> dict[str, dict[str, Any]]:
    arms = collect.load(scale)
    return {name: collect.collect(experiment, scale, arms) for name, experiment in EXPERIMENTS.items()}


def mixed_page(scale: Scale, tables: dict[str, dict[str, Any]], claims: list[dict[str, Any]], folder: Path) -> str:
    """The page of the experiment `mixed`, and of larger models and budgets once there are results."""
    r = scale.base.replace(**scale.settings["long"])
    units = "bytes" if scale.data == STDLIB else "tokens"
    text = MIXED_HEAD.format(
        results=scale.results, at="" if scale.name == MAIN else f" at {scale.name} scale", window=scale.window,
        length=r.length, farthest=scale.farthest, longest=r.length * scale.farthest, units=units,
    )  # fmt: skip
    text += (
        f"Scale `{scale.name}`: {r.size} on {scale.data}, {r.steps:,} steps of {r.batch_tokens:,} {units} "
        f"({r.steps * r.batch_tokens:,} in all), {r.retrieval_share:.0%} of the windows with retrieval "
        f"tasks ({', '.join(r.retrieval_tasks)}).\n\n"
    )
    unfinished = (
        "**Preliminary**: some runs are not finished (listed at the end), so verdicts may rest on fewer seeds than "
        "the rules name; the number of seeds of each row is below its table. For a row with one seed the rules take "
        "the average spread of the rows with several: another seed may change a verdict on such a row.\n\n"
    )
    text += claims_section(claims, {}, unfinished if tables["mixed"]["missing"] else "")
    for name, experiment in EXPERIMENTS.items():
        if experiment.page == "results-mixed" and tables[name]["rows"]:
            text += "\n" + section(tables[name], _picture(scale, name, folder))
    return text


def page(scale: Scale, tables: dict[str, dict[str, Any]], claims: list[dict[str, Any]], folder: Path) -> str:
    """The whole page; `folder` is where it will lie, for links."""
    r = scale.base
    units = "bytes" if scale.data == STDLIB else "tokens"
    text = HEAD.format(results=scale.results, at="" if scale.name == MAIN else f" at {scale.name} scale")
    of_passkey = scale.settings["retrieval"].get("steps", r.steps) * r.batch_tokens
    text += (
        f"Scale `{scale.name}`: {r.size.upper()} parameters, data {scale.data}, length {r.length}, {r.steps:,} steps "
        f"of {r.batch_tokens:,} {units} ({r.steps * r.batch_tokens:,} in all for every arm, except those of "
        f"`passkey`, which have {of_passkey:,}). An arm is one training run. Columns of the paper show its published "
        "numbers (124M parameters, FineWeb-10B). Compare losses only within a table: evaluations to 16x, to 64x and "
        "during training use different parts of the held-out text.\n\n"
    )
    text += f"{scale.remark}\n\n" if scale.remark else ""
    beside, about = _verdicts_beside(scale), ""
    if beside:
        where = os.path.relpath(usual_page(SCALES[BESIDE]), folder)
        about = (
            f"In brackets is the verdict of the same rule at `{BESIDE}` scale ([its page]({where})): models of "
            f"{SCALES[BESIDE].base.size.upper()} parameters on bytes, which say less but need only two cores.\n\n"
        )
    text += claims_section(claims, beside, about)
    for name, experiment in EXPERIMENTS.items():
        if experiment.page != "results":
            continue
        text += "\n" + section(tables[name], _picture(scale, name, folder))
        if experiment.measure is not None and (scale.results / f"{name}.json").exists():
            text += "\n" + collect.measured_markdown(scale.results / f"{name}.json")
    return text


def claims_section(claims: list[dict[str, Any]], beside: dict[str, str], about: str = "") -> str:
    """The table of claims with their verdicts, and the rules; `beside` has the verdicts at another scale."""
    text = f"## Claims\n\n{about}"
    rows = []
    for c in claims:
        verdict = f"**{c['verdict']}**" + (f" ({beside[c['claim']]})" if c["claim"] in beside else "")
        rows.append([c["claim"], f"{c['text']} ({c['source']})", verdict, c["evidence"], f"`{c['command']}`"])
    text += markdown_table(["", "claim", "verdict", "evidence", "command"], rows)
    text += "\nThe rules that decide (`claims.py` and `mixed_claims.py` in `src/lssar/experiments`):\n\n"
    text += "".join(f"- {c['claim']}: {c['rule']}.\n" for c in claims)
    return text


def _verdicts_beside(scale: Scale) -> dict[str, str]:
    """By claim, those of the smaller scale that were decided."""
    path = SCALES[BESIDE].tables / "claims.json"
    if scale.name != MAIN or not path.exists():
        return {}
    return {c["claim"]: c["verdict"] for c in json.loads(path.read_text()) if c["verdict"] != "not tested"}


def _seed_counts(table: dict[str, Any]) -> str:
    """How many seeds the rows with several have, in a sentence."""
    rows: dict[int, list[str]] = {}
    for label, count in {row["label"]: _seeds(row) for row in table["rows"] if "loss" in row}.items():
        rows.setdefault(count, []).append(label)
    several = [
        f"{count} for {', '.join(repr(label) for label in labels)}"
        for count, labels in sorted(rows.items(), reverse=True)
        if count > 1
    ]
    return f"Seeds: {'; '.join(several)}{'; one for the others' if 1 in rows else ''}."


def section(table: dict[str, Any], picture: str | None) -> str:
    text = f"## {table['title']}\n\n{table['question']}\n"
    parts = collect.sections(table)
    for caption, body in parts:
        text += f"\n{caption}:\n\n{body}"
    if parts and any("deviation" in str(row.get("loss")) and _seeds(row) > 1 for row in table["rows"] if "loss" in row):
        text += f"\n± is one standard deviation over seeds. {_seed_counts(table)}\n"
    if any(row.get("earlier") for row in table["rows"]):
        text += (
            "\nA row `trained at` a commit is another training of the same arm: the same seed, with code or on a "
            "machine that rounds differently. The difference is noise of training, which the intervals, over "
            "questions only, do not include.\n"
        )
    if picture is not None and parts:
        text += f"\n![{table['title']}]({picture})\n"
    if table["missing"]:
        missing = "; ".join(table["missing"])
        text += f"\nNot finished yet: {missing}.\n" if parts else "\nNot evaluated yet.\n"
    if table["machines"]:
        text += "\n" + ". ".join(table["machines"]) + f". Command: `{table['command']}`.\n"
    return text


def _seeds(row: dict[str, Any]) -> int:
    return max(point["seeds"] for point in row["loss"].values())


def _picture(scale: Scale, name: str, folder: Path) -> str | None:
    return os.path.relpath(scale.tables / f"{name}.png", folder)


def _claims_of(page: str, claims: list[dict[str, Any]]) -> list[dict[str, Any]]:
    own = {claim.name for claim in CLAIMS if claim.page == page}
    return [c for c in claims if c["claim"] in own]


def pages(scale: Scale, path: Path, tables: dict[str, dict[str, Any]], claims: list[dict[str, Any]]) -> dict[Path, str]:
    """The pages of a scale; that of `mixed` is beside the main one, once there are results."""
    found = {path: page(scale, tables, _claims_of("results", claims), path.parent)}
    if tables["mixed"]["rows"]:
        beside = path.with_name(usual_page(scale, "results-mixed").name)
        found[beside] = mixed_page(scale, tables, _claims_of("results-mixed", claims), path.parent)
    return found


def write(scale: Scale, path: Path, pictures: bool = True) -> list[Path]:
    """Tables and figures of all experiments, the claims, and the pages."""
    files: list[Path] = []
    for experiment in EXPERIMENTS.values():
        files += collect.write(experiment, scale, pictures)[1]
    tables = tables_of(scale)
    claims = decide(tables, scale.name)
    files.append(write_json(scale.tables / "claims.json", claims, overwrite=True))
    for place, text in pages(scale, path, tables, claims).items():
        files.append(write_file(place, partial(_write_text, text), overwrite=True))
    return files


def _write_text(text: str, path: Path) -> None:
    path.write_text(text)


def stale(scale: Scale, path: Path) -> list[str]:
    """Files that are not what the arms' JSON gives."""
    tables = tables_of(scale)
    claims = decide(tables, scale.name)
    folder = scale.tables
    wanted: dict[Path, Any] = {folder / f"{name}.json": table for name, table in tables.items() if table["rows"]}
    wanted[folder / "claims.json"] = claims
    found = [str(p) for p, value in wanted.items() if not p.exists() or json.loads(p.read_text()) != value]
    for place, text in pages(scale, path, tables, claims).items():
        if not place.exists() or place.read_text() != text:
            found.append(str(place))
    return found
