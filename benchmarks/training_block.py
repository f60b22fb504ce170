"""GPT blocks, forward and backward: INT8 training against BF16 and torchao's INT8 and FP8; time and activation memory.

    python -m benchmarks.training_block --output benchmarks/results/training/2026-11-22-h100-block.json

The model is a stack of a few pre-norm blocks with causal attention for ``(batch, tokens, hidden)`` in BF16, which share
the cost of entering and leaving the INT8 data flow. Weights are FP32 under autocast (``bf16_weights``: BF16 throughout,
like torchao's). Times are of the whole stack, forward alone and forward with backward; ``activation_mb`` is the memory
that one block keeps from forward to backward. Output and gradients are compared with FP32 before anything is timed. On
a GPU, every provider runs in its own process; several are checked in parallel, then each is timed alone.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
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
    integers,
    relative_error,
    require_quantized,
)
from benchmarks.timing import time_provider
from benchmarks.torchao_training import quantize_for_fp8_training, quantize_for_training
from qframework.kernels.blocks.format import BLOCK_SIZES, DEFAULT_BLOCK_SIZE, BlockSize, block_size_name
from qframework.training import BlockTensor
from qframework.training.convert import convert_to_int8_training

HIDDEN, SMOKE_HIDDEN = (1024, 2048, 4096), (64,)
BATCH, TOKENS, LAYERS, HEAD = 8, 2048, 2, 128
OPS = ("gpt_block_forward", "gpt_block_forward_backward")
# Relative L2 errors against FP32. INT8: each of the six quantizations of a block adds about 0.01 to normal values and
# gradients, up to twice that at 128 x 128; the errors of two blocks add up like random ones. FP8: 0.061 for a product
# with a gradient (FP8_TOLERANCE in block_linear_cases.py); eight products in two blocks give at most 0.17, less because
# the residuals carry a part of each gradient past them.
TOLERANCE = {"bf16": 0.02, "int8": 0.1, "fp8": 0.15}
# Under causal attention the gradient of the n-th value falls as n^-1/2, here to a fiftieth, and with a single scale
# most are below one step: over T tokens the error is step (T / 12 / sum of 1 / n)^1/2, about 0.2 with a step of 4.5 /
# 127.
PER_TENSOR_TOLERANCE = 0.4
INT8_LEAST = 0.012  # twice the error of BF16, half of INT8's: a smaller error means that nothing was quantized


class Attention(nn.Module):
    """Causal self-attention of ``(B, N, C)``."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two linears with GPT-2's GELU between them."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, 4 * hidden)
        self.act = nn.GELU(approximate="tanh")
        self.fc2 = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    """A pre-norm transformer block; dropout where GPT-2 has it."""

    def __init__(self, hidden: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(hidden), Attention(hidden, heads)
        self.norm2, self.mlp = nn.LayerNorm(hidden), Mlp(hidden)
        self.drop1, self.drop2 = (nn.Dropout(dropout) if dropout else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop1(self.attn(self.norm1(x)))
        return x + self.drop2(self.mlp(self.norm2(x)))


@dataclass(frozen=True)
class Provider:
    """A way to train the stack."""

    convert: Callable[[nn.Module], nn.Module] = lambda model: model
    compiled: bool = False
    graphs: bool = False  # compiled and replayed as CUDA graphs, without host time
    weights: torch.dtype = torch.float32
    precision: str = "bf16"
    lenient: float | None = None

    @property
    def tolerance(self) -> float:
        """The maximum relative error against FP32."""
        return TOLERANCE[self.precision] if self.lenient is None else self.lenient

    def prepare(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """The stack as this provider computes it."""
        module = self.convert(model.to(self.weights))
        mode = "reduce-overhead" if self.graphs else None
        return torch.compile(module, fullgraph=True, dynamic=False, mode=mode) if self.compiled else module

    def autocast(self, device: str) -> AbstractContextManager[Any]:
        """For FP32 weights."""
        return torch.autocast(device, torch.bfloat16) if self.weights == torch.float32 else nullcontext()


def _ours(block_size: BlockSize = DEFAULT_BLOCK_SIZE, mode: Any = "per_block") -> Callable[[nn.Module], nn.Module]:
    return lambda model: convert_to_int8_training(model, block_size, mode, skip_slower=False)


def compiled_in_blocks(block_size: BlockSize) -> str:
    """The provider of INT8 in blocks of a size, compiled."""
    return f"qframework_{block_size_name(block_size)}_compiled"


def _torchao(quantize: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    def convert(model: nn.Module) -> nn.Module:
        if not torch.cuda.is_available():
            raise UnavailableError("torchao's INT8 and FP8 training need a GPU")
        return quantize(model)

    return convert


GRAPHS_SIZE: BlockSize = (1, 128)  # also timed under CUDA graphs
GRAPHS = f"{compiled_in_blocks(GRAPHS_SIZE)}_graphs"
PROVIDERS = {
    "bf16_eager": Provider(),
    "bf16_compiled": Provider(compiled=True),
    "bf16_compiled_graphs": Provider(compiled=True, graphs=True),
    "bf16_weights_compiled": Provider(compiled=True, weights=torch.bfloat16),
    "torchao_int8_compiled": Provider(
        _torchao(quantize_for_training), compiled=True, weights=torch.bfloat16, precision="int8"
    ),
    "torchao_fp8_compiled": Provider(
        _torchao(quantize_for_fp8_training), compiled=True, weights=torch.bfloat16, precision="fp8"
    ),
    "qframework_32": Provider(_ours(32), precision="int8"),
    **{compiled_in_blocks(size): Provider(_ours(size), compiled=True, precision="int8") for size in BLOCK_SIZES},
    GRAPHS: Provider(_ours(GRAPHS_SIZE), compiled=True, graphs=True, precision="int8"),
    "qframework_per_token_compiled": Provider(_ours(mode="per_token"), compiled=True, precision="int8"),
    "qframework_per_tensor_compiled": Provider(
        _ours(mode="per_tensor"), compiled=True, precision="int8", lenient=PER_TENSOR_TOLERANCE
    ),
}


@dataclass
class Subject:
    """The stack in FP32 with its input, the gradient of its output, and the FP32 results."""

    model: nn.Module
    x: Tensor
    grad: Tensor
    expected: list[Tensor]
    device: str

    @classmethod
    def build(cls, hidden: int, options: argparse.Namespace, device: str, checked: bool = True) -> Subject:
        torch.manual_seed(0)
        heads = max(1, hidden // HEAD)
        with torch.device(device):
            model = nn.Sequential(*(Block(hidden, heads, options.dropout) for _ in range(options.layers)))
        shape = (options.batch, options.tokens, hidden)
        x, grad = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
        expected = []
        if checked and not options.dropout:  # providers draw different masks
            # One example at a time, since FP32 needs twice the memory of BF16.
            parts = [
                _values(model, part.float(), dpart.float())
                for part, dpart in zip(x.split(1), grad.split(1), strict=True)
            ]
            outs, dxs, dws = zip(*parts, strict=True)
            expected = [torch.cat(outs).cpu(), torch.cat(dxs).cpu(), torch.stack(dws).sum(0).cpu()]
        return cls(model, x, grad, expected, device)


def _values(forward: Any, x: Tensor, grad: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Output, gradient of the input, gradient of the first block's first linear."""
    x = x.detach().requires_grad_()
    weight = forward[0].attn.qkv.weight if weight is None else weight
    out = forward(x)
    dx, dw = torch.autograd.grad(out, (x, weight), grad.to(out.dtype))
    return out.detach(), dx, dw


@dataclass(frozen=True)
class Plan:
    """What a worker measures: a provider at some widths."""

    provider: str
    hidden: tuple[int, ...]
    options: argparse.Namespace
    device: str

    def identities(self, hidden: int) -> list[Record]:
        """The rows at one width; graphs need the backward pass, so they have no forward row."""
        shape, dtype = [self.options.batch, self.options.tokens, hidden], PROVIDERS[self.provider].precision
        return [
            Record(benchmark="training_block", provider=self.provider, op=op, shape=shape, dtype=dtype, batch=shape[0])
            for op in (OPS[1:] if PROVIDERS[self.provider].graphs else OPS)
        ]


class Measurement:
    """A worker: checks its provider at all widths, then times those that passed, keeping compiled code."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.checked: dict[int, list[Record]] = {}

    def __call__(self, phase: Phase) -> Iterator[Record]:
        for hidden in self.plan.hidden:
            if phase == "check":
                self.checked[hidden] = self._attempt(self.plan.identities(hidden), self._check)
                yield from self.checked[hidden]
            elif self.checked[hidden][0].status == "ok":
                yield from self._attempt(self.checked[hidden], self._time)

    def _attempt(self, rows: list[Record], measure: Callable[[Stack, list[Record]], list[Record]]) -> list[Record]:
        """The rows that ``measure`` returns, or ``rows`` with the reason for its failure."""
        found: list[Record] = []

        def attempt() -> Record:
            stack = Stack.build(self.plan, (rows[0].shape or [])[-1], checked=rows[0].error is None)
            found.extend(measure(stack, rows))
            return found[0]

        failed = guarded(rows[0], attempt)
        gc.collect()
        if self.plan.device == "cuda":
            torch.cuda.empty_cache()
        return found or [replace(row, status=failed.status, reason=failed.reason, error=failed.error) for row in rows]

    def _check(self, stack: Stack, rows: list[Record]) -> list[Record]:
        with stack.autocast():
            values = _values(stack.forward, stack.subject.x, stack.subject.grad, stack.first_weight)
        error = check(values, stack.subject.expected, stack.provider.tolerance)
        if error is not None and stack.provider.precision != "bf16":
            require_quantized(error, INT8_LEAST)
        memory = None  # graphs keep their memory between calls
        if not stack.provider.graphs:
            memory = activation_mb(stack.output, self.plan.device, stack.weights) / self.plan.options.layers
        return [replace(row, error=error, activation_mb=memory) for row in rows]

    def _time(self, stack: Stack, rows: list[Record]) -> list[Record]:
        rep_ms, runs = (5.0, 2) if self.plan.options.smoke else (500.0, 10)
        flops = forward_flops(stack.subject.x, self.plan.options.layers) / 1e12
        found = []
        for row in rows:
            fn, products = (stack.output, 1.0) if row.op == OPS[0] else (stack.step, 3.0)
            timing = time_provider(fn, self.plan.device, rep_ms=rep_ms, min_runs=runs)
            found.append(replace(row, **timing.fields(), tflops=products * flops / timing.median_s))
        return found


@dataclass
class Stack:
    """The stack as a provider computes it, with its own copy of the weights."""

    provider: Provider
    subject: Subject
    forward: Callable[[Tensor], Tensor]
    first_weight: Tensor
    weights: Sequence[Tensor]
    x: Tensor

    @classmethod
    def build(cls, plan: Plan, hidden: int, checked: bool) -> Stack:
        provider = PROVIDERS[plan.provider]
        subject = Subject.build(hidden, plan.options, plan.device, checked)
        forward = provider.prepare(subject.model)
        weights = [weight for weight in subject.model.parameters() if weight.requires_grad]
        first: Any = subject.model[0]  # type: ignore[index]
        return cls(provider, subject, forward, first.attn.qkv.weight, weights, subject.x.detach().requires_grad_())

    def autocast(self) -> AbstractContextManager[Any]:
        return self.provider.autocast(self.subject.device)

    def output(self) -> Tensor:
        """Forward."""
        with self.autocast():
            return self.forward(self.x)

    def step(self) -> Any:
        """Forward and backward."""
        out = self.output()
        return torch.autograd.grad(out, (self.x, *self.weights), self.subject.grad.to(out.dtype))


def check(values: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> float | None:
    """The largest relative error of output and gradients; None if there is no reference."""
    errors = {
        what: relative_error(value.cpu(), reference)
        for what, value, reference in zip(("output", "dX", "dW"), values, expected, strict=False)
    }
    for what, error in errors.items():
        if not error <= tolerance:
            raise WrongResultError(
                f"relative error of {what} against FP32 must be at most {tolerance:g}, got {error:.3g}", error
            )
    return max(errors.values(), default=None)


def forward_flops(x: Tensor, layers: int) -> float:
    """Floating-point operations of linears and causal attention in a forward pass."""
    batch, tokens, hidden = x.shape
    return layers * (24.0 * batch * tokens * hidden**2 + 2.0 * batch * tokens**2 * hidden)


def activation_mb(forward: Callable[[], Tensor], device: str, weights: Sequence[Tensor]) -> float:
    """MB that forward keeps for backward, without weights: allocated memory on a GPU, else what autograd saves."""
    if device != "cuda":
        return saved_bytes(forward, weights) / 2**20
    forward()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = forward()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    del out
    return kept / 2**20


def saved_bytes(forward: Callable[[], Any], weights: Sequence[Tensor] = ()) -> int:
    """Bytes of the storages that autograd saves for the backward pass of a call, without weights."""
    storages: dict[int, int] = {}
    kept: list[Tensor] = []  # keeps tensors alive, so that addresses are unique

    def pack(tensor: Tensor) -> Tensor:
        insides = [tensor.q, tensor.scale] if isinstance(tensor, BlockTensor) else [tensor]
        for inside in insides:
            storage = inside.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    for weight in weights:
        storages.pop(weight.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def run(results: Results, options: argparse.Namespace, hidden: Sequence[int], device: str) -> None:
    """Measure all providers: each in its own process, or on a CPU and in smoke runs, all in this one."""
    plans = [Plan(name, tuple(hidden), options, device) for name in options.providers]
    if device == "cuda" and not options.smoke:
        run_plans(results, Measurement, plans, _identities, limits_of(options), options.jobs)
        return
    for plan in plans:
        measurement = Measurement(plan)
        answers = Answers(plan, list(measurement("check")), list(measurement("time")))
        torch._dynamo.reset()
        results.add(*answers.complete(_identities(plan)))


def _identities(plan: Plan) -> list[Record]:
    return [row for size in plan.hidden for row in plan.identities(size)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = argument_parser("training_block", __doc__)
    parser.add_argument("--hidden", type=integers, help="default: 1024,2048,4096")
    parser.add_argument("--providers", type=comma_separated(PROVIDERS), default=list(PROVIDERS))
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--layers", type=int, default=LAYERS, help="blocks in the stack (default: %(default)s)")
    parser.add_argument("--dropout", type=float, default=0.0, help="disables the check of results (default: 0)")
    add_limits(parser, jobs=4, check=300.0, time=60.0, total=500.0, unit="one provider, all widths")
    options = parser.parse_args(argv)
    if options.smoke:
        options.batch, options.tokens, options.layers = 2, 32, 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = Results.start("training_block", device, options)
    run(results, options, options.hidden or (SMOKE_HIDDEN if options.smoke else HIDDEN), device)
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
