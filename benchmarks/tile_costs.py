"""Measure linears of a few hundred rows on a Hopper GPU, and fit the costs of int8_linear's tiles (tile_costs.py).

For each width, number of rows and linear of a transformer, all tiles are compared with the reference and timed in CUDA
graphs with the weight outside of the L2 cache, and so is PyTorch's linear in float16. ``--fit`` reads the file again
and prints the costs, and how much longer the tile with the least estimate takes than the fastest. It needs no GPU.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.machine import describe_machine
from qframework.files import write_json
from qframework.kernels.linear.tile import FLAT_160, FLAT_192, PINGPONG, THIRDS, WIDE_160, WIDE_192, Epilogue, Tile
from qframework.kernels.linear.tile_costs import COSTS, TileCost, fastest_tile, half_terms, terms
from qframework.outputs import output_file
from qframework.tuning.kernel_tiles import (
    TileProblem,
    cold_copies,
    compile_tiles,
    graph_microseconds,
    int8_linear_ref_in_chunks,
    is_usable,
    make_operands,
    microseconds,
)

WIDTHS = (384, 768, 512, 1024, 192, 320, 1280, 2048)
ROWS = (197, 128, 392, 784, 1568, 3136, 1024, 2048)
LINEARS: Mapping[tuple[int, int], Epilogue] = {
    (3, 1): "float",
    (1, 1): "residual",
    (4, 1): "activation",
    (1, 4): "residual",
}
PROCESSORS = 132  # of the H100 whose results are fitted
_SHARED = 220 * 1024  # bytes of a program
TILES = [
    *COSTS,
    *(FLAT_160, FLAT_192, WIDE_160, WIDE_192, THIRDS),
    *(
        Tile(64, n, k, 4, stages, tma=True, tma_store=True)
        for n in (16, 32, 64, 128)
        for k, stages in ((128, 4), (128, 6), (256, 3), (256, 6))
        if (64 + n) * k * stages <= _SHARED
    ),
    *(Tile(64, n, 256, 4, 3) for n in (16, 32, 64)),
    PINGPONG._replace(block_n=64, block_k=256, num_stages=3),
    Tile(128, 64, 128, 4, 4, tma=True, tma_store=True),
    Tile(128, 128, 128, 4, 3, subtiles=2, tma=True, tma_store=True),
]


def problems() -> Iterator[TileProblem]:
    """All linears; the widths that come first are measured first."""
    for width, m, ((wide, deep), epilogue) in itertools.product(WIDTHS, ROWS, LINEARS.items()):
        yield TileProblem(m, wide * width, deep * width, epilogue)


@torch.no_grad()
def measure(problem: TileProblem, device: torch.device) -> dict[str, Any]:
    """Microseconds of each tile that is right, and of PyTorch's linear."""
    operands, tiles = make_operands(problem, device), list(dict.fromkeys(TILES))
    compile_tiles(operands, tiles, device)
    exact = int8_linear_ref_in_chunks(operands)
    copies = cold_copies(operands, device)
    times = {tile: microseconds(copies, tile) for tile in tiles if is_usable(operands, tile, exact)}
    return {
        **problem._asdict(),
        "fp16_us": round(half_microseconds(problem, len(copies), device), 3),
        "tiles": [{"tile": list(tile), "us": round(us, 3)} for tile, us in times.items()],
    }


def half_microseconds(problem: TileProblem, copies: int, device: torch.device) -> float:
    """Of PyTorch's linear in float16 with a bias; its weights are twice as long, so that half as many copies do."""
    m, n, k, _ = problem
    draw = functools.partial(torch.randn, dtype=torch.float16, device=device)
    x, bias, weights = draw(m, k), draw(n), [draw(n, k) for _ in range(copies // 2 + 1)]
    return graph_microseconds([functools.partial(F.linear, x, weight, bias) for weight in weights])


def fit(records: Sequence[Mapping[str, Any]], tile: Tile) -> TileCost:
    """The costs of a tile."""
    found = [(each, us) for each in records if (us := times_of(each).get(tile)) is not None]
    return TileCost(*least_squares([(terms(tile, *_shape(each), PROCESSORS), us) for each, us in found]))


def fit_half(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """The costs of PyTorch's linear in float16."""
    return least_squares([(half_terms(*_shape(each)), each["fp16_us"]) for each in records])


def _shape(record: Mapping[str, Any]) -> tuple[int, int, int]:
    return record["m"], record["n"], record["k"]


def least_squares(measured: Sequence[tuple[Sequence[float], float]]) -> list[float]:
    """The factors of terms, none below zero, whose sums have the least relative errors from the measured times."""
    a = torch.tensor([[x / us for x in terms] for terms, us in measured], dtype=torch.float64)
    places = range(a.shape[1])
    best, least = [0.0 for _ in places], math.inf
    for used in itertools.chain.from_iterable(
        itertools.combinations(places, size) for size in range(1, len(places) + 1)
    ):
        part = a[:, list(used)]
        x = torch.linalg.lstsq(part, torch.ones(len(a), 1, dtype=torch.float64)).solution[:, 0]
        error = float((part @ x - 1).square().sum())
        if (x >= 0).all() and error < least:
            best, least = [float(x[used.index(i)]) if i in used else 0.0 for i in places], error
    return best


def times_of(record: Mapping[str, Any]) -> dict[Tile, float]:
    """Microseconds by tile."""
    return {Tile(*each["tile"]): each["us"] for each in record["tiles"]}


def excess(record: Mapping[str, Any]) -> float:
    """The time of the chosen tile as a multiple of the fastest's."""
    times = times_of(record)
    return times[fastest_tile(record["m"], record["n"], record["k"], PROCESSORS)] / min(times.values())


def print_fit(records: Sequence[Mapping[str, Any]]) -> None:
    """The costs of each tile, and how good the choice is that those of the package make."""
    for tile in COSTS:
        print(tile, [round(x, 2) for x in fit(records, tile)])
    print("float16", [round(x, 3) for x in fit_half(records)])
    found = [excess(each) for each in records]
    print(f"chosen tile: {statistics.geometric_mean(found):.3f} times the fastest, {max(found):.2f} at most")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or fit; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tile_costs", description=__doc__)
    parser.add_argument("--fit", type=Path, metavar="FILE.json", help="print the costs that these times have")
    parser.add_argument("--output", type=output_file, metavar="FILE.json", help="where to write times")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which no linear is begun")
    arguments = parser.parse_args(argv)
    if arguments.fit is not None:
        print_fit(json.loads(arguments.fit.read_text())["records"])
        return 0
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device to measure; --fit reads a file")
    machine, end, records = describe_machine("cuda"), time.monotonic() + arguments.limit, []
    for problem in problems():
        if time.monotonic() > end:
            break
        records.append(measure(problem, torch.device("cuda", 0)))
        print(problem, f"float16 {records[-1]['fp16_us']} us, chosen tile {excess(records[-1]):.2f} of the fastest")
        if arguments.output is not None:
            write_json(arguments.output, {"what": "Linears in CUDA graphs, us", "machine": machine, "records": records})
    return 0


if __name__ == "__main__":
    sys.exit(main())
