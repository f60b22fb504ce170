"""Addition and multiplication on INT8 blocks; additions also compute the statistics of the next LayerNorm.

Formula (Jetfire, algorithm 2 and appendix A), in float32 between the formats::

    add: z = Q(x + y)        mul: z = Q(x * y)        statistics = mean and variance of the rows of dequantized z

The statistics are computed after rounding, from the values that a LayerNorm will read. Layout: blocks as in
format.py. Memory traffic per value is 3 bytes. References: ``block_add_ref``, ``block_mul_ref``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework.kernels.blocks.format import DEFAULT_BLOCK_SIZE, BlockSize, quantize_blocks_ref, row_count
from qframework.kernels.blocks.primitives import load_tile, quantize_tile, store_tile
from qframework.kernels.blocks.statistics import (
    empty_partial,
    in_fours,
    merge_statistics,
    row_statistics_cpu,
    store_partial,
    tile_statistics,
)
from qframework.kernels.blocks.tiles import (
    FEW_VALUES,
    Blocks,
    check_alike,
    dequantized,
    empty_blocks,
    launch_by_tiles,
    prefetch_tile,
    rows_and_columns,
    tensors_of,
    tile_of,
    tile_origin,
)
from qframework.kernels.runtime.operator import declare
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton

BlocksAndStatistics = tuple[Tensor, Tensor, Tensor]


class BlockAddArguments(NamedTuple):
    """The arguments of ``qframework::block_add``."""

    x: Tensor
    x_scale: Tensor
    y: Tensor
    y_scale: Tensor
    block_size: BlockSize
    statistics: bool = False

    def empty_result(self) -> BlocksAndStatistics:
        """Allocate z in blocks and the statistics of its rows."""
        rows = row_count(self.x.shape) if self.statistics else 0
        return *empty_blocks(self.x, self.block_size), self.x.new_empty((rows, 2), dtype=torch.float32)

    def check(self) -> None:
        """Raise QFrameworkError for invalid operands."""
        check_alike("block_add", self)


class BlockMulArguments(NamedTuple):
    """The arguments of ``qframework::block_mul``."""

    x: Tensor
    x_scale: Tensor
    y: Tensor
    y_scale: Tensor
    block_size: BlockSize

    def empty_result(self) -> Blocks:
        """Allocate z in blocks."""
        return empty_blocks(self.x, self.block_size)

    def check(self) -> None:
        """Raise QFrameworkError for invalid operands."""
        check_alike("block_mul", self)


def block_add_ref(args: BlockAddArguments) -> BlocksAndStatistics:
    """Reference of ``qframework::block_add``."""
    x, y = dequantized(args)
    z, z_scale = quantize_blocks_ref(x + y, args.block_size)
    if not args.statistics or z.numel() == 0:
        return z, z_scale, args.empty_result()[2]
    return z, z_scale, row_statistics_cpu(z, z_scale, args.block_size)


def block_mul_ref(args: BlockMulArguments) -> Blocks:
    """Reference of ``qframework::block_mul``."""
    x, y = dequantized(args)
    return quantize_blocks_ref(x * y, args.block_size)


@triton.jit
def _block_elementwise_kernel(
    x_ptr,  # (R, C) int8
    x_scale_ptr,  # (ceil(R / BLOCK[0]), ceil(C / BLOCK[1])) fp32
    y_ptr,  # like x
    y_scale_ptr,
    z_ptr,  # like x
    z_scale_ptr,
    partial_ptr,  # (2, P, R) fp32, written where STATISTICS
    R,
    C,
    ahead,  # rows, see ``rows_ahead``
    PRODUCT: tl.constexpr,
    STATISTICS: tl.constexpr,
    FOURS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """z = x + y or x * y. A program computes one tile and, if STATISTICS, the statistics of its rows."""
    wait_for_previous_kernel(OVERLAP)
    row, column = tile_origin(TILE_M, TILE_N)
    x = load_tile(x_ptr, x_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    y = load_tile(y_ptr, y_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    prefetch_tile(x_ptr, row + ahead, column, R, C, BLOCK, TILE_M, TILE_N)
    prefetch_tile(y_ptr, row + ahead, column, R, C, BLOCK, TILE_M, TILE_N)
    z, z_scale = quantize_tile(x * y if PRODUCT else x + y, BLOCK)
    store_tile(z_ptr, z_scale_ptr, z, z_scale, row, column, R, C, BLOCK, EVEN)
    if STATISTICS:
        mean, apart = tile_statistics(z, z_scale, column, C, BLOCK, EVEN, FOURS)
        store_partial(partial_ptr, mean, apart, row, column, R, C, TILE_N)


def block_add_triton(args: BlockAddArguments) -> BlocksAndStatistics:
    """``block_add`` on a GPU."""
    z, z_scale, statistics = args.empty_result()
    _launch(args, (z, z_scale), statistics if args.statistics else None, PRODUCT=False)
    return z, z_scale, statistics


def block_mul_triton(args: BlockMulArguments) -> Blocks:
    """``block_mul`` on a GPU."""
    result = args.empty_result()
    _launch(args, result, None, PRODUCT=True)
    return result


def _launch(
    args: BlockAddArguments | BlockMulArguments, result: Blocks, statistics: Tensor | None, PRODUCT: bool
) -> None:
    if args.x.numel() == 0:
        return
    tile = tile_of(*rows_and_columns(args.x), args.block_size, FEW_VALUES)
    partial = None if statistics is None else empty_partial(args.x, tile)
    operands = tensors_of(args)
    flags = {
        "PRODUCT": PRODUCT,
        "STATISTICS": partial is not None,
        "FOURS": partial is not None and in_fours(*operands[::2]),
    }
    unread = result[1]  # any tensor serves as a pointer that the kernel does not use
    launch_by_tiles(
        _block_elementwise_kernel, operands, (*result, unread if partial is None else partial), tile, **flags
    )
    if statistics is not None and partial is not None:
        merge_statistics(partial, statistics, args.x.shape[-1], tile)


BLOCK_ADD = declare(
    "block_add(Tensor x, Tensor x_scale, Tensor y, Tensor y_scale, int[2] block_size, bool statistics=False)"
    " -> (Tensor, Tensor, Tensor)",
    BlockAddArguments,
    cpu=block_add_ref,
    cuda=block_add_triton,
    fake=BlockAddArguments.empty_result,
)
BLOCK_MUL = declare(
    "block_mul(Tensor x, Tensor x_scale, Tensor y, Tensor y_scale, int[2] block_size) -> (Tensor, Tensor)",
    BlockMulArguments,
    cpu=block_mul_ref,
    cuda=block_mul_triton,
    fake=BlockMulArguments.empty_result,
)


def block_add(
    x: Tensor,
    x_scale: Tensor,
    y: Tensor,
    y_scale: Tensor,
    block_size: BlockSize = DEFAULT_BLOCK_SIZE,
    statistics: bool = False,
) -> BlocksAndStatistics:
    """``x + y`` in blocks, and the row statistics that a normalization after it needs (Jetfire, appendix A).

    Args:
        x: ``(..., C)`` int8.
        x_scale: ``(ceil(R / B), ceil(C / B))`` fp32.
        y: like ``x``, of the same shape; operands do not broadcast.
        y_scale: like ``x_scale``.
        block_size: 32, 64, 128, (32, 128), (1, 128) or (1, 256).
        statistics: whether to compute the statistics.

    Returns:
        ``z`` and its scale in the same format, with an error of at most half a step of its block; and ``(R, 2)`` fp32,
        mean and biased variance of each row of the dequantized ``z``, or ``(0, 2)`` without ``statistics``.

    Raises:
        UnsupportedError: a block size, a dtype, or a GPU below sm_80.
        QFrameworkError: shapes or devices that differ, or a scale of another shape.
    """
    return torch.ops.qframework.block_add(x, x_scale, y, y_scale, block_size, statistics)


def block_mul(
    x: Tensor, x_scale: Tensor, y: Tensor, y_scale: Tensor, block_size: BlockSize = DEFAULT_BLOCK_SIZE
) -> Blocks:
    """``x * y`` in blocks. Arguments, result and errors are those of ``block_add``."""
    return torch.ops.qframework.block_mul(x, x_scale, y, y_scale, block_size)
