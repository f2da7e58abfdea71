"""Under FSDP2 a model is filled shard by shard: the same weights, to the bit, as in one process."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SCRIPT = """
import torch
from lssar.model import GPT
from lssar.training import initialise
from lssar.training.distributed import distribute, world
from lssar.training.initialise import materialise, meta_model
from lssar.training.recipes import recipe

torch.set_num_threads(1)
initialise.DRAWN_AT_ONCE = 4096
changes = [
    {}, {"attention": "ssmax"}, {"projection": "tpa"}, {"size": "tiny", "key_heads": 2, "vocab_size": 501},
    {"size": "1b", "heads": 2, "key_heads": 1, "vocab_size": 61},
]
with world() as w:
    for change in changes:
        config = recipe("tiny-cpu", **change).model()
        if change.get("size") == "1b":
            config = type(config).from_dict({**config.to_dict(), "width": 24, "layers": 2})
        torch.manual_seed(3)
        whole = GPT(config)
        after = torch.get_rng_state()
        torch.manual_seed(3)
        model = meta_model(config)
        distribute(model, "fsdp", w)
        materialise(model, w.device)
        assert torch.equal(after, torch.get_rng_state())
        for (name, expected), parameter in zip(whole.named_parameters(), model.parameters(), strict=True):
            assert parameter.to_local().numel() < expected.numel() or expected.shape[0] == 1, name
            assert torch.equal(parameter.full_tensor(), expected), name
    print("equal", flush=True)
"""


def test_sharded_weights_are_those_of_one_process(tmp_path):
    (tmp_path / "run.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--standalone"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path / "run.py")], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("equal") == 3
