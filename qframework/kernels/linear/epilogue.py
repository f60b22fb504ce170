"""The epilogue of int8_linear's kernels: dequantize, bias, activation, residual, requantize."""

from __future__ import annotations

from typing import NamedTuple

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


class EpilogueForm(NamedTuple):
    """What an epilogue is compiled for."""

    a_scale: str  # of a: "tensor", "row" or "position"
    b_per_channel: bool
    activation: str
    has_bias: bool
    has_residual: bool = False
    out_scale: str = "none"  # "none", "tensor", "row", "position" or "channel"
    zero_point: bool = False


# Functions, not properties: Triton compiles again what calls a function that has changed.
@triton.constexpr_function
def _folded(form):
    """What is folded into scale and bias of the columns, where nothing comes between a product and its rounding.

    "share": what makes a result in [0, 1] for :func:`_byte_of_share`. "steps": ``1 / out_scale`` alone, where a zero
    point is added to rounded values. Else "".
    """
    of_columns = form.out_scale == "tensor" or (form.out_scale == "channel" and form.b_per_channel)
    if form.activation != "none" or form.has_residual or not of_columns:
        return ""
    return "steps" if form.zero_point else "share"


@triton.constexpr_function
def is_long(activation):
    """Whether an epilogue takes so many instructions that both halves of a tile should run the same code."""
    return activation in ("gelu", "gelu_tanh", "silu")


@triton.constexpr_function
def _is_by_tanh(form):
    """Whether :func:`_activate_to_int8` does the rest: a smooth activation, with nothing behind it but rounding.

    Its error is small beside the step of a whole tensor, but not beside that of channels or rows whose results all lie
    in the activation's negative tail.
    """
    return is_long(form.activation) and not form.has_residual and form.out_scale == "tensor"


@triton.constexpr_function
def _unit(form):
    """What :func:`_activate_to_int8` takes the activation's argument in multiples of."""
    return {"gelu": INVERSE_ROOT.value, "gelu_tanh": 1.0, "silu": 0.5}[form.activation]


@triton.constexpr_function
def before_gate(form):
    """The form of the columns of both products of :func:`finish_gated`."""
    return EpilogueForm(form.a_scale, form.b_per_channel, "none", form.has_bias)


@triton.jit
def load_columns(
    a_scale_ptr,
    b_scale_ptr,
    bias_ptr,
    out_scale_ptr,
    zero_point_ptr,
    start,  # the first column
    n,  # columns behind it: sums with ``start`` would take two registers for each address, kept from tile to tile
    N,
    FORM: tl.constexpr,
):
    """Scales and bias of columns, with scales of whole tensors and the zero point of the result.

    What is absent is an unused placeholder.
    """
    inside = n < N - start
    scale = tl.load(b_scale_ptr + start + n, mask=inside, other=0.0) if FORM.b_per_channel else tl.load(b_scale_ptr)
    bias = tl.load(bias_ptr + start + n, mask=inside, other=0.0) if FORM.has_bias else scale
    a_scale = tl.load(a_scale_ptr) if FORM.a_scale == "tensor" else 1.0
    out_scale = a_scale
    if FORM.out_scale == "channel":
        out_scale = tl.load(out_scale_ptr + start + n, mask=inside, other=1.0)
    elif FORM.out_scale == "tensor":
        out_scale = tl.load(out_scale_ptr)
    zero_point = tl.load(zero_point_ptr) if FORM.zero_point else scale
    return scale, bias, a_scale, out_scale, zero_point


@triton.jit
def fold_columns(loaded, FORM: tl.constexpr):
    """Scale and bias of a product's columns, ``1 / out_scale`` and the zero point, from :func:`load_columns`."""
    scale, bias, factor, out_scale, zero_point = loaded
    inverse = scale
    if FORM.out_scale == "channel" or FORM.out_scale == "tensor":
        inverse = _reciprocal(out_scale)
    FOLDED: tl.constexpr = _folded(FORM)
    if FOLDED == "share":
        inverse *= 1.0 / 254
        factor *= inverse
        bias = bias.to(tl.float32) * inverse + 0.5 if FORM.has_bias else 0.5
    elif FOLDED == "steps":
        factor *= inverse
        bias = bias.to(tl.float32) * inverse
    elif _is_by_tanh(FORM):
        factor *= _unit(FORM)
        bias = bias.to(tl.float32) * _unit(FORM)
    scale *= factor
    return scale, bias, inverse, zero_point


