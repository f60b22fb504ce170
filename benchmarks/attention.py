"""Attention: every variant of qframework, PyTorch's SDPA backends and SageAttention, at the shapes of models.

Measures whole calls (smoothing, quantization and kernel), and in records with another ``op``, quantization and kernel
alone. ``tflops`` counts 4 B H N N D operations, or half of them if causal. ``error`` is the relative L2 error against
float32 attention (of the INT8 operands for INT8 inputs), ``relative_l1`` that against attention of the float operands.

Every provider runs in its own process with two deadlines: to compile and check all shapes, several providers at a
time, and to be timed, alone on the GPU. ``sageattention`` (1.0.6, Triton) is measured if it is installed.

A long measurement can be split: ``--providers`` and ``--shapes`` select a part, and ``--merge`` adds it to
``--output``.
"""

from __future__ import annotations

import argparse
import functools
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.attention_cases import PROVIDERS, Case, Shape, make_inputs, parts_of, relative_l1
from benchmarks.boxed import Phase, add_limits, limits_of, one_provider_each, run_plans
from benchmarks.harness import (
    BROKEN,
    Record,
    Results,
    UnavailableError,
    add_device,
    argument_parser,
    comma_separated,
    guarded,
    require_same_code,
)
from benchmarks.timing import peak_mb, time_provider
from qframework.errors import UnsupportedError

SHAPES = (
    Shape(64, 12, 197, 64), Shape(512, 12, 197, 64), Shape(512, 16, 197, 64),
    Shape(128, 16, 577, 64), Shape(128, 16, 785, 64), Shape(1, 16, 4096, 80),
    Shape(4, 32, 1024, 64), Shape(4, 32, 4096, 64), Shape(4, 32, 16384, 64),
    Shape(4, 32, 1024, 128), Shape(4, 32, 4096, 128), Shape(4, 32, 8192, 128), Shape(4, 32, 16384, 128),
    Shape(4, 32, 8192, 128, causal=True),
)  # fmt: skip
SMOKE_SHAPES = (Shape(2, 2, 37, 16), Shape(1, 2, 65, 24, causal=True))
REP_MS = 60.0


@dataclass(frozen=True)
class Plan:
    """What a worker measures, and the seed of its inputs."""

    providers: tuple[str, ...]
    shapes: tuple[Shape, ...]
    device: str
    seed: int
    parts: bool = True  # also quantization and kernel alone


# The worker ---------------------------------------------------------------------------------------------------------


class Measurement:
    """A worker: checks its providers at all shapes, then times those that passed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.checked: dict[tuple[str, Shape], Record] = {}

    def __call__(self, phase: Phase) -> Iterator[Record]:
        """Time whole calls at every shape before their parts, which compile other kernels."""
        if phase == "check":
            yield from self._each(self._check_and_keep)
            return
        yield from self._each(self.time)
        if self.plan.parts:
            yield from self._each(self.time_parts)

    def _each(self, measure: Callable[[str, Shape], Iterable[Record]]) -> Iterator[Record]:
        for shape in self.plan.shapes:
            for name in self.plan.providers:
                yield from measure(name, shape)
            _free(self.plan.device)

    def _check_and_keep(self, name: str, shape: Shape) -> Iterator[Record]:
        self.checked[name, shape] = self.check(name, shape)
        yield self.checked[name, shape]

    def _is_right(self, name: str, shape: Shape) -> bool:
        return self.checked[name, shape].status == "ok"

    def check(self, name: str, shape: Shape) -> Record:
        identity = identify(name, shape)
        return guarded(identity, functools.partial(self._check, name, shape, identity))

    @torch.no_grad()
    def _check(self, name: str, shape: Shape, identity: Record) -> Record:
        start = time.perf_counter()
        case, oracle = self._case(name, shape)
        with _refusals():
            out = case.fn()
        _synchronize(self.plan.device)
        first_call_s = time.perf_counter() - start
        error = case.check(out)
        return replace(
            identity,
            dtype=case.dtype,
            error=error,
            relative_l1=relative_l1(case.to_real(out), oracle()),
            first_call_s=first_call_s,
        )

    def time(self, name: str, shape: Shape) -> Iterator[Record]:
        checked = self.checked[name, shape]
        if self._is_right(name, shape):
            yield guarded(checked, functools.partial(self._time, name, shape, checked))

    @torch.no_grad()
    def _time(self, name: str, shape: Shape, checked: Record) -> Record:
        case, _ = self._case(name, shape)
        timing = time_provider(case.fn, self.plan.device, rep_ms=REP_MS)
        return replace(
            checked,
            **timing.fields(),
            tflops=shape.operations / timing.median_s / 1e12,
            peak_mb=peak_mb(case.fn, self.plan.device),
        )

    def time_parts(self, name: str, shape: Shape) -> Iterator[Record]:
        """Time quantization and kernel alone, for providers that have both."""
        if not self._is_right(name, shape):
            return
        given = make_inputs(shape, self.plan.device, self.plan.seed)
        for op, fn in parts_of(given, name).items():
            timing = time_provider(fn, self.plan.device, rep_ms=REP_MS / 2)
            tflops = shape.operations / timing.median_s / 1e12 if op == "attention_kernel" else None
            yield replace(identify(name, shape), op=op, **timing.fields(), tflops=tflops)

    def _case(self, name: str, shape: Shape) -> tuple[Case, Callable[[], torch.Tensor]]:
        given = make_inputs(shape, self.plan.device, self.plan.seed)
        with _refusals():
            return PROVIDERS[name](given), lambda: given.oracle


class _refusals:
    """Turns UnsupportedError, a refusal by qframework, into UnavailableError."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, UnsupportedError):
            raise UnavailableError(str(error)) from error


