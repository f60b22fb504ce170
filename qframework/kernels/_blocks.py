"""The block format of INT8 training: its meaning in plain torch, its checks, and the Triton functions that share it.

A float tensor ``x (..., C)`` is seen as R = prod(leading) rows of C columns, cut into blocks of B x B values with one
scale each (Jetfire, eq. 1), or of rows x columns. ``block_size`` is B or such a pair; where a formula says B, here and
in other files, it means a block's rows along R and its columns along C. Within a block the numerics are those of
qframework/numerics.py::

    q      int8, like x, contiguous
    scale  fp32, (ceil(R / B), ceil(C / B)):  scale[i, j] = max|block i, j| / 127        (at least MIN_SCALE)
    x      is about  q * scale of its block

A product sums up whole blocks in INT8, so the longer their rows, the faster; the fewer rows they have, the fewer tokens
share a scale, and one with outliers spoils no other. Blocks of (1, 128) are both. Transposed, they are quantized anew,
see ``operand_size``; square blocks keep their values, as in the paper.

Blocks at the ends may be cut off; what is missing counts as zeros and is never stored. NaN and infinity pass through:
their block gets a NaN or infinite scale. Stochastic rounding adds uniform noise of one step and rounds down, so that
the mean of many roundings is x; for the same seed it gives the same result on the same device.

Triton: tiles are fp32 values of ``(TILE_M, TILE_N)``, both multiples of B, that begin at a multiple of B. ``load_tile``
dequantizes one, ``quantize_tile`` and ``store_tile`` are its way back; everything between them is fp32 in registers.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from qframework import numerics
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels._block_arithmetic import int8_to_float, inverse, over_127
from qframework.kernels._common import check_dtype, check_same_device, round_to_int8
from qframework.kernels._launch import cdiv
from qframework.kernels._triton import INTERPRET, tl, triton
from qframework.numerics import MIN_SCALE

BlockSize = int | Sequence[int]  # B, or rows and columns
CanonicalSize = int | tuple[int, int]  # of canonical_size: equal where blocks are
BLOCK_SIZES: tuple[CanonicalSize, ...] = (32, 64, 128, (32, 128), (1, 128))
_MIN_SCALE = tl.constexpr(MIN_SCALE)
_PUSH = tl.constexpr(12582912.0)  # 1.5 * 2**23: added to a value below 2**22, it leaves the rounded integer lowest
_INTERPRETED = tl.constexpr(INTERPRET)
PHILOX_ROUNDS = 7  # the fewest that pass every test of Salmon et al. (2011); more cost more than the traffic of INT8
_ROUNDS = tl.constexpr(PHILOX_ROUNDS)


def check_block_size(operator: str, block_size: BlockSize) -> CanonicalSize:
    """``canonical_size`` of it. Raises UnsupportedError unless it is one of BLOCK_SIZES."""
    if (size := canonical_size(block_size)) not in BLOCK_SIZES:
        accepted = ", ".join(map(str, BLOCK_SIZES))
        raise UnsupportedError(f"{operator}: block_size={size!r} is unsupported; accepted: {accepted}")
    return size


def block_shape(block_size: BlockSize) -> tuple[int, int]:
    """Rows and columns of a block."""
    if isinstance(block_size, int):
        return block_size, block_size
    rows, columns = block_size
    return rows, columns


def canonical_size(block_size: BlockSize) -> CanonicalSize:
    """The one way to write a block size: a number where blocks are square, else a tuple."""
    if not isinstance(block_size, list | tuple) or len(block_size) != 2:
        return block_size  # type: ignore[return-value]  # a number, or refused
    rows, columns = block_size
    return rows if rows == columns else (rows, columns)


class BlockSizeTextError(argparse.ArgumentTypeError, QFrameworkError):
    """A block size on a command line that is none; argparse prints its message as it is."""


def parse_block_size(text: str) -> CanonicalSize:
    """The block size that a command line names as ``block_size_name`` does: a number, or ROWSxCOLUMNS.

    Raises:
        BlockSizeTextError: a ``ValueError`` that says what is accepted.
    """
    sizes = {block_size_name(size): size for size in BLOCK_SIZES}
    sizes |= {"x".join(map(str, block_shape(size))): size for size in BLOCK_SIZES}  # 32x32 as well
    if text not in sizes:
        accepted = ", ".join(map(block_size_name, BLOCK_SIZES))
        raise BlockSizeTextError(f"{text!r} is no block size; accepted: {accepted}")
    return sizes[text]


def block_size_name(block_size: BlockSize) -> str:
    """``"32"`` for square blocks, ``"1x128"`` (rows x columns) for others."""
    size = canonical_size(block_size)
    return str(size) if isinstance(size, int) else f"{size[0]}x{size[1]}"


def is_square(block_size: BlockSize) -> bool:
    """Whether a block has as many rows as columns."""
    rows, columns = block_shape(block_size)
    return rows == columns


def operand_size(block_size: BlockSize) -> CanonicalSize:
    """Block size of what a product of tensors in ``block_size`` takes besides them: weights and transposed tensors.

    Along the dimension that is summed up, blocks must be as long in both operands. Square ones are, transposed or not;
    of others, a transposed tensor is quantized anew, with as few rows in a block as do not take more memory.
    """
    rows, columns = block_shape(block_size)
    return rows if rows == columns else (32, columns)


def row_count(shape: torch.Size | tuple[int, ...]) -> int:
    """R: how many rows of ``shape[-1]`` values a tensor of this shape has."""
    return math.prod(shape[:-1])


def scale_shape(shape: torch.Size | tuple[int, ...], block_size: BlockSize) -> tuple[int, int]:
    """Shape of the scales of a tensor of ``shape``: ``(ceil(R / B), ceil(C / B))``, B the block's rows and columns."""
    rows, columns = block_shape(block_size)
    return cdiv(row_count(shape), rows), cdiv(shape[-1], columns)


