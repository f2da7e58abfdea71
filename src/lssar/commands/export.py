"""`lssar export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from lssar.commands.common import console, say_where


@dataclass
class Export:
    """Write a run as a folder that Hugging Face transformers loads: `lssar export RUN DIR`."""

    run_folder: tyro.conf.Positional[Path]
    """Run folder."""
    folder: tyro.conf.Positional[Path]
    """Folder to create. One that exists is refused, unless --overwrite is given and an earlier export made it."""
    tokenizer: str | None = None
    """bytes, gpt2, or a file; the tokenizer that the run was trained with, if not given."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the exported weights."""
    overwrite: bool = False
    """Replace the folder, if an earlier export made it."""
    license: str = "other"
    """Licence for the model card, as an identifier of the Hugging Face hub such as apache-2.0."""

    def run(self) -> None:
        from lssar.hf.export import export

        with console.status("exporting"):
            files = export(self.run_folder, self.folder, self.tokenizer, self.dtype, self.overwrite, self.license)
        say_where(files)
        console.print(
            f'load it with: import lssar.hf; AutoModelForCausalLM.from_pretrained("{self.folder}")', highlight=False,
            soft_wrap=True,
        )  # fmt: skip
