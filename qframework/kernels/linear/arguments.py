"""The arguments of int8_linear and their checks: dtypes, shapes, devices."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.runtime.checks import check_dtype, check_same_device, row_scale
from qframework.numerics import FLOAT_DTYPES, MAX_INT8_PRODUCTS

Activation = Literal["none", "gelu", "gelu_tanh", "relu", "silu"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)


def is_per_channel(out_scale: Tensor, n: int) -> bool:
    """Whether ``out_scale`` holds one scale for each of ``n`` output channels: ``(N,)``, or ones before the N."""
    return n > 1 and out_scale.ndim > 0 and out_scale.shape[-1] == n == out_scale.numel()


def flat_out_scale(out_scale: Tensor, shape: torch.Size) -> Tensor:
    """``out_scale`` as ``(N,)`` per channel, else as row_scale gives it. Raises QFrameworkError where it is neither."""
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

    @property
    def shape(self) -> torch.Size:
        """Of the result."""
        return torch.Size((*self.a.shape[:-1], self.b.shape[0]))

    @property
    def result_dtype(self) -> torch.dtype:
        """int8 where the result is requantized, else what was asked for, float32 by default."""
        return torch.int8 if self.out_scale is not None else self.out_dtype or torch.float32

    def empty_result(self) -> Tensor:
        """The result before it is computed."""
        return self.a.new_empty(self.shape, dtype=self.result_dtype)

    def check(self) -> None:
        """Everything that can be told from metadata; also run on fake tensors, so nothing here may look at values."""
        a, a_scale, b, b_scale, bias, activation, residual, out_scale, out_dtype = self
        name = "int8_linear"
        if activation not in ACTIVATIONS:
            raise UnsupportedError(f"{name}: activation={activation!r} is unknown; accepted: {', '.join(ACTIVATIONS)}")
        check_dtype(name, "a", a, (torch.int8,))
        check_dtype(name, "b", b, (torch.int8,))
        check_dtype(name, "b_scale", b_scale, (torch.float32,))
        check_same_device(
            name, a, a_scale=a_scale, b=b, b_scale=b_scale, bias=bias, residual=residual, out_scale=out_scale
        )
        if b.ndim != 2 or a.ndim < 1 or a.shape[-1] != b.shape[1]:
            raise QFrameworkError(
                f"{name}: a {tuple(a.shape)} and b {tuple(b.shape)} do not fit; accepted: a (..., K) with b (N, K)"
            )
        if b.shape[1] > MAX_INT8_PRODUCTS:
            raise UnsupportedError(
                f"{name}: b has shape {tuple(b.shape)}, and the INT32 sum of K = {b.shape[1]} products can overflow; "
                f"accepted: K up to {MAX_INT8_PRODUCTS}. Split K, or use a float layer."
            )
        n = b.shape[0]
        if b_scale.shape not in ((n,), (1,)):
            raise QFrameworkError(f"{name}: b_scale has shape {tuple(b_scale.shape)}; accepted: ({n},) or (1,)")
        if bias is not None and bias.shape != (n,):
            raise QFrameworkError(f"{name}: bias has shape {tuple(bias.shape)}; accepted: ({n},)")
        if residual is not None and residual.shape != (*a.shape[:-1], n):
            raise QFrameworkError(
                f"{name}: residual has shape {tuple(residual.shape)}; accepted: {(*tuple(a.shape[:-1]), n)}"
            )
        for argument, tensor in (("bias", bias), ("residual", residual)):
            if tensor is not None:
                check_dtype(name, argument, tensor, FLOAT_DTYPES)
        if out_scale is not None and out_dtype not in (None, torch.int8):
            raise UnsupportedError(f"{name}: out_dtype={out_dtype} with out_scale; accepted: torch.int8 or None")
        if out_scale is None and out_dtype not in (None, *FLOAT_DTYPES):
            raise UnsupportedError(
                f"{name}: out_dtype={out_dtype}; accepted: float32, float16, bfloat16, int8 with out_scale"
            )

    def check_scales(self) -> None:
        """What is left for the implementations: with sizes that are symbols, it would add guards."""
        row_scale("int8_linear", "a_scale", self.a_scale, self.a.shape)
        if self.out_scale is not None:
            flat_out_scale(self.out_scale, self.shape)
