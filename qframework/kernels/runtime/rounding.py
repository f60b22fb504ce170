"""Rounding in Triton, as qframework/numerics.py defines it."""

from __future__ import annotations

from qframework.kernels.runtime.triton import tl, triton


@triton.jit
def round_half_even(x):
    """Round a float32 of magnitude below 2**22 to an integer by pushing the fraction out of its mantissa."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def round_to_int8(x):
    """Saturate to [-127, 127], then round half to even: added to 1.5 * 2**23, the integer is the lowest byte."""
    return (tl.minimum(tl.maximum(x, -127.0), 127.0) + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
