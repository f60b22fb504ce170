"""LayerNorm or RMSNorm in one pass over each row: the norm itself, or its result quantized to symmetric INT8.

Formula for a row of C values; RMSNorm subtracts no mean, and weight and bias are optional::

    c = x - mean(x)        y = c / sqrt(mean(c ** 2) + eps) * (weight + offset) + bias

``norm`` returns ``y``, or ``y + residual`` as sandwich norms have it, in the dtype of x. The others return::

    q = clamp(round_half_even(y * (1 / scale)), -127, 127)        scale given, or max|y| / 127 of the row

All of it is float32. Layout: ``x (..., C)`` is treated as rows of C values, each of which a program keeps in registers.
References: ``norm_ref``, ``norm_quantize_ref`` and ``norm_dynamic_quantize_ref``. In a compiled model Inductor computes
a norm and what follows it in one kernel as well, which takes up to five times as long as its bytes
(docs/experiments.md, "Norms and the quantization behind them on Hopper").
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from qframework import numerics
from qframework.errors import QFrameworkError
from qframework.kernels.runtime.checks import (
    check_dtype,
    check_float_input,
    check_one_scale,
    check_positive_scale,
    check_same_device,
    check_shape,
    rows_of,
)
from qframework.kernels.runtime.chip import check_device
from qframework.kernels.runtime.launch import cdiv, launch, tile_of_rows, warm_up
from qframework.kernels.runtime.operator import declare
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.rounding import integers, round_to_int8
from qframework.kernels.runtime.triton import tl, triton
from qframework.numerics import FLOAT_DTYPES, MIN_SCALE

MAX_CHANNELS = 8192
"""Longer rows do not fit into the registers of a program."""


class NormArguments(NamedTuple):
    """The arguments of ``qframework::norm``; ``center`` for LayerNorm, ``offset`` is added to the weight."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    center: bool
    offset: float
    residual: Tensor | None

    def empty_result(self) -> Tensor:
        """Uninitialized values of the dtype of x, contiguous."""
        return self.x.new_empty(self.x.shape)

    def check(self) -> None:
        """Raise QFrameworkError for dtype, shape or device."""
        check_norm("norm", self)
        if self.residual is not None:
            check_residual("norm", self.x, self.residual)


class NormDynamicQuantizeArguments(NamedTuple):
    """The arguments of ``qframework::norm_dynamic_quantize``."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    center: bool
    offset: float

    def empty_result(self) -> tuple[Tensor, Tensor]:
        """Uninitialized int8 values and scale, contiguous."""
        x = self.x
        return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)

    def check(self) -> None:
        """Raise QFrameworkError for dtype, shape or device."""
        check_norm("norm_dynamic_quantize", self)


class NormQuantizeArguments(NamedTuple):
    """The arguments of ``qframework::norm_quantize``; ``scale`` is fp32 of one element."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    center: bool
    offset: float
    scale: Tensor

    def empty_result(self) -> Tensor:
        """Uninitialized int8 values, contiguous."""
        return self.x.new_empty(self.x.shape, dtype=torch.int8)

    def check(self) -> None:
        """Raise QFrameworkError for dtype, shape or device; the implementations check the scale's value."""
        check_norm("norm_quantize", self)
        check_one_scale("norm_quantize", self.x, self.scale)


class NormOperands(Protocol):
    """What the arguments of every norm have."""

    @property
    def x(self) -> Tensor: ...
    @property
    def weight(self) -> Tensor | None: ...
    @property
    def bias(self) -> Tensor | None: ...
    @property
    def eps(self) -> float: ...
    @property
    def center(self) -> bool: ...
    @property
    def offset(self) -> float: ...


def check_norm(operator: str, arguments: NormOperands) -> None:
    """Raise QFrameworkError for dtype, shape or device of x, weight or bias."""
    x = arguments.x
    check_float_input(operator, x)
    check_same_device(operator, x, weight=arguments.weight, bias=arguments.bias)
    if not 0 < x.shape[-1] <= MAX_CHANNELS:
        raise QFrameworkError(f"{operator}: x must have 1 to {MAX_CHANNELS} channels, got {x.shape[-1]}")
    for name, each in (("weight", arguments.weight), ("bias", arguments.bias)):
        if each is not None:
            check_dtype(operator, name, each, FLOAT_DTYPES)
            check_shape(operator, name, each, (x.shape[-1],))


