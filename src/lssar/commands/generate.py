"""`lssar generate`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from lssar.commands.common import UsageError


@dataclass
class Generate:
    """Continue a prompt, printed token by token."""

    folder: tyro.conf.Positional[Path]
    """Run folder or exported model."""
    prompt: str = "\n"
    """Text to continue."""
    tokens: int = 200
    """Largest number of new tokens; generation ends earlier at an end-of-document token."""
    temperature: float = 0.8
    """0 takes the most likely token."""
    top_k: int | None = 50
    """Sample among this many most likely tokens."""
    seed: int = 0
    """Seed of the sampling."""
    ntk: Literal["off", "length"] = "off"
    """Rotary base as trained, or scaled with the length (NTK-aware)."""
    tokenizer: str | None = None
    """bytes, gpt2, or a file; that of the run's data, if not given."""
    device: str | None = None
    """cpu, cuda or cuda:N; a GPU where there is one, if not given."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of weights and cache. Default: on a GPU bfloat16 for a run that was trained in it, else float32."""

    def run(self) -> None:
        import torch

        from lssar.data.tokenizers import load_tokenizer
        from lssar.runs import Run

        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed must be 0 or more and below 2**63; got {self.seed}")
        run = Run.open(self.folder, self.device)
        tokenizer = load_tokenizer(self.tokenizer) if self.tokenizer else run.tokenizer
        model = run.model().to(getattr(torch, self.dtype) if self.dtype else run.dtype or torch.float32)
        model.ntk = self.ntk
        ids = torch.tensor([[tokenizer.eot, *tokenizer.encode(self.prompt).tolist()]], device=run.device)
        generator = torch.Generator(run.device).manual_seed(self.seed)
        made: list[int] = []
        shown = ""
        tokens = model.generate(ids, self.tokens, self.temperature, self.top_k, generator)
        sys.stdout.write(self.prompt)
        for token in tokens:
            if int(token) == tokenizer.eot:
                break
            made.append(int(token))
            text = tokenizer.decode(made)
            if not text.endswith("\ufffd"):  # half a character: wait for the rest
                sys.stdout.write(text[len(shown) :])
                sys.stdout.flush()
                shown = text
        sys.stdout.write("\n")
