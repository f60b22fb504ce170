"""Dropout from blocks to blocks (Jetfire, appendix A): eight bytes of seed are saved, no mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qframework.kernels.blocks.format import BlockSize, check_block_size
from qframework.training.block_tensor import (
    BlockTensor,
    as_blocks,
    float_of,
    new_seed,
    put_into,
    quantize_blocks,
    wrap_blocks,
)
from qframework.training.function import Int8Function


@torch.compiler.allow_in_graph
class Int8DropoutFunction(Int8Function):
    """``m x / (1 - p)`` of blocks, the mask m made from the seed in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: Tensor, block_size: BlockSize) -> BlockTensor:
        blocks = as_blocks(x, block_size)
        q, scale = torch.ops.qframework.block_dropout(blocks.q, blocks.scale, p, seed, block_size)
        ctx.save_for_backward(seed)
        ctx.p, ctx.block_size, ctx.in_blocks = p, block_size, isinstance(x, BlockTensor)
        return wrap_blocks(q, scale, block_size, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (seed,) = ctx.saved_tensors
        grad = as_blocks(grad, ctx.block_size)
        q, scale = torch.ops.qframework.block_dropout(grad.q, grad.scale, ctx.p, seed, ctx.block_size)
        gradient = wrap_blocks(q, scale, ctx.block_size, grad.dtype)
        return gradient if ctx.in_blocks else float_of(gradient), None, None, None


class Int8Dropout(nn.Dropout):
    """``nn.Dropout`` in and out in blocks; a float input is quantized.

    Args:
        p: how likely a value is dropped while training.
        block_size: 32, 64, 128, (32, 128) or (1, 128).

    Each call draws a seed from torch's generator of the input's device: ``torch.manual_seed`` repeats it, and
    checkpointing, which puts the generator back, drops the same values twice.

    Raises:
        UnsupportedError: another block size.
        ValueError: p outside [0, 1].
    """

    def __init__(self, p: float = 0.5, block_size: BlockSize = 32) -> None:
        super().__init__(p)
        self.block_size = check_block_size("Int8Dropout", block_size)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., C)`` to the same shape, in blocks."""
        if not self.training or self.p == 0.0:
            return quantize_blocks(x, self.block_size)
        dropped = Int8DropoutFunction.apply(x, float(self.p), new_seed(x.device), self.block_size)
        return put_into(x, dropped) if self.inplace else dropped

    def extra_repr(self) -> str:
        return f"p={self.p}, block_size={self.block_size}"
