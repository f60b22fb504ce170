"""Exact attention in FP64, the error quantization is expected to make, and a record of operators that ran."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

ROUNDING = {torch.float32: 2.0**-11, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # of P, of V and of the result
SIGMAS = 7.0


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, lse, P)`` in FP64, differentiable; ``value``, ``key`` with as many heads as ``query``. Masked rows: 0."""
    query, key, value = query.double(), key.double(), value.double()
    logits = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask.double()
    if is_causal:
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(hidden, -math.inf)
    dead = (logits == -math.inf).all(-1, keepdim=True)
    p = logits.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
    return p @ value, logits.logsumexp(-1), p


def expected_error(query: Tensor, key: Tensor, value: Tensor, p: Tensor, scale: float | None = None) -> Tensor:
    """Largest plausible error of 8-bit attention, ``(..., Nq, Dv)``: SIGMAS standard deviations of its rounding noise.

    A rounded value is off by a uniform error of variance step**2 / 12, so a logit by one of variance
    ``scale**2 / 12 * (|q|**2 step_k**2 + |k|**2 step_q**2)``, and the output by ``sum_j P_j error_j (v_j - out)``.
    Added to it: P, V and the result rounded to 16 bit.
    """
    dtype = query.dtype
    query, key, value, p = query.double(), key.double(), value.double(), p.detach()
    key = key - key.mean(-2, keepdim=True)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    q_step, k_step = query.abs().max() / 127, key.abs().max() / 127
    variance = query.square().sum(-1)[..., :, None] * k_step**2 + key.square().sum(-1)[..., None, :] * q_step**2
    weights = p.square() * variance * (scale**2 / 12)
    out = p @ value
    spread = weights @ value.square() - 2 * out * (weights @ value) + out.square() * weights.sum(-1, keepdim=True)
    return SIGMAS * spread.clamp(min=0).sqrt() + 3 * ROUNDING[dtype] * (p @ value.abs()) + 1e-6


def assert_within(actual: Tensor, expected: Tensor, allowed: Tensor) -> None:
    """Every element within what is allowed for it; NaN is not."""
    error = (actual.double() - expected).abs()
    worst = (error / allowed).max() if error.numel() else torch.zeros(())
    assert bool(worst <= 1), f"an error is {float(worst):.2f} times what is allowed"


class Operators(TorchDispatchMode):
    """How often each operator ran inside the scope, by its name without namespace and overload."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))

    def count(self, name: str = "sage_attention") -> int:
        return self.calls.count(name)


def heads(*shape: int, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device)


def gradients(function: Callable[..., Any], *inputs: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
    """Gradients of ``function`` for floating-point inputs, with a weight that differs for every output element."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    outputs = function(*leaves, **kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = [torch.linspace(-1, 1, o.numel(), dtype=o.dtype, device=o.device).view(o.shape) for o in outputs]
    return torch.autograd.grad(outputs, [x for x in leaves if x.requires_grad], weights)


def qkv(nq: int = 20, nk: int = 30, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return heads(2, 3, nq, 16, **kwargs), heads(2, 3, nk, 16, **kwargs), heads(2, 3, nk, 16, **kwargs)


class Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value) * 2


def count_operators(graph: torch.fx.GraphModule) -> int:
    return sum(str(node.target).startswith("qframework.sage_attention") for node in graph.graph.nodes)
