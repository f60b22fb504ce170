"""Triton functions on tiles of tensors in blocks: load and dequantize, quantize and store, random numbers.

A tile is fp32 ``(TILE_M, TILE_N)``, both multiples of B, and begins at a multiple of B. ``load_tile`` loads and
dequantizes it, ``quantize_tile`` and ``store_tile`` write it back; everything in between is fp32 in registers.
"""

from __future__ import annotations

from qframework.kernels.blocks.arithmetic import int8_to_float, inverse, over_127
from qframework.kernels.runtime.random import philox
from qframework.kernels.runtime.rounding import round_to_int8
from qframework.kernels.runtime.triton import INTERPRET, tl, triton
from qframework.numerics import MIN_SCALE

_MIN_SCALE = tl.constexpr(MIN_SCALE)
_PUSH = tl.constexpr(12582912.0)  # 1.5 * 2**23: added to a value below 2**22, it rounds into the low bits
_INTERPRETED = tl.constexpr(INTERPRET)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_amax(x, BLOCK: tl.constexpr):
    """Largest magnitude of each block of an fp32 tile (M, N): (M / BLOCK[0], N / BLOCK[1]). NaN counts as largest."""
    blocks = tl.reshape(x, (x.shape[0] // BLOCK[0], BLOCK[0], x.shape[1] // BLOCK[1], BLOCK[1]))
    if _INTERPRETED:  # as integers, which have the same order: the interpreter's maximum drops NaN, tl.reduce is slow
        magnitude = blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        amax = tl.max(tl.max(magnitude, 3), 1).to(tl.float32, bitcast=True)
    else:  # one instruction per value, including magnitude and NaN
        amax = tl.reduce(tl.reduce(tl.abs(blocks), 3, _larger), 1, _larger)
    return amax


@triton.jit
def tile_scale(x, BLOCK: tl.constexpr):
    """Scale of each block of an fp32 tile. Compares instead of taking Triton's maximum, which drops NaN."""
    scale = over_127(block_amax(x, BLOCK))
    return tl.where(scale < _MIN_SCALE, _MIN_SCALE, scale)


@triton.jit
def times_blocks(x, factor, BLOCK: tl.constexpr):
    """An fp32 tile (M, N) times one factor per block, (M / BLOCK[0], N / BLOCK[1])."""
    blocks = tl.reshape(x, (x.shape[0] // BLOCK[0], BLOCK[0], x.shape[1] // BLOCK[1], BLOCK[1]))
    return tl.reshape(blocks * factor[:, None, :, None], (x.shape[0], x.shape[1]))


@triton.jit
def spread_blocks(factor, BLOCK: tl.constexpr):
    """One number per block, (M / BLOCK[0], N / BLOCK[1]), repeated for each of the block's values: (M, N)."""
    M: tl.constexpr = factor.shape[0]
    N: tl.constexpr = factor.shape[1]
    blocks = tl.broadcast_to(factor[:, None, :, None], (M, BLOCK[0], N, BLOCK[1]))
    return tl.reshape(blocks, (M * BLOCK[0], N * BLOCK[1]))


@triton.jit
def pushed_to_int8(pushed):
    """Convert ``rounded steps + 1.5 * 2**23`` to int8: the lowest byte."""
    return pushed.to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def quantize_tile(x, BLOCK: tl.constexpr):
    """Quantize an fp32 tile (M, N), zero outside the tensor, to (int8 tile, scale (M / BLOCK[0], N / BLOCK[1])).

    Rounds as ``round_to_int8`` does, without its clamp: no value exceeds 127 times the scale of its block.
    """
    scale = tile_scale(x, BLOCK)
    return pushed_to_int8(times_blocks(x, inverse(scale), BLOCK) + _PUSH), scale


@triton.jit
def quantize_scaled_tile(x, factor, BLOCK: tl.constexpr):
    """``quantize_tile`` of x times a nonnegative factor per block, without multiplying the values by the factor."""
    scale = block_amax(x, BLOCK) * factor * (1.0 / 127.0)
    scale = tl.where(scale < _MIN_SCALE, _MIN_SCALE, scale)
    return pushed_to_int8(times_blocks(x, factor * inverse(scale), BLOCK) + _PUSH), scale


@triton.jit
def quantize_tile_stochastic(x, noise, BLOCK: tl.constexpr):
    """Like ``quantize_tile``, but rounds x / scale + noise down; ``noise`` (M, N) is uniform in (0, 1)."""
    scale = tile_scale(x, BLOCK)
    steps = tl.math.floor(times_blocks(x, inverse(scale), BLOCK) + noise)
    return round_to_int8(steps), scale


@triton.jit
def tile_bits(seed, row, column, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """16 random bits for each value of a tile, uint16 (TILE_M, TILE_N); ``column`` must be a multiple of 16.

    They depend only on the seed and on each value's row and column. Eight columns share a call of Philox with counter
    ``(column // 8, row, 0, 0)`` and take, of each of its four words, the low half and then the high half. A thread
    makes two calls, for the 16 neighbours that it loads from an int8 tile.
    """
    eighths = (column // 8 + 2 * tl.arange(0, TILE_N // 16)).to(tl.uint32)[None, :]
    rows = (row + tl.arange(0, TILE_M)).to(tl.uint32)[:, None]
    eighths, rows = tl.broadcast(eighths, rows)
    a, b, c, d = philox(seed, eighths, rows)
    e, f, g, h = philox(seed, eighths + 1, rows)
    # The dimension that the last join adds is the innermost one.
    words = tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))
    return tl.reshape(tl.join(words.to(tl.uint16), (words >> 16).to(tl.uint16)), (TILE_M, TILE_N))


@triton.jit
def tile_noise(seed, row, column, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Uniform values in (0, 1), (TILE_M, TILE_N), from ``tile_bits``: the centers of 2**16 equal steps.

    Their mean is exactly 1/2.
    """
    return tile_bits(seed, row, column, TILE_M, TILE_N).to(tl.int32).to(tl.float32) * 2.0**-16 + 2.0**-17


@triton.jit
def load_scales(
    scale_ptr,
    row,
    column,
    R,
    C,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr = False,
):
    """Scales (TILE_M / BLOCK[0], TILE_N / BLOCK[1]) of the tile that begins at ``row``, ``column``; 0 outside."""
    N: tl.constexpr = TILE_N // BLOCK[1] if BLOCK[1] <= TILE_N else 1  # a part of a block has its scale
    where, inside = _scales_of_tile(row, column, R, C, TILE_M // BLOCK[0], N, BLOCK)
    return tl.load(scale_ptr + where) if EVEN else tl.load(scale_ptr + where, mask=inside, other=0.0)


@triton.jit
def _scales_of_tile(row, column, R, C, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets of the scales (M, N) of the blocks that begin at ``row`` and ``column``, and which of them exist."""
    m = row // BLOCK[0] + tl.arange(0, M)
    n = column // BLOCK[1] + tl.arange(0, N)
    across = tl.cdiv(C, BLOCK[1])
    return m.to(tl.int64)[:, None] * across + n[None, :], (m < tl.cdiv(R, BLOCK[0]))[:, None] & (n < across)[None, :]


@triton.jit
def _values_of_tile(row, column, R, C, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Offsets of the values of a tile, and which of them exist."""
    r = row + tl.arange(0, TILE_M)
    c = column + tl.arange(0, TILE_N)
    return r.to(tl.int64)[:, None] * C + c[None, :], (r < R)[:, None] & (c < C)[None, :]


@triton.jit
def load_steps(q_ptr, row, column, R, C, TILE_M: tl.constexpr, TILE_N: tl.constexpr, EVEN: tl.constexpr):
    """The int8 tile (TILE_M, TILE_N) that begins at ``row``, ``column``; 0 outside."""
    where, inside = _values_of_tile(row, column, R, C, TILE_M, TILE_N)
    return tl.load(q_ptr + where) if EVEN else tl.load(q_ptr + where, mask=inside, other=0)


@triton.jit
def load_tile(
    q_ptr,
    scale_ptr,
    row,
    column,
    R,
    C,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr = False,
):
    """The dequantized fp32 tile that begins at ``row``, ``column`` of a tensor (R, C) in blocks; 0 outside.

    EVEN: R and C are multiples of the tile's size, so nothing is outside.
    """
    q, scale = load_blocks(q_ptr, scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    return times_blocks(q, scale, BLOCK)


@triton.jit
def load_blocks(
    q_ptr,
    scale_ptr,
    row,
    column,
    R,
    C,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr = False,
):
    """The two factors of ``load_tile``: whole steps (TILE_M, TILE_N) fp32, and the scales of their blocks."""
    q = load_steps(q_ptr, row, column, R, C, TILE_M, TILE_N, EVEN)
    scale = load_scales(scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    return int8_to_float(q), scale


@triton.jit
def store_tile(q_ptr, scale_ptr, q, scale, row, column, R, C, BLOCK: tl.constexpr, EVEN: tl.constexpr = False):
    """Store a quantized tile and its scales in the layout that ``load_tile`` reads."""
    where, inside = _values_of_tile(row, column, R, C, q.shape[0], q.shape[1])
    which, exist = _scales_of_tile(row, column, R, C, scale.shape[0], scale.shape[1], BLOCK)
    if EVEN:
        tl.store(q_ptr + where, q)
        tl.store(scale_ptr + which, scale)
    else:
        tl.store(q_ptr + where, q, mask=inside)
        tl.store(scale_ptr + which, scale, mask=exist)
