"""lm-eval on our models: an `LM` around a run, and task files for data at hand.

    import lm_eval
    from lssar.hf.lm_eval import LssarLM
    lm_eval.simple_evaluate(LssarLM("runs/mine", max_length=4096), tasks=["hellaswag"])

Importing this module also registers the model with lm-eval's own command line: `--model lssar --model_args
pretrained=runs/mine`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lssar.data.tokenizers import Tokenizer, load_tokenizer
from lssar.evaluation.benchmarks import RULER, Document, benchmark
from lssar.evaluation.likelihood import likelihoods
from lssar.model import GPT
from lssar.runs import Run, evaluation_batch

try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(f"lm-eval is needed for this: pip install 'lssar[eval]' ({error})") from error


@register_model("lssar")
class LssarLM(TemplateLM):
    """A run of `lssar train`, or a GPT with its tokenizer, as lm-eval sees a model."""

    def __init__(
        self,
        pretrained: GPT | str | Path,
        tokenizer: Tokenizer | str | None = None,
        max_length: int | None = None,
        batch_tokens: int | None = None,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        ntk: str = "off",
        window: int | None = None,
        batch_size: Any = None,  # lm-eval passes one; batches here are by tokens
        max_batch_size: Any = None,
    ) -> None:
        """`max_length` may be any multiple of the training length, which it is if not given."""
        super().__init__()
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if isinstance(pretrained, GPT):
            if tokenizer is None:
                raise ValueError("a bare model needs its tokenizer")
            self.model = pretrained.to(self._device).eval()
        else:
            run = Run.open(pretrained, self._device)
            self.model, dtype, tokenizer = run.model(), dtype or run.dtype, tokenizer or run.tokenizer
        self.tokenizer: Any = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        if self.tokenizer.vocab_size > self.model.config.vocab_size:
            raise ValueError(
                f"{self.tokenizer.name} has {self.tokenizer.vocab_size} ids, the model {self.model.config.vocab_size}"
            )
        if ntk not in ("off", "length"):
            raise ValueError(f"ntk must be 'off' or 'length'; got {ntk!r}")
        self.model.ntk = "length" if ntk == "length" else "off"
        self.model.window = window if window is not None else self.model.window
        self.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        self.truncated = 0
        """Continuations of the last requests that were longer than `max_length`: only their last tokens are scored."""
        self.max_length = int(max_length or self.model.config.train_length)
        self.batch_tokens = int(batch_tokens or evaluation_batch(self._device))

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eot

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.tokenizer.encode(string).tolist()

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context or [self.prefix_token_id], continuation) for _, context, continuation in requests]
        found = likelihoods(self.model, pairs, self.max_length, self.batch_tokens, self.dtype)
        self.truncated = sum(len(continuation) > self.max_length for _, continuation in pairs)
        for (text, _, _), result in zip(requests, found):
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, result)
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Documents longer than `max_length` in windows of it, each token predicted once."""
        pairs: list[tuple[list[int], list[int]]] = []
        counts = []
        for request in requests:
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
            before = len(pairs)
            pairs += [make_disjoint_window(window) for window in windows]
            counts.append(len(pairs) - before)
        scores = iter(likelihoods(self.model, pairs, self.max_length, self.batch_tokens, self.dtype))
        found = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, result in zip(requests, found):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, result)
        return found

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Greedy, through the cache; prompts of one length together. A prompt too long loses its beginning."""
        asked = [self._prompt(*request.args) for request in requests]
        groups: dict[tuple[int, int], list[int]] = {}
        for i, (prompt, _, tokens) in enumerate(asked):
            groups.setdefault((len(prompt), tokens), []).append(i)
        found = [""] * len(asked)
        for (length, tokens), members in groups.items():
            together = max(1, self.batch_tokens // (length + tokens))
            for start in range(0, len(members), together):
                batch = members[start : start + together]
                stops = [asked[i][1] for i in batch]
                texts = self._generate([asked[i][0] for i in batch], tokens, stops)
                for i, text in zip(batch, texts):
                    found[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return found

    def _prompt(self, context: str, settings: dict[str, Any]) -> tuple[list[int], list[str], int]:
        """Ids, texts to stop at, and the most tokens to make."""
        if settings.get("do_sample") and settings.get("temperature", 1.0) > 0:
            raise ValueError("lssar decodes greedily under lm-eval; this task asks for sampling")
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        tokens = int(settings.get("max_gen_toks", settings.get("max_new_tokens", 256)))
        room = self.max_length - tokens
        if room < 1:
            raise ValueError(f"max_length {self.max_length} leaves no room for a prompt and {tokens} tokens after it")
        return (self.tok_encode(context) or [self.eot_token_id])[-room:], stops, tokens

    def _generate(self, prompts: list[list[int]], tokens: int, stops: list[list[str]]) -> list[str]:
        ids = torch.tensor(prompts, device=self._device)
        made: list[list[int]] = [[] for _ in prompts]
        texts: list[str | None] = [None] * len(prompts)
        with torch.autocast(self._device.type, self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            for step in self.model.generate(ids, tokens, temperature=0):
                for row, token in enumerate(step.tolist()):
                    if texts[row] is not None:
                        continue
                    ended = token == self.eot_token_id
                    if not ended:
                        made[row].append(token)
                    text = self.tokenizer.decode(made[row]) if made[row] else ""
                    at = min((text.index(stop) for stop in stops[row] if stop and stop in text), default=None)
                    if ended or at is not None:
                        texts[row] = text[:at]
                if all(text is not None for text in texts):
                    break
        return [
            text if text is not None else self.tokenizer.decode(ids) if ids else "" for text, ids in zip(texts, made)
        ]


def huggingface_lm(folder: Path, max_length: int | None, device: str, batch_size: int = 16) -> Any:
    """lm-eval's own Hugging Face model on a folder, with our attention known to transformers."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), max_length=max_length, device=device, batch_size=batch_size)


