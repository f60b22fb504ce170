"""Sums over the rows of INT8 blocks: the gradient of a bias.

Formula: ``sum[c]`` is the sum over all rows r of ``q[r, c] * scale`` of its block, in float32. A program sums a stretch
of rows for the columns of one tile; a second kernel adds the stretches in order, without atomics, so results repeat bit
for bit. Layout: blocks as in format.py. Memory traffic per value is 1 byte. Reference: ``block_sum_rows_ref``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qframework.kernels.blocks.format import DEFAULT_BLOCK_SIZE, BlockSize
from qframework.kernels.blocks.tiles import (
    check_alike,
    contiguous,
    dequantized,
    fold_rows,
    load_rows,
    rows_and_columns,
    rows_of_tile,
)
from qframework.kernels.runtime.launch import cdiv, launch
from qframework.kernels.runtime.operator import declare
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton

PROGRAMS = 4096  # enough programs of one warp to fill a chip: stretches of rows get shorter until there are as many
LONGEST, SHORTEST = 256, 32  # rows of one program
_SUMMED = 64  # how many numbers a program of the second kernel adds at a time, and how many sums it computes


class BlockSumRowsArguments(NamedTuple):
    """The arguments of ``qframework::block_sum_rows``."""

    x: Tensor
    x_scale: Tensor
    block_size: BlockSize

    def empty_result(self) -> Tensor:
        """Allocate the sums."""
        return self.x.new_empty((self.x.shape[-1],), dtype=torch.float32)

    def check(self) -> None:
        """Raise QFrameworkError for invalid operands."""
        check_alike("block_sum_rows", self)


def block_sum_rows_ref(args: BlockSumRowsArguments) -> Tensor:
    """Reference of ``qframework::block_sum_rows``."""
    return dequantized(args)[0].reshape(-1, args.x.shape[-1]).sum(0)


@triton.jit
def _block_sum_rows_kernel(
    x_ptr,  # (R, C) int8
    x_scale_ptr,  # (ceil(R / BLOCK[0]), ceil(C / BLOCK[1])) fp32
    partial_ptr,  # (S, C) fp32
    R,
    C,
    STRETCH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Sums over STRETCH rows of the columns of one tile. Grid (S * cdiv(C, TILE_N),)."""
    wait_for_previous_kernel(OVERLAP)
    first, column = stretch_origin(C, STRETCH, TILE_N)
    total = tl.zeros((LANES, TILE_N), tl.float32)
    for start in tl.range(0, STRETCH, TILE_M, num_stages=STAGES):
        rows = load_rows(x_ptr, x_scale_ptr, first + start, column, R, C, TILE_M, TILE_N, BLOCK)
        total += fold_rows(rows, LANES)
    store_sums(partial_ptr, total, first // STRETCH, column, C)


@triton.jit
def stretch_origin(C, STRETCH: tl.constexpr, TILE_N: tl.constexpr):
    """First row and column of this program's stretch of tiles."""
    across = tl.cdiv(C, TILE_N)
    return tl.program_id(0) // across * STRETCH, tl.program_id(0) % across * TILE_N


@triton.jit
def store_sums(partial_ptr, total, stretch, column, C):
    """Sum a tile (M, N) over its rows and store it as row ``stretch`` of ``partial (S, C)``."""
    c = column + tl.arange(0, total.shape[1])
    tl.store(partial_ptr + stretch.to(tl.int64) * C + c, tl.sum(total, 0), mask=c < C)


@triton.jit
def _add_up_kernel(
    a_ptr,  # (NA, LA) fp32
    a_sum_ptr,  # (LA,) fp32
    b_ptr,  # (N, L) fp32
    b_sum_ptr,  # (L,) fp32
    c_ptr,  # like b
    c_sum_ptr,
    NA,
    LA,
    N,
    L,
    SUMMED: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Sums over the first dimension of up to three matrices. Grid (cdiv(LA, SUMMED) + up to 2 * cdiv(L, SUMMED),)."""
    wait_for_previous_kernel(OVERLAP)
    pid = tl.program_id(0)
    of_a, of_b = tl.cdiv(LA, SUMMED), tl.cdiv(L, SUMMED)
    if pid < of_a:
        _add_up(a_ptr, a_sum_ptr, pid, NA, LA, SUMMED)
    elif pid < of_a + of_b:
        _add_up(b_ptr, b_sum_ptr, pid - of_a, N, L, SUMMED)
    else:
        _add_up(c_ptr, c_sum_ptr, pid - of_a - of_b, N, L, SUMMED)


@triton.jit
def _add_up(ptr, sum_ptr, pid, N, L, SUMMED: tl.constexpr):
    which = pid * SUMMED + tl.arange(0, SUMMED)
    total = tl.zeros((SUMMED, SUMMED), tl.float32)
    for first in range(0, N, SUMMED):
        n = first + tl.arange(0, SUMMED)
        inside = (n < N)[:, None] & (which < L)[None, :]
        total += tl.load(ptr + n.to(tl.int64)[:, None] * L + which[None, :], mask=inside, other=0.0)
    tl.store(sum_ptr + which, tl.sum(total, 0), mask=which < L)


def add_up(*matrices: Tensor) -> list[Tensor]:
    """Sums over the first dimension of one to three fp32 matrices, in one launch and always in the same order.

    The second and the third matrix must have the same shape.
    """
    sums = [matrix.new_empty(matrix.shape[1]) for matrix in matrices]
    a, *others = matrices
    shape = others[0].shape if others else (0, 0)
    slots = [each for pair in zip(matrices, sums, strict=True) for each in pair]
    slots += [a, sums[0]] * (3 - len(matrices))
    programs = cdiv(a.shape[1], _SUMMED) + len(others) * cdiv(shape[1], _SUMMED)
    launch(_add_up_kernel, (programs,))(*slots, *a.shape, *shape, SUMMED=_SUMMED, num_warps=4)
    return sums


def stretches(rows: int, columns: int, tile: dict[str, Any]) -> tuple[int, int]:
    """How many rows one program sums, and how many such stretches the rows consist of."""
    across = cdiv(columns, tile["TILE_N"])
    length = LONGEST
    while length > SHORTEST and cdiv(rows, length) * across < PROGRAMS:
        length //= 2
    return length, cdiv(rows, length)


def block_sum_rows_triton(args: BlockSumRowsArguments) -> Tensor:
    """``block_sum_rows`` on a GPU."""
    rows, columns = rows_and_columns(args.x)
    if args.x.numel() == 0:
        return args.empty_result().zero_()
    args = contiguous(args)
    tile = rows_of_tile(columns, args.block_size)
    length, count = stretches(rows, columns, tile)
    partial = args.x.new_empty((count, columns), dtype=torch.float32)
    launch(_block_sum_rows_kernel, (count * cdiv(columns, tile["TILE_N"]),))(
        args.x, args.x_scale, partial, rows, columns, STRETCH=length, **tile
    )
    return add_up(partial)[0]


BLOCK_SUM_ROWS = declare(
    "block_sum_rows(Tensor x, Tensor x_scale, int[2] block_size) -> Tensor",
    BlockSumRowsArguments,
    cpu=block_sum_rows_ref,
    cuda=block_sum_rows_triton,
    fake=BlockSumRowsArguments.empty_result,
)


def block_sum_rows(x: Tensor, x_scale: Tensor, block_size: BlockSize = DEFAULT_BLOCK_SIZE) -> Tensor:
    """Sum over all rows of a tensor in blocks, as for the gradient of a bias.

    Args:
        x: ``(..., C)`` int8.
        x_scale: ``(ceil(R / B), ceil(C / B))`` fp32.
        block_size: 32, 64, 128, (32, 128), (1, 128) or (1, 256).

    Returns:
        ``(C,)`` fp32, summed in float32 and always in the same order.

    Raises:
        UnsupportedError: a block size, a dtype, or a GPU below sm_80.
        QFrameworkError: a scale of another shape or on another device.
    """
    return torch.ops.qframework.block_sum_rows(x, x_scale, block_size)
