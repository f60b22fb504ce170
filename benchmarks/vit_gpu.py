"""Vision transformers on a GPU: throughput at a large batch and latency at batch 1, whole model, inference mode.

Every provider runs at every batch in its own process, so that memory, compiled code and crashes do not affect others.
It has two deadlines: to prepare, compile and be checked against FP32 eager, ``--jobs`` at a time (max-autotune, which
times kernels to choose between them, alone), and to be timed, alone on the GPU. Weights and images are random and
seeded. The file is rewritten after every provider.

``--first-call`` instead measures the time of preparation, and of ``torch.compile`` with the first call, for one
provider at a time with empty compilation caches.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import models
from benchmarks.boxed import Answers, Limits, Phase, Worker, add_limits, limits_of, run_plans
from benchmarks.harness import Record, Results, argument_parser, comma_separated, guarded, integers
from benchmarks.models import Forward, Inputs
from benchmarks.timing import peak_mb, time_provider
from benchmarks.vit_gpu_cases import PROVIDERS, Provider, Subject, inference, prepare
from qframework.errors import QFrameworkError

MODELS = ("vit_base_patch16_224", "vit_large_patch16_224")
BATCHES, SMOKE_BATCHES = (256, 1), (2, 1)
FIRST_CALL_PROVIDERS = ("fp16_compiled", "qframework_static", "qframework_dynamic")
MIN_RUNS, REP_MS, SMOKE_REP_MS = 10, 500.0, 10.0

Case = tuple[str, int]
"""A provider and a batch."""


@dataclass(frozen=True)
class Plan:
    """What a worker measures."""

    model: str
    cases: tuple[Case, ...]
    device: str
    smoke: bool = False
    first_call: bool = False

    def identities(self) -> list[Record]:
        return [self.identify(case) for case in self.cases]

    def identify(self, case: Case) -> Record:
        benchmark = "vit_first_call" if self.first_call else "vit_gpu"
        return Record(
            benchmark=benchmark, model=self.model, batch=case[1], provider=case[0], dtype=PROVIDERS[case[0]].label
        )


# The worker -----------------------------------------------------------------------------------------------------------


class Measurement:
    """A worker: compiles and checks its cases, then times those that passed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ready: dict[Case, tuple[Forward, Tensor, Record]] = {}

    @functools.cached_property
    def subject(self) -> Subject:
        return Subject.build(
            self.plan.model, max(batch for _, batch in self.plan.cases), self.plan.device, self.plan.smoke
        )

    def __call__(self, phase: Phase) -> Iterator[Record]:
        for case in self.plan.cases:
            identity = self.plan.identify(case)
            if phase == "check":
                yield guarded(identity, functools.partial(self.check, case, identity))
            elif case in self.ready:
                yield guarded(identity, functools.partial(self.time, case))

    def check(self, case: Case, identity: Record) -> Record:
        """Prepare, compile and check; keeps right cases to be timed."""
        (name, batch), subject = case, self.subject
        provider = PROVIDERS[name]
        images = subject.images[:batch].to(subject.device, provider.dtype)
        start = time.perf_counter()
        module = prepare(subject, provider, images)
        prepare_s = time.perf_counter() - start
        start = time.perf_counter()  # includes torch.compile, which imports Inductor and starts its processes
        forward: Forward = provider.compile(module) if provider.compile else module
        with inference(provider):
            output = forward(images).cpu()
            first_call_s = time.perf_counter() - start
            quality = check_three(forward, images, output, subject.reference[:batch], provider)
        if self.plan.device == "cuda":
            torch.cuda.empty_cache()
        if self.plan.first_call:
            return replace(identity, prepare_s=prepare_s, first_call_s=first_call_s, **quality)
        self.ready[case] = forward, images, replace(identity, **quality)
        return self.ready[case][2]

    def time(self, case: Case) -> Record:
        (name, batch), device = case, self.plan.device
        forward, images, checked = self.ready[case]

        def fn() -> Tensor:
            return forward(images)

        with inference(PROVIDERS[name]):
            rep_ms, min_runs = (SMOKE_REP_MS, 2) if self.plan.smoke else (REP_MS, MIN_RUNS)
            timing = time_provider(fn, device, rep_ms=rep_ms, min_runs=min_runs)
            memory = peak_mb(fn, device)
        return replace(checked, **timing.fields(), images_per_second=batch / timing.median_s, peak_mb=memory)


