"""Tensors into the block format of INT8 training, out of it, and transposed in it.

Formula (Jetfire eq. 1, range [-127, 127]), for every block of B x B values of ``x`` seen as rows::

    scale = max|block| / 127        q = clamp(round_half_even(block * (1 / scale)), -127, 127)

or, with a seed, ``q = clamp(floor(block * (1 / scale) + u), -127, 127)`` with u uniform in [0, 1): unbiased.
``block_quantize_both`` gives the blocks and their transpose in one pass over ``x``, for a gradient that enters two
products: both need their operands with the inner dimension innermost. Square blocks are transposed with their scales,
and no value changes; of others the transpose is cut into blocks of ``operand_size`` and quantized anew: by
``block_quantize_both`` from ``x``, by ``block_transpose`` from what the blocks stand for.

Layout: ``x (..., C)``, R = prod(leading) rows; the rest is format.py. Reference: ``block_*_ref``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qframework.errors import QFrameworkError
from qframework.kernels.blocks.arithmetic import int8_to_float
from qframework.kernels.blocks.format import (
    BlockSize,
    block_shape,
    check_block_size,
    check_blocks,
    dequantize_blocks_ref,
    is_square,
    operand_size,
    quantize_blocks_ref,
    row_count,
    scale_shape,
)
from qframework.kernels.blocks.primitives import (
    load_scales,
    load_steps,
    load_tile,
    quantize_tile,
    quantize_tile_stochastic,
    store_tile,
    tile_noise,
    times_blocks,
)
from qframework.kernels.runtime.checks import check_dtype, check_float_input, check_same_device, rows_of
from qframework.kernels.runtime.chip import check_device
from qframework.kernels.runtime.launch import cdiv, cuda_implementation, launch, power_of_2
from qframework.kernels.runtime.operator import LIBRARY
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton
from qframework.numerics import FLOAT_DTYPES

Blocks = tuple[Tensor, Tensor]
BothBlocks = tuple[Tensor, Tensor, Tensor, Tensor]


def block_quantize_ref(x: Tensor, block_size: BlockSize, seed: Tensor | None = None) -> Blocks:
    """Reference of ``qframework::block_quantize``; a seed starts a torch generator on ``x``'s device."""
    return quantize_blocks_ref(x, block_size, _noise_ref(x, seed))


def _noise_ref(x: Tensor, seed: Tensor | None) -> Tensor | None:
    if seed is None:
        return None
    return torch.rand(x.shape, generator=torch.Generator(x.device).manual_seed(int(seed)), device=x.device)


def block_dequantize_ref(q: Tensor, scale: Tensor, block_size: BlockSize, dtype: torch.dtype = torch.float32) -> Tensor:
    """Reference of ``qframework::block_dequantize``."""
    return dequantize_blocks_ref(q, scale, block_size, dtype)


def block_transpose_ref(q: Tensor, scale: Tensor, block_size: BlockSize) -> Blocks:
    """Reference of ``qframework::block_transpose``: scales are transposed with square blocks."""
    if not is_square(block_size):
        rows = dequantize_blocks_ref(q, scale, block_size).reshape(row_count(q.shape), q.shape[-1])
        return quantize_blocks_ref(rows.t(), operand_size(block_size))
    rows = q.reshape(row_count(q.shape), q.shape[-1])
    # Always a copy: contiguous() of a single row or column would be the operand itself.
    return rows.t().clone(memory_format=torch.contiguous_format), scale.t().clone(memory_format=torch.contiguous_format)


def block_quantize_both_ref(x: Tensor, block_size: BlockSize, seed: Tensor | None = None) -> BothBlocks:
    """Reference of ``qframework::block_quantize_both``."""
    noise = _noise_ref(x, seed)
    q, scale = quantize_blocks_ref(x, block_size, noise)
    if is_square(block_size):
        return q, scale, *block_transpose_ref(q, scale, block_size)
    rows = row_count(x.shape), x.shape[-1]
    noise_t = None if noise is None else noise.reshape(rows).t()
    return q, scale, *quantize_blocks_ref(x.reshape(rows).t(), operand_size(block_size), noise_t)


