"""A small residual network in the INT8 data flow, with Functions that follow the pattern of block_tensor.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from qframework.kernels.blocks.format import DEFAULT_BLOCK_SIZE, CanonicalSize
from qframework.training import BlockTensor, quantize_blocks
from qframework.training.block_tensor import as_blocks, blocks_of, float_of
from qframework.training.function import Int8Function


@torch._dynamo.allow_in_graph
class Linear(Int8Function):
    """A Function from blocks to blocks that computes in float."""

    @staticmethod
    def forward(ctx, x, weight, block_size):
        blocks = as_blocks(x, block_size)
        ctx.save_for_backward(blocks, weight)
        ctx.float_input = not isinstance(x, BlockTensor)
        return blocks_of(F.linear(float_of(blocks), weight), block_size)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = float_of(as_blocks(grad, x.block_size))
        for_x = grad @ weight
        for_weight = grad.flatten(0, -2).t() @ float_of(x).flatten(0, -2)
        return for_x if ctx.float_input else as_blocks(for_x, x.block_size), for_weight, None


class BlockLinear(nn.Linear):
    def __init__(self, columns: int, features: int, block_size: CanonicalSize = DEFAULT_BLOCK_SIZE) -> None:
        super().__init__(columns, features, bias=False)
        self.block_size = block_size

    def forward(self, x: Tensor) -> Tensor:
        return Linear.apply(x, self.weight, self.block_size)


class Block(nn.Module):
    """``x + down(gelu(up(x)))``, where two gradients of ``x`` are added."""

    def __init__(self, width: int, block_size: CanonicalSize = DEFAULT_BLOCK_SIZE) -> None:
        super().__init__()
        self.up, self.down = BlockLinear(width, 70, block_size), BlockLinear(70, width, block_size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Residual(nn.Module):
    """From floats to floats, with blocks in between; ``recompute`` is None or checkpoint's ``use_reentrant``."""

    def __init__(self, width: int = 40, depth: int = 2, block_size: CanonicalSize = DEFAULT_BLOCK_SIZE) -> None:
        super().__init__()
        self.blocks, self.block_size = nn.ModuleList(Block(width, block_size) for _ in range(depth)), block_size

    def forward(self, x: Tensor, recompute: bool | None = None) -> Tensor:
        x = quantize_blocks(x, self.block_size)
        for block in self.blocks:
            x = block(x) if recompute is None else checkpoint(block, x, use_reentrant=recompute)
        return x.dequantize()


def loss_and_gradients(call, model: nn.Module, x: Tensor) -> list[Tensor]:
    """The loss of ``call(x)``, and the gradients of the parameters and of ``x``."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    loss = call(x).float().square().mean()
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert x.grad is not None
    return [loss.detach(), *gradients, x.grad]
