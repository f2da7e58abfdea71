"""What the attention layers share: heads divided between mechanisms, their learned numbers, and the power."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lssar.attention import attention
from lssar.layouts import HeadGroup, LayerConfig, mechanisms_text
from lssar.specs import AttentionSpec


class Mechanisms:
    """Base of the attention layers: groups of heads with a mechanism each, their learned numbers, and a power."""

    groups: tuple[HeadGroup, ...]
    head_scale: nn.Parameter | None
    """Learned factor of the scores of each query head, if any of the mechanisms has one."""
    threshold: nn.Parameter | None
    """Learned threshold of each query head, if any of the mechanisms has one."""
    power: Tensor | None
    """Power of every re-weighted mechanism in place of its own; set by `set_power`, not a weight."""

    def divide_heads(self, layer: LayerConfig, heads: int, key_heads: int) -> None:
        self.groups, self.power = layer.groups(heads, key_heads), None
        initial = self.initial_numbers()
        self.head_scale, self.threshold = (
            nn.Parameter(torch.tensor(initial[name])) if name in initial else None
            for name in ("head_scale", "threshold")
        )

    def initial_numbers(self) -> dict[str, list[float]]:
        """Initial values, one a head, of the parameters that the mechanisms learn."""
        by_head = [group.spec for group in self.groups for _ in range(group.heads.start, group.heads.stop)]
        values = {}
        if any(spec.head_scale is not None for spec in by_head):
            values["head_scale"] = [float(spec.head_scale or 0.0) for spec in by_head]
        if any(spec.learned_threshold for spec in by_head):
            values["threshold"] = [float(spec.threshold) for spec in by_head]
        return values

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        """The mechanism of each group of heads; may be changed at test time."""
        return tuple(group.spec for group in self.groups)

    @specs.setter
    def specs(self, specs: Sequence[AttentionSpec]) -> None:
        self.groups = tuple(replace(group, spec=s) for group, s in zip(self.groups, specs, strict=True))

    @property
    def spec(self) -> AttentionSpec:
        """The mechanism of a layer that has only one."""
        if len(self.groups) > 1:
            raise ValueError("this layer divides its heads between mechanisms; see `specs`")
        return self.groups[0].spec

    @spec.setter
    def spec(self, spec: AttentionSpec) -> None:
        self.specs = [spec]

    def extra_repr(self) -> str:
        return mechanisms_text(LayerConfig(self.specs, tuple(g.heads.stop - g.heads.start for g in self.groups)))

    def set_power(self, p: float | None) -> None:
        """Re-weight with the power p from now on; None: with each mechanism's own.

        The power is a tensor on the CPU, so that a compiled graph takes it as an input and is not compiled again.
        """
        if p is None or all(s.p is None for s in self.specs):
            self.power = None
        elif self.power is None:
            self.power = torch.tensor(float(p), dtype=torch.float64, device="cpu")
        else:
            self.power.fill_(p)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, function: Callable[..., Tensor] = attention,
        mask: Tensor | None = None, groups: Sequence[HeadGroup] | None = None, **others: Any,
    ) -> Tensor:  # fmt: skip
        """Output of `lssar.attention` (or of `function`, called likewise) with each mechanism on its heads.

        `groups`: which of the layer's heads q, k and v hold, if not all.
        """
        outputs = []
        for group in self.groups if groups is None else groups:
            own = dict(others)
            if mask is not None:
                own["mask"] = mask[:, group.heads] if mask.shape[1] > 1 else mask
            spec, heads, keys = group.spec, group.heads, group.key_heads
            if self.head_scale is not None and spec.head_scale is not None:
                own["head_scale"] = self.head_scale[group.learned or heads]
            if self.threshold is not None and spec.learned_threshold:
                own["threshold"] = self.threshold[group.learned or heads]
            if self.power is not None and spec.p is not None:
                own["p"] = self.power
            outputs.append(function(q[:, heads], k[:, keys], v[:, keys], spec, **own))
        o = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        if groups is not None:  # DDP and FSDP wait for every parameter's gradient, also where no head uses it
            specs = [group.spec for group in groups]
            if self.head_scale is not None and all(spec.head_scale is None for spec in specs):
                o = o + self.head_scale[:0].sum()
            if self.threshold is not None and not any(spec.learned_threshold for spec in specs):
                o = o + self.threshold[:0].sum()
        return o
