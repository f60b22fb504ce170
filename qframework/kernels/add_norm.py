"""A sum and its LayerNorm or RMSNorm in one pass over each row, as pre-norm blocks have them.

Formula for a row of C values, with the norm of qframework/kernels/norm.py::

    h = x + residual, rounded to the dtype of x        y = norm(h), from the rounded h

``add_norm`` returns ``h`` and ``y``, both in the dtype of x; the others return ``h`` and what ``norm_quantize`` and
``norm_dynamic_quantize`` return for it. A float16 value takes 8 bytes of memory traffic, or 7 with an INT8 result.
References: ``add_norm_ref``, ``add_norm_quantize_ref`` and ``add_norm_dynamic_quantize_ref``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework.kernels.norm import (
    OF_NORM,
    NormArguments,
    NormDynamicQuantizeArguments,
    NormQuantizeArguments,
    check_norm,
    check_residual,
    norm_dynamic_quantize_ref,
    norm_quantize_ref,
    norm_ref,
    run_norm,
    warm_up_norm,
)
from qframework.kernels.runtime.checks import check_one_scale, check_positive_scale
from qframework.kernels.runtime.operator import declare


class AddNormArguments(NamedTuple):
    """The arguments of ``qframework::add_norm``; those of ``qframework::norm`` for x + residual."""

    x: Tensor
    residual: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    center: bool
    offset: float

    def empty_result(self) -> tuple[Tensor, Tensor]:
        """Uninitialized sum and norm of the dtype of x, contiguous."""
        return self.x.new_empty(self.x.shape), self.x.new_empty(self.x.shape)

    def check(self) -> None:
        """Raise QFrameworkError for dtype, shape or device."""
        check_norm("add_norm", self)
        check_residual("add_norm", self.x, self.residual)


class AddNormQuantizeArguments(NamedTuple):
    """The arguments of ``qframework::add_norm_quantize``; ``scale`` is fp32 of one element."""

    x: Tensor
    residual: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    center: bool
    offset: float
    scale: Tensor

    def empty_result(self) -> tuple[Tensor, Tensor]:
        """Uninitialized sum of the dtype of x and int8 values, contiguous."""
        return self.x.new_empty(self.x.shape), self.x.new_empty(self.x.shape, dtype=torch.int8)

    def check(self) -> None:
        """Raise QFrameworkError for dtype, shape or device; the implementations check the scale's value."""
        check_norm("add_norm_quantize", self)
        check_residual("add_norm_quantize", self.x, self.residual)
        check_one_scale("add_norm_quantize", self.x, self.scale)


class AddNormDynamicQuantizeArguments(NamedTuple):
    """The arguments of ``qframework::add_norm_dynamic_quantize``."""

    x: Tensor
    residual: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    center: bool
    offset: float

    def empty_result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Uninitialized sum of the dtype of x, int8 values and scale, contiguous."""
        x = self.x
        q, scale = x.new_empty(x.shape, dtype=torch.int8), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        return x.new_empty(x.shape), q, scale

    def check(self) -> None:
        """Raise QFrameworkError for dtype, shape or device."""
        check_norm("add_norm_dynamic_quantize", self)
        check_residual("add_norm_dynamic_quantize", self.x, self.residual)


def add_norm_ref(x: AddNormArguments) -> tuple[Tensor, Tensor]:
    """Reference of ``qframework::add_norm``."""
    total = (x.x + x.residual).contiguous()
    return total, norm_ref(NormArguments(total, *x[2:], None))


def add_norm_quantize_ref(x: AddNormQuantizeArguments) -> tuple[Tensor, Tensor]:
    """Reference of ``qframework::add_norm_quantize``."""
    total = (x.x + x.residual).contiguous()
    return total, norm_quantize_ref(NormQuantizeArguments(total, *x[2:]))


def add_norm_dynamic_quantize_ref(x: AddNormDynamicQuantizeArguments) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of ``qframework::add_norm_dynamic_quantize``."""
    total = (x.x + x.residual).contiguous()
    return total, *norm_dynamic_quantize_ref(NormDynamicQuantizeArguments(total, *x[2:]))


def add_norm_triton(x: AddNormArguments) -> tuple[Tensor, Tensor]:
    """``add_norm`` on a GPU."""
    total, out = x.empty_result()
    run_norm(x, out, residual=x.residual, total=total)
    return total, out


def add_norm_quantize_triton(x: AddNormQuantizeArguments) -> tuple[Tensor, Tensor]:
    """``add_norm_quantize`` on a GPU."""
    total, q = x.empty_result()
    run_norm(x, q, x.scale, residual=x.residual, total=total)
    return total, q


def add_norm_dynamic_quantize_triton(x: AddNormDynamicQuantizeArguments) -> tuple[Tensor, Tensor, Tensor]:
    """``add_norm_dynamic_quantize`` on a GPU."""
    total, q, scale = x.empty_result()
    run_norm(x, q, scale, dynamic=True, residual=x.residual, total=total)
    return total, q, scale


def _warm_up(device: torch.device, x: AddNormArguments) -> object:
    total, out = x.empty_result()
    return warm_up_norm(x, out, residual=x.residual, total=total)


def _warm_up_static(device: torch.device, x: AddNormQuantizeArguments) -> object:
    total, q = x.empty_result()
    return warm_up_norm(x, q, x.scale, residual=x.residual, total=total)


def _warm_up_dynamic(device: torch.device, x: AddNormDynamicQuantizeArguments) -> object:
    total, q, scale = x.empty_result()
    return warm_up_norm(x, q, scale, dynamic=True, residual=x.residual, total=total)


def _add_norm_quantize_cpu(x: AddNormQuantizeArguments) -> tuple[Tensor, Tensor]:
    check_positive_scale("add_norm_quantize", "scale", x.scale)
    return add_norm_quantize_ref(x)


ADD_NORM = declare(
    f"add_norm(Tensor x, Tensor residual, {OF_NORM}) -> (Tensor, Tensor)",
    AddNormArguments,
    cpu=add_norm_ref,
    cuda=add_norm_triton,
    fake=AddNormArguments.empty_result,
    warm_up=_warm_up,
)
ADD_NORM_QUANTIZE = declare(
    f"add_norm_quantize(Tensor x, Tensor residual, {OF_NORM}, Tensor scale) -> (Tensor, Tensor)",
    AddNormQuantizeArguments,
    cpu=_add_norm_quantize_cpu,
    cuda=add_norm_quantize_triton,
    fake=AddNormQuantizeArguments.empty_result,
    warm_up=_warm_up_static,
)
ADD_NORM_DYNAMIC_QUANTIZE = declare(
    f"add_norm_dynamic_quantize(Tensor x, Tensor residual, {OF_NORM}) -> (Tensor, Tensor, Tensor)",
    AddNormDynamicQuantizeArguments,
    cpu=add_norm_dynamic_quantize_ref,
    cuda=add_norm_dynamic_quantize_triton,
    fake=AddNormDynamicQuantizeArguments.empty_result,
    warm_up=_warm_up_dynamic,
)
