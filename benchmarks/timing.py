"""Timing: of single calls, of many calls in one CUDA graph, or of providers that take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

SLEEP_CYCLES = 1_000_000  # about half a millisecond, longer than a launch takes
FLUSH_BYTES = 256 * 2**20  # several times the largest L2 cache
GRAPH_CALLS = 200  # launching the graph costs about one call, half a percent


@dataclass(frozen=True)
class Timing:
    """Samples of one provider, in milliseconds."""

    samples_ms: tuple[float, ...]

    def fields(self) -> dict[str, Any]:
        """The timing fields of a Record."""
        p20, p50, p80 = np.quantile(self.samples_ms, [0.2, 0.5, 0.8]).tolist()
        return {"p20_ms": p20, "p50_ms": p50, "p80_ms": p80, "runs": len(self.samples_ms)}

    @property
    def median_s(self) -> float:
        return float(np.median(self.samples_ms)) / 1e3


def time_provider(fn: Callable[[], Any], device: str, *, rep_ms: float = 200.0, min_runs: int = 10) -> Timing:
    """Time ``fn`` for about ``rep_ms`` and at least ``min_runs`` calls: CUDA events on a GPU, wall clock on a CPU."""
    return time_cuda(fn, rep_ms, min_runs) if device == "cuda" else time_cpu(fn, rep_ms, min_runs)


def time_cuda(fn: Callable[[], Any], rep_ms: float, min_runs: int) -> Timing:
    """CUDA events around each call, with the L2 cache flushed before it (``triton.testing.do_bench``)."""
    from triton.testing import do_bench

    once_ms = min(_wall_ms(fn, torch.cuda.synchronize) for _ in range(2))  # the first call may prepare or compile
    samples = do_bench(fn, warmup=rep_ms / 4, rep=max(rep_ms, 1.2 * min_runs * once_ms), return_mode="all")
    return Timing(tuple(samples))


def time_kernel(
    fn: Callable[[], Any], device: str, *, rep_ms: float = 200.0, min_runs: int = 10, sleep_cycles: int = SLEEP_CYCLES
) -> Timing:
    """As ``time_provider``, but the GPU sleeps until the host has launched the call."""
    if device != "cuda":
        return time_cpu(fn, rep_ms, min_runs)
    once_ms = min(_wall_ms(fn, torch.cuda.synchronize) for _ in range(3))
    runs = max(min_runs, int(rep_ms / once_ms))
    flushed = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
    for start, end in events:
        flushed.zero_()
        torch.cuda._sleep(sleep_cycles)
        start.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return Timing(tuple(start.elapsed_time(end) for start, end in events))


def time_in_graph(fn: Callable[[], Any], device: str, *, rep_ms: float = 200.0, min_runs: int = 10) -> Timing:
    """Time per call of ``GRAPH_CALLS`` calls replayed in one CUDA graph, which excludes launch overhead.

    The operands stay in the L2 cache if they fit. Without a GPU, as ``time_provider``.
    """
    if device != "cuda":
        return time_cpu(fn, rep_ms, min_runs)
    return _time_graph(_captured(fn), GRAPH_CALLS, rep_ms, min_runs)


def _time_graph(graph: torch.cuda.CUDAGraph, calls: int, rep_ms: float, min_runs: int) -> Timing:
    """Time of a replay, divided by the ``calls`` in it."""
    once_ms = _wall_ms(graph.replay, torch.cuda.synchronize)
    runs = max(min_runs, int(rep_ms / once_ms))
    for _ in range(max(runs // 4, 1)):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return Timing(tuple(start.elapsed_time(end) / calls for start, end in events))


def time_in_turns(
    calls: Sequence[Callable[[], Any]], device: str, *, rep_ms: float = 50.0, graph_ms: float = 2.0, min_runs: int = 10
) -> Timing:
    """Time per call of ``calls`` that take turns in one CUDA graph of about ``graph_ms``.

    With copies of an operand that together exceed the L2 cache, each call finds its own outside of it. Without a GPU,
    as ``time_provider`` of the first.
    """
    if device != "cuda":
        return time_cpu(calls[0], rep_ms, min_runs)
    calls[0]()
    once_ms = min(_wall_ms(calls[0], torch.cuda.synchronize) for _ in range(3))
    rounds = max(1, min(16, int(graph_ms / (once_ms * len(calls)))))
    graph = _captured(lambda: [call() for call in calls], rounds)
    return _time_graph(graph, rounds * len(calls), rep_ms, min_runs)


def _captured(fn: Callable[[], Any], calls: int = GRAPH_CALLS) -> torch.cuda.CUDAGraph:
    """A graph of ``calls`` calls of ``fn``, after warm-up calls that compile, tune and allocate."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            fn()
        torch.cuda.synchronize()
        graph.capture_begin()  # unlike torch.cuda.graph, does not collect garbage, which takes longer than the calls
        try:
            for _ in range(calls):
                fn()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def time_cpu(fn: Callable[[], Any], rep_ms: float, min_runs: int) -> Timing:
    """Wall-clock time of each call, after two warm-up calls."""
    once_ms = min(_wall_ms(fn), _wall_ms(fn))
    runs = max(min_runs, int(rep_ms / max(once_ms, 1e-6)))
    return Timing(tuple(_wall_ms(fn) for _ in range(runs)))


def time_interleaved(
    providers: Mapping[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Timing]:
    """Times by ``clock`` in the order ``A B C A B C ...``, so that drift affects all alike; one warm-up round first."""
    samples: dict[str, list[float]] = {name: [] for name in providers}
    for fn in providers.values():
        fn()
    for _ in range(rounds):
        for name, fn in providers.items():
            start = clock()
            fn()
            samples[name].append(1e3 * (clock() - start))
    return {name: Timing(tuple(times)) for name, times in samples.items()}


_AHEAD_CYCLES = 3_000_000  # of the GPU, in which the host issues the calls that are timed


def time_ahead(
    providers: Mapping[str, Callable[[], Any]], device: str, rounds: int = 7, burst_ms: float = 6.0
) -> dict[str, Timing]:
    """Times of calls in bursts that take turns, the host ahead of the GPU as within a model; on a CPU one at a time.

    Unlike CUDA graphs they have what eager calls do, such as autograd.
    """
    if device != "cuda":
        return time_interleaved(providers, rounds)
    calls = {name: max(int(burst_ms / _burst_ms(fn, 2)), 1) for name, fn in providers.items()}
    samples: dict[str, list[float]] = {name: [] for name in providers}
    for _ in range(rounds):
        for name, fn in providers.items():
            samples[name].append(_burst_ms(fn, calls[name]))
    return {name: Timing(tuple(times)) for name, times in samples.items()}


def _burst_ms(fn: Callable[[], Any], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_AHEAD_CYCLES)
    start.record()
    for _ in range(calls):
        fn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def peak_mb(fn: Callable[[], Any], device: str) -> float | None:
    """Peak memory of one call in MB, at least the memory that CUDA graphs keep between calls; GPU only.

    Makes a separate call, since the buffer that flushes the L2 cache also takes memory.
    """
    if device != "cuda":
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    allocated = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()  # leaves the memory of tensors and graphs
    return max(allocated, torch.cuda.memory_reserved()) / 2**20


def _wall_ms(fn: Callable[[], Any], synchronize: Callable[[], None] = lambda: None) -> float:
    synchronize()
    start = time.perf_counter()
    fn()
    synchronize()
    return (time.perf_counter() - start) * 1e3
