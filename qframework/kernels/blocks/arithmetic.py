"""PTX instructions for block kernels that the compiler does not generate by itself.

Triton functions in PTX, with an equivalent in Triton for the interpreter.
"""

from __future__ import annotations

from qframework.kernels.runtime.triton import INTERPRET, tl, triton

_INTERPRETED = tl.constexpr(INTERPRET)
_FOUR_BYTES_TO_FLOAT = tl.constexpr(
    "{ .reg .b32 biased, high; xor.b32 biased, $4, 0x80808080; mov.b32 high, 0x4B000000;"
    " prmt.b32 $0, biased, high, 0x7440; prmt.b32 $1, biased, high, 0x7441;"
    " prmt.b32 $2, biased, high, 0x7442; prmt.b32 $3, biased, high, 0x7443; }"
)
_SUMS_OF_FOUR = tl.constexpr(
    "{ dp4a.s32.s32 $0, $8, 0x01010101, 0; dp4a.s32.s32 $4, $8, $8, 0;"
    " mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; mov.b32 $5, 0; mov.b32 $6, 0; mov.b32 $7, 0; }"
)
# The top bit of a difference says whether the 15 bits below were at least the threshold; PRMT spreads it over a byte.
_KEPT_OF_FOUR = tl.constexpr(
    "{ .reg .b32 first, second; or.b32 first, $2, 0x80008000; or.b32 second, $3, 0x80008000;"
    " sub.u32 first, first, $4; sub.u32 second, second, $4;"
    " prmt.b32 first, first, second, 0xFDB9; and.b32 $0, $1, first; }"
)


@triton.jit
def int8_to_float(q):
    """int8 to fp32, exactly, on the FMA units: conversion instructions take four times as long.

    PRMT inserts a byte as the lowest one of a float's mantissa in one instruction, which compilers do not generate, and
    a subtraction removes the offset.
    """
    if _INTERPRETED:
        value = q.to(tl.float32)
    else:
        biased = tl.inline_asm_elementwise(
            _FOUR_BYTES_TO_FLOAT, "=r,=r,=r,=r,r", [q], dtype=tl.float32, is_pure=True, pack=4
        )
        value = biased - 8388736.0  # 2**23 + 128
    return value


@triton.jit
def sums_of_four(q, FOURS: tl.constexpr):
    """Two int32 tiles shaped as an int8 tile, whose row sums are those of its values and of their squares.

    FOURS: whether a thread holds at least four neighbours of a row. One instruction then adds four values into the
    first one's place and leaves zeros for the others. In other layouts it would add values of different rows.
    """
    if _INTERPRETED or not FOURS:
        value = q.to(tl.int32)
        square = value * value
    else:
        value, square = tl.inline_asm_elementwise(
            _SUMS_OF_FOUR,
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [q],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=4,
        )
    return value, square


@triton.jit
def kept_steps(q, bits, threshold):
    """An int8 tile where the low 15 bits of ``bits``, uint16 of its shape, are at least ``threshold``; 0 elsewhere.

    ``threshold`` is a scalar from 0 to 2**15. Takes six instructions for four values, without unpacking them.
    """
    if _INTERPRETED:
        kept = tl.where((bits & 0x7FFF).to(tl.int32) >= threshold, q, 0)
    else:
        twice = tl.full((), threshold, tl.uint32) * 0x10001
        kept = tl.inline_asm_elementwise(
            _KEPT_OF_FOUR, "=r,r,r,r,r,r,r,r", [q, bits, twice], dtype=tl.int8, is_pure=True, pack=4
        )
    return kept


@triton.jit
def prefetch(pointers):
    """Prefetch the 32 bytes around each pointer into L2."""
    if _INTERPRETED:
        pass
    else:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def reciprocal(x):
    """``1 / x`` with a relative error of 2^-22, in one instruction, for an x that is neither tiny nor huge."""
    if _INTERPRETED:
        r = 1.0 / x
    else:
        r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    return r


@triton.jit
def over_127(x):
    """``x / 127``, bit for bit as a division rounds it where x is normal; infinity becomes NaN.

    A product and a fused correction: a division takes three times as many instructions and a branch.
    """
    if _INTERPRETED:  # the interpreter has no fused operations
        y = tl.math.div_rn(x, 127.0)
    else:
        y = x * (1.0 / 127.0)
        y = tl.fma(tl.fma(y, -127.0, x), 1.0 / 127.0, y)
    return y


@triton.jit
def inverse(scale):
    """``1 / scale`` to little more than half a unit in the last place; infinity becomes NaN."""
    if _INTERPRETED:
        y = tl.math.div_rn(1.0, scale)
    else:
        y = reciprocal(scale)
        y = tl.fma(tl.fma(-y, scale, 1.0), y, y)
    return y
