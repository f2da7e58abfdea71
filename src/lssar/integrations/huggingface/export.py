"""A run of `lssar train` as a folder that transformers loads: weights, config, tokenizer, and where it came from."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch

from lssar.data.tokenizers import load_tokenizer
from lssar.integrations.huggingface.config import LssarConfig
from lssar.integrations.huggingface.model import LssarForCausalLM
from lssar.integrations.huggingface.tokenizer import to_transformers
from lssar.records import command_line, environment, write_json
from lssar.training.loop import load_run
from lssar.training.sources import data_folder, tokenizer_of

CARD = """---
library_name: lssar
pipeline_tag: text-generation
---
A language model with {mechanism} attention, trained at {length} tokens with [lssar](https://arxiv.org/abs/2501.13428).

```python
import lssar  # lets transformers know the model
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER)
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
```

`export.json` says which run it is, at which step, and with what it was trained.
"""


def export(
    run: Path, folder: Path, tokenizer: str | None = None, dtype: str = "float32", overwrite: bool = False
) -> list[Path]:
    """Write the last checkpoint of `run` into the new folder `folder`: whole, or not at all. Returns its files."""
    run, folder = Path(run), Path(folder)
    _check_folder(folder, overwrite)
    gpt, recipe, step = load_run(run)
    ours = load_tokenizer(tokenizer) if tokenizer else tokenizer_of(data_folder(recipe, run), recipe.vocab_size)
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
        mechanism = gpt.config.layout
        (temporary / "README.md").write_text(CARD.format(mechanism=mechanism, length=gpt.config.train_length))
        record = {"run": run.name, "step": step, "recipe": recipe.to_dict(), "tokenizer": ours.name}
        write_json(temporary / "export.json", {**record, "command": command_line(), "environment": environment()})
        _put(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sorted(folder.iterdir())


def _check_folder(folder: Path, overwrite: bool) -> None:
    if not folder.exists():
        return
    if not overwrite:
        raise FileExistsError(f"{folder} exists; give another folder, or --overwrite")
    config = folder / "config.json"
    kind = json.loads(config.read_text()).get("model_type") if config.is_file() else None
    if kind != LssarConfig.model_type:  # never a folder that holds something else
        raise FileExistsError(f"{folder} is no folder of an earlier export, and is left alone")


def _put(new: Path, folder: Path) -> None:
    """Give `new` the name `folder`; what had it goes only when the new one is there."""
    if not folder.exists():
        os.replace(new, folder)
        return
    old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-old-"))
    os.replace(folder, old)
    try:
        os.replace(new, folder)
    except BaseException:
        os.replace(old, folder)
        raise
    shutil.rmtree(old)
