"""Linear layers whose three products run in INT8, with one scale per block (Jetfire, sections 4 and 5).

Operands are in blocks, and sums over blocks are in float32::

    Y  = X   W^T          W is quantized from the master weight
    dX = dY  W            W transposed
    dW = dY^T X           X was saved in INT8 in the forward pass

Along the inner dimension, blocks must have the same length in both operands: W is in blocks of
``operand_size(block_size)``, both transposed operands of dW in blocks of ``transposed_size(block_size)``. Square blocks
already are; others are dequantized and quantized again for dW.

Gradients in blocks are computed when they are read. Of a tensor that three linears read, that is after autograd has
added them, and they are one sum of products that is rounded once (deferred.py).

A float operand is read once for both of its products: W and a float X in the forward pass, which keeps the second form
in INT8, a float dY in the backward pass.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from qframework.kernels.blocks.format import BlockSize, operand_size, transposed_size
from qframework.training.block_tensor import BlockTensor, as_blocks, defer_blocks, wrap_blocks
from qframework.training.deferred import Products
from qframework.training.function import Int8Function

Output = Literal["block", "float"]
# (q, scale) of a matrix in blocks
Blocks = tuple[Tensor, Tensor]


class Int8LinearFunction(Int8Function):
    """``x @ weight.T + bias`` in blocks, or with ``conv1d`` a weight ``(in, out)``.

    Saves ``x`` in INT8: blocks as they come, a float transposed, as dW needs it. Saves the weight in INT8 as dX needs
    it, or with ``keep_weight=False`` the master weight. With a seed, a float gradient is rounded stochastically.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        block_size: BlockSize,
        dtype: torch.dtype,
        output: Output,
        conv1d: bool,
        seed: Tensor | None,
        learns: bool,
        keep_weight: bool,
    ) -> Tensor:
        for_x, for_weight = (learns and needed for needed in ctx.needs_input_grad[:2])
        blocks, x_kept = activation_blocks(x, block_size, for_weight)
        w, turned = weight_both_ways(weight, block_size, conv1d, for_x and keep_weight)
        w_kept = turned or (weight if for_x else None, None)
        ctx.save_for_backward(*(x_kept or (None, None)), *w_kept, seed)
        ctx.block_size, ctx.conv1d = block_size, conv1d
        ctx.x_dtype, ctx.in_blocks, ctx.weight_dtype = x.dtype, isinstance(x, BlockTensor), weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        out_dtype = torch.int8 if output == "block" else dtype
        y, scale = torch.ops.qframework.block_linear(*blocks, *w, bias, block_size, out_dtype)
        return wrap_blocks(y, scale, block_size, dtype) if output == "block" else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scale, weight, w_scale, seed = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        upright, transposed, grad_bias = gradient_blocks(grad, ctx.block_size, for_weight, for_bias, seed)
        grad_x = grad_weight = None
        if for_x:
            w, lasts = (weight, w_scale), not (ctx.conv1d and isinstance(weight, BlockTensor))  # FSDP2 frees it
            if w_scale is None:
                w, _ = weight_both_ways(weight, ctx.block_size, not ctx.conv1d, False)
            reads = (grad.memory,) if isinstance(grad, BlockTensor) else ()
            grad_x = input_gradient(ctx, upright, w, lasts, reads)
        if for_weight:
            if x_scale is None:
                x, x_scale = torch.ops.qframework.block_transpose(x.q, x.scale, ctx.block_size)
            left, right = ((x, x_scale), transposed) if ctx.conv1d else (transposed, (x, x_scale))
            size = transposed_size(ctx.block_size)
            grad_weight, _ = torch.ops.qframework.block_linear(*left, *right, None, size, ctx.weight_dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, *[None] * 7


def activation_blocks(x: Tensor, block_size: BlockSize, for_weight: bool) -> tuple[Blocks, tuple[Any, ...] | None]:
    """``x`` in blocks, and what to keep of it for dW: a BlockTensor and None, or the transpose of a float."""
    if isinstance(x, BlockTensor) or not for_weight:
        blocks = as_blocks(x, block_size)
        return (blocks.q, blocks.scale), (blocks, None) if for_weight else None
    *blocks_of_x, x_t, scale_t = torch.ops.qframework.block_quantize_both(x, block_size)
    return tuple(blocks_of_x), (x_t, scale_t)


def weight_both_ways(
    weight: Tensor, block_size: BlockSize, transposed: bool, other: bool
) -> tuple[Blocks, Blocks | None]:
    """A master weight, or its transpose, in blocks for a product with tensors in ``block_size``; and the ``other`` one.

    Square blocks hold the same values in both; others are each quantized from the master weight. A weight that FSDP2
    gathered in blocks has no master weight here: its transpose is quantized from the blocks, and never kept.
    """
    size = operand_size(block_size)
    if isinstance(weight, BlockTensor):
        weight = as_blocks(weight, size)
        blocks = weight.q, weight.scale
        return torch.ops.qframework.block_transpose(*blocks, size) if transposed else blocks, None
    if not (transposed or other):
        return torch.ops.qframework.block_quantize(weight, size), None
    q, scale, q_t, scale_t = torch.ops.qframework.block_quantize_both(weight, size)
    first, second = ((q_t, scale_t), (q, scale)) if transposed else ((q, scale), (q_t, scale_t))
    return first, second if other else None


def gradient_blocks(
    grad: Tensor, block_size: BlockSize, transposed: bool, sums: bool, seed: Tensor | None = None
) -> tuple[Blocks, Blocks, Tensor | None]:
    """``grad`` in blocks, its transpose, and the sum of its rows ``(C,)`` fp32; unused values for what is not asked."""
    if not isinstance(grad, BlockTensor):
        total = sum_rows(grad) if sums else None
        if not transposed:
            q = torch.ops.qframework.block_quantize(grad, block_size, seed)
            return q, q, total
        *q, q_t, scale_t = torch.ops.qframework.block_quantize_both(grad, block_size, seed)
        return tuple(q), (q_t, scale_t), total
    q = grad.q, grad.scale
    if transposed and sums:
        *q_t, total = torch.ops.qframework.block_transpose_sum(*q, block_size)
        return q, tuple(q_t), total
    total = torch.ops.qframework.block_sum_rows(*q, block_size) if sums else None
    return q, torch.ops.qframework.block_transpose(*q, block_size) if transposed else q, total


def sum_rows(grad: Tensor) -> Tensor:
    """The sum of all rows of a float ``grad (..., C)``, (C,) fp32."""
    return grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32)


def input_gradient(ctx: Any, grad: Blocks, weight: Blocks, lasts: bool, reads: tuple[Any, ...]) -> Tensor:
    """dX, in blocks if X is in blocks: then it is computed when it is read, with those it was added to until then.

    Unless the blocks of ``weight`` do not last until then. ``reads`` is the memory of a gradient in blocks.
    """
    if ctx.in_blocks and lasts:
        shape = *grad[0].shape[:-1], weight[0].shape[0]
        return defer_blocks(Products(((*grad, *weight),), reads), shape, ctx.block_size, ctx.x_dtype)
    out_dtype = torch.int8 if ctx.in_blocks else ctx.x_dtype
    q, scale = torch.ops.qframework.block_linear(*grad, *weight, None, ctx.block_size, out_dtype)
    return wrap_blocks(q, scale, ctx.block_size, ctx.x_dtype) if ctx.in_blocks else q
