"""Gradients of LayerNorm and RMSNorm from blocks to blocks.

Formula, with ``n = (x - mean) * rstd`` (RMSNorm: ``x * rstd``) and ``g = dy * weight``, in float32::

    dx = Q(rstd * (g - sum(g) / C - n * sum(g n) / C)), sums over the row (RMSNorm: without the first)
    dweight = sum(dy * n), dbias = sum(dy), sums over all rows

dx needs two sums over whole rows before any of it can be written, and a tile of B rows of both operands is more than a
multiprocessor holds. So one pass reads dy and x and makes all four sums of every tile, a small kernel adds them up in a
fixed order, and a second pass writes dx: 5 bytes of traffic a value, less what stays in the L2 cache. Nothing is
atomic: results repeat bit for bit. Layout: blocks as in qframework/kernels/blocks/format.py. Reference:
``block_layer_norm_backward_ref``, ``block_rms_norm_backward_ref``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qframework.kernels.blocks.format import BlockSize, dequantize_blocks_ref, quantize_blocks_ref, row_count
from qframework.kernels.blocks.primitives import load_tile, quantize_tile, store_tile
from qframework.kernels.blocks.sum_rows import add_up, store_sums, stretch_origin, stretches
from qframework.kernels.blocks.tiles import (
    Blocks,
    check_alike,
    check_vector,
    empty_blocks,
    fold_rows,
    inside_tile,
    load_rows,
    register_block_operator,
    rows_and_columns,
    rows_of_tile,
    tile_of,
)
from qframework.kernels.runtime.launch import cdiv, launch
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton

LayerNormGradients = tuple[Tensor, Tensor, Tensor, Tensor]
RMSNormGradients = tuple[Tensor, Tensor, Tensor]


def block_layer_norm_backward_ref(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    block_size: BlockSize,
) -> LayerNormGradients:
    """Reference of ``qframework::block_layer_norm_backward``."""
    gradient = dequantize_blocks_ref(dy, dy_scale, block_size).reshape(-1, dy.shape[-1])
    value = dequantize_blocks_ref(x, x_scale, block_size).reshape(gradient.shape)
    normal = (value - mean[:, None]) * rstd[:, None]
    g = gradient if weight is None else gradient * weight.float()
    dx = g - g.mean(-1, keepdim=True) - normal * (g * normal).mean(-1, keepdim=True)
    dx, dx_scale = quantize_blocks_ref(dx * rstd[:, None], block_size)
    return dx.view(x.shape), dx_scale, (gradient * normal).sum(0), gradient.sum(0)


def block_rms_norm_backward_ref(
    dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, weight: Tensor | None, rstd: Tensor, block_size: BlockSize
) -> RMSNormGradients:
    """Reference of ``qframework::block_rms_norm_backward``."""
    gradient = dequantize_blocks_ref(dy, dy_scale, block_size).reshape(-1, dy.shape[-1])
    normal = dequantize_blocks_ref(x, x_scale, block_size).reshape(gradient.shape) * rstd[:, None]
    g = gradient if weight is None else gradient * weight.float()
    dx = (g - normal * (g * normal).mean(-1, keepdim=True)) * rstd[:, None]
    dx, dx_scale = quantize_blocks_ref(dx, block_size)
    return dx.view(x.shape), dx_scale, (gradient * normal).sum(0)


@triton.jit
def _normalized(x, mean_ptr, rstd_ptr, row, R, RMS: tl.constexpr):
    """n of a tile (M, N) that begins at ``row``, and rstd of its rows."""
    r = row + tl.arange(0, x.shape[0])
    rstd = tl.load(rstd_ptr + r, mask=r < R, other=0.0)
    if not RMS:
        x -= tl.load(mean_ptr + r, mask=r < R, other=0.0)[:, None]
    return x * rstd[:, None], rstd


@triton.jit
def _load_weight(weight_ptr, column, C, TILE_N: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    """Weights of the columns of a tile, (1, TILE_N) fp32; ones where there are none."""
    c = column + tl.arange(0, TILE_N)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    else:
        weight = tl.full((TILE_N,), 1.0, tl.float32)
    return weight[None, :]


@triton.jit
def _norm_sums_kernel(
    dy_ptr,  # (R, C) int8
    dy_scale_ptr,  # (ceil(R / BLOCK[0]), ceil(C / BLOCK[1])) fp32
    x_ptr,  # like dy
    x_scale_ptr,
    weight_ptr,  # (C,) float
    mean_ptr,  # (R,) fp32, read unless RMS
    rstd_ptr,  # (R,) fp32
    rows_ptr,  # (P, R, 2) fp32: sum(g) and sum(g n) of each row and tile, P = ceil(C / TILE_N)
    dweight_ptr,  # (S, C) fp32: sum(dy n) of each column and stretch of rows
    dbias_ptr,  # (S, C) fp32: sum(dy), written unless RMS
    R,
    C,
    RMS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    STRETCH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """All sums of STRETCH rows and the columns of one tile. Grid (S * cdiv(C, TILE_N),)."""
    wait_for_previous_kernel(OVERLAP)
    first, column = stretch_origin(C, STRETCH, TILE_N)
    weight = _load_weight(weight_ptr, column, C, TILE_N, HAS_WEIGHT)
    dweight = tl.zeros((LANES, TILE_N), tl.float32)
    dbias = tl.zeros((LANES, TILE_N), tl.float32)
    both = tl.arange(0, 2)[None, :]
    for start in tl.range(0, STRETCH, TILE_M, num_stages=STAGES):
        row = first + start
        dy = load_rows(dy_ptr, dy_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK)
        x = load_rows(x_ptr, x_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK)
        n, _ = _normalized(x, mean_ptr, rstd_ptr, row, R, RMS)
        g = dy * weight
        sums = tl.join(tl.sum(g, 1), tl.sum(g * n, 1))
        r = (row + tl.arange(0, TILE_M))[:, None]
        where = ((column // TILE_N).to(tl.int64) * R + r) * 2 + both
        tl.store(rows_ptr + where, sums, mask=(r < R) & (both < 2))
        dweight += fold_rows(dy * n, LANES)
        if not RMS:
            dbias += fold_rows(dy, LANES)
    store_sums(dweight_ptr, dweight, first // STRETCH, column, C)
    if not RMS:
        store_sums(dbias_ptr, dbias, first // STRETCH, column, C)


@triton.jit
def _last_read_first(R, C, STRETCH: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Row and column where this program's tile begins: all stretches from their ends.

    ``_norm_sums_kernel`` walks down all of them at once, so the L2 cache holds their last rows. Where the tensor cuts
    the last stretch off, some tiles lie outside and are empty.
    """
    LENGTH: tl.constexpr = STRETCH // TILE_M
    across, count = tl.cdiv(C, TILE_N), tl.cdiv(R, STRETCH)
    i = tl.program_id(0) // across
    return (i % count * LENGTH + LENGTH - 1 - i // count) * TILE_M, tl.program_id(0) % across * TILE_N


@triton.jit
def _norm_backward_kernel(
    dy_ptr,  # (R, C) int8
    dy_scale_ptr,  # (ceil(R / BLOCK[0]), ceil(C / BLOCK[1])) fp32
    x_ptr,  # like dy
    x_scale_ptr,
    weight_ptr,  # (C,) float
    mean_ptr,  # (R,) fp32, read unless RMS
    rstd_ptr,  # (R,) fp32
    sums_ptr,  # (R, 2) fp32: sum(g), read unless RMS, and sum(g n) of each row
    dx_ptr,  # like dy
    dx_scale_ptr,
    R,
    C,
    RMS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    STRETCH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """dx. A program computes one tile; grid (tiles of all stretches,)."""
    wait_for_previous_kernel(OVERLAP)
    row, column = _last_read_first(R, C, STRETCH, TILE_M, TILE_N)
    dy = load_tile(dy_ptr, dy_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    x = load_tile(x_ptr, x_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    n, rstd = _normalized(x, mean_ptr, rstd_ptr, row, R, RMS)
    g = dy * _load_weight(weight_ptr, column, C, TILE_N, HAS_WEIGHT)
    r = row + tl.arange(0, TILE_M)
    g -= n * (tl.load(sums_ptr + 2 * r.to(tl.int64) + 1, mask=r < R, other=0.0) / C)[:, None]
    if not RMS:
        g -= (tl.load(sums_ptr + 2 * r.to(tl.int64), mask=r < R, other=0.0) / C)[:, None]
    dx = g * rstd[:, None]
    if not EVEN:
        dx = tl.where(inside_tile(row, column, R, C, TILE_M, TILE_N), dx, 0.0)
    q, dx_scale = quantize_tile(dx, BLOCK)
    store_tile(dx_ptr, dx_scale_ptr, q, dx_scale, row, column, R, C, BLOCK, EVEN)


def _block_layer_norm_backward_triton(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    block_size: BlockSize,
) -> LayerNormGradients:
    blocks, (dweight, dbias) = _backward(dy, dy_scale, x, x_scale, weight, mean, rstd, block_size, RMS=False)
    return *blocks, dweight, dbias


def _block_rms_norm_backward_triton(
    dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, weight: Tensor | None, rstd: Tensor, block_size: BlockSize
) -> RMSNormGradients:
    blocks, (dweight,) = _backward(dy, dy_scale, x, x_scale, weight, rstd, rstd, block_size, RMS=True)
    return *blocks, dweight


def _backward(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    block_size: BlockSize,
    RMS: bool,
) -> tuple[Blocks, list[Tensor]]:
    """dx in blocks; dweight, and dbias unless RMS."""
    rows, columns = rows_and_columns(x)
    dx, dx_scale = empty_blocks(x, block_size)
    if x.numel() == 0:
        return (dx, dx_scale), [x.new_zeros(columns, dtype=torch.float32) for _ in range(1 if RMS else 2)]
    unread = rstd  # what the flags leave unread is any tensor
    vectors = (unread if weight is None else weight, mean, rstd)
    operands = [each.contiguous() for each in (dy, dy_scale, x, x_scale, *vectors)]
    flags = {"RMS": RMS, "HAS_WEIGHT": weight is not None}
    tile = rows_of_tile(columns, block_size)
    length, count = stretches(rows, columns, tile)
    across = cdiv(columns, tile["TILE_N"])
    per_row = x.new_empty((across, 2 * rows), dtype=torch.float32)
    dweight, dbias = (x.new_empty((count, columns), dtype=torch.float32) for _ in range(2))
    launch(_norm_sums_kernel, (count * across,))(
        *operands, per_row, dweight, dbias, rows, columns, **flags, STRETCH=length, **tile
    )
    row_sums, *column_sums = add_up(per_row, dweight) if RMS else add_up(per_row, dweight, dbias)
    tile = tile_of(rows, columns, block_size)
    length = max(length, tile["TILE_M"])
    tile["EVEN"] = tile["EVEN"] and rows % length == 0  # else tiles of the last stretch lie outside
    grid = (cdiv(rows, length) * (length // tile["TILE_M"]) * cdiv(columns, tile["TILE_N"]),)
    launch(_norm_backward_kernel, grid)(
        *operands, row_sums, dx, dx_scale, rows, columns, **flags, STRETCH=length, **tile
    )
    return (dx, dx_scale), column_sums


def _empty_layer_norm_gradients(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    block_size: BlockSize,
) -> LayerNormGradients:
    dweight, dbias = (x.new_empty((x.shape[-1],), dtype=torch.float32) for _ in range(2))
    return *empty_blocks(x, block_size), dweight, dbias


def _empty_rms_norm_gradients(
    dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, weight: Tensor | None, rstd: Tensor, block_size: BlockSize
) -> RMSNormGradients:
    return *empty_blocks(x, block_size), x.new_empty((x.shape[-1],), dtype=torch.float32)


def _check_layer_norm_backward(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    block_size: BlockSize,
) -> None:
    operator = "block_layer_norm_backward"
    check_alike(operator, block_size, dy=(dy, dy_scale), x=(x, x_scale))
    check_vector(operator, "weight", weight, x.shape[-1], x)
    check_vector(operator, "mean", mean, row_count(x.shape), x)
    check_vector(operator, "rstd", rstd, row_count(x.shape), x)


def _check_rms_norm_backward(
    dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, weight: Tensor | None, rstd: Tensor, block_size: BlockSize
) -> None:
    operator = "block_rms_norm_backward"
    check_alike(operator, block_size, dy=(dy, dy_scale), x=(x, x_scale))
    check_vector(operator, "weight", weight, x.shape[-1], x)
    check_vector(operator, "rstd", rstd, row_count(x.shape), x)


register_block_operator(
    "block_layer_norm_backward(Tensor dy, Tensor dy_scale, Tensor x, Tensor x_scale, Tensor? weight, Tensor mean, "
    "Tensor rstd, int[2] block_size) -> (Tensor, Tensor, Tensor, Tensor)",
    _check_layer_norm_backward,
    block_layer_norm_backward_ref,
    _block_layer_norm_backward_triton,
    _empty_layer_norm_gradients,
)
register_block_operator(
    "block_rms_norm_backward(Tensor dy, Tensor dy_scale, Tensor x, Tensor x_scale, Tensor? weight, Tensor rstd, "
    "int[2] block_size) -> (Tensor, Tensor, Tensor)",
    _check_rms_norm_backward,
    block_rms_norm_backward_ref,
    _block_rms_norm_backward_triton,
    _empty_rms_norm_gradients,
)


def block_layer_norm_backward(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    block_size: BlockSize = 32,
) -> LayerNormGradients:
    """Gradients of ``block_layer_norm``.

    Args:
        dy: ``(..., C)`` int8, the gradient of ``y``.
        dy_scale: ``(ceil(R / B), ceil(C / B))`` fp32.
        x: what the forward pass normalized, like ``dy``.
        x_scale: like ``dy_scale``.
        weight: ``(C,)`` float, or None.
        mean: ``(R,)`` fp32, as the forward pass gave it.
        rstd: likewise.
        block_size: 32, 64, 128, (32, 128) or (1, 128).

    Returns:
        dx and its scale in the same format, off by half a step of their block; dweight and dbias, ``(C,)`` fp32,
        always summed in the same order.

    Raises:
        UnsupportedError: block size, dtype, or a GPU below sm_80.
        QFrameworkError: shapes or devices that do not fit.
    """
    return torch.ops.qframework.block_layer_norm_backward(dy, dy_scale, x, x_scale, weight, mean, rstd, block_size)


def block_rms_norm_backward(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    block_size: BlockSize = 32,
) -> RMSNormGradients:
    """Gradients of ``block_rms_norm``: ``(dx, its scale, dweight)``. See ``block_layer_norm_backward``."""
    return torch.ops.qframework.block_rms_norm_backward(dy, dy_scale, x, x_scale, weight, rstd, block_size)
