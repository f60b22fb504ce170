"""GPT blocks, forward and backward: INT8 training against BF16 and torchao's INT8 training; time and activation memory.

    python -m benchmarks.training_block --output benchmarks/results/training/2026-11-22-h100-block.json

A stack of a few pre-norm blocks with causal attention takes ``(batch, tokens, hidden)`` in BF16, so that what it costs
to enter and leave the INT8 data flow is shared. Weights are FP32 under autocast (``bf16_weights``: BF16 throughout, as
torchao's are). Times are of the whole stack, forward alone and forward with backward; ``activation_mb`` is what one
block keeps from forward to backward. Output and gradients are held against FP32 before anything is timed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import (
    Record,
    Results,
    UnavailableError,
    WrongResultError,
    argument_parser,
    comma_separated,
    guarded,
    relative_error,
)
from benchmarks.timing import time_provider
from qframework.training import BlockTensor
from qframework.training.convert import convert_to_int8_training

HIDDEN, SMOKE_HIDDEN = (1024, 2048, 4096), (64,)
BATCH, TOKENS, LAYERS, HEAD = 8, 2048, 2, 128
OPS = ("gpt_block_forward", "gpt_block_forward_backward")
# Relative L2 errors against FP32. INT8: each of the six quantizations of a block adds about 0.01 to values and
# gradients of a normal distribution, up to twice that at 128 x 128; errors of two blocks add up as random ones do.
TOLERANCE = {"bf16": 0.02, "int8": 0.1}


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
    weights: torch.dtype = torch.float32
    precision: str = "bf16"

    def prepare(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """The stack as this provider computes it."""
        module = self.convert(model.to(self.weights))
        return torch.compile(module, fullgraph=True) if self.compiled else module

    def autocast(self, device: str) -> AbstractContextManager[Any]:
        """For FP32 weights."""
        return torch.autocast(device, torch.bfloat16) if self.weights == torch.float32 else nullcontext()


def _ours(block_size: int, mode: Any = "per_block") -> Callable[[nn.Module], nn.Module]:
    return lambda model: convert_to_int8_training(model, block_size, mode)


def _torchao(model: nn.Module) -> nn.Module:
    try:
        from torchao.prototype.quantized_training import int8_mixed_precision_training
        from torchao.quantization import quantize_
    except ImportError as error:
        raise UnavailableError(f"torchao has no INT8 training: {error}") from error
    if not torch.cuda.is_available():
        raise UnavailableError("torchao's INT8 training needs a GPU")
    quantize_(model, int8_mixed_precision_training())
    return model


PROVIDERS = {
    "bf16_eager": Provider(),
    "bf16_compiled": Provider(compiled=True),
    "bf16_weights_compiled": Provider(compiled=True, weights=torch.bfloat16),
    "torchao_int8_compiled": Provider(_torchao, compiled=True, weights=torch.bfloat16, precision="int8"),
    "qframework_32": Provider(_ours(32), precision="int8"),
    "qframework_32_compiled": Provider(_ours(32), compiled=True, precision="int8"),
    "qframework_64_compiled": Provider(_ours(64), compiled=True, precision="int8"),
    "qframework_128_compiled": Provider(_ours(128), compiled=True, precision="int8"),
    "qframework_per_token_compiled": Provider(_ours(32, "per_token"), compiled=True, precision="int8"),
}


@dataclass
class Subject:
    """The stack in FP32 with its input, the gradient of its output, and what FP32 makes of them."""

    model: nn.Module
    x: Tensor
    grad: Tensor
    expected: list[Tensor]
    device: str

    @classmethod
    def build(cls, hidden: int, options: argparse.Namespace, device: str) -> Subject:
        torch.manual_seed(0)
        heads = max(1, hidden // HEAD)
        blocks = [Block(hidden, heads, options.dropout) for _ in range(options.layers)]
        model = nn.Sequential(*blocks).to(device)
        shape = (options.batch, options.tokens, hidden)
        x, grad = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
        expected = []
        if not options.dropout:  # every provider draws masks of its own
            # An example after the other: FP32 keeps twice as much as BF16.
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


def measure(name: str, subject: Subject, identity: Record, options: argparse.Namespace) -> list[Record]:
    """Check, then time forward, and forward with backward."""
    provider = PROVIDERS[name]
    model = copy.deepcopy(subject.model)
    forward = provider.prepare(model)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    x = subject.x.detach().requires_grad_()

    def step() -> Any:
        with provider.autocast(subject.device):
            out = forward(x)
        return torch.autograd.grad(out, (x, *weights), subject.grad.to(out.dtype))

    def forward_alone() -> Any:
        with provider.autocast(subject.device):
            return forward(x)

    with provider.autocast(subject.device):
        values = _values(forward, subject.x, subject.grad, model[0].attn.qkv.weight)  # type: ignore[index]
    error = check(values, subject.expected, TOLERANCE[provider.precision])
    memory = activation_mb(forward_alone, subject.device, weights) / options.layers
    rep_ms, runs = (5.0, 2) if options.smoke else (500.0, 10)
    records = []
    for op, fn, flops in zip(OPS, (forward_alone, step), (1.0, 3.0), strict=True):
        timing = time_provider(fn, subject.device, rep_ms=rep_ms, min_runs=runs)
        rate = flops * forward_flops(subject.x, options.layers) / timing.median_s / 1e12
        fields = {"error": error, "tflops": rate, "activation_mb": memory}
        records.append(replace(identity, op=op, **timing.fields(), **fields))
    return records


def check(values: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> float | None:
    """The largest relative error of output and gradients; None where there is nothing to compare with."""
    errors = {
        what: relative_error(value.cpu(), reference)
        for what, value, reference in zip(("output", "dX", "dW"), values, expected, strict=False)
    }
    for what, error in errors.items():
        if not error <= tolerance:
            raise WrongResultError(f"{what} is {error:.3g} from FP32's, at most {tolerance:g} accepted", error)
    return max(errors.values(), default=None)


def forward_flops(x: Tensor, layers: int) -> float:
    """Of the products of linears and of causal attention."""
    batch, tokens, hidden = x.shape
    return layers * (24.0 * batch * tokens * hidden**2 + 2.0 * batch * tokens**2 * hidden)


def activation_mb(forward: Callable[[], Tensor], device: str, weights: Sequence[Tensor]) -> float:
    """MB that forward keeps for backward, weights apart: what is allocated on a GPU, else what autograd saves."""
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
    """Bytes of all memory that autograd keeps for the backward pass of a call, each counted once, weights apart."""
    storages: dict[int, int] = {}
    kept: list[Tensor] = []  # alive, so that no address is used twice

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


def run(results: Results, hidden: int, options: argparse.Namespace, device: str, deadline: float) -> None:
    """All providers at one width; none begins after ``deadline`` of time.monotonic()."""
    subject = Subject.build(hidden, options, device)
    for name in options.providers:
        identity = Record(
            benchmark="training_block", provider=name, op="gpt_block", shape=list(subject.x.shape),
            dtype=PROVIDERS[name].precision, batch=options.batch,
        )  # fmt: skip
        if time.monotonic() > deadline:
            late = replace(identity, status="timeout", reason=f"not begun after {options.limit:g} s")
            results.add(*(replace(late, op=op) for op in OPS))
            continue
        records: list[Record] = []

        def attempt(name: str = name, identity: Record = identity, records: list[Record] = records) -> Record:
            records += measure(name, subject, identity, options)
            return records[0]

        failed = guarded(identity, attempt)
        results.add(*(records or [replace(failed, op=op) for op in OPS]))
        torch._dynamo.reset()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = argument_parser("training_block", __doc__)
    parser.add_argument(
        "--hidden", type=lambda text: [int(size) for size in text.split(",")], help="default: 1024,2048,4096"
    )
    parser.add_argument("--providers", type=comma_separated(PROVIDERS), default=list(PROVIDERS))
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--layers", type=int, default=LAYERS, help="blocks in the stack (default: %(default)s)")
    parser.add_argument("--dropout", type=float, default=0.0, help="results are then not checked (default: 0)")
    parser.add_argument("--limit", type=float, default=1500.0, help="seconds, after which no provider begins")
    options = parser.parse_args(argv)
    if options.smoke:
        options.batch, options.tokens, options.layers = 2, 32, 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    deadline = time.monotonic() + options.limit
    results = Results.start("training_block", device, options)
    for hidden in options.hidden or (SMOKE_HIDDEN if options.smoke else HIDDEN):
        run(results, hidden, options, device, deadline)
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
