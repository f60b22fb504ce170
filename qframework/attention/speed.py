"""Times of attention calls on a GPU, by which ``calibrate_attention`` orders variants."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

Calls = Mapping[str, Callable[[], object]]
_ROUNDS = 9
_GRAPH_S = 0.5e-3  # a graph holds as many calls as take this long, so that launching it does not count
_MOST_CALLS = 20


def median_seconds(calls: Calls) -> dict[str, float]:
    """Seconds of each call on the current GPU: the median of rounds in which all take turns, so that clocks are alike.

    Calls are replayed in CUDA graphs, which leaves out what the host does before it launches a kernel. One that cannot
    be captured is called as it is.
    """
    prepared = {name: _prepared(call) for name, call in calls.items()}
    pairs: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
    for _ in range(_ROUNDS + 1):  # the first warms up
        for name, (replay, _) in prepared.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replay()
            end.record()
            pairs[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(end) for start, end in timed[1:]) / 1e3 / prepared[name][1]
        for name, timed in pairs.items()
    }


def _prepared(call: Callable[[], object]) -> tuple[Callable[[], object], int]:
    """``(function, how many calls it makes)``."""
    times = min(_wall_s(call) for _ in range(3))  # the first compiles
    count = max(1, min(_MOST_CALLS, int(_GRAPH_S / max(times, 1e-9))))
    graph = torch.cuda.CUDAGraph()
    with suppress(RuntimeError):  # of something that CUDA cannot capture, such as reading a number of a tensor
        with torch.cuda.graph(graph):
            for _ in range(count):
                call()
        return graph.replay, count
    return call, 1


def _wall_s(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start
