"""One step of decoding: attention of 1 to 16 queries to an INT8 cache against PyTorch's kernels on an FP16 cache.

Shapes are ``B,H,Hkv,N,Nk,D``. Calls take turns on copies of the cache that together exceed the L2 cache, inside one
CUDA graph. ``gbps`` counts keys, values and scales once. ``error`` is the relative L2 error against FP64 attention of
the provider's own operands, ``quantization_error`` that against FP64 attention of the float operands. Shapes that are
held out had no part in choosing the kernel's plans.

``--models`` times whole steps of a Llama with random weights instead: milliseconds for each token in transformers' own
loop, and with the step in a CUDA graph, which leaves out the host.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.decode_cases import CHECKED, PROVIDERS, Inputs, Shape
from benchmarks.harness import (
    Record,
    Results,
    UnavailableError,
    add_device,
    argument_parser,
    comma_separated,
    relative_error,
    shapes_of,
)
from benchmarks.timing import time_in_turns

SHAPES = (
    Shape(1, 32, 8, 1, 4096, 128), Shape(1, 32, 8, 1, 16384, 128), Shape(1, 32, 8, 1, 65536, 128),
    Shape(1, 16, 2, 1, 16384, 128), Shape(1, 16, 2, 1, 65536, 64), Shape(1, 32, 32, 1, 4096, 128),
    Shape(4, 32, 8, 1, 4096, 64), Shape(4, 32, 8, 4, 16384, 128), Shape(4, 32, 8, 16, 16384, 128),
    Shape(4, 32, 32, 1, 4096, 64), Shape(16, 32, 8, 1, 4096, 128), Shape(16, 32, 8, 1, 16384, 128),
    Shape(16, 8, 1, 1, 4096, 256), Shape(64, 32, 8, 1, 4096, 128), Shape(64, 32, 8, 4, 4096, 64),
)  # fmt: skip
HELD_OUT = (
    Shape(1, 32, 8, 1, 5000, 128), Shape(1, 32, 8, 1, 30001, 64), Shape(3, 28, 4, 1, 30001, 128),
    Shape(7, 32, 8, 2, 5000, 80), Shape(16, 16, 2, 3, 5000, 64), Shape(1, 8, 1, 1, 30001, 256),
    Shape(2, 24, 8, 5, 12345, 96), Shape(1, 64, 8, 16, 30001, 128), Shape(24, 40, 10, 1, 5000, 128),
    Shape(1, 12, 12, 1, 30001, 72),
)  # fmt: skip
SMOKE_SHAPES = (Shape(2, 4, 2, 1, 300, 32), Shape(1, 8, 1, 3, 130, 40))
REP_MS = 40.0


def identify(shape: Shape, provider: str) -> Record:
    return Record(benchmark="decode", op="decode_attention", shape=shape.sizes, provider=provider)


@torch.no_grad()
def measure(given: Inputs, provider: str, device: str, rep_ms: float) -> Record:
    """One row; raises the errors that Results.attempt turns into a row."""
    try:
        case = PROVIDERS[provider](given)
        got = case.calls[0]()[:CHECKED]
    except RuntimeError as refusal:
        if any(text in str(refusal) for text in ("No available kernel", "No viable backend")):
            raise UnavailableError(str(refusal).splitlines()[0]) from refusal
        raise
    error = case.check(got)
    timing = time_in_turns(case.calls, device, rep_ms=rep_ms)
    return replace(
        identify(given.shape, provider),
        dtype=case.dtype,
        error=error,
        quantization_error=relative_error(got, given.oracle),
        gbps=case.bytes / timing.median_s / 1e9,
        **timing.fields(),
    )


def run(results: Results, shapes: Sequence[Shape], providers: Sequence[str], device: str, limit: float) -> None:
    """Measure the providers of each shape one after the other, until ``limit`` seconds have passed."""
    begun = time.monotonic()
    for shape in shapes:
        if time.monotonic() - begun > limit:
            print(f"stopped after {limit:g} s")
            return
        given = Inputs(shape, device)
        for provider in providers:
            timed = functools.partial(measure, given, provider, device, 1.0 if results.smoke else REP_MS)
            results.attempt(identify(shape, provider), timed)
            if device == "cuda":
                torch.cuda.empty_cache()


def speedups(records: Sequence[Record]) -> list[str]:
    """For each shape, PyTorch's fastest time divided by that of the INT8 cache."""
    lines = []
    for mine in records:
        if mine.provider != "qframework_int8" or not mine.p50_ms:
            continue
        case = mine.op, mine.shape, mine.model, mine.batch
        rivals = [r for r in records if (r.op, r.shape, r.model, r.batch) == case and r.dtype == "float16" and r.p50_ms]
        if rivals:
            best = min(rivals, key=lambda r: r.p50_ms or 0.0)
            held = "  held out" if mine.shape in [shape.sizes for shape in HELD_OUT] else ""
            lines.append(
                f"{mine.op:<16} {mine.subject:<24} {1e3 * mine.p50_ms:9.1f} us {mine.gbps or 0:6.0f} GB/s  "
                f"{(best.p50_ms or 0) / mine.p50_ms:5.2f} times {best.provider}{held}"
            )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every provider at every shape, or whole models; returns the exit status."""
    parser = argument_parser("decode", __doc__)
    parser.add_argument("--shapes", type=shapes_of("B,H,Hkv,N,Nk,D"), help='"B,H,Hkv,N,Nk,D ..."')
    parser.add_argument("--providers", type=comma_separated(PROVIDERS), default=list(PROVIDERS))
    parser.add_argument("--limit", type=float, default=1e9, help="start no shape or model after so many seconds")
    parser.add_argument("--models", action="store_true", help="time steps of a model instead")
    add_device(parser)
    arguments = parser.parse_args(argv)
    small = arguments.smoke or arguments.device == "cpu"
    results = Results.start("decode", arguments.device, arguments)
    if arguments.models:
        from benchmarks.decode_models import run_models

        run_models(results, arguments.device, small, arguments.limit)
        return results.exit_code
    shapes = [Shape(*sizes) for sizes in arguments.shapes] if arguments.shapes else (*SHAPES, *HELD_OUT)
    run(results, SMOKE_SHAPES if small else shapes, arguments.providers, arguments.device, arguments.limit)
    for line in speedups(results.records):
        print(line)
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