@triton.jit
def load_rows(
    a_scale_ptr,  # (PA,) fp32, PA is 1, M or the number of positions
    out_scale_ptr,  # (PO,), likewise
    m,  # rows
    M,
    PA,
    PO,
    FORM: tl.constexpr,
):
    """Scale and ``1 / out_scale`` of rows; an unused placeholder where they are not per row."""
    A_SCALE: tl.constexpr = FORM.a_scale
    OUT_SCALE: tl.constexpr = FORM.out_scale
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
    columns,  # of fold_columns
    rows,  # of load_rows
    residual,  # like acc, float
    out_dtype: tl.constexpr,
    FORM: tl.constexpr,
):
    """The epilogue: ``(rows, columns)`` of out_dtype, INT8 where out_scale is not "none"."""
    column_inverse, zero_point = columns[2], columns[3]
    row_inverse = rows[1]
    ACTIVATION: tl.constexpr = FORM.activation
    FOLDED: tl.constexpr = _folded(FORM)
    if FOLDED == "share":
        out = _requantize(acc, columns, rows, FORM)
    elif _is_by_tanh(FORM):
        out = _activate_to_int8(_dequantize(acc, columns, rows, FORM), column_inverse, zero_point, FORM)
    else:
        y = _dequantize(acc, columns, rows, FORM)
        y = activate(y, ACTIVATION, EXACT=out_dtype == tl.float32)
        if FORM.has_residual:
            y += residual.to(tl.float32)
        if FORM.out_scale == "none":
            out = y.to(out_dtype)
        else:
            if FOLDED == "":
                if FORM.out_scale == "tensor":
                    y = y * column_inverse
                elif FORM.out_scale == "channel":
                    y = y * column_inverse[None, :]
                else:
                    y = y * row_inverse[:, None]
            out = round_and_shift(y, zero_point) if FORM.zero_point else round_to_int8(y)
    return out


@triton.jit
def finish_gated(
    gate,  # (rows, columns) int32
    up,  # likewise
    gate_columns,  # of fold_columns, :func:`before_gate`
    up_columns,  # likewise
    rows,  # of load_rows
    out_scale_ptr,  # (1,) fp32, where there is one
    zero_point_ptr,  # (1,) int32, with zero_point
    out_dtype: tl.constexpr,
    FORM: tl.constexpr,
):
    """``activation(gate) * up`` of two products, rounded once to out_dtype, or to INT8 where out_scale is "tensor"."""
    ACTIVATION: tl.constexpr = FORM.activation
    y = activate(_dequantize(gate, gate_columns, rows, FORM), ACTIVATION, EXACT=False)
    y *= _dequantize(up, up_columns, rows, FORM)
    if FORM.out_scale != "none":
        y *= _reciprocal(tl.load(out_scale_ptr))
        out = round_and_shift(y, tl.load(zero_point_ptr)) if FORM.zero_point else round_to_int8(y)
    else:
        out = y.to(out_dtype)
    return out


@triton.jit
def _dequantize(acc, columns, rows, FORM: tl.constexpr):
    """The product with its scales and bias, in float32."""
    column_scale, bias = columns[0], columns[1]
    y = acc.to(tl.float32)
    if FORM.a_scale != "tensor":
        y *= rows[0][:, None]
    y = y * column_scale[None, :] if FORM.b_per_channel else y * column_scale
    if FORM.has_bias:
        y += bias.to(tl.float32)[None, :]
    return y


@triton.jit
def _requantize(acc, columns, rows, FORM: tl.constexpr):
    """The product in steps, rounded and saturated: scale and bias of :func:`fold_columns` are those of its share."""
    y = acc.to(tl.float32)
    if FORM.a_scale != "tensor":
        y *= rows[0][:, None]
    scale = columns[0][None, :] if FORM.b_per_channel else columns[0]
    share = columns[1][None, :] if FORM.has_bias else columns[1]
    return _byte_of_share(saturated_fma(y, scale, share))


@triton.jit
def _byte_of_share(share):
    """The integer from -127 to 127 of a share of this range in [0, 1], which is saturated for free.

    Its multiple of 254 is rounded where it is added to 1.5 * 2**23, and the lowest byte of that is the result. Unlike
    rounding.integers without a guard against ptxas, which would cost a twelfth: here bytes are stored in pairs or to
    global memory, which compile tests check.
    """
    return (share * 254.0 + (12582912.0 - 127.0)).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _activate_to_int8(x, inverse, zero_point, FORM: tl.constexpr):
    """``f(v)`` in steps, rounded and saturated, for ``x = v * _unit(FORM)``; ``inverse`` is of the step.

    The error before rounding is at most 2^-12 |v|, that of the hardware's tanh, and 5.5e-5 of gelu's fit. Twelve
    instructions for gelu, of which three for rounding.
    """
    if FORM.activation == "gelu":
        u = of_erf(x, saturated_product(x, x))
        steps = inverse * (HALF_ROOT / 254)
    elif FORM.activation == "gelu_tanh":
        u = x * (TANH_A + x * x * TANH_B)
        steps = inverse * (0.5 / 254)
    else:
        u = x
        steps = inverse * (1.0 / 254)
    middle = 0.5
    if FORM.zero_point:
        middle += zero_point.to(tl.float32) * (1.0 / 254)
    return _byte_of_share(saturated_fma(x * tanh(u) + x, steps, middle))
