"""Measure int8_linear's tiles on this GPU and write the table that ships with the package.

For every shape of the models below, every bucket of rows and every epilogue, all candidates are checked against the
reference and timed as in ``benchmarks.int8_linear``. The fastest is written to
``qframework/kernels/linear/tiles_<chip>.json``. Run this on a chip without a table, or after a change of the kernel.
``--output`` saves all timings. Takes a few minutes on an H100.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import integers
from benchmarks.int8_linear import SMALL_M
from benchmarks.machine import describe_machine
from benchmarks.timing import time_in_graph, time_kernel
from qframework.kernels.linear.launch import write_result
from qframework.kernels.linear.tile import Epilogue, Tile
from qframework.kernels.linear.tile_candidates import candidates
from qframework.kernels.runtime.chip import chip_of
from qframework.outputs import output_file
from qframework.tuning.kernel_tiles import (
    TileProblem,
    int8_linear_ref_in_chunks,
    is_right,
    make_operands,
    tile_problems,
)

# Widths of ViT-B, ViT-L and SAM-H, and their rows: batch 1, 8, 64 and 256 of 197 tokens; 1 and 8 images of 4,096.
WIDTHS = {768: (197, 1576, 12608, 50432), 1024: (197, 1576, 12608, 50432), 1280: (4096, 32768)}
TABLES = Path(__file__).parent.parent / "qframework" / "kernels" / "linear"
REP_MS = 25.0


def problems(chosen: Sequence[int] | None, widths: Sequence[int]) -> list[TileProblem]:
    """The linears of models with these widths at all their numbers of rows, or the chosen ones."""
    found = [(width, m) for width in widths for m in WIDTHS[width] if chosen is None or m in chosen]
    return [problem for width, m in found for problem in tile_problems([width], [m])]


def compile_candidate(job: tuple[Epilogue, Tile, bool]) -> str | None:
    """Compile into Triton's cache by launching on a small problem; returns the error, if any."""
    from triton.runtime.errors import OutOfResources

    epilogue, tile, even = job
    operands = make_operands(TileProblem(256, 512, 512 if even else 768, epilogue), torch.device("cuda"))
    try:
        write_result(operands, operands.empty_result(), tile)
    except (OutOfResources, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"[:200]
    return None


def measure(problem: TileProblem) -> list[dict[str, Any]]:
    """Every candidate's median in milliseconds, fastest first; prints wrong and impossible ones and leaves them out."""
    from triton.runtime.errors import OutOfResources

    chip = chip_of(torch.device("cuda", 0))[0]
    operands = make_operands(problem, torch.device("cuda"))
    exact = int8_linear_ref_in_chunks(operands)
    rows = []
    for tile in candidates(chip, problem.m):
        out = operands.empty_result()
        try:
            write_result(operands, out, tile)
        except (OutOfResources, RuntimeError) as error:
            print(f"{problem} {tile}: {type(error).__name__}: {error}"[:200])
            continue
        if not is_right(out, exact):
            print(f"{problem} {tile}: WRONG")
            continue
        launch = functools.partial(write_result, operands, out, tile)
        timing = (time_in_graph if problem.m <= SMALL_M else time_kernel)(launch, "cuda", rep_ms=REP_MS)
        rows.append({"tile": tile._asdict(), "ms": round(1e3 * timing.median_s, 5)})
    return sorted(rows, key=lambda row: row["ms"])


def tune(found: Sequence[TileProblem], jobs: int) -> list[dict[str, Any]]:
    """The results of ``measure`` for all problems."""
    chip = chip_of(torch.device("cuda", 0))[0]
    kernels = {(p.epilogue, tile, p.k % tile.block_k == 0) for p in found for tile in candidates(chip, p.m)}
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_candidate, sorted(kernels)))
    results = []
    for problem in found:
        rows = measure(problem)
        if rows:
            best = rows[0]
            tops = 2e-9 * problem.m * problem.n * problem.k / best["ms"]
            print(f"{problem}: {tops:.0f} TOP/s, {1e3 * best['ms']:.1f} us, {Tile(**best['tile'])}", flush=True)
            results.append({**problem._asdict(), "candidates": rows})
    return results


def table_of(results: Sequence[dict[str, Any]], old: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest tile of each bucket of rows, for its largest number of rows; other rows of ``old`` stay."""
    best = {(row["m"], row["n"], row["k"], row["epilogue"]): row for row in old}
    for row in sorted(results, key=lambda row: row["m"]):
        bucket = 1 << (row["m"] - 1).bit_length()
        key = (bucket, row["n"], row["k"], row["epilogue"])
        best[key] = dict(zip(("m", "n", "k", "epilogue"), key, strict=True)) | {"tile": row["candidates"][0]["tile"]}
    return [best[key] for key in sorted(best)]


def main(argv: Sequence[str] | None = None) -> int:
    """Tune, and write the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune_int8_linear", description=__doc__)
    parser.add_argument("--jobs", type=int, default=8, help="number of compiling processes")
    parser.add_argument("--output", type=output_file, help="save all timings as JSON")
    parser.add_argument("--rows", type=integers, help="tune only these numbers of rows")
    parser.add_argument("--widths", type=integers, help=f"tune only these widths, of {', '.join(map(str, WIDTHS))}")
    parser.add_argument("--table", type=output_file, help="the table (default: where the package looks for it)")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device to tune for")
    major, minor = chip_of(torch.device("cuda", 0))[0]
    machine = describe_machine("cuda")
    results = tune(problems(arguments.rows, arguments.widths or list(WIDTHS)), arguments.jobs)
    table = arguments.table or TABLES / f"tiles_sm_{major}{minor}.json"
    table.parent.mkdir(exist_ok=True)
    partial = arguments.rows or arguments.widths
    old = json.loads(table.read_text())["tiles"] if partial and table.exists() else []
    rows = ",\n".join(json.dumps(row) for row in table_of(results, old))
    head = json.dumps({key: machine[key] for key in ("device", "torch", "triton", "date") if key in machine})
    table.write_text(f'{{"measured": {head}, "tiles": [\n{rows}\n]}}\n')
    print(f"{len(results)} shapes, table in {table}")
    if arguments.output is not None:
        arguments.output.write_text(json.dumps({"machine": machine, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
