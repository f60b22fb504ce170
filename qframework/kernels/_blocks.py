"""The block format of INT8 training: its meaning in plain torch, its checks, and the Triton functions that share it.

A float tensor ``x (..., C)`` is seen as R = prod(leading) rows of C columns, cut into blocks of B x B values with one
scale each (Jetfire, eq. 1). Within a block the numerics are those of qframework/numerics.py::

    q      int8, like x, contiguous
    scale  fp32, (ceil(R / B), ceil(C / B)):  scale[i, j] = max|block i, j| / 127        (at least MIN_SCALE)
    x      is about  q * scale of its block

Blocks at the ends may be cut off; what is missing counts as zeros and is never stored. NaN and infinity pass through:
their block gets a NaN or infinite scale. Stochastic rounding adds uniform noise of one step and rounds down, so that
the mean of many roundings is x; for the same seed it gives the same result on the same device.

Triton: tiles are fp32 values of ``(TILE_M, TILE_N)``, both multiples of B, that begin at a multiple of B. ``load_tile``
dequantizes one, ``quantize_tile`` and ``store_tile`` are its way back; everything between them is fp32 in registers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from qframework import numerics
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels._common import check_dtype, check_same_device, round_to_int8
from qframework.kernels._launch import cdiv
from qframework.kernels._triton import tl, triton
from qframework.numerics import MIN_SCALE

BLOCK_SIZES = (32, 64, 128)
_MIN_SCALE = tl.constexpr(MIN_SCALE)


def check_block_size(operator: str, block_size: int) -> None:
    """Raise UnsupportedError unless ``block_size`` is one of BLOCK_SIZES."""
    if block_size not in BLOCK_SIZES:
        accepted = ", ".join(map(str, BLOCK_SIZES))
        raise UnsupportedError(f"{operator}: block_size={block_size!r} is unsupported; accepted: {accepted}")


def row_count(shape: torch.Size | tuple[int, ...]) -> int:
    """R: how many rows of ``shape[-1]`` values a tensor of this shape has."""
    return math.prod(shape[:-1])


def scale_shape(shape: torch.Size | tuple[int, ...], block_size: int) -> tuple[int, int]:
    """Shape of the scales of a tensor of ``shape``: ``(ceil(R / B), ceil(C / B))``."""
    return cdiv(row_count(shape), block_size), cdiv(shape[-1], block_size)


def check_blocks(operator: str, argument: str, q: Tensor, scale: Tensor, block_size: int) -> None:
    """Check one operand in the block format: dtypes, the scale's shape for that of ``q``, one device."""
    check_block_size(operator, block_size)
    check_dtype(operator, argument, q, (torch.int8,))
    check_dtype(operator, f"{argument}'s scale", scale, (torch.float32,))
    check_same_device(operator, q, **{f"{argument}'s scale": scale})
    if q.ndim == 0:
        raise UnsupportedError(f"{operator}: {argument} has shape (); accepted: one dimension or more")
    expected = scale_shape(q.shape, block_size)
    if tuple(scale.shape) != expected:
        raise QFrameworkError(
            f"{operator}: {argument}'s scale has shape {tuple(scale.shape)}; {argument} {tuple(q.shape)} in blocks of "
            f"{block_size} needs {expected}"
        )


def block_scale(x: Tensor, block_size: int) -> Tensor:
    """Scale of every block of ``x (..., C)``: fp32, ``(ceil(R / B), ceil(C / B))``."""
    rows, columns = row_count(x.shape), x.shape[-1]
    m, n = scale_shape(x.shape, block_size)
    padded = F.pad(x.reshape(rows, columns), (0, n * block_size - columns, 0, m * block_size - rows))
    return numerics.scale_from_amax(padded.abs().view(m, block_size, n, block_size).amax(dim=(1, 3)))


def spread_scale(scale: Tensor, shape: torch.Size | tuple[int, ...], block_size: int) -> Tensor:
    """The scale of every value of a tensor of ``shape``: fp32 of that shape."""
    m, n = scale.shape
    spread = scale[:, None, :, None].expand(m, block_size, n, block_size).reshape(m * block_size, n * block_size)
    return spread[: row_count(shape), : shape[-1]].reshape(shape)


