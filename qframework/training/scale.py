"""LayerScale and stochastic depth of vision transformers on INT8 blocks.

LayerScale multiplies each channel by a learned number and quantizes the values again. Stochastic depth drops a branch
for whole samples: their values become 0 and all scales are multiplied by one factor, so nothing is rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qframework.kernels.blocks.format import DEFAULT_BLOCK_SIZE, BlockSize, check_block_size
from qframework.training.block_tensor import BlockTensor, as_blocks, put_into, quantize_blocks, wrap_blocks
from qframework.training.function import Int8Function


def _fp32(x: BlockTensor) -> Tensor:
    return torch.ops.qframework.block_dequantize(x.q, x.scale, x.block_size, torch.float32)


def _quantized(x: Tensor, like: BlockTensor) -> BlockTensor:
    q, scale = torch.ops.qframework.block_quantize(x, like.block_size, None)
    return wrap_blocks(q, scale, like.block_size, like.dtype)


@torch.compiler.allow_in_graph
class Int8LayerScaleFunction(Int8Function):
    """``x * gamma`` in blocks; ``gamma (C,)`` gets the sum over rows of ``grad * x``, in FP32."""

    @staticmethod
    def forward(ctx: Any, x: BlockTensor, gamma: Tensor) -> BlockTensor:
        ctx.save_for_backward(x, gamma)
        return _quantized(_fp32(x) * gamma.float(), x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[BlockTensor, Tensor]:
        x, gamma = ctx.saved_tensors
        grad = _fp32(as_blocks(grad, x.block_size))
        dgamma = (grad * _fp32(x)).flatten(0, -2).sum(dim=0)
        return _quantized(grad * gamma.float(), x), dgamma.to(gamma.dtype)


@torch.compiler.allow_in_graph
class Int8DropPathFunction(Int8Function):
    """``x * kept * factor`` in blocks, exactly; ``kept`` holds int8 zeros and ones that broadcast against ``x``."""

    @staticmethod
    def forward(ctx: Any, x: BlockTensor, kept: Tensor, factor: float) -> BlockTensor:
        ctx.save_for_backward(kept)
        ctx.factor, ctx.block_size = factor, x.block_size
        return wrap_blocks(x.q * kept, x.scale * factor, x.block_size, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[BlockTensor, None, None]:
        (kept,) = ctx.saved_tensors
        grad = as_blocks(grad, ctx.block_size)
        return wrap_blocks(grad.q * kept, grad.scale * ctx.factor, ctx.block_size, grad.dtype), None, None


class Int8LayerScale(nn.Module):
    """timm's LayerScale, ``x * gamma``, from blocks to blocks; a float input is quantized."""

    scale_name = "gamma"  # the parameter of a converted module may be called otherwise
    writes_input = False  # set when the converted module wrote its result to its input

    def __init__(self, gamma: nn.Parameter, block_size: BlockSize = DEFAULT_BLOCK_SIZE) -> None:
        super().__init__()
        self.gamma = gamma
        self.block_size = check_block_size("Int8LayerScale", block_size)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., C)`` to the same shape, in blocks."""
        gamma = getattr(self, self.scale_name)
        if self.writes_input:  # the gradient needs the original ``x``
            return put_into(x, Int8LayerScaleFunction.apply(quantize_blocks(x.clone(), self.block_size), gamma))
        return Int8LayerScaleFunction.apply(quantize_blocks(x, self.block_size), gamma)


class Int8DropPath(nn.Module):
    """Stochastic depth in blocks: while training, drops each sample of the first dimension with ``drop_prob``.

    A float input is quantized. With ``scale_by_keep``, kept samples are divided by the probability of being kept.
    """

    def __init__(
        self, drop_prob: float | None, scale_by_keep: bool = True, block_size: BlockSize = DEFAULT_BLOCK_SIZE
    ) -> None:
        super().__init__()
        self.drop_prob = drop_prob
        self.scale_by_keep = scale_by_keep
        self.block_size = check_block_size("Int8DropPath", block_size)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, ..., C)`` to the same shape, in blocks."""
        blocks = quantize_blocks(x, self.block_size)
        if not self.drop_prob or not self.training:
            return blocks
        keep = 1.0 - self.drop_prob
        kept = torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), device=x.device) < keep
        factor = 1.0 / keep if self.scale_by_keep and keep > 0 else 1.0
        return Int8DropPathFunction.apply(blocks, kept.to(torch.int8), factor)

    def extra_repr(self) -> str:
        return f"drop_prob={self.drop_prob or 0.0:.3g}, block_size={self.block_size}"
