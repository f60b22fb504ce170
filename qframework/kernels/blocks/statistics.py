"""Mean and variance of rows in INT8 blocks, for LayerNorm and RMSNorm.

Formula, per row of C values, merged from tiles of the row (Chan, Golub and LeVeque), which avoids cancellation::

    statistics[r] = (mean, sum((x - mean)^2) / C)
    within a block  n sum(q^2) - sum(q)^2 is an integer below 2^31, computed exactly
    over tiles p    mean = sum(n_p mean_p) / C,  M2 = sum(M2_p + n_p (mean_p - mean)^2)

In Jetfire (appendix A) the LayerNorm reads the statistics of every tile from the Add before it. Here a small second
kernel merges them once, so that the LayerNorm reads two numbers per row. Without an Add, a program reads whole rows and
needs no merge. Sums of bytes and of their squares are integers, added four at a time, in a fixed order without atomics:
results repeat bit for bit. Layout: blocks as in format.py, ``statistics (R, 2)`` fp32. Internal: not an operator.
Reference: ``row_statistics_ref``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qframework.kernels.blocks.arithmetic import sums_of_four
from qframework.kernels.blocks.format import BlockSize, block_shape, dequantize_blocks_ref
from qframework.kernels.blocks.primitives import load_scales, load_steps
from qframework.kernels.blocks.tiles import VALUES_PER_THREAD, rows_and_columns
from qframework.kernels.runtime.launch import cdiv, launch, power_of_2
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton

MERGED_ROWS, MERGED_TILES = 32, 32  # what a program of the second kernel reads at a time
ROW_VALUES = 16384  # what a program that reads whole rows reads at a time, with 8 warps


def row_statistics_ref(x: Tensor) -> Tensor:
    """Reference: mean and biased variance of the rows of a float ``x (..., C)``, ``(R, 2)`` float32."""
    variance, mean = torch.var_mean(x.float().reshape(-1, x.shape[-1]), dim=-1, correction=0)
    return torch.stack((mean, variance), dim=-1)


@triton.jit
def tile_statistics(q, scale, column, C, BLOCK: tl.constexpr, EVEN: tl.constexpr, FOURS: tl.constexpr):
    """Mean, and sum of squared distances from it, of each row of an int8 tile (M, N) that is 0 outside the tensor.

    ``scale`` holds the scales of the tile's blocks; M is a multiple or a divisor of a block's rows. The tile begins at
    ``column``, which is inside the tensor. EVEN: all of the tile is inside. FOURS: see ``in_fours``.
    """
    M: tl.constexpr = q.shape[0]
    N: tl.constexpr = q.shape[1]
    DOWN: tl.constexpr = scale.shape[0]
    values, squares = sums_of_four(q, FOURS)
    WIDTH: tl.constexpr = BLOCK[1]
    whole = tl.sum(tl.reshape(values, (DOWN, M // DOWN, N // WIDTH, WIDTH)), 3)
    squares = tl.sum(tl.reshape(squares, (DOWN, M // DOWN, N // WIDTH, WIDTH)), 3)
    if EVEN:
        count = tl.full((1, 1, N // WIDTH), WIDTH, tl.int32)
    else:
        count = tl.minimum(tl.maximum(C - column - tl.arange(0, N // WIDTH) * WIDTH, 0), WIDTH)[None, None, :]
    apart = (count * squares - whole * whole).to(tl.float32)  # count times the wanted sum
    count = count.to(tl.float32)
    share = 1.0 / tl.maximum(count, 1.0)
    scale = scale[:, None, :]
    mean = whole.to(tl.float32) * share * scale
    apart *= share * scale * scale
    row_mean = tl.sum(mean * count, 2) / (N if EVEN else tl.minimum(C - column, N))
    off = mean - row_mean[:, :, None]
    apart = tl.sum(apart + count * off * off, 2)
    return tl.reshape(row_mean, (M,)), tl.reshape(apart, (M,))


@triton.jit
def store_partial(partial_ptr, mean, apart, row, column, R, C, TILE_N: tl.constexpr):
    """Store the result of ``tile_statistics`` in ``partial (2, P, R)`` fp32 with P = ceil(C / TILE_N)."""
    r = row + tl.arange(0, mean.shape[0])
    where = (column // TILE_N).to(tl.int64) * R + r
    tl.store(partial_ptr + where, mean, mask=r < R)
    tl.store(partial_ptr + tl.cdiv(C, TILE_N).to(tl.int64) * R + where, apart, mask=r < R)


@triton.jit
def _block_statistics_kernel(
    x_ptr,  # (R, C) int8
    x_scale_ptr,  # (ceil(R / BLOCK[0]), ceil(C / BLOCK[1])) fp32
    statistics_ptr,  # (R, 2) fp32
    R,
    C,
    BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    EVEN: tl.constexpr,
    FOURS: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Statistics of rows, without an Add before. Grid (cdiv(R, TILE_M),); a program reads TILE_M whole rows."""
    wait_for_previous_kernel(OVERLAP)
    row = tl.program_id(0) * TILE_M
    SCALES_M: tl.constexpr = TILE_M if BLOCK[0] == 1 else BLOCK[0]
    q = load_steps(x_ptr, row, 0, R, C, TILE_M, TILE_N, EVEN)
    scale = load_scales(x_scale_ptr, row, 0, R, C, SCALES_M, TILE_N, BLOCK, EVEN)
    mean, apart = tile_statistics(q, scale, 0, C, BLOCK, EVEN, FOURS)
    for column in range(TILE_N, C, TILE_N):
        q = load_steps(x_ptr, row, column, R, C, TILE_M, TILE_N, EVEN)
        scale = load_scales(x_scale_ptr, row, column, R, C, SCALES_M, TILE_N, BLOCK, EVEN)
        mean_p, apart_p = tile_statistics(q, scale, column, C, BLOCK, EVEN, FOURS)
        share = tl.minimum(C - column, TILE_N) / tl.minimum(column + TILE_N, C)
        off = mean_p - mean
        mean += off * share
        apart += apart_p + off * off * share * column
    r = row + tl.arange(0, TILE_M)
    tl.store(statistics_ptr + 2 * r.to(tl.int64), mean, mask=r < R)
    tl.store(statistics_ptr + 2 * r.to(tl.int64) + 1, apart / C, mask=r < R)


