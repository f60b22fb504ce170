"""Gradients of LayerNorm and RMSNorm on INT8 blocks.

Formula, with ``n = (x - mean) * rstd`` (RMSNorm: ``x * rstd``) and ``g = dy * weight``, in float32::

    dx = Q(rstd * (g - sum(g) / C - n * sum(g n) / C)), sums over the row (RMSNorm: without the first sum)
    dweight = sum(dy * n), dbias = sum(dy), sums over all rows

dx needs two sums over whole rows, and B whole rows of both operands do not fit on a multiprocessor. A first pass
therefore reads dy and x and computes all four sums of each tile, a small kernel adds them in a fixed order, and a
second pass writes dx. Memory traffic per value is 5 bytes, less what stays in L2. No atomics, so results repeat bit for
bit. Layout: blocks as in format.py. Reference: ``block_norm_backward_ref``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework.kernels.blocks.format import DEFAULT_BLOCK_SIZE, BlockSize, quantize_blocks_ref, row_count
from qframework.kernels.blocks.primitives import load_tile, quantize_tile, store_tile
from qframework.kernels.blocks.sum_rows import add_up, store_sums, stretch_origin, stretches
from qframework.kernels.blocks.tiles import (
    check_alike,
    check_vector,
    contiguous,
    dequantized,
    empty_blocks,
    fold_rows,
    inside_tile,
    load_rows,
    rows_and_columns,
    rows_of_tile,
    tile_of,
)
from qframework.kernels.runtime.launch import cdiv, launch
from qframework.kernels.runtime.operator import declare
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton

LayerNormGradients = tuple[Tensor, Tensor, Tensor, Tensor]
RMSNormGradients = tuple[Tensor, Tensor, Tensor]


class BlockLayerNormBackwardArguments(NamedTuple):
    """The arguments of ``qframework::block_layer_norm_backward``."""

    dy: Tensor
    dy_scale: Tensor
    x: Tensor
    x_scale: Tensor
    weight: Tensor | None
    mean: Tensor
    rstd: Tensor
    block_size: BlockSize

    def empty_result(self) -> LayerNormGradients:
        """Allocate dx in blocks, dweight and dbias."""
        dweight, dbias = (self.x.new_empty((self.x.shape[-1],), dtype=torch.float32) for _ in range(2))
        return *empty_blocks(self.x, self.block_size), dweight, dbias

    def check(self) -> None:
        """Raise QFrameworkError for invalid operands."""
        _check("block_layer_norm_backward", self)
        check_vector("block_layer_norm_backward", "mean", self.mean, row_count(self.x.shape), self.x)


class BlockRMSNormBackwardArguments(NamedTuple):
    """The arguments of ``qframework::block_rms_norm_backward``."""

    dy: Tensor
    dy_scale: Tensor
    x: Tensor
    x_scale: Tensor
    weight: Tensor | None
    rstd: Tensor
    block_size: BlockSize

    def empty_result(self) -> RMSNormGradients:
        """Allocate dx in blocks and dweight."""
        dweight = self.x.new_empty((self.x.shape[-1],), dtype=torch.float32)
        return *empty_blocks(self.x, self.block_size), dweight

    def check(self) -> None:
        """Raise QFrameworkError for invalid operands."""
        _check("block_rms_norm_backward", self)


BackwardArguments = BlockLayerNormBackwardArguments | BlockRMSNormBackwardArguments


def _check(operator: str, args: BackwardArguments) -> None:
    check_alike(operator, args)
    check_vector(operator, "weight", args.weight, args.x.shape[-1], args.x)
    check_vector(operator, "rstd", args.rstd, row_count(args.x.shape), args.x)


def block_norm_backward_ref(args: BackwardArguments) -> tuple[Tensor, ...]:
    """Reference of ``qframework::block_layer_norm_backward`` and ``qframework::block_rms_norm_backward``."""
    rstd, columns = args.rstd[:, None], args.x.shape[-1]
    dy, x = (each.reshape(-1, columns) for each in dequantized(args))
    g = dy if args.weight is None else dy * args.weight.float()
    normal = (x - args.mean[:, None] if isinstance(args, BlockLayerNormBackwardArguments) else x) * rstd
    dx = g - g.mean(-1, keepdim=True) if isinstance(args, BlockLayerNormBackwardArguments) else g
    dx = dx - normal * (g * normal).mean(-1, keepdim=True)
    dx, dx_scale = quantize_blocks_ref(dx * rstd, args.block_size)
    gradients = dx.view(args.x.shape), dx_scale, (dy * normal).sum(0)
    return (*gradients, dy.sum(0)) if isinstance(args, BlockLayerNormBackwardArguments) else gradients


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
    """Weights of the columns of a tile, (1, TILE_N) fp32; ones without HAS_WEIGHT."""
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
    """First row and column of this program's tile; the order goes from the end of each stretch to its beginning.

    ``_norm_sums_kernel`` moves down all stretches at the same time, so L2 holds their last rows. Where the last stretch
    extends beyond the tensor, some tiles lie outside and are empty.
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


