"""Split work over the processes that ``torchrun`` starts, and add up their counts exactly.

Batch ``b`` goes to process ``b % size``. Batches hold the same images as in a single process, so scales that are
computed over a batch, and all counts, are the same too. Counts are integers, added on the CPU through gloo.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from qframework.devices import checked_device
from qframework.errors import QFrameworkError

# A process may wait long for one that reads slower images; torchrun ends all of them when one fails.
_PATIENCE = timedelta(hours=2)


@dataclass(frozen=True)
class Processes:
    """The group of processes that share a task, as seen by one of them; ``Processes()`` is a single process."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def mine(self, batches: range) -> list[int]:
        """The indices in ``batches`` that this process handles."""
        return [batch for batch in batches if batch % self.size == self.rank]

    def sum(self, counts: Sequence[int]) -> list[int]:
        """The sums of ``counts`` over all processes, in int64."""
        return self._add(torch.tensor(counts, dtype=torch.int64)).tolist()

    def add_speeds(self, speed: float) -> float:
        """The sum of ``speed`` over all processes."""
        return float(self._add(torch.tensor(speed, dtype=torch.float64)))

    def gather(self, items: Sequence[Any]) -> list[Any]:
        """The items of all processes, ordered by rank. They are pickled."""
        if self.size == 1:
            return list(items)
        everyones: list[Any] = [None] * self.size
        distributed.all_gather_object(everyones, list(items))
        return [item for items_of_one in everyones for item in items_of_one]

    def wait(self) -> None:
        """Wait until all processes have called this."""
        if self.size > 1:
            distributed.barrier()

    def _add(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            distributed.all_reduce(numbers)
        return numbers


@contextmanager
def joined_processes(backend: str = "gloo") -> Iterator[Processes]:
    """Open the process group of ``torchrun`` for the block; without ``torchrun``, yield a single process.

    Args:
        backend: of torch.distributed; counts need gloo on the CPU, training on GPUs ``"cpu:gloo,cuda:nccl"``.

    Raises:
        QFrameworkError: a process group is already open.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes()
        return
    if distributed.is_initialized():
        raise QFrameworkError("joined_processes: no process group must be open, got one")
    distributed.init_process_group(backend, timeout=_PATIENCE)
    try:
        yield Processes(distributed.get_rank(), distributed.get_world_size())
    finally:
        leave_process_group()


def leave_process_group() -> None:
    """Destroy the process group and end its threads.

    A ``DistributedDataParallel`` that only a cycle keeps would keep gloo's threads too; one that frees a tensor while
    the interpreter ends aborts the process.
    """
    gc.collect()
    distributed.destroy_process_group()


def device_of_process(name: str) -> torch.device:
    """The device of this process; ``"cuda"`` gives each process of this machine its own GPU.

    Raises:
        QFrameworkError: ``name`` is not a device or not present, or several processes would share one GPU.
    """
    device = checked_device(name, "device")
    return _gpu(device) if device.type == "cuda" else device


def _gpu(device: torch.device) -> torch.device:
    here = torch.cuda.device_count()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.index is not None and processes > 1:
        raise QFrameworkError(f"device must be 'cuda', a GPU each, for {processes} processes, got {str(device)!r}")
    index = device.index if device.index is not None else int(os.environ.get("LOCAL_RANK", "0"))
    if index >= here or processes > here:
        raise QFrameworkError(
            f"device {str(device)!r}: {processes} processes must have a GPU each, got {here} CUDA devices"
        )
    return torch.device("cuda", index)
