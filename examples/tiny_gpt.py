"""A GPT in about 40 lines with `lssar.attention`, trained for a moment on the bytes of Python's own source.

python examples/tiny_gpt.py [STEPS]
"""

import inspect
import sys

import torch
import torch.nn.functional as F
from torch import nn

import lssar

WIDTH, HEADS, LENGTH, BATCH = 64, 2, 64, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        B, L, _ = x.shape
        q, k, v = (part.view(B, L, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(lssar.attention(q, k, v, "lssar").transpose(1, 2).flatten(2))  # causal by default
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids) + self.place.weight[: ids.shape[1]]))


def main(steps=150):
    torch.manual_seed(0)
    text = torch.tensor(list(inspect.getsource(inspect).encode()))
    model = GPT()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,))
        windows = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f} nats a byte")
    return losses


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 150)
