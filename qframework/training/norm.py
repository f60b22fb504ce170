"""LayerNorm and RMSNorm from blocks to blocks (Jetfire, section 6.2), with the float modules' parameters.

A normalization after an addition uses the row statistics of the addition (appendix A) and reads its input only once;
others compute their own. The gradient of its input is computed when it is read, and with it the sum with that of the
residual stream (deferred.py). Weight and bias stay float, as in the paper; their gradients are summed in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qframework.compat.modules import parameters
from qframework.errors import UnsupportedError
from qframework.kernels.blocks.format import DEFAULT_BLOCK_SIZE, BlockSize, check_block_size
from qframework.training.block_tensor import BlockTensor, as_blocks, defer_blocks, float_of, wrap_blocks
from qframework.training.deferred import NormGradient
from qframework.training.function import Int8Function


@torch.compiler.allow_in_graph
class Int8LayerNormFunction(Int8Function):
    """LayerNorm of blocks; saves the blocks and two numbers per row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, block_size: BlockSize
    ) -> BlockTensor:
        blocks = as_blocks(x, block_size)
        q, scale, mean, rstd = torch.ops.qframework.block_layer_norm(
            blocks.q, blocks.scale, weight, bias, eps, block_size, blocks.statistics
        )
        ctx.save_for_backward(blocks, weight, mean, rstd)
        ctx.in_blocks = isinstance(x, BlockTensor)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return wrap_blocks(q, scale, block_size, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        grad = as_blocks(grad, x.block_size)
        operands = grad.q, grad.scale, x.q, x.scale, weight, mean, rstd
        sums, dweight, dbias = torch.ops.qframework.block_norm_sums(*operands, x.block_size)
        dweight = None if weight is None else dweight.to(weight.dtype)
        dbias = None if ctx.bias_dtype is None else dbias.to(ctx.bias_dtype)
        return norm_gradient(ctx.in_blocks, (*operands, sums), grad, x), dweight, dbias, None, None


@torch.compiler.allow_in_graph
class Int8RMSNormFunction(Int8Function):
    """RMSNorm of blocks; saves the blocks and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, block_size: BlockSize) -> BlockTensor:
        blocks = as_blocks(x, block_size)
        q, scale, rstd = torch.ops.qframework.block_rms_norm(
            blocks.q, blocks.scale, weight, eps, block_size, blocks.statistics
        )
        ctx.save_for_backward(blocks, weight, rstd)
        ctx.in_blocks = isinstance(x, BlockTensor)
        return wrap_blocks(q, scale, block_size, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        grad = as_blocks(grad, x.block_size)
        operands = grad.q, grad.scale, x.q, x.scale, weight, None, rstd
        sums, dweight, _ = torch.ops.qframework.block_norm_sums(*operands, x.block_size)
        dweight = None if weight is None else dweight.to(weight.dtype)
        return norm_gradient(ctx.in_blocks, (*operands, sums), grad, x), dweight, None, None


def norm_gradient(in_blocks: bool, operands: tuple[Any, ...], grad: BlockTensor, x: BlockTensor) -> Tensor:
    """The gradient as a BlockTensor if the input was one, computed with what is added to it; otherwise as floats.

    With a copy of the weight: FSDP2 frees weights behind a layer's backward pass, and optimizers may change them there.
    """
    *blocks_of_both, weight, mean, rstd, sums = operands
    kept = *blocks_of_both, None if weight is None else weight.clone(), mean, rstd, sums
    gradient = defer_blocks(NormGradient(kept, (grad.memory, x.memory)), x.shape, x.block_size, x.dtype)
    return gradient if in_blocks else float_of(gradient)


def input_gradient(in_blocks: bool, q: Tensor, scale: Tensor, x: BlockTensor) -> Tensor:
    """The gradient ``(q, scale)`` in the format of ``x``, as a BlockTensor if the input was one, else as floats."""
    gradient = wrap_blocks(q, scale, x.block_size, x.dtype)
    return gradient if in_blocks else float_of(gradient)


class Int8LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` over the last dimension, from blocks to blocks; a float input is quantized. Same parameters.

    Args:
        normalized_shape: the number of channels C.
        eps: added to the variance.
        elementwise_affine: whether there is a weight.
        bias: whether there is also a bias.
        device: of the parameters.
        dtype: of the parameters.
        block_size: 32, 64, 128, (32, 128), (1, 128) or (1, 256).

    ``x`` is ``(..., C)``, a float tensor or a BlockTensor; the result is a BlockTensor of its shape and dtype.

    Raises:
        UnsupportedError: more than one dimension to normalize over, an unknown block size; in ``forward``, a dtype.
        QFrameworkError: in ``forward``, a BlockTensor of another block size or another number of channels.
    """

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        block_size: BlockSize = DEFAULT_BLOCK_SIZE,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        _check_shape("Int8LayerNorm", self.normalized_shape)
        self.block_size = check_block_size("Int8LayerNorm", block_size)

    @classmethod
    def from_float(cls, norm: nn.LayerNorm, block_size: BlockSize = DEFAULT_BLOCK_SIZE) -> Int8LayerNorm:
        """The same normalization with the same parameter objects."""
        affine, bias = norm.weight is not None, norm.bias is not None
        new = cls(norm.normalized_shape, norm.eps, affine, bias, "meta", block_size=block_size)
        parameters(new).update(parameters(norm))
        return new.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., C)`` to the same shape, in blocks."""
        return Int8LayerNormFunction.apply(x, self.weight, self.bias, self.eps, self.block_size)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, block_size={self.block_size}"


class Int8RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` over the last dimension, from blocks to blocks; a float input is quantized. Same parameters.

    Arguments, input, result and errors are those of Int8LayerNorm; ``eps=None`` means that of float32.
    """

    weight_offset = 0.0  # added to the weight of a converted module that scales by ``1 + weight``

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        block_size: BlockSize = DEFAULT_BLOCK_SIZE,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        _check_shape("Int8RMSNorm", self.normalized_shape)
        self.block_size = check_block_size("Int8RMSNorm", block_size)

    @classmethod
    def from_float(
        cls, norm: nn.Module, block_size: BlockSize = DEFAULT_BLOCK_SIZE, eps: float | None = None
    ) -> Int8RMSNorm:
        """The same normalization with the same parameter objects, from nn.RMSNorm or a class like LlamaRMSNorm.

        ``eps`` is needed if the module has no attribute ``eps`` or ``variance_epsilon``.
        """
        eps = getattr(norm, "eps", getattr(norm, "variance_epsilon", None)) if eps is None else eps
        weight = norm.weight
        shape = norm.normalized_shape if weight is None else weight.shape
        new = cls(tuple(shape), eps, weight is not None, "meta", block_size=block_size)  # type: ignore[arg-type]
        parameters(new).update(parameters(norm))
        return new.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., C)`` to the same shape, in blocks."""
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        weight = self.weight.float() + self.weight_offset if self.weight_offset else self.weight
        return Int8RMSNormFunction.apply(x, weight, eps, self.block_size)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, block_size={self.block_size}"


def _check_shape(module: str, shape: tuple[int, ...]) -> None:
    if len(shape) != 1:
        raise UnsupportedError(f"{module}: normalized_shape must have one dimension, the last, got {tuple(shape)}")