def write_tasks(documents: dict[str, Sequence[Document]], folder: Path | str) -> Path:
    """Task files for `--include_path`: lm-eval's own tasks, by their own names, on these documents."""
    own = Path(lm_eval.__file__).parent / "tasks"
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, docs in documents.items():
        base = own / benchmark(name).yaml
        if not base.exists():
            raise ValueError(f"lm-eval {version()} has no {base.relative_to(own)}, which {name} is taken from")
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        settings = {
            "include": str(base),
            "task": name,
            "tag": None,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"test": str(data.absolute())}},
            "training_split": None,
            "validation_split": None,
            "test_split": "test",
            "fewshot_split": "test",
        }
        # JSON is YAML
        (folder / f"{name}.yaml").write_text(json.dumps(settings, indent=1) + "\n")
    return folder


def run_tasks(lm: Any, names: Sequence[str], include: Path | None = None, limit: int | None = None) -> dict[str, Any]:
    """lm-eval's results of tasks by name: from `include` alone if it is given, else lm-eval's own (with a network)."""
    _quieten()
    manager = TaskManager(include_path=str(include), include_defaults=False) if include else TaskManager()
    found = lm_eval.simple_evaluate(
        lm, tasks=list(names), task_manager=manager, num_fewshot=0, limit=limit, log_samples=False,
        bootstrap_iters=1000,
    )  # fmt: skip
    return _checked(found)


def run_ruler(lm: Any, name: str, length: int, samples: int, seed: int = 42) -> dict[str, Any]:
    """One of RULER's needle tasks at one length, all of it generated here by lm-eval's code with our tokenizer."""
    import random

    import datasets
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks.ruler import common_utils, niah_utils, prepare_niah

    if name not in RULER:
        raise ValueError(f"unknown RULER task {name!r}; those that need no download: {', '.join(RULER)}")
    haystack, keys, values, tokens = RULER[name]

    class Counted:
        """What RULER asks of a tokenizer: the number of ids of a text."""

        def __init__(self, text: str) -> None:
            self.input_ids = lm.tok_encode(text)

    _quieten()
    random.seed(seed)
    made = prepare_niah.generate_samples(
        prepare_niah.get_haystack(haystack),
        TOKENIZER=Counted,
        max_seq_length=length,
        template=niah_utils.TEMPLATE,
        type_haystack=haystack,
        type_needle_k=keys,
        type_needle_v=values,
        num_samples=samples,
        tokens_to_generate=tokens,
    )
    task = ConfigurableTask(
        config={
            "task": f"{name}_{length}",
            "dataset_path": "",
            "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(made)},
            "output_type": "generate_until",
            "test_split": "test",
            "doc_to_text": "{{input}}",
            "doc_to_target": "{{outputs}}",
            "gen_prefix": "{{gen_prefix}}",
            "target_delimiter": " ",
            "process_results": lambda doc, results: {
                "acc": common_utils.string_match_all(common_utils.postprocess_pred(results), [doc["outputs"]])
            },
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
            "generation_kwargs": {"do_sample": False, "max_gen_toks": tokens, "until": []},
            "metadata": {"version": 1.0},
        }
    )
    found = lm_eval.simple_evaluate(lm, tasks=[task], num_fewshot=0, log_samples=False, bootstrap_iters=1000)
    return _checked(found)


def _quieten() -> None:
    """lm-eval tells of each setting that it fills in; what matters of them is in its results."""
    import datasets

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()


def _checked(found: Any) -> dict[str, Any]:
    if found is None:
        raise RuntimeError("lm-eval gave no results: it gives them to the first of several processes only")
    return found


def metrics_of(found: dict[str, Any], name: str) -> dict[str, dict[str, float | None]]:
    """Value and standard error of each metric, from one task's entry in lm-eval's results."""
    return dict(_metrics(found["results"][name]))


def _metrics(row: dict[str, Any]) -> Iterator[tuple[str, dict[str, float | None]]]:
    for key, value in row.items():
        metric, _, rule = key.partition(",")
        if rule and not metric.endswith("_stderr") and isinstance(value, (int, float)):
            error = row.get(f"{metric}_stderr,{rule}")
            yield metric, {"value": float(value), "stderr": float(error) if isinstance(error, (int, float)) else None}


def version() -> str:
    from importlib.metadata import version

    return version("lm_eval")