@triton.jit
def _block_quantize_kernel(
    x_ptr,  # (R, C) float
    seed_ptr,  # (1,) int64, read where STOCHASTIC
    q_ptr,  # (R, C) int8
    scale_ptr,  # (ceil(R / BLOCK[0]), ceil(C / BLOCK[1])) fp32
    qt_ptr,  # (C, R) int8, written where BOTH
    scale_t_ptr,  # (ceil(C / BLOCK_T[0]), ceil(R / BLOCK_T[1])) fp32, written where BOTH
    R,
    C,
    stride_xm,
    STOCHASTIC: tl.constexpr,
    BOTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Blocks, and where BOTH also their transpose. Grid (cdiv(R, TILE_M), cdiv(C, TILE_N)), a tile a program."""
    wait_for_previous_kernel(OVERLAP)
    row, column = tl.program_id(0) * TILE_M, tl.program_id(1) * TILE_N
    r = row + tl.arange(0, TILE_M)
    c = column + tl.arange(0, TILE_N)
    inside = (r < R)[:, None] & (c < C)[None, :]
    x = tl.load(x_ptr + r.to(tl.int64)[:, None] * stride_xm + c[None, :], mask=inside, other=0.0).to(tl.float32)
    noise = tile_noise(tl.load(seed_ptr), row, column, TILE_M, TILE_N) if STOCHASTIC else x
    q, scale = _quantize(x, noise, STOCHASTIC, BLOCK)
    store_tile(q_ptr, scale_ptr, q, scale, row, column, R, C, BLOCK)
    if BOTH:
        if BLOCK[0] != BLOCK[1]:
            TURNED: tl.constexpr = (BLOCK_T[1], BLOCK_T[0])  # before the tile is: threads hold neighbours in a row
            q, scale = _quantize(x, noise, STOCHASTIC, TURNED)
        store_tile(qt_ptr, scale_t_ptr, tl.trans(q), tl.trans(scale), column, row, C, R, BLOCK_T)


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
    """x = q * scale, rounded once. Grid (cdiv(R, TILE_M), cdiv(C, TILE_N)), a tile a program."""
    wait_for_previous_kernel(OVERLAP)
    row, column = tl.program_id(0) * TILE_M, tl.program_id(1) * TILE_N
    x = load_tile(q_ptr, scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK)
    r = row + tl.arange(0, TILE_M)
    c = column + tl.arange(0, TILE_N)
    inside = (r < R)[:, None] & (c < C)[None, :]
    tl.store(x_ptr + r.to(tl.int64)[:, None] * C + c[None, :], x.to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _block_transpose_kernel(
    q_ptr,  # (R, C) int8
    scale_ptr,  # (ceil(R / BLOCK[0]), ceil(C / BLOCK[1])) fp32
    qt_ptr,  # (C, R) int8
    scale_t_ptr,  # (ceil(C / BLOCK_T[0]), ceil(R / BLOCK_T[1])) fp32
    R,
    C,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Values and scales transposed. Grid (cdiv(R, TILE_M), cdiv(C, TILE_N)), a tile a program."""
    wait_for_previous_kernel(OVERLAP)
    row, column = tl.program_id(0) * TILE_M, tl.program_id(1) * TILE_N
    q = load_steps(q_ptr, row, column, R, C, TILE_M, TILE_N, False)
    scale = load_scales(scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK)
    if BLOCK[0] != BLOCK[1]:
        TURNED: tl.constexpr = (BLOCK_T[1], BLOCK_T[0])  # before the tile is: threads hold neighbours in a row
        q, scale = quantize_tile(times_blocks(int8_to_float(q), scale, BLOCK), TURNED)
    store_tile(qt_ptr, scale_t_ptr, tl.trans(q), tl.trans(scale), column, row, C, R, BLOCK_T)


def tile_of(
    shape: tuple[int, int], block_size: BlockSize, transposed: bool = False
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Grid and constants for a tensor of R rows and C columns: 64 bytes or more of every row, 64 values a thread.

    ``transposed``: for a kernel that writes the transpose, of which a tile must hold whole blocks as well.
    """
    rows, columns = shape
    block = block_shape(block_size)
    tile_m = max(block[1] if transposed else block[0], 64)
    tile_n = max(block[1], min(power_of_2(columns), 64))
    constants: dict[str, Any] = {"BLOCK": block}
    if transposed:
        constants["BLOCK_T"] = block_shape(operand_size(block_size))
    constants |= {"TILE_M": tile_m, "TILE_N": tile_n, "num_warps": max(tile_m * tile_n // 2048, 1)}
    return (cdiv(rows, tile_m), cdiv(columns, tile_n)), constants


def _empty_blocks(x: Tensor, shape: torch.Size | tuple[int, ...], block_size: BlockSize) -> Blocks:
    scale = x.new_empty(scale_shape(shape, block_size), dtype=torch.float32)
    return x.new_empty(tuple(shape), dtype=torch.int8), scale


def _empty_transpose(x: Tensor, block_size: BlockSize) -> Blocks:
    return _empty_blocks(x, (x.shape[-1], row_count(x.shape)), operand_size(block_size))


def _block_quantize_triton(x: Tensor, block_size: BlockSize, seed: Tensor | None = None) -> Blocks:
    q, scale = _empty_blocks(x, x.shape, block_size)
    _launch_quantize(x, seed, block_size, q, scale, None, None)
    return q, scale


def _block_quantize_both_triton(x: Tensor, block_size: BlockSize, seed: Tensor | None = None) -> BothBlocks:
    results = *_empty_blocks(x, x.shape, block_size), *_empty_transpose(x, block_size)
    _launch_quantize(x, seed, block_size, *results)
    return results


def _launch_quantize(
    x: Tensor,
    seed: Tensor | None,
    block_size: BlockSize,
    q: Tensor,
    scale: Tensor,
    qt: Tensor | None,
    scale_t: Tensor | None,
) -> None:
    check_device(x.device)
    if x.numel() == 0:
        return
    rows = rows_of(x)
    grid, constants = tile_of((rows.shape[0], rows.shape[1]), block_size, transposed=qt is not None)
    constants.setdefault("BLOCK_T", constants["BLOCK"])
    if seed is not None:
        constants["num_warps"] *= 2  # noise takes registers of its own
    flags = {"STOCHASTIC": seed is not None, "BOTH": qt is not None}
    # A pointer that the flags leave unread is any tensor.
    pointers = (rows, rows if seed is None else seed, q, scale, q if qt is None else qt)
    launch(_block_quantize_kernel, grid)(
        *pointers, scale if scale_t is None else scale_t, *rows.shape, rows.stride(0), **flags, **constants
    )


def _block_dequantize_triton(
    q: Tensor, scale: Tensor, block_size: BlockSize, dtype: torch.dtype = torch.float32
) -> Tensor:
    check_device(q.device)
    x = q.new_empty(q.shape, dtype=dtype)
    if q.numel() > 0:
        shape = row_count(q.shape), q.shape[-1]
        grid, constants = tile_of(shape, block_size)
        launch(_block_dequantize_kernel, grid)(q.contiguous(), scale.contiguous(), x, *shape, **constants)
    return x


def _block_transpose_triton(q: Tensor, scale: Tensor, block_size: BlockSize) -> Blocks:
    check_device(q.device)
    qt, scale_t = _empty_transpose(q, block_size)
    if q.numel() > 0:
        shape = row_count(q.shape), q.shape[-1]
        grid, constants = tile_of(shape, block_size, transposed=True)
        launch(_block_transpose_kernel, grid)(q.contiguous(), scale.contiguous(), qt, scale_t, *shape, **constants)
    return qt, scale_t


def _check_quantize(operator: str, x: Tensor, block_size: BlockSize, seed: Tensor | None) -> None:
    check_block_size(operator, block_size)
    check_float_input(operator, x)
    if seed is None:
        return
    check_dtype(operator, "seed", seed, (torch.int64,))
    check_same_device(operator, x, seed=seed)
    if seed.numel() != 1:
        raise QFrameworkError(f"{operator}: seed has shape {tuple(seed.shape)}; accepted: one value")


def _check_dequantize(q: Tensor, scale: Tensor, block_size: BlockSize, dtype: torch.dtype) -> None:
    check_blocks("block_dequantize", "q", q, scale, block_size)
    check_dtype("block_dequantize", "the result", torch.empty(0, dtype=dtype, device="meta"), FLOAT_DTYPES)


LIBRARY.define("block_quantize(Tensor x, int[2] block_size, Tensor? seed=None) -> (Tensor, Tensor)")
LIBRARY.define(
    "block_quantize_both(Tensor x, int[2] block_size, Tensor? seed=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define("block_dequantize(Tensor q, Tensor scale, int[2] block_size, ScalarType dtype=float) -> Tensor")
LIBRARY.define("block_transpose(Tensor q, Tensor scale, int[2] block_size) -> (Tensor, Tensor)")


@torch.library.impl(LIBRARY, "block_quantize", "CPU")
def _block_quantize_cpu(x: Tensor, block_size: BlockSize, seed: Tensor | None = None) -> Blocks:
    _check_quantize("block_quantize", x, block_size, seed)
    return block_quantize_ref(x, block_size, seed)


@cuda_implementation("block_quantize")
def _block_quantize_cuda(x: Tensor, block_size: BlockSize, seed: Tensor | None = None) -> Blocks:
    _check_quantize("block_quantize", x, block_size, seed)
    return _block_quantize_triton(x, block_size, seed)


@torch.library.register_fake("qframework::block_quantize", lib=LIBRARY)
def _block_quantize_fake(x: Tensor, block_size: BlockSize, seed: Tensor | None = None) -> Blocks:
    _check_quantize("block_quantize", x, block_size, seed)
    return _empty_blocks(x, x.shape, block_size)


@torch.library.impl(LIBRARY, "block_quantize_both", "CPU")
def _block_quantize_both_cpu(x: Tensor, block_size: BlockSize, seed: Tensor | None = None) -> BothBlocks:
    _check_quantize("block_quantize_both", x, block_size, seed)
    return block_quantize_both_ref(x, block_size, seed)


@cuda_implementation("block_quantize_both")
def _block_quantize_both_cuda(x: Tensor, block_size: BlockSize, seed: Tensor | None = None) -> BothBlocks:
    _check_quantize("block_quantize_both", x, block_size, seed)
    return _block_quantize_both_triton(x, block_size, seed)


@torch.library.register_fake("qframework::block_quantize_both", lib=LIBRARY)
def _block_quantize_both_fake(x: Tensor, block_size: BlockSize, seed: Tensor | None = None) -> BothBlocks:
    _check_quantize("block_quantize_both", x, block_size, seed)
    return *_empty_blocks(x, x.shape, block_size), *_empty_transpose(x, block_size)


@torch.library.impl(LIBRARY, "block_dequantize", "CPU")
def _block_dequantize_cpu(
    q: Tensor, scale: Tensor, block_size: BlockSize, dtype: torch.dtype = torch.float32
) -> Tensor:
    _check_dequantize(q, scale, block_size, dtype)
    return block_dequantize_ref(q, scale, block_size, dtype)


@cuda_implementation("block_dequantize")
def _block_dequantize_cuda(
    q: Tensor, scale: Tensor, block_size: BlockSize, dtype: torch.dtype = torch.float32
) -> Tensor:
    _check_dequantize(q, scale, block_size, dtype)
    return _block_dequantize_triton(q, scale, block_size, dtype)


@torch.library.register_fake("qframework::block_dequantize", lib=LIBRARY)
def _block_dequantize_fake(
    q: Tensor, scale: Tensor, block_size: BlockSize, dtype: torch.dtype = torch.float32
) -> Tensor:
    _check_dequantize(q, scale, block_size, dtype)
    return q.new_empty(q.shape, dtype=dtype)


@torch.library.impl(LIBRARY, "block_transpose", "CPU")
def _block_transpose_cpu(q: Tensor, scale: Tensor, block_size: BlockSize) -> Blocks:
    check_blocks("block_transpose", "q", q, scale, block_size)
    return block_transpose_ref(q, scale, block_size)


@cuda_implementation("block_transpose")
def _block_transpose_cuda(q: Tensor, scale: Tensor, block_size: BlockSize) -> Blocks:
    check_blocks("block_transpose", "q", q, scale, block_size)
    return _block_transpose_triton(q, scale, block_size)


@torch.library.register_fake("qframework::block_transpose", lib=LIBRARY)
def _block_transpose_fake(q: Tensor, scale: Tensor, block_size: BlockSize) -> Blocks:
    check_blocks("block_transpose", "q", q, scale, block_size)
    return _empty_transpose(q, block_size)


def block_quantize(x: Tensor, block_size: BlockSize = 32, seed: Tensor | None = None) -> Blocks:
    """Quantize to INT8 with one scale for every block of values (Jetfire eq. 1).

    Args:
        x: ``(..., C)`` fp32, fp16 or bf16, any strides, seen as R = prod(leading) rows.
        block_size: 32, 64 or 128 for square blocks, as in the paper; (32, 128) or (1, 128): rows and columns.
        seed: None rounds half to even; a tensor of one int64 on ``x``'s device rounds stochastically, which is
            unbiased. A tensor, so that a captured graph can be run again with another seed.

    Returns:
        int8 like ``x``, contiguous, and the fp32 scale ``(ceil(R / B), ceil(C / B))``, where B is first the rows of a
        block and then its columns. A block of zeros gets a tiny
        positive scale; one with NaN or infinity a scale that dequantizes to NaN. Half a step is the largest error, one
        step with a seed.

    Raises:
        UnsupportedError: a block size, a dtype, a tensor without dimensions, or a GPU below sm_80.
        QFrameworkError: a seed of more than one value, or on another device.
    """
    return torch.ops.qframework.block_quantize(x, block_size, seed)


def block_quantize_both(x: Tensor, block_size: BlockSize = 32, seed: Tensor | None = None) -> BothBlocks:
    """``block_quantize`` of ``x`` and of its transpose, ``(q, scale, q^T, scale^T)``; reads ``x`` once.

    Of square blocks the second pair is the first one transposed; blocks of (32, 128) or (1, 128) are (32, 128) in it.
    """
    return torch.ops.qframework.block_quantize_both(x, block_size, seed)


def block_dequantize(
    q: Tensor, scale: Tensor, block_size: BlockSize = 32, dtype: torch.dtype = torch.float32
) -> Tensor:
    """``q * scale`` of each block in float32, rounded once to ``dtype`` (fp32, fp16, bf16); like ``q``, contiguous."""
    return torch.ops.qframework.block_dequantize(q, scale, block_size, dtype)


def block_transpose(q: Tensor, scale: Tensor, block_size: BlockSize = 32) -> Blocks:
    """``q (..., C)`` and its scale to ``(C, R)`` int8, contiguous, and the transpose's scale.

    Square blocks keep their values; others are quantized anew, in blocks of (32, 128), off by half a step of those.
    """
    return torch.ops.qframework.block_transpose(q, scale, block_size)
