"""Write the tables of the README and docs from the committed results, so that they cannot drift.

A table is between `<!-- results: results/NAME.json WORDS -->` and `<!-- end -->`. Several files are joined by commas.
The words are modes of `lssar bench` (`forward both [FIELD=VALUE,...]`) or one of these:

    compare                          a column for each contestant of `lssar bench`
    decode                           `lssar bench --decode`
    lengths, downstream              `lssar eval length`, `lssar eval downstream`
    verdicts, far                    claims and far lengths of `lssar reproduce report`
    ratios COMMIT                    what `fused_lab.py ratios` printed at that commit
    mixed train|decode               `mixed_model.py`
    scale plan|parts|steps|memory|models     `scale.py`
    attack, fuzz                     `python -m tests.attack`, the fuzzers

Numbers in sentences come from statements.py. `python benchmarks/report.py` fills all of them in; with `--check` it only
says whether that would change anything.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import statements
from lssar.tables import markdown_table

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- results: (\S+) (.*?) -->\n).*?(<!-- end -->)", re.S)


def table(paths: list[Path], words: list[str]) -> str:
    """Milliseconds and peak memory for each case and contestant, with the ratio to softmax SDPA in the same run."""
    if words[0] == "ratios":
        return ratio_table(paths[0].read_text(), words[1])
    results = [json.loads(path.read_text()) for path in paths]
    if words[0] in TABLES:
        return TABLES[words[0]](results)
    if words[0] in GROUPS:
        return GROUPS[words[0]][words[1]](*results)
    (result,) = results
    modes = [word for word in words if "=" not in word]
    wanted = {field: values.split(",") for field, values in (word.split("=") for word in words if "=" in word)}
    lines = []
    for row in result["rows"]:
        if any(str(row[field]) not in values for field, values in wanted.items()):
            continue
        shape = f"{row['batch']} x {row['heads']} x {row['length']} x {row['head_size']}, {row['dtype']}"
        shape += f", window {row['window']}" if row.get("window") else ""
        shape += ", CUDA graph" if row.get("cuda_graph") else ""
        peer = _peer(row, result["rows"])
        cells = [shape, f"`{row['contestant']}`"]
        for mode in modes:
            value = row.get(f"{mode}_ms")
            ratio = f" ({value / peer[f'{mode}_ms']:.2f}x)" if value and peer and peer is not row else ""
            cells.append(f"{_shown(value)}{ratio}" if value else "-")
        cells.append(f"{row['peak_extra_mib']:.0f}" if "peak_extra_mib" in row else _obstacle(row))
        lines.append(cells)
    head = ["shape", "implementation", *(f"{mode}, ms" for mode in modes), "peak extra MiB"]
    windowed = any(row.get("window") for row in result["rows"])  # of which SDPA has no kernel
    return markdown_table(head, lines) + (
        f"\n{_machine(result['environment'])}, seed {result['rows'][0]['seed']}. In brackets the ratio to softmax "
        f"{'by FlexAttention' if windowed else 'SDPA'} of the same run. Command: `{result['command']}`.\n"
    )


def verdict_counts(claims: list[dict]) -> str:
    """How many claims, other than those about mixed layouts, have each verdict."""
    claims = [claim for claim in claims if not claim["claim"].startswith("m")]
    verdicts = {"holds": "hold", "holds in part": "hold in part", "does not hold": "do not hold"}
    verdicts["not tested"] = "cannot be decided with these models"
    counts = [(sum(c["verdict"] == verdict for c in claims), words) for verdict, words in verdicts.items()]
    return f"Of {len(claims)}, {', '.join(f'{count} {words}' for count, words in counts if count)}.\n"


def fuzz_table(results: list[dict]) -> str:
    """Counts of the fuzzers of `lssar.attention` and of the fused kernels."""
    rows = []
    for r in results:
        of_cpu, on_gpu = "seed" in r, "gpu" in r["environment"]
        what = "reference and tiled" if of_cpu else "fused" if on_gpu else "fused, small cases in Triton's interpreter"
        first = f"seed {r['seed']}, from {r['first']:,}" if of_cpu else f"from {r['first']:,}"
        rows.append([what, _machine(r["environment"]), first, f"{r['cases']:,}", str(len(r["failures"]))])
    return markdown_table(["implementation", "machine", "cases drawn", "run", "failures"], rows)


def attack_table(*results: dict) -> str:
    """Counts of the kill loops and the corruption matrices."""
    rows = [row for result in results for row in _attack_rows(result)]
    return markdown_table(["attack", "cases", "outcome"], rows) + "".join(
        f"\n`{result['command'].strip()}`: {_machine(result['environment'])}.\n" for result in results
    )


def _attack_rows(result: dict) -> list[list[str]]:
    """Rows of one file of `python -m tests.attack`."""
    if "outcomes" in result:
        sharded = any("shard-" in row["file"] for row in result["rows"])
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result["outcomes"].items()))
        return [["damaged files" + (" of a sharded checkpoint" * sharded), f"{result['cases']} cases", outcomes]]
    if "moves" in result:
        moved = ", ".join(sorted(move for move in result["moves"] if len({*move.split(" to ")}) == 2))
        outcome = (
            f"the other processes ended within {result['longest_end']:.1f} s, with a message; completed: "
            f"{result['finished_runs']}, losses equal to {result['largest_difference']:.0e}; "
            f"resumed on another number of processes: {moved}"
        )
        cases = f"{result['kills']} kills, {result['in_a_save']} during a save"
        return [["kill -9: one process of 1, 2 or 4, fsdp, float64", cases, outcome]]
    rows = []
    for part in result["training"] + result["preparation"]:
        name = f"training, {part['victim']}" if "victim" in part else f"data preparation, workers: {part['workers']}"
        outcome = f"lost: {part['lost']}; completed, equal to the bit: {part['finished_runs']}"
        rows.append([f"kill -9: {name}", f"{part['kills']} kills", outcome])
    return rows


FAR = ("1", "64", "512")
"""Multiples of the training length in the short table of the experiment `mixed`."""


def far_table(table: dict) -> str:
    """Loss, passkeys and needles of each row of the experiment `mixed`, at a few lengths; means over seeds.

    A dash stands for an evaluation that was not made.
    """
    cells: dict[str, dict[str, list[str]]] = {}
    kinds = {"length": "loss", "passkey": "passkeys", "needles": "needles"}
    far = [m for m in FAR if m in table["rows"][0]["loss"]]
    for row in table["rows"]:
        kind = row["evaluation"].split("-")[0]
        if kind == "length":
            found = [f"{row['loss'][m]['mean']:.3f}" for m in far]
        elif kind in kinds:
            found = [f"{row['rate'][m]['rate']:.2f}" for m in far]
        else:
            continue
        cells.setdefault(row["label"], {"seeds": [str(len(row["arms"]))]})[kind] = found
    head = ["", "seeds", *(f"{word} {' / '.join(f'{m}x' for m in far)}" for word in kinds.values())]
    rows = [
        [label, *(" / ".join(found.get(kind, "-")) for kind in ("seeds", *kinds))] for label, found in cells.items()
    ]
    return markdown_table(head, rows) + f"\n{'; '.join(table['machines'])}. Command: `{table['command']}`.\n"


def speed_table(results: list[dict]) -> str:
    """Ratios of LSSAR and LSSA to PyTorch's softmax in the same run: self-attention by length, and decode."""
    lines, sources = [], []
    for result in results:
        rows = [row for row in result["rows"] if "forward_ms" in row]
        where = result["environment"].get("gpu") or "CPU"
        for case in dict.fromkeys((r["batch"], r["heads"], r["key_heads"], r["length"], r["head_size"]) for r in rows):
            same = {r["contestant"]: r for r in rows if case == tuple(r[k] for k in CASE)}
            peer = next((same[name] for name in PEERS if name in same), None)
            ours = {s: same.get(f"fused:{s}") or same.get(f"tiled:{s}") for s in ("lssar", "lssa")}
            if peer is None or ours["lssar"] is None or case[3] not in SPEED_LENGTHS:
                continue
            what = "decode" if peer.get("decode") else "self-attention"
            shape = f"{case[0]} x {case[1]}{f'/{case[2]}' if case[2] != case[1] else ''} x {case[3]:,} x {case[4]}"
            shape += f", {peer['dtype']}{', CUDA graph' * bool(peer.get('cuda_graph'))}"
            ratios = [_ratios(row, peer) for row in ours.values()]
            lines.append([where.removeprefix("NVIDIA "), what, shape, *ratios])
        sources.append(_machine(result["environment"]))
    head = ["", "", "batch x heads x length x head size", "LSSAR", "LSSA"]
    return markdown_table(head, lines) + f"\n{'; '.join(dict.fromkeys(sources))}.\n"


