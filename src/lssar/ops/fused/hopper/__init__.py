"""Kernels for Hopper in Gluon: the arithmetic of forward.py and backward.py with the products issued by hand.

Triton waits for a product right after asking for it, so tensor cores and arithmetic take turns. Here each product is
asked for early and waited for late. Tiles come through rings of shared memory, filled by the tensor memory accelerator,
one warp group for 64 rows.
"""

from lssar.ops.fused.hopper.backward import key_gradient_kernel, query_gradient_kernel
from lssar.ops.fused.hopper.forward import forward_kernel

__all__ = ["forward_kernel", "key_gradient_kernel", "query_gradient_kernel"]
