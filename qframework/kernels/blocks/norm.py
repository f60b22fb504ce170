"""LayerNorm and RMSNorm on INT8 blocks.

Formula, in float32 between the formats, weight and bias float::

    LayerNorm: y = Q((x - mean) * rstd * weight + bias)        rstd = 1 / sqrt(variance + eps)
    RMSNorm:   y = Q(x * rstd * weight)                        rstd = 1 / sqrt(variance + mean^2 + eps)

A scale belongs to B rows and B columns, but mean and rstd to a whole row. The statistics are therefore computed first:
by the Add before the normalization (Jetfire, appendix A), or in a separate pass over ``x`` (statistics.py). Then each
program normalizes one tile. Memory traffic per value is 2 bytes, or 3 without statistics from an Add. Layout: blocks as
in format.py. Reference: ``block_norm_ref``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework.errors import QFrameworkError
from qframework.kernels.blocks.format import DEFAULT_BLOCK_SIZE, BlockSize, quantize_blocks_ref, row_count
from qframework.kernels.blocks.primitives import load_tile, quantize_tile, store_tile
from qframework.kernels.blocks.statistics import row_statistics_ref, row_statistics_triton
from qframework.kernels.blocks.tiles import (
    check_alike,
    check_vector,
    contiguous,
    dequantized,
    empty_blocks,
    inside_tile,
    launch_by_tiles,
    prefetch_tile,
    rows_and_columns,
    tile_of,
    tile_origin,
)
from qframework.kernels.runtime.checks import check_dtype, check_same_device
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
        """Allocate y in blocks, mean and rstd."""
        mean, rstd = (self.x.new_empty((row_count(self.x.shape),), dtype=torch.float32) for _ in range(2))
        return *empty_blocks(self.x, self.block_size), mean, rstd

    def check(self) -> None:
        """Raise QFrameworkError for invalid operands."""
        _check("block_layer_norm", self)
        check_vector("block_layer_norm", "bias", self.bias, self.x.shape[-1], self.x)


class BlockRMSNormArguments(NamedTuple):
    """The arguments of ``qframework::block_rms_norm``."""

    x: Tensor
    x_scale: Tensor
    weight: Tensor | None
    eps: float
    block_size: BlockSize
    statistics: Tensor | None = None

    def empty_result(self) -> RMSNormResult:
        """Allocate y in blocks and rstd."""
        rstd = self.x.new_empty((row_count(self.x.shape),), dtype=torch.float32)
        return *empty_blocks(self.x, self.block_size), rstd

    def check(self) -> None:
        """Raise QFrameworkError for invalid operands."""
        _check("block_rms_norm", self)


NormArguments = BlockLayerNormArguments | BlockRMSNormArguments


def _check(operator: str, args: NormArguments) -> None:
    check_alike(operator, args)
    check_vector(operator, "weight", args.weight, args.x.shape[-1], args.x)
    statistics, expected = args.statistics, (row_count(args.x.shape), 2)
    if statistics is None or statistics.numel() == 0:
        return
    check_dtype(operator, "statistics", statistics, (torch.float32,))
    check_same_device(operator, args.x, statistics=statistics)
    if tuple(statistics.shape) != expected:
        raise QFrameworkError(
            f"{operator}: statistics must be None or empty, or have shape {expected}, got {tuple(statistics.shape)}"
        )


def block_norm_ref(args: NormArguments) -> tuple[Tensor, ...]:
    """Reference of ``qframework::block_layer_norm`` and ``qframework::block_rms_norm``."""
    (y,) = dequantized(args)
    mean, variance = _statistics_ref(y, args.statistics).unbind(-1)
    bias, along = None, (*y.shape[:-1], 1)
    if isinstance(args, BlockLayerNormArguments):
        y, bias = y - mean.view(along), args.bias
    else:
        variance = variance + mean.square()
    rstd = torch.rsqrt(variance + args.eps)
    y = y * rstd.view(along)
    y = y if args.weight is None else y * args.weight.float()
    y = y if bias is None else y + bias.float()
    blocks = quantize_blocks_ref(y, args.block_size)
    return (*blocks, mean.clone(), rstd) if isinstance(args, BlockLayerNormArguments) else (*blocks, rstd)


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
    """y, and in the programs of the first column of tiles also mean and rstd. A program computes one tile."""
    wait_for_previous_kernel(OVERLAP)
    row, column = tile_origin(TILE_M, TILE_N, LAST_FIRST=True)
    r = row + tl.arange(0, TILE_M)
    c = column + tl.arange(0, TILE_N)
    x = load_tile(x_ptr, x_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    prefetch_tile(x_ptr, row - ahead, column, R, C, BLOCK, TILE_M, TILE_N)
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


def block_norm_triton(args: NormArguments) -> tuple[Tensor, ...]:
    """``block_layer_norm`` and ``block_rms_norm`` on a GPU."""
    sizes = rows_and_columns(args.x)
    results = args.empty_result()
    if args.x.numel() == 0:
        return results
    args = contiguous(args)
    bias = args.bias if isinstance(args, BlockLayerNormArguments) else None
    statistics = args.statistics
    if statistics is None or statistics.numel() == 0:
        statistics = row_statistics_triton(args.x, args.x_scale, args.block_size)
    # Any tensor serves as a pointer that the kernel does not use: statistics here, rstd for the mean of RMSNorm.
    vectors = [statistics if vector is None else vector for vector in (args.weight, bias)]
    written = results if len(results) == 4 else (*results, results[-1])
    flags = {"RMS": len(results) == 3, "HAS_WEIGHT": args.weight is not None, "HAS_BIAS": bias is not None}
    operands = (args.x, args.x_scale, statistics, *vectors)
    launch_by_tiles(_block_norm_kernel, operands, written, tile_of(*sizes, args.block_size), float(args.eps), **flags)
    return results


BLOCK_LAYER_NORM = declare(
    "block_layer_norm(Tensor x, Tensor x_scale, Tensor? weight, Tensor? bias, float eps, int[2] block_size, "
    "Tensor? statistics=None) -> (Tensor, Tensor, Tensor, Tensor)",
    BlockLayerNormArguments,
    cpu=block_norm_ref,
    cuda=block_norm_triton,
    fake=BlockLayerNormArguments.empty_result,
)
BLOCK_RMS_NORM = declare(
    "block_rms_norm(Tensor x, Tensor x_scale, Tensor? weight, float eps, int[2] block_size, Tensor? statistics=None)"
    " -> (Tensor, Tensor, Tensor)",
    BlockRMSNormArguments,
    cpu=block_norm_ref,
    cuda=block_norm_triton,
    fake=BlockRMSNormArguments.empty_result,
)


def block_layer_norm(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    block_size: BlockSize = DEFAULT_BLOCK_SIZE,
    statistics: Tensor | None = None,
) -> LayerNormResult:
    """LayerNorm over the last dimension, from blocks to blocks (Jetfire, section 6.2 and appendix A).

    Args:
        x: ``(..., C)`` int8.
        x_scale: ``(ceil(R / B), ceil(C / B))`` fp32.
        weight: ``(C,)`` fp32, fp16 or bf16, or None for ones.
        bias: ``(C,)`` like ``weight``, or None for zeros.
        eps: added to the variance.
        block_size: 32, 64, 128, (32, 128), (1, 128) or (1, 256).
        statistics: ``(R, 2)`` fp32, mean and biased variance of each row of the dequantized ``x``, as ``block_add``
            computes them. None or empty: they are computed here, in another pass over ``x``.

    Returns:
        ``y`` and its scale in the same format, with an error of at most half a step of its block; mean and rstd,
        ``(R,)`` fp32 each, for the backward pass.

    Raises:
        UnsupportedError: a block size, a dtype, or a GPU below sm_80.
        QFrameworkError: a scale, weight, bias or statistics of another shape or on another device; a weight or bias
            that requires a gradient.
    """
    refuse_gradients("block_layer_norm", "qframework.training.norm.Int8LayerNorm", weight=weight, bias=bias)
    return torch.ops.qframework.block_layer_norm(x, x_scale, weight, bias, eps, block_size, statistics)


def block_rms_norm(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    block_size: BlockSize = DEFAULT_BLOCK_SIZE,
    statistics: Tensor | None = None,
) -> RMSNormResult:
    """RMSNorm over the last dimension, from blocks to blocks: ``(y, its scale, rstd)``. See ``block_layer_norm``."""
    refuse_gradients("block_rms_norm", "qframework.training.norm.Int8RMSNorm", weight=weight)
    return torch.ops.qframework.block_rms_norm(x, x_scale, weight, eps, block_size, statistics)