CASE = ("batch", "heads", "key_heads", "length", "head_size")
PEERS = ("cudnn:softmax", "sdpa:softmax")
SPEED_LENGTHS = (1024, 8192, 65536, 131072)


def _ratios(row: dict | None, peer: dict) -> str:
    modes = [mode for mode in ("forward_ms", "both_ms") if row and mode in row and mode in peer]
    return " / ".join(f"{row[mode] / peer[mode]:.2f}x" for mode in modes) if row else "-"


def length_table(results: list[dict]) -> str:
    """Held-out loss by length of each run, and how fast it trained where that is known."""
    curves = [curve for result in results for curve in result["curves"]]
    lengths = [point["length"] for point in curves[0]["by_length"]]
    speeds = all("training" in curve for curve in curves)
    heads = ["", *(["tokens", "tokens/s"] if speeds else []), *(f"{n // curves[0]['train_length']}x" for n in lengths)]
    rows = []
    for curve in curves:
        if [point["length"] for point in curve["by_length"]] != lengths:
            raise ValueError(f"{curve['label']} is read at other lengths than {curves[0]['label']}")
        cells = [curve["label"]]
        if speeds:
            cells += [f"{curve['training']['tokens']:,}", f"{curve['training']['tokens_per_s']:,.0f}"]
        cells += [f"{point['loss']:.3f}" for point in curve["by_length"]]
        rows.append(cells)
    return markdown_table(heads, rows) + "".join(_source(result) + "\n" for result in results)


