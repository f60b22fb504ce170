"""The error of attention's 8-bit gradient against float64, by the spread of the logits, with and without QK-norm.

Q, K, V and dO are normal, in float16, attention is causal; Q and K are scaled, so that the logits have a standard
deviation of the square of ``spread``. K has a bias per channel of twice its signal, which smoothing removes. QK-norm
divides each query and key by its root mean square, as models with it do before attention. dS is the gradient of the
logits, as the pass over queries reads it. The operator's CPU implementation rounds like the kernel.
"""

from __future__ import annotations

import math
from typing import get_args

import torch
from torch import Tensor

from benchmarks.harness import argument_parser
from benchmarks.machine import describe_machine
from qframework.files import write_json
from qframework.kernels.attention.int8_gradient.int8_gradient import (
    Gradient,
    Int8GradientArguments,
    Int8GradientBackwardArguments,
    attend_cpu,
    gradient_operands_cpu,
)
from qframework.kernels.attention.int8_gradient.reference import gradients_ref, products_of_dq

SHAPES, SMOKE_SHAPES = ((1, 2, 1024, 64), (1, 2, 1024, 128)), ((1, 2, 130, 32),)
SPREADS, SMOKE_SPREADS = (1.0, 3.0, 4.0, 5.0, 6.0, 8.0), (1.0, 6.0)
FORMS = (*((gradient, "auto") for gradient in get_args(Gradient)), ("mixed", "integer_exp"))  # the last as on Hopper
NAMES = ("out", "ds", "dq", "dk", "dv")


def cosine(actual: Tensor, exact: Tensor) -> float:
    """Cosine similarity of all elements."""
    return float(torch.nn.functional.cosine_similarity(actual.double().flatten(), exact.flatten(), dim=0))


def exact_gradients(query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """``(out, dS, dQ, dK, dV)`` of causal attention in float64."""
    q, k, v = (x.double().requires_grad_() for x in (query, key, value))
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    logits = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf)
    out = logits.softmax(-1) @ v
    return (out.detach(), *torch.autograd.grad(out, (logits, q, k, v), grad.double()))


def int8_gradients(
    gradient: str, variant: str, query: Tensor, key: Tensor, value: Tensor, grad: Tensor
) -> tuple[Tensor, ...]:
    """The same by the operator's CPU implementation."""
    call = Int8GradientArguments(query, key, value, is_causal=True, variant=variant, gradient=gradient)
    out, lse, k_mean, *_ = attend_cpu(call)  # a CPU keeps no rounded Q and K
    backward = Int8GradientBackwardArguments(grad, None, query, key, value, out, lse, k_mean, True, None, gradient)
    operands = gradient_operands_cpu(backward)
    return (out, products_of_dq(operands), *gradients_ref(operands))


def normed(x: Tensor) -> Tensor:
    """QK-norm: each token divided by its root mean square."""
    return x * x.square().mean(-1, keepdim=True).rsqrt()


def measure(shapes: tuple[tuple[int, ...], ...], spreads: tuple[float, ...]) -> list[dict[str, object]]:
    """A row for each shape, spread, QK-norm and gradient: cosine similarities."""
    rows: list[dict[str, object]] = []
    for shape in shapes:
        generator = torch.Generator().manual_seed(0)
        query, key, value, grad = (torch.randn(shape, generator=generator) for _ in range(4))
        key = key + 2 * torch.randn((*shape[:2], 1, shape[3]), generator=generator)
        for spread in spreads:
            for qk_norm in (False, True):
                q, k = (normed(x * spread) if qk_norm else x * spread for x in (query, key))
                inputs = [x.half() for x in (q, k, value, grad)]
                exact = exact_gradients(*inputs)
                for gradient, variant in FORMS:
                    found = int8_gradients(gradient, variant, *inputs)
                    similar = {n: cosine(a, b) for n, a, b in zip(NAMES, found, exact, strict=True)}
                    row = {"channels": shape[3], "spread": spread, "qk_norm": qk_norm, "gradient": gradient}
                    rows.append({**row, "variant": variant, **similar})
    return rows


def main() -> None:
    """Measure, print, and write ``--output`` if given."""
    arguments = argument_parser("int8_gradient_accuracy", __doc__, "document").parse_args()
    shapes, spreads = (SMOKE_SHAPES, SMOKE_SPREADS) if arguments.smoke else (SHAPES, SPREADS)
    rows = measure(shapes, spreads)
    for row in rows:
        kind = f"{row['channels']:4} {row['spread']:4} {'QK-norm' if row['qk_norm'] else '':8}"
        print(f"{kind}{row['gradient']:6}{row['variant']:12}", *(f"{name} {row[name]:.4f}" for name in NAMES))
    if arguments.output:
        what = "Cosine similarity of attention's result and gradients to float64, causal, by the spread of Q and K."
        write_json(arguments.output, {"what": what, "machine": describe_machine("cpu"), "shapes": shapes, "rows": rows})


if __name__ == "__main__":
    main()
