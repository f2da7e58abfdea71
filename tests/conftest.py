"""Settings for all tests: a fixed seed each, and Triton's interpreter where there is no GPU."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton


if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers are the parallelism


@pytest.fixture(autouse=True)
def _seed():
    from tests.helpers import shifted_seed

    torch.manual_seed(shifted_seed(0))
