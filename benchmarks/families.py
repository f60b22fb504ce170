"""Many transformer architectures on a GPU: INT8 against FP16 and FP8, compiled, whole models with random weights.

Each architecture runs at a batch for throughput and at batch 1. Under CUDA graphs run batch 1 and decoding as well.
Every provider runs in its own process: it compiles and is checked against FP32 eager, ``--jobs`` at a time, and is then
timed alone, in several rounds; the fastest time counts. A record holds the time, that of the kernels alone, which the
host does not change, the SQNR of the outputs, the first call, and the peak memory. The file is rewritten after every
provider.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import qframework
from benchmarks.boxed import Limits, Phase, add_limits, limits_of, run_plans
from benchmarks.families_cases import FAMILIES, SMOKE
from benchmarks.families_models import SEED, Family, Inputs
from benchmarks.harness import Record, Results, WrongResultError, argument_parser, comma_separated, guarded
from benchmarks.models import Forward
from benchmarks.profile_vit import profile_forward
from benchmarks.timing import peak_mb, time_provider
from benchmarks.vit_gpu import check_three, choose_device
from benchmarks.vit_gpu_cases import PROVIDERS, allow_tf32, inference

AT_ONCE = (
    "fp16_compiled",
    "torchao_fp8_tensorwise",
    "qframework_float",
    "qframework_dynamic_frozen",
    "qframework_static",
)
BY_BLOCKS = ("torchao_fp8_tensorwise_blocks",)  # compiles within seconds, and takes the place of the whole model
ALONE = (
    "fp16_compiled_graphs",
    "qframework_float_graphs",
    "qframework_dynamic_frozen_graphs",
    "qframework_static_graphs",
)
REP_MS, SMOKE_REP_MS, MIN_RUNS = 120.0, 10.0, 10
ROUNDS = 5  # of timing, by default: the host of a shared machine takes twice as long for seconds, whatever it computes
COMPARED = 16  # samples of a batch whose outputs are compared with FP32


@dataclass(frozen=True)
class Plan:
    """One provider of one architecture at one batch."""

    family: str
    batch: int
    provider: str
    device: str
    smoke: bool = False

    def identify(self) -> Record:
        label = PROVIDERS[self.provider].label
        return Record(benchmark="families", model=self.family, batch=self.batch, provider=self.provider, dtype=label)

    def identities(self) -> list[Record]:
        return [self.identify()]


class Measurement:
    """A worker: compiles and checks its provider, then times it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ready: tuple[Forward, Inputs, Record] | None = None

    def __call__(self, phase: Phase) -> Iterator[Record]:
        if phase == "check":
            yield guarded(self.plan.identify(), self.check)
        elif self.ready is not None:
            yield guarded(self.plan.identify(), self.time)

    def check(self) -> Record:
        """Build, prepare, compile and check."""
        plan, provider = self.plan, PROVIDERS[self.plan.provider]
        model, inputs, reference = build(FAMILIES[plan.family], plan.batch, plan.device, plan.smoke)
        model, inputs = in_dtype(model, provider.dtype), cast(inputs, provider.dtype)
        if provider.quantize is None:
            with inference(provider):  # what a model keeps from its first call, CUDA graphs would overwrite
                model(*(x[:1] for x in inputs))
        start = time.perf_counter()
        if provider.quantize is not None:
            model = provider.quantize(model, inputs)
        prepare_s = time.perf_counter() - start
        start = time.perf_counter()
        forward: Forward = provider.compile(model) if provider.compile else model
        with inference(provider):
            output = _call(forward, inputs).cpu()
            first_call_s = time.perf_counter() - start
            compared = functools.partial(_call, forward, samples=len(reference))
            check = functools.partial(check_three, compared, inputs, output[: len(reference)], reference)
            try:
                quality = check(provider)
            except WrongResultError:  # too exact, or wrong: float has to be more exact still
                if provider.precision != "int8" or not left_in_float(forward, inputs):
                    raise
                quality = check(replace(provider, precision=str(provider.dtype).removeprefix("torch.")))
        if plan.device == "cuda":
            torch.cuda.empty_cache()
        record = replace(plan.identify(), prepare_s=prepare_s, first_call_s=first_call_s, **quality)
        self.ready = forward, inputs, record
        return record

    def time(self) -> Record:
        assert self.ready is not None
        forward, inputs, checked = self.ready
        fn = functools.partial(_call, forward, inputs)
        with inference(PROVIDERS[self.plan.provider]):
            rep_ms, min_runs = (SMOKE_REP_MS, 2) if self.plan.smoke else (REP_MS, MIN_RUNS)
            timing = time_provider(fn, self.plan.device, rep_ms=rep_ms, min_runs=min_runs)
            if checked.peak_mb is None:  # memory and kernels are the same in every round
                checked = replace(checked, peak_mb=peak_mb(fn, self.plan.device), kernels_ms=self.profiled(fn))
                self.ready = forward, inputs, checked
        per_second = self.plan.batch / timing.median_s
        return replace(checked, **timing.fields(), images_per_second=per_second)

    def profiled(self, fn: Callable[[], Tensor]) -> float | None:
        """Milliseconds of a call's GPU kernels; None without a GPU."""
        return profile_forward(lambda _: fn(), None, "cuda").ms if self.plan.device == "cuda" else None


