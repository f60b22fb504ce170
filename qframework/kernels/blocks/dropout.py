"""Dropout on INT8 blocks; its mask is recomputed from a seed.

Formula (Jetfire, appendix A), in float32 between the formats::

    y = Q(m x / (1 - p))        dx = Q(m dy / (1 - p)), the same operator with the same seed

The mask m depends only on the seed, the row and the column, not on the block size, the tile or the device: CPU and GPU
compute the same mask bit for bit. Eight columns share one call of Philox4x32-7 with key ``seed`` and counter
``(column // 8, row, 0, 0)``; each gets 16 of its 128 bits, the low half of a word first. A value is dropped where the
low 15 of these bits are below ``round(32768 p)``. The effective p differs from p by at most 2^-16; the factor is that
of the effective p, so the mean stays exact. Layout: blocks as in format.py. Memory traffic per value is 2 bytes.
Reference: ``block_dropout_ref``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework.errors import QFrameworkError
from qframework.kernels.blocks.arithmetic import int8_to_float, kept_steps
from qframework.kernels.blocks.format import (
    DEFAULT_BLOCK_SIZE,
    BlockSize,
    block_shape,
    quantize_blocks_ref,
    row_count,
)
from qframework.kernels.blocks.primitives import load_scales, load_steps, quantize_scaled_tile, store_tile, tile_bits
from qframework.kernels.blocks.tiles import (
    FEW_VALUES,
    VALUES_PER_THREAD,
    Blocks,
    check_alike,
    check_seed,
    dequantized,
    empty_blocks,
    launch_by_tiles,
    rows_and_columns,
    tensors_of,
    tile_of,
    tile_origin,
)
from qframework.kernels.runtime.launch import cdiv
from qframework.kernels.runtime.operator import declare
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.random import philox_ref
from qframework.kernels.runtime.triton import tl, triton

_LEVELS = 32768  # values of 15 random bits
_SHARED = 8  # columns that share a call of Philox


class BlockDropoutArguments(NamedTuple):
    """The arguments of ``qframework::block_dropout``."""

    x: Tensor
    x_scale: Tensor
    p: float
    seed: Tensor
    block_size: BlockSize

    def empty_result(self) -> Blocks:
        """Allocate y in blocks."""
        return empty_blocks(self.x, self.block_size)

    def check(self) -> None:
        """Raise QFrameworkError for invalid operands, a seed that is not one int64, and p outside [0, 1]."""
        check_alike("block_dropout", self)
        check_seed("block_dropout", self.seed, self.x)
        if not 0.0 <= self.p <= 1.0:
            raise QFrameworkError(f"block_dropout: p must be between 0 and 1, got {self.p}")


def threshold_of(p: float) -> int:
    """Random 15-bit numbers below this are dropped."""
    return round(p * _LEVELS)


def factor_of(p: float) -> float:
    """The factor of values that are kept: 1 / (1 - p) for the effective p; 0 if all are dropped."""
    kept = _LEVELS - threshold_of(p)
    return _LEVELS / kept if kept else 0.0


def keep_mask_ref(seed: Tensor, shape: torch.Size | tuple[int, ...], p: float) -> Tensor:
    """Which values of a tensor of ``shape`` are kept: bool of that shape, on the seed's device."""
    rows, columns = row_count(shape), shape[-1]
    groups = torch.arange(cdiv(columns, _SHARED), device=seed.device)
    words = philox_ref(seed, groups[None, :], torch.arange(rows, device=seed.device)[:, None])
    bits = torch.stack([half for word in words for half in (word & 0x7FFF, word >> 16 & 0x7FFF)], dim=-1)
    return (bits.flatten(1)[:, :columns] >= threshold_of(p)).reshape(shape)


def block_dropout_ref(args: BlockDropoutArguments) -> Blocks:
    """Reference of ``qframework::block_dropout``."""
    kept = keep_mask_ref(args.seed, args.x.shape, args.p)
    (value,) = dequantized(args)
    # NaN and infinity stay visible even where they are dropped.
    return quantize_blocks_ref(torch.where(kept, value * factor_of(args.p), value * 0.0), args.block_size)


@triton.jit
def _block_dropout_kernel(
    x_ptr,  # (R, C) int8
    x_scale_ptr,  # (ceil(R / BLOCK[0]), ceil(C / BLOCK[1])) fp32
    seed_ptr,  # (1,) int64
    y_ptr,  # (R, C) int8
    y_scale_ptr,
    R,
    C,
    threshold,
    factor,
    BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """y = m x / (1 - p). A program computes one tile."""
    wait_for_previous_kernel(OVERLAP)
    row, column = tile_origin(TILE_M, TILE_N)
    q = load_steps(x_ptr, row, column, R, C, TILE_M, TILE_N, EVEN)
    scale = load_scales(x_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    kept = kept_steps(q, tile_bits(tl.load(seed_ptr), row, column, TILE_M, TILE_N), threshold)
    y, y_scale = quantize_scaled_tile(int8_to_float(kept), scale * factor, BLOCK)
    store_tile(y_ptr, y_scale_ptr, y, y_scale, row, column, R, C, BLOCK, EVEN)


def values_in_a_thread(block_size: BlockSize) -> int:
    """Few for blocks of 128 rows, so that a multiprocessor runs two programs at a time."""
    return FEW_VALUES if block_shape(block_size)[0] == 128 else VALUES_PER_THREAD


def block_dropout_triton(args: BlockDropoutArguments) -> Blocks:
    """``block_dropout`` on a GPU."""
    sizes = rows_and_columns(args.x)
    result = args.empty_result()
    if args.x.numel() > 0:
        tile = tile_of(*sizes, args.block_size, values_in_a_thread(args.block_size))
        numbers = threshold_of(args.p), factor_of(args.p)
        launch_by_tiles(_block_dropout_kernel, tensors_of(args), result, tile, *numbers, prefetches=False)
    return result


BLOCK_DROPOUT = declare(
    "block_dropout(Tensor x, Tensor x_scale, float p, Tensor seed, int[2] block_size) -> (Tensor, Tensor)",
    BlockDropoutArguments,
    cpu=block_dropout_ref,
    cuda=block_dropout_triton,
    fake=BlockDropoutArguments.empty_result,
)


def block_dropout(
    x: Tensor, x_scale: Tensor, p: float, seed: Tensor, block_size: BlockSize = DEFAULT_BLOCK_SIZE
) -> Blocks:
    """``m x / (1 - p)`` from blocks to blocks, with the mask m from the seed. Its gradient is the same operator.

    Args:
        x: ``(..., C)`` int8.
        x_scale: ``(ceil(R / B), ceil(C / B))`` fp32.
        p: the probability of dropping a value, in [0, 1]; the effective one differs by at most 2^-16.
        seed: one int64 on ``x``'s device; a tensor, so that a captured graph can run again with another seed.
        block_size: 32, 64, 128, (32, 128), (1, 128) or (1, 256); the mask does not depend on it.

    Returns:
        ``y`` int8 like ``x``, contiguous, and its scale like ``x_scale``, with an error of at most half a step of its
        block. The scale of a block stays NaN or infinite even if all of its values are dropped.

    Raises:
        UnsupportedError: a block size, a dtype, or a GPU below sm_80.
        QFrameworkError: p outside [0, 1]; a seed of more than one value or on another device; a scale of another shape.
    """
    return torch.ops.qframework.block_dropout(x, x_scale, p, seed, block_size)