def check_residual(operator: str, x: Tensor, residual: Tensor) -> None:
    """Raise QFrameworkError unless ``residual`` has the device, dtype and shape of x."""
    check_same_device(operator, x, residual=residual)
    check_dtype(operator, "residual", residual, (x.dtype,))
    check_shape(operator, "residual", residual, tuple(x.shape))


def _normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool, offset: float
) -> Tensor:
    """The norm of ``x`` over its last dimension, in float32."""
    y = x.float()
    if center:
        y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * (weight.float() + offset)
    return y if bias is None else y + bias.float()


def norm_ref(x: NormArguments) -> Tensor:
    """Reference of ``qframework::norm``."""
    y = _normalized(*x[:6])
    return (y if x.residual is None else y + x.residual.float()).to(x.x.dtype).contiguous()


def norm_quantize_ref(x: NormQuantizeArguments) -> Tensor:
    """Reference of ``qframework::norm_quantize``."""
    return numerics.quantize(_normalized(*x[:6]), x.scale.reshape(())).contiguous()


def norm_dynamic_quantize_ref(x: NormDynamicQuantizeArguments) -> tuple[Tensor, Tensor]:
    """Reference of ``qframework::norm_dynamic_quantize``."""
    y = _normalized(*x)
    scale = numerics.dynamic_scale(y, "per_token")
    return numerics.quantize(y, scale).contiguous(), scale.contiguous()


