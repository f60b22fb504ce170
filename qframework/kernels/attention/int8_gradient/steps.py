"""What the kernels of the 8-bit gradient of attention share: loads, products, rows as integers.

Formula and layout: see :mod:`~qframework.kernels.attention.int8_gradient.int8_gradient`.
"""

from __future__ import annotations

from typing import NamedTuple

from qframework.kernels.attention.operands import LOG2_E
from qframework.kernels.attention.variants import KEY_BLOCK, QUERY_BLOCK
from qframework.kernels.runtime.rounding import round_to_int8
from qframework.kernels.runtime.triton import INTERPRET, tl, triton
from qframework.numerics import MIN_SCALE

INTERPRETED = tl.constexpr(INTERPRET)
LEAST_SCALE = tl.constexpr(MIN_SCALE)
KEYS_OF_SCALE = tl.constexpr(KEY_BLOCK)
QUERIES_OF_SCALE = tl.constexpr(QUERY_BLOCK)
TO_BASE_2 = tl.constexpr(LOG2_E)
# The log-sum-exp of queries that do not exist: every weight is zero, and zero times it is no NaN.
NOWHERE = tl.constexpr(2.0**100)


class PassLayout(NamedTuple):
    """Compile-time properties of both passes."""

    d: int  # channels of Q and K
    dv: int  # channels of V
    block_d: int
    block_dv: int
    group: int  # heads of Q for each head of K
    int8: bool  # dV, dK and dQ are products of integers
    dropout: bool


@triton.jit
def float_dot(a, b, acc):
    """``acc + a b`` of 16-bit numbers."""
    # the interpreter multiplies the bits of bfloat16
    return acc + tl.dot(a.to(tl.float32), b.to(tl.float32)) if INTERPRETED else tl.dot(a, b, acc)


@triton.jit
def rows_to_int8(x, poison):
    """Rows of ``x`` as int8, and their scales; NaN in ``poison`` becomes NaN in the scales."""
    scale = tl.maximum(tl.max(tl.abs(x), 1) * (1.0 / 127.0), LEAST_SCALE)
    return round_to_int8(x * (1.0 / scale)[:, None]), scale + poison


@triton.jit
def not_finite(lse, delta):
    """Zero, or NaN where a log-sum-exp or delta is not finite: maxima would ignore NaN in a block."""
    return tl.sum(lse * 0.0 + delta * 0.0, 0)


@triton.jit
def load_tokens(base, tokens, stride, channels, count, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(tokens, channels) of a head; zero outside."""
    inside = (tokens < count)[:, None]
    if D != BLOCK_D:
        inside = inside & (channels < D)[None, :]
    return tl.load(base + tokens[:, None] * stride + channels[None, :], mask=inside, other=0)


@triton.jit
def load_channels(base, tokens, stride, channels, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(channels, tokens) of a head that is stored with tokens contiguous and padded to whole blocks."""
    at = base + channels[:, None] * stride + tokens[None, :]
    return tl.load(at, mask=(channels < D)[:, None], other=0) if D != BLOCK_D else tl.load(at)
