"""Rounding in Triton, as qframework/numerics.py defines it."""

from __future__ import annotations

from qframework.kernels.runtime.triton import tl, triton


@triton.jit
def round_half_even(x):
    """Round a float32 of magnitude below 2**22 half to even: adding 1.5 * 2**23 drops the fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def round_and_shift(x, zero_point):
    """``clamp(round_half_even(x) + zero_point, -127, 127)`` as int8; ``zero_point`` is an int32 from -127 to 127."""
    shift = zero_point.to(tl.float32)
    inside = tl.minimum(tl.maximum(x, -127.0 - shift), 127.0 - shift)
    return ((inside + 12582912.0).to(tl.int32, bitcast=True) + zero_point).to(tl.int8)


@triton.jit
def round_to_int8(x):
    """Saturate to [-127, 127] and round half to even; the sum with 1.5 * 2**23 has the integer in its lowest byte."""
    return (tl.minimum(tl.maximum(x, -127.0), 127.0) + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
