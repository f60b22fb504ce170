"""The epilogue of int8_linear's kernels: dequantize, bias, activation, residual, requantize."""

from __future__ import annotations

from qframework.kernels.runtime.activation import (
    HALF_ROOT,
    INVERSE_ROOT,
    TANH_A,
    TANH_B,
    activate,
    of_erf,
    saturated_fma,
    saturated_product,
    tanh,
)
from qframework.kernels.runtime.rounding import round_and_shift, round_to_int8
from qframework.kernels.runtime.triton import tl, triton


@triton.constexpr_function
def _is_folded(b_per_channel, activation, has_residual, out_scale):
    """Whether ``1 / out_scale`` can be folded into the scale and bias of the columns: nothing comes in between."""
    return (
        activation == "none"
        and not has_residual
        and (out_scale == "tensor" or (out_scale == "channel" and b_per_channel))
    )


@triton.constexpr_function
def _is_by_tanh(activation, has_residual, out_scale):
    """Whether :func:`_activate_to_int8` does the rest: a smooth activation, with nothing behind it but rounding.

    Its error is small beside the step of a whole tensor, but not beside that of channels or rows whose results all lie
    in the activation's negative tail.
    """
    return activation in ("gelu", "gelu_tanh", "silu") and not has_residual and out_scale == "tensor"


@triton.constexpr_function
def _unit(activation):
    """What :func:`_activate_to_int8` takes the activation's argument in multiples of."""
    return {"gelu": INVERSE_ROOT.value, "gelu_tanh": 1.0, "silu": 0.5}[activation]


@triton.jit
def load_columns(
    a_scale_ptr,
    b_scale_ptr,
    bias_ptr,
    out_scale_ptr,
    zero_point_ptr,
    n,  # columns
    N,
    A_SCALE: tl.constexpr,  # "tensor", "row" or "position"
    B_PER_CHANNEL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OUT_SCALE: tl.constexpr,  # "none", "tensor", "row", "position" or "channel"
    ZERO_POINT: tl.constexpr,
):
    """Scale of the product, bias and ``1 / out_scale`` of columns, and the zero point of the result.

    What is absent is an unused placeholder.
    """
    scale = tl.load(b_scale_ptr + n, mask=n < N, other=0.0) if B_PER_CHANNEL else tl.load(b_scale_ptr)
    if A_SCALE == "tensor":
        scale *= tl.load(a_scale_ptr)
    bias = tl.load(bias_ptr + n, mask=n < N, other=0.0) if HAS_BIAS else scale
    inverse = scale
    if OUT_SCALE == "channel":
        inverse = _reciprocal(tl.load(out_scale_ptr + n, mask=n < N, other=1.0))
    elif OUT_SCALE == "tensor":
        inverse = _reciprocal(tl.load(out_scale_ptr))
    if _is_folded(B_PER_CHANNEL, ACTIVATION, HAS_RESIDUAL, OUT_SCALE):
        scale *= inverse
        bias = bias.to(tl.float32) * inverse
    elif _is_by_tanh(ACTIVATION, HAS_RESIDUAL, OUT_SCALE):
        scale *= _unit(ACTIVATION)
        bias = bias.to(tl.float32) * _unit(ACTIVATION)
    zero_point = tl.load(zero_point_ptr) if ZERO_POINT else scale
    return scale, bias, inverse, zero_point


@triton.jit
def load_rows(
    a_scale_ptr,  # (PA,) fp32, PA is 1, M or the number of positions
    out_scale_ptr,  # (PO,), likewise
    m,  # rows
    M,
    PA,
    PO,
    A_SCALE: tl.constexpr,
    OUT_SCALE: tl.constexpr,
):
    """Scale and ``1 / out_scale`` of rows; an unused placeholder where they are not per row."""
    scale = m if A_SCALE == "tensor" else _row_scale(a_scale_ptr, m, M, PA, A_SCALE)
    inverse = scale
    if OUT_SCALE == "row" or OUT_SCALE == "position":
        inverse = _reciprocal(_row_scale(out_scale_ptr, m, M, PO, OUT_SCALE))
    return scale, inverse


@triton.jit
def _row_scale(scale_ptr, m, M, P, KIND: tl.constexpr):
    """The scale of each row, or of its position, row modulo P."""
    return tl.load(scale_ptr + m, mask=m < M, other=1.0) if KIND == "row" else tl.load(scale_ptr + m % P)


@triton.jit
def _reciprocal(x):
    """``1 / x`` by approximation and one Newton step: a call to exact division would spill the accumulator."""
    y = 1.0 / x
    off = 1.0 - x * y
    return tl.where(tl.abs(off) < 0.5, y + y * off, y)  # for 0, infinity and subnormals the step would give NaN