def check_blocks(operator: str, argument: str, q: Tensor, scale: Tensor, block_size: BlockSize) -> None:
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
            f"{canonical_size(block_size)} needs {expected}"
        )


def block_scale(x: Tensor, block_size: BlockSize) -> Tensor:
    """Scale of every block of ``x (..., C)``: fp32, ``(ceil(R / B), ceil(C / B))``."""
    rows, columns = row_count(x.shape), x.shape[-1]
    height, width = block_shape(block_size)
    m, n = scale_shape(x.shape, block_size)
    padded = F.pad(x.reshape(rows, columns), (0, n * width - columns, 0, m * height - rows))
    return numerics.scale_from_amax(padded.abs().view(m, height, n, width).amax(dim=(1, 3)))


def spread_scale(scale: Tensor, shape: torch.Size | tuple[int, ...], block_size: BlockSize) -> Tensor:
    """The scale of every value of a tensor of ``shape``: fp32 of that shape."""
    m, n = scale.shape
    height, width = block_shape(block_size)
    spread = scale[:, None, :, None].expand(m, height, n, width).reshape(m * height, n * width)
    return spread[: row_count(shape), : shape[-1]].reshape(shape)


def quantize_blocks_ref(x: Tensor, block_size: BlockSize, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``x (..., C)`` float to the block format ``(q, scale)``.

    ``noise``, like ``x`` and uniform in [0, 1), rounds stochastically: ``floor(x / scale + noise)``.
    """
    scale = block_scale(x, block_size)
    spread = spread_scale(scale, x.shape, block_size)
    if noise is None:
        return numerics.quantize(x, spread).contiguous(), scale
    steps = torch.floor(x.float() * (1.0 / spread) + noise)
    return torch.clamp(steps, numerics.QMIN, numerics.QMAX).to(torch.int8).contiguous(), scale


def dequantize_blocks_ref(
    q: Tensor, scale: Tensor, block_size: BlockSize, dtype: torch.dtype = torch.float32
) -> Tensor:
    """``(q, scale)`` to a float tensor like ``q``: the product in fp32, rounded once to ``dtype``."""
    return numerics.dequantize(q, spread_scale(scale, q.shape, block_size), dtype).contiguous()


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_amax(x, BLOCK: tl.constexpr):
    """Largest magnitude of every block of an fp32 tile (M, N), (M / BLOCK[0], N / BLOCK[1]); NaN is the largest."""
    blocks = tl.reshape(x, (x.shape[0] // BLOCK[0], BLOCK[0], x.shape[1] // BLOCK[1], BLOCK[1]))
    if _INTERPRETED:  # as integers, which are ordered the same way: its own maximum loses NaN, and any other is slow
        magnitude = blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        amax = tl.max(tl.max(magnitude, 3), 1).to(tl.float32, bitcast=True)
    else:  # one instruction a value, magnitude and NaN included
        amax = tl.reduce(tl.reduce(tl.abs(blocks), 3, _larger), 1, _larger)
    return amax


@triton.jit
def tile_scale(x, BLOCK: tl.constexpr):
    """Scale of every block of an fp32 tile; a comparison, because Triton's maximum drops NaN."""
    scale = over_127(block_amax(x, BLOCK))
    return tl.where(scale < _MIN_SCALE, _MIN_SCALE, scale)


@triton.jit
def times_blocks(x, factor, BLOCK: tl.constexpr):
    """An fp32 tile (M, N) times the factor (M / BLOCK[0], N / BLOCK[1]) of each of its blocks."""
    blocks = tl.reshape(x, (x.shape[0] // BLOCK[0], BLOCK[0], x.shape[1] // BLOCK[1], BLOCK[1]))
    return tl.reshape(blocks * factor[:, None, :, None], (x.shape[0], x.shape[1]))


@triton.jit
def spread_blocks(factor, BLOCK: tl.constexpr):
    """Numbers of blocks (M / BLOCK[0], N / BLOCK[1]), once for each of their values: (M, N)."""
    M: tl.constexpr = factor.shape[0]
    N: tl.constexpr = factor.shape[1]
    blocks = tl.broadcast_to(factor[:, None, :, None], (M, BLOCK[0], N, BLOCK[1]))
    return tl.reshape(blocks, (M * BLOCK[0], N * BLOCK[1]))


@triton.jit
def pushed_to_int8(pushed):
    """Rounded steps + 1.5 * 2**23 as int8: the lowest byte."""
    return pushed.to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def quantize_tile(x, BLOCK: tl.constexpr):
    """An fp32 tile (M, N), zero outside the tensor, to (int8 tile, scale (M / BLOCK[0], N / BLOCK[1])).

    Rounded as ``round_to_int8`` does, without its clamp: no value of a block is beyond 127 of its own scale.
    """
    scale = tile_scale(x, BLOCK)
    return pushed_to_int8(times_blocks(x, inverse(scale), BLOCK) + _PUSH), scale


@triton.jit
def quantize_scaled_tile(x, factor, BLOCK: tl.constexpr):
    """``quantize_tile`` of x times the factor, at least 0, of each of its blocks, which no value is multiplied by."""
    scale = block_amax(x, BLOCK) * factor * (1.0 / 127.0)
    scale = tl.where(scale < _MIN_SCALE, _MIN_SCALE, scale)
    return pushed_to_int8(times_blocks(x, factor * inverse(scale), BLOCK) + _PUSH), scale


@triton.jit
def quantize_tile_stochastic(x, noise, BLOCK: tl.constexpr):
    """Like ``quantize_tile``, rounding x / scale + noise down; ``noise`` (M, N) is uniform in (0, 1)."""
    scale = tile_scale(x, BLOCK)
    steps = tl.math.floor(times_blocks(x, inverse(scale), BLOCK) + noise)
    return round_to_int8(steps), scale


@triton.jit
def _philox(seed, c0, c1):
    """Four words of Philox4x32-7, counter ``(c0, c1, 0, 0)``, key ``seed``: ``philox_ref``.

    Triton's own takes two instructions for each product of 64 bits, one of them slow.
    """
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c2 = c0 * 0
    c3 = c0 * 0
    for _ in tl.static_range(_ROUNDS):
        first, second = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (second >> 32).to(tl.uint32) ^ c1 ^ k0, second.to(tl.uint32)
        c2, c3 = (first >> 32).to(tl.uint32) ^ c3 ^ k1, first.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def tile_bits(seed, row, column, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """16 random bits for each value of a tile, uint16 (TILE_M, TILE_N), whose ``column`` is a multiple of 16.

    Philox of the seed and each value's row and column, nothing else. Eight columns share a call, counter ``(column //
    8, row, 0, 0)``: of its four words in their order the low half, then the high one. A thread makes two calls: it has
    the 16 neighbours that it loads of an int8 tile.
    """
    eighths = (column // 8 + 2 * tl.arange(0, TILE_N // 16)).to(tl.uint32)[None, :]
    rows = (row + tl.arange(0, TILE_M)).to(tl.uint32)[:, None]
    eighths, rows = tl.broadcast(eighths, rows)
    a, b, c, d = _philox(seed, eighths, rows)
    e, f, g, h = _philox(seed, eighths + 1, rows)
    # The last dimension that join adds runs fastest.
    words = tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))
    return tl.reshape(tl.join(words.to(tl.uint16), (words >> 16).to(tl.uint16)), (TILE_M, TILE_N))


@triton.jit
def tile_noise(seed, row, column, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Uniform values in (0, 1), (TILE_M, TILE_N), of ``tile_bits``: the middles of 2**16 equal steps.

    Their mean is exactly a half.
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
    where, inside = _scales_of_tile(row, column, R, C, TILE_M // BLOCK[0], TILE_N // BLOCK[1], BLOCK)
    return tl.load(scale_ptr + where) if EVEN else tl.load(scale_ptr + where, mask=inside, other=0.0)


@triton.jit
def _scales_of_tile(row, column, R, C, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Where the scales (M, N) of the blocks from ``row`` and ``column`` on lie, and which of them exist."""
    m = row // BLOCK[0] + tl.arange(0, M)
    n = column // BLOCK[1] + tl.arange(0, N)
    across = tl.cdiv(C, BLOCK[1])
    return m.to(tl.int64)[:, None] * across + n[None, :], (m < tl.cdiv(R, BLOCK[0]))[:, None] & (n < across)[None, :]


@triton.jit
def _values_of_tile(row, column, R, C, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Where the values of a tile lie, and which of them exist."""
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
    """The dequantized tile, fp32, that begins at ``row``, ``column`` of a tensor (R, C) in blocks; 0 outside.

    EVEN: R and C are multiples of the tile, so nothing is outside.
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
    """``load_tile`` before its product: whole steps (TILE_M, TILE_N) fp32, and the scales of their blocks."""
    q = load_steps(q_ptr, row, column, R, C, TILE_M, TILE_N, EVEN)
    scale = load_scales(scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    return int8_to_float(q), scale


@triton.jit
def store_tile(q_ptr, scale_ptr, q, scale, row, column, R, C, BLOCK: tl.constexpr, EVEN: tl.constexpr = False):
    """Store a quantized tile and its scales where ``load_tile`` reads them."""
    where, inside = _values_of_tile(row, column, R, C, q.shape[0], q.shape[1])
    which, exist = _scales_of_tile(row, column, R, C, scale.shape[0], scale.shape[1], BLOCK)
    if EVEN:
        tl.store(q_ptr + where, q)
        tl.store(scale_ptr + which, scale)
    else:
        tl.store(q_ptr + where, q, mask=inside)
        tl.store(scale_ptr + which, scale, mask=exist)
