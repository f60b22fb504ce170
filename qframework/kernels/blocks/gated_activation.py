"""Gated activations of Llama-type models (SwiGLU, GEGLU) on INT8 blocks, and their gradients.

Formula, in float32 between the formats::

    y = Q(f(gate) * up)        dgate = Q(dy * up * f'(gate))        dup = Q(dy * f(gate))

with f as in ``block_activation``. Memory traffic per value is 3 bytes forward and 5 backward.
Jetfire has no gated activation; this is its algorithm 2 with two operands.
References: ``block_gated_activation_ref``, ``block_gated_activation_backward_ref``.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from qframework.kernels.blocks.activation import (
    activation,
    activation_backward_ref,
    activation_ref,
    activation_triton,
    check_activation,
    gradient,
)
from qframework.kernels.blocks.format import DEFAULT_BLOCK_SIZE, BlockSize, block_shape, quantize_blocks_ref
from qframework.kernels.blocks.primitives import load_blocks, quantize_scaled_tile, store_tile
from qframework.kernels.blocks.tiles import (
    FEW_VALUES,
    VALUES_PER_THREAD,
    Blocks,
    dequantized,
    empty_blocks,
    prefetch_tile,
    tile_origin,
)
from qframework.kernels.runtime.operator import declare
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton

TwoBlocks = tuple[Tensor, Tensor, Tensor, Tensor]


class BlockGatedActivationArguments(NamedTuple):
    """The arguments of ``qframework::block_gated_activation``."""

    gate: Tensor
    gate_scale: Tensor
    up: Tensor
    up_scale: Tensor
    kind: str
    block_size: BlockSize

    def empty_result(self) -> Blocks:
        """Allocate y in blocks."""
        return empty_blocks(self.gate, self.block_size)

    def check(self) -> None:
        """Raise QFrameworkError for an unknown kind and for invalid operands."""
        check_activation("block_gated_activation", self)


class BlockGatedActivationBackwardArguments(NamedTuple):
    """The arguments of ``qframework::block_gated_activation_backward``."""

    dy: Tensor
    dy_scale: Tensor
    gate: Tensor
    gate_scale: Tensor
    up: Tensor
    up_scale: Tensor
    kind: str
    block_size: BlockSize

    def empty_result(self) -> TwoBlocks:
        """Allocate dgate and dup in blocks."""
        return *empty_blocks(self.gate, self.block_size), *empty_blocks(self.up, self.block_size)

    def check(self) -> None:
        """Raise QFrameworkError for an unknown kind and for invalid operands."""
        check_activation("block_gated_activation_backward", self)


def block_gated_activation_ref(args: BlockGatedActivationArguments) -> Blocks:
    """Reference of ``qframework::block_gated_activation``."""
    gate, up = dequantized(args)
    return quantize_blocks_ref(activation_ref(gate, args.kind) * up, args.block_size)


def block_gated_activation_backward_ref(args: BlockGatedActivationBackwardArguments) -> TwoBlocks:
    """Reference of ``qframework::block_gated_activation_backward``."""
    dy, gate, up = dequantized(args)
    dgate = quantize_blocks_ref(activation_backward_ref(dy * up, gate, args.kind), args.block_size)
    return *dgate, *quantize_blocks_ref(dy * activation_ref(gate, args.kind), args.block_size)


@triton.jit
def _block_gated_activation_kernel(
    gate_ptr,  # (R, C) int8
    gate_scale_ptr,  # (ceil(R / BLOCK[0]), ceil(C / BLOCK[1])) fp32
    up_ptr,  # like gate
    up_scale_ptr,
    y_ptr,  # like gate
    y_scale_ptr,
    R,
    C,
    ahead,  # rows, see ``rows_ahead``
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """y = f(gate) * up. A program computes one tile."""
    wait_for_previous_kernel(OVERLAP)
    row, column = tile_origin(TILE_M, TILE_N)
    gate, gate_scale = load_blocks(gate_ptr, gate_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    up, up_scale = load_blocks(up_ptr, up_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    prefetch_tile(gate_ptr, row + ahead, column, R, C, BLOCK, TILE_M, TILE_N)
    prefetch_tile(up_ptr, row + ahead, column, R, C, BLOCK, TILE_M, TILE_N)
    value, factor = activation(gate, gate_scale, KIND, BLOCK)
    y, y_scale = quantize_scaled_tile(value * up, factor * up_scale, BLOCK)
    store_tile(y_ptr, y_scale_ptr, y, y_scale, row, column, R, C, BLOCK, EVEN)


@triton.jit
def _block_gated_activation_backward_kernel(
    dy_ptr,  # (R, C) int8
    dy_scale_ptr,  # (ceil(R / BLOCK[0]), ceil(C / BLOCK[1])) fp32
    gate_ptr,  # like dy
    gate_scale_ptr,
    up_ptr,  # like dy
    up_scale_ptr,
    dgate_ptr,  # like dy
    dgate_scale_ptr,
    dup_ptr,  # like dy
    dup_scale_ptr,
    R,
    C,
    ahead,  # rows, see ``rows_ahead``
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """dgate = dy * up * f'(gate) and dup = dy * f(gate). A program computes one tile of each.

    The second result loads its operands from the cache again, so that neither needs more registers than a kernel of
    its own would.
    """
    wait_for_previous_kernel(OVERLAP)
    row, column = tile_origin(TILE_M, TILE_N)
    dy, dy_scale = load_blocks(dy_ptr, dy_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    gate, gate_scale = load_blocks(gate_ptr, gate_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    prefetch_tile(dy_ptr, row + ahead, column, R, C, BLOCK, TILE_M, TILE_N)
    prefetch_tile(gate_ptr, row + ahead, column, R, C, BLOCK, TILE_M, TILE_N)
    prefetch_tile(up_ptr, row + ahead, column, R, C, BLOCK, TILE_M, TILE_N)
    value, factor = activation(gate, gate_scale, KIND, BLOCK)
    dup, dup_scale = quantize_scaled_tile(dy * value, dy_scale * factor, BLOCK)
    store_tile(dup_ptr, dup_scale_ptr, dup, dup_scale, row, column, R, C, BLOCK, EVEN)
    dy, dy_scale = load_blocks(dy_ptr, dy_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    gate, gate_scale = load_blocks(gate_ptr, gate_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    up, up_scale = load_blocks(up_ptr, up_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    value, factor = gradient(dy * up, gate, gate_scale, KIND, BLOCK)
    dgate, dgate_scale = quantize_scaled_tile(value, factor * (dy_scale * up_scale), BLOCK)
    store_tile(dgate_ptr, dgate_scale_ptr, dgate, dgate_scale, row, column, R, C, BLOCK, EVEN)


def backward_values(block_size: BlockSize) -> int:
    """Values per thread in the backward pass: many, unless each row has a scale of its own, where more save nothing."""
    return FEW_VALUES if block_shape(block_size)[0] == 1 else VALUES_PER_THREAD


def block_gated_activation_backward_triton(args: BlockGatedActivationBackwardArguments) -> TwoBlocks:
    """``block_gated_activation_backward`` on a GPU."""
    values = backward_values(args.block_size)
    result: TwoBlocks = activation_triton(_block_gated_activation_backward_kernel, args, values)
    return result


BLOCK_GATED_ACTIVATION = declare(
    "block_gated_activation(Tensor gate, Tensor gate_scale, Tensor up, Tensor up_scale, str kind, int[2] block_size)"
    " -> (Tensor, Tensor)",
    BlockGatedActivationArguments,
    cpu=block_gated_activation_ref,
    cuda=partial(activation_triton, _block_gated_activation_kernel),
    fake=BlockGatedActivationArguments.empty_result,
)
BLOCK_GATED_ACTIVATION_BACKWARD = declare(
    "block_gated_activation_backward(Tensor dy, Tensor dy_scale, Tensor gate, Tensor gate_scale, Tensor up, "
    "Tensor up_scale, str kind, int[2] block_size) -> (Tensor, Tensor, Tensor, Tensor)",
    BlockGatedActivationBackwardArguments,
    cpu=block_gated_activation_backward_ref,
    cuda=block_gated_activation_backward_triton,
    fake=BlockGatedActivationBackwardArguments.empty_result,
)


def block_gated_activation(
    gate: Tensor,
    gate_scale: Tensor,
    up: Tensor,
    up_scale: Tensor,
    kind: str,
    block_size: BlockSize = DEFAULT_BLOCK_SIZE,
) -> Blocks:
    """``f(gate) * up`` from blocks to blocks: SwiGLU with ``"silu"``, GEGLU with ``"gelu"`` or ``"gelu_tanh"``.

    Args:
        gate: ``(..., C)`` int8.
        gate_scale: ``(ceil(R / B), ceil(C / B))`` fp32.
        up: like ``gate``.
        up_scale: like ``gate_scale``.
        kind: the function f, as in ``block_activation``.
        block_size: 32, 64, 128, (32, 128), (1, 128) or (1, 256).

    Returns:
        ``y`` int8 like ``gate``, contiguous, and its scale like ``gate_scale``. The error is at most half a step of its
        block and, on a GPU, another 2^-12 of ``gate * up``, which is large where that far exceeds the block's results.

    Raises:
        UnsupportedError: an unknown kind or block size, a dtype, or a GPU below sm_80.
        QFrameworkError: shapes or devices that differ, or a scale of another shape.
    """
    return torch.ops.qframework.block_gated_activation(gate, gate_scale, up, up_scale, kind, block_size)


def block_gated_activation_backward(
    dy: Tensor,
    dy_scale: Tensor,
    gate: Tensor,
    gate_scale: Tensor,
    up: Tensor,
    up_scale: Tensor,
    kind: str,
    block_size: BlockSize = DEFAULT_BLOCK_SIZE,
) -> TwoBlocks:
    """``(dgate, its scale, dup, its scale)`` in one pass; ``dy`` like ``gate``. See ``block_gated_activation``."""
    return torch.ops.qframework.block_gated_activation_backward(
        dy, dy_scale, gate, gate_scale, up, up_scale, kind, block_size
    )
