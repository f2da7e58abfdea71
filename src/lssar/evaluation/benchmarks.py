"""Zero-shot benchmarks from local files: what is asked, what counts as right, and a harness that needs nothing else.

Prompts, continuations and metrics are those of lm-eval's own tasks (the tests compare them request by request), so the
results are comparable; `lssar.hf.lm_eval` runs lm-eval itself on the same files. A file is NAME.jsonl, or
.jsonl.xz, in the fields of the dataset on the Hugging Face hub; a few others are understood as well (see `adapt`).
"""

from __future__ import annotations

import json
import lzma
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lssar.data.tokenizers import Tokenizer
from lssar.evaluation.likelihood import encode_pair, likelihoods
from lssar.model import GPT

Document = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """Contexts with continuations, one of them right; or a single pair whose continuation is to be guessed."""

    pairs: tuple[tuple[str, str], ...]
    gold: int
    lengths: tuple[int, ...]
    """Characters of each choice, by which `acc_norm` divides."""


@dataclass(frozen=True)
class Benchmark:
    name: str
    """lm-eval's name of the task."""
    files: tuple[str, ...]
    """Names that its file may have, the split that lm-eval uses first."""
    question: Callable[[Document], Question]
    metrics: tuple[str, ...]
    yaml: str
    """lm-eval's own file for it."""
    adapt: Callable[[Document], Document] = lambda doc: doc
    """Converts the fields of a local file to those of the hub."""


def _choices(context: str, choices: Sequence[str], gold: int) -> Question:
    return Question(tuple((context, f" {choice}") for choice in choices), gold, tuple(map(len, choices)))


def _hellaswag(doc: Document) -> Question:
    def clean(text: str) -> str:
        text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
        return text.replace("  ", " ")

    context = clean(f"{doc['activity_label']}: {doc['ctx_a']} {doc['ctx_b'].capitalize()}")
    return _choices(context, [clean(ending) for ending in doc["endings"]], int(doc["label"]))


def _arc(doc: Document) -> Question:
    choices = doc["choices"]
    return _choices(f"Question: {doc['question']}\nAnswer:", choices["text"], choices["label"].index(doc["answerKey"]))


def _adapt_arc(doc: Document) -> Document:
    """Accepts the format of llm-foundry as well: query, choices, gold."""
    if "query" not in doc:
        return doc
    labels = [str(i + 1) for i in range(len(doc["choices"]))]
    question = doc["query"].removeprefix("Question: ")
    choices = {"text": doc["choices"], "label": labels}
    return {"question": question, "choices": choices, "answerKey": labels[doc["gold"]]}


def _sciq(doc: Document) -> Question:
    choices = [doc["distractor1"], doc["distractor2"], doc["distractor3"], doc["correct_answer"]]
    return _choices(f"{doc['support'].lstrip()}\nQuestion: {doc['question']}\nAnswer:", choices, 3)


def _winogrande(doc: Document) -> Question:
    """The choices are in the context; the text after the blank is scored."""
    before, after = doc["sentence"].split("_", 1)
    pairs = tuple((before + doc[option], f" {after.strip()}") for option in ("option1", "option2"))
    return Question(pairs, int(doc["answer"]) - 1, tuple(len(context) for context, _ in pairs))


def _openbookqa(doc: Document) -> Question:
    choices = doc["choices"]
    return _choices(doc["question_stem"], choices["text"], choices["label"].index(doc["answerKey"].lstrip()))


def _boolq(doc: Document) -> Question:
    return _choices(f"{doc['passage']}\nQuestion: {doc['question']}?\nAnswer:", ["no", "yes"], int(doc["label"]))


def _adapt_boolq(doc: Document) -> Document:
    return doc if "label" in doc else {**doc, "label": int(doc["answer"])}


def _copa(doc: Document) -> Question:
    connector = {"cause": "because", "effect": "therefore"}[doc["question"]]
    choices = [f" {doc[c][0].lower()}{doc[c][1:]}" for c in ("choice1", "choice2")]
    return _choices(f"{doc['premise'].strip()[:-1]} {connector}", choices, doc["label"])


def _lambada(doc: Document) -> Question:
    context, _, last = doc["text"].rpartition(" ")
    return Question(((context, f" {last}"),), 0, (len(last),))