def check_three(
    forward: Forward, images: Inputs, first: Tensor, reference: Tensor, provider: Provider
) -> dict[str, Any]:
    """Check three calls and return the accuracy of the third: CUDA graphs record the second and replay the third."""
    models.accuracy(first, reference, provider.precision)
    models.accuracy(forward(images).cpu(), reference, provider.precision)
    return models.accuracy(forward(images).cpu(), reference, provider.precision)


# The parent -----------------------------------------------------------------------------------------------------------


def run(results: Results, names: Sequence[str], cases: Sequence[Case], device: str, limits: Limits, jobs: int) -> None:
    """Measure the speed of ``cases`` of models, all of which are compiled together, and add their records."""
    # The providers of a smoke run share a process: it only shows that they run.
    groups = [tuple(cases)] if results.smoke else [(case,) for case in cases]
    plans = [Plan(model, group, device, results.smoke) for model in names for group in groups]
    run_plans(results, Measurement, plans, Plan.identities, limits, jobs, alone=_alone)


def _alone(plan: Plan) -> bool:
    return any(PROVIDERS[name].alone for name, _ in plan.cases) and not plan.smoke


def run_first_calls(results: Results, model: str, cases: Sequence[Case], device: str, limits: Limits) -> None:
    """Measure the first calls of ``cases`` of one model, one process after the other, and add their records."""
    for case in cases:
        plan = Plan(model, (case,), device, results.smoke, first_call=True)
        with tempfile.TemporaryDirectory() as folder:
            worker = Worker(Measurement, plan, environment=cold_caches(folder))
            answers = Answers(plan, list(worker.request("check", limits.to_check(0))), ended=worker.status)
            worker.close()
        results.add(*(answers.checked or answers.complete(plan.identities())))


def cold_caches(folder: str) -> dict[str, str]:
    """The environment with empty compilation caches in ``folder``."""
    return {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}


# Command line ---------------------------------------------------------------------------------------------------------


def default_providers() -> list[str]:
    return [name for name, provider in PROVIDERS.items() if not provider.optional]


def _parser() -> argparse.ArgumentParser:
    parser = argument_parser("vit_gpu", __doc__)
    parser.add_argument(
        "--models", type=lambda text: text.split(","), help=f"timm models (default: {','.join(MODELS)})"
    )
    parser.add_argument("--batches", type=integers, help="batch sizes (default: 256,1; with --smoke 2,1)")
    parser.add_argument("--providers", type=comma_separated(PROVIDERS), help=f"of {', '.join(PROVIDERS)}")
    parser.add_argument("--first-call", action="store_true", help="measure first calls, not speed")
    add_limits(parser, jobs=6, check=400.0, time=60.0, total=1500.0, unit="one provider at one batch")
    return parser


def choose_device(smoke: bool) -> str:
    """CUDA, or the CPU for a smoke run where there is no GPU."""
    if torch.cuda.is_available():
        return "cuda"
    if smoke:
        return "cpu"
    raise QFrameworkError("vit_gpu needs a CUDA device and found none. Pass --smoke, or use vit_cpu")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on the GPU; returns the exit status."""
    arguments = _parser().parse_args(argv)
    batches: list[int] = arguments.batches or list(SMOKE_BATCHES if arguments.smoke else BATCHES)
    names: list[str] = arguments.models or ([models.SMOKE_MODEL] if arguments.smoke else list(MODELS))
    limits = limits_of(arguments)
    device = choose_device(arguments.smoke)
    default = list(FIRST_CALL_PROVIDERS) if arguments.first_call else default_providers()
    cases = [(name, batch) for batch in batches for name in arguments.providers or default]
    results = Results.start("vit_first_call" if arguments.first_call else "vit_gpu", device, arguments)
    if not arguments.first_call:
        run(results, names, cases, device, limits, arguments.jobs)
        return results.exit_code
    for model in names:
        run_first_calls(results, model, cases, device, limits)
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
