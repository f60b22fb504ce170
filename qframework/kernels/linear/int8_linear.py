"""INT8 linear layer with its whole epilogue in one operator.

Formula (QAttn eq. 4-11, with a per-channel weight scale; ``a`` activations, ``b`` the weight)::

    acc = a_int8 @ b_int8.T                                   INT32, exact
    y   = activation(acc * a_scale * b_scale + bias) + residual    float32
    out = y rounded once to out_dtype, or clamp(round(y / out_scale) + out_zero_point, -127, 127) as int8

``out_scale`` is one scale, one for each position, or one for each output channel, so that a fused qkv linear can
requantize queries, keys and values with different scales.

``a`` has no zero point: that of an input ``(a_int8 - z) * a_scale`` becomes part of the bias, see zero_point_bias.py.

Layout: ``a (..., K)`` row-major, ``b (N, K)`` row-major (K-major for both tensor-core operands), ``out (..., N)``.
Reference: ``int8_linear_ref``. CPU: C++, ``torch._int_mm`` or a float product, see cpu.py. GPU: triton.py, hopper.py
and, for up to 64 rows, few_rows.py, with tiles from tiles.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qframework.kernels.linear.arguments import Int8LinearArguments
from qframework.kernels.linear.cpu import decompose_int8_linear, decompose_int8_linear_anywhere, int8_linear_cpu
from qframework.kernels.linear.launch import int8_linear_triton, warm_up_int8_linear
from qframework.kernels.runtime.activation import Activation
from qframework.kernels.runtime.inference_only import refuse_when_run
from qframework.kernels.runtime.operator import declare, refuse_transforms

INT8_LINEAR = declare(
    "int8_linear(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias=None, str activation='none', "
    "Tensor? residual=None, Tensor? out_scale=None, ScalarType? out_dtype=None, Tensor? out_zero_point=None) -> Tensor",
    Int8LinearArguments,
    cpu=int8_linear_cpu,
    cuda=int8_linear_triton,
    fake=Int8LinearArguments.empty_result,
    warm_up=warm_up_int8_linear,
)
refuse_when_run("int8_linear")


def int8_linear(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    activation: Activation = "none",
    residual: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_zero_point: Tensor | None = None,
) -> Tensor:
    """``activation(a @ b.T * a_scale * b_scale + bias) + residual``, in INT8 with an exact INT32 accumulator.

    Args:
        a: ``(..., K)`` int8, any strides and leading dimensions.
        a_scale: fp32, dequantizes ``a``: ``()`` or ``(1,)`` per tensor, ``(..., 1)`` per token or position.
        b: ``(N, K)`` int8, the weight of a linear layer.
        b_scale: ``(N,)`` or ``(1,)`` fp32, dequantizes ``b``.
        bias: ``(N,)`` fp32, fp16 or bf16.
        activation: ``"none"``, ``"gelu"`` (erf), ``"gelu_tanh"``, ``"relu"`` or ``"silu"``, applied after the bias.
        residual: ``(..., N)`` fp32, fp16 or bf16, added after the activation.
        out_scale: fp32 like ``a_scale``, or ``(N,)`` per output channel; requantizes the result to int8 (QAttn eq.
            7-8). Scales per channel may be negative: a factor ``c`` of the result folds in as ``out_scale / c``.
        out_dtype: float32 (default), float16 or bfloat16; with ``out_scale`` int8.
        out_zero_point: ``()`` or ``(1,)`` int32, the integer that stands for 0 in a requantized result; None for 0.

    Returns:
        ``(..., N)`` of ``out_dtype``, contiguous.

    Numerics: the accumulator is exact; the epilogue is float32 and rounds once at the end; a
    requantized value saturates at +-127. On a GPU, GELU of x has an error below 1e-6 (relative 1e-5 where |x| < 1) for
    16-bit and INT8 results and uses erf for float32. Before an INT8 result with one scale and no residual, GELU, its
    tanh form and SiLU use the hardware's tanh, with an error of at most 2^-12 |x|, for GELU plus 5.5e-5. ``y /
    out_scale`` is a product with the reciprocal, and off by up to 1.5e-5 without an activation, a residual and a zero
    point, so a value next to a tie may round the other way.

    Raises:
        UnsupportedError: an unsupported dtype, activation or device; K above 131,071, where INT32 can overflow.
        QFrameworkError: shapes or devices that do not match; on the CPU also a scale that is not positive.
    """
    refuse_transforms("int8_linear", bias, residual)
    return torch.ops.qframework.int8_linear(
        a, a_scale, b, b_scale, bias, activation, residual, out_scale, out_dtype, out_zero_point
    )


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {torch.ops.qframework.int8_linear.default: decompose_int8_linear}
# For packages, which also run where there is no C++ compiler.
PACKAGED: dict[Any, Callable[..., Any]] = {torch.ops.qframework.int8_linear.default: decompose_int8_linear_anywhere}
