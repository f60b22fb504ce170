"""INT8 linear against torch's own GEMMs, for the linears of vision transformers.

``error`` is the kernel's error against FP64 on its own operands, ``quantization_error`` the error of the format against
the float product. ``torch_int_mm`` returns raw INT32 without scale and bias. FP8 has tensor-wise scales, with and
without bias, and keeps the sum in the tensor cores or (``precise``) does not.

Every provider runs in its own process: several are checked at all shapes in parallel, then each is timed alone. Shapes
of at most ``SMALL_M`` rows take microseconds, so for every provider they are timed as calls replayed in one CUDA graph,
which excludes launch overhead; their operands stay in the L2 cache. Larger shapes are timed call by call, with the L2
cache flushed before each call and the GPU asleep until it is launched.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.boxed import Limits, Phase, add_limits, limits_of, one_provider_each, run_plans
from benchmarks.harness import (
    Record,
    Results,
    add_device,
    argument_parser,
    comma_separated,
    guarded,
    relative_error,
    shapes_of,
)
from benchmarks.int8_linear_cases import FP8_TENSORWISE, OPTIONAL, PROVIDERS, Shape, check_output, operands, setup
from benchmarks.timing import time_in_graph, time_kernel


def linears(width: int) -> tuple[tuple[int, int], ...]:
    """(N, K) of a transformer block's qkv, proj, fc1 and fc2."""
    return (3 * width, width), (width, width), (4 * width, width), (width, 4 * width)


# Tokens and widths of ViT-B and ViT-L on 64 and 256 images of 197 tokens, and of SAM-H on 8 of 4096; and of ViT-B on 1
# and 8.
LARGE = ((12608, 768), (50432, 768), (12608, 1024), (50432, 1024), (32768, 1280))
SMALL = ((197, 768), (1576, 768))
LARGE_SHAPES: tuple[Shape, ...] = tuple((m, n, k) for m, width in LARGE for n, k in linears(width))
SMALL_SHAPES: tuple[Shape, ...] = tuple((m, n, k) for m, width in SMALL for n, k in linears(width))
# The best GEMM of torch at this size is the practical peak of the chip.
PEAK_SHAPE: Shape = (8192, 8192, 8192)
SHAPES = (*SMALL_SHAPES, *LARGE_SHAPES, PEAK_SHAPE)
SMOKE_SHAPES: tuple[Shape, ...] = ((32, 48, 64), (233, 64, 128))
PEAK_PROVIDERS = {
    "8-bit": ("torch_int_mm", *FP8_TENSORWISE),
    "16-bit": ("torch_bf16", "torch_fp16"),
    "32-bit": ("torch_fp32",),
}
SMALL_M = 2048
REP_MS = 60.0


def identify(shape: Shape, provider: str) -> Record:
    return Record(benchmark="int8_linear", op="int8_linear", shape=list(shape), provider=provider)


@torch.no_grad()
def check(shape: Shape, provider: str, device: str) -> Record:
    """The errors of one provider at one shape, or the reason why there are none."""

    def errors() -> Record:
        given, case = operands(shape, device), setup(shape, provider, device)
        out = case.fn()
        record = replace(identify(shape, provider), dtype=case.dtype, error=check_output(case, given, out))
        if case.to_real is None:
            return record
        return replace(record, quantization_error=relative_error(case.to_real(out[given.rows]), given.product))

    return guarded(identify(shape, provider), errors)


@torch.no_grad()
def measure(shape: Shape, provider: str, device: str, checked: Record) -> Record:
    """``checked`` with its time, or the reason why there is none."""

    def timed() -> Record:
        fn = setup(shape, provider, device).fn
        timing = (time_in_graph if shape[0] <= SMALL_M else time_kernel)(fn, device, rep_ms=REP_MS)
        tflops = 2 * shape[0] * shape[1] * shape[2] / timing.median_s / 1e12
        return replace(checked, **timing.fields(), tflops=tflops)

    return guarded(checked, timed)


@dataclass(frozen=True)
class Plan:
    """What a worker measures."""

    providers: tuple[str, ...]
    shapes: tuple[Shape, ...]
    device: str


class Measurement:
    """A worker: checks its providers at all shapes, then times those that passed."""

    identify, check, measure = staticmethod(identify), staticmethod(check), staticmethod(measure)
    forget_operands = staticmethod(operands.cache_clear)

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.checked: dict[tuple[str, Shape], Record] = {}

    def __call__(self, phase: Phase) -> Iterator[Record]:
        device = self.plan.device
        for shape in self.plan.shapes:
            for name in self.plan.providers:
                if phase == "check":
                    self.checked[name, shape] = self.check(shape, name, device)
                    yield self.checked[name, shape]
                elif self.checked[name, shape].status == "ok":
                    yield self.measure(shape, name, device, self.checked[name, shape])
        self.forget_operands()
        if device == "cuda":
            torch.cuda.empty_cache()

    @classmethod
    def identities(cls, plan: Plan) -> list[Record]:
        """The records that ``plan`` must produce."""
        return [cls.identify(shape, name) for shape in plan.shapes for name in plan.providers]


def run(
    results: Results, providers: Sequence[str], shapes: Sequence[Shape], device: str, limits: Limits, jobs: int
) -> None:
    """Measure ``providers`` at ``shapes`` and add their records, the percentages of the peak last."""
    first = len(results.records)
    plans = one_provider_each(Plan(tuple(providers), tuple(shapes), device), results.smoke or device == "cpu")
    run_plans(results, Measurement, plans, Measurement.identities, limits, jobs)
    results.peaks = peaks(results.records[first:]) or results.peaks
    results.records[first:] = [against_peak(record, results.peaks) for record in results.records[first:]]
    results.write()


def peaks(records: Sequence[Record]) -> dict[str, float]:
    """TFLOP/s of the best torch GEMM at PEAK_SHAPE by the width of its operands, as far as measured."""
    measured = [record for record in records if record.shape == list(PEAK_SHAPE) and record.tflops]
    best = {
        width: max((record.tflops or 0.0 for record in measured if record.provider in names), default=0.0)
        for width, names in PEAK_PROVIDERS.items()
    }
    return {width: peak for width, peak in best.items() if peak}


def against_peak(record: Record, peaks: dict[str, float]) -> Record:
    """``record`` with its percentage of the peak of its width; INT8 and FP8 share one."""
    peak = peaks.get(next((width for width, names in PEAK_PROVIDERS.items() if record.provider in names), "8-bit"))
    return replace(record, percent_of_peak=100 * record.tflops / peak) if peak and record.tflops else record


# Command line -------------------------------------------------------------------------------------------------------


def default_providers() -> list[str]:
    return [name for name in PROVIDERS if name not in OPTIONAL]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every provider at every shape; returns the exit status."""
    parser = argument_parser("int8_linear", __doc__)
    parser.add_argument("--shapes", type=shapes_of("M,N,K"), help='"M,N,K M,N,K ..." (default: those of ViT and SAM)')
    parser.add_argument(
        "--providers", type=comma_separated(PROVIDERS), default=default_providers(), help=f"of {', '.join(PROVIDERS)}"
    )
    add_device(parser)
    add_limits(parser, jobs=8, check=120.0, time=30.0, total=300.0)
    arguments = parser.parse_args(argv)
    default_shapes = SHAPES if arguments.device == "cuda" else SMALL_SHAPES
    shapes = arguments.shapes or (SMOKE_SHAPES if arguments.smoke else default_shapes)
    limits = limits_of(arguments)
    results = Results.start("int8_linear", arguments.device, arguments)
    run(results, arguments.providers, shapes, arguments.device, limits, arguments.jobs)
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