def _adapt_lambada(doc: Document) -> Document:
    return doc if "text" in doc else {"text": f"{doc['context']} {doc['continuation']}"}


BENCHMARKS = {
    b.name: b
    for b in (
        Benchmark("hellaswag", ("hellaswag", "hellaswag_val"), _hellaswag, ("acc", "acc_norm"),
                  "hellaswag/hellaswag.yaml"),
        Benchmark("arc_easy", ("arc_easy", "arc_easy_test", "arc_easy_llmfoundry", "arc_easy_val"), _arc,
                  ("acc", "acc_norm"), "arc/arc_easy.yaml", _adapt_arc),
        Benchmark("arc_challenge", ("arc_challenge", "arc_challenge_test", "arc_challenge_llmfoundry",
                  "arc_challenge_val"), _arc, ("acc", "acc_norm"), "arc/arc_challenge.yaml", _adapt_arc),
        Benchmark("piqa", ("piqa", "piqa_val"),
                  lambda doc: _choices(f"Question: {doc['goal']}\nAnswer:", [doc["sol1"], doc["sol2"]], doc["label"]),
                  ("acc", "acc_norm"), "piqa/piqa.yaml"),
        Benchmark("sciq", ("sciq", "sciq_test", "sciq_val"), _sciq, ("acc", "acc_norm"), "sciq/sciq.yaml"),
        Benchmark("winogrande", ("winogrande", "winogrande_val"), _winogrande, ("acc",), "winogrande/default.yaml"),
        Benchmark("openbookqa", ("openbookqa", "openbookqa_test", "openbookqa_val"), _openbookqa, ("acc", "acc_norm"),
                  "openbookqa/openbookqa.yaml"),
        Benchmark("boolq", ("boolq", "boolq_val"), _boolq, ("acc",), "super_glue/boolq/default.yaml", _adapt_boolq),
        Benchmark("copa", ("copa", "copa_val"), _copa, ("acc",), "super_glue/copa/default.yaml"),
        Benchmark("lambada_openai", ("lambada_openai", "lambada_openai_test"), _lambada, ("acc", "perplexity"),
                  "lambada/lambada_openai.yaml", _adapt_lambada),
        Benchmark("blimp", ("blimp",), lambda doc: _choices("", [doc["sentence_good"], doc["sentence_bad"]], 0),
                  ("acc",), "blimp/adjunct_island.yaml"),
    )
}  # fmt: skip


RULER = {  # haystack, keys, values, tokens of an answer
    "niah_single_1": ("repeat", "words", "numbers", 32),
    "niah_multikey_2": ("needle", "words", "numbers", 32),
    "niah_multikey_3": ("needle", "uuids", "uuids", 64),
}
"""RULER's needle tasks that are generated without a download: in noise, among other needles, among needles of UUIDs."""


def benchmark(name: str) -> Benchmark:
    if name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}; known: {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]


def find_file(name: str, folder: Path) -> Path:
    b = benchmark(name)
    for stem in b.files:
        for suffix in (".jsonl", ".jsonl.xz"):
            if (path := folder / f"{stem}{suffix}").exists():
                return path
    raise FileNotFoundError(f"{name}: none of {', '.join(f'{stem}.jsonl[.xz]' for stem in b.files)} in {str(folder)!r}")


def read_documents(name: str, folder: Path, limit: int | None = None) -> list[Document]:
    """In the fields of the hub, the first `limit`; with a limit, BLiMP's are spread over its paradigms."""
    path, b = find_file(name, folder), benchmark(name)
    documents = []
    with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                document = b.adapt(json.loads(line))
                b.question(document)
            except (KeyError, ValueError, TypeError, IndexError) as error:
                raise ValueError(f"{path}, line {number}: not a document of {name}: {error!r}") from error
            documents.append(document)
    if not documents:
        raise ValueError(f"{path} is empty")
    if limit is not None and limit < len(documents):
        step = len(documents) / limit if name == "blimp" else 1
        documents = [documents[int(i * step)] for i in range(limit)]
    return documents


