"""GPT: GPT-2 as the paper trains it (rotary positions, tied head) or Llama-shaped, with any pattern of layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lssar.configs import check_fields
from lssar.context import Context
from lssar.layouts import LayerConfig, Pattern, Position, format_layout, shortest
from lssar.nn import (
    Attention,
    LayerCache,
    LayerSnapshot,
    Positions,
    Projection,
    alibi_slopes,
    fused_linear,
    ntk_base,
    rotary_angles,
    token_positions,
)
from lssar.nn.decoding import DecodeStep
from lssar.nn.linear import plain
from lssar.nn.norms import LayerNorm, RMSNorm
from lssar.nn.projections import ProjectionConfig
from lssar.ops import fused
from lssar.ops.loss import IGNORE, next_token_loss, next_token_losses
from lssar.specs import AttentionSpec, spec

LSSAR = spec("lssar")
GRAPH_FROM = 16
"""Tokens to generate from which capturing a CUDA graph of the step pays."""
COLD = 1e-20
"""Temperature below which logits divided by it may leave float32, and the most likely token is the only one."""
PREFILL_CHUNK = 8192
"""Tokens of a sequence that go through the model at once, if more are given."""


@dataclass(frozen=True, kw_only=True, repr=False)
class ModelConfig:
    """Everything that decides the shape and arithmetic of a model, as plain values that can be stored and compared.

    `attention`, `position` and `window` describe a model whose layers are all of one kind, `pattern` any other model.
    """

    layers: int
    width: int
    heads: int
    key_heads: int | None = None
    """Fewer than heads: grouped queries. None: as many as heads."""
    vocab_size: int = 50257
    """The default is GPT-2's."""
    pad_vocab_to: int = 128
    """Rows of the embedding are rounded up to a multiple of this; the extra logits are ignored."""
    train_length: int = 1024
    """Length that the model is trained at; NTK scaling by length refers to it."""
    attention: AttentionSpec | tuple[AttentionSpec, ...] = LSSAR
    """One mechanism, or one a layer."""
    position: Position = "rope"
    rope_base: float = 10_000.0
    window: int | None = None
    """How many tokens a row sees, its own included; None: all before it."""
    pattern: Pattern = ()
    """Layers that repeat, in place of the three fields above; see `lssar.layouts`."""
    projection: Projection = "plain"
    """`plain`: linear maps to q, k and v; `tpa`: tensor-product attention."""
    tpa_ranks: tuple[int, int, int] = (6, 2, 2)
    """Ranks of q, k and v with `tpa`."""
    mlp_ratio: int = 4
    bias: bool = True
    norm: Literal["layer", "rms"] = "layer"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """What the hidden units of a block do; `swiglu` has a gate, whose weights are in the same matrix as `up`."""
    checkpoint_layers: bool = False
    """Recompute each layer in the backward instead of keeping its activations."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "vocab_size", "train_length", "mlp_ratio", "pad_vocab_to"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be an integer >= 1; got {getattr(self, name)!r}")
        if self.norm not in ("layer", "rms") or self.mlp not in ("gelu", "swiglu"):
            raise ValueError(f"norm must be 'layer' or 'rms', mlp 'gelu' or 'swiglu'; got {self.norm!r}, {self.mlp!r}")
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads; got {self.width} and {self.heads}")
        if self.key_heads is not None and (self.key_heads < 1 or self.heads % self.key_heads):
            raise ValueError(f"heads must be a multiple of key_heads; got {self.heads} and {self.key_heads}")
        if not 0 < self.rope_base < math.inf:
            raise ValueError(f"rope_base must be positive and finite; got {self.rope_base}")
        key_heads = self.key_heads or self.heads
        ProjectionConfig(self.width, self.heads, key_heads, self.head_size, self.projection, self.tpa_ranks, self.bias)
        if isinstance(self.attention, tuple) and len(self.attention) != self.layers:
            raise ValueError(f"one mechanism a layer means {self.layers}; got {len(self.attention)}")
        if self.pattern:
            if changed := [name for name in _UNIFORM if getattr(self, name) != getattr(ModelConfig, name)]:
                raise ValueError(f"pattern says what each layer is; {', '.join(changed)} cannot be given with it")
            if len(self.pattern) > self.layers:
                raise ValueError(
                    f"the layout {self.layout!r} has {len(self.pattern)} layers, more than the model's {self.layers}"
                )
        for layer in self.layer_configs:
            if layer.position == "rope" and (self.head_size % 2 or self.head_size < 4):
                raise ValueError(f"rope needs an even head size of at least 4; got {self.head_size}")
            layer.groups(self.heads, key_heads)

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def layer_configs(self) -> tuple[LayerConfig, ...]:
        """Every layer's mechanisms, window and position kind."""
        if self.pattern:
            return tuple(self.pattern[i % len(self.pattern)] for i in range(self.layers))
        specs = self.attention if isinstance(self.attention, tuple) else (self.attention,) * self.layers
        return tuple(LayerConfig((s,), window=self.window, position=self.position) for s in specs)

    @property
    def layer_specs(self) -> tuple[AttentionSpec, ...]:
        """The mechanism of each layer, where no layer divides its heads."""
        return tuple(layer.spec for layer in self.layer_configs)

    @property
    def layout(self) -> str:
        """The layers as text, e.g. `softmax@128*3 lssar/none`."""
        return format_layout(self.pattern or shortest(self.layer_configs))

    @property
    def padded_vocab(self) -> int:
        return math.ceil(self.vocab_size / self.pad_vocab_to) * self.pad_vocab_to

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.pattern:
            fields["pattern"] = [layer.to_dict() for layer in self.pattern]
            for name in _UNIFORM:
                del fields[name]
        else:
            several = isinstance(self.attention, tuple)
            fields["attention"] = [s.to_dict() for s in self.layer_specs] if several else self.layer_specs[0].to_dict()
            del fields["pattern"]
        for name in ("norm", "mlp"):  # GPT-2's are left out, so that earlier versions read the file
            if fields[name] == getattr(ModelConfig, name):
                del fields[name]
        return fields | {"tpa_ranks": list(self.tpa_ranks)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ModelConfig:
        """The inverse of `to_dict`."""
        check_fields(cls, fields)
        fields = dict(fields)
        if (kept := fields.get("attention")) is not None:
            several = isinstance(kept, (list, tuple))
            fields["attention"] = tuple(map(_spec, kept)) if several else _spec(kept)
        if "pattern" in fields:
            layers = fields["pattern"] or ()
            fields["pattern"] = tuple(x if isinstance(x, LayerConfig) else LayerConfig.from_dict(x) for x in layers)
        if "tpa_ranks" in fields:
            fields["tpa_ranks"] = tuple(fields["tpa_ranks"])
        return cls(**fields)

    def __repr__(self) -> str:
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if field.name not in (*_UNIFORM, "pattern") and getattr(self, field.name) != field.default
        ]
        return f"ModelConfig({', '.join([*shown, f'layout={self.layout!r}'])})"


