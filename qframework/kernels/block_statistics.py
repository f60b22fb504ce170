"""Mean and variance of the rows of a tensor in blocks: what LayerNorm needs to know before it sees a tile.

Formula, per row of C values, merged from tiles of the row as Chan, Golub and LeVeque do, so that nothing cancels::

    statistics[r] = (mean, sum((x - mean)^2) / C)
    within a block  n sum(q^2) - sum(q)^2 is a whole number below 2^31, computed exactly
    of tiles p      mean = sum(n_p mean_p) / C,  M2 = sum(M2_p + n_p (mean_p - mean)^2)

Jetfire (appendix A) hands the statistics of every tile from the Add to the LayerNorm after it; here they are merged
once, in a small second kernel, so that every tile of the LayerNorm reads two numbers a row. Fixed order, no atomics:
results repeat bit for bit. Layout: blocks as in qframework/kernels/_blocks.py, ``statistics (R, 2)`` fp32. Internal: no
operator of its own. Reference: ``row_statistics_ref``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qframework.kernels._block_operators import rows_and_columns, tile_of, tile_origin, tiles_of
from qframework.kernels._blocks import dequantize_blocks_ref, int8_to_float, load_scales, load_steps
from qframework.kernels._launch import cdiv, launch
from qframework.kernels._triton import tl, triton

MERGED_ROWS, MERGED_TILES = 32, 32  # of one program of the second kernel: what it reads at a time


def row_statistics_ref(x: Tensor) -> Tensor:
    """Reference: mean and biased variance of the rows of a float ``x (..., C)``, ``(R, 2)`` float32."""
    variance, mean = torch.var_mean(x.float().reshape(-1, x.shape[-1]), dim=-1, correction=0)
    return torch.stack((mean, variance), dim=-1)


@triton.jit
def tile_statistics(steps, scale, column, C, BLOCK: tl.constexpr):
    """Mean, and sum of squared distances from it, of each row of a tile: whole steps (M, N) fp32, 0 outside.

    ``scale`` is that of the tile's blocks; the tile begins at ``column``, which is inside the tensor.
    """
    M: tl.constexpr = steps.shape[0]
    N: tl.constexpr = steps.shape[1]
    steps = tl.reshape(steps, (M // BLOCK, BLOCK, N // BLOCK, BLOCK))
    total = tl.sum(steps, 3)  # (M / BLOCK, BLOCK, N / BLOCK)
    squares = tl.sum(steps * steps, 3)
    count = tl.minimum(tl.maximum(C - column - tl.arange(0, N // BLOCK) * BLOCK, 0), BLOCK)[None, None, :]
    whole = total.to(tl.int32)
    apart = (count * squares.to(tl.int32) - whole * whole).to(tl.float32)  # count times what it should be
    count = count.to(tl.float32)
    share = 1.0 / tl.maximum(count, 1.0)
    scale = scale[:, None, :]
    mean = total * share * scale
    apart *= share * scale * scale
    row_mean = tl.sum(mean * count, 2) / tl.sum(count, 2)
    off = mean - row_mean[:, :, None]
    apart = tl.sum(apart + count * off * off, 2)
    return tl.reshape(row_mean, (M,)), tl.reshape(apart, (M,))


@triton.jit
def store_partial(partial_ptr, mean, apart, row, column, R, C, TILE_N: tl.constexpr):
    """Keep what ``tile_statistics`` found, in ``partial (2, P, R)`` fp32 with P = ceil(C / TILE_N)."""
    r = row + tl.arange(0, mean.shape[0])
    where = (column // TILE_N).to(tl.int64) * R + r
    tl.store(partial_ptr + where, mean, mask=r < R)
    tl.store(partial_ptr + tl.cdiv(C, TILE_N).to(tl.int64) * R + where, apart, mask=r < R)


@triton.jit
def _block_statistics_kernel(
    x_ptr,  # (R, C) int8
    x_scale_ptr,  # (ceil(R / BLOCK), ceil(C / BLOCK)) fp32
    partial_ptr,  # (2, P, R) fp32
    R,
    C,
    BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Statistics of the rows of one tile a program, of a tensor that no Add made them for."""
    row, column = tile_origin(TILE_M, TILE_N)
    q = load_steps(x_ptr, row, column, R, C, TILE_M, TILE_N, EVEN)
    scale = load_scales(x_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    mean, apart = tile_statistics(int8_to_float(q), scale, column, C, BLOCK)
    store_partial(partial_ptr, mean, apart, row, column, R, C, TILE_N)


@triton.jit
def _merge_statistics_kernel(
    partial_ptr,  # (2, P, R) fp32
    statistics_ptr,  # (R, 2) fp32
    R,
    C,
    TILE_N: tl.constexpr,  # columns of a tile
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Statistics of ROWS whole rows a program. Grid (cdiv(R, ROWS),)."""
    P = tl.cdiv(C, TILE_N)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mean = tl.zeros((ROWS,), tl.float32)
    for first in range(0, P, TILES):
        mean_p, count = _partial(partial_ptr, r, first, R, C, TILE_N, TILES)
        mean += tl.sum(mean_p * count, 0)
    mean = mean / C
    apart = tl.zeros((ROWS,), tl.float32)
    for first in range(0, P, TILES):
        mean_p, count = _partial(partial_ptr, r, first, R, C, TILE_N, TILES)
        apart_p, _ = _partial(partial_ptr + P.to(tl.int64) * R, r, first, R, C, TILE_N, TILES)
        off = mean_p - mean[None, :]
        apart += tl.sum(apart_p + count * off * off, 0)
    tl.store(statistics_ptr + 2 * r.to(tl.int64), mean, mask=r < R)
    tl.store(statistics_ptr + 2 * r.to(tl.int64) + 1, apart / C, mask=r < R)


@triton.jit
def _partial(partial_ptr, r, first, R, C, TILE_N: tl.constexpr, TILES: tl.constexpr):
    """One number of rows ``r`` for TILES tiles (TILES, rows), and how many columns those have, (TILES, 1)."""
    p = first + tl.arange(0, TILES)
    count = tl.minimum(tl.maximum(C - p * TILE_N, 0), TILE_N)
    inside = (count > 0)[:, None] & (r < R)[None, :]
    values = tl.load(partial_ptr + p.to(tl.int64)[:, None] * R + r[None, :], mask=inside, other=0.0)
    return values, count.to(tl.float32)[:, None]


def empty_partial(like: Tensor, tile: dict[str, int]) -> Tensor:
    """Room for the statistics of every tile of ``like (..., C)``."""
    rows, columns = rows_and_columns(like)
    return like.new_empty((2, cdiv(columns, tile["TILE_N"]), rows), dtype=torch.float32)


def merge_statistics(partial: Tensor, columns: int, tile: dict[str, int]) -> Tensor:
    """``partial (2, P, R)`` of tiles to the statistics ``(R, 2)`` of rows of so many columns."""
    rows = partial.shape[2]
    statistics = partial.new_empty((rows, 2))
    launch(_merge_statistics_kernel, (cdiv(rows, MERGED_ROWS),))(
        partial, statistics, rows, columns, TILE_N=tile["TILE_N"], ROWS=MERGED_ROWS, TILES=MERGED_TILES, num_warps=4
    )
    return statistics


def row_statistics_triton(x: Tensor, x_scale: Tensor, block_size: int) -> Tensor:
    """Statistics ``(R, 2)`` of a tensor in blocks, which must have columns."""
    rows, columns = rows_and_columns(x)
    if rows == 0:
        return x.new_empty((0, 2), dtype=torch.float32)
    tile = tile_of(rows, columns, block_size)
    partial = empty_partial(x, tile)
    launch(_block_statistics_kernel, tiles_of(x, tile))(
        x.contiguous(), x_scale.contiguous(), partial, rows, columns, **tile
    )
    return merge_statistics(partial, columns, tile)


def row_statistics_cpu(x: Tensor, x_scale: Tensor, block_size: int) -> Tensor:
    """``row_statistics_ref`` of the dequantized tensor."""
    return row_statistics_ref(dequantize_blocks_ref(x, x_scale, block_size))
