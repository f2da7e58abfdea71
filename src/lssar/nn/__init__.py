"""Attention layers, positions and the key-value cache, for models of your own."""

from lssar.nn.cache import LayerCache, LayerSnapshot
from lssar.nn.layers import Attention, layer_config
from lssar.nn.linear import fused_linear
from lssar.nn.multihead import MultiheadAttention
from lssar.nn.positions import (
    ALIBI_ROOM,
    Angles,
    Positions,
    add_alibi,
    alibi_slopes,
    narrower,
    ntk_base,
    rotary_angles,
    rotate,
    token_positions,
)
from lssar.nn.projections import PlainProjection, Projection, ProjectionConfig, TensorProductProjection

__all__ = [
    "ALIBI_ROOM",
    "Angles",
    "Attention",
    "LayerCache",
    "LayerSnapshot",
    "MultiheadAttention",
    "PlainProjection",
    "Positions",
    "Projection",
    "ProjectionConfig",
    "TensorProductProjection",
    "add_alibi",
    "alibi_slopes",
    "fused_linear",
    "layer_config",
    "narrower",
    "ntk_base",
    "rotary_angles",
    "rotate",
    "token_positions",
]
