"""The peak memory of a model's activations."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def activation_bytes(model: Callable[[Tensor], Any], inputs: Tensor) -> int:
    """The peak of bytes that one call of ``model`` allocates, result included, without its weights and ``inputs``.

    On a GPU this is the maximum of PyTorch's allocator, on a CPU that of the allocations in a profile: resident memory
    would include earlier calls and vary between runs. Memory that libraries such as oneDNN allocate on their own is not
    counted. Calls the model twice, first to warm up.
    """
    model(inputs)
    if inputs.is_cuda:
        return _bytes_on_gpu(model, inputs)
    blocks: dict[int, int] = {}  # by address, since this call may also free blocks of earlier calls
    held = most = 0
    for address, change in _changes_on_cpu(model, inputs):
        if change > 0:
            blocks[address] = change
            held += change
        else:
            held -= blocks.pop(address, 0)
        most = max(most, held)
    return most


def _bytes_on_gpu(model: Callable[[Tensor], Any], inputs: Tensor) -> int:
    torch.cuda.synchronize(inputs.device)
    torch.cuda.reset_peak_memory_stats(inputs.device)
    before = torch.cuda.memory_allocated(inputs.device)
    model(inputs)
    torch.cuda.synchronize(inputs.device)
    return torch.cuda.max_memory_allocated(inputs.device) - before


def _changes_on_cpu(model: Callable[[Tensor], Any], inputs: Tensor) -> list[tuple[int, int]]:
    """Address and size of each allocation (positive) and free (negative) of one call, in order."""
    from torch.profiler import ProfilerActivity, profile

    with _quiet_profiler(), tempfile.TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = model(inputs)
        del result
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]" and event["args"]["Device Type"] == 0]
    changes.sort(key=lambda event: event["ts"])
    return [(event["args"]["Addr"], event["args"]["Bytes"]) for event in changes]


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Silence the profiler's log messages on stderr; the profiler reads the level at its first use."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