def downstream_table(results: list[dict]) -> str:
    """Scores of each arm with their standard errors, and what chance would give."""
    from lssar.evaluation.benchmarks import table_of

    arms = [arm for result in results for arm in result["arms"]]
    heads, rows = table_of({"arms": arms})
    table = markdown_table(
        (head.replace("\n", ", ") for head in heads), ([cell.replace("+-", "±") for cell in cells] for cells in rows)
    )
    sources = [
        f"\n{arm['label']}: {_training(arm['recipe'])}, step {arm['step']}; {_machine(arm['environment'])}, "
        f"{arm['harness']} harness. Command: `{arm['command']}`.\n"
        for arm in arms
    ]
    return table + "".join(sources)


def decode_table(results: list[dict]) -> str:
    """Microseconds of a step of decoding, and the ratio to the fastest softmax of the same run."""
    lines = []
    for rows in (result["rows"] for result in results):
        for length in dict.fromkeys(row["length"] for row in rows):
            times = {row["contestant"]: row["forward_ms"] * 1e3 for row in rows if row["length"] == length}
            name = min((name for name in times if name.endswith(":softmax")), key=lambda name: times[name])
            ours = (times["fused:lssar"], times["unit_cache:lssar"])
            r = rows[0]
            shape = f"batch {r['batch']}, {r['heads']} / {r['key_heads']} heads, d {r['head_size']}"
            best = f"{_shown(times[name])} ({name.split(':')[0]})"
            ratios = [f"{_shown(time)} ({time / times[name]:.2f}x)" for time in ours]
            lines.append([shape, f"{length:,}", best, *ratios])
    sources = [f"\n{_machine(result['environment'])}. Command: `{result['command']}`.\n" for result in results]
    head = ["", "keys in the cache", "best softmax, us", "raw keys, us", "unit keys, us"]
    return markdown_table(head, lines) + "".join(sources)


