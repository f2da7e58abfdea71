"""Softplus attention with re-weighting (LSSA, LSSAR): one operator for every mechanism in `specs()`.

import lssar
o = lssar.attention(q, k, v)                                # LSSAR, p = 15, causal
o = lssar.attention(q, k, v, lssar.spec("lssar", p=3))
"""

from lssar import nn
from lssar.attention import attention
from lssar.functional import scaled_dot_product_attention
from lssar.specs import AttentionSpec, spec, specs

__all__ = ["AttentionSpec", "attention", "nn", "scaled_dot_product_attention", "spec", "specs"]
__version__ = "0.2.0"
