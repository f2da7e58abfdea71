"""What can be measured: ours and the peers, each named `implementation:mechanism`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lssar.attention import attention
from lssar.ops.numerics import score_factor, unit
from lssar.ops.reference import reference_attention
from lssar.specs import AttentionSpec, parse_spec, spec
from lssar.visibility import visibility

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One problem on one device: self-attention of one shape and dtype, or one row against a cache of that length."""

    batch: int
    heads: int
    key_heads: int
    length: int
    head_size: int
    dtype: str
    device: str
    causal: bool = True
    seed: int = 0
    decode: bool = False
    window: int | None = None
    cuda_graph: bool = False
    """Time replays of a CUDA graph, without the host's work at each call; decoding is always timed so."""

    @property
    def queries(self) -> int:
        return 1 if self.decode else self.length

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, do: standard normal from the seed; a cache's keys lie in topics (`in_topics`)."""
        generator = torch.Generator(self.device).manual_seed(self.seed)

        def draw(heads: int, rows: int) -> Tensor:
            return torch.randn((self.batch, heads, rows, self.head_size), generator=generator, device=self.device)

        k, v = draw(self.key_heads, self.length), draw(self.key_heads, self.length)
        if self.decode:
            k = in_topics(k, draw(self.key_heads, self.length // TOPIC_LENGTH + 1))
        q, do = draw(self.heads, self.queries), draw(self.heads, self.queries)
        q, k, v, do = (x.to(self.torch_dtype) for x in (q, k, v, do))
        return q, k, v, do

    def __str__(self) -> str:
        decode = "decode " if self.decode else ""
        groups = "" if self.key_heads == self.heads else f"/{self.key_heads}"
        window = "" if self.window is None else f" W {self.window}"
        graph = " CUDA graph" if self.cuda_graph else ""
        size = f"B {self.batch} H {self.heads}{groups} L {self.length}{window} D {self.head_size}"
        return f"{decode}{size} {self.dtype}{graph}"


TOPIC_LENGTH, TOPIC_STRENGTH = 64, 1.25


def in_topics(k: Tensor, topics: Tensor) -> Tensor:
    """Keys (B, H, L, D) moved towards one direction for every 64 neighbours.

    At this strength 6% of keys matter to a row of LSSAR p = 15, in a third of 16-key blocks: what a trained model has.
    """
    return k + TOPIC_STRENGTH * topics.repeat_interleave(TOPIC_LENGTH, 2)[:, :, : k.shape[2]]


class Unavailable(Exception):
    """Why a contestant cannot run a case; reported in its place."""


def split_name(name: str) -> tuple[str, AttentionSpec]:
    """`tiled:lssar` or `tiled:lssar,p=3` -> implementation and mechanism."""
    implementation, _, mechanism = name.partition(":")
    if implementation not in _IMPLEMENTATIONS or not mechanism:
        raise ValueError(
            f"unknown contestant {name!r}; wanted IMPLEMENTATION:MECHANISM with an implementation of "
            f"{', '.join(_IMPLEMENTATIONS)} and a mechanism of lssar.specs(), e.g. {', '.join(contestant_names()[:3])}"
        )
    return implementation, parse_spec(mechanism)


def build(name: str, case: Case) -> tuple[Attention, AttentionSpec]:
    """A function of q, k, v for this case, or `Unavailable`."""
    implementation, mechanism = split_name(name)
    return _IMPLEMENTATIONS[implementation](mechanism, case), mechanism


def contestant_names() -> list[str]:
    """Contestants that are measured by default; any other `implementation:mechanism` may be asked for."""
    return [
        "fused:lssar", "fused:lssa", "tiled:lssar", "tiled:lssa", "tiled:softmax", "tiled:cosine_softmax",
        "eager:lssar", "compiled:lssar", "sdpa:softmax", "cudnn:softmax", "flash:softmax", "flex:softmax",
        "flex:lssa", "flex:lssar", "unit_cache:lssar",
    ]  # fmt: skip


def _ours(implementation: str) -> Callable[[AttentionSpec, Case], Attention]:
    def make(mechanism: AttentionSpec, case: Case) -> Attention:
        if implementation == "fused" and case.device != "cuda":
            raise Unavailable("needs a GPU")
        return functools.partial(attention, spec=mechanism, causal=case.causal, window=case.window, impl=implementation)

    return make


def _unit_cache(mechanism: AttentionSpec, case: Case) -> Attention:
    """Decoding from a cache that holds k / |k|, as the keys' norms are never needed; made once, outside the timing."""
    from lssar.ops.fused import fused_decode

    if case.device != "cuda" or not case.decode:
        raise Unavailable("needs a GPU" if case.decode else "is for decoding only")
    kept: list[Tensor] = []

    def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not kept or kept[0] is not k:
            kept[:] = [k, F.normalize(k.float(), dim=-1).to(k.dtype)]
        return fused_decode(q, kept[1], v, p=mechanism.p, unit_keys=True)

    return decode


def _eager(mechanism: AttentionSpec, case: Case) -> Attention:
    """What a user writes first: the formula, dense, through autograd. Inputs of half precision stay so."""

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        see = visibility(q.shape[2], k.shape[2], q.device, causal=case.causal, window=case.window)
        return reference_attention(q, k, v, see.dense(k.shape[2]), mechanism)[0]

    return dense


def _compiled(mechanism: AttentionSpec, case: Case) -> Attention:
    """The same through torch.compile, with the roundings of eager.

    By itself it keeps some values in float32 and rounds others: in bfloat16 on an H200 the backward's weights were then
    not the forward's, and dq was off by 0.27 to 0.52 of its norm (eager: 0.06 to 0.09).
    """
    _prepare_compiler()
    options: dict[str, Any] = {"emulate_precision_casts": True}
    return torch.compile(_eager(mechanism, case), fullgraph=True, dynamic=False, options=options)


def _prepare_compiler() -> None:
    """What timing asks of torch.compile.

    A compiled backward may not donate its buffers: timing it alone runs it many times on one graph. Each case and score
    function of FlexAttention is compiled separately. Past its recompilation limit Dynamo silently runs the uncompiled
    function, which would then be timed; so the limit is high and passing it is an error.
    """
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    functorch.donated_buffer = False
    dynamo.recompile_limit = 256
    dynamo.fail_on_recompile_limit_hit = True


def _sdpa(backend: str | None) -> Callable[[AttentionSpec, Case], Attention]:
    def make(mechanism: AttentionSpec, case: Case) -> Attention:
        if mechanism != spec("softmax"):
            raise Unavailable("SDPA computes softmax only")
        if case.window is not None:
            raise Unavailable("SDPA has no window; flex:softmax is the peer for windows")
        plain = functools.partial(
            F.scaled_dot_product_attention, is_causal=case.causal and not case.decode,  # it aligns one row top-left
            enable_gqa=case.heads != case.key_heads,
        )  # fmt: skip
        if backend is None:
            return plain
        if case.device != "cuda":
            raise Unavailable("needs a GPU")
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def restricted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return plain(q, k, v)

        return restricted

    return make


def _flex(mechanism: AttentionSpec, case: Case) -> Attention:
    if case.device != "cuda":
        raise Unavailable("needs a GPU")
    if case.decode:
        raise Unavailable("is not set up for decoding")
    from torch.nn.attention.flex_attention import flex_attention

    _prepare_compiler()
    return with_flex_attention(torch.compile(flex_attention, dynamic=False), mechanism, case)


def with_flex_attention(flex: Callable[..., Any], mechanism: AttentionSpec, case: Case) -> Attention:
    """Softmax, LSSA or LSSAR by FlexAttention.

    Its softmax makes exp(score): a score of log(a) gives weights a / sum a for any activation a. Re-weighting needs the
    row's mean first, so LSSAR takes two calls: the first one's log-sum-exp is log sum a.
    """
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    mask = None
    reach = case.length if case.window is None else case.window

    def seen(b, h, i, j):
        return (i - j < reach) & ((i >= j) if case.causal else (j - i < reach))

    if case.causal or case.window is not None:
        mask = create_block_mask(
            seen, None, None, case.length, case.length, device=case.device, _compile=case.device == "cuda"
        )
    gqa = case.heads != case.key_heads
    if mechanism == spec("softmax"):
        return lambda q, k, v: flex(q, k, v, block_mask=mask, enable_gqa=gqa)
    if not (mechanism.cosine and mechanism.log_n and mechanism.activation == "softplus" and mechanism.divisor == "l1"):
        raise Unavailable("FlexAttention is set up for softmax, lssa and lssar")
    see = visibility(case.length, case.length, torch.device(case.device), causal=case.causal, window=case.window)
    n = (see.stop - see.start)[0].float()
    factor = score_factor(n, case.head_size, mechanism)
    power = mechanism.p

    def prepared(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Unit q and k; in float16 for bfloat16, which has too few digits to pass the check (as in our kernels)."""
        parts = unit(q.float()), unit(k.float()), v
        return tuple(x.to(torch.float16 if case.dtype == "bfloat16" else case.torch_dtype) for x in parts)

    def softplus(score: Tensor, i: Tensor) -> Tensor:
        s = score * factor[i]
        return torch.relu(s) + torch.log1p(torch.exp(-s.abs()))

    def lssa_score(score, b, h, i, j):
        return torch.log(softplus(score, i))

    options: dict[str, Any] = {"block_mask": mask, "scale": 1.0, "enable_gqa": gqa}
    if power is None:
        return lambda q, k, v: flex(*prepared(q, k, v), score_mod=lssa_score, **options).to(v.dtype)

    def lssar(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = prepared(q, k, v)
        _, found = flex(*parts, score_mod=lssa_score, return_aux=AuxRequest(lse=True), **options)
        tau = torch.where(n > 3, found.lse.exp() / n, 0)

        def score_mod(score, b, h, i, j):
            above = softplus(score, i) - tau[b, h, i]
            matters = above > 0
            # both sides of a `where` are differentiated: log(0) would give 0 * inf
            return torch.where(matters, power * torch.log(torch.where(matters, above, 1.0)), -torch.inf)

        return flex(*parts, score_mod=score_mod, **options).to(v.dtype)

    return lssar


_IMPLEMENTATIONS: dict[str, Callable[[AttentionSpec, Case], Attention]] = {
    "fused": _ours("fused"),
    "tiled": _ours("tiled"),
    "reference": _ours("reference"),
    "eager": _eager,
    "compiled": _compiled,
    "sdpa": _sdpa(None),
    "cudnn": _sdpa("CUDNN_ATTENTION"),
    "flash": _sdpa("FLASH_ATTENTION"),
    "efficient": _sdpa("EFFICIENT_ATTENTION"),
    "flex": _flex,
    "unit_cache": _unit_cache,
}