RATIO = re.compile(r"(\d+)x(\d+)x(\d+): forward (\S+) / (\S+) = (\S+) +both (\S+) / (\S+) = (\S+) +memory (\S+)")


def ratio_table(text: str, commit: str) -> str:
    """Milliseconds of ours and of cuDNN's, timed in turns, and their ratios."""
    sections = re.split(r"^== ", text, flags=re.M)
    (section,) = (s for s in sections if s.startswith(f"commit {commit}, fused_lab.py ratios"))
    rows = []
    for d, heads, length, ours, theirs, ratio, both, both_theirs, both_ratio, memory in RATIO.findall(section):
        times = [_shown(float(x)) for x in (ours, theirs, both, both_theirs)]
        shape = f"d {d}, {heads} heads, {length}"
        rows.append([shape, f"{times[0]} / {times[1]}", ratio, f"{times[2]} / {times[3]}", both_ratio, memory])
    return markdown_table(["LSSAR p = 15", "forward, ms", "ratio", "forward + backward, ms", "ratio", "memory"], rows)


def _training(recipe: dict) -> str:
    return f"{recipe['size']} on {Path(recipe['data']).name}, length {recipe['length']}, seed {recipe['seed']}"


def _machine(environment: dict) -> str:
    """Where and with what a result was made."""
    where = environment.get("gpu") or f"{environment['cpu']}, {environment['threads']} threads"
    commit, *changes = str(environment["commit"]).split(maxsplit=1)
    commit = " ".join([commit[:12], *changes])
    return f"{where}, torch {environment['torch']}, {environment['date'][:10]}, commit {commit}"


def _source(result: dict) -> str:
    """Of a table by length: where its curves come from."""
    return (
        f"\n{_training(result['curves'][0]['recipe'])}; {_machine(result['environment'])}. "
        f"Command: `{result['command']}`. {result.get('note', '')}".rstrip()
    )


def _peer(row: dict, rows: list[dict]) -> dict | None:
    same = ("length", "head_size", "dtype", "batch", "heads", "key_heads", "causal", "window", "cuda_graph")
    alike = [r for r in rows if all(r.get(key) == row.get(key) for key in same)]
    for name in ("cudnn:softmax", "sdpa:softmax", "flex:softmax"):
        for r in alike:
            if r["contestant"] == name and "forward_ms" in r:
                return r
    return None


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _obstacle(row: dict) -> str:
    return next((f"{key}: {row[key]}" for key in ("unavailable", "incorrect", "failed") if key in row), "-")


def compare_table(result: dict) -> str:
    """A row for each shape and a column for each contestant: milliseconds (forward, both) and the ratio of the last."""
    names = list(dict.fromkeys(row["contestant"] for row in result["rows"]))
    lines: dict[str, dict[str, str]] = {}
    for row in result["rows"]:
        shape = f"{row['batch']} x {row['heads']} x {row['length']:,} x {row['head_size']}"
        shape += f", window {row['window']}" if row.get("window") else ""
        peer = _peer(row, result["rows"])
        if modes := [mode for mode in ("forward_ms", "both_ms") if mode in row]:
            ratio = "" if peer in (None, row) else f" ({row[modes[-1]] / peer[modes[-1]]:.2f}x)"
            cell = " / ".join(_shown(row[mode]) for mode in modes) + ratio
        else:
            cell = _obstacle(row)
        lines.setdefault(shape, {})[row["contestant"]] = cell
    head = ["batch x heads x length x head size", *(f"`{name}`" for name in names)]
    rows = [[shape, *(cells.get(name, "-") for name in names)] for shape, cells in lines.items()]
    return markdown_table(head, rows) + f"\n{_machine(result['environment'])}. {_command(result)}"


def mixed_train_table(result: dict) -> str:
    """Tokens a second in training, of mixed models and of the uniform one."""
    return _by_arm(
        result, "length", lambda row: f"{row['length']:,}", lambda row: f"{row['tokens_per_s']:,}", "tokens_per_s"
    )


