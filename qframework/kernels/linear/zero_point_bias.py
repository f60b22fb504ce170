"""The bias of an INT8 linear layer whose input has a zero point, so that ``int8_linear`` needs none.

With ``a`` the integers of the input and ``z`` the one that stands for 0::

    sum over k of (a[m, k] - z) * b[n, k]  =  sum over k of a[m, k] * b[n, k]  -  z * sum over k of b[n, k]

The second sum depends on the weight alone (Jacob et al., arXiv:1712.05877, eq. 7), so that it belongs to the bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qframework.errors import QFrameworkError
from qframework.kernels.runtime.checks import check_dtype, check_same_device, check_shape, check_zero_point
from qframework.kernels.runtime.operator import declare
from qframework.numerics import FLOAT_DTYPES

_NAME = "zero_point_bias"


class ZeroPointBiasArguments(NamedTuple):
    """The arguments of ``qframework::zero_point_bias``; see the function of that name."""

    bias: Tensor | None
    a_scale: Tensor
    zero_point: Tensor
    b: Tensor
    b_scale: Tensor

    def empty_result(self) -> Tensor:
        """An uninitialized result."""
        return self.b.new_empty(self.b.shape[0], dtype=torch.float32)

    def check(self) -> None:
        """Raise QFrameworkError for shapes, dtypes and devices."""
        bias, a_scale, zero_point, b, b_scale = self
        check_dtype(_NAME, "b", b, (torch.int8,))
        if b.ndim != 2:
            raise QFrameworkError(f"{_NAME}: b must have shape (N, K), got {tuple(b.shape)}")
        check_same_device(_NAME, b, bias=bias, a_scale=a_scale, zero_point=zero_point, b_scale=b_scale)
        check_zero_point(_NAME, "zero_point", zero_point)
        for argument, scale, more in (("a_scale", a_scale, ()), ("b_scale", b_scale, b.shape[:1])):
            check_dtype(_NAME, argument, scale, (torch.float32,))
            check_shape(_NAME, argument, scale, (), (1,), *([tuple(more)] if more else []))
        if bias is not None:
            check_shape(_NAME, "bias", bias, (b.shape[0],))
            check_dtype(_NAME, "bias", bias, FLOAT_DTYPES)


def zero_point_bias_ref(x: ZeroPointBiasArguments) -> Tensor:
    """The reference, which is the implementation on every device."""
    sums = x.b.sum(1, dtype=torch.int32) * x.zero_point
    moved = sums.float() * (x.a_scale * x.b_scale)
    return -moved if x.bias is None else x.bias.float() - moved


ZERO_POINT_BIAS = declare(
    "zero_point_bias(Tensor? bias, Tensor a_scale, Tensor zero_point, Tensor b, Tensor b_scale) -> Tensor",
    ZeroPointBiasArguments,
    everywhere=zero_point_bias_ref,
    fake=ZeroPointBiasArguments.empty_result,
)


def zero_point_bias(bias: Tensor | None, a_scale: Tensor, zero_point: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """The bias with which ``int8_linear(a, a_scale, b, b_scale, bias)`` computes the product of ``a - zero_point``.

    It is ``bias[n] - a_scale * b_scale[n] * (zero_point * sum over k of b[n, k])``. It depends on parameters alone, so
    that it is computed once for many calls.

    Args:
        bias: ``(N,)`` fp32, fp16 or bf16, or None.
        a_scale: fp32, ``()`` or ``(1,)``.
        zero_point: ``()`` or ``(1,)`` int32, the integer that stands for 0 in ``a``.
        b: ``(N, K)`` int8, the weight.
        b_scale: ``(N,)`` or ``(1,)`` fp32.

    Returns:
        ``(N,)`` float32. The sum of integers is exact for K up to 131,071; two products and a difference are rounded.

    Raises:
        UnsupportedError: another dtype.
        QFrameworkError: shapes or devices that do not match.
    """
    return torch.ops.qframework.zero_point_bias(bias, a_scale, zero_point, b, b_scale)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.qframework.zero_point_bias.default: lambda *args: zero_point_bias_ref(ZeroPointBiasArguments(*args))
}
