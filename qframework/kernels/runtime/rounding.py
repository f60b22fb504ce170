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
    return ((inside + 12583040.0).to(tl.int32, bitcast=True) + (zero_point - 128)).to(tl.int8)


@triton.jit
def round_to_int8(x):
    """Saturate to [-127, 127] and round half to even."""
    return integers(tl.minimum(tl.maximum(x, -127.0), 127.0))


@triton.jit
def integers(x):
    """Round float32 from -127 to 127 half to even: the lowest byte of the sum with 1.5 * 2**23 + 128, minus 128.

    Without the 128 the byte would be the sum's own, and ptxas (12.8 to 13.0), where it stores a float's lowest byte to
    shared memory, converts the float to an integer instead.
    """
    return ((x + 12583040.0).to(tl.int32, bitcast=True) ^ 128).to(tl.int8)