def left_in_float(forward: Forward, inputs: Inputs) -> bool:
    """Whether rules of the backend leave all linear layers of a compiled model in float, which is then no fault."""
    assert isinstance(forward, nn.Module)  # as torch.compile returns it
    linears = [layer for layer in qframework.explain(forward, inputs).layers if layer.kind == "linear"]
    return bool(linears) and not any(layer.lowered or layer.fallback for layer in linears)


def _call(forward: Forward, inputs: Inputs, samples: int | None = None) -> Tensor:
    return _tensor(forward(*inputs))[:samples]


def build(family: Family, batch: int, device: str, smoke: bool) -> tuple[nn.Module, Inputs, Tensor]:
    """The float32 model, its inputs on the device, and the reference of the first ``COMPARED`` on the CPU."""
    torch.manual_seed(SEED)
    with torch.device(device):
        model = family.build(smoke).to(device).eval().requires_grad_(False)  # some parameters ignore the context
    inputs = tuple(x.to(device) for x in family.inputs(model, batch, smoke))
    with torch.inference_mode(), allow_tf32(False):
        # one at a time, since the batch in float32 may take more memory than all providers
        reference = torch.cat(
            [_tensor(model(*(x[i : i + 1] for x in inputs))).cpu() for i in range(min(batch, COMPARED))]
        )
    return model, inputs, reference


def _tensor(output: Tensor | Sequence[Tensor]) -> Tensor:
    return output if isinstance(output, Tensor) else output[-1]


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model in ``dtype``, but for frequencies of rotary embeddings, which transformers loads in float32.

    At position 1,024 an angle of a frequency in float16 is wrong by up to half a radian. Biases of attention that timm
    kept from a call in float32 are forgotten.
    """
    for module in model.modules():
        getattr(module, "attention_bias_cache", {}).clear()
    frequencies = {name: x for name, x in model.named_buffers() if name.rpartition(".")[2].endswith("inv_freq")}
    model = model.to(dtype)
    for name, x in frequencies.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, x)
    return model


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Floats in ``dtype``; ids and masks as they are."""
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)


def plans_of(
    names: Sequence[str], providers: Sequence[str], device: str, smoke: bool, throughput: bool, latency: bool
) -> list[Plan]:
    """Throughput and latency of the named architectures."""
    found = []
    for name in names:
        family, at_once = FAMILIES[name], (*AT_ONCE, *BY_BLOCKS)
        everything = (*at_once, *ALONE)
        batches = {2 if smoke else family.batch: everything if family.in_graphs else at_once} if throughput else {}
        batches |= {1: everything} if latency else {}
        for batch, offered in batches.items():
            found += [Plan(name, batch, each, device, smoke) for each in offered if each in providers]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on the GPU; returns the exit status."""
    parser = argument_parser("families", __doc__)
    parser.add_argument("--models", type=comma_separated(FAMILIES), help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--providers", type=comma_separated((*AT_ONCE, *BY_BLOCKS, *ALONE)), default=[*AT_ONCE, *ALONE])
    alone = parser.add_mutually_exclusive_group()
    alone.add_argument("--no-latency", action="store_true", help="leave batch 1 out")
    alone.add_argument("--no-throughput", action="store_true", help="batch 1 only")
    parser.add_argument("--together", type=int, default=3, help="architectures that are compiled at the same time")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"of timing; default: {ROUNDS}, more if hosts decide"
    )
    add_limits(parser, jobs=12, check=400.0, time=20.0, total=3600.0, unit="one provider of one architecture")
    arguments = parser.parse_args(argv)
    device = choose_device(arguments.smoke)
    names = arguments.models or list(SMOKE if arguments.smoke else FAMILIES)
    limits: Limits = limits_of(arguments)
    results = Results.start("families", device, arguments)
    latency = not (arguments.no_latency or arguments.smoke)
    for start in range(0, len(names), arguments.together):  # an early end leaves whole architectures
        group = names[start : start + arguments.together]
        plans = plans_of(group, arguments.providers, device, arguments.smoke, not arguments.no_throughput, latency)
        run_plans(results, Measurement, plans, Plan.identities, limits, arguments.jobs, rounds=arguments.rounds)
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
