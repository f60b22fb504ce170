"""Vision transformers on a GPU: throughput at a large batch and latency at batch 1, whole model, inference mode.

Every provider of every model runs in a process of its own with empty compilation caches, so that neither memory, nor
compiled code, nor a crash of one reaches another; a process that needs more than ``--limit`` seconds is ended and
recorded as ``timeout``. The file is rewritten after every provider. Weights and images are random and seeded; every
output is checked against FP32 eager's before it is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import models
from benchmarks.harness import Record, Results, argument_parser, comma_separated, time_provider
from benchmarks.machine import REPOSITORY
from benchmarks.models import Forward, quantize_qframework
from qframework.errors import QFrameworkError

MODELS = ("vit_base_patch16_224", "vit_large_patch16_224")
BATCHES, SMOKE_BATCHES = (256, 1), (2, 1)
MIN_RUNS, REP_MS = 10, 500.0


@dataclass(frozen=True)
class Provider:
    """What a provider does to the FP32 model: cast, ``quantize``, ``compile``."""

    dtype: torch.dtype = torch.float16
    precision: str = "float16"  # a key of models.SQNR_FLOOR_DB
    quantize: Callable[[nn.Module, Tensor], nn.Module] | None = None
    compile: Callable[[nn.Module], Forward] | None = None
    tf32: bool = False
    optional: bool = False  # only run when named

    @property
    def label(self) -> str:
        """The dtypes for the table."""
        name = str(self.dtype).removeprefix("torch.")
        return {"int8": f"int8, {name}", "tf32": "tf32"}.get(self.precision, name)


def _quantize_torchao(model: nn.Module, images: Tensor) -> nn.Module:
    """torchao's own dynamic INT8, without PT2E."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model


_inductor = functools.partial(torch.compile, dynamic=False)
_qframework = functools.partial(torch.compile, backend="qframework", dynamic=False)
_graphs = "reduce-overhead"
_int8 = functools.partial(Provider, precision="int8")
_static = functools.partial(quantize_qframework, preset="static_int8")
_dynamic = functools.partial(quantize_qframework, preset="dynamic_int8")

PROVIDERS: dict[str, Provider] = {
    "fp32": Provider(torch.float32, "float32"),
    "tf32": Provider(torch.float32, "tf32", tf32=True),
    "fp16": Provider(),
    "fp16_compiled": Provider(compile=_inductor),
    "fp16_compiled_graphs": Provider(compile=functools.partial(_inductor, mode=_graphs)),
    "fp16_max_autotune": Provider(compile=functools.partial(_inductor, mode="max-autotune"), optional=True),
    "torchao_int8_dynamic": _int8(quantize=_quantize_torchao, compile=_inductor, optional=True),
    "qframework_static": _int8(quantize=_static, compile=_qframework),
    "qframework_static_graphs": _int8(quantize=_static, compile=functools.partial(_qframework, mode=_graphs)),
    "qframework_dynamic": _int8(quantize=_dynamic, compile=_qframework),
    "qframework_dynamic_graphs": _int8(quantize=_dynamic, compile=functools.partial(_qframework, mode=_graphs)),
    "qframework_dynamic_float": _int8(
        compile=functools.partial(_qframework, options={"linear": "int8_dynamic"}), optional=True
    ),
}


# The parent: one process for each provider ----------------------------------------------------------------------------


def measure_boxed(results: Results, model: str, providers: Sequence[str], batches: Sequence[int], limit: float) -> None:
    """Run ``providers`` in one process; add its records, and one saying why for each pair that has none."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "worker.json")
        command = [sys.executable, "-m", "benchmarks.vit_gpu", "--worker", "--output", str(output), "--models", model]
        command += ["--providers", ",".join(providers), "--batches", ",".join(map(str, batches))]
        command += ["--smoke"] * results.smoke
        status, reason = run_boxed(command, limit, dict(os.environ) if results.smoke else _cold_caches(folder))
        document = json.loads(output.read_text()) if output.exists() else {"machine": {}, "records": []}
    results.machine = document["machine"] or results.machine
    records = [Record.from_json(fields) for fields in document["records"]]
    done = {(record.provider, record.batch) for record in records}
    missing = [(name, batch) for name in providers for batch in batches if (name, batch) not in done]
    records += [
        Record(benchmark="vit_gpu", model=model, provider=name, batch=batch, status=status, reason=reason)
        for name, batch in missing
    ]
    results.add(*records)


def run_boxed(command: Sequence[str], limit: float, environment: dict[str, str]) -> tuple[str, str]:
    """Run ``command`` for at most ``limit`` seconds; the status and reason of whatever it did not get to.

    Its standard error is kept apart for the reason; it is ended with the compile workers it started.
    """
    with tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            text=True,
            env=environment,
            cwd=REPOSITORY,
            start_new_session=True,
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            return "timeout", f"not done after {limit:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        stderr.seek(0)
        lines = [line.strip() for line in stderr if line.strip()]
    return "failed", f"exit status {process.returncode}: {lines[-1] if lines else 'no message'}"[:300]


def _cold_caches(folder: str) -> dict[str, str]:
    """The environment with empty compilation caches in ``folder``: a first call means a first call."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
    return {**os.environ, **caches}


# The worker: measures in this process ---------------------------------------------------------------------------------


