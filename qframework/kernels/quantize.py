"""Quantize activations to symmetric INT8: with a given scale, or with one computed from the data.

Formula (QAttn eq. 1-2, range [-127, 127]; with a zero point, round(x / scale) + zero_point is clamped)::

    q = clamp(round_half_even(x * (1 / scale)), -127, 127)        scale = max|x| / 127 when dynamic

Layout: ``x (..., C)`` is treated as rows of C values; a scale belongs to the tensor, to a position or to a row.
Reference: ``quantize_ref``, ``dynamic_quantize_ref`` and ``dequantize_ref``. The compile backend decomposes the
operators into these, so that Inductor fuses them into the LayerNorm, GELU or addition before them. Where there is
nothing to fuse with, it uses the overload ``dynamic_quantize.alone``, which is not decomposed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from qframework import numerics
from qframework.errors import UnsupportedError, either
from qframework.kernels.runtime.checks import (
    check_dtype,
    check_float_input,
    check_positive_scale,
    check_same_device,
    check_zero_point,
    row_scale,
    rows_of,
)
from qframework.kernels.runtime.chip import check_device
from qframework.kernels.runtime.inference_only import scale_of
from qframework.kernels.runtime.launch import cdiv, launch, tile_of_rows, warm_up
from qframework.kernels.runtime.operator import declare
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.rounding import round_and_shift, round_to_int8
from qframework.kernels.runtime.triton import tl, triton
from qframework.numerics import MIN_SCALE, ActivationGranularity

_MAX_BLOCK_C = 8192
_FEW_ROWS = 1024  # up to which a program has 1,024 values and four warps (``other/2026-11-29-h200-quantize.json``)


class QuantizeArguments(NamedTuple):
    """The arguments of ``qframework::quantize``."""

    x: Tensor
    scale: Tensor
    zero_point: Tensor | None = None

    def empty_result(self) -> Tensor:
        """An uninitialized result, int8 and contiguous."""
        return self.x.new_empty(self.x.shape, dtype=torch.int8)

    def check(self) -> None:
        """Raise QFrameworkError for dtype or device; the implementations check the scale."""
        check_float_input("quantize", self.x)
        check_same_device("quantize", self.x, scale=self.scale, zero_point=self.zero_point)
        if self.zero_point is not None:
            check_zero_point("quantize", "zero_point", self.zero_point)


class DynamicQuantizeArguments(NamedTuple):
    """The arguments of ``qframework::dynamic_quantize``."""

    x: Tensor
    granularity: ActivationGranularity

    def empty_result(self) -> tuple[Tensor, Tensor]:
        """Uninitialized int8 values and scale."""
        x = self.x
        shape = () if self.granularity == "per_tensor" else (*x.shape[:-1], 1)
        return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(shape, dtype=torch.float32)

    def check(self) -> None:
        """Raise UnsupportedError for granularity or dtype."""
        accepted = get_args(ActivationGranularity)
        if self.granularity not in accepted:
            raise UnsupportedError(
                f"dynamic_quantize: granularity must be {either(accepted)}, got {self.granularity!r}"
            )
        check_float_input("dynamic_quantize", self.x)


class DequantizeArguments(NamedTuple):
    """The arguments of ``qframework::dequantize``."""

    q: Tensor
    scale: Tensor
    dtype: torch.dtype = torch.float32
    zero_point: Tensor | None = None

    def check(self) -> None:
        """Raise QFrameworkError for dtype or device."""
        check_dtype("dequantize", "q", self.q, (torch.int8,))
        check_same_device("dequantize", self.q, scale=self.scale, zero_point=self.zero_point)
        if self.zero_point is not None:
            check_zero_point("dequantize", "zero_point", self.zero_point)


quantize_ref, dequantize_ref = numerics.quantize, numerics.dequantize


def dynamic_quantize_ref(x: Tensor, granularity: ActivationGranularity) -> tuple[Tensor, Tensor]:
    """Reference of ``qframework::dynamic_quantize``."""
    scale = numerics.dynamic_scale(x, granularity)
    return numerics.quantize(x, scale), scale


@triton.jit(do_not_specialize=["M"])
def _quantize_kernel(
    x_ptr,  # (M, C) float
    scale_ptr,  # (P,) fp32, row m uses m % P
    zero_point_ptr,  # (1,) int32
    q_ptr,  # (M, C) int8
    M,
    C,
    P,
    stride_xm,
    ZERO_POINT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """q = round(x / scale) + zero_point. Grid (cdiv(M, BLOCK_M), cdiv(C, BLOCK_C))."""
    wait_for_previous_kernel(OVERLAP)
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (m < M)[:, None] & (c < C)[None, :]
    scale = tl.load(scale_ptr + m % P)
    x = tl.load(x_ptr + (m * stride_xm)[:, None] + c[None, :], mask=inside, other=0.0).to(tl.float32)
    steps = x * tl.math.div_rn(1.0, scale)[:, None]
    q = round_and_shift(steps, tl.load(zero_point_ptr)) if ZERO_POINT else round_to_int8(steps)
    tl.store(q_ptr + (m * C)[:, None] + c[None, :], q, mask=inside)


@triton.jit
def row_scale_of(amax, nan, MIN_SCALE: tl.constexpr):
    """Scales of rows from their largest magnitudes; NaN where ``nan`` is set, since ``amax`` ignores NaN."""
    scale = tl.maximum(tl.math.div_rn(amax, 127.0), MIN_SCALE)
    return tl.where(nan > 0, float("nan"), scale)


@triton.jit(do_not_specialize=["M"])
def _dynamic_quantize_kernel(
    x_ptr,  # (M, C) float
    q_ptr,  # (M, C) int8
    scale_ptr,  # (M,) fp32
    M,
    C,
    stride_xm,
    MIN_SCALE: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """scale = max|x| / 127 and q = round(x / scale) for BLOCK_M rows. Grid (cdiv(M, BLOCK_M),).

    Rows of up to BLOCK_C values (WHOLE) are read once, longer ones twice.
    """
    wait_for_previous_kernel(OVERLAP)
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    given, written = x_ptr + (m * stride_xm)[:, None], q_ptr + (m * C)[:, None]
    if WHOLE:
        c = tl.arange(0, BLOCK_C)[None, :]
        inside = (m < M)[:, None] & (c < C)
        x = tl.load(given + c, mask=inside, other=0.0).to(tl.float32)
        scale = row_scale_of(tl.max(tl.abs(x), 1), tl.max((x != x).to(tl.int32), 1), MIN_SCALE)
        tl.store(written + c, round_to_int8(x * tl.math.div_rn(1.0, scale)[:, None]), mask=inside)
    else:
        amax = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
        nan = tl.zeros((BLOCK_M, BLOCK_C), tl.int32)
        for start in range(0, C, BLOCK_C):
            c = start + tl.arange(0, BLOCK_C)[None, :]
            x = tl.load(given + c, mask=(m < M)[:, None] & (c < C), other=0.0).to(tl.float32)
            amax = tl.maximum(amax, tl.abs(x))
            nan = nan | (x != x).to(tl.int32)  # maximum ignores NaN, which must reach the scale
        scale = row_scale_of(tl.max(amax, 1), tl.max(nan, 1), MIN_SCALE)
        for start in range(0, C, BLOCK_C):
            c = start + tl.arange(0, BLOCK_C)[None, :]
            inside = (m < M)[:, None] & (c < C)
            x = tl.load(given + c, mask=inside, other=0.0).to(tl.float32)
            tl.store(written + c, round_to_int8(x * tl.math.div_rn(1.0, scale)[:, None]), mask=inside)
    tl.store(scale_ptr + m, scale, mask=m < M)


def quantize_triton(x: QuantizeArguments) -> Tensor:
    """``quantize`` on a GPU."""
    check_device(x.x.device)
    period = row_scale("quantize", "scale", x.scale, x.x.shape)
    q = x.empty_result()
    if q.numel():
        rows = rows_of(x.x)
        block_m, block_c, warps = tile_of_rows(min(rows.shape[1], 2048))
        grid = (cdiv(rows.shape[0], block_m), cdiv(rows.shape[1], block_c))
        zero_point = period if x.zero_point is None else x.zero_point
        sizes = (*rows.shape, period.numel(), rows.stride(0))
        blocks = {"BLOCK_M": block_m, "BLOCK_C": block_c, "num_warps": warps}
        constants = {"ZERO_POINT": x.zero_point is not None, **blocks}
        launch(_quantize_kernel, grid)(rows, period, zero_point, q, *sizes, **constants)
    return q


def dynamic_quantize_triton(x: DynamicQuantizeArguments) -> tuple[Tensor, Tensor]:
    """``dynamic_quantize`` on a GPU: one kernel for scales per row; torch computes a scale per tensor."""
    check_device(x.x.device)
    if _leaves_scale_to_torch(x):
        scale = numerics.dynamic_scale(*x)
        return quantize_triton(QuantizeArguments(x.x, scale)), scale
    q, scale = x.empty_result()
    grid, arguments, constants = _dynamic_call(x.x, q, scale)
    launch(_dynamic_quantize_kernel, grid)(*arguments, **constants)
    return q, scale


def warm_up_dynamic_quantize(device: torch.device, x: DynamicQuantizeArguments) -> Any:
    """Compile what ``dynamic_quantize_triton`` launches for such an ``x``, which may be on "meta".

    Returns None where torch computes the scale or nothing is launched. ``device`` makes no difference.
    """
    if _leaves_scale_to_torch(x):
        return None
    grid, arguments, constants = _dynamic_call(x.x, *x.empty_result())
    return warm_up(_dynamic_quantize_kernel, grid)(*arguments, **constants)


def _leaves_scale_to_torch(x: DynamicQuantizeArguments) -> bool:
    return x.granularity == "per_tensor" or x.x.numel() == 0


def _dynamic_call(x: Tensor, q: Tensor, scale: Tensor) -> tuple[tuple[int], tuple[Any, ...], dict[str, Any]]:
    """Grid, arguments and constants of the launch."""
    rows = rows_of(x)
    block_m, block_c, warps = tile_of_rows(min(rows.shape[1], _MAX_BLOCK_C))
    if rows.shape[0] <= _FEW_ROWS and block_c <= 2048:
        block_m, warps = max(1024 // block_c, 1), 4
    blocks = {"BLOCK_M": block_m, "BLOCK_C": block_c, "num_warps": warps}
    constants = {"MIN_SCALE": MIN_SCALE, "WHOLE": rows.shape[1] <= block_c, **blocks}
    grid = (cdiv(rows.shape[0], block_m),)
    return grid, (rows, q, scale, *rows.shape, rows.stride(0)), constants


def _quantize_cpu(x: QuantizeArguments) -> Tensor:
    check_positive_scale("quantize", "scale", x.scale)
    row_scale("quantize", "scale", x.scale, x.x.shape)
    return _quantize_decomposed(*x)


def _dynamic_quantize_cpu(x: DynamicQuantizeArguments) -> tuple[Tensor, Tensor]:
    return _dynamic_quantize_decomposed(*x)


QUANTIZE = declare(
    "quantize(Tensor x, Tensor scale, Tensor? zero_point=None) -> Tensor",
    QuantizeArguments,
    cpu=_quantize_cpu,
    cuda=quantize_triton,
    fake=QuantizeArguments.empty_result,
)
# ``alone`` is not decomposed in a compiled model.
DYNAMIC_QUANTIZE, DYNAMIC_QUANTIZE_ALONE = (
    declare(
        f"{name}(Tensor x, str granularity) -> (Tensor, Tensor)",
        DynamicQuantizeArguments,
        cpu=_dynamic_quantize_cpu,
        cuda=dynamic_quantize_triton,
        fake=DynamicQuantizeArguments.empty_result,
        warm_up=warm_up_dynamic_quantize if name.endswith(".alone") else None,
    )
    for name in ("dynamic_quantize", "dynamic_quantize.alone")
)
DEQUANTIZE = declare(
    "dequantize(Tensor q, Tensor scale, ScalarType dtype=float, Tensor? zero_point=None) -> Tensor",
    DequantizeArguments,
    everywhere=lambda x: dequantize_ref(*x),
    fake=lambda x: torch.empty_like(x.q, dtype=x.dtype),
)


def quantize(x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """Quantize with a given scale: ``clamp(round_half_even(x / scale) + zero_point, -127, 127)``.

    Args:
        x: ``(..., C)`` fp32, fp16 or bf16, any strides.
        scale: fp32, ``()`` or ``(1,)`` per tensor, or ``(*positions, 1)``, a trailing part of ``x.shape`` with the last
            dimension 1, for static per-token scales (QAttn's per-channel inputs).
        zero_point: ``()`` or ``(1,)`` int32, the integer that stands for 0; None for 0.

    Returns:
        int8, contiguous, of ``x``'s shape. Values beyond +-127 scale saturate.

    Raises:
        UnsupportedError: an unsupported dtype, or a GPU below sm_80.
        QFrameworkError: a scale that does not broadcast row-wise; on the CPU also one that is not positive.
    """
    return torch.ops.qframework.quantize(x, scale, zero_point)


def dynamic_quantize(x: Tensor, granularity: ActivationGranularity = "per_token") -> tuple[Tensor, Tensor]:
    """Quantize with a scale computed from the data, ``max|x| / 127`` of the tensor or of each row.

    Args:
        x: ``(..., C)`` fp32, fp16 or bf16, any strides.
        granularity: ``"per_tensor"`` or ``"per_token"``.

    Returns:
        int8 of ``x``'s shape, and the fp32 scale, ``()`` or ``(*x.shape[:-1], 1)``. A row of zeros gets a tiny positive
        scale; a row with NaN or infinity a scale that dequantizes to NaN.

    Raises:
        UnsupportedError: an unsupported granularity or dtype, or a GPU below sm_80.
    """
    q, scale = torch.ops.qframework.dynamic_quantize(x, granularity)
    return q, scale_of(scale, x)


def dequantize(
    q: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32, zero_point: Tensor | None = None
) -> Tensor:
    """``(q - zero_point) * scale`` in float32, rounded once to ``dtype``.

    ``scale`` broadcasts against the int8 tensor ``q``; ``zero_point`` is one int32 integer, None for 0.
    """
    return torch.ops.qframework.dequantize(q, scale, dtype, zero_point)


def _quantize_decomposed(x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """Contiguous as the operator's result: of a view in another order, the product would copy its operand by itself."""
    return quantize_ref(x, scale, zero_point).contiguous()


def _dynamic_quantize_decomposed(x: Tensor, granularity: ActivationGranularity) -> tuple[Tensor, Tensor]:
    q, scale = dynamic_quantize_ref(x, granularity)
    return q.contiguous(), scale.contiguous()


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.qframework.quantize.default: _quantize_decomposed,
    torch.ops.qframework.dynamic_quantize.default: _dynamic_quantize_decomposed,
    torch.ops.qframework.dequantize.default: dequantize_ref,
}