def mixed_decode_table(result: dict) -> str:
    """Milliseconds of a decode step and size of the cache."""

    def case(row: dict) -> str:
        return f"{row['context']:,}, batch {row['batch']}"

    def cells(row: dict) -> str:
        return f"{row['step_ms']:.2f} ms, cache {row['cache_mib'] / 1024:.1f} GiB"

    return _by_arm(result, "keys in the cache", case, cells, "step_ms")


def _by_arm(result: dict, first: str, case: Callable[[dict], str], cell: Callable[[dict], str], ratio: str) -> str:
    """Of `mixed_model.py`: a row for each case and a column for each arm, with the ratio to the first arm."""
    arms = list(dict.fromkeys(row["arm"] for row in result["rows"]))
    lines: dict[str, list[str]] = {}
    for row in result["rows"]:
        to_first = "" if row["arm"] == arms[0] else f" ({row[f'{ratio}_ratio']:.2f}x)"
        lines.setdefault(case(row), []).append(cell(row) + to_first)
    table = markdown_table([first, *arms], [[name, *cells] for name, cells in lines.items()])
    return table + f"\n{_machine(result['environment'])}. {_command(result)}"


def scale_plan_table(result: dict) -> str:
    """The 1B run on several numbers of cards."""
    rows = [
        [
            f"{p['mesh']['data'] * p['mesh']['context']} x {p['card'].upper()}", f"`{p['attention']}`",
            f"{p['micro_steps']} x {p['micro_batch'][0]}", f"{p['peak_gib']:.0f}",
            f"{sum(p['communication'].values()):.0f}", f"{p['step_s']:.2f}", f"{p['tokens_per_s'] / 1e3:,.0f}K",
            f"{p['steps'] * p['step_s'] / 86400:.1f}", f"{p['gpu_hours']:,.0f}", f"{p['cost']:,.0f}",
        ]
        for p in result["plans"]
        if p["card"] == "h200"  # of others no kernels were timed
    ]  # fmt: skip
    head = ["", "global layers", "micro-batches x sequences", "memory a card, GiB", "received a step, GB", "step, s",
            "tokens/s", "days", "GPU hours", "US$"]  # fmt: skip
    return markdown_table(head, rows) + f"\n{_command(result)}"


def scale_parts_table(result: dict) -> str:
    """What takes the hours of the plans on eight H200."""
    chosen = [p for p in result["plans"] if p["card"] == "h200" and p["mesh"]["data"] * p["mesh"]["context"] == 8]
    head = ["part of a step on 8 x H200", *(f"`{p['attention']}`: s" for p in chosen), *("GPU hours" for _ in chosen)]
    rows = []
    for part in chosen[0]["seconds"]:
        seconds = [p["seconds"][part] for p in chosen]
        if any(seconds):
            overlaps = " (overlaps with the rest)" if part == "weights and gradients" else ""
            hours = ["-" if overlaps else f"{8 * p['steps'] * s / 3600:,.0f}" for p, s in zip(chosen, seconds)]
            rows.append([part + overlaps, *(f"{s:.3f}" for s in seconds), *hours])
    memory = {part: [f"{p['memory'][part]:.2f}" for p in chosen] for part in chosen[0]["memory"]}
    blank = ["" for _ in chosen]
    rows += [[f"memory: {part}, GiB", *sizes, *blank] for part, sizes in memory.items() if float(sizes[0])]
    notes = "".join(f"Note of the dry run: {note}.\n" for note in chosen[0]["notes"])
    return markdown_table(head, rows) + f"\n{notes}{_command(result)}"


