"""The soft cap on logits (Gemma 2, section 2) inside of kernels."""

from __future__ import annotations

import torch

from qframework.kernels.runtime.triton import INTERPRET, tl, triton

_WITHOUT_PTX = tl.constexpr(INTERPRET or torch.version.hip is not None)
# Without numbers below 2^-126, which would take three more instructions each: beside 1 they are 0.
INVERSE_OF_ONE_PLUS_EXP2 = (
    "{ .reg .f32 t; ex2.approx.ftz.f32 t, $1; add.rn.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }"
)
_INVERSE = tl.constexpr(INVERSE_OF_ONE_PLUS_EXP2)


@triton.jit
def _inverse_of_one_plus_exp2(x):
    """``1 / (1 + 2^x)``, from 1 to 0; NaN stays NaN."""
    if _WITHOUT_PTX:
        y = 1.0 / (1.0 + tl.exp2(x))
    else:
        y = tl.inline_asm_elementwise(_INVERSE, "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def capped(s, softcap, UNIT: tl.constexpr):
    """``softcap * tanh(s / softcap)`` of natural logits; those in ``s``, and the result, are ``UNIT`` times as large.

    By ``tanh(x) = 1 - 2 / (1 + exp(2 x))``, whose absolute error is that of float32 numbers near 1: it makes a logit
    wrong by about ``2**-22 softcap``. The hardware's tanh would by up to ``2**-11`` of it.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    cap = softcap * UNIT
    return cap - 2 * cap * _inverse_of_one_plus_exp2(s * (2 * LOG2E / cap))
