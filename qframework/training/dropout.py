"""Dropout from blocks to blocks (Jetfire, appendix A): saves a seed of eight bytes instead of a mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qframework.kernels.blocks.format import DEFAULT_BLOCK_SIZE, BlockSize, check_block_size
from qframework.training.block_tensor import BlockTensor, as_blocks, new_seed, put_into, quantize_blocks, wrap_blocks
from qframework.training.function import Int8Function
from qframework.training.norm import input_gradient


@torch.compiler.allow_in_graph
class Int8DropoutFunction(Int8Function):
    """``m x / (1 - p)`` of blocks; both passes compute the mask m from the seed."""

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
        return input_gradient(ctx.in_blocks, q, scale, grad), None, None, None


class Int8Dropout(nn.Dropout):
    """``nn.Dropout`` from blocks to blocks; a float input is quantized.

    Args:
        p: the probability of dropping a value while training.
        block_size: 32, 64, 128, (32, 128), (1, 128) or (1, 256).

    Each call draws a seed from torch's generator for the input's device: ``torch.manual_seed`` makes it reproducible,
    and checkpointing, which restores the generator, drops the same values twice.

    Raises:
        UnsupportedError: an unknown block size.
        ValueError: p outside [0, 1].
    """

    def __init__(self, p: float = 0.5, block_size: BlockSize = DEFAULT_BLOCK_SIZE) -> None:
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