def quantize_blocks_ref(x: Tensor, block_size: int, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``x (..., C)`` float to the block format ``(q, scale)``.

    ``noise``, like ``x`` and uniform in [0, 1), rounds stochastically: ``floor(x / scale + noise)``.
    """
    scale = block_scale(x, block_size)
    spread = spread_scale(scale, x.shape, block_size)
    if noise is None:
        return numerics.quantize(x, spread).contiguous(), scale
    steps = torch.floor(x.float() * (1.0 / spread) + noise)
    return torch.clamp(steps, numerics.QMIN, numerics.QMAX).to(torch.int8).contiguous(), scale


def dequantize_blocks_ref(q: Tensor, scale: Tensor, block_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """``(q, scale)`` to a float tensor like ``q``: the product in fp32, rounded once to ``dtype``."""
    return numerics.dequantize(q, spread_scale(scale, q.shape, block_size), dtype).contiguous()


@triton.jit
def block_amax(x, BLOCK: tl.constexpr):
    """Largest magnitude of every block of an fp32 tile (M, N): (M / BLOCK, N / BLOCK). NaN is larger than infinity.

    Magnitudes are compared as integers, which orders them the same way and loses no NaN.
    """
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    blocks = tl.reshape(magnitude, (x.shape[0] // BLOCK, BLOCK, x.shape[1] // BLOCK, BLOCK))
    return tl.max(tl.max(blocks, 3), 1).to(tl.float32, bitcast=True)


@triton.jit
def tile_scale(x, BLOCK: tl.constexpr):
    """Scale of every block of an fp32 tile; a comparison, because Triton's maximum drops NaN."""
    scale = tl.math.div_rn(block_amax(x, BLOCK), 127.0)
    return tl.where(scale < _MIN_SCALE, _MIN_SCALE, scale)


@triton.jit
def times_blocks(x, factor, BLOCK: tl.constexpr):
    """An fp32 tile (M, N) times the factor (M / BLOCK, N / BLOCK) of each of its blocks."""
    blocks = tl.reshape(x, (x.shape[0] // BLOCK, BLOCK, x.shape[1] // BLOCK, BLOCK))
    return tl.reshape(blocks * factor[:, None, :, None], (x.shape[0], x.shape[1]))


@triton.jit
def quantize_tile(x, BLOCK: tl.constexpr):
    """An fp32 tile (M, N), zero outside the tensor, to (int8 tile, scale (M / BLOCK, N / BLOCK)).

    Rounded as ``round_to_int8`` does, without its clamp: no value of a block is beyond 127 of its own scale.
    """
    scale = tile_scale(x, BLOCK)
    steps = times_blocks(x, tl.math.div_rn(1.0, scale), BLOCK)
    return (steps + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8), scale


@triton.jit
def quantize_tile_stochastic(x, noise, BLOCK: tl.constexpr):
    """Like ``quantize_tile``, rounding x / scale + noise down; ``noise`` (M, N) is uniform in (0, 1)."""
    scale = tile_scale(x, BLOCK)
    steps = tl.math.floor(times_blocks(x, tl.math.div_rn(1.0, scale), BLOCK) + noise)
    return round_to_int8(steps), scale


@triton.jit
def tile_bits(seed, row, column, TILE_M: tl.constexpr, TILE_N: tl.constexpr, ROUNDS: tl.constexpr):
    """16 random bits for each value of a tile, int32 (TILE_M, TILE_N), whose ``column`` is a multiple of 8.

    Philox of the seed and each value's row and column, nothing else. Eight columns share a call, counter ``(column //
    8, row, 0, 0)``: of its four words in their order the low half, then the high one.
    """
    eighths = (column // 8 + tl.arange(0, TILE_N // 8)).to(tl.uint32)[None, :]
    rows = (row + tl.arange(0, TILE_M)).to(tl.uint32)[:, None]
    eighths, rows = tl.broadcast(eighths, rows)
    zero = eighths * 0
    a, b, c, d = tl.philox(seed, eighths, rows, zero, zero, n_rounds=ROUNDS)
    # The last dimension that join adds runs fastest.
    words = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (TILE_M, TILE_N)).to(tl.int32)


@triton.jit
def tile_noise(seed, row, column, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Uniform values in (0, 1), (TILE_M, TILE_N), of ``tile_bits``: the middles of 2**16 equal steps.

    Their mean is exactly a half. Seven rounds suffice; more would cost more than the memory traffic of INT8.
    """
    return tile_bits(seed, row, column, TILE_M, TILE_N, 7).to(tl.float32) * 2.0**-16 + 2.0**-17


@triton.jit
def load_scales(scale_ptr, row, column, R, C, TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK: tl.constexpr):
    """Scales (TILE_M / BLOCK, TILE_N / BLOCK) of the tile that begins at ``row``, ``column``; 0 outside."""
    m = row // BLOCK + tl.arange(0, TILE_M // BLOCK)
    n = column // BLOCK + tl.arange(0, TILE_N // BLOCK)
    across = tl.cdiv(C, BLOCK)
    inside = (m < tl.cdiv(R, BLOCK))[:, None] & (n < across)[None, :]
    return tl.load(scale_ptr + m.to(tl.int64)[:, None] * across + n[None, :], mask=inside, other=0.0)


@triton.jit
def load_tile(q_ptr, scale_ptr, row, column, R, C, TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK: tl.constexpr):
    """The dequantized tile, fp32, that begins at ``row``, ``column`` of a tensor (R, C) in blocks; 0 outside."""
    r = row + tl.arange(0, TILE_M)
    c = column + tl.arange(0, TILE_N)
    inside = (r < R)[:, None] & (c < C)[None, :]
    q = tl.load(q_ptr + r.to(tl.int64)[:, None] * C + c[None, :], mask=inside, other=0)
    scale = load_scales(scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK)
    return times_blocks(q.to(tl.float32), scale, BLOCK)


@triton.jit
def store_tile(q_ptr, scale_ptr, q, scale, row, column, R, C, BLOCK: tl.constexpr):
    """Store a quantized tile and its scales where ``load_tile`` reads them."""
    r = row + tl.arange(0, q.shape[0])
    c = column + tl.arange(0, q.shape[1])
    inside = (r < R)[:, None] & (c < C)[None, :]
    tl.store(q_ptr + r.to(tl.int64)[:, None] * C + c[None, :], q, mask=inside)
    m = row // BLOCK + tl.arange(0, scale.shape[0])
    n = column // BLOCK + tl.arange(0, scale.shape[1])
    across = tl.cdiv(C, BLOCK)
    inside = (m < tl.cdiv(R, BLOCK))[:, None] & (n < across)[None, :]
    tl.store(scale_ptr + m.to(tl.int64)[:, None] * across + n[None, :], scale, mask=inside)
