"""Attention forward and backward with a gradient in 8 bit, beside PyTorch's kernels in float16.

    python -m benchmarks.int8_gradient --output DATE-h100-int8_gradient-times.json

Every provider's gradients of the first head are checked against float64 before it is timed. 16,384 tokens in all, 32
heads of 64 or 16 of 128 channels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import add_device, argument_parser, relative_error
from benchmarks.machine import describe_machine
from benchmarks.timing import time_kernel
from qframework.attention import sage_attention
from qframework.files import write_json

TOKENS, HEADS = 16384, {64: 32, 128: 16}
LENGTHS, SMOKE_LENGTHS = (2048, 4096, 8192, 16384), (64,)
PYTORCH = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
GRADIENTS = ("int8", "mixed")
# Of gradients, relative: normal logits are off by 0.01 in 8 bit.
MOST = {**dict.fromkeys(PYTORCH, 0.005), **dict.fromkeys(GRADIENTS, 0.04)}


class Case(NamedTuple):
    """One shape; ``batch`` sequences of ``tokens``."""

    batch: int
    heads: int
    tokens: int
    channels: int
    causal: bool


def cases(smoke: bool) -> list[Case]:
    """All lengths, both widths, causal and not."""
    lengths = SMOKE_LENGTHS if smoke else LENGTHS
    sizes = [(tokens, channels, causal) for tokens in lengths for channels in HEADS for causal in (False, True)]
    return [Case(1 if smoke else TOKENS // n, 2 if smoke else HEADS[d], n, d, causal) for n, d, causal in sizes]


def call_of(provider: str, inputs: Sequence[Tensor], grad: Tensor, causal: bool) -> Callable[[], tuple[Tensor, ...]]:
    """A forward and a backward pass: the gradients of query, key and value."""
    query, key, value = leaves = tuple(x.detach().requires_grad_() for x in inputs)

    def run() -> tuple[Tensor, ...]:
        if provider in PYTORCH:
            with sdpa_kernel(PYTORCH[provider]):
                out = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
        else:
            out = sage_attention(query, key, value, is_causal=causal, backward=provider)  # type: ignore[call-overload]
        return torch.autograd.grad(out, leaves, grad)

    return run


def exact(inputs: Sequence[Tensor], grad: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """The gradients of the first head in float64."""
    q, k, v = (x[:1, :1].double().requires_grad_() for x in inputs)
    logits = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return torch.autograd.grad(logits.softmax(-1) @ v, (q, k, v), grad[:1, :1].double())


def measure(case: Case, device: str) -> dict[str, object]:
    """Errors and times of all providers; a provider that is not available or wrong has its reason instead."""
    generator = torch.Generator(device).manual_seed(0)
    normal = functools.partial(torch.randn, generator=generator, device=device)
    inputs = [normal(*case[:4]).half() for _ in range(3)]
    grad = normal(*case[:4]).half()
    row: dict[str, object] = case._asdict()
    expected = exact(inputs, grad, case.causal)
    for provider in (*(("cudnn", "flash") if device == "cuda" else ("math",)), *GRADIENTS):
        run = call_of(provider, inputs, grad, case.causal)
        try:
            error = max(relative_error(a[:1, :1], b) for a, b in zip(run(), expected, strict=True))
        except RuntimeError as reason:
            row[provider] = str(reason)[:200]
            continue
        if error > MOST[provider]:
            row[provider] = f"wrong: an error of {error:.3g}"
            continue
        row[provider] = {"error": error, **time_kernel(run, device, rep_ms=100.0 if device == "cuda" else 1.0).fields()}
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write ``--output`` if given, after every shape."""
    parser = argument_parser("int8_gradient", __doc__, "document")
    add_device(parser)
    options = parser.parse_args(arguments)
    rows: list[dict[str, object]] = []
    for case in cases(options.smoke):
        rows.append(measure(case, options.device))
        print(rows[-1], flush=True)
        if options.output:
            what = "Attention forward and backward in float16, ms: PyTorch's kernels, and gradients in 8 bit."
            write_json(options.output, {"what": what, "machine": describe_machine(options.device), "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