@triton.jit
def finish(
    acc,  # (rows, columns) int32
    columns,  # of load_columns
    rows,  # of load_rows
    residual,  # like acc, float
    out_dtype: tl.constexpr,
    A_SCALE: tl.constexpr,
    B_PER_CHANNEL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OUT_SCALE: tl.constexpr,
    ZERO_POINT: tl.constexpr,
):
    """The epilogue: ``(rows, columns)`` of out_dtype, INT8 where OUT_SCALE is not "none"."""
    column_inverse, zero_point = columns[2], columns[3]
    row_inverse = rows[1]
    y = _dequantize(acc, columns, rows, A_SCALE, B_PER_CHANNEL, HAS_BIAS)
    if _is_by_tanh(ACTIVATION, HAS_RESIDUAL, OUT_SCALE):
        out = _activate_to_int8(y, column_inverse, zero_point, ACTIVATION, ZERO_POINT)
    else:
        y = activate(y, ACTIVATION, EXACT=out_dtype == tl.float32)
        if HAS_RESIDUAL:
            y += residual.to(tl.float32)
        if OUT_SCALE == "none":
            out = y.to(out_dtype)
        else:
            if not _is_folded(B_PER_CHANNEL, ACTIVATION, HAS_RESIDUAL, OUT_SCALE):
                if OUT_SCALE == "tensor":
                    y = y * column_inverse
                elif OUT_SCALE == "channel":
                    y = y * column_inverse[None, :]
                else:
                    y = y * row_inverse[:, None]
            out = round_and_shift(y, zero_point) if ZERO_POINT else round_to_int8(y)
    return out


@triton.jit
def finish_gated(
    gate,  # (rows, columns) int32
    up,  # likewise
    gate_columns,  # of load_columns for a plain float result
    up_columns,  # likewise
    rows,  # of load_rows
    out_scale_ptr,  # (1,) fp32, with QUANTIZES
    zero_point_ptr,  # (1,) int32, with ZERO_POINT
    out_dtype: tl.constexpr,
    A_SCALE: tl.constexpr,
    B_PER_CHANNEL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    QUANTIZES: tl.constexpr,
    ZERO_POINT: tl.constexpr,
):
    """``activation(gate) * up`` of two products, rounded once to out_dtype, or to INT8 with QUANTIZES."""
    y = activate(_dequantize(gate, gate_columns, rows, A_SCALE, B_PER_CHANNEL, HAS_BIAS), ACTIVATION, EXACT=False)
    y *= _dequantize(up, up_columns, rows, A_SCALE, B_PER_CHANNEL, HAS_BIAS)
    if QUANTIZES:
        y *= _reciprocal(tl.load(out_scale_ptr))
        out = round_and_shift(y, tl.load(zero_point_ptr)) if ZERO_POINT else round_to_int8(y)
    else:
        out = y.to(out_dtype)
    return out


@triton.jit
def _dequantize(acc, columns, rows, A_SCALE: tl.constexpr, B_PER_CHANNEL: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The product with its scales and bias, in float32."""
    column_scale, bias = columns[0], columns[1]
    y = acc.to(tl.float32)
    if A_SCALE != "tensor":
        y *= rows[0][:, None]
    y = y * column_scale[None, :] if B_PER_CHANNEL else y * column_scale
    if HAS_BIAS:
        y += bias.to(tl.float32)[None, :]
    return y


@triton.jit
def _activate_to_int8(x, inverse, zero_point, ACTIVATION: tl.constexpr, ZERO_POINT: tl.constexpr):
    """``f(v)`` in steps, rounded and saturated, for ``x = v * _unit(ACTIVATION)``; ``inverse`` is of the step.

    The error before rounding is at most 2^-12 |v|, that of the hardware's tanh, and 5.5e-5 of gelu's fit. Twelve
    instructions for gelu, of which three for rounding: saturation to [0, 1] is free, the multiple of 254 is rounded
    where it is added to 1.5 * 2**23, and its lowest byte is the result.
    """
    if ACTIVATION == "gelu":
        u = of_erf(x, saturated_product(x, x))
        steps = inverse * (HALF_ROOT / 254)
    elif ACTIVATION == "gelu_tanh":
        u = x * (TANH_A + x * x * TANH_B)
        steps = inverse * (0.5 / 254)
    else:
        u = x
        steps = inverse * (1.0 / 254)
    middle = 0.5
    if ZERO_POINT:
        middle += zero_point.to(tl.float32) * (1.0 / 254)
    y = saturated_fma(x * tanh(u) + x, steps, middle)
    # Unlike rounding.integers without a guard against ptxas, which would cost a twelfth: here bytes are stored in pairs
    # or to global memory, which compile tests check.
    return (y * 254.0 + (12582912.0 - 127.0)).to(tl.int32, bitcast=True).to(tl.int8)
