"""Conversion of tensors to INT8 blocks and back.

Formula (Jetfire eq. 1, range [-127, 127]), for every block of B x B values of ``x`` seen as rows::

    scale = max|block| / 127        q = clamp(round_half_even(block * (1 / scale)), -127, 127)

or, with a seed, ``q = clamp(floor(block * (1 / scale) + u), -127, 127)`` with u uniform in [0, 1), which is unbiased.
``block_quantize_both`` computes the blocks and their transpose in one pass over ``x``, for a gradient that enters two
products, which both need operands with the inner dimension innermost. The transpose of square blocks has the same
values and the transposed scales. For other blocks, the transpose of ``x`` is quantized, in blocks of
``transposed_size``.

Layout: ``x (..., C)``, R = prod(leading) rows; blocks as in format.py. References: ``block_*_ref``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from qframework.kernels.blocks.format import (
    DEFAULT_BLOCK_SIZE,
    BlockSize,
    block_shape,
    check_blocks,
    check_operand_size,
    dequantize_blocks_ref,
    is_square,
    quantize_blocks_ref,
    row_count,
    transposed_size,
)
from qframework.kernels.blocks.primitives import (
    load_tile,
    quantize_tile,
    quantize_tile_stochastic,
    store_tile,
    tile_noise,
)
from qframework.kernels.blocks.sum_rows import store_sums
from qframework.kernels.blocks.tiles import Blocks, check_seed, contiguous, empty_blocks, rows_and_columns
from qframework.kernels.runtime.checks import check_dtype, check_float_input, rows_of
from qframework.kernels.runtime.launch import cdiv, launch, power_of_2
from qframework.kernels.runtime.operator import declare
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton
from qframework.numerics import FLOAT_DTYPES

BothBlocks = tuple[Tensor, Tensor, Tensor, Tensor]


class BlockQuantizeArguments(NamedTuple):
    """The arguments of ``qframework::block_quantize``."""

    x: Tensor
    block_size: BlockSize
    seed: Tensor | None = None

    def empty_result(self) -> tuple[Tensor, ...]:
        """Allocate q and its scale."""
        return empty_blocks(self.x, self.block_size)

    def check(self, operator: str = "block_quantize") -> None:
        """Raise QFrameworkError for an unsupported block size or dtype, and for a seed that is not one int64."""
        check_operand_size(operator, self.block_size)
        check_float_input(operator, self.x)
        if self.seed is not None:
            check_seed(operator, self.seed, self.x)


class BlockQuantizeBothArguments(BlockQuantizeArguments):
    """The arguments of ``qframework::block_quantize_both``."""

    def empty_result(self) -> tuple[Tensor, ...]:
        """Allocate q, its scale, and both of the transpose."""
        return *super().empty_result(), *empty_transpose(self.x, self.block_size)

    def check(self, operator: str = "block_quantize_both") -> None:
        """Raise as ``block_quantize`` does."""
        super().check(operator)


class BlockDequantizeArguments(NamedTuple):
    """The arguments of ``qframework::block_dequantize``."""

    q: Tensor
    scale: Tensor
    block_size: BlockSize
    dtype: torch.dtype = torch.float32

    def empty_result(self) -> Tensor:
        """Allocate x."""
        return self.q.new_empty(self.q.shape, dtype=self.dtype)

    def check(self) -> None:
        """Raise QFrameworkError for invalid operands, and for a dtype that is not float."""
        check_blocks("block_dequantize", "q", self.q, self.scale, self.block_size)
        result = torch.empty(0, dtype=self.dtype, device="meta")
        check_dtype("block_dequantize", "the result", result, FLOAT_DTYPES)


def empty_transpose(x: Tensor, block_size: BlockSize) -> Blocks:
    """Allocate the transpose of ``x`` in blocks."""
    return empty_blocks(x, transposed_size(block_size), (x.shape[-1], row_count(x.shape)))


def block_quantize_ref(args: BlockQuantizeArguments) -> Blocks:
    """Reference of ``qframework::block_quantize``; a seed seeds a torch generator on ``x``'s device."""
    return quantize_blocks_ref(args.x, args.block_size, _noise_ref(args))


def _noise_ref(args: BlockQuantizeArguments) -> Tensor | None:
    if args.seed is None:
        return None
    generator = torch.Generator(args.x.device).manual_seed(int(args.seed))
    return torch.rand(args.x.shape, generator=generator, device=args.x.device)


def block_dequantize_ref(args: BlockDequantizeArguments) -> Tensor:
    """Reference of ``qframework::block_dequantize``."""
    return dequantize_blocks_ref(*args)


