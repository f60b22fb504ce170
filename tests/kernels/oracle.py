"""Oracles in NumPy float64, sharing no code with the package, and the error bounds that follow from the arithmetic."""

from __future__ import annotations

import math
import os

import numpy as np
import torch
from torch import Tensor

# Unit roundoff: half the distance between 1 and the next number.
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GELU_OFF = 1e-6  # of Triton's GELU where the result is rounded to 16 or 8 bit
BY_TANH = (
    "gelu",
    "gelu_tanh",
    "silu",
)  # which kernels compute by the hardware's tanh where the result is INT8 with one scale
_erf = np.vectorize(math.erf, otypes=[np.float64])


def numpy64(x: Tensor) -> np.ndarray:
    return x.detach().cpu().double().numpy()


def activation(y: np.ndarray, name: str) -> np.ndarray:
    if name == "gelu":
        return 0.5 * y * (1 + _erf(y / math.sqrt(2)))
    if name == "gelu_tanh":
        return 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
    if name == "relu":
        return np.maximum(y, 0)
    if name == "silu":
        return y / (1 + np.exp(-np.clip(y, -700, 700)))
    return y


def linear(a, a_scale, b, b_scale, bias=None, act="none", residual=None) -> tuple[np.ndarray, np.ndarray]:
    """The exact result and, per element, the largest error a float32 epilogue may make.

    Rounding: int32 to float32, two products, the bias, the residual: five roundings of at most UNIT of the terms they
    touch. The activations multiply an error by at most 1.13 and are computed from exponentials and erf to within 2^-20.
    """
    acc = numpy64(a) @ numpy64(b).T
    product = acc * numpy64(a_scale) * numpy64(b_scale)
    y, terms = product, np.abs(product)
    if bias is not None:
        y, terms = y + numpy64(bias), terms + np.abs(numpy64(bias))
    error = 5 * UNIT[torch.float32] * terms
    if act != "none":
        error = 1.13 * error + (2.0**-20) * np.abs(y)
    y = activation(y, act)
    if residual is not None:
        y = y + numpy64(residual)
        error = error + 2 * UNIT[torch.float32] * (np.abs(y) + np.abs(numpy64(residual)))
    return y, error


def by_tanh(act: str, residual: Tensor | None, out_scale: np.ndarray | None) -> bool:
    """Whether kernels compute an activation by the hardware's tanh."""
    return act in BY_TANH and residual is None and out_scale is not None and out_scale.size == 1


def off_by_activation(
    a, a_scale, b, b_scale, bias, act, residual, out_scale: np.ndarray, zero_point: bool = False
) -> np.ndarray | float:
    """What an INT8 result may be off by beyond ``linear``'s error, before it is rounded.

    The hardware's tanh is off by 2^-11 of itself, times half the argument; GELU's fit by 5.5e-5; and the quotient is
    rounded to 2^-25 of 254 steps. Without an activation, so are the bias and the quotient, unless there is a zero point
    or scales are those of rows.
    """
    if act == "none" and residual is None and out_scale.ndim < 2 and not zero_point:
        return 2 * 254 * 2.0**-25 * out_scale
    if not by_tanh(act, residual, out_scale):
        return GELU_OFF * (act == "gelu")
    argument, _ = linear(a, a_scale, b, b_scale, bias)
    hardware = 0.0 if INTERPRETED or not torch.cuda.is_available() else 2.0**-12 * np.abs(argument)
    fit = np.minimum(5.5e-5, 2e-5 * np.abs(argument)) if act == "gelu" else 0.0
    return hardware + fit + 2.0**-16 * out_scale


def most_doubtful(act: str, residual: Tensor | None, out_scale: np.ndarray) -> float:
    """The share of values that may be as near to a tie as the error: the hardware's tanh is off by 0.03 steps."""
    return 0.03 if by_tanh(act, residual, out_scale) else 0.01


def quantized(y: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The exact int8 values, and how far each quotient is from the nearest tie between two of them."""
    quotient = y / scale
    to_tie = np.abs(quotient - np.floor(quotient) - 0.5)
    return np.clip(np.rint(quotient), -127, 127), to_tie


def assert_float_close(got: Tensor, exact: np.ndarray, error: np.ndarray) -> None:
    """``got`` is ``exact`` within ``error`` plus one rounding to its dtype (half its smallest step near zero)."""
    tiny = {torch.float32: 2.0**-149, torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}[got.dtype]
    unit = UNIT[got.dtype]
    if INTERPRETED and got.dtype == torch.bfloat16:
        unit *= 2  # Triton's interpreter truncates to bfloat16 where every chip rounds
    allowed = error * (1 + unit) + 1.01 * unit * np.abs(exact) + tiny
    off = np.abs(numpy64(got) - exact)
    assert got.shape == exact.shape
    assert (off <= allowed).all(), f"error {off.max():.3g}, {(off / allowed).max():.3g} times what rounding explains"


def assert_int8_close(got: Tensor, y: np.ndarray, error: np.ndarray, scale: np.ndarray, most: float = 0.01) -> None:
    """``got`` is the rounded quotient; it may be one step off only where the error bound reaches a tie.

    That may be the case for a share ``most`` of the values.
    """
    exact, to_tie = quantized(y, scale)
    off = np.abs(numpy64(got) - exact)
    doubtful = to_tie <= error / scale + 3 * UNIT[torch.float32] * np.abs(y / scale)
    doubtful &= np.abs(y / scale) < 128  # beyond, both sides of a tie saturate
    assert got.dtype == torch.int8
    assert off[~doubtful].max(initial=0) == 0, "a value far from any tie was rounded wrongly"
    assert off.max(initial=0) <= 1
    assert doubtful.mean() < most if doubtful.size > 1000 else True, "the test looks at ties only"