_UNIFORM = ("attention", "position", "window")
"""Fields that describe all layers at once."""


def _spec(value: Any) -> AttentionSpec:
    return AttentionSpec.from_dict(value) if isinstance(value, dict) else spec(value)


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 2, "width": 64, "heads": 4},  # tests
    "0.8m": {"layers": 4, "width": 128, "heads": 1},  # a laptop, bytes; why one head: docs/training.md
    "6m": {"layers": 8, "width": 256, "heads": 4, "mlp_ratio": 3},  # a small vocabulary; released in models/
    "33m": {"layers": 8, "width": 384, "heads": 6},
    "45m": {"layers": 6, "width": 512, "heads": 8},
    "51m": {"layers": 8, "width": 512, "heads": 8},
    "124m": {"layers": 12, "width": 768, "heads": 12},  # GPT-2 small
    "355m": {"layers": 24, "width": 1024, "heads": 16},  # GPT-2 medium
    "774m": {"layers": 36, "width": 1280, "heads": 20},  # GPT-2 large
    "1.5b": {"layers": 48, "width": 1600, "heads": 25},  # GPT-2 XL
    "1b": {  # Llama 3.2 1B
        "layers": 16, "width": 2048, "heads": 32, "key_heads": 8, "bias": False, "norm": "rms", "mlp": "swiglu",
    },
}  # fmt: skip


