"""Measure int8_linear's tiles on this GPU and write the table that ships with the package.

For every shape of the models below, every bucket of rows and every epilogue, all candidates are checked against
``torch._int_mm`` and timed as in ``benchmarks.int8_linear``. The fastest is written to
``qframework/kernels/linear/tiles_<chip>.json``. Run this on a chip without a table, or after a change of the kernel.
``--output`` saves all timings. Takes a few minutes on an H100.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import integers
from benchmarks.int8_linear import SMALL_M
from benchmarks.machine import describe_machine
from benchmarks.timing import time_in_graph, time_kernel
from qframework.kernels.linear.arguments import Int8LinearArguments
from qframework.kernels.linear.launch import write_result
from qframework.kernels.linear.reference import apply_activation
from qframework.kernels.linear.tiles import COOPERATIVE, PINGPONG, Epilogue, Tile
from qframework.kernels.runtime.chip import chip_of
from qframework.outputs import output_file

# Widths of ViT-B, ViT-L and SAM-H, and their rows: batch 1, 8, 64 and 256 of 197 tokens; 1 and 8 images of 4,096.
WIDTHS = {768: (197, 1576, 12608, 50432), 1024: (197, 1576, 12608, 50432), 1280: (4096, 32768)}
TABLES = Path(__file__).parent.parent / "qframework" / "kernels" / "linear"
REP_MS = 25.0


_BIG = Tile(128, 128, 128, 4, 3, programs=2, subtiles=4, tma=True, tma_store=True)
_SPECIALIZED = [
    *(PINGPONG._replace(group_m=group) for group in (1, 4, 8)),
    *(COOPERATIVE._replace(group_m=group) for group in (1, 4)),
    COOPERATIVE._replace(num_stages=3),  # leaves room for the residual
]
LARGE = [*_SPECIALIZED, _BIG, _BIG._replace(subtiles=2)]
SMALL = [  # the winners of a much larger sweep
    PINGPONG,
    PINGPONG._replace(group_m=8),
    PINGPONG._replace(block_n=64, num_stages=7),  # fits beside a 16-bit result
    PINGPONG._replace(block_n=64, block_k=256, num_stages=3),
    COOPERATIVE._replace(num_stages=3),
    _BIG._replace(programs=0, subtiles=2),
    *(Tile(64, 128, 128, 4, 4, programs=n, tma=True, tma_store=True) for n in (0, 2)),
    Tile(128, 64, 128, 4, 4, tma=True, tma_store=True),
    *(Tile(64, 64, 128, 4, stages, tma=True, tma_store=True) for stages in (4, 6)),
    *(Tile(64, 64, 256, 4, stages, tma=True, tma_store=True) for stages in (3, 6)),
    *(Tile(64, 32, 256, 4, stages, tma=True, tma_store=True) for stages in (4, 6)),
    Tile(64, 32, 256, 4, 3),
    *(Tile(64, n, 128, 4, 4) for n in (32, 128)),
]


@dataclass(frozen=True)
class Problem:
    """A shape and its epilogue."""

    m: int
    n: int
    k: int
    epilogue: Epilogue

    def candidates(self) -> list[Tile]:
        return LARGE if self.m >= 8192 else SMALL


def problems(chosen: Sequence[int] | None, widths: Sequence[int]) -> Iterator[Problem]:
    """The linears of models with these widths: all four in 16 and 8 bit, proj and fc2 with residual, fc1 with GELU.

    Yields all numbers of rows, or the chosen ones.
    """
    epilogues: dict[tuple[int, int], tuple[Epilogue, ...]] = {
        (3, 1): ("float", "int8"), (1, 1): ("float", "int8", "residual"),
        (4, 1): ("float", "int8", "activation", "activation_float"), (1, 4): ("float", "int8", "residual"),
    }  # fmt: skip
    for width in widths:
        for m, ((wide, deep), kinds) in itertools.product(WIDTHS[width], epilogues.items()):
            if chosen is not None and m not in chosen:
                continue
            yield from (Problem(m, wide * width, deep * width, kind) for kind in kinds)


def make_operands(problem: Problem) -> Int8LinearArguments:
    """Random operands; the activation has a scale per token for 16-bit results without a residual."""
    m, n, k, epilogue = problem.m, problem.n, problem.k, problem.epilogue
    a, b = (torch.randint(-127, 128, size, dtype=torch.int8, device="cuda") for size in ((m, k), (n, k)))
    a_scale = torch.rand((m, 1) if epilogue.endswith("float") else (1,), device="cuda") + 0.5
    b_scale = (torch.rand(n, device="cuda") + 0.5) / (73 * 73 * k**0.5)
    bias = torch.randn(n, device="cuda").half()
    residual = torch.randn(m, n, device="cuda").half() if epilogue == "residual" else None
    narrow = epilogue in ("int8", "activation")
    out_scale = torch.full((1,), 0.03, device="cuda") if narrow else None
    activation = "gelu" if epilogue.startswith("activation") else "none"
    out_dtype = None if narrow else torch.float16
    return Int8LinearArguments(a, a_scale, b, b_scale, bias, activation, residual, out_scale, out_dtype)


def expected(operands: Int8LinearArguments) -> Tensor:
    a, a_scale, b, b_scale, bias, activation, residual, out_scale, *_ = operands
    y = torch._int_mm(a, b.t()).float() * a_scale * b_scale
    y = apply_activation(y if bias is None else y + bias.float(), activation)
    y = y if residual is None else y + residual.float()
    return y if out_scale is None else (y / out_scale).round().clamp(-127, 127)


def is_right(out: Tensor, exact: Tensor) -> bool:
    """Whether INT8 is off by at most one step on few elements, or float16 by rounding."""
    off = (out.float() - exact).abs()
    if out.dtype == torch.int8:
        return bool(off.max() <= 1) and float((off > 0).float().mean()) < 1e-3
    return bool((off <= 2.0**-10 * exact.abs() + 1e-5 * exact.abs().max()).all())


def compile_candidate(job: tuple[Epilogue, Tile, bool]) -> str | None:
    """Compile into Triton's cache by launching on a small problem; returns the error, if any."""
    from triton.runtime.errors import OutOfResources

    epilogue, tile, even = job
    operands = make_operands(Problem(256, 512, 512 if even else 768, epilogue))
    try:
        write_result(operands, operands.empty_result(), tile)
    except (OutOfResources, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"[:200]
    return None


def measure(problem: Problem) -> list[dict[str, Any]]:
    """Every candidate's median in milliseconds, fastest first; prints wrong and impossible ones and leaves them out."""
    from triton.runtime.errors import OutOfResources

    operands = make_operands(problem)
    exact = expected(operands) if problem.m > 16 else None
    rows = []
    for tile in problem.candidates():
        out = operands.empty_result()
        try:
            write_result(operands, out, tile)
        except (OutOfResources, RuntimeError) as error:
            print(f"{problem} {tile}: {type(error).__name__}: {error}"[:200])
            continue
        if exact is not None and not is_right(out, exact):
            print(f"{problem} {tile}: WRONG")
            continue
        launch = functools.partial(write_result, operands, out, tile)
        timing = (time_in_graph if problem.m <= SMALL_M else time_kernel)(launch, "cuda", rep_ms=REP_MS)
        rows.append({"tile": tile._asdict(), "ms": round(1e3 * timing.median_s, 5)})
    return sorted(rows, key=lambda row: row["ms"])


def tune(found: Sequence[Problem], jobs: int) -> list[dict[str, Any]]:
    """The results of ``measure`` for all problems."""
    kernels = {(p.epilogue, tile, p.k % tile.block_k == 0) for p in found for tile in p.candidates()}
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_candidate, sorted(kernels)))
    results = []
    for problem in found:
        rows = measure(problem)
        if rows:
            best = rows[0]
            tops = 2e-9 * problem.m * problem.n * problem.k / best["ms"]
            print(f"{problem}: {tops:.0f} TOP/s, {1e3 * best['ms']:.1f} us, {Tile(**best['tile'])}", flush=True)
            results.append({**problem.__dict__, "candidates": rows})
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
    results = tune(list(problems(arguments.rows, arguments.widths or list(WIDTHS))), arguments.jobs)
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
