"""A GPT for orbits: input layers for numbers or bins, the blocks of `lssar.model`, and a head for forces."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lssar.experiments.newton.orbits import OrbitWorld, typical_step
from lssar.model import GPT, ModelConfig
from lssar.specs import AttentionSpec

SIZES: dict[str, dict[str, Any]] = {
    "ci": {"layers": 2, "width": 32, "heads": 2},
    "60k": {"layers": 2, "width": 48, "heads": 2},
    "10m": {"layers": 6, "width": 384, "heads": 6},
    "109m": {"layers": 12, "width": 768, "heads": 12},  # the original's
}


def orbit_model_config(size: str, attention: AttentionSpec, world: OrbitWorld, tokens: int) -> ModelConfig:
    """The vocabulary is the first token's, which names the time step; `tokens` counts it."""
    if size not in SIZES:
        raise ValueError(f"unknown size {size!r} of an orbit model; known: {', '.join(SIZES)}")
    return ModelConfig(
        **SIZES[size], vocab_size=len(world.intervals), pad_vocab_to=1, train_length=tokens,
        attention=attention.replace(train_length=tokens),
    )  # fmt: skip


class OrbitModel(nn.Module):
    """Takes the time step and the tokens of `orbits.shown`; predicts the next token, and a force, at each of them.

    The first and last layers work in float32 even under autocast: bfloat16 has too few digits for positions.
    """

    def __init__(self, config: ModelConfig, world: OrbitWorld):
        super().__init__()
        self.world = world
        self.gpt = GPT(config)
        W = config.width
        self.read: nn.Module
        if world.encoding == "bins":  # an embedding for x and one for y, joined
            embeddings = [nn.Embedding(world.bins, W) for _ in range(2)]
            self.read = nn.ModuleList(embeddings)
            self.join = nn.Linear(2 * W, W)
            self.say = nn.Linear(W, 2 * world.bins)
            for embedding in embeddings:
                nn.init.normal_(embedding.weight, std=0.02)
            nn.init.normal_(self.say.weight, std=0.02)
        else:
            self.read = nn.Linear(4, W)
            self.say = nn.Linear(W, 4)
            self.step = typical_step(world)
        self.new_force_head()
        self.force_head.requires_grad_(False)  # until fine-tuning puts a new one in its place

    def new_force_head(self) -> None:
        self.force_head = nn.Linear(self.gpt.config.width, 1, device=self.gpt.embed.weight.device)
        nn.init.normal_(self.force_head.weight, std=0.02)
        nn.init.zeros_(self.force_head.bias)

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def hidden(self, interval: Tensor, shown: Tensor) -> Tensor:
        """interval (B,), shown (B, L, .) -> (B, L + 1, W); position i + 1 has just read token i."""
        with _float32(shown):
            if self.world.encoding == "bins":
                assert isinstance(self.read, nn.ModuleList)
                x = self.join(torch.cat([embed(shown[..., i]) for i, embed in enumerate(self.read)], -1))
            else:
                x = self.read(shown)
            x = torch.cat([self.gpt.embed(interval)[:, None], x], 1)
        return self.gpt.encode(x)

    def next_loss(self, interval: Tensor, shown: Tensor) -> Tensor:
        """Next-step loss: cross-entropy in nats a coordinate, or squared error in units of a typical step."""
        hidden = self.hidden(interval, shown)
        if self.world.encoding == "bins":
            logits = self.say(hidden[:, :-1]).unflatten(-1, (2, self.world.bins))
            return F.cross_entropy(logits.flatten(0, 2).float(), shown.flatten())
        return F.mse_loss(self._change(hidden[:, 1:-1]), (shown[:, 1:] - shown[:, :-1]) / self.step)

    def next_shown(self, interval: Tensor, shown: Tensor) -> Tensor:
        """What is expected after each token, (B, L, .): numbers, or the most likely bins."""
        hidden = self.hidden(interval, shown)[:, 1:]
        if self.world.encoding == "bins":
            return self.say(hidden).unflatten(-1, (2, self.world.bins)).argmax(-1)
        return shown + self.step * self._change(hidden)

    def _change(self, hidden: Tensor) -> Tensor:
        with _float32(hidden):
            return self.say(hidden.float())

    def force(self, interval: Tensor, shown: Tensor, at: Tensor) -> Tensor:
        """Standardised log force (B, K) predicted after the tokens `at` (K,)."""
        hidden = self.hidden(interval, shown)[:, at + 1]
        with _float32(hidden):
            return self.force_head(hidden.float())[..., 0]


def _float32(x: Tensor) -> Any:
    return torch.autocast(x.device.type, enabled=False)
