"""Transposition of INT8 blocks, for products over tokens.

Products need operands with the inner dimension innermost. The transpose of square blocks has the same values and the
transposed scales. Other blocks are dequantized and quantized again, in blocks of ``transposed_size``.
``block_transpose_sum`` also sums the rows, for the gradients of a weight and of a bias in one pass over the blocks.

Layout: ``q (..., C)``, R = prod(leading) rows; blocks as in format.py. References: ``block_transpose*_ref``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework.kernels.blocks.arithmetic import int8_to_float
from qframework.kernels.blocks.format import (
    DEFAULT_BLOCK_SIZE,
    BlockSize,
    check_blocks,
    dequantize_blocks_ref,
    is_square,
    quantize_blocks_ref,
    transposed_size,
)
from qframework.kernels.blocks.primitives import (
    load_scales,
    load_steps,
    quantize_tile,
    store_tile,
    times_blocks,
)
from qframework.kernels.blocks.quantize import empty_transpose, move_blocks, tile_of
from qframework.kernels.blocks.sum_rows import add_up
from qframework.kernels.blocks.tiles import Blocks, contiguous, rows_and_columns
from qframework.kernels.runtime.launch import launch
from qframework.kernels.runtime.operator import declare
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton

BlocksAndSums = tuple[Tensor, Tensor, Tensor]


class BlockTransposeArguments(NamedTuple):
    """The arguments of ``qframework::block_transpose``."""

    q: Tensor
    scale: Tensor
    block_size: BlockSize

    def empty_result(self) -> Blocks:
        """Allocate the transpose."""
        return empty_transpose(self.q, self.block_size)

    def check(self, operator: str = "block_transpose") -> None:
        """Raise QFrameworkError for invalid operands."""
        check_blocks(operator, "q", self.q, self.scale, self.block_size)


class BlockTransposeSumArguments(BlockTransposeArguments):
    """The arguments of ``qframework::block_transpose_sum``."""

    def empty_result(self) -> BlocksAndSums:  # type: ignore[override]
        """Allocate the transpose and the sums of the rows."""
        return *super().empty_result(), self.q.new_empty((self.q.shape[-1],), dtype=torch.float32)

    def check(self, operator: str = "block_transpose_sum") -> None:
        """Raise as ``block_transpose`` does."""
        super().check(operator)


def block_transpose_ref(args: BlockTransposeArguments) -> Blocks:
    """Reference of ``qframework::block_transpose``."""
    if is_square(args.block_size):
        return move_blocks(args.q, args.scale)
    rows = dequantize_blocks_ref(args.q, args.scale, args.block_size).reshape(rows_and_columns(args.q))
    return quantize_blocks_ref(rows.t(), transposed_size(args.block_size))


def block_transpose_sum_ref(args: BlockTransposeSumArguments) -> BlocksAndSums:
    """Reference of ``qframework::block_transpose_sum``."""
    values = dequantize_blocks_ref(*args).reshape(rows_and_columns(args.q))
    return *block_transpose_ref(args), values.sum(0)


@triton.jit
def _block_transpose_kernel(
    q_ptr,  # (R, C) int8
    scale_ptr,  # (ceil(R / BLOCK[0]), ceil(C / BLOCK[1])) fp32
    qt_ptr,  # (C, R) int8
    scale_t_ptr,  # (ceil(C / BLOCK_T[0]), ceil(R / BLOCK_T[1])) fp32
    partial_ptr,  # (ceil(R / TILE_M), C) fp32, written where SUMS
    R,
    C,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Transposed values and scales; if SUMS, sums of the tile's columns too.

    Grid (cdiv(R, TILE_M), cdiv(C, TILE_N)); a program computes one tile.
    """
    wait_for_previous_kernel(OVERLAP)
    row, column = tl.program_id(0) * TILE_M, tl.program_id(1) * TILE_N
    q = load_steps(q_ptr, row, column, R, C, TILE_M, TILE_N, False)
    scale = load_scales(scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK)
    if SUMS or BLOCK[0] != BLOCK[1]:
        WITHIN: tl.constexpr = (BLOCK[0], BLOCK[1] if BLOCK[1] <= TILE_N else TILE_N)  # part of a block in the tile
        x = times_blocks(int8_to_float(q), scale, WITHIN)
        if SUMS:
            c = column + tl.arange(0, TILE_N)
            tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * C + c, tl.sum(x, 0), mask=c < C)
        if BLOCK[0] != BLOCK[1]:
            TURNED: tl.constexpr = (BLOCK_T[1], BLOCK_T[0])  # before transposing: threads hold neighbours of a row
            q, scale = quantize_tile(x, TURNED)
    store_tile(qt_ptr, scale_t_ptr, tl.trans(q), tl.trans(scale), column, row, C, R, BLOCK_T)


def block_transpose_triton(args: BlockTransposeArguments) -> tuple[Tensor, ...]:
    """``block_transpose`` and ``block_transpose_sum`` on a GPU."""
    result, sizes = args.empty_result(), rows_and_columns(args.q)
    sums = isinstance(args, BlockTransposeSumArguments)
    if args.q.numel() == 0:
        return tuple(each.zero_() for each in result)
    args = contiguous(args)
    grid, constants = tile_of(sizes, args.block_size, transposed=True, upright=False)
    # Any tensor serves as a pointer that the kernel does not use.
    partial = args.scale.new_empty((grid[0], sizes[1])) if sums else args.scale
    launch(_block_transpose_kernel, grid)(args.q, args.scale, *result[:2], partial, *sizes, SUMS=sums, **constants)
    return (*result[:2], *add_up(partial)) if sums else result


BLOCK_TRANSPOSE = declare(
    "block_transpose(Tensor q, Tensor scale, int[2] block_size) -> (Tensor, Tensor)",
    BlockTransposeArguments,
    cpu=block_transpose_ref,
    cuda=block_transpose_triton,
    fake=BlockTransposeArguments.empty_result,
)
BLOCK_TRANSPOSE_SUM = declare(
    "block_transpose_sum(Tensor q, Tensor scale, int[2] block_size) -> (Tensor, Tensor, Tensor)",
    BlockTransposeSumArguments,
    cpu=block_transpose_sum_ref,
    cuda=block_transpose_triton,
    fake=BlockTransposeSumArguments.empty_result,
)


def block_transpose(q: Tensor, scale: Tensor, block_size: BlockSize = DEFAULT_BLOCK_SIZE) -> Blocks:
    """The transpose ``(C, R)`` int8, contiguous, of ``q (..., C)``, and its scale.

    Square blocks keep their values. Others are quantized again, in blocks of 32 rows, with an error of half a step.
    """
    return torch.ops.qframework.block_transpose(q, scale, block_size)


def block_transpose_sum(
    q: Tensor, scale: Tensor, block_size: BlockSize = DEFAULT_BLOCK_SIZE
) -> tuple[Tensor, Tensor, Tensor]:
    """``block_transpose``, and the sum over all rows as :func:`block_sum_rows` computes it, in one pass.

    The sum ``(C,)`` is fp32 and always added in the same order, another one than that of ``block_sum_rows``.
    """
    return torch.ops.qframework.block_transpose_sum(q, scale, block_size)
