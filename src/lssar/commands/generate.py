"""`lssar generate`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

from lssar.commands.common import DEVICE


@dataclass
class Generate:
    """Continue a prompt, streamed as it comes."""

    folder: tyro.conf.Positional[Path]
    """Run folder."""
    prompt: str = "\n"
    tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = 50
    seed: int = 0
    ntk: Literal["off", "length"] = "off"
    tokenizer: str | None = None
    """bytes, gpt2, or a file; that of the run's data, if not given."""
    device: str = DEVICE

    def run(self) -> None:
        from lssar.data.tokenizers import load_tokenizer
        from lssar.training.loop import load_run
        from lssar.training.sources import data_folder, tokenizer_of

        model, recipe, _ = load_run(self.folder, self.device)
        model.ntk = self.ntk
        folder = data_folder(recipe, self.folder)
        tokenizer = load_tokenizer(self.tokenizer) if self.tokenizer else tokenizer_of(folder, recipe.vocab_size)
        ids = torch.tensor([[tokenizer.eot, *tokenizer.encode(self.prompt).tolist()]], device=self.device)
        generator = torch.Generator(self.device).manual_seed(self.seed)
        made: list[int] = []
        shown = ""
        sys.stdout.write(self.prompt)
        for token in model.generate(ids, self.tokens, self.temperature, self.top_k, generator):
            if int(token) == tokenizer.eot:
                break
            made.append(int(token))
            text = tokenizer.decode(made)
            if not text.endswith("\ufffd"):  # half a character: wait for the rest
                sys.stdout.write(text[len(shown) :])
                sys.stdout.flush()
                shown = text
        sys.stdout.write("\n")
