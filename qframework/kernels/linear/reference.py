"""The reference of ``qframework::int8_linear`` in plain torch, and its epilogue."""

from __future__ import annotations

from torch import Tensor

from qframework import numerics
from qframework.kernels.linear.arguments import Int8LinearArguments
from qframework.kernels.runtime.activation import apply_activation


def int8_linear_ref(x: Int8LinearArguments) -> Tensor:
    """Reference of ``qframework::int8_linear``. The float64 accumulator is exact for every INT32 sum."""
    return epilogue_ref((x.a.double() @ x.b.double().t()).float(), x)


def epilogue_ref(acc: Tensor, x: Int8LinearArguments) -> Tensor:
    """The epilogue, given the INT32 sums of the product as float32, ``acc (..., N)``."""
    y = acc * x.a_scale * x.b_scale
    if x.bias is not None:
        y = y + x.bias.float()
    y = apply_activation(y, x.activation)
    if x.residual is not None:
        y = y + x.residual.float()
    return y.to(x.result_dtype) if x.out_scale is None else numerics.quantize(y, x.out_scale, x.out_zero_point)