def identify(name: str, shape: Shape) -> Record:
    return Record(benchmark="attention", op="attention", shape=shape.sizes, causal=shape.causal or None, provider=name)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _free(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()


# The parent ---------------------------------------------------------------------------------------------------------


def identities(plan: Plan) -> list[Record]:
    """The records of whole calls that ``plan`` must produce."""
    return [identify(name, shape) for shape in plan.shapes for name in plan.providers]


def merge_runs(old: Results, new: Results) -> None:
    """Add the records of ``old`` to ``new``; for duplicates the newer one stays, unless only the older has a time.

    Raises FileFormatError as ``require_same_code``.
    """
    require_same_code(old, new)
    best = {record.key: record for record in old.records}
    for record in new.records:
        before = best.get(record.key)
        if before is None or before.p50_ms is None or record.p50_ms is not None or record.status in BROKEN:
            best[record.key] = record
    order = {name: place for place, name in enumerate(PROVIDERS)}
    new.note = old.note
    new.records = sorted(best.values(), key=lambda record: (record.op != "attention", order.get(record.provider, -1)))


# Command line -------------------------------------------------------------------------------------------------------


_BY_NAME = {shape.name: shape for shape in (*SHAPES, *SMOKE_SHAPES)}


def _parser() -> argparse.ArgumentParser:
    parser = argument_parser("attention", __doc__)
    parser.add_argument("--providers", type=comma_separated(PROVIDERS), default=list(PROVIDERS))
    parser.add_argument("--shapes", type=comma_separated(_BY_NAME), help=f"of {', '.join(_BY_NAME)} (default: all)")
    parser.add_argument(
        "--parts", action=argparse.BooleanOptionalAction, default=True, help="also time quantization and kernel alone"
    )
    parser.add_argument(
        "--merge", action="store_true", help="merge with the records in --output, of the same code and machine"
    )
    add_device(parser)
    add_limits(parser, jobs=6, check=100.0, time=20.0, total=230.0)
    parser.add_argument("--seed", type=int, help="of the inputs (default: random, printed)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every provider at every shape; returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.merge and arguments.output is None:
        parser.error("--merge adds to the file that --output names")
    if arguments.merge and arguments.add_run:
        parser.error("--merge completes a run and --add-run makes another: give one of them")
    limits = limits_of(arguments)
    seed = arguments.seed if arguments.seed is not None else secrets.randbelow(2**31)
    print(f"seed {seed}")
    small = arguments.smoke or arguments.device == "cpu"
    shapes = tuple(_BY_NAME[name] for name in arguments.shapes or ()) or (SMOKE_SHAPES if small else SHAPES)
    plan = Plan(tuple(arguments.providers), shapes, arguments.device, seed, arguments.parts)
    results = Results.start("attention", arguments.device, arguments)
    whole = results.path
    old = Results.load(whole) if arguments.merge and whole and whole.exists() else None
    if old is not None and whole is not None:
        merge_runs(old, replace(results))  # refuse before measuring
        results.path = whole.with_suffix(".new.json")  # keeps the old file intact until the end
    run_plans(results, Measurement, one_provider_each(plan, small), identities, limits, arguments.jobs)
    exit_code = results.exit_code
    if old is not None and results.path is not None:
        partial, results.path = results.path, whole
        merge_runs(old, results)
        results.write()
        partial.unlink(missing_ok=True)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
