"""Tiny models of the families that the Hugging Face integration promises, and helpers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
import transformers

import lssar.hf  # noqa: F401

ROOT = Path(__file__).parent.parent.parent
VOCAB = 97
SHAPE = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
SHAPE |= dict(num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0)

CACHES = {"none": {"use_cache": False}, "dynamic": {}, "static": {"cache_implementation": "static"}}

FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=8),
    "qwen2, some windows": lambda: transformers.Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, sliding_window=None),
    "mistral, window 6": lambda: transformers.MistralConfig(**SHAPE, sliding_window=6),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256, attn_pdrop=0.0, resid_pdrop=0.0,
        embd_pdrop=0.0, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    ),
}  # fmt: skip


def make(family: str, mechanism: str = "lssar", dtype: torch.dtype = torch.float64, **settings):
    """A model with weights large enough for its attention to matter."""
    config = FAMILIES[family]()
    for name, value in settings.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=mechanism).to(dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(8)
    return model


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def padded(rows: list[torch.Tensor], side: str) -> dict[str, torch.Tensor]:
    """A batch with padding at one side, and positions that do not count it."""
    length = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        place = slice(length - len(row), None) if side == "left" else slice(0, len(row))
        ids[i, place], mask[i, place] = row, 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}


def greedy(model, batch, **settings):
    """Prompts and the seven tokens that the model continues each with."""
    batch = {key: value for key, value in batch.items() if key != "position_ids"}
    return model.generate(**batch, max_new_tokens=7, min_new_tokens=7, do_sample=False, **settings)


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Run code in a new process that has no network."""
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240)
