"""Training steps of whole models: INT8 against BF16 and torchao's FP8, each compiled, with and without CUDA graphs.

    python -m benchmarks.training_models --output benchmarks/results/training/DATE-h100-models.json

A step is forward, backward and fused AdamW. Weights are FP32 under autocast, torchao's as well. Models are of timm and
transformers with random weights, compiled by Inductor or by ``backend="qframework"``, which passes causal masks on as a
flag; ``--layers`` keeps the first blocks only, which compiles faster and gives embeddings
and head a larger share. Every provider's loss and the gradient of the first linear in a block are compared with FP32
before it is timed. Without graphs a step is timed as it is called, host included; with graphs the same compiled step is
replayed in one CUDA graph. On a GPU, every model and provider runs in its own process. ``--profile`` adds the kernels
of a step by kind.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.boxed import Answers, Phase, add_limits, limits_of, run_plans
from benchmarks.harness import (
    Record,
    Results,
    UnavailableError,
    WrongResultError,
    argument_parser,
    comma_separated,
    guarded,
    relative_error,
    require_quantized,
)
from benchmarks.timing import Timing, time_provider
from benchmarks.torchao_training import quantize_for_fp8_training
from benchmarks.training_profile import profile_step
from benchmarks.training_subjects import MODELS, SMOKE, Subject
from qframework.training.convert import convert_to_int8_training
from qframework.training.plan import blocks_of

OPS = ("step", "step_in_graph")
# Of the loss, and of the gradient of the first block's first linear, which has the errors of all blocks: each adds
# about 0.03 to normal values, and errors add up like random ones.
LOSS_TOLERANCE = {"bf16": 0.01, "int8": 0.02, "fp8": 0.03}
TOLERANCE = {"bf16": 0.05, "int8": 0.2, "fp8": 0.4}
INT8_LEAST = 0.012


@dataclass(frozen=True)
class Provider:
    """A way to train a model."""

    convert: Callable[[nn.Module], Any]
    precision: str
    backend: str = "inductor"  # of torch.compile


def _fp8(model: nn.Module) -> nn.Module:
    if not torch.cuda.is_available():
        raise UnavailableError("torchao's FP8 training needs a GPU")
    return quantize_for_fp8_training(linears_for_conv1d(model))


def _int8(model: nn.Module, **options: Any) -> nn.Module:
    """All blocks, those too that a conversion leaves in 16 bits unless it is told otherwise."""
    return convert_to_int8_training(model, skip_slower=False, **options)


def linears_for_conv1d(model: nn.Module) -> nn.Module:
    """Replace GPT-2's Conv1D, which torchao does not convert, by linears with the same weights, in place."""
    child: Any
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "Conv1D":
                inputs, outputs = child.weight.shape
                linear = nn.Linear(inputs, outputs, device="meta")
                linear.weight, linear.bias = nn.Parameter(child.weight.detach().mT.contiguous()), child.bias
                setattr(module, name, linear)
    return model


PROVIDERS = {
    "bf16": Provider(lambda model: model, "bf16"),
    "bf16_qframework": Provider(lambda model: model, "bf16", "qframework"),
    "qframework": Provider(_int8, "int8", "qframework"),
    "qframework_1x256": Provider(lambda model: _int8(model, block_size=(1, 256)), "int8", "qframework"),
    "qframework_inductor": Provider(_int8, "int8"),
    "qframework_weights_again": Provider(lambda model: _int8(model, keep_weights=False), "int8", "qframework"),
    "qframework_mixed_attention": Provider(lambda model: _int8(model, attention="mixed"), "int8", "qframework"),
    "torchao_fp8": Provider(_fp8, "fp8"),
}


class Training:
    """A model in training: the loss and its gradients, and a step."""

    def __init__(self, subject: Subject, provider: Provider, options: argparse.Namespace, device: str) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model = subject.build(options.layers).train()
        self.inputs, self.labels = subject.inputs(device, options.smoke)
        self.device, self.provider = device, provider
        self.watched = _first_weight(self.model)
        self.expected = _exact(self.model, self.watched, self.inputs, self.labels)
        provider.convert(self.model)
        self.compiled: Any = (
            self.model if options.eager else torch.compile(self.model, dynamic=False, backend=provider.backend)
        )
        graphs = device == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-5, fused=graphs, capturable=graphs)

    def loss(self) -> Tensor:
        """Forward under autocast."""
        with torch.autocast(self.device, torch.bfloat16):
            return _loss(self.compiled, self.inputs, self.labels)

    def step(self) -> None:
        """Forward, backward and optimizer."""
        self.optimizer.zero_grad(set_to_none=True)
        self.loss().backward()
        self.optimizer.step()

    def first_call(self) -> float:
        """Seconds that the first forward and backward take, compilation included."""
        start = time.perf_counter()
        self.loss().backward()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def error(self) -> float:
        """The relative error of the first gradient against FP32; raises WrongResultError."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        found, (expected, gradient) = self.model.get_parameter(self.watched).grad, self.expected
        assert found is not None
        found = found if found.shape == gradient.shape else found.mT  # of a linear instead of a Conv1D
        precision = self.provider.precision
        off = abs(loss.item() - expected) / expected
        if not off <= LOSS_TOLERANCE[precision]:
            raise WrongResultError(f"the loss must be that of FP32, {expected:.4f}, got {loss.item():.4f}", off)
        error = relative_error(found.float().cpu(), gradient)
        if not error <= TOLERANCE[precision]:
            raise WrongResultError(
                f"relative error of the first gradient must be at most {TOLERANCE[precision]:g}, got {error:.3g}", error
            )
        if precision == "int8":
            require_quantized(error, INT8_LEAST)
        return error


def _loss(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    if x.dtype == torch.int64:
        logits = model(x).logits[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    return F.cross_entropy(model(x).float(), labels)


def _exact(model: nn.Module, watched: str, x: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """The loss and the gradient of one weight in FP32, of a few examples at a time."""
    weight = model.get_parameter(watched)
    total, gradient = 0.0, torch.zeros_like(weight)
    step = max(x.shape[0] // 8, 1)
    parts = list(zip(x.split(step), labels.split(step), strict=True))
    for some, of_them in parts:
        loss = _loss(model, some, of_them)
        gradient += torch.autograd.grad(loss, [weight])[0] / len(parts)
        total += loss.item() / len(parts)
    return total, gradient.cpu()


def _first_weight(model: nn.Module) -> str:
    """The name of the first matrix in a block, of queries or all three: keys' gradients almost vanish at first."""
    matrices = {id(weight) for weight in blocks_of(model)[0].parameters() if weight.ndim == 2}
    named = [name for name, weight in model.named_parameters() if id(weight) in matrices]
    return next(name for name in named if "k_proj" not in name and "v_proj" not in name)


