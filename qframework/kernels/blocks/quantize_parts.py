"""Conversion of up to three matrices to INT8 blocks, as if they were one, and of its transpose.

Linears that read the same input are one product in INT8 training. Their weights lie below one another in it, the
gradients of their results beside one another::

    Y  = X  [Wq; Wk; Wv]^T          dX = [dq, dk, dv] [Wq; Wk; Wv]          [dWq; dWk; dWv] = [dq, dk, dv]^T X

One launch reads the parts where they are and writes blocks of the whole. Parts begin at multiples of a tile, so blocks
are those of each part, see ``block_quantize_both``. On request it also sums the rows in float32, for the gradients of
biases. Reference: ``block_quantize_parts_ref``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.blocks.format import (
    DEFAULT_BLOCK_SIZE,
    BlockSize,
    block_shape,
    canonical_size,
    check_operand_size,
    row_count,
    transposed_size,
)
from qframework.kernels.blocks.quantize import (
    BlockQuantizeBothArguments,
    block_quantize_both_ref,
    launch_quantize,
    tile_of,
)
from qframework.kernels.blocks.sum_rows import add_up
from qframework.kernels.blocks.tiles import empty_blocks
from qframework.kernels.runtime.checks import check_float_input, check_same_device
from qframework.kernels.runtime.launch import cdiv
from qframework.kernels.runtime.operator import declare

MAX_PARTS = 3
BlocksAndSums = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def part_multiple(block_size: BlockSize) -> int:
    """What the rows of parts below one another, and the columns of parts beside one another, must be a multiple of."""
    return max(64, *block_shape(block_size), *block_shape(transposed_size(block_size)))


class BlockQuantizePartsArguments(NamedTuple):
    """The arguments of ``qframework::block_quantize_parts``; those of the function ``block_quantize_parts``."""

    parts: list[Tensor]
    beside: bool
    sums: bool
    block_size: BlockSize

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the whole matrix."""
        *leading, columns = self.parts[0].shape
        if self.beside:
            return (*leading, sum(part.shape[-1] for part in self.parts))
        return (sum(row_count(part.shape) for part in self.parts), columns)

    def empty_result(self) -> BlocksAndSums:
        """Allocate q and its scale, both of the transpose, and the sums."""
        like, (*leading, columns) = self.parts[0], self.whole_shape
        blocks = empty_blocks(like, self.block_size, self.whole_shape)
        turned = empty_blocks(like, transposed_size(self.block_size), (columns, math.prod(leading)))
        return *blocks, *turned, like.new_empty(columns if self.sums else 0, dtype=torch.float32)

    def check(self) -> None:
        """Raise QFrameworkError for an unsupported block size or dtype, and for parts that make no matrix."""
        name, count = "block_quantize_parts", len(self.parts)
        check_operand_size(name, self.block_size)
        if not 1 <= count <= MAX_PARTS:
            raise QFrameworkError(f"{name}: parts must be one to {MAX_PARTS} tensors, got {count}")
        first, multiple = self.parts[0], part_multiple(self.block_size)
        for part in self.parts:
            check_float_input(name, part)
            check_same_device(name, first, parts=part)
            shared, own = (part.shape[:-1], part.shape[-1]) if self.beside else (part.shape[-1:], row_count(part.shape))
            expected = first.shape[:-1] if self.beside else first.shape[-1:]
            if part.dtype != first.dtype or shared != expected:
                raise QFrameworkError(
                    f"{name}: parts must have one dtype and the same {'rows' if self.beside else 'columns'}, got "
                    f"{first.dtype} {tuple(first.shape)} and {part.dtype} {tuple(part.shape)}"
                )
            if count > 1 and own % multiple:
                raise UnsupportedError(
                    f"{name}: {'columns' if self.beside else 'rows'} of parts must be a multiple of {multiple} for "
                    f"blocks of {canonical_size(self.block_size)}, got {own}"
                )


def block_quantize_parts_ref(args: BlockQuantizePartsArguments) -> BlocksAndSums:
    """Reference of ``qframework::block_quantize_parts``."""
    whole = torch.cat(args.parts, -1) if args.beside else torch.cat([part.flatten(0, -2) for part in args.parts])
    blocks = block_quantize_both_ref(BlockQuantizeBothArguments(whole, args.block_size))
    rows = whole.reshape(-1, whole.shape[-1])
    return *blocks, rows.sum(0, dtype=torch.float32) if args.sums else rows.new_empty(0, dtype=torch.float32)


def block_quantize_parts_triton(args: BlockQuantizePartsArguments) -> BlocksAndSums:
    """``block_quantize_parts`` on a GPU."""
    *results, total = args.empty_result()
    shape = args.whole_shape
    sizes = row_count(shape), shape[-1]
    if 0 in sizes:
        return *results, total.zero_()  # type: ignore[return-value]
    grid, constants = tile_of(sizes, args.block_size, transposed=True)
    tile = max(constants["TILE_M"], constants["BLOCK_T"][1])  # rows of a tile of the transpose
    partial = total.new_empty((cdiv(sizes[0], tile), sizes[1])) if args.sums else None
    lie = "one" if len(args.parts) == 1 else "columns" if args.beside else "rows"
    launch_quantize(args.parts, sizes, lie, None, tuple(results), partial, grid, constants)  # type: ignore[arg-type]
    return *results, total if partial is None else add_up(partial)[0]  # type: ignore[return-value]


BLOCK_QUANTIZE_PARTS = declare(
    "block_quantize_parts(Tensor[] parts, bool beside, bool sums, int[2] block_size) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    BlockQuantizePartsArguments,
    cpu=block_quantize_parts_ref,
    cuda=block_quantize_parts_triton,
    fake=BlockQuantizePartsArguments.empty_result,
)


def block_quantize_parts(
    *parts: Tensor, beside: bool, sums: bool = False, block_size: BlockSize = DEFAULT_BLOCK_SIZE
) -> BlocksAndSums:
    """``block_quantize_both`` of one to three tensors as one matrix: ``(q, scale, q^T, scale^T, sums)``.

    Args:
        *parts: each ``(..., C)`` fp32, fp16 or bf16, all of one dtype, any strides, treated as rows.
        beside: whether they lie beside one another, ``(..., sum of C)``; then all have the same leading dimensions.
            Otherwise they lie below one another, ``(sum of rows, C)``.
        sums: whether to sum the rows too.
        block_size: as for ``block_quantize_both``.

    Returns:
        The blocks of the whole and of its transpose as ``block_quantize_both`` returns them, and the sums of its rows,
        ``(columns,)`` fp32, always added in the same order, or ``(0,)``.

    Raises:
        UnsupportedError: a block size, a dtype, or, of several parts, rows or columns that are no multiple of
            ``part_multiple(block_size)``.
        QFrameworkError: no part or more than three, or dtypes, shapes or devices that do not match.
    """
    return torch.ops.qframework.block_quantize_parts(list(parts), beside, sums, block_size)