def measure_here(results: Results, model: str, providers: Sequence[str], batches: Sequence[int], device: str) -> None:
    """Measure ``providers`` at ``batches`` in this process and add a record for each pair."""
    subject = Subject.build(model, max(batches), device, results.smoke)
    for name in providers:
        provider = PROVIDERS[name]
        for batch in batches:
            identity = Record(benchmark="vit_gpu", model=model, batch=batch, provider=name, dtype=provider.label)
            results.attempt(identity, functools.partial(measure, subject, provider, batch, identity))


@dataclass(frozen=True)
class Subject:
    """The float model and what its providers are held against; on the CPU, so that no provider's memory counts it."""

    model: nn.Module
    images: Tensor  # (largest batch, 3, H, W) fp32; a smaller batch is its beginning
    reference: Tensor  # (largest batch, classes) fp32, computed on the device with TF32 off
    device: str

    @classmethod
    def build(cls, name: str, batch: int, device: str, smoke: bool) -> Subject:
        with torch.device(device):
            model = models.build_model(name, smoke)
        images = models.random_images(model, batch)
        with torch.inference_mode(), _tf32(False):
            reference = model(images.to(device)).cpu()
        return cls(model.cpu(), images, reference, device)


def prepare(subject: Subject, provider: Provider, images: Tensor) -> nn.Module:
    """A copy of the model on the device in the provider's dtype, quantized with ``images`` if the provider does so."""
    model = copy.deepcopy(subject.model).to(subject.device, provider.dtype)
    return model if provider.quantize is None else provider.quantize(model, images)


def measure(subject: Subject, provider: Provider, batch: int, identity: Record) -> Record:
    """Compile, check and time one provider at one batch size; nothing compiled is left of the one before."""
    device, reference = subject.device, subject.reference[:batch]
    torch._dynamo.reset()
    images = subject.images[:batch].to(device, provider.dtype)
    start = time.perf_counter()
    module = prepare(subject, provider, images)
    prepare_s = time.perf_counter() - start
    forward: Forward = provider.compile(module) if provider.compile else module

    def fn() -> Tensor:
        return forward(images)

    with torch.inference_mode(), _tf32(provider.tf32):
        start = time.perf_counter()
        output = fn().cpu()
        first_call_s = time.perf_counter() - start
        # Under CUDA graphs the second call records and the third replays, which is what will be timed: check all three.
        for _ in range(2):
            models.accuracy(output, reference, provider.precision)
            output = fn().cpu()
        quality = models.accuracy(output, reference, provider.precision)
        _reset_peak(device)
        timing = time_provider(fn, device, rep_ms=REP_MS, min_runs=MIN_RUNS)
    return replace(
        identity,
        **timing.fields(),
        images_per_second=batch / timing.median_s,
        peak_mb=torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None,
        prepare_s=prepare_s,
        first_call_s=first_call_s,
        **quality,
    )


def _reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextlib.contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """TensorFloat-32 for matrix products and convolutions, on or off, and back to what it was."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


# Command line ---------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    default = [name for name, provider in PROVIDERS.items() if not provider.optional]
    parser = argument_parser("vit_gpu", __doc__)
    parser.add_argument(
        "--models", type=lambda text: text.split(","), help=f"timm models (default: {','.join(MODELS)})"
    )
    parser.add_argument("--batches", type=_parse_batches, help="batch sizes (default: 256,1; with --smoke 2,1)")
    parser.add_argument(
        "--providers", type=comma_separated(PROVIDERS), default=default, help=f"of {', '.join(PROVIDERS)}"
    )
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one provider of one model, all batches")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def _parse_batches(text: str) -> list[int]:
    sizes = [int(size) for size in text.split(",")]
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} holds a batch size below 1")
    return sizes


def _device(smoke: bool) -> str:
    """CUDA, or the CPU for a smoke run where there is no GPU. Asked in the worker: the parent never touches the GPU."""
    if torch.cuda.is_available():
        return "cuda"
    if smoke:
        return "cpu"
    raise QFrameworkError("no CUDA device: vit_gpu needs one unless --smoke is given; vit_cpu measures on the CPU")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on the GPU; returns the exit status."""
    arguments = _parser().parse_args(argv)
    batches: list[int] = arguments.batches or list(SMOKE_BATCHES if arguments.smoke else BATCHES)
    names: list[str] = arguments.models or ([models.SMOKE_MODEL] if arguments.smoke else list(MODELS))
    if arguments.worker:
        return _work(arguments, names, batches)
    results = Results("vit_gpu", _machine_unknown(), arguments.output, arguments.smoke)
    for model in names:
        # A smoke run shares one process among the providers: it asks whether they run, not how fast.
        groups = [arguments.providers] if arguments.smoke else [[name] for name in arguments.providers]
        for group in groups:
            measure_boxed(results, model, group, batches, arguments.limit)
    return results.exit_code


def _work(arguments: argparse.Namespace, names: Sequence[str], batches: Sequence[int]) -> int:
    device = _device(arguments.smoke)
    results = Results.start("vit_gpu", device, arguments)
    results.write()
    for model in names:
        measure_here(results, model, arguments.providers, batches, device)
    return results.exit_code


def _machine_unknown() -> dict[str, Any]:
    """The header until the first worker has reported its own."""
    return {"device": None}


if __name__ == "__main__":
    sys.exit(main())