@dataclass(frozen=True)
class Plan:
    """What a worker measures."""

    model: str
    provider: str
    options: argparse.Namespace
    device: str

    def identities(self) -> list[Record]:
        subject, precision = _subjects(self.options)[self.model], PROVIDERS[self.provider].precision
        batch = 2 if self.options.smoke else subject.batch
        model = f"{self.model}, {self.options.layers} blocks" if self.options.layers else self.model
        row = Record(benchmark="training_models", provider=self.provider, model=model, batch=batch, dtype=precision)
        return [replace(row, op=op) for op in OPS]


def _subjects(options: argparse.Namespace) -> dict[str, Subject]:
    return SMOKE if options.smoke else MODELS


class Measurement:
    """A worker: compiles and checks, then times what passed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.training: Training | None = None
        self.checked: list[Record] = []

    def __call__(self, phase: Phase) -> Iterator[Record]:
        if phase == "check":
            row = guarded(self.plan.identities()[0], self._check)
            self.checked = [replace(row, op=op) for op in OPS]
            yield from self.checked
        elif self.training is not None and self.checked[0].status == "ok":
            for row, measure in zip(self.checked, (self._time, self._time_graph), strict=True):
                yield guarded(row, lambda row=row, measure=measure: replace(row, **measure().fields()))  # type: ignore[misc]

            if self.plan.options.profile:
                yield from profile_step(self.checked[0], self.training.step, self.plan.device)

    def _check(self) -> Record:
        plan = self.plan
        self.training = Training(
            _subjects(plan.options)[plan.model], PROVIDERS[plan.provider], plan.options, plan.device
        )
        first_call_s = self.training.first_call()
        row = replace(plan.identities()[0], first_call_s=first_call_s, error=self.training.error())
        if plan.device == "cuda":
            torch.cuda.empty_cache()
        return row

    def _time(self) -> Timing:
        assert self.training is not None
        rep_ms, runs = (1.0, 2) if self.plan.options.smoke else (400.0, 8)
        return time_provider(self.training.step, self.plan.device, rep_ms=rep_ms, min_runs=runs)

    def _time_graph(self) -> Timing:
        assert self.training is not None
        if self.plan.device != "cuda":
            raise UnavailableError("CUDA graphs need a GPU")
        step = self.training.step
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            step()
        return time_provider(graph.replay, "cuda", rep_ms=400.0, min_runs=8)


def run(results: Results, options: argparse.Namespace, device: str) -> None:
    """Measure all models and providers: each in its own process, or on a CPU and in smoke runs, all in this one."""
    models = [(name, options.layers) for name in SMOKE] if options.smoke else options.models
    plans = [
        Plan(name, provider, argparse.Namespace(**vars(options) | {"layers": layers or options.layers}), device)
        for name, layers in models
        for provider in options.providers
    ]
    if device == "cuda" and not options.smoke:
        run_plans(results, Measurement, plans, Plan.identities, limits_of(options), options.jobs)
        return
    for plan in plans:
        measurement = Measurement(plan)
        answers = Answers(plan, list(measurement("check")), list(measurement("time")))
        torch._dynamo.reset()
        results.add(*answers.complete(plan.identities()))


def parse_models(text: str) -> list[tuple[str, int | None]]:
    """Models and how many of their blocks to keep, of ``NAME`` or ``NAME:BLOCKS``, separated by commas."""
    parts = [part.partition(":") for part in text.split(",")]
    names = comma_separated(MODELS)(",".join(name for name, _, _ in parts))
    return [(name, int(blocks) if blocks else None) for name, (_, _, blocks) in zip(names, parts, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = argument_parser("training_models", __doc__)
    parser.add_argument(
        "--models", type=parse_models, default=[(name, None) for name in MODELS], help="a name, or NAME:BLOCKS"
    )
    parser.add_argument("--providers", type=comma_separated(PROVIDERS), default=list(PROVIDERS))
    parser.add_argument("--layers", type=int, default=None, help="blocks of each model (default: all)")
    parser.add_argument("--profile", action="store_true", help="record the kernels of a step by kind")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    add_limits(parser, jobs=4, check=300.0, time=60.0, total=900.0, unit="one model and provider")
    options = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = Results.start("training_models", device, options)
    run(results, options, device)
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
