"""Linears of INT8 training against 16 bit, torchao's INT8 and FP8 training: forward and backward.

``error`` is against the FP64 products of the float operands: quantization included. TFLOP/s count 2 M N K for each of
the three products, whatever they are computed in. Every provider has a process of its own; all are checked before any
is timed, call by call, with the L2 cache flushed before each and the GPU asleep until all kernels are launched: what
the host needs is not counted. ``block_linear_*`` are kernels alone, the forward product, one line for each choice.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.block_linear_cases import PROVIDERS, operands, setup
from benchmarks.boxed import Limits, Phase, check_then_time
from benchmarks.harness import Record, Results, argument_parser, comma_separated, guarded
from benchmarks.int8_linear import parse_shapes
from benchmarks.int8_linear_cases import Shape
from benchmarks.timing import time_kernel

# Tokens, and the linears of a GPT block that are square and four times as wide.
SHAPES: tuple[Shape, ...] = tuple(
    (tokens, width * hidden, hidden) for tokens in (8192, 16384) for hidden in (1024, 2048, 4096) for width in (1, 4)
)
SMOKE_SHAPES: tuple[Shape, ...] = ((256, 96, 64), (200, 80, 144))
REP_MS = 60.0
SLEEP_CYCLES = 8_000_000  # about four milliseconds: what an eager forward and backward pass takes to launch, and more


@dataclass(frozen=True)
class Plan:
    """What a worker measures."""

    providers: tuple[str, ...]
    shapes: tuple[Shape, ...]
    device: str


class Measurement:
    """A process's side: checks its providers at all shapes, then times what was right."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.checked: dict[tuple[str, Shape], Record] = {}

    def __call__(self, phase: Phase) -> Iterator[Record]:
        for shape in self.plan.shapes:
            for name in self.plan.providers:
                if phase == "check":
                    self.checked[name, shape] = check(shape, name, self.plan.device)
                    yield self.checked[name, shape]
                elif self.checked[name, shape].status == "ok":
                    yield measure(shape, name, self.plan.device, self.checked[name, shape])
        operands.cache_clear()
        if self.plan.device == "cuda":
            torch.cuda.empty_cache()


def identify(shape: Shape, provider: str) -> Record:
    op = "block_linear" if provider.startswith("block_linear") else "linear_training"
    return Record(benchmark="block_linear", op=op, shape=list(shape), provider=provider)


def check(shape: Shape, provider: str, device: str) -> Record:
    """The error of one provider at one shape, or why there is none."""

    def error() -> Record:
        case = setup(shape, provider, device)
        return replace(identify(shape, provider), dtype=case.dtype, error=case.check(operands(shape, device)))

    return guarded(identify(shape, provider), error)


def measure(shape: Shape, provider: str, device: str, checked: Record) -> Record:
    """``checked`` with the time of one provider at one shape, or why there is none."""

    def timed() -> Record:
        case = setup(shape, provider, device)
        case.fn()  # compiles what a new layer compiles
        timing = time_kernel(case.fn, device, rep_ms=REP_MS, sleep_cycles=SLEEP_CYCLES)
        tflops = case.products * 2 * shape[0] * shape[1] * shape[2] / timing.median_s / 1e12
        return replace(checked, **timing.fields(), tflops=tflops)

    return guarded(checked, timed)


def run(
    results: Results, providers: Sequence[str], shapes: Sequence[Shape], device: str, limits: Limits, jobs: int
) -> None:
    """Measure ``providers`` at ``shapes`` and add their records."""
    # A smoke run shares one process among the providers: it asks whether they run, not how fast.
    groups = [tuple(providers)] if results.smoke or device == "cpu" else [(name,) for name in providers]
    for answers in check_then_time(Measurement, [Plan(group, tuple(shapes), device) for group in groups], limits, jobs):
        plan = answers.plan
        results.add(*answers.complete([identify(shape, name) for shape in plan.shapes for name in plan.providers]))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every provider at every shape; returns the exit status."""
    parser: argparse.ArgumentParser = argument_parser("block_linear", __doc__)
    parser.add_argument("--shapes", type=parse_shapes, help='"M,N,K M,N,K ..." (default: those of GPT blocks)')
    parser.add_argument(
        "--providers", type=comma_separated(PROVIDERS), default=list(PROVIDERS), help=f"of {', '.join(PROVIDERS)}"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, default=4, help="providers that compile and are checked at a time")
    parser.add_argument("--check-limit", type=float, default=180.0, help="seconds for one provider, all shapes")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for one provider, all shapes")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds for everything")
    arguments = parser.parse_args(argv)
    shapes = arguments.shapes or (SMOKE_SHAPES if arguments.smoke or arguments.device == "cpu" else SHAPES)
    limits = Limits(arguments.check_limit, arguments.time_limit, time.monotonic() + arguments.limit)
    results = Results.start("block_linear", arguments.device, arguments)
    run(results, arguments.providers, shapes, arguments.device, limits, arguments.jobs)
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