def chance(questions: Sequence[Question]) -> dict[str, float]:
    """Accuracy of guessing, and of one constant answer where all questions offer the same answers."""
    if len(questions[0].pairs) == 1:
        return {}
    found = {"chance": sum(1 / len(q.pairs) for q in questions) / len(questions)}
    offered = {tuple(continuation for _, continuation in q.pairs) for q in questions}
    if len(offered) == 1 and len(questions) > 1:
        golds = [q.gold for q in questions]
        found["constant"] = max(golds.count(gold) for gold in set(golds)) / len(golds)
    return found


def mean_and_error(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and its standard error, as lm-eval has it."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return {"value": mean, "stderr": None}
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return {"value": mean, "stderr": math.sqrt(variance / len(values))}


def evaluate_benchmark(
    model: GPT,
    tokenizer: Tokenizer,
    name: str,
    documents: Sequence[Document],
    max_length: int,
    batch_tokens: int = 16_384,
    dtype: torch.dtype | None = None,
    report: Callable[[int], None] = lambda pairs: None,
) -> dict[str, Any]:
    """Metrics of one benchmark, each with its standard error, and what chance would give."""
    b = benchmark(name)
    questions = [b.question(document) for document in documents]
    pairs = [encode_pair(tokenizer, *pair) for q in questions for pair in q.pairs]
    scores = iter(likelihoods(model, pairs, max_length, batch_tokens, dtype, report))
    found: dict[str, list[float]] = {metric: [] for metric in b.metrics}
    for q in questions:
        given = [next(scores) for _ in q.pairs]
        if len(given) == 1:
            found["acc"].append(float(given[0][1]))
            found["perplexity"].append(given[0][0])
            continue
        found["acc"].append(float(_best([score for score, _ in given]) == q.gold))
        if "acc_norm" in found:
            normed = [score / length for (score, _), length in zip(given, q.lengths)]
            found["acc_norm"].append(float(_best(normed) == q.gold))
    metrics = {metric: mean_and_error(values) for metric, values in found.items()}
    if "perplexity" in metrics:
        metrics["perplexity"] = _perplexity(metrics["perplexity"])
    truncated = sum(len(continuation) > max_length for _, continuation in pairs)
    about = {"documents": len(questions)} | ({"truncated": truncated} if truncated else {})
    return about | {**chance(questions), "metrics": metrics}


def _best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)


def _perplexity(log_likelihood: dict[str, float | None]) -> dict[str, float | None]:
    """exp of the mean negative log-likelihood; its error to first order."""
    mean, error = log_likelihood["value"], log_likelihood["stderr"]
    assert mean is not None
    value = math.exp(min(-mean, 700.0))
    return {"value": value, "stderr": None if error is None else value * error}


def table_of(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """What `lssar eval downstream` wrote, as a table: a row for each task and metric, a column for each arm."""
    arms = [arm for arm in result["arms"] if arm["tasks"]]
    heads = ["task", "metric", "chance", *(f"{arm['label']}\n{arm['max_length'] or ''}" for arm in arms)]
    lines = []
    for task in dict.fromkeys(task for arm in arms for task in arm["tasks"]):
        rows = [arm["tasks"].get(task) for arm in arms]
        for metric in dict.fromkeys(metric for row in rows if row for metric in row["metrics"]):
            level = next((row["chance"] for row in rows if row and "chance" in row), None)
            constant = next((row["constant"] for row in rows if row and "constant" in row), None)
            by_luck = "-" if level is None or metric == "perplexity" else f"{100 * level:.0f}"
            by_luck += f" ({100 * constant:.0f} by one answer)" if constant is not None else ""
            guess = None if level is None else max(level, constant or 0.0)
            cells = [shown(row["metrics"].get(metric), metric, guess) if row else "-" for row in rows]
            lines.append([task, metric, by_luck, *cells])
    return heads, lines


def shown(found: dict[str, float | None] | None, metric: str, guess: float | None = None) -> str:
    """A value and its standard error, with a star if it is less than two standard errors above `guess`."""
    if found is None or found["value"] is None:
        return "-"
    value, error = found["value"], found["stderr"]
    if metric == "perplexity":
        return f"{value:.3g}" + ("" if error is None else f" +-{error:.2g}")
    at_chance = guess is not None and error is not None and value <= guess + 2 * error
    return f"{100 * value:.1f}" + ("" if error is None else f" +-{100 * error:.1f}") + ("*" if at_chance else "")
