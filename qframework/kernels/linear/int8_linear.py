"""INT8 linear layer with its whole epilogue in one operator.

Formula (QAttn eq. 4-11, with a per-channel weight scale; ``a`` activations, ``b`` the weight)::

    acc = a_int8 @ b_int8.T                                   INT32, exact
    y   = activation(acc * a_scale * b_scale + bias) + residual    float32
    out = y rounded once to out_dtype, or clamp(round(y / out_scale), -127, 127) as int8

``out_scale`` is one scale, one for each position, or one for each output channel: a linear that computes queries, keys
and values at once writes each with its own.

Layout: ``a (..., K)`` row-major, ``b (N, K)`` row-major (K-major for both tensor-core operands), ``out (..., N)``.
Reference: ``int8_linear_ref``. CPU: oneDNN's packed u8 x s8 kernel, ``torch._int_mm`` or a float product, see
cpu.py.
CUDA: triton.py, its compile-time choices in tiles.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qframework import numerics
from qframework.errors import QFrameworkError
from qframework.kernels.linear.arguments import Activation, check_arguments, result_dtype
from qframework.kernels.linear.launch import int8_linear_triton
from qframework.kernels.runtime.launch import cuda_implementation
from qframework.kernels.runtime.operator import LIBRARY, refuse_transforms


def apply_activation(y: Tensor, activation: str) -> Tensor:
    """The named activation in torch: ``gelu`` is the erf form, ``gelu_tanh`` the tanh approximation."""
    if activation == "none":
        return y
    if activation == "gelu":
        return F.gelu(y)
    if activation == "gelu_tanh":
        return F.gelu(y, approximate="tanh")
    return F.relu(y) if activation == "relu" else F.silu(y)


def int8_linear_ref(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    activation: Activation = "none",
    residual: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Reference of ``qframework::int8_linear``; the accumulator is float64, exact for every INT32 sum."""
    acc = (a.double() @ b.double().t()).float()
    return epilogue_ref(acc, a_scale, b_scale, bias, activation, residual, out_scale, out_dtype)


def epilogue_ref(
    acc: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    out_scale: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """What follows the product: ``acc (..., N)`` is its INT32 sum as float32."""
    y = acc * a_scale * b_scale
    if bias is not None:
        y = y + bias.float()
    y = apply_activation(y, activation)
    if residual is not None:
        y = y + residual.float()
    return numerics.quantize(y, out_scale) if out_scale is not None else y.to(out_dtype or torch.float32)


LIBRARY.define(
    "int8_linear(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias=None, str activation='none', "
    "Tensor? residual=None, Tensor? out_scale=None, ScalarType? out_dtype=None) -> Tensor"
)


@cuda_implementation("int8_linear")
def _int8_linear_cuda(
    a, a_scale, b, b_scale, bias=None, activation="none", residual=None, out_scale=None, out_dtype=None
):
    return int8_linear_triton(a, a_scale, b, b_scale, bias, activation, residual, out_scale, out_dtype)


@torch.library.register_fake("qframework::int8_linear", lib=LIBRARY)
def _int8_linear_fake(
    a, a_scale, b, b_scale, bias=None, activation="none", residual=None, out_scale=None, out_dtype=None
):
    check_arguments(a, a_scale, b, b_scale, bias, activation, residual, out_scale, out_dtype)
    return a.new_empty((*a.shape[:-1], b.shape[0]), dtype=result_dtype(out_scale, out_dtype))


def _no_backward(ctx, grad):
    raise QFrameworkError(
        "int8_linear is an inference operator and has no gradient; run the model under torch.no_grad()"
    )


torch.library.register_autograd("qframework::int8_linear", _no_backward, lib=LIBRARY)


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
        out_scale: fp32 like ``a_scale``, or ``(N,)`` per output channel; the result is requantized to int8 with it
            (QAttn eq. 7-8). Per channel it may be negative: a product with ``c`` in front is ``out_scale / c``.
        out_dtype: float32 (default), float16 or bfloat16; int8 goes with ``out_scale``.

    Returns:
        ``(..., N)`` of ``out_dtype``, contiguous.

    Numerics: the accumulator is exact; the epilogue is float32 and rounds once at the end; a
    requantized value saturates at +-127. On a GPU, GELU is within 1e-6 (and 1e-5 of itself where |x| < 1) in front
    of 16 or 8 bit, and erf's own for float32; ``y / out_scale`` is a product with the reciprocal, so that a value next
    to a tie may round the other way.

    Raises:
        UnsupportedError: a dtype, activation or device no kernel can do; K above 131,071, where INT32 can overflow.
        QFrameworkError: shapes or devices that do not fit together; on the CPU also a scale that is not positive.
    """
    refuse_transforms("int8_linear", bias, residual)
    return torch.ops.qframework.int8_linear(a, a_scale, b, b_scale, bias, activation, residual, out_scale, out_dtype)
