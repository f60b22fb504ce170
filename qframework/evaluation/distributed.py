"""One process or several, as ``torchrun`` starts them: who does what, and exact sums of what all have counted.

Work is dealt out by whole batches: batch ``b`` goes to process ``b % size``. Every image is seen once, in the company
it has in a single process, so that even scales taken over a batch, and with them all counts, are the same. Counts are
integers and are added on the CPU through gloo, whatever device the models run on.
"""

from __future__ import annotations

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

# One process may wait for another that reads slower images; torchrun ends all of them when one fails.
_PATIENCE = timedelta(hours=2)


@dataclass(frozen=True)
class Processes:
    """The processes that share a task, seen from one of them; ``Processes()`` is a process of its own."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def mine(self, batches: range) -> list[int]:
        """Those of ``batches`` (indices into all of them) that this process takes."""
        return [batch for batch in batches if batch % self.size == self.rank]

    def sum(self, counts: Sequence[int]) -> list[int]:
        """Every process's ``counts`` added up, exactly: int64."""
        return self._add(torch.tensor(counts, dtype=torch.int64)).tolist()

    def add_speeds(self, speed: float) -> float:
        """The sum of one speed from each process."""
        return float(self._add(torch.tensor(speed, dtype=torch.float64)))

    def gather(self, items: Sequence[Any]) -> list[Any]:
        """The items of all processes, those of the first one first. They are pickled."""
        if self.size == 1:
            return list(items)
        everyones: list[Any] = [None] * self.size
        distributed.all_gather_object(everyones, list(items))
        return [item for items_of_one in everyones for item in items_of_one]

    def wait(self) -> None:
        """Return when all processes have called this."""
        if self.size > 1:
            distributed.barrier()

    def _add(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            distributed.all_reduce(numbers)
        return numbers


@contextmanager
def joined_processes(backend: str = "gloo") -> Iterator[Processes]:
    """The processes that ``torchrun`` started, joined while the block runs; one alone where it was not used.

    Args:
        backend: of torch.distributed; counts need gloo on the CPU, training on GPUs ``"cpu:gloo,cuda:nccl"``.

    Raises:
        QFrameworkError: a process group exists already, which is not ours to end.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes()
        return
    if distributed.is_initialized():
        raise QFrameworkError("joined_processes: a process group is open; accepted: none, this opens its own")
    distributed.init_process_group(backend, timeout=_PATIENCE)
    try:
        yield Processes(distributed.get_rank(), distributed.get_world_size())
    finally:
        distributed.destroy_process_group()


def device_of_process(name: str) -> torch.device:
    """The device of this process: ``"cuda"`` means one GPU for each process of this machine, in their order.

    Raises:
        QFrameworkError: ``name`` is no device, or is one that is not there; one GPU for several processes.
    """
    device = checked_device(name, "device")
    return _gpu(device) if device.type == "cuda" else device


def _gpu(device: torch.device) -> torch.device:
    here = torch.cuda.device_count()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.index is not None and processes > 1:
        raise QFrameworkError(f"device {device} for {processes} processes; accepted: 'cuda', a GPU for each of them")
    index = device.index if device.index is not None else int(os.environ.get("LOCAL_RANK", "0"))
    if index >= here or processes > here:
        raise QFrameworkError(f"device {device} for {processes} processes: this machine has {here} CUDA devices")
    return torch.device("cuda", index)
