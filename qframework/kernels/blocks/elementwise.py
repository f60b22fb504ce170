"""Sums and products of two tensors in blocks; sums also make the row statistics of the LayerNorm after them.

Formula (Jetfire, algorithm 2 and appendix A), in float32 between the formats::

    add: z = Q(x + y)        mul: z = Q(x * y)        statistics = mean and variance of the rows of dequantized z

The statistics are those of what is stored, after rounding: a LayerNorm reads exactly that. Layout: blocks as in
qframework/kernels/blocks/format.py; 3 bytes of traffic a value. Reference: ``block_add_ref``, ``block_mul_ref``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qframework.kernels.blocks.format import BlockSize, dequantize_blocks_ref, quantize_blocks_ref, row_count
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
    ask_for_tile,
    check_alike,
    empty_blocks,
    register_block_operator,
    rows_ahead,
    rows_and_columns,
    tile_of,
    tile_origin,
    tiles_of,
)
from qframework.kernels.runtime.launch import launch
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton

BlocksAndStatistics = tuple[Tensor, Tensor, Tensor]


def block_add_ref(
    x: Tensor, x_scale: Tensor, y: Tensor, y_scale: Tensor, block_size: BlockSize, statistics: bool = False
) -> BlocksAndStatistics:
    """Reference of ``qframework::block_add``."""
    total = dequantize_blocks_ref(x, x_scale, block_size) + dequantize_blocks_ref(y, y_scale, block_size)
    z, z_scale = quantize_blocks_ref(total, block_size)
    if not statistics or z.numel() == 0:
        return z, z_scale, _empty_statistics(x, statistics)
    return z, z_scale, row_statistics_cpu(z, z_scale, block_size)


def block_mul_ref(x: Tensor, x_scale: Tensor, y: Tensor, y_scale: Tensor, block_size: BlockSize) -> Blocks:
    """Reference of ``qframework::block_mul``."""
    product = dequantize_blocks_ref(x, x_scale, block_size) * dequantize_blocks_ref(y, y_scale, block_size)
    return quantize_blocks_ref(product, block_size)


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
    """z = x + y or x * y. A program computes one tile, and where STATISTICS those of its rows."""
    wait_for_previous_kernel(OVERLAP)
    row, column = tile_origin(TILE_M, TILE_N)
    x = load_tile(x_ptr, x_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    y = load_tile(y_ptr, y_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    ask_for_tile(x_ptr, row + ahead, column, R, C, BLOCK, TILE_M, TILE_N)
    ask_for_tile(y_ptr, row + ahead, column, R, C, BLOCK, TILE_M, TILE_N)
    z, z_scale = quantize_tile(x * y if PRODUCT else x + y, BLOCK)
    store_tile(z_ptr, z_scale_ptr, z, z_scale, row, column, R, C, BLOCK, EVEN)
    if STATISTICS:
        mean, apart = tile_statistics(z, z_scale, column, C, BLOCK, EVEN, FOURS)
        store_partial(partial_ptr, mean, apart, row, column, R, C, TILE_N)


def _block_add_triton(
    x: Tensor, x_scale: Tensor, y: Tensor, y_scale: Tensor, block_size: BlockSize, statistics: bool = False
) -> BlocksAndStatistics:
    if x.numel() == 0:
        return _empty_sum(x, x_scale, y, y_scale, block_size, statistics)
    tile = tile_of(*rows_and_columns(x), block_size, FEW_VALUES)
    partial = empty_partial(x, tile) if statistics else None
    blocks = _launch(x, x_scale, y, y_scale, tile, partial, PRODUCT=False)
    return *blocks, _empty_statistics(x, False) if partial is None else merge_statistics(partial, x.shape[-1], tile)


def _block_mul_triton(x: Tensor, x_scale: Tensor, y: Tensor, y_scale: Tensor, block_size: BlockSize) -> Blocks:
    if x.numel() == 0:
        return empty_blocks(x, block_size)
    return _launch(x, x_scale, y, y_scale, tile_of(*rows_and_columns(x), block_size, FEW_VALUES), None, PRODUCT=True)


def _launch(
    x: Tensor, x_scale: Tensor, y: Tensor, y_scale: Tensor, tile: dict[str, Any], partial: Tensor | None, PRODUCT: bool
) -> Blocks:
    sizes = rows_and_columns(x)
    z, z_scale = empty_blocks(x, tile["BLOCK"])
    operands = [each.contiguous() for each in (x, x_scale, y, y_scale)]
    launch(_block_elementwise_kernel, tiles_of(x, tile))(
        *operands,
        z,
        z_scale,
        z_scale if partial is None else partial,
        *sizes,
        rows_ahead(x, tile),
        PRODUCT=PRODUCT,
        STATISTICS=partial is not None,
        FOURS=partial is not None and in_fours(operands[0], operands[2]),
        **tile,
    )
    return z, z_scale


def _empty_statistics(like: Tensor, wanted: bool) -> Tensor:
    return like.new_empty((row_count(like.shape) if wanted else 0, 2), dtype=torch.float32)


def _empty_sum(
    x: Tensor, x_scale: Tensor, y: Tensor, y_scale: Tensor, block_size: BlockSize, statistics: bool = False
) -> BlocksAndStatistics:
    return *empty_blocks(x, block_size), _empty_statistics(x, statistics)


def _check_add(
    x: Tensor, x_scale: Tensor, y: Tensor, y_scale: Tensor, block_size: BlockSize, statistics: bool = False
) -> None:
    check_alike("block_add", block_size, x=(x, x_scale), y=(y, y_scale))


def _check_mul(x: Tensor, x_scale: Tensor, y: Tensor, y_scale: Tensor, block_size: BlockSize) -> None:
    check_alike("block_mul", block_size, x=(x, x_scale), y=(y, y_scale))


register_block_operator(
    "block_add(Tensor x, Tensor x_scale, Tensor y, Tensor y_scale, int[2] block_size, bool statistics=False)"
    " -> (Tensor, Tensor, Tensor)",
    _check_add,
    block_add_ref,
    _block_add_triton,
    _empty_sum,
)
register_block_operator(
    "block_mul(Tensor x, Tensor x_scale, Tensor y, Tensor y_scale, int[2] block_size) -> (Tensor, Tensor)",
    _check_mul,
    block_mul_ref,
    _block_mul_triton,
    lambda x, x_scale, y, y_scale, block_size: empty_blocks(x, block_size),
)


def block_add(
    x: Tensor, x_scale: Tensor, y: Tensor, y_scale: Tensor, block_size: BlockSize = 32, statistics: bool = False
) -> BlocksAndStatistics:
    """``x + y`` in blocks, and the row statistics that a normalization after it needs (Jetfire, appendix A).

    Args:
        x: ``(..., C)`` int8.
        x_scale: ``(ceil(R / B), ceil(C / B))`` fp32.
        y: like ``x``, of the same shape: nothing broadcasts.
        y_scale: like ``x_scale``.
        block_size: 32, 64, 128, (32, 128) or (1, 128).
        statistics: whether to make them.

    Returns:
        ``z`` and its scale, in the same format, off by half a step of their block; and ``(R, 2)`` fp32, mean and
        biased variance of each row of the dequantized ``z``, or ``(0, 2)`` where they are not wanted.

    Raises:
        UnsupportedError: block size, dtype, or a GPU below sm_80.
        QFrameworkError: shapes or devices that differ, a scale of another shape.
    """
    return torch.ops.qframework.block_add(x, x_scale, y, y_scale, block_size, statistics)


def block_mul(x: Tensor, x_scale: Tensor, y: Tensor, y_scale: Tensor, block_size: BlockSize = 32) -> Blocks:
    """``x * y`` in blocks; arguments, result and errors as of ``block_add``. Its gradients are products again."""
    return torch.ops.qframework.block_mul(x, x_scale, y, y_scale, block_size)
