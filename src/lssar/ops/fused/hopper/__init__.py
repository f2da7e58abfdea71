"""Kernels for Hopper in Gluon: what fused/forward.py and fused/backward.py compute, with explicit scheduling.

Triton waits for a product right after starting it, so tensor cores and arithmetic alternate. Here each product starts
early and is waited for late. Tiles pass through rings in shared memory, filled by the tensor memory accelerator; a warp
group has 64 rows.
"""

from lssar.ops.fused.hopper.descriptors import tile_arguments
from lssar.ops.fused.hopper.forward import forward_kernel
from lssar.ops.fused.hopper.key_gradient import key_gradient_kernel
from lssar.ops.fused.hopper.query_gradient import query_gradient_kernel
from lssar.ops.fused.hopper.window_forward import window_forward_kernel
from lssar.ops.fused.hopper.window_key_gradient import window_key_gradient_kernel
from lssar.ops.fused.hopper.window_query_gradient import window_query_gradient_kernel

__all__ = [
    "forward_kernel", "key_gradient_kernel", "query_gradient_kernel", "tile_arguments", "window_forward_kernel",
    "window_key_gradient_kernel", "window_query_gradient_kernel",
]  # fmt: skip
