"""Operators between INT8 blocks against PyTorch in FP16, eager and compiled (Jetfire, figure 7).

``gbps`` counts each tensor that must be read or written once, in the provider's own format, without small vectors,
scales, masks and second passes. ``percent_of_peak`` is relative to copying a gigabyte on the same chip in the same run.
Calls are timed one by one, with the L2 cache flushed before each and the GPU asleep until they are launched.
``layer_norm`` and ``rms_norm`` use the row statistics of the addition before them, whose cost is in
``add_statistics``; ``layer_norm_alone`` computes its own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.block_operators_cases import OPERATORS, PROVIDERS, Shape, operands, provider_of
from benchmarks.harness import Record, Results, add_device, argument_parser, comma_separated, shapes_of
from benchmarks.timing import time_kernel
from qframework.kernels.blocks.format import BLOCK_SIZES, block_size_name, parse_block_size

TOKENS = 8192
SHAPES: tuple[Shape, ...] = tuple((TOKENS, hidden) for hidden in (1024, 2048, 4096, 8192))
SMOKE_SHAPES: tuple[Shape, ...] = ((70, 96),)
COPIED_BYTES = 2**30
REP_MS = 40.0


def identify(name: str, direction: str, shape: Shape, provider: str) -> Record:
    return Record(benchmark="block_operators", op=f"{name} {direction}", shape=list(shape), provider=provider)


def bytes_moved(name: str, direction: str, shape: Shape, provider: str) -> int:
    """The bytes that must be read and written."""
    tensors = OPERATORS[name].moved[direction == "backward"]
    return tensors * shape[0] * shape[1] * (1 if provider.startswith("qframework") else 2)


def measure(
    name: str, direction: str, shape: Shape, provider: str, device: str, peak: float | None, rep_ms: float
) -> Record:
    """One row; raises the errors that Results.attempt turns into a row."""
    case = PROVIDERS[provider](name, direction, operands(shape, device))
    error = case.check(case.fn())
    timing = time_kernel(case.fn, device, rep_ms=rep_ms)
    gbps = bytes_moved(name, direction, shape, provider) / timing.median_s / 1e9
    record = replace(identify(name, direction, shape, provider), dtype=case.dtype, error=error, **timing.fields())
    return replace(record, gbps=gbps, percent_of_peak=100 * gbps / peak if peak else None)


def copy_gbps(device: str) -> float:
    """GB/s read and written by copying a gigabyte."""
    source = torch.empty(COPIED_BYTES, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / time_kernel(lambda: target.copy_(source), device, rep_ms=REP_MS).median_s / 1e9


def run(results: Results, providers: Sequence[str], names: Sequence[str], shapes: Sequence[Shape], device: str) -> None:
    """Measure all providers of each operator in turn, so that compared measurements are close in time."""
    if device == "cuda":
        results.peaks = {"GB/s": copy_gbps(device)}
    peak, rep_ms = results.peaks.get("GB/s"), 1.0 if results.smoke else REP_MS
    for shape in shapes:
        for name in names:
            for direction in ("forward", "backward"):
                if direction == "backward" and OPERATORS[name].backward is None:
                    continue
                for provider in providers:
                    timed = functools.partial(measure, name, direction, shape, provider, device, peak, rep_ms)
                    results.attempt(identify(name, direction, shape, provider), timed)
                torch._dynamo.reset()
        operands.cache_clear()


def speedups(records: Sequence[Record]) -> list[str]:
    """Lines with the speedup of each of our providers over PyTorch's FP16, eager and compiled."""
    times = {(record.op, tuple(record.shape or ()), record.provider): record.p50_ms for record in records}
    lines = []
    for (op, shape, provider), took in times.items():
        if not provider.startswith("qframework") or not took:
            continue
        rivals = {rival: times.get((op, shape, rival)) for rival in ("torch_fp16", "inductor_fp16")}
        ratios = ", ".join(f"{other / took:.2f} {rival}" for rival, other in rivals.items() if other)
        if ratios:
            lines.append(f"{op:<26} {','.join(map(str, shape)):<12} {provider:<18} {ratios}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every provider of every operator at every shape; returns the exit status."""
    parser = argument_parser("block_operators", __doc__)
    parser.add_argument(
        "--shapes", type=shapes_of("TOKENS,HIDDEN"), help='"TOKENS,HIDDEN ..." (default: 8192 by 1024 to 8192)'
    )
    parser.add_argument("--operators", type=comma_separated(OPERATORS), default=list(OPERATORS))
    parser.add_argument("--providers", type=comma_separated(PROVIDERS), help=f"of {', '.join(PROVIDERS)}")
    sizes = ", ".join(map(block_size_name, BLOCK_SIZES))
    parser.add_argument(
        "--block-size", nargs="+", type=parse_block_size, help=f"of our providers: {sizes} (default: all)"
    )
    add_device(parser)
    arguments = parser.parse_args(argv)
    # On a CPU, where the operators are references, Inductor would compile C++ for minutes for a useless comparison.
    known = [name for name in PROVIDERS if arguments.device == "cuda" or name != "inductor_fp16"]
    providers = arguments.providers or known
    if arguments.block_size:
        wanted = {provider_of(size) for size in arguments.block_size}
        providers = [name for name in providers if name in wanted or not name.startswith("qframework")]
    shapes = arguments.shapes or (SMOKE_SHAPES if arguments.smoke or arguments.device == "cpu" else SHAPES)
    results = Results.start("block_operators", arguments.device, arguments)
    run(results, providers, arguments.operators, shapes, arguments.device)
    for line in speedups(results.records):
        print(line)
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
