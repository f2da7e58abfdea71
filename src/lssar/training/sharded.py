"""Tensors of a checkpoint in shards: every process writes and reads its own part, through torch.distributed.checkpoint.

The files are safetensors with the offsets of their parts in the header (`HuggingFaceStorageWriter`). The default format
of DCP is not used, because its `.metadata` file and its tensors are pickles. Each process P writes two files,
shard-P-model-00001-of-00002.safetensors with weights and shard-P-model-00002-of-00002.safetensors with optimiser state.
These are the names that DCP gives, and other programs can read the folder with its `HuggingFaceStorageReader`.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from lssar.records import checksum

WEIGHTS, MOMENTS = 1, 2
"""Numbers of a process's files."""
_NAME = re.compile(r"shard-\d+-model-(\d+)-of-\d+\.safetensors")


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters are divided over processes, as FSDP2 does."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def is_shard(name: str, kinds: Iterable[int] = (WEIGHTS, MOMENTS)) -> bool:
    """Whether a file name is that of a shard, of weights or of optimiser state or both."""
    match = _NAME.fullmatch(name)
    return match is not None and int(match[1]) in kinds


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether this process's parts of the tensors are finite."""
    local = (x.to_local() if isinstance(x, DTensor) else x for x in tensors)
    return all(bool(torch.isfinite(x).all()) for x in local if x.is_floating_point())


class _Writer(dcp.HuggingFaceStorageWriter):
    """Writes shards into a folder; `finish` gets their checksums in process 0 when all processes have written."""

    def __init__(self, folder: Path, files: dict[str, int], finish: Callable[[dict[str, str]], None]):
        super().__init__(str(folder), fqn_to_index_mapping=files, save_distributed=True)
        # The tensors are in CPU memory already. Copying ahead would use a CUDA stream in the background thread, whose
        # current device is GPU 0, whatever the process's own.
        self.per_thread_copy_ahead = 0
        self.folder, self.call_at_end = folder, finish

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        # Only process 0 runs this, before any process writes: remove what a failed save may have left.
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        results = super().write_data(plan, planner).wait()  # the files are synced to the disk
        names = {result.storage_data.relative_path for result in results}
        sums = {name: checksum(self.folder / name) for name in names}
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(
            [
                dataclasses.replace(result, storage_data=(name := result.storage_data.relative_path, sums[name]))
                for result in results
            ]
        )
        return done

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        sums = dict(sorted(result.storage_data for of_process in results for result in of_process))
        if missing := [name for name in sums if not (self.folder / name).exists()]:
            raise ValueError(
                f"{missing[0]}, which another process has written, is not in {self.folder}: the run folder must be on "
                "a file system that all processes share"
            )
        self.call_at_end(sums)


class _Listed(FileSystem):
    """Shows a reader the files that were checked, whatever else is in the folder."""

    def __init__(self, names: Iterable[str]):
        self.names = list(names)

    def ls(self, path: Any) -> list[str]:
        return [str(Path(path) / name) for name in self.names]


class BackgroundSave:
    """`write` in a thread of its own.

    As in `dcp.async_save`, but the thread is a daemon, for which Python does not wait when it ends. When a process has
    died, the thread may wait until gloo's time limit for a process that waits for this one to end.
    """

    def __init__(self, write: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self.thread.start()

    def _run(self, write: Callable[[], Any]) -> None:
        try:
            write()
        except BaseException as error:  # a CheckpointException is no Exception
            self.error = error

    def wait(self) -> None:
        """Return when the save is complete, or raise its error.

        The thread has ended then. If it were still freeing its tensors while Python ends, the process would abort.
        """
        self.thread.join()
        if self.error is not None:
            raise self.error


def save(
    folder: Path,
    weights: dict[str, Any],
    moments: dict[str, Any],
    group: dist.ProcessGroup,
    finish: Callable[[dict[str, str]], None],
) -> BackgroundSave:
    """Copy the tensors to CPU memory, then write them in the background. Every process calls it.

    `finish` is called in process 0, in the background, with the checksums of all files. `group` must be one that
    nothing else uses at the same time.
    """
    files = dict.fromkeys(weights, WEIGHTS) | dict.fromkeys(moments, MOMENTS)
    writer = _Writer(folder, files, finish)
    staged = BlockingAsyncStager().stage({**weights, **moments})
    return BackgroundSave(lambda: dcp.save(staged, storage_writer=writer, process_group=group))


def load_into(folder: Path, names: Iterable[str], tensors: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Fill `tensors` in place from the files `names`, each process its own part. Plain safetensors files serve too."""
    try:
        dcp.load(tensors, storage_reader=_reader(folder, names), process_group=group)
    except dcp.CheckpointException as error:
        raise ValueError(f"{folder} does not fit this model: {reason(error)}") from error


def load_whole(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """All tensors in the files `names`, whole, in CPU memory."""
    reader = _reader(folder, names)
    found = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in found.items()
        if isinstance(about, dcp.TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is what is meant
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def _reader(folder: Path, names: Iterable[str]) -> dcp.HuggingFaceStorageReader:
    reader = dcp.HuggingFaceStorageReader(str(folder))
    reader.fs = _Listed(names)
    return reader


def reason(error: dcp.CheckpointException) -> str:
    """What went wrong where, in one line."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"process {rank}: {cause}"
