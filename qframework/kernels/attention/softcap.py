"""The soft cap on logits (Gemma 2, section 2) inside of kernels."""

from __future__ import annotations

from qframework.kernels.runtime.triton import tl, triton


@triton.jit
def capped(s, softcap, UNIT: tl.constexpr):
    """``softcap * tanh(s / softcap)`` of natural logits; those in ``s``, and the result, are ``UNIT`` times as large.

    By ``tanh(x) = 1 - 2 / (1 + exp(2 x))``, whose absolute error is that of float32 numbers near 1: it makes a logit
    wrong by about ``2**-23 softcap``. The hardware's tanh would by up to ``2**-11`` of it.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    cap = softcap * UNIT
    return cap - 2 * cap / (1 + tl.exp2(s * (2 * LOG2E / cap)))