def model_config(size: str, **changes: Any) -> ModelConfig:
    """A named size with fields changed: `model_config("124m", attention=lssar.spec("softmax"))`."""
    if size not in SIZES:
        raise ValueError(f"unknown model size {size!r}; known: {', '.join(SIZES)}")
    return ModelConfig.from_dict({**SIZES[size], **changes})


def new_norm(config: ModelConfig) -> nn.Module:
    """A normalisation of the width of the model."""
    return RMSNorm(config.width, eps=1e-5) if config.norm == "rms" else LayerNorm(config.width, bias=config.bias)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: LayerConfig):
        super().__init__()
        W = config.width
        self.norm1, self.norm2 = (new_norm(config) for _ in range(2))
        self.attention = Attention(
            W, config.heads, layer, key_heads=config.key_heads, rope_base=config.rope_base,
            projection=config.projection, ranks=config.tpa_ranks, bias=config.bias,
        )  # fmt: skip
        self.activation = config.mlp
        self.up = nn.Linear(W, config.mlp_ratio * W * (2 if config.mlp == "swiglu" else 1), bias=config.bias)
        self.down = nn.Linear(config.mlp_ratio * W, W, bias=config.bias)

    def forward(self, x: Tensor, positions: Positions, cache: LayerCache | None = None) -> Tensor:
        step = cache is not None and cache.stepping
        if step and type(self.attention) is Attention and plain(self.attention, self.attention.project):
            x = self.attention(x, positions, cache, norm=self.norm1, residual=x)
        else:
            x = x + self.attention(self.norm1(x), positions, cache)
        hidden = fused_linear(x, self.up, norm=self.norm2, activation=self.activation, step=step)
        return fused_linear(hidden, self.down, residual=x, step=step)