@triton.jit
def _norm_kernel(
    x_ptr,  # (M, C) float
    weight_ptr,  # (C,) float, with HAS_WEIGHT
    bias_ptr,  # (C,) float, with HAS_BIAS
    residual_ptr,  # (M, C) float, added to x with ADDS, to the norm with HAS_RESIDUAL
    sum_ptr,  # (M, C) float to write, with ADDS
    out_ptr,  # (M, C) float, or int8 with QUANTIZES
    scale_ptr,  # fp32, with QUANTIZES: (M,) to write with DYNAMIC, else (1,) to read
    M,
    stride_xm,
    stride_rm,
    eps,
    C: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    QUANTIZES: tl.constexpr,
    DYNAMIC: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Normalize BLOCK_M rows, of a sum with ADDS, and quantize them with QUANTIZES. Grid (cdiv(M, BLOCK_M),)."""
    wait_for_previous_kernel(OVERLAP)
    c = tl.arange(0, BLOCK_C)
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (m < M)[:, None]
    if C != BLOCK_C:
        inside = inside & (c < C)[None, :]
    y = tl.load(x_ptr + (m * stride_xm)[:, None] + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        residual = tl.load(residual_ptr + (m * stride_rm)[:, None] + c[None, :], mask=inside, other=0.0)
        rounded = (y + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + (m * C)[:, None] + c[None, :], rounded, mask=inside)
        y = rounded.to(tl.float32)
    if CENTER:
        y -= tl.math.div_rn(tl.sum(y, 1), C * 1.0)[:, None]  # a product with 1 / C leaves a rest of constant rows
        if C != BLOCK_C:
            y = tl.where((c < C)[None, :], y, 0.0)
    y *= tl.math.rsqrt(tl.sum(y * y, 1) * (1.0 / C) + eps)[:, None]
    if HAS_WEIGHT:
        y *= (tl.load(weight_ptr + c, mask=c < C, other=0.0).to(tl.float32) + OFFSET)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + (m * stride_rm)[:, None] + c[None, :], mask=inside, other=0.0)
        y += residual.to(tl.float32)
    out = y
    if DYNAMIC:
        scale = _row_scale(y, MIN_SCALE)
        tl.store(scale_ptr + m, scale, mask=m < M)
        out = integers(y * (1.0 / scale)[:, None])  # nothing exceeds 127
    elif QUANTIZES:
        out = round_to_int8(y * (1.0 / tl.load(scale_ptr)))
    tl.store(out_ptr + (m * C)[:, None] + c[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _row_scale(y, MIN_SCALE: tl.constexpr):
    """``max|y| / 127`` of rows, NaN where there is one: of floats' bits without the sign, NaN has the largest."""
    bits = tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    amax = bits.to(tl.float32, bitcast=True)
    return tl.where(amax == amax, tl.maximum(amax * (1.0 / 127.0), MIN_SCALE), amax)


def norm_triton(x: NormArguments) -> Tensor:
    """``norm`` on a GPU."""
    out = x.empty_result()
    run_norm(x, out, residual=x.residual)
    return out


def norm_quantize_triton(x: NormQuantizeArguments) -> Tensor:
    """``norm_quantize`` on a GPU."""
    q = x.empty_result()
    run_norm(x, q, x.scale)
    return q


def norm_dynamic_quantize_triton(x: NormDynamicQuantizeArguments) -> tuple[Tensor, Tensor]:
    """``norm_dynamic_quantize`` on a GPU."""
    q, scale = x.empty_result()
    run_norm(x, q, scale, dynamic=True)
    return q, scale


def run_norm(x: NormOperands, out: Tensor, scale: Tensor | None = None, **form: Any) -> None:
    """Write the norm of x, or of a sum, to ``out``; see ``_call``."""
    check_device(x.x.device)
    if out.numel():
        grid, arguments, constants = _call(x, out, scale, **form)
        launch(_norm_kernel, grid)(*arguments, **constants)


def warm_up_norm(x: NormOperands, out: Tensor, scale: Tensor | None = None, **form: Any) -> Any:
    """Compile what ``run_norm`` launches for such arguments, which may be on "meta"; None where nothing is."""
    if not out.numel():
        return None
    grid, arguments, constants = _call(x, out, scale, **form)
    return warm_up(_norm_kernel, grid)(*arguments, **constants)


def _call(
    x: NormOperands,
    out: Tensor,
    scale: Tensor | None,
    *,
    dynamic: bool = False,
    residual: Tensor | None = None,
    total: Tensor | None = None,
) -> tuple[tuple[int], tuple[Any, ...], dict[str, Any]]:
    """Grid, arguments and constants of the launch; what is missing is represented by the result.

    A ``scale`` is written if ``dynamic``. ``residual`` is added to x if ``total`` is to be written, else to the norm.
    """
    rows = rows_of(x.x)
    channels = rows.shape[1]
    block_m, block_c, warps = tile_of_rows(channels)
    weight, bias = (out if each is None else each.contiguous() for each in (x.weight, x.bias))
    added = out.view(rows.shape) if residual is None else rows_of(residual)
    given = (out if each is None else each for each in (total, out, scale))
    constants = {
        "C": channels,
        "OFFSET": x.offset,
        "CENTER": x.center,
        "HAS_WEIGHT": x.weight is not None,
        "HAS_BIAS": x.bias is not None,
        "ADDS": total is not None,
        "HAS_RESIDUAL": residual is not None and total is None,
        "QUANTIZES": scale is not None,
        "DYNAMIC": dynamic,
        "MIN_SCALE": MIN_SCALE,
        "BLOCK_M": block_m,
        "BLOCK_C": block_c,
        "num_warps": warps,
    }
    pointers = (rows, weight, bias, added, *given)
    return (
        (cdiv(rows.shape[0], block_m),),
        (*pointers, rows.shape[0], rows.stride(0), added.stride(0), x.eps),
        constants,
    )


def _norm_quantize_cpu(x: NormQuantizeArguments) -> Tensor:
    check_positive_scale("norm_quantize", "scale", x.scale)
    return norm_quantize_ref(x)


OF_NORM = "Tensor? weight, Tensor? bias, float eps, bool center, float offset"
NORM = declare(
    f"norm(Tensor x, {OF_NORM}, Tensor? residual) -> Tensor",
    NormArguments,
    cpu=norm_ref,
    cuda=norm_triton,
    fake=NormArguments.empty_result,
    warm_up=lambda device, x: warm_up_norm(x, x.empty_result(), residual=x.residual),
)
NORM_QUANTIZE = declare(
    f"norm_quantize(Tensor x, {OF_NORM}, Tensor scale) -> Tensor",
    NormQuantizeArguments,
    cpu=_norm_quantize_cpu,
    cuda=norm_quantize_triton,
    fake=NormQuantizeArguments.empty_result,
    warm_up=lambda device, x: warm_up_norm(x, x.empty_result(), x.scale),
)
NORM_DYNAMIC_QUANTIZE = declare(
    f"norm_dynamic_quantize(Tensor x, {OF_NORM}) -> (Tensor, Tensor)",
    NormDynamicQuantizeArguments,
    cpu=norm_dynamic_quantize_ref,
    cuda=norm_dynamic_quantize_triton,
    fake=NormDynamicQuantizeArguments.empty_result,
    warm_up=lambda device, x: warm_up_norm(x, *x.empty_result(), dynamic=True),
)
