"""Measures int8_linear's tiles on a GPU for the shapes of a model: what ``qframework tune-kernels`` runs.

For each shape and epilogue, all candidates of the chip are compiled in parallel, compared with the reference, and timed
in CUDA graphs with the weight outside of the L2 cache. The fastest replaces the choice without measurements only where
it is ahead by more than noise.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from qframework.compat.triton import compile_in, finished
from qframework.errors import QFrameworkError
from qframework.kernels.linear.arguments import Int8LinearArguments
from qframework.kernels.linear.launch import warm_up_tile, write_result
from qframework.kernels.linear.local_tiles import Chip, MeasuredTile, read_tiles, save_tiles
from qframework.kernels.linear.reference import int8_linear_ref
from qframework.kernels.linear.tile import MAX_FEW_ROWS, Epilogue, FewRowsTile, Tile
from qframework.kernels.linear.tile_candidates import candidates
from qframework.kernels.linear.tiles import bucket, choose_tile
from qframework.versions import installed_version

GAIN = 0.02  # of the time, below which a tile is no better
_CHUNK = 4096  # rows that are compared at once, in float64
_GRAPH_MS, _REPLAYS, _MOST_COPIES = 1.0, 15, 48
_VERSIONS = ("qframework", "torch", "triton")
# Columns and inner size of a transformer's linears as multiples of its width, and what follows each: plain ones first,
# because every other epilogue falls back to them.
_LINEARS: dict[tuple[int, int], tuple[Epilogue, ...]] = {
    (3, 1): ("float", "int8"),
    (1, 1): ("float", "int8", "residual"),
    (4, 1): ("float", "int8", "activation", "activation_float"),
    (1, 4): ("float", "int8", "residual"),
}


class TileProblem(NamedTuple):
    """A shape and its epilogue."""

    m: int
    n: int
    k: int
    epilogue: Epilogue


class TileTimes(NamedTuple):
    """Microseconds of each candidate that is right, and of the choice without measurements."""

    problem: TileProblem
    before: Tile
    microseconds: dict[Tile, float]

    def best(self) -> MeasuredTile:
        """The fastest tile, or the one before if it is as fast as any."""
        problem, before, times = self
        fastest = min(times, key=times.__getitem__)
        tile = fastest if times[fastest] < (1 - GAIN) * times[before] else before
        return MeasuredTile(bucket(problem.m), *problem[1:], tile, times[tile], times[before])


def tile_problems(widths: Sequence[int], rows: Sequence[int]) -> list[TileProblem]:
    """The linears of transformers of these widths with these numbers of rows, the plain ones of all first.

    Raises:
        QFrameworkError: a width is no multiple of 16, or there are too few rows, which have kernels of their own.
    """
    if not widths or any(width < 16 or width % 16 for width in widths):
        raise QFrameworkError(f"widths must be positive multiples of 16, got {list(widths)}")
    if not rows or any(m <= MAX_FEW_ROWS for m in rows):
        raise QFrameworkError(f"rows must be more than {MAX_FEW_ROWS}, which other kernels compute, got {list(rows)}")
    found = [
        TileProblem(m, wide * width, deep * width, epilogue)
        for width, m, ((wide, deep), epilogues) in itertools.product(widths, rows, _LINEARS.items())
        for epilogue in epilogues
    ]
    order: list[Epilogue] = ["float", "int8", "activation", "residual", "activation_float"]
    return sorted(dict.fromkeys(found), key=lambda problem: order.index(problem.epilogue))


def tune_tiles(
    problems: Sequence[TileProblem],
    device: torch.device,
    chip: Chip,
    path: Path,
    seconds: float,
    advance: Callable[[TileTimes | None], None] = lambda _: None,
) -> list[MeasuredTile]:
    """Measure until all problems are done or the time is over; the file holds all that is measured so far.

    Args:
        problems: shapes and epilogues, the most important first.
        device: the GPU.
        chip: what it is.
        path: the file. Entries of other problems, of an earlier run on this chip, stay; a broken file is replaced.
        seconds: no problem begins after this time. The first one is always measured.
        advance: called after each problem with its times; None if no candidate ran.

    Returns:
        What was measured now.
    """
    kept = {each[:4]: each for each in _earlier(path, chip)}
    found: list[MeasuredTile] = []
    end = time.monotonic() + seconds
    for problem in problems:
        if found and time.monotonic() > end:
            break
        times = measure_tiles(problem, device, chip)
        if times is not None:
            found.append(times.best())
            kept[found[-1][:4]] = found[-1]
            save_tiles(path, chip, _versions(), _now(), list(kept.values()))
        advance(times)
    return found


def _earlier(path: Path, chip: Chip) -> list[MeasuredTile]:
    try:
        return read_tiles(path, chip)
    except (QFrameworkError, OSError):
        return []


def _versions() -> dict[str, str]:
    return {name: installed_version(name) or "unknown" for name in _VERSIONS}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@torch.no_grad()
def measure_tiles(problem: TileProblem, device: torch.device, chip: Chip) -> TileTimes | None:
    """Times of all candidates that compile, fit the chip and are right; None if the choice without them is not."""
    before = choose_tile(*problem[:3], chip.capability, chip.multiprocessors, problem.epilogue)
    assert not isinstance(before, FewRowsTile)  # tile_problems refuses few rows
    tiles = list(dict.fromkeys([before, *candidates(chip.capability, problem.m)]))
    operands = make_operands(problem, device)
    compile_tiles(operands, tiles, device)
    exact = int8_linear_ref_in_chunks(operands)
    usable = [tile for tile in tiles if is_usable(operands, tile, exact)]
    if before not in usable:
        return None
    copies = cold_copies(operands, device)
    times = {tile: microseconds(copies, tile) for tile in usable}
    close = [tile for tile in usable if times[tile] < 1.1 * min(times.values()) or tile == before]
    for tile in close:  # once more, in turn: the clock may have changed
        times[tile] = min(times[tile], microseconds(copies, tile))
    return TileTimes(problem, before, times)


def make_operands(problem: TileProblem, device: torch.device) -> Int8LinearArguments:
    """Random operands; the activation has a scale per token for 16-bit results without a residual."""
    m, n, k, epilogue = problem
    draw = torch.Generator(device).manual_seed(0)
    a, b = (torch.randint(-127, 128, s, dtype=torch.int8, device=device, generator=draw) for s in ((m, k), (n, k)))
    a_scale = torch.rand((m, 1) if epilogue.endswith("float") else (1,), device=device, generator=draw) + 0.5
    b_scale = (torch.rand(n, device=device, generator=draw) + 0.5) / (73 * 73 * k**0.5)
    bias = torch.randn(n, device=device, generator=draw).half()
    residual = torch.randn(m, n, device=device, generator=draw).half() if epilogue == "residual" else None
    narrow = epilogue in ("int8", "activation")
    out_scale = torch.full((1,), 0.03, device=device) if narrow else None
    activation = "gelu" if epilogue.startswith("activation") else "none"
    out_dtype = None if narrow else torch.float16
    return Int8LinearArguments(a, a_scale, b, b_scale, bias, activation, residual, out_scale, out_dtype)


def int8_linear_ref_in_chunks(x: Int8LinearArguments) -> Tensor:
    """The reference, a few thousand rows at a time, since it computes in float64."""
    parts = []
    for start in range(0, len(x.a), _CHUNK):
        rows = slice(start, start + _CHUNK)
        a_scale = x.a_scale[rows] if x.a_scale.numel() > 1 else x.a_scale
        residual = None if x.residual is None else x.residual[rows]
        parts.append(int8_linear_ref(x._replace(a=x.a[rows], a_scale=a_scale, residual=residual)))
    return torch.cat(parts)


def is_right(out: Tensor, exact: Tensor) -> bool:
    """Whether INT8 is off by at most one step on few elements, or float16 by one unit in the last place."""
    off = (out.float() - exact.float()).abs()
    if out.dtype == torch.int8:
        return bool(off.max() <= 1) and float((off > 0).float().mean()) < 1e-3
    exact = exact.float().abs()
    return bool((off <= 2.0**-10 * exact + 1e-5 * exact.max()).all())


def compile_tiles(operands: Int8LinearArguments, tiles: Sequence[Tile], device: torch.device) -> None:
    """Compile all tiles in parallel. A tile that fails here fails again where it is launched."""
    workers = min(len(tiles), os.cpu_count() or 1)
    with ThreadPoolExecutor(workers, "qframework-tiles") as pool, compile_in(pool):
        for kernel in [kernel for tile in tiles for kernel in _attempted(operands, tile, device)]:
            try:
                finished(kernel)
            except Exception:  # noqa: BLE001 (any failure of a compiler; the launch raises it again)
                continue


def _attempted(operands: Int8LinearArguments, tile: Tile, device: torch.device) -> Iterator[object]:
    try:
        yield from warm_up_tile(device, operands, tile)
    except Exception:  # noqa: BLE001 (as above)
        return


def is_usable(operands: Int8LinearArguments, tile: Tile, exact: Tensor) -> bool:
    """Whether the chip runs the tile, and its result is that of the reference."""
    out = operands.empty_result()
    try:
        write_result(operands, out, tile)
    except Exception:  # noqa: BLE001 (needs more than the chip has, or does not compile: of any type)
        return False
    return is_right(out, exact)


def cold_copies(operands: Int8LinearArguments, device: torch.device) -> list[Int8LinearArguments]:
    """The operands with so many copies of the weight that each call finds its own outside of the L2 cache."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    count = min(_MOST_COPIES, max(2, 1 + 2 * cache // operands.b.numel()))
    return [operands, *(operands._replace(b=operands.b.clone()) for _ in range(count - 1))]


def microseconds(copies: Sequence[Int8LinearArguments], tile: Tile) -> float:
    """Median time of a call."""
    out = copies[0].empty_result()
    return graph_microseconds([functools.partial(write_result, operands, out, tile) for operands in copies])


def graph_microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of one of ``calls``, which take turns in one CUDA graph."""

    def call_all(rounds: int) -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    call_all(1)
    once_ms = _elapsed_ms(lambda: call_all(1))
    rounds = max(1, min(16, int(_GRAPH_MS / max(once_ms, 1e-3))))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()  # unlike torch.cuda.graph, does not collect garbage, which takes longer than the calls
        try:
            call_all(rounds)
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    graph.replay()
    took = statistics.median(_elapsed_ms(graph.replay) for _ in range(_REPLAYS))
    return 1e3 * took / (rounds * len(calls))


def _elapsed_ms(fn: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    fn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