def block_norm_backward_triton(args: BackwardArguments) -> tuple[Tensor, ...]:
    """``block_layer_norm_backward`` and ``block_rms_norm_backward`` on a GPU."""
    rows, columns = rows_and_columns(args.x)
    RMS = isinstance(args, BlockRMSNormBackwardArguments)
    dx = empty_blocks(args.x, args.block_size)
    if args.x.numel() == 0:
        return *dx, *(args.x.new_zeros(columns, dtype=torch.float32) for _ in range(1 if RMS else 2))
    args = contiguous(args)
    unread = args.rstd  # any tensor serves as a pointer that the kernels do not use
    mean = args.mean if isinstance(args, BlockLayerNormBackwardArguments) else unread
    vectors = (unread if args.weight is None else args.weight, mean, args.rstd)
    operands = (args.dy, args.dy_scale, args.x, args.x_scale, *vectors)
    flags = {"RMS": RMS, "HAS_WEIGHT": args.weight is not None}
    tile = rows_of_tile(columns, args.block_size)
    length, count = stretches(rows, columns, tile)
    across = cdiv(columns, tile["TILE_N"])
    per_row = args.x.new_empty((across, 2 * rows), dtype=torch.float32)
    dweight, dbias = (args.x.new_empty((count, columns), dtype=torch.float32) for _ in range(2))
    launch(_norm_sums_kernel, (count * across,))(
        *operands, per_row, dweight, dbias, rows, columns, **flags, STRETCH=length, **tile
    )
    row_sums, *column_sums = add_up(per_row, dweight) if RMS else add_up(per_row, dweight, dbias)
    tile = tile_of(rows, columns, args.block_size)
    length = max(length, tile["TILE_M"])
    tile["EVEN"] = tile["EVEN"] and rows % length == 0  # otherwise tiles of the last stretch lie outside
    grid = (cdiv(rows, length) * (length // tile["TILE_M"]) * cdiv(columns, tile["TILE_N"]),)
    launch(_norm_backward_kernel, grid)(*operands, row_sums, *dx, rows, columns, **flags, STRETCH=length, **tile)
    return *dx, *column_sums


BLOCK_LAYER_NORM_BACKWARD = declare(
    "block_layer_norm_backward(Tensor dy, Tensor dy_scale, Tensor x, Tensor x_scale, Tensor? weight, Tensor mean, "
    "Tensor rstd, int[2] block_size) -> (Tensor, Tensor, Tensor, Tensor)",
    BlockLayerNormBackwardArguments,
    cpu=block_norm_backward_ref,
    cuda=block_norm_backward_triton,
    fake=BlockLayerNormBackwardArguments.empty_result,
)
BLOCK_RMS_NORM_BACKWARD = declare(
    "block_rms_norm_backward(Tensor dy, Tensor dy_scale, Tensor x, Tensor x_scale, Tensor? weight, Tensor rstd, "
    "int[2] block_size) -> (Tensor, Tensor, Tensor)",
    BlockRMSNormBackwardArguments,
    cpu=block_norm_backward_ref,
    cuda=block_norm_backward_triton,
    fake=BlockRMSNormBackwardArguments.empty_result,
)


def block_layer_norm_backward(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    block_size: BlockSize = DEFAULT_BLOCK_SIZE,
) -> LayerNormGradients:
    """Gradients of ``block_layer_norm``.

    Args:
        dy: ``(..., C)`` int8, the gradient of ``y``.
        dy_scale: ``(ceil(R / B), ceil(C / B))`` fp32.
        x: the input of the forward pass, like ``dy``.
        x_scale: like ``dy_scale``.
        weight: ``(C,)`` float, or None.
        mean: ``(R,)`` fp32, from the forward pass.
        rstd: ``(R,)`` fp32, from the forward pass.
        block_size: 32, 64, 128, (32, 128), (1, 128) or (1, 256).

    Returns:
        dx and its scale in the same format, with an error of at most half a step of its block; dweight and dbias,
        ``(C,)`` fp32, always summed in the same order.

    Raises:
        UnsupportedError: a block size, a dtype, or a GPU below sm_80.
        QFrameworkError: shapes or devices that do not match.
    """
    return torch.ops.qframework.block_layer_norm_backward(dy, dy_scale, x, x_scale, weight, mean, rstd, block_size)


def block_rms_norm_backward(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    block_size: BlockSize = DEFAULT_BLOCK_SIZE,
) -> RMSNormGradients:
    """Gradients of ``block_rms_norm``: ``(dx, its scale, dweight)``. See ``block_layer_norm_backward``."""
    return torch.ops.qframework.block_rms_norm_backward(dy, dy_scale, x, x_scale, weight, rstd, block_size)
