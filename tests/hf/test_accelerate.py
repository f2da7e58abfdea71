"""The example with accelerate and FSDP2, in two processes on the CPU (gloo)."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from transformers import AutoModelForCausalLM  # noqa: E402

import lssar.hf  # noqa: E402, F401
from tests.attack.children import fork_ranks, kill, wait  # noqa: E402

EXAMPLE = Path(__file__).parent.parent.parent / "examples/accelerate_fsdp2.py"
STEPS = 12


def fsdp_on_the_cpu(accelerator, plugin):
    """accelerate offers FSDP for GPUs only, though PyTorch's runs on the CPU: set what it sets there."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    for state in (AcceleratorState, PartialState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    assert accelerator.is_fsdp2


def train_example(folder: Path, size: int) -> None:
    """Losses of the example into a file, and the model into a folder."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # Adam enlarges differences in the order of summation
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    def on_the_cpu(fsdp_plugin, mixed_precision):
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=mixed_precision)
        assert accelerator.num_processes == size
        if size > 1:
            fsdp_on_the_cpu(accelerator, fsdp_plugin)
            prepare = accelerator.prepare

            def checked(model, *others):
                prepared = prepare(model, *others)
                sharded = [p for p in prepared[0].parameters() if isinstance(p, torch.distributed.tensor.DTensor)]
                assert sharded and len(sharded) == len(list(prepared[0].parameters()))
                layers = prepared[0].model.layers
                assert all(isinstance(layer, torch.distributed.fsdp.FSDPModule) for layer in layers)
                return prepared

            accelerator.prepare = checked
        return accelerator

    example.Accelerator = on_the_cpu
    losses = example.main(None, str(folder / "model"), STEPS)
    (folder / "losses.json").write_text(json.dumps(losses))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[int, Path]:
    """The example's results, by number of processes."""
    made = {}
    for size in (1, 2):
        folder = tmp_path_factory.mktemp(f"processes-{size}")
        pids = fork_ranks(lambda folder=folder, size=size: train_example(folder, size), folder / "log", size)
        ends = wait(pids, 120)
        if ends is None:
            kill(pids)
        assert ends == [0] * size, (folder / "log").read_text()
        made[size] = folder
    return made


def test_two_processes_train_as_one(folders):
    one, two = (json.loads((folders[size] / "losses.json").read_text()) for size in (1, 2))
    assert len(one) == STEPS and one[-1] < 0.8 * one[0]
    np.testing.assert_allclose(two, one, rtol=1e-6)  # transformers computes the loss in float32


def test_the_saved_model_has_its_mechanism_and_weights(folders):
    one, two = (AutoModelForCausalLM.from_pretrained(folders[size] / "model") for size in (1, 2))
    assert two.config._attn_implementation == "lssar"
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(two(ids).logits, one(ids).logits, atol=1e-6, rtol=0)
