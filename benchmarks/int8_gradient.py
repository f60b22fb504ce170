"""Attention forward and backward with a gradient in 8 bit, beside PyTorch's kernels.

    python -m benchmarks.int8_gradient --output DATE-h200-int8_gradient-times.json

"mixed" is what ``backward="mixed"`` computes, which leaves calls to PyTorch where that is faster; "mixed_operator"
never does. Every provider's gradients of the first head are checked against float64 before it is timed. 16,384 tokens
in 32 heads of 64 or 16 of 128 channels in float16, and other sizes; tokens or heads first in memory. Times are medians
of bursts that take turns.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import add_device, argument_parser, relative_error
from benchmarks.machine import describe_machine
from benchmarks.timing import time_ahead
from qframework.attention import sage_attention
from qframework.files import write_json

TOKENS, HEADS = 16384, {64: 32, 128: 16}
LENGTHS = (2048, 3072, 4096, 8192, 16384)
PYTORCH = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
GRADIENTS = ("mixed", "mixed_operator", "int8")
# Of gradients, relative: normal logits are off by 0.01 in 8 bit.
MOST = {**dict.fromkeys(PYTORCH, 0.005), **dict.fromkeys(GRADIENTS, 0.04)}


class Case(NamedTuple):
    """One shape; ``batch`` sequences of ``tokens``."""

    batch: int
    heads: int
    key_heads: int
    tokens: int
    channels: int
    causal: bool
    order: str = "tokens"  # what lies first in memory: tokens or heads
    dtype: str = "float16"


OTHERS = (
    *(Case(4, 16, 16, 4096, 96, causal) for causal in (False, True)),
    *(Case(4, 16, 16, 4096, 128, causal, dtype="bfloat16") for causal in (False, True)),
    *(
        Case(16384 // n, 32, 8, n, 128, causal, dtype="bfloat16")
        for n in (2048, 4096, 8192)
        for causal in (False, True)
    ),
    *(Case(3, 20, 5, 5000, 80, causal, dtype="bfloat16") for causal in (False, True)),
)
SMOKE = tuple(Case(1, 2, 2, 64, d, causal) for d in HEADS for causal in (False, True))


def cases(smoke: bool) -> tuple[Case, ...]:
    """All lengths, both widths, causal and not, in both orders; then the other sizes."""
    if smoke:
        return SMOKE
    plain = [(n, d, causal, order) for n in LENGTHS for d in HEADS for causal in (False, True) for order in _ORDERS]
    return (*(Case(TOKENS // n, HEADS[d], HEADS[d], n, d, causal, order) for n, d, causal, order in plain), *OTHERS)


_ORDERS = ("tokens", "heads")


def call_of(provider: str, inputs: Sequence[Tensor], grad: Tensor, causal: bool) -> Callable[[], tuple[Tensor, ...]]:
    """A forward and a backward pass: the gradients of query, key and value."""
    query, key, value = leaves = tuple(x.detach().requires_grad_() for x in inputs)
    grouped = query.shape[1] != key.shape[1]

    def run() -> tuple[Tensor, ...]:
        if provider in PYTORCH:
            with sdpa_kernel(PYTORCH[provider]):
                out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=grouped)
        elif provider == "mixed_operator":
            operator = torch.ops.qframework.int8_gradient_attention
            out, *_ = operator(query, key, value, causal, None, grouped, "auto", "mixed")
        else:
            settings: dict[str, Any] = {"is_causal": causal, "enable_gqa": grouped, "backward": provider}
            out = sage_attention(query, key, value, **settings)
        return torch.autograd.grad(out, leaves, grad)

    return run


def exact(inputs: Sequence[Tensor], grad: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """The gradients of the first key head and its queries in float64."""
    group = inputs[0].shape[1] // inputs[1].shape[1]
    q, k, v = (x[:1, :n].double().requires_grad_() for x, n in zip(inputs, (group, 1, 1), strict=True))
    outputs = []
    for head in range(group):  # one at a time: the logits of 16,384 tokens take 2 GB
        logits = q[:, head : head + 1] @ k.mT / math.sqrt(q.shape[-1])
        if causal:
            hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            logits = logits.masked_fill(hidden, -math.inf)
        outputs.append(logits.softmax(-1) @ v)
    return torch.autograd.grad(torch.cat(outputs, 1), (q, k, v), grad[:1, :group].double())


def measure(case: Case, device: str, providers: Sequence[str]) -> dict[str, object]:
    """Errors and times of ``providers``; one that is not available or wrong has its reason instead."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def normal(heads: int) -> Tensor:
        sizes = (case.tokens, heads) if case.order == "tokens" else (heads, case.tokens)
        x = torch.randn(case.batch, *sizes, case.channels, generator=generator, device=device).to(dtype)
        return x.transpose(1, 2) if case.order == "tokens" else x

    inputs = [normal(heads) for heads in (case.heads, case.key_heads, case.key_heads)]
    grad = normal(case.heads)
    row: dict[str, object] = case._asdict()
    expected = exact(inputs, grad, case.causal)
    calls, errors = {}, {}
    for provider in providers:
        run = call_of(provider, inputs, grad, case.causal)
        try:
            pairs = zip(run(), expected, strict=True)
            errors[provider] = max(relative_error(a[:1, : b.shape[1]], b) for a, b in pairs)
        except RuntimeError as reason:
            row[provider] = str(reason)[:200]
            continue
        if errors[provider] > MOST[provider] * (1 if case.dtype == "float16" else 2):
            row[provider] = f"wrong: an error of {errors[provider]:.3g}"
            continue
        calls[provider] = run
    for provider, timing in time_ahead(calls, device).items():
        row[provider] = {"error": errors[provider], **timing.fields()}
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write ``--output`` if given, after every shape."""
    parser = argument_parser("int8_gradient", __doc__, "document")
    add_device(parser)
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no other shape begins")
    parser.add_argument("--runs", type=int, default=1, help="how often all shapes are measured")
    parser.add_argument("--providers", help=f"comma-separated, of {', '.join((*PYTORCH, *GRADIENTS))}")
    options = parser.parse_args(arguments)
    pytorch = ("cudnn",) if options.device == "cuda" else ("math",)
    providers = options.providers.split(",") if options.providers else (*pytorch, *GRADIENTS)
    began, about = time.perf_counter(), describe_machine(options.device)
    rows: list[dict[str, object]] = []
    for run, case in itertools.product(range(1, options.runs + 1), cases(options.smoke)):
        if time.perf_counter() - began > options.limit:
            break
        rows.append({"run": run, **measure(case, options.device, providers)})
        print(_line(rows[-1]), flush=True)
        if options.output:
            what = "Attention forward and backward, ms: PyTorch's kernels, and gradients in 8 bit."
            write_json(options.output, {"what": what, "about": about, "rows": rows})
    return 0


def _line(row: dict[str, object]) -> str:
    """Sizes, and the median of each provider or why it has none."""
    sizes = " ".join(str(row[name]) for name in Case._fields)
    found = {name: x for name, x in row.items() if name not in ("run", *Case._fields)}
    times = (f"{name} {x['p50_ms']:.3f} ms" if isinstance(x, dict) else f"{name}: {x}" for name, x in found.items())
    return f"{sizes}: {', '.join(times)}"


if __name__ == "__main__":
    raise SystemExit(main())
