"""Linears of INT8 training that read the same tensor, such as queries, keys and values, together.

As linear_function.py computes them, with the weights of all layers below one another, and the gradients of their
results beside one another::

    dX = [dq, dk, dv] [Wq; Wk; Wv]                      [dWq; dWk; dWv] = [dq, dk, dv]^T X

Weights, gradients and sums for biases are quantized and summed where they are, in one launch (quantize_parts.py);
gradients of weights are slices. The results have products of their own: as slices of one, they made the attention
behind them slower than the one product was faster (a BERT-large on an H200).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qframework.compat.dispatch import FakeTensor
from qframework.kernels.blocks.format import BlockSize, block_shape, operand_size, transposed_size
from qframework.kernels.blocks.quantize_parts import part_multiple
from qframework.training.block_tensor import BlockTensor, as_float
from qframework.training.function import Int8Function
from qframework.training.linear_function import Output, activation_blocks, input_gradient


class Int8LinearsFunction(Int8Function):
    """``x @ weight.T + bias`` for each weight, in blocks; the results are floats. Biases follow all weights."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, block_size: BlockSize, dtype: torch.dtype, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        count = len(parameters) // 2
        weights: list[Any] = list(parameters[:count])
        blocks, x_kept = activation_blocks(x, block_size, any(ctx.needs_input_grad[3 : 3 + count]))
        size = operand_size(block_size)
        q, scale, turned, turned_scale, _ = torch.ops.qframework.block_quantize_parts(weights, False, False, size)
        ctx.save_for_backward(*(x_kept or (None, None)), turned, turned_scale)
        ctx.block_size, ctx.x_dtype, ctx.in_blocks = block_size, x.dtype, isinstance(x, BlockTensor)
        ctx.weight_dtype, ctx.sizes = weights[0].dtype, [len(weight) for weight in weights]
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in parameters[count:]]
        parts = zip(*_rows(q, scale, ctx.sizes, size), parameters[count:], strict=True)
        operator = torch.ops.qframework.block_linear
        return tuple(operator(*blocks, *part, bias, block_size, dtype)[0] for *part, bias in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, x_scale, *weight = ctx.saved_tensors
        count, size = len(ctx.sizes), ctx.block_size
        for_x, for_weights, for_biases = (
            any(ctx.needs_input_grad[start:end]) for start, end in ((0, 1), (3, 3 + count), (3 + count, None))
        )
        floats = [as_float(grad) for grad in grads]
        *upright, q_t, scale_t, total = torch.ops.qframework.block_quantize_parts(floats, True, for_biases, size)
        grad_x = input_gradient(ctx, tuple(upright), tuple(weight), True, ()) if for_x else None
        grad_weights: Sequence[Tensor | None] = [None] * count
        grad_biases: list[Tensor | None] = [None] * count
        if for_weights:
            if x_scale is None:
                x, x_scale = torch.ops.qframework.block_transpose(x.q, x.scale, size)
            operands = q_t, scale_t, x, x_scale, None, transposed_size(size)
            whole, _ = torch.ops.qframework.block_linear(*operands, ctx.weight_dtype)
            grad_weights = whole.split(ctx.sizes)
        if for_biases:
            sums = zip(total.split(ctx.sizes), ctx.bias_dtypes, strict=True)
            grad_biases = [None if dtype is None else each.to(dtype) for each, dtype in sums]
        return grad_x, None, None, *grad_weights, *grad_biases


def _rows(q: Tensor, scale: Tensor, sizes: Sequence[int], block_size: BlockSize) -> tuple[Any, Any]:
    """The rows of each layer's weight and of its scales."""
    height, _ = block_shape(block_size)
    return q.split(sizes), scale.split([size // height for size in sizes])


@torch.compiler.allow_in_graph
def linears_in_blocks(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    block_size: BlockSize,
    dtype: torch.dtype,
    *_: Any,
) -> tuple[Tensor, ...]:
    """The results of ``linear_in_blocks`` for each of several weights, where ``kind_to_join`` allows it."""
    return Int8LinearsFunction.apply(x, block_size, dtype, *weights, *biases)


def kind_to_join(
    x: Any,
    weight: Any,
    bias: Any,
    block_size: BlockSize,
    dtype: torch.dtype,
    output: Output,
    conv1d: bool,
    seed: Any,
    learns: bool,
    keep_weight: bool,
) -> torch.dtype | None:
    """The dtype of the weight of a layer that can be computed beside others of the same; None for other layers.

    Not one whose result is in blocks, for then its gradient is too and only weights could be shared; nor a weight that
    FSDP2 spreads; nor one whose rows, or the columns of its gradient, end within a tile.
    """
    plain = isinstance(weight, FakeTensor) and output == "float" and not conv1d and seed is None
    multiple = max(part_multiple(block_size), part_multiple(operand_size(block_size)))
    return weight.dtype if plain and learns and keep_weight and weight.shape[0] % multiple == 0 else None
