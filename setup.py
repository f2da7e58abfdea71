"""The optional CPU kernel. Everything else about the package is in pyproject.toml.

Without a C compiler the package installs all the same, and `impl="tiled"` runs on PyTorch operations alone;
LSSAR_REQUIRE_NATIVE=1 makes that an error, for wheels that are given to others.
"""

import os
from glob import glob

from setuptools import Extension, setup

NATIVE = "src/lssar/ops/native"

setup(
    ext_modules=[
        Extension(
            "lssar.ops.native._kernels",
            sources=sorted(glob(f"{NATIVE}/*.c")),
            depends=sorted(glob(f"{NATIVE}/*.h")),
            extra_compile_args=[
                "-O3",
                "-std=gnu11",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-ffp-contract=fast",
                "-fvisibility=hidden",
                "-pthread",
            ],
            extra_link_args=["-pthread"],
            optional="LSSAR_REQUIRE_NATIVE" not in os.environ,
        )
    ]
)
