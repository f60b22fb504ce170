"""The arguments of int8_linear and their checks: dtypes, shapes, devices."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework.errors import QFrameworkError, UnsupportedError, either
from qframework.kernels.runtime.activation import ACTIVATIONS
from qframework.kernels.runtime.checks import (
    check_dtype,
    check_out_dtype,
    check_same_device,
    check_shape,
    check_zero_point,
    row_scale,
)
from qframework.numerics import FLOAT_DTYPES, MAX_INT8_PRODUCTS


def is_per_channel(out_scale: Tensor, n: int) -> bool:
    """Whether ``out_scale`` has one scale for each of ``n`` output channels: shape ``(N,)`` or ``(1, ..., N)``."""
    return n > 1 and out_scale.ndim > 0 and out_scale.shape[-1] == n == out_scale.numel()


def flat_out_scale(out_scale: Tensor, shape: torch.Size) -> Tensor:
    """``out_scale`` as ``(N,)`` per channel, else as in ``row_scale``. Raises QFrameworkError for other shapes."""
    name, n = "int8_linear", shape[-1]
    check_dtype(name, "out_scale", out_scale, (torch.float32,))
    if is_per_channel(out_scale, n):
        return out_scale.reshape(-1).contiguous()
    return row_scale(name, "out_scale", out_scale, shape, also=f"({n},) per channel, ")


class Int8LinearArguments(NamedTuple):
    """The arguments of ``qframework::int8_linear``; shapes and units are those of the function ``int8_linear``."""

    a: Tensor
    a_scale: Tensor
    b: Tensor
    b_scale: Tensor
    bias: Tensor | None = None
    activation: str = "none"
    residual: Tensor | None = None
    out_scale: Tensor | None = None
    out_dtype: torch.dtype | None = None
    out_zero_point: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of the result."""
        return torch.Size((*self.a.shape[:-1], self.b.shape[0]))

    @property
    def result_dtype(self) -> torch.dtype:
        """int8 where the result is requantized, else ``out_dtype``, float32 by default."""
        return torch.int8 if self.out_scale is not None else self.out_dtype or torch.float32

    def empty_result(self) -> Tensor:
        """An uninitialized result."""
        return self.a.new_empty(self.shape, dtype=self.result_dtype)

    def check(self) -> None:
        """Check metadata. Also called with fake tensors, whose values cannot be read."""
        a, a_scale, b, b_scale, bias, activation, residual, out_scale, out_dtype, zero_point = self
        name = "int8_linear"
        if activation not in ACTIVATIONS:
            raise UnsupportedError(f"{name}: activation must be {either(ACTIVATIONS)}, got {activation!r}")
        check_dtype(name, "a", a, (torch.int8,))
        check_dtype(name, "b", b, (torch.int8,))
        check_dtype(name, "b_scale", b_scale, (torch.float32,))
        operands = {"a_scale": a_scale, "b": b, "b_scale": b_scale, "bias": bias, "residual": residual}
        check_same_device(name, reference=a, **operands, out_scale=out_scale, out_zero_point=zero_point)
        if b.ndim != 2 or a.ndim < 1 or a.shape[-1] != b.shape[1]:
            raise QFrameworkError(
                f"{name}: a and b must have shapes (..., K) and (N, K), got {tuple(a.shape)} and {tuple(b.shape)}"
            )
        if b.shape[1] > MAX_INT8_PRODUCTS:
            raise UnsupportedError(
                f"{name}: K must be at most {MAX_INT8_PRODUCTS}, beyond which INT32 sums can overflow, got b of shape "
                f"{tuple(b.shape)}. Split K, or use a float layer."
            )
        n = b.shape[0]
        check_shape(name, "b_scale", b_scale, (n,), (1,))
        for argument, tensor, shape in (("bias", bias, (n,)), ("residual", residual, (*a.shape[:-1], n))):
            if tensor is not None:
                check_shape(name, argument, tensor, shape)
                check_dtype(name, argument, tensor, FLOAT_DTYPES)
        check_out_dtype(name, out_dtype, out_scale is not None)
        if zero_point is not None:
            if out_scale is None:
                raise QFrameworkError(f"{name}: out_zero_point must be None without out_scale, got a tensor")
            check_zero_point(name, "out_zero_point", zero_point)

    def check_scales(self) -> None:
        """Checks that run in the implementations: with symbolic sizes they would add guards."""
        row_scale("int8_linear", "a_scale", self.a_scale, self.a.shape)
        if self.out_scale is not None:
            flat_out_scale(self.out_scale, self.shape)
