"""Linears of INT8 training against 16 bit, and torchao's INT8 and FP8 training: forward and backward.

``error`` is relative to the FP64 products of the float operands, so it includes quantization. TFLOP/s count 2 M N K for
each of the three products. Every provider runs in its own process, and all are checked before any is timed. Each call
is timed alone, with the L2 cache flushed before it and the GPU asleep until all kernels are launched, which excludes
host time. ``block_linear_*`` are kernels of the forward product alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks import int8_linear
from benchmarks.block_linear_cases import PROVIDERS, operands, setup
from benchmarks.boxed import add_limits, limits_of, one_provider_each, run_plans
from benchmarks.harness import Record, Results, add_device, argument_parser, comma_separated, guarded, shapes_of
from benchmarks.int8_linear import Plan
from benchmarks.int8_linear_cases import Shape
from benchmarks.timing import time_kernel

# Tokens, and the linears of a GPT block that are square and four times as wide.
SHAPES: tuple[Shape, ...] = tuple(
    (tokens, width * hidden, hidden) for tokens in (8192, 16384) for hidden in (1024, 2048, 4096) for width in (1, 4)
)
SMOKE_SHAPES: tuple[Shape, ...] = ((256, 96, 64), (200, 80, 144))
REP_MS = 60.0
SLEEP_CYCLES = 8_000_000  # about four milliseconds, more than the launches of an eager forward and backward pass take


def identify(shape: Shape, provider: str) -> Record:
    op = "block_linear" if provider.startswith("block_linear") else "linear_training"
    return Record(benchmark="block_linear", op=op, shape=list(shape), provider=provider)


def check(shape: Shape, provider: str, device: str) -> Record:
    """The error of one provider at one shape, or the reason why there is none."""

    def error() -> Record:
        case = setup(shape, provider, device)
        return replace(identify(shape, provider), dtype=case.dtype, error=case.check(operands(shape, device)))

    return guarded(identify(shape, provider), error)


def measure(shape: Shape, provider: str, device: str, checked: Record) -> Record:
    """``checked`` with its time, or the reason why there is none."""

    def timed() -> Record:
        case = setup(shape, provider, device)
        case.fn()  # compiles
        timing = time_kernel(case.fn, device, rep_ms=REP_MS, sleep_cycles=SLEEP_CYCLES)
        tflops = case.products * 2 * shape[0] * shape[1] * shape[2] / timing.median_s / 1e12
        return replace(checked, **timing.fields(), tflops=tflops)

    return guarded(checked, timed)


class Measurement(int8_linear.Measurement):
    """A worker for linears of INT8 training."""

    identify, check, measure = staticmethod(identify), staticmethod(check), staticmethod(measure)
    forget_operands = staticmethod(operands.cache_clear)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every provider at every shape; returns the exit status."""
    parser = argument_parser("block_linear", __doc__)
    parser.add_argument("--shapes", type=shapes_of("M,N,K"), help='"M,N,K M,N,K ..." (default: those of GPT blocks)')
    parser.add_argument(
        "--providers", type=comma_separated(PROVIDERS), default=list(PROVIDERS), help=f"of {', '.join(PROVIDERS)}"
    )
    add_device(parser)
    add_limits(parser, jobs=4, check=180.0, time=60.0, total=420.0)
    arguments = parser.parse_args(argv)
    small = arguments.smoke or arguments.device == "cpu"
    shapes = tuple(arguments.shapes or (SMOKE_SHAPES if small else SHAPES))
    plans = one_provider_each(Plan(tuple(arguments.providers), shapes, arguments.device), small)
    limits = limits_of(arguments)
    results = Results.start("block_linear", arguments.device, arguments)
    run_plans(results, Measurement, plans, Measurement.identities, limits, arguments.jobs)
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
