"""LayerNorm and RMSNorm on INT8 blocks.

Formula, in float32 between the formats, weight and bias float::

    LayerNorm: y = Q((x - mean) * rstd * weight + bias)        rstd = 1 / sqrt(variance + eps)
    RMSNorm:   y = Q(x * rstd * weight)                        rstd = 1 / sqrt(variance + mean^2 + eps)

A scale belongs to B rows and B columns, mean and rstd to a whole row. The statistics therefore come first: from the Add
before it (Jetfire, appendix A), or from a pass over ``x`` of its own (qframework/kernels/blocks/statistics.py). Then
every tile is normalized by itself, two numbers a row: 2 bytes of traffic a value, 3 where no Add made the statistics.
Layout: blocks as in qframework/kernels/blocks/format.py. Reference: ``block_layer_norm_ref``, ``block_rms_norm_ref``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework.errors import QFrameworkError
from qframework.kernels.blocks.format import BlockSize, dequantize_blocks_ref, quantize_blocks_ref, row_count
from qframework.kernels.blocks.primitives import load_tile, quantize_tile, store_tile
from qframework.kernels.blocks.statistics import row_statistics_ref, row_statistics_triton
from qframework.kernels.blocks.tiles import (
    ask_for_tile,
    check_alike,
    check_vector,
    contiguous,
    empty_blocks,
    inside_tile,
    rows_ahead,
    rows_and_columns,
    tile_of,
    tile_origin,
    tiles_of,
)
from qframework.kernels.runtime.checks import check_dtype, check_same_device
from qframework.kernels.runtime.launch import launch
from qframework.kernels.runtime.operator import declare, refuse_gradients
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton

LayerNormResult = tuple[Tensor, Tensor, Tensor, Tensor]
RMSNormResult = tuple[Tensor, Tensor, Tensor]


class BlockLayerNormArguments(NamedTuple):
    """The arguments of ``qframework::block_layer_norm``."""

    x: Tensor
    x_scale: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    block_size: BlockSize
    statistics: Tensor | None = None

    def empty_result(self) -> LayerNormResult:
        """y in blocks, mean and rstd before they are computed."""
        mean, rstd = (self.x.new_empty((row_count(self.x.shape),), dtype=torch.float32) for _ in range(2))
        return *empty_blocks(self.x, self.block_size), mean, rstd

    def check(self) -> None:
        """Raise QFrameworkError for operands that do not fit."""
        check_alike("block_layer_norm", self.block_size, x=(self.x, self.x_scale))
        check_vector("block_layer_norm", "weight", self.weight, self.x.shape[-1], self.x)
        check_vector("block_layer_norm", "bias", self.bias, self.x.shape[-1], self.x)
        _check_statistics("block_layer_norm", self.statistics, self.x)


class BlockRMSNormArguments(NamedTuple):
    """The arguments of ``qframework::block_rms_norm``."""

    x: Tensor
    x_scale: Tensor
    weight: Tensor | None
    eps: float
    block_size: BlockSize
    statistics: Tensor | None = None

    def empty_result(self) -> RMSNormResult:
        """y in blocks and rstd before they are computed."""
        rstd = self.x.new_empty((row_count(self.x.shape),), dtype=torch.float32)
        return *empty_blocks(self.x, self.block_size), rstd

    def check(self) -> None:
        """Raise QFrameworkError for operands that do not fit."""
        check_alike("block_rms_norm", self.block_size, x=(self.x, self.x_scale))
        check_vector("block_rms_norm", "weight", self.weight, self.x.shape[-1], self.x)
        _check_statistics("block_rms_norm", self.statistics, self.x)


def _check_statistics(operator: str, statistics: Tensor | None, x: Tensor) -> None:
    if statistics is None or statistics.numel() == 0:
        return
    check_dtype(operator, "statistics", statistics, (torch.float32,))
    check_same_device(operator, x, statistics=statistics)
    if tuple(statistics.shape) != (row_count(x.shape), 2):
        raise QFrameworkError(
            f"{operator}: statistics has shape {tuple(statistics.shape)}; accepted: none, or mean "
            f"and variance of each row, ({row_count(x.shape)}, 2)"
        )


def block_layer_norm_ref(args: BlockLayerNormArguments) -> LayerNormResult:
    """Reference of ``qframework::block_layer_norm``."""
    value = dequantize_blocks_ref(args.x, args.x_scale, args.block_size)
    mean, variance = _statistics_ref(value, args.statistics).unbind(-1)
    rstd = torch.rsqrt(variance + args.eps)
    along = (*value.shape[:-1], 1)
    y = (value - mean.view(along)) * rstd.view(along)
    y = y if args.weight is None else y * args.weight.float()
    y = y if args.bias is None else y + args.bias.float()
    return *quantize_blocks_ref(y, args.block_size), mean.clone(), rstd


def block_rms_norm_ref(args: BlockRMSNormArguments) -> RMSNormResult:
    """Reference of ``qframework::block_rms_norm``."""
    value = dequantize_blocks_ref(args.x, args.x_scale, args.block_size)
    mean, variance = _statistics_ref(value, args.statistics).unbind(-1)
    rstd = torch.rsqrt(variance + mean.square() + args.eps)
    y = value * rstd.view(*value.shape[:-1], 1)
    y = y if args.weight is None else y * args.weight.float()
    return *quantize_blocks_ref(y, args.block_size), rstd


def _statistics_ref(value: Tensor, statistics: Tensor | None) -> Tensor:
    if statistics is not None and statistics.numel() > 0:
        return statistics
    if value.numel() == 0:
        return value.new_zeros((row_count(value.shape), 2))
    return row_statistics_ref(value)


@triton.jit
def _block_norm_kernel(
    x_ptr,  # (R, C) int8
    x_scale_ptr,  # (ceil(R / BLOCK[0]), ceil(C / BLOCK[1])) fp32
    statistics_ptr,  # (R, 2) fp32, mean and variance
    weight_ptr,  # (C,) float
    bias_ptr,  # (C,) float
    y_ptr,  # (R, C) int8
    y_scale_ptr,
    mean_ptr,  # (R,) fp32, written unless RMS
    rstd_ptr,  # (R,) fp32
    R,
    C,
    ahead,  # rows, see ``rows_ahead``
    eps,
    RMS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """y and, from the first tile of a row, its mean and rstd. A program computes one tile."""
    wait_for_previous_kernel(OVERLAP)
    row, column = tile_origin(TILE_M, TILE_N, LAST_FIRST=True)
    r = row + tl.arange(0, TILE_M)
    c = column + tl.arange(0, TILE_N)
    x = load_tile(x_ptr, x_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    ask_for_tile(x_ptr, row - ahead, column, R, C, BLOCK, TILE_M, TILE_N)
    mean = tl.load(statistics_ptr + 2 * r.to(tl.int64), mask=r < R, other=0.0)
    variance = tl.load(statistics_ptr + 2 * r.to(tl.int64) + 1, mask=r < R, other=0.0)
    if RMS:
        rstd = tl.rsqrt(variance + mean * mean + eps)
        y = x * rstd[:, None]
    else:
        rstd = tl.rsqrt(variance + eps)
        y = (x - mean[:, None]) * rstd[:, None]
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    if not EVEN:
        y = tl.where(inside_tile(row, column, R, C, TILE_M, TILE_N), y, 0.0)
    q, y_scale = quantize_tile(y, BLOCK)
    store_tile(y_ptr, y_scale_ptr, q, y_scale, row, column, R, C, BLOCK, EVEN)
    if column == 0:
        tl.store(rstd_ptr + r, rstd, mask=r < R)
        if not RMS:
            tl.store(mean_ptr + r, mean, mask=r < R)


def block_layer_norm_triton(args: BlockLayerNormArguments) -> LayerNormResult:
    """``block_layer_norm`` on a GPU."""
    results = args.empty_result()
    _launch(args, args.bias, results, RMS=False)
    return results


def block_rms_norm_triton(args: BlockRMSNormArguments) -> RMSNormResult:
    """``block_rms_norm`` on a GPU."""
    y, y_scale, rstd = args.empty_result()
    _launch(args, None, (y, y_scale, rstd, rstd), RMS=True)
    return y, y_scale, rstd


def _launch(
    args: BlockLayerNormArguments | BlockRMSNormArguments, bias: Tensor | None, results: LayerNormResult, RMS: bool
) -> None:
    sizes = rows_and_columns(args.x)
    if args.x.numel() == 0:
        return
    args = contiguous(args)
    statistics = args.statistics
    if statistics is None or statistics.numel() == 0:
        statistics = row_statistics_triton(args.x, args.x_scale, args.block_size)
    tile = tile_of(*sizes, args.block_size)
    unread = statistics  # what the flags leave unread is any tensor
    launch(_block_norm_kernel, tiles_of(args.x, tile))(
        args.x,
        args.x_scale,
        statistics,
        unread if args.weight is None else args.weight,
        unread if bias is None else bias.contiguous(),
        *results,
        *sizes,
        rows_ahead(args.x, tile),
        float(args.eps),
        RMS=RMS,
        HAS_WEIGHT=args.weight is not None,
        HAS_BIAS=bias is not None,
        **tile,
    )


BLOCK_LAYER_NORM = declare(
    "block_layer_norm(Tensor x, Tensor x_scale, Tensor? weight, Tensor? bias, float eps, int[2] block_size, "
    "Tensor? statistics=None) -> (Tensor, Tensor, Tensor, Tensor)",
    BlockLayerNormArguments,
    cpu=block_layer_norm_ref,
    cuda=block_layer_norm_triton,
    fake=BlockLayerNormArguments.empty_result,
)
BLOCK_RMS_NORM = declare(
    "block_rms_norm(Tensor x, Tensor x_scale, Tensor? weight, float eps, int[2] block_size, Tensor? statistics=None)"
    " -> (Tensor, Tensor, Tensor)",
    BlockRMSNormArguments,
    cpu=block_rms_norm_ref,
    cuda=block_rms_norm_triton,
    fake=BlockRMSNormArguments.empty_result,
)


def block_layer_norm(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    block_size: BlockSize = 32,
    statistics: Tensor | None = None,
) -> LayerNormResult:
    """LayerNorm over the last dimension, from blocks to blocks (Jetfire, section 6.2 and appendix A).

    Args:
        x: ``(..., C)`` int8.
        x_scale: ``(ceil(R / B), ceil(C / B))`` fp32.
        weight: ``(C,)`` fp32, fp16 or bf16, or None for ones.
        bias: likewise, or None for zeros.
        eps: added to the variance.
        block_size: 32, 64, 128, (32, 128) or (1, 128).
        statistics: ``(R, 2)`` fp32, mean and biased variance of each row of the dequantized ``x``, as ``block_add``
            makes them; None or empty: made here, in one more pass over ``x``.

    Returns:
        ``y`` and its scale in the same format, off by half a step of their block; mean and rstd, ``(R,)`` fp32 each,
        for the backward pass.

    Raises:
        UnsupportedError: block size, dtype, or a GPU below sm_80.
        QFrameworkError: a scale, weight, bias or statistics of another shape or on another device; a weight or bias
            that a gradient is wanted of.
    """
    refuse_gradients("block_layer_norm", "qframework.training.norm.Int8LayerNorm", weight=weight, bias=bias)
    return torch.ops.qframework.block_layer_norm(x, x_scale, weight, bias, eps, block_size, statistics)


def block_rms_norm(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    block_size: BlockSize = 32,
    statistics: Tensor | None = None,
) -> RMSNormResult:
    """RMSNorm over the last dimension, from blocks to blocks: ``(y, its scale, rstd)``. See ``block_layer_norm``."""
    refuse_gradients("block_rms_norm", "qframework.training.norm.Int8RMSNorm", weight=weight)
    return torch.ops.qframework.block_rms_norm(x, x_scale, weight, eps, block_size, statistics)
