"""A vision transformer on the CPU: FP32, BF16, Inductor's X86InductorQuantizer and qframework in one run.

All providers are built and checked first, then timed in turns (A B C A B C ...), so that drift of the machine affects
all alike. Preparation (export, calibrate, convert) and the first call (compilation) are recorded separately. Weights
and images are random and seeded; every output is checked against FP32 eager.

``--processor-time`` counts the processor time of the process instead, for machines that other processes use too, with
one thread.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import models
from benchmarks.harness import Record, Results, argument_parser, comma_separated, guarded
from benchmarks.models import Forward, quantize_qframework, quantize_with_attention, quantize_x86
from benchmarks.timing import time_interleaved
from qframework.errors import QFrameworkError

Context = Callable[[], AbstractContextManager[Any]]


@contextmanager
def _freezing() -> Iterator[None]:
    """Inductor's freezing, which X86InductorQuantizer's tutorial requires; read by Dynamo and Inductor."""
    import torch._inductor.config as inductor_config

    with inductor_config.patch(freezing=True):
        yield


@contextmanager
def _freezing_bf16() -> Iterator[None]:
    with _freezing(), _autocast_bf16():
        yield


def _autocast_bf16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


@dataclass(frozen=True)
class Provider:
    """How the float model becomes the timed one: ``quantize``, then ``compile``, called in ``context``."""

    precision: str  # a key of models.SQNR_FLOOR_DB
    dtype: str
    compile: Callable[[nn.Module], Forward] | None = None
    quantize: Callable[[nn.Module, Tensor], nn.Module] | None = None
    context: Context = nullcontext


_inductor = functools.partial(torch.compile, dynamic=False)
_qframework = functools.partial(torch.compile, backend="qframework", dynamic=False)

PROVIDERS: dict[str, Provider] = {
    "fp32_eager": Provider("float32", "float32"),
    "fp32_inductor": Provider("float32", "float32", _inductor),
    "bf16_autocast_inductor": Provider("bfloat16", "bfloat16", _inductor, context=_autocast_bf16),
    # X86InductorQuantizer's INT8 kernels need Inductor's freezing, which a plain torch.compile leaves off.
    "x86_inductor_static_unfrozen": Provider(
        "int8", "int8, float32", _inductor, functools.partial(quantize_x86, is_dynamic=False)
    ),
    "x86_inductor_dynamic_unfrozen": Provider(
        "int8", "int8, float32", _inductor, functools.partial(quantize_x86, is_dynamic=True)
    ),
    "x86_inductor_static": Provider(
        "int8", "int8, float32", _inductor, functools.partial(quantize_x86, is_dynamic=False), _freezing
    ),
    "x86_inductor_dynamic": Provider(
        "int8", "int8, float32", _inductor, functools.partial(quantize_x86, is_dynamic=True), _freezing
    ),
    "x86_inductor_static_bf16": Provider(
        "int8", "int8, bfloat16", _inductor, functools.partial(quantize_x86, is_dynamic=False), _freezing_bf16
    ),
    "qframework_static": Provider(
        "int8", "int8, float32", _qframework, functools.partial(quantize_qframework, preset="static_int8")
    ),
    "qframework_static_int8_attention": Provider("int8", "int8, float32", _qframework, quantize_with_attention),
    "qframework_static_bf16": Provider(
        "int8",
        "int8, bfloat16",
        _qframework,
        functools.partial(quantize_qframework, preset="static_int8"),
        _autocast_bf16,
    ),
    "qframework_dynamic": Provider(
        "int8", "int8, float32", _qframework, functools.partial(quantize_qframework, preset="dynamic_int8")
    ),
    "qframework_dynamic_per_tensor": Provider(
        "int8",
        "int8, float32",
        _qframework,
        functools.partial(quantize_qframework, preset="dynamic_int8", activation="per_tensor"),
    ),
    "qframework_dynamic_float": Provider(
        "int8", "int8, float32", functools.partial(_qframework, options={"linear": "int8_dynamic"})
    ),
}


@dataclass(frozen=True)
class Subject:
    """The float model, the images and the reference output."""

    model: nn.Module
    images: Tensor  # (batch, 3, H, W) fp32
    reference: Tensor  # (batch, classes) fp32


@dataclass
class Entry:
    """One provider; its record grows with every step."""

    provider: Provider
    record: Record
    module: nn.Module
    fn: Callable[[], Tensor] | None = None


def quantize(entry: Entry, subject: Subject) -> Record:
    """Quantize the model, if the provider does so."""
    start = time.perf_counter()
    if entry.provider.quantize:
        entry.module = entry.provider.quantize(subject.model, subject.images)
    return replace(entry.record, prepare_s=time.perf_counter() - start)


def compile_and_check(entry: Entry, subject: Subject) -> Record:
    """Compile, call for the first time and check; raises WrongResultError on a wrong output."""
    provider, images = entry.provider, subject.images
    forward: Forward = provider.compile(entry.module) if provider.compile else entry.module

    def fn() -> Tensor:
        with torch.no_grad(), provider.context():
            return forward(images)

    start = time.perf_counter()
    output = fn()
    first_call_s = time.perf_counter() - start
    entry.fn = fn
    quality = models.accuracy(output, subject.reference, provider.precision)
    return replace(entry.record, first_call_s=first_call_s, **quality)


def get_ready(results: Results, entries: Sequence[Entry], subject: Subject) -> list[Entry]:
    """The entries with right results; adds a record with the reason for each of the others.

    All are quantized before any is compiled, since a strict export drops Dynamo's compiled code of the same
    ``forward``.
    """
    right = list(entries)
    for step in (quantize, compile_and_check):
        for entry in list(right):
            print(f"{step.__name__}: {entry.record.provider} ...", flush=True)
            entry.record = guarded(entry.record, functools.partial(step, entry, subject))
            if entry.record.status != "ok":
                results.add(entry.record)
                right.remove(entry)
    return right


def measure(
    results: Results,
    name: str,
    batch: int,
    providers: Sequence[str],
    rounds: int,
    smoke: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Build and check ``providers``, time the right ones in turns by ``clock``, add a record for each."""
    model = models.build_model(name, smoke)
    images = models.random_images(model, batch)
    with torch.no_grad():
        subject = Subject(model, images, model(images))
    identity = Record(benchmark="vit_cpu", model=name, batch=batch, provider="")
    entries = [
        Entry(PROVIDERS[each], replace(identity, provider=each, dtype=PROVIDERS[each].dtype), model)
        for each in providers
    ]
    ready = {entry.record.provider: entry for entry in get_ready(results, entries, subject)}

    compiled_before = _compiled_graphs()
    timings = time_interleaved({provider: entry.fn for provider, entry in ready.items() if entry.fn}, rounds, clock)
    if _compiled_graphs() != compiled_before:
        raise QFrameworkError("vit_cpu: no provider must recompile while it is timed, got a recompilation")
    for provider, timing in timings.items():
        results.add(replace(ready[provider].record, **timing.fields(), images_per_second=batch / timing.median_s))


def _compiled_graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on the CPU; returns the exit status."""
    parser = argument_parser("vit_cpu", __doc__)
    parser.add_argument(
        "--model", help=f"timm model (default: vit_base_patch16_224; with --smoke {models.SMOKE_MODEL})"
    )
    parser.add_argument("--batch", type=int, help="images per call (default: 8; with --smoke 2)")
    parser.add_argument("--rounds", type=int, help="timed turns of every provider (default: 10; with --smoke 2)")
    parser.add_argument("--providers", type=comma_separated(PROVIDERS), default=list(PROVIDERS))
    parser.add_argument("--processor-time", action="store_true", help="of one thread, instead of wall-clock time")
    arguments = parser.parse_args(argv)
    smoke = arguments.smoke
    results = Results.start("vit_cpu", "cpu", arguments)
    clock = time.perf_counter
    if arguments.processor_time:
        torch.set_num_threads(1)
        clock, results.note = time.process_time, "Processor time of one thread."
    measure(
        results,
        arguments.model or (models.SMOKE_MODEL if smoke else "vit_base_patch16_224"),
        arguments.batch or (2 if smoke else 8),
        arguments.providers,
        arguments.rounds or (2 if smoke else 10),
        smoke,
        clock,
    )
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