def move_blocks(q: Tensor, scale: Tensor) -> Blocks:
    """The transpose of square blocks, copied: contiguous() of a single row or column returns the operand itself."""
    q, scale = q.reshape(rows_and_columns(q)).t(), scale.t()
    return q.clone(memory_format=torch.contiguous_format), scale.clone(memory_format=torch.contiguous_format)


def block_quantize_both_ref(args: BlockQuantizeBothArguments) -> BothBlocks:
    """Reference of ``qframework::block_quantize_both``."""
    noise = _noise_ref(args)
    q, scale = quantize_blocks_ref(args.x, args.block_size, noise)
    if is_square(args.block_size):
        return q, scale, *move_blocks(q, scale)
    rows = rows_and_columns(q)
    noise_t = None if noise is None else noise.reshape(rows).t()
    return q, scale, *quantize_blocks_ref(args.x.reshape(rows).t(), transposed_size(args.block_size), noise_t)


@triton.jit
def _block_quantize_kernel(
    x_ptr,  # (R, C) float, or the first of up to three parts of it
    second_ptr,
    third_ptr,
    seed_ptr,  # (1,) int64, read where STOCHASTIC
    q_ptr,  # (R, C) int8
    scale_ptr,  # (ceil(R / BLOCK[0]), ceil(C / BLOCK[1])) fp32
    qt_ptr,  # (C, R) int8, written where BOTH
    scale_t_ptr,  # (ceil(C / BLOCK_T[0]), ceil(R / BLOCK_T[1])) fp32, written where BOTH
    partial_ptr,  # (ceil(R / rows of a tile of the transpose), C) fp32, written where SUMS
    R,
    C,
    stride_xm,
    stride_second,
    stride_third,
    second_begin,  # the row or column where the second part begins
    third_begin,
    PARTS: tl.constexpr,  # how they lie: "one", "rows" below each other, "columns" beside each other
    STOCHASTIC: tl.constexpr,
    BOTH: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Blocks and, if BOTH, their transpose; if SUMS, sums of the columns of its tiles too.

    Grid (cdiv(R, TILE_M), cdiv(C, TILE_N)); a program computes one tile. If BOTH, the tile holds whole blocks of both.
    If it would be too large for that, see tile_of, TILE_N rows and columns are computed by neighbouring programs: first
    tiles of blocks, then as many of the transpose, from L2.
    """
    wait_for_previous_kernel(OVERLAP)
    row, column = tl.program_id(0) * TILE_M, tl.program_id(1) * TILE_N
    TURNED: tl.constexpr = (BLOCK_T[1], BLOCK_T[0])  # before transposing: threads hold neighbours of a row
    APART: tl.constexpr = BOTH and TURNED[0] > TILE_M  # blocks and transpose are computed by different programs
    TILES: tl.constexpr = TILE_N // TILE_M
    if APART:
        row = tl.program_id(0) // (2 * TILES) * TILE_N
    if PARTS != "one":
        place = row if PARTS == "rows" else column
        second, third = place >= second_begin, place >= third_begin
        x_ptr = _choose(second, third, x_ptr, second_ptr, third_ptr)
        stride_xm = _choose(second, third, stride_xm, stride_second, stride_third)
        begin = _choose(second, third, 0, second_begin, third_begin).to(tl.int64)
        x_ptr -= begin * (stride_xm if PARTS == "rows" else 1)  # as if its part were the whole
    if APART:
        tile = tl.program_id(0) % (2 * TILES)
        if tile < TILES:
            place = row + tile * TILE_M
            given, noise = _load(x_ptr, seed_ptr, place, column, R, C, stride_xm, STOCHASTIC, TILE_M, TILE_N)
            steps, scale = _quantize(given, noise, STOCHASTIC, BLOCK)
            store_tile(q_ptr, scale_ptr, steps, scale, place, column, R, C, BLOCK)
        else:
            beside = column + (tile - TILES) * TILE_M
            x, noise_t = _load(x_ptr, seed_ptr, row, beside, R, C, stride_xm, STOCHASTIC, TILE_N, TILE_M)
            if SUMS:
                store_sums(partial_ptr, x, row // TILE_N, beside, C)
            q, scale_t = _quantize(x, noise_t, STOCHASTIC, TURNED)
            store_tile(qt_ptr, scale_t_ptr, tl.trans(q), tl.trans(scale_t), beside, row, C, R, BLOCK_T)
    else:
        x, noise = _load(x_ptr, seed_ptr, row, column, R, C, stride_xm, STOCHASTIC, TILE_M, TILE_N)
        if SUMS:
            store_sums(partial_ptr, x, row // TILE_M, column, C)
        q, scale = _quantize(x, noise, STOCHASTIC, BLOCK)
        store_tile(q_ptr, scale_ptr, q, scale, row, column, R, C, BLOCK)
        if BOTH:
            if BLOCK[0] != BLOCK[1]:
                q, scale = _quantize(x, noise, STOCHASTIC, TURNED)
            store_tile(qt_ptr, scale_t_ptr, tl.trans(q), tl.trans(scale), column, row, C, R, BLOCK_T)


@triton.jit
def _choose(second, third, x, of_second, of_third):
    """What belongs to the part that a tile lies in; ``second`` is also true in the third."""
    return tl.where(third, of_third, tl.where(second, of_second, x))


@triton.jit
def _load(
    x_ptr,
    seed_ptr,
    row,
    column,
    R,
    C,
    stride_xm,
    STOCHASTIC: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """The tile that begins at ``row``, ``column`` in fp32, and its noise, or the tile again."""
    r = row + tl.arange(0, TILE_M)
    c = column + tl.arange(0, TILE_N)
    inside = (r < R)[:, None] & (c < C)[None, :]
    x = tl.load(x_ptr + r.to(tl.int64)[:, None] * stride_xm + c[None, :], mask=inside, other=0.0).to(tl.float32)
    noise = tile_noise(tl.load(seed_ptr), row, column, TILE_M, TILE_N) if STOCHASTIC else x
    return x, noise


@triton.jit
def _quantize(x, noise, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr):
    if STOCHASTIC:
        q, scale = quantize_tile_stochastic(x, noise, BLOCK)
    else:
        q, scale = quantize_tile(x, BLOCK)
    return q, scale


@triton.jit
def _block_dequantize_kernel(
    q_ptr,  # (R, C) int8
    scale_ptr,  # (ceil(R / BLOCK[0]), ceil(C / BLOCK[1])) fp32
    x_ptr,  # (R, C) float
    R,
    C,
    BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """x = q * scale, rounded once. Grid (cdiv(R, TILE_M), cdiv(C, TILE_N)); a program computes one tile."""
    wait_for_previous_kernel(OVERLAP)
    row, column = tl.program_id(0) * TILE_M, tl.program_id(1) * TILE_N
    x = load_tile(q_ptr, scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK)
    r = row + tl.arange(0, TILE_M)
    c = column + tl.arange(0, TILE_N)
    inside = (r < R)[:, None] & (c < C)[None, :]
    tl.store(x_ptr + r.to(tl.int64)[:, None] * C + c[None, :], x.to(x_ptr.dtype.element_ty), mask=inside)


def tile_of(
    shape: tuple[int, int], block_size: BlockSize, transposed: bool = False, upright: bool = True
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Grid and constants for a tensor of R rows and C columns: at least 64 bytes per row and 64 values per thread.

    ``transposed``: for a kernel that writes the transpose, whose tiles must hold whole blocks of it too; with
    ``upright`` it writes both. Tiles that hold both have at most 128 rows and columns; of wider blocks, programs write
    one of the two.
    """
    rows, columns = shape
    block, turned = block_shape(block_size), block_shape(transposed_size(block_size))
    large = transposed and turned[1] > 128
    tile_m = max(turned[1] if transposed and not (large and upright) else block[0], 64)
    across = max(block[1], turned[1]) if large else block[1]
    tile_n = 64 if large and not upright else max(across, min(power_of_2(columns), 64))
    constants: dict[str, Any] = {"BLOCK": block}
    if transposed:
        constants["BLOCK_T"] = turned
    constants |= {"TILE_M": tile_m, "TILE_N": tile_n, "num_warps": max(tile_m * tile_n // 2048, 1)}
    down = cdiv(rows, tile_n) * 2 * (tile_n // tile_m) if large and upright else cdiv(rows, tile_m)
    return (down, cdiv(columns, tile_n)), constants


def block_quantize_triton(args: BlockQuantizeArguments) -> tuple[Tensor, ...]:
    """``block_quantize`` and ``block_quantize_both`` on a GPU."""
    sizes = rows_and_columns(args.x)
    results, both = args.empty_result(), isinstance(args, BlockQuantizeBothArguments)
    if args.x.numel() == 0:
        return results
    grid, constants = tile_of(sizes, args.block_size, transposed=both)
    constants.setdefault("BLOCK_T", constants["BLOCK"])
    launch_quantize([args.x], sizes, "one", args.seed, results, None, grid, constants)
    return results


def launch_quantize(
    parts: Sequence[Tensor],
    sizes: tuple[int, int],
    lie: Literal["one", "rows", "columns"],
    seed: Tensor | None,
    results: tuple[Tensor, ...],
    partial: Tensor | None,
    grid: tuple[int, int],
    constants: dict[str, Any],
) -> None:
    """Launch the kernel for ``results``, two or four, on one to three parts of a tensor of ``sizes``."""
    rows = [rows_of(part) for part in parts]
    ends = list(itertools.accumulate(each.shape[1 if lie == "columns" else 0] for each in rows))
    rows, ends = rows + [rows[-1]] * (3 - len(rows)), ends + [ends[-1]] * (2 - len(ends))
    both = len(results) == 4
    if seed is not None:
        constants["num_warps"] *= 2  # the noise needs registers
    # Any tensor serves as a pointer that the kernel does not use.
    unused = results[1]
    operands = (*rows, unused if seed is None else seed, *results, *(() if both else results))
    numbers = (*sizes, *(each.stride(0) for each in rows), *ends[:2])
    flags = {"PARTS": lie, "STOCHASTIC": seed is not None, "BOTH": both, "SUMS": partial is not None}
    launch(_block_quantize_kernel, grid)(
        *operands, unused if partial is None else partial, *numbers, **flags, **constants
    )


def block_dequantize_triton(args: BlockDequantizeArguments) -> Tensor:
    """``block_dequantize`` on a GPU."""
    x, sizes = args.empty_result(), rows_and_columns(args.q)
    if args.q.numel() > 0:
        args = contiguous(args)
        grid, constants = tile_of(sizes, args.block_size)
        launch(_block_dequantize_kernel, grid)(args.q, args.scale, x, *sizes, **constants)
    return x


BLOCK_QUANTIZE = declare(
    "block_quantize(Tensor x, int[2] block_size, Tensor? seed=None) -> (Tensor, Tensor)",
    BlockQuantizeArguments,
    cpu=block_quantize_ref,
    cuda=block_quantize_triton,
    fake=BlockQuantizeArguments.empty_result,
)
BLOCK_QUANTIZE_BOTH = declare(
    "block_quantize_both(Tensor x, int[2] block_size, Tensor? seed=None) -> (Tensor, Tensor, Tensor, Tensor)",
    BlockQuantizeBothArguments,
    cpu=block_quantize_both_ref,
    cuda=block_quantize_triton,
    fake=BlockQuantizeBothArguments.empty_result,
)
BLOCK_DEQUANTIZE = declare(
    "block_dequantize(Tensor q, Tensor scale, int[2] block_size, ScalarType dtype=float) -> Tensor",
    BlockDequantizeArguments,
    cpu=block_dequantize_ref,
    cuda=block_dequantize_triton,
    fake=BlockDequantizeArguments.empty_result,
)


def block_quantize(x: Tensor, block_size: BlockSize = DEFAULT_BLOCK_SIZE, seed: Tensor | None = None) -> Blocks:
    """Quantize to INT8 with one scale for every block of values (Jetfire eq. 1).

    Args:
        x: ``(..., C)`` fp32, fp16 or bf16, any strides, treated as R = prod(leading) rows.
        block_size: 32, 64 or 128 for square blocks, as in the paper; (32, 128), (1, 128) or (1, 256) for (rows,
            columns).
        seed: None rounds half to even. One int64 on ``x``'s device rounds stochastically, which is unbiased; it is a
            tensor so that a captured graph can run again with another seed.

    Returns:
        ``q`` int8 like ``x``, contiguous, and the fp32 scale ``(ceil(R / B), ceil(C / B))``, where B is first the rows
        of a block and then its columns. A block of zeros gets a tiny positive scale, a block with NaN or infinity one
        that dequantizes to NaN. The error is at most half a step, or one step with a seed.

    Raises:
        UnsupportedError: a block size, a dtype, a tensor without dimensions, or a GPU below sm_80.
        QFrameworkError: a seed of more than one value, or on another device.
    """
    return torch.ops.qframework.block_quantize(x, block_size, seed)


def block_quantize_both(
    x: Tensor, block_size: BlockSize = DEFAULT_BLOCK_SIZE, seed: Tensor | None = None
) -> BothBlocks:
    """``block_quantize`` of ``x`` and of its transpose in one pass: ``(q, scale, q^T, scale^T)``.

    With square blocks the second pair is the transpose of the first; with others it is in blocks of
    ``transposed_size``: (32, 256), or (32, 128) for an ``x`` in blocks of (32, 128).
    """
    return torch.ops.qframework.block_quantize_both(x, block_size, seed)


def block_dequantize(
    q: Tensor, scale: Tensor, block_size: BlockSize = DEFAULT_BLOCK_SIZE, dtype: torch.dtype = torch.float32
) -> Tensor:
    """``q * scale`` of each block in float32, rounded once to ``dtype`` (fp32, fp16 or bf16); contiguous like ``q``."""
    return torch.ops.qframework.block_dequantize(q, scale, block_size, dtype)
