"""Settings for all tests: a fixed seed each, and Triton's interpreter where there is no GPU."""

import os
from importlib.util import find_spec

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    from tests.ops import interpreter

    interpreter.improve()


if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers are the parallelism


@pytest.fixture(autouse=True)
def _seed():
    from tests.helpers import shifted_seed

    torch.manual_seed(shifted_seed(0))