@dataclass
class Cache:
    """Keys and values of every layer; made by `GPT.new_cache`, filled by `GPT.forward`.

    Layers with a window keep only the tokens in it, so memory grows with the layers that have none.
    """

    layers: list[LayerCache]
    ntk_factor: float

    @property
    def length(self) -> int:
        return self.layers[0].length

    @property
    def bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers)

    def key_lengths(self, at: Tensor, batch: int) -> dict[int, Tensor]:
        """Slots in use (B,) after token `at` (1,) of a layer that keeps as many tokens as the key says."""
        by_size = {layer.size: layer for layer in self.layers}
        return {size: layer.in_use(at, batch) for size, layer in by_size.items()}

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens. ValueError if a layer with a window no longer has them."""
        for layer in self.layers:
            dataclasses.replace(layer, cuts=[]).rewind(length)  # raises before any layer changes
        for layer in self.layers:
            layer.rewind(length)

    def snapshot(self) -> list[LayerSnapshot]:
        """The state to return to with `restore`, any number of times; copies only what layers with a window keep."""
        return [layer.snapshot() for layer in self.layers]

    def restore(self, kept: list[LayerSnapshot]) -> None:
        """Forget the tokens since a snapshot."""
        for layer, state in zip(self.layers, kept, strict=True):
            layer.restore(state)


class GPT(nn.Module):
    """A language model: token ids (B, L) to logits (B, L, V). Its layers are those of a `ModelConfig`.

    Example:
        >>> model = GPT(model_config("tiny", vocab_size=257))
        >>> ids = torch.randint(0, 257, (2, 10))
        >>> model(ids).shape
        torch.Size([2, 10, 257])
        >>> [next_ids.shape for next_ids in model.generate(ids, tokens=2)]
        [torch.Size([2]), torch.Size([2])]
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.padded_vocab, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in config.layer_configs)
        self.norm = new_norm(config)
        self.position_kinds = frozenset(layer.position for layer in config.layer_configs)
        self.ntk: float | Literal["off", "length"] = "off"
        """Test-time scaling of the rotary base: a factor, by the length of the call, or off. Not a weight."""
        self.window: int | None = None
        """Test-time window: no layer sees more than this. Layers with a smaller window of their own keep it."""
        self.context: Context | None = None
        """In training, the processes that hold the other parts of each sequence. Not a weight."""
        self.apply(self.initialise)

    def initialise(self, module: nn.Module) -> None:
        """GPT-2: normal(0, 0.02), and smaller where a layer writes into the residual stream."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if isinstance(module, Block):
            for linear in (module.attention.out, module.down):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * self.config.layers))

    def layers(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def extra_repr(self) -> str:
        return f"layout={self.config.layout!r}"

    def set_power(self, p: float | None) -> None:
        """Re-weight with the power p in every layer that re-weights; None: with the power in the config."""
        for block in self.layers():
            block.attention.set_power(p)

    def parameter_count(self) -> int:
        """The number of weights; an embedding that is also the head counts once."""
        return sum(p.numel() for p in self.parameters())

    def ntk_factor(self, length: int) -> float:
        """By what factor NTK scaling extends the context of a call of this length; 1 without scaling."""
        if self.ntk == "off":
            return 1.0
        return max(1.0, length / self.config.train_length) if self.ntk == "length" else float(self.ntk)

    def new_cache(self, room: int) -> Cache:
        """A cache for up to `room` tokens. NTK scaling by length uses `room`, since cached keys are already rotated."""
        layers = [block.attention.new_cache(room, self.window) for block in self.layers()]
        return Cache(layers, self.ntk_factor(room))

    def prefill(self, ids: Tensor, cache: Cache, chunk: int = PREFILL_CHUNK) -> Tensor:
        """Add the tokens (B, L) to the cache, `chunk` at a time, and return the last hidden state (B, W).

        The result does not depend on the chunk; the memory for activations does.
        """
        if ids.shape[1] < 1 or chunk < 1:
            raise ValueError(f"prefill needs tokens and a chunk of at least 1; got {tuple(ids.shape)} and {chunk}")
        for part in ids.split(chunk, 1):
            hidden = self.hidden(part, cache)[:, -1]
        return hidden

    def hidden(self, ids: Tensor, cache: Cache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """(B, L) to (B, L, W), before the head; memory is linear in L."""
        return self.encode(self.embed(ids), cache, cu_seqlens)

    def encode(self, x: Tensor, cache: Cache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """`hidden` for embeddings (B, L, W), which need not come from this model's vocabulary."""
        caches = cache.layers if cache is not None else None
        recompute = self.config.checkpoint_layers and self.training and cache is None
        again = partial(checkpoint, use_reentrant=False) if recompute else None
        return self.through(x, self._positions(x, cache, cu_seqlens), caches, again)

    def through(
        self, x: Tensor, positions: Positions, caches: Sequence[LayerCache] | None = None,
        recompute: Callable[..., Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Embeddings (B, L, W) through all blocks and the last norm; `recompute` calls a block with checkpointing."""
        return self.norm(self._through_blocks(x, positions, caches, recompute))

    def _through_blocks(
        self, x: Tensor, positions: Positions, caches: Sequence[LayerCache] | None = None,
        recompute: Callable[..., Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        for index, block in enumerate(self.blocks):
            cache = caches[index] if caches is not None else None
            x = block(x, positions, cache) if recompute is None else recompute(block, x, positions, cache)
        return x

    def _positions(self, x: Tensor, cache: Cache | None, cu_seqlens: Tensor | None) -> Positions:
        rows, start = x.shape[1], cache.length if cache is not None else 0
        length = rows
        if self.context is not None:
            if cache is not None:
                raise ValueError("a model in a context of several processes has no cache; set model.context = None")
            length, start = rows * self.context.size, rows * self.context.rank
        factor = cache.ntk_factor if cache is not None else self.ntk_factor(length)
        others: dict[str, Any] = {"cu_seqlens": cu_seqlens, "window": self.window}
        if cache is not None and (next_at := cache.layers[0].at) is not None:
            return self.positions(next_at, factor, key_lengths=cache.key_lengths(next_at, x.shape[0]), **others)
        at = token_positions(rows, x.device, start, cu_seqlens)
        if self.context is not None:
            others |= {"context": self.context, "first_key": start}
        return self.positions(at, factor, **others)

    def positions(self, at: Tensor, ntk_factor: float = 1.0, **others: Any) -> Positions:
        """What the layers need for tokens at the positions `at` (..., L); `others` are further fields."""
        config = self.config
        angles = slopes = None
        if "rope" in self.position_kinds:
            angles = rotary_angles(at, config.head_size, ntk_base(config.rope_base, ntk_factor, config.head_size))
        if "alibi" in self.position_kinds:
            slopes = alibi_slopes(config.heads, at.device)
        return Positions(angles, slopes, **others)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., W)."""
        return self._padded_logits(hidden)[..., : self.config.vocab_size]

    def _padded_logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed.weight)

    def forward(
        self, ids: Tensor, cache: Cache | None = None, cu_seqlens: Tensor | None = None, targets: Tensor | None = None
    ) -> Tensor:
        """Logits (B, L, V); or, given targets (B, L), the mean cross-entropy in nats over those that are not IGNORE.

        In a context of N processes each gives the same ids and targets and gets the logits of its own rows, or its part
        of the loss times N: the mean over the processes is the loss of the whole sequences, and so for gradients.
        """
        whole, context = targets, self.context
        if context is not None:
            ids, targets = context.shard(ids), None if targets is None else context.shard(targets)
        hidden = self.hidden(ids, cache, cu_seqlens)
        if whole is None or targets is None:
            return self.logits(hidden)
        logits = self._padded_logits(hidden).flatten(0, 1)
        if context is None:
            return next_token_loss(logits, targets.flatten(), self.config.vocab_size)
        count = (whole != IGNORE).sum()
        return next_token_loss(logits, targets.flatten(), self.config.vocab_size, count) * context.size

    @torch.no_grad()
    def token_losses(self, ids: Tensor, targets: Tensor, rows: int = 4096, chunk: int = PREFILL_CHUNK) -> Tensor:
        """Cross-entropy of each token (B, L), float32; logits are made `rows` tokens at a time, and sequences longer
        than `chunk` go through a cache in chunks, so that memory grows with the keys and values only."""
        cache = self.new_cache(ids.shape[1]) if ids.shape[1] > chunk else None
        parts = []
        for some, wanted in zip(ids.split(chunk, 1), targets.split(chunk, 1)):
            hidden = self.hidden(some, cache).flatten(0, 1)
            losses = [
                next_token_losses(self._padded_logits(h), t, self.config.vocab_size)
                for h, t in zip(hidden.split(rows), wanted.flatten().split(rows))
            ]
            parts.append(torch.cat(losses).view_as(wanted))
        return torch.cat(parts, 1)

    def generate(
        self, ids: Tensor, tokens: int, temperature: float = 1.0, top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:  # fmt: skip
        """Yield `tokens` next ids (B,), one at a time, through the cache; temperature 0 is greedy."""
        if tokens < 0 or (top_k is not None and top_k < 1):
            raise ValueError(f"tokens must be at least 0 and top_k at least 1; got {tokens} and {top_k}")
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature must be a finite number of at least 0; got {temperature}")
        return self._generate(ids, tokens, temperature, top_k, generator)

    @torch.no_grad()
    def _generate(
        self, ids: Tensor, tokens: int, temperature: float, top_k: int | None, generator: torch.Generator | None
    ) -> Iterator[Tensor]:
        cache = self.new_cache(ids.shape[1] + tokens)
        step: Callable[[Tensor], Tensor] = partial(self.next_logits, cache=cache)
        for made in range(tokens):
            logits = step(ids).float()
            ids = sample(logits, temperature, top_k, generator)[:, None]
            yield ids[:, 0]
            if made == 0 and ids.is_cuda and tokens >= GRAPH_FROM and self._has_decode_kernels():
                step = DecodeStep(step, cache.layers)

    def next_logits(self, ids: Tensor, cache: Cache) -> Tensor:
        """Add the tokens (B, L) to the cache and return the logits (B, V) of the next ones; for a `DecodeStep` too."""
        if not cache.layers[0].stepping:
            return self.logits(self.prefill(ids, cache))
        x = self.embed(ids)
        x = self._through_blocks(x, self._positions(x, cache, None), cache.layers)
        return fused_linear(x, self.embed, norm=self.norm, step=True)[:, -1, : self.config.vocab_size]

    def _has_decode_kernels(self) -> bool:
        """Whether a decode step runs without the host knowing its position, as a CUDA graph needs it."""
        specs = [spec for block in self.layers() for spec in block.attention.specs]
        return "alibi" not in self.position_kinds and all(fused.has_decode(s, self.config.head_size) for s in specs)


def sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    if temperature < COLD:
        return logits.argmax(-1)
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
