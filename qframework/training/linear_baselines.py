"""Baselines of INT8 training: linear layers from floats to floats that quantize the operands of each product.

``PerTensorLinear`` has one scale per tensor in all three products (Banner et al., 2018). ``PerTokenLinear`` is
SwitchBack (Wortsman et al., 2023) as Jetfire describes it in section 2: one scale per row of X and dY, one per output
channel of W in Y = X W^T and per input channel in dX = dY W; dW, which sums over tokens, is a float product. Each has a
counterpart for transformers' ``Conv1D``. Jetfire's own layers are in linear.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qframework.numerics import MAX_INT8_PRODUCTS
from qframework.training.block_tensor import BlockTensor
from qframework.training.function import Int8Function
from qframework.training.linear import Conv1D, result_dtype, share
from qframework.training.linear_function import sum_rows


@torch.compiler.allow_in_graph
class PerTensorLinearFunction(Int8Function):
    """``x @ weight.T + bias`` with one scale for each of X, W and dY. Saves INT8 and the master weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, conv1d: bool) -> Tensor:
        q, scale = torch.ops.qframework.dynamic_quantize(x, "per_tensor")
        w, w_scale = per_tensor_weight(weight, transposed=conv1d)
        ctx.save_for_backward(q, scale, weight)
        ctx.dtype, ctx.conv1d, ctx.bias_dtype = x.dtype, conv1d, None if bias is None else bias.dtype
        return product(q, scale, w, w_scale, bias, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, scale, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        g, g_scale = torch.ops.qframework.dynamic_quantize(grad, "per_tensor")
        grad_x = grad_weight = None
        if for_x:
            w, w_scale = per_tensor_weight(weight, transposed=not ctx.conv1d)
            grad_x = product(g, g_scale, w, w_scale, dtype=ctx.dtype)
        if for_weight:
            of_grad, of_x = (flat(g).t().contiguous(), g_scale), (flat(q).t().contiguous(), scale)
            (a, a_scale), (b, b_scale) = (of_x, of_grad) if ctx.conv1d else (of_grad, of_x)
            grad_weight = product(a, a_scale, b, b_scale.reshape(1), dtype=weight.dtype)
        return grad_x, grad_weight, sum_rows(grad).to(ctx.bias_dtype) if for_bias else None, None


@torch.compiler.allow_in_graph
class PerTokenLinearFunction(Int8Function):
    """SwitchBack: scales per row of X and dY and per channel of W; dW is a float product. Saves X in float."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, conv1d: bool) -> Tensor:
        q, scale = torch.ops.qframework.dynamic_quantize(x, "per_token")
        w, w_scale = per_channel_weight(weight, transposed=conv1d)
        ctx.save_for_backward(x, weight)
        ctx.conv1d, ctx.bias_dtype = conv1d, None if bias is None else bias.dtype
        return product(q, scale, w, w_scale, bias, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        grad_x = grad_weight = None
        if for_x:
            g, g_scale = torch.ops.qframework.dynamic_quantize(grad, "per_token")
            w, w_scale = per_channel_weight(weight, transposed=not ctx.conv1d)
            grad_x = product(g, g_scale, w, w_scale, dtype=x.dtype)
        if for_weight:
            left, right = (flat(x), flat(grad)) if ctx.conv1d else (flat(grad), flat(x))
            grad_weight = (left.t() @ right).to(weight.dtype)
        return grad_x, grad_weight, sum_rows(grad).to(ctx.bias_dtype) if for_bias else None, None


def product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype
) -> Tensor:
    """``int8_linear``, split into several with a float32 sum if one INT32 sum over K could overflow."""
    int8_linear, inner = torch.ops.qframework.int8_linear, a.shape[-1]
    if inner <= MAX_INT8_PRODUCTS:
        return int8_linear(a, a_scale, b, b_scale, bias, out_dtype=dtype)
    y = None
    for start in range(0, inner, MAX_INT8_PRODUCTS):
        part = slice(start, start + MAX_INT8_PRODUCTS)
        y = int8_linear(a[..., part], a_scale, b[:, part].contiguous(), b_scale, residual=y, out_dtype=torch.float32)
    assert y is not None
    return (y if bias is None else y + bias.float()).to(dtype)


def per_tensor_weight(weight: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """A master weight, or its transpose, as int8 with one scale, (1,)."""
    w, scale = torch.ops.qframework.dynamic_quantize(weight, "per_tensor")
    return (w.t().contiguous() if transposed else w), scale.reshape(1)


def per_channel_weight(weight: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """A master weight, or its transpose, as int8 with one scale for each row of the result."""
    w, scale = torch.ops.qframework.dynamic_quantize(weight.t().contiguous() if transposed else weight, "per_token")
    return w, scale.reshape(-1)


def flat(x: Tensor) -> Tensor:
    """``(..., C)`` as ``(rows, C)``."""
    return x.reshape(-1, x.shape[-1])


class _BaselineLinear(nn.Linear):
    """Base of the baselines, from floats to floats; dequantizes BlockTensors."""

    function: type[Int8Function]

    @classmethod
    def from_float(cls, linear: nn.Linear) -> Any:
        """The same layer with the same parameter objects."""
        return share(cls(linear.in_features, linear.out_features, linear.bias is not None, "meta"), linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(float_input(x), self.weight, self.bias, False)


class _BaselineConv1D(Conv1D):
    function: type[Int8Function]

    @classmethod
    def from_float(cls, conv: Any) -> Any:
        """The same layer with the same parameter objects."""
        nx, nf = conv.weight.shape
        return share(cls(nf, nx, "meta"), conv)

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(float_input(x), self.weight, self.bias, True)


class PerTensorLinear(_BaselineLinear):
    """nn.Linear with one scale per tensor in all three products; a baseline, from floats to floats."""

    function = PerTensorLinearFunction


class PerTokenLinear(_BaselineLinear):
    """nn.Linear as in SwitchBack: scales per row and channel, dW in float; a baseline, from floats to floats."""

    function = PerTokenLinearFunction


class PerTensorConv1D(_BaselineConv1D):
    """``PerTensorLinear`` for transformers' ``Conv1D``."""

    function = PerTensorLinearFunction


class PerTokenConv1D(_BaselineConv1D):
    """``PerTokenLinear`` for transformers' ``Conv1D``."""

    function = PerTokenLinearFunction


def float_input(x: Tensor) -> Tensor:
    """``x`` as a float tensor of the dtype in which a float linear would compute."""
    x = x.dequantize() if isinstance(x, BlockTensor) else x
    return x.to(result_dtype(x))
