"""Activations in epilogues: their names, in torch, and in Triton, where gelu and silu may take a single tanh.

With ``h = x / 2`` they are ``h + h tanh(u)`` for a u that is odd in x. The hardware's tanh replaces an exponential with
a division, or with the polynomial of a smooth logarithm. Its error amounts to at most 2^-12 |x| of the result, which is
little where the result is rounded to INT8.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from qframework.kernels.runtime.triton import INTERPRET, tl, triton

Activation = Literal["none", "gelu", "gelu_tanh", "relu", "silu"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)

_WITHOUT_PTX = tl.constexpr(INTERPRET or torch.version.hip is not None)

# A minimax fit: erf(x / sqrt(2)) is tanh(a x + b x^3 + c x^5) to within 4e-5. Beyond x^2 = 32 both are 1.
_A, _B, _C = 0.797717507, 0.0367987671, -0.000315922155
# Kernels evaluate it for x / sqrt(32), whose square saturates at 1.
ROOT = 32**0.5
INVERSE_ROOT, HALF_ROOT = tl.constexpr(1 / ROOT), tl.constexpr(ROOT / 2)
_ROOT_A, _ROOT_B, _ROOT_C = (tl.constexpr(each) for each in (_A * ROOT, _B * ROOT**3, _C * ROOT**5))
TANH_A, TANH_B = tl.constexpr(0.79788456080286536), tl.constexpr(0.035677408136300125)  # coefficients of gelu_tanh


@triton.jit
def of_erf(x, square):
    """``u`` of gelu, with ``tanh(u) = 2 Phi - 1``, from x / sqrt(32) and its square, which is at most 1."""
    return x * (_ROOT_A + square * (_ROOT_B + square * _ROOT_C))


@triton.jit
def tanh(x):
    """tanh in one instruction, with a relative error of at most 2^-11."""
    if _WITHOUT_PTX:
        t = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    else:
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    return t


@triton.jit
def saturated_product(x, y):
    """``x * y`` clamped to [0, 1], with NaN as 0, in one instruction."""
    if _WITHOUT_PTX:
        z = tl.minimum(tl.maximum(x * y, 0.0), 1.0)
    else:
        z = tl.inline_asm_elementwise(
            "mul.sat.f32 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )
    return z


@triton.jit
def saturated_fma(x, y, z):
    """``x * y + z`` clamped to [0, 1], with NaN as 0, in one instruction."""
    if _WITHOUT_PTX:
        s = tl.minimum(tl.maximum(x * y + z, 0.0), 1.0)
    else:
        s = tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, $2, $3;", "=r,r,r,r", [x, y, z], dtype=tl.float32, is_pure=True, pack=1
        )
    return s


@triton.jit
def activate(y, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    """The activation; EXACT to float32 accuracy, else accurate enough for 16-bit and INT8 results."""
    if ACTIVATION == "gelu":
        y = 0.5 * y * (1.0 + tl.math.erf(y * 0.7071067811865476)) if EXACT else fast_gelu(y)
    elif ACTIVATION == "gelu_tanh":  # 0.5 * (1 + tanh(u)) = sigmoid(2 u)
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    elif ACTIVATION == "relu":
        y = tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "silu":
        y = y * tl.sigmoid(y)
    return y


@triton.jit
def fast_gelu(x):
    """``x Phi(x)`` as ``max(x, 0) - |x| 2^q(|x|)``, with a polynomial q for the smooth logarithm of erfc.

    The error is below 1e-6, and below 1e-5 of the result where |x| < 1. The coefficients are a minimax fit on [0, 6]
    with q(0) = -1; above 6, 2^q decreases.
    """
    t = tl.minimum(tl.abs(x), 16.0, propagate_nan=tl.PropagateNan.ALL)  # infinity times 0 would be NaN
    q = -0.00048810212 * t + 0.0071987184
    q = q * t - 0.052146632
    q = q * t - 0.45959583
    q = q * t - 1.1510005
    q = q * t - 1.0
    return tl.maximum(x, 0.0) - t * tl.exp2(q)


def apply_activation(y: Tensor, activation: str) -> Tensor:
    """The named activation in torch: ``gelu`` is the erf form, ``gelu_tanh`` the tanh approximation."""
    if activation == "none":
        return y
    if activation == "gelu":
        return F.gelu(y)
    if activation == "gelu_tanh":
        return F.gelu(y, approximate="tanh")
    return F.relu(y) if activation == "relu" else F.silu(y)