@triton.jit
def _merge_statistics_kernel(
    partial_ptr,  # (2, P, R) fp32
    statistics_ptr,  # (R, 2) fp32
    R,
    C,
    TILE_N: tl.constexpr,  # columns of a tile
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Statistics of rows from those of their tiles. Grid (cdiv(R, ROWS),); a program merges ROWS rows."""
    wait_for_previous_kernel(OVERLAP)
    P = tl.cdiv(C, TILE_N)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mean = tl.zeros((ROWS,), tl.float32)
    apart = tl.zeros((ROWS,), tl.float32)
    for first in range(0, P, TILES):
        mean_p, count = _partial(partial_ptr, r, first, R, C, TILE_N, TILES)
        apart_p, _ = _partial(partial_ptr + P.to(tl.int64) * R, r, first, R, C, TILE_N, TILES)
        before = first * TILE_N * 1.0
        added = tl.sum(count)
        of_all = tl.sum(mean_p * count, 0) / added
        off = mean_p - of_all[None, :]
        apart += tl.sum(apart_p + count * off * off, 0)
        off = of_all - mean
        share = added / (before + added)
        mean += off * share
        apart += off * off * share * before
    tl.store(statistics_ptr + 2 * r.to(tl.int64), mean, mask=r < R)
    tl.store(statistics_ptr + 2 * r.to(tl.int64) + 1, apart / C, mask=r < R)


@triton.jit
def _partial(partial_ptr, r, first, R, C, TILE_N: tl.constexpr, TILES: tl.constexpr):
    """One statistic of rows ``r`` in TILES tiles, (TILES, rows), and the number of columns of each tile, (TILES, 1)."""
    p = first + tl.arange(0, TILES)
    count = tl.minimum(tl.maximum(C - p * TILE_N, 0), TILE_N)
    inside = (count > 0)[:, None] & (r < R)[None, :]
    values = tl.load(partial_ptr + p.to(tl.int64)[:, None] * R + r[None, :], mask=inside, other=0.0)
    return values, count.to(tl.float32)[:, None]


def empty_partial(like: Tensor, tile: dict[str, Any]) -> Tensor:
    """Allocate the statistics of every tile of ``like (..., C)``."""
    rows, columns = rows_and_columns(like)
    return like.new_empty((2, cdiv(columns, tile["TILE_N"]), rows), dtype=torch.float32)


def merge_statistics(partial: Tensor, statistics: Tensor, columns: int, tile: dict[str, Any]) -> None:
    """Merge ``partial (2, P, R)`` of tiles into the ``statistics (R, 2)`` of rows with this many columns."""
    rows = partial.shape[2]
    launch(_merge_statistics_kernel, (cdiv(rows, MERGED_ROWS),))(
        partial, statistics, rows, columns, TILE_N=tile["TILE_N"], ROWS=MERGED_ROWS, TILES=MERGED_TILES, num_warps=4
    )


def in_fours(*operands: Tensor) -> bool:
    """Whether Triton loads 16 neighbours of a row of these int8 tensors at a time, as ``sums_of_four`` requires.

    It does if every row begins at a multiple of 16 bytes. Otherwise a thread holds values of different rows.
    """
    return all(x.data_ptr() % 16 == 0 and x.shape[-1] % 16 == 0 for x in operands)


def whole_rows(rows: int, columns: int, block_size: BlockSize) -> dict[str, Any]:
    """Constants of a kernel that reads whole rows: a few rows at a time, or very long rows part by part."""
    block = block_shape(block_size)
    width = max(block[1], min(ROW_VALUES, power_of_2(columns)))
    height = min(ROW_VALUES // width, max(block[0], 32))
    warps = max(height * width // (32 * VALUES_PER_THREAD), 1)
    even = rows % height == 0 and columns % width == 0
    return {"BLOCK": block, "TILE_M": height, "TILE_N": width, "EVEN": even, "num_warps": warps}


def row_statistics_triton(x: Tensor, x_scale: Tensor, block_size: BlockSize) -> Tensor:
    """Statistics ``(R, 2)`` of a tensor in blocks with at least one column."""
    rows, columns = rows_and_columns(x)
    statistics = x.new_empty((rows, 2), dtype=torch.float32)
    if rows > 0:
        tile = whole_rows(rows, columns, block_size)
        x = x.contiguous()
        launch(_block_statistics_kernel, (cdiv(rows, tile["TILE_M"]),))(
            x, x_scale.contiguous(), statistics, rows, columns, FOURS=in_fours(x), **tile
        )
    return statistics


def row_statistics_cpu(x: Tensor, x_scale: Tensor, block_size: BlockSize) -> Tensor:
    """``row_statistics_ref`` of the dequantized tensor."""
    return row_statistics_ref(dequantize_blocks_ref(x, x_scale, block_size))
