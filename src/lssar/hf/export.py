"""A run of `lssar train` as a folder that transformers loads: weights, config, tokenizer, and where it came from."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import torch

from lssar.data.tokenizers import load_tokenizer
from lssar.hf.config import LssarConfig
from lssar.hf.model import LssarForCausalLM
from lssar.hf.tokenizer import to_transformers
from lssar.model import GPT
from lssar.records import command_line, environment, read_json, write_json
from lssar.runs import ExportedRun, Run
from lssar.training.metrics import read_metrics

CARD = """---
library_name: transformers
pipeline_tag: text-generation
license: {license}
tags: [lssar]
---
# {name}

A language model of {parameters:,} parameters with the attention layers `{mechanism}` ([arXiv 2501.13428](https://arxiv.org/abs/2501.13428)),
trained at {length} tokens.

```python
import lssar.hf  # pip install 'lssar[hf]'; or pass trust_remote_code=True
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER)
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
```

| | |
|---|---|
| data | {data} |
| tokens | {tokens:,} in {steps:,} steps |
| seed | {seed} |
| validation loss, nats a token | {validation} |
| licence | {license} |

`export.json` has the run, the recipe, the command and the software versions.
"""


def export(
    run: Path, folder: Path, tokenizer: str | None = None, dtype: str = "float32", overwrite: bool = False,
    license: str = "other",
) -> list[Path]:  # fmt: skip
    """Write the last checkpoint of `run` into the new folder `folder`: whole, or not at all. Returns its files."""
    folder = Path(folder)
    _check_folder(folder, overwrite)
    source = Run.open(run, "cpu")
    if isinstance(source, ExportedRun):
        raise ValueError(f"{run} is an export itself; copy the folder, or export the run that it was made from")
    gpt = source.model()
    ours = load_tokenizer(tokenizer) if tokenizer else source.tokenizer
    if ours.vocab_size > gpt.config.vocab_size:
        raise ValueError(
            f"tokenizer {ours.name!r} has {ours.vocab_size} tokens, the model {gpt.config.vocab_size}; give --tokenizer"
        )
    config = LssarConfig(
        model=gpt.config.to_dict(), bos_token_id=ours.eot, eos_token_id=ours.eot, pad_token_id=ours.eot
    )
    model = LssarForCausalLM(config)
    model.gpt.load_state_dict(gpt.state_dict())
    model.to(getattr(torch, dtype))

    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        temporary.chmod(0o755)
        model.save_pretrained(temporary)
        to_transformers(ours).save_pretrained(temporary)
        (temporary / "README.md").write_text(_card(source, gpt, license))
        record = {
            "run": source.folder.name, "step": source.step, "recipe": source.recipe.to_dict(), "tokenizer": ours.name,
        }  # fmt: skip
        write_json(temporary / "export.json", {**record, "command": command_line(), "environment": environment()})
        _put(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sorted(folder.iterdir())


def _card(run: Run, gpt: GPT, license: str) -> str:
    recipe, step = run.recipe, run.step
    losses = [row["val_loss"] for row in read_metrics(run.folder) if "val_loss" in row and row["step"] <= step]
    return CARD.format(
        name=run.folder.resolve().name,
        parameters=gpt.parameter_count(),
        mechanism=gpt.config.layout,
        length=gpt.config.train_length,
        data=Path(recipe.data).name,
        tokens=step * recipe.batch_tokens,
        steps=step,
        seed=recipe.seed,
        validation=f"{losses[-1]:.3f}" if losses else "not measured",
        license=license,
    )


def _check_folder(folder: Path, overwrite: bool) -> None:
    if folder.is_symlink():
        raise FileExistsError(f"{folder} is a link to {folder.readlink()}; give the folder itself")
    if not folder.exists():
        return
    if not overwrite:
        raise FileExistsError(f"{folder} exists; give another folder, or --overwrite")
    config = folder / "config.json"
    kind = read_json(config, dict).get("model_type") if config.is_file() else None
    if kind != LssarConfig.model_type:  # never a folder that holds something else
        raise FileExistsError(f"{folder} is no folder of an earlier export, and is left alone")


def _put(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`; an earlier folder of that name is deleted only after that."""
    if not folder.exists():
        os.replace(new, folder)
        return
    old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-old-"))
    try:
        os.replace(folder, old)
        try:
            os.replace(new, folder)
        except BaseException:
            os.replace(old, folder)
            raise
    except BaseException:
        with contextlib.suppress(OSError):  # empty, unless the earlier export could not be put back
            old.rmdir()
        raise
    shutil.rmtree(old)