def scale_steps_table(expected: dict, measured: dict) -> str:
    """Predicted and measured time of a step on one H200."""
    rows = [
        (p["model"], p["micro_batch"][1], p["step_s"], row["step_s"], "h200-scale-models.json")
        for p, row in zip(expected["models"], measured["models"], strict=True)
    ] + [
        (f"{row['size'].upper()}, {row['attention'].upper()}", row["length"], row["predicted_s"], row["measured_s"],
         Path(row["source"]).name)
        for row in expected["speeds"]
    ]  # fmt: skip
    cells = [
        [model, f"{length:,}", f"{1e3 * predicted:.0f}", f"{1e3 * found:.0f}", f"{predicted / found - 1:+.0%}",
         f"`benchmarks/results/{source}`"]
        for model, length, predicted, found, source in rows
    ]  # fmt: skip
    head = ["model", "length", "predicted, ms", "measured, ms", "", "measured in"]
    return markdown_table(head, cells) + f"\n{_machine(measured['environment'])}. {_command(expected)}"


def scale_memory_table(result: dict) -> str:
    """Predicted and measured peak memory of tiny models on a CPU."""
    rows = []
    for row in result["memory"]:
        changes = " ".join(f"{key} {value}" for key, value in row["changes"].items())
        middle = statistics.median(row["measured"])
        spread = f"{min(row['measured']) / 2**20:.1f} to {max(row['measured']) / 2**20:.1f}"
        measured = spread if len(set(row["measured"])) > 1 else f"{middle / 2**20:.1f}"
        error = f"{row['predicted'] / middle - 1:+.0%}"
        rows.append([str(row["processes"]), changes or "-", f"{row['predicted'] / 2**20:.1f}", measured, error])
    head = ["processes", "`tiny-cpu` with", "predicted, MiB", "measured, MiB", "against the median"]
    return markdown_table(head, rows) + f"\n{_machine(result['environment'])}. {_command(result)}"


def scale_models_table(expected: dict, measured: dict) -> str:
    """Predicted and measured peak memory of training on one H200."""
    rows = []
    for p, row in zip(expected["models"], measured["models"], strict=True):
        parts = ", ".join(f"{name} {size:.1f}" for name, size in p["memory"].items() if size >= 0.05)
        batch = f"{p['micro_steps']} x {p['micro_batch'][0]} x {p['micro_batch'][1]:,}"
        error = f"{p['peak_gib'] / row['peak_gib'] - 1:+.0%}"
        rows.append([p["model"], batch, f"{p['peak_gib']:.1f}", f"{row['peak_gib']:.1f}", error, parts])
    head = ["one H200", "micro-batches x sequences x tokens", "predicted, GiB", "measured, GiB", "", "predicted parts"]
    return markdown_table(head, rows) + f"\n{_machine(measured['environment'])}. {_command(measured)}"


def _command(result: dict) -> str:
    return f"Command: `{result['command']}`.\n"


TABLES: dict[str, Callable[[list[dict]], str]] = {
    "attack": lambda results: attack_table(*results),
    "compare": lambda results: compare_table(results[0]),
    "decode": decode_table,
    "downstream": downstream_table,
    "far": lambda results: far_table(results[0]),
    "fuzz": fuzz_table,
    "lengths": length_table,
    "speed": speed_table,
    "verdicts": lambda results: verdict_counts(results[0]),
}
GROUPS: dict[str, dict[str, Callable[..., str]]] = {
    "mixed": {"train": mixed_train_table, "decode": mixed_decode_table},
    "scale": {
        "plan": scale_plan_table, "parts": scale_parts_table, "steps": scale_steps_table, "memory": scale_memory_table,
        "models": scale_models_table,
    },
}  # fmt: skip


def filled(page: Path) -> str:
    """The page with its tables."""

    def block(match: re.Match[str]) -> str:
        paths = [ROOT / "benchmarks" / name for name in match[2].split(",")]
        return match[1] + table(paths, match[3].split()) + match[4]

    return BLOCK.sub(block, page.read_text())


def main() -> None:
    check = "--check" in sys.argv
    stale, problems = [], []
    sentences = statements.all_statements()
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text, found = statements.filled(filled(page), str(page.relative_to(ROOT)), sentences)
        problems += found
        if text != page.read_text():
            stale.append(page.name)
            if not check:
                page.write_text(text)
    print(("stale: " if check else "filled in: ") + (", ".join(stale) or "nothing"))
    print(*problems, sep="\n")
    sys.exit(1 if problems or (stale and check) else 0)


if __name__ == "__main__":
    main()
