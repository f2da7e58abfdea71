"""One process or many: what `torchrun` says, and the model wrapped accordingly."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lssar.context import Context
from lssar.model import GPT
from lssar.training.recipes import Parallel


class ProcessLost(ConnectionError):
    """Another process of the run has died or does not answer."""


@dataclass(frozen=True)
class Processes:
    rank: int
    size: int
    device: torch.device
    context: int = 1
    """Processes that hold parts of the same sequences; the others have sequences of their own."""

    def __post_init__(self) -> None:
        if self.size % self.context:
            raise ValueError(
                f"context_parallel {self.context} needs a multiple of {self.context} processes; there are {self.size}. "
                f"Start them with `torchrun --nproc-per-node {self.context} -m lssar.cli train ...`, or give another "
                "--context-parallel"
            )

    @property
    def data_rank(self) -> int:
        """Which of the batches of a step this process reads; neighbours share one with `context` processes each."""
        return self.rank // self.context

    @property
    def data_size(self) -> int:
        """How many batches all processes read at once."""
        return self.size // self.context

    @property
    def main(self) -> bool:
        return self.rank == 0

    def mean(self, x: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(x, op=dist.ReduceOp.SUM)
            x = x / self.size
        return x

    def any(self, flag: bool) -> bool:
        """True everywhere if it is anywhere: a signal may reach one process only."""
        return flag if self.size == 1 else bool(self.mean(torch.tensor(float(flag), device=self.device)) > 0)

    def from_main(self, value: int) -> int:
        """The main process's value, everywhere."""
        if self.size == 1:
            return value
        told = torch.tensor(value, device=self.device)
        dist.broadcast(told, 0)
        return int(told)

    def on_main(self, act: Callable[[], Any]) -> None:
        """Call `act` in the main process while the others wait; if it fails, all fail."""
        error: Exception | None = None
        if self.main:
            try:
                act()
            except Exception as caught:
                error = caught
        failed = self.from_main(int(error is not None))
        if error is not None:
            raise error
        if failed:
            time.sleep(2)  # torchrun ends all processes once one has failed: the main one first reports its error
            raise ValueError("process 0 could not start; its message says why")

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def lost_connection(error: BaseException) -> bool:
    """Whether the error is that of a collective whose other processes do not answer."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport/" in str(error))


@contextlib.contextmanager
def world(context: int = 1) -> Iterator[Processes]:
    """The world that `torchrun` set up, or a world of one, in groups of `context` processes that share sequences.

    If a process dies, the others raise ProcessLost: gloo sees the closed connection at once. NCCL does not, and there
    torchrun ends them, 30 seconds after it asked them to stop.
    """
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        yield Processes(0, 1, device, context)
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), device, context)
        dist.barrier()  # a process that leaves early may leave the others waiting in their teardown
    except RuntimeError as error:
        if not lost_connection(error):
            raise
        raise ProcessLost(
            f"process {dist.get_rank()} lost the connection to another process, which was killed, failed with a "
            "message of its own, or stopped responding; finished checkpoints are not lost, and the same command "
            "resumes, on any number of processes"
        ) from error
    finally:
        dist.destroy_process_group()


def distribute(model: GPT, parallel: Parallel, w: Processes, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The module to call in training: the model itself, or DDP around it, or the model sharded in place (FSDP2).

    One mesh has both dimensions: processes of one context hold parts of the same sequences; weights are replicated or
    sharded over all processes, and gradients averaged over all. FSDP gathers the weights of blocks in `dtype`. Autocast
    would do with weights gathered in float32 too, but it keeps its half-precision copies, which are whole, until the
    backward. The embedding stays in float32, and so does the residual stream.
    """
    if w.size == 1:
        return model
    mesh = init_device_mesh(w.device.type, (w.data_size, w.context), mesh_dim_names=("data", "context"))
    if w.context > 1:
        model.context = Context(mesh.get_group("context"))
    everyone = mesh._flatten("everyone")
    if parallel == "ddp":
        devices = [w.device] if w.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=devices, process_group=everyone.get_group())
    half = dtype != torch.float32
    gathered = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False) if half else MixedPrecisionPolicy()
    for block in model.layers():
        fully_shard(block, mesh=everyone, mp_policy=gathered)
    fully_shard(model, mesh=everyone)
    return model


@contextlib.contextmanager
def gradient_sync(module: nn.Module, sync: bool) -> Iterator[None]:
    """Under DDP, gradients are exchanged only with the last micro-batch of a step.

    Under FSDP they are with each: gradients that wait for the last one would be whole on every process.
    """
    with module.no_sync() if isinstance(module, nn.parallel.DistributedDataParallel) and not sync else _NOTHING:
        yield


_NOTHING = contextlib.nullcontext()
