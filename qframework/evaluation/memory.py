"""The most memory that a model needs while it runs."""

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
    """The most bytes that one call of ``model`` holds at a time beside its weights and ``inputs``, result included.

    On a GPU PyTorch's allocator keeps the maximum. On a CPU it is read off PyTorch's profiler, which sees every
    allocation: the resident memory of a process holds what came before as well, and differs from run to run. What
    libraries such as oneDNN allocate past PyTorch's allocator is not counted. The first of two calls warms up.
    """
    model(inputs)
    if inputs.is_cuda:
        return _bytes_on_gpu(model, inputs)
    blocks: dict[int, int] = {}  # by address: a block that an earlier call left behind is not this call's to free
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
    """Address and size of what one call allocates (positive) and frees (negative), in order of time."""
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
    """The profiler's library says on stderr that it started, that there is no GPU. Read at its first use."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
