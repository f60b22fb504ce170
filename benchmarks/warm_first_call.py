"""First calls of a compiled vision transformer with warm caches, in seconds, all imports done before the clock starts.

    python -m benchmarks.warm_first_call --output benchmarks/results/other/DATE-h100-warm_first_call.json

Each provider has one folder of caches. Three kinds of new processes use it: ``save`` quantizes the model and writes it
to a file; ``cold`` loads it, compiles it with empty caches, and notes the modules that this imported; ``warm``, twice,
loads it, imports those modules, uses PyTorch's libraries once, and is timed: ``first_call_s`` is ``torch.compile`` with
the first call, ``compile_s`` PyTorch's own phase ``compile_inner`` within it. The first two kinds run ``--jobs`` at a
time, the warm processes alone, in turns over the providers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import models
from benchmarks.boxed import Limits, Worker, add_limits, limits_of, shared_cores
from benchmarks.harness import Record, Results, argument_parser, comma_separated, guarded
from benchmarks.vit_gpu import choose_device, cold_caches
from benchmarks.vit_gpu_cases import PROVIDERS, Subject, inference, prepare

DEFAULT = ("fp16_compiled", "qframework_dynamic", "qframework_static", "qframework_static_int8_attention")
ROUNDS = 2
COMPILE_INNER = "_compile.compile_inner"  # in torch._dynamo.utils.compilation_time_metrics
_MODEL, _EXPECTED, _MODULES = "model.pt2", "expected.pt", "modules.json"


@dataclass(frozen=True)
class Plan:
    """One provider, and the folder in which its processes leave the model and the caches."""

    provider: str
    model: str
    batch: int
    device: str
    smoke: bool
    folder: Path

    def identify(self, op: str) -> Record:
        dtype = PROVIDERS[self.provider].label
        row = Record(benchmark="warm_first_call", provider=self.provider, op=op, dtype=dtype)
        return replace(row, model=self.model, batch=self.batch)


# The worker -----------------------------------------------------------------------------------------------------------


class Measurement:
    """A worker for one request: ``save``, ``cold`` or ``warm``."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(self, request: str) -> Iterator[Record]:
        measure = self._save if request == "save" else self._first_call
        yield guarded(self.plan.identify(request), lambda: measure(request))

    def _save(self, request: str) -> Record:
        import qframework

        plan, provider = self.plan, PROVIDERS[self.plan.provider]
        subject = Subject.build(plan.model, plan.batch, plan.device, plan.smoke)
        torch.save(subject.reference, plan.folder / _EXPECTED)
        start = time.perf_counter()
        if provider.quantize is not None:
            images = subject.images.to(plan.device, provider.dtype)
            qframework.save(prepare(subject, provider, images), plan.folder / _MODEL, (images,))  # type: ignore[arg-type]
        return replace(plan.identify(request), prepare_s=time.perf_counter() - start)

    def _load(self) -> nn.Module:
        """On the device, in the provider's dtype."""
        import qframework

        plan, provider = self.plan, PROVIDERS[self.plan.provider]
        if provider.quantize is not None:
            return qframework.load(plan.folder / _MODEL)
        with torch.device(plan.device):  # as Subject.build does: random weights depend on the device
            return models.build_model(plan.model, plan.smoke).to(provider.dtype)

    def _first_call(self, request: str) -> Record:
        from torch._dynamo.utils import compilation_time_metrics

        plan, provider = self.plan, PROVIDERS[self.plan.provider]
        images = models.random_images(models.build_model(plan.model, plan.smoke), plan.batch)
        images = images.to(plan.device, provider.dtype)
        module, listed = self._load(), plan.folder / _MODULES
        if listed.exists():
            import_all(json.loads(listed.read_text()))
        use_libraries(images)
        compilation_time_metrics.clear()
        with inference(provider):
            start = time.perf_counter()
            forward: models.Forward = provider.compile(module) if provider.compile else module
            output = forward(images).cpu()
            took = time.perf_counter() - start
        compiled_s = sum(compilation_time_metrics.get(COMPILE_INNER, ()))
        quality = models.accuracy(output, torch.load(plan.folder / _EXPECTED), provider.precision)
        if not listed.exists():
            listed.write_text(json.dumps(sorted(sys.modules)))
        return replace(plan.identify(request), first_call_s=took, compile_s=compiled_s, **quality)


def import_all(names: Sequence[str]) -> None:
    """Import modules; those that cannot be imported by name, such as Inductor's code, are left out."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def use_libraries(images: Tensor) -> None:
    """Load what the first convolution, product and attention load, whoever compiles them."""
    x = images.flatten(2).mT[:, :16]  # (B, 16, 3)
    x = x @ x.mT
    heads = x[:, None].contiguous()
    F.scaled_dot_product_attention(heads, heads, heads)
    F.conv2d(images, images[:1, :, :4, :4], stride=4).sum().item()


# The parent -----------------------------------------------------------------------------------------------------------


def run(results: Results, plans: Sequence[Plan], limits: Limits, jobs: int) -> None:
    """Fill all caches, then measure in turns; the records of a provider that failed before are left out."""
    with ThreadPoolExecutor(jobs) as pool:
        filled = list(pool.map(lambda plan: [ask(plan, op, limits, jobs) for op in ("save", "cold")], plans))
    for rows in filled:
        results.add(*rows)
    ready = [plan for plan, rows in zip(plans, filled, strict=True) if all(row.status == "ok" for row in rows)]
    for number in range(1, ROUNDS + 1):
        for plan in ready:
            row = ask(plan, "warm", limits, jobs=1)
            results.add(replace(row, op=f"warm {number}"))


def ask(plan: Plan, request: str, limits: Limits, jobs: int) -> Record:
    """One request to a new process with the provider's caches."""
    worker = Worker(Measurement, plan, environment={**shared_cores(jobs), **cold_caches(str(plan.folder))})
    try:
        rows = list(worker.request(request, limits.to_check(0)))
        status, reason = worker.status or ("failed", "no record")
        return rows[0] if rows else replace(plan.identify(request), status=status, reason=reason)
    finally:
        worker.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    arguments = _parser().parse_args(argv)
    device = choose_device(arguments.smoke)
    model, batch = (models.SMOKE_MODEL, 2) if arguments.smoke else (arguments.model, arguments.batch)
    results = Results.start("warm_first_call", device, arguments)
    with tempfile.TemporaryDirectory() as folder:
        plans = []
        for name in arguments.providers or (DEFAULT[2:3] if arguments.smoke else DEFAULT):
            (own := Path(folder, name)).mkdir()
            plans.append(Plan(name, model, batch, device, arguments.smoke, own))
        run(results, plans, limits_of(arguments), arguments.jobs)
    return results.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argument_parser("warm_first_call", __doc__)
    parser.add_argument("--model", default="vit_base_patch16_224", help="a vision transformer of timm")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--providers", type=comma_separated(PROVIDERS), help=f"default: {', '.join(DEFAULT)}")
    add_limits(parser, jobs=4, check=120.0, time=60.0, total=240.0, unit="one process")
    return parser


if __name__ == "__main__":
    sys.exit(main())
