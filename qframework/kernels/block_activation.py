"""Activation functions from blocks to blocks, and their gradients.

Formula (Jetfire, algorithm 2 and appendix A): everything between the two formats is float32 in registers::

    y = Q(f(x))        dx = Q(dy * f'(x))        x, dy = q * scale of their blocks

with f one of ``gelu, gelu_tanh, silu, relu``. Where Phi is the normal distribution's integral and phi its density::

    gelu'(x) = Phi(x) + x phi(x)        silu'(x) = s + x s (1 - s), s = 1 / (1 + exp(-x))

Layout: ``x (..., C)`` int8 in blocks of B x B, as in qframework/kernels/_blocks.py. A value is read once and written
once: 2 bytes for the forward pass, 3 for the backward pass. Reference: ``block_activation_ref``,
``block_activation_backward_ref``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qframework.errors import UnsupportedError
from qframework.kernels._block_operators import (
    Blocks,
    check_alike,
    empty_blocks,
    register_block_operator,
    rows_and_columns,
    tile_of,
    tile_origin,
    tiles_of,
)
from qframework.kernels._blocks import (
    dequantize_blocks_ref,
    load_tile,
    quantize_blocks_ref,
    quantize_tile,
    reciprocal,
    store_tile,
)
from qframework.kernels._launch import launch
from qframework.kernels._triton import tl, triton
from qframework.kernels.int8_linear_epilogue import gelu_of_magnitude

KINDS = ("gelu", "gelu_tanh", "silu", "relu")


def activation_ref(x: Tensor, kind: str) -> Tensor:
    """``f(x)`` of a float tensor."""
    if kind in ("gelu", "gelu_tanh"):
        return F.gelu(x, approximate="none" if kind == "gelu" else "tanh")
    return F.silu(x) if kind == "silu" else F.relu(x)


def activation_backward_ref(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    """``dy * f'(x)`` of float tensors."""
    if kind in ("gelu", "gelu_tanh"):
        return torch.ops.aten.gelu_backward(dy, x, approximate="none" if kind == "gelu" else "tanh")
    if kind == "silu":
        return torch.ops.aten.silu_backward(dy, x)
    return torch.ops.aten.threshold_backward(dy, x, 0)


def block_activation_ref(x: Tensor, x_scale: Tensor, kind: str, block_size: int) -> Blocks:
    """Reference of ``qframework::block_activation``."""
    return quantize_blocks_ref(activation_ref(dequantize_blocks_ref(x, x_scale, block_size), kind), block_size)


def block_activation_backward_ref(
    dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, kind: str, block_size: int
) -> Blocks:
    """Reference of ``qframework::block_activation_backward``."""
    gradient, value = (dequantize_blocks_ref(*each, block_size) for each in ((dy, dy_scale), (x, x_scale)))
    return quantize_blocks_ref(activation_backward_ref(gradient, value, kind), block_size)


@triton.jit
def activation(x, KIND: tl.constexpr):
    """f(x) of an fp32 tile."""
    if KIND == "gelu":
        value = gelu_of_magnitude(x, tl.abs(x))  # a block with infinity is lost anyway
    else:
        value, _ = activation_and_slope(x, KIND)
    return value


@triton.jit
def _sigmoid(x):
    """``1 / (1 + exp(-x))`` to within 2^-20 of itself, in two special-function instructions."""
    return reciprocal(1.0 + tl.exp2(-1.4426950408889634 * x))


@triton.jit
def activation_and_slope(x, KIND: tl.constexpr):
    """f(x) and f'(x) of an fp32 tile."""
    if KIND == "relu":
        value = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        slope = tl.where(x <= 0.0, 0.0, 1.0)
    elif KIND == "silu":
        s = _sigmoid(x)
        value = x * s
        slope = s + value * (1.0 - s)
    elif KIND == "gelu_tanh":  # 0.5 * (1 + tanh(u)) = sigmoid(2 u)
        square = x * x
        s = _sigmoid(x * (1.5957691216057308 + 0.071354816272600252 * square))
        value = x * s
        slope = s + value * (1.0 - s) * (1.5957691216057308 + 0.21406444881780076 * square)
    else:
        value, slope = _gelu_and_slope(x)
    return value, slope


@triton.jit
def _gelu_and_slope(x):
    """``x Phi(x)`` and ``Phi(x) + x phi(x)`` from one exponential e = exp(-x^2 / 2), with t = |x|.

    ``Phi(-t) - t phi(t) = e P(t)`` is the slope at -t, and 1 minus it the slope at t; ``Phi(-t)`` follows by adding
    ``t phi(t)``. P: a minimax fit of degree 7 on [0, 5.5], off by less than 4e-6 after the product with e: a two
    thousandth of a step of a gradient's block. The value is off by less than 2e-5.
    """
    t = tl.minimum(tl.abs(x), 5.5, propagate_nan=tl.PropagateNan.ALL)
    e = tl.exp2(-0.72134752044448170 * t * t)
    p = -1.6855749e-4 * t + 2.31907133e-3
    p = p * t - 1.39236101e-2
    p = p * t + 4.994005e-2
    p = p * t - 0.125826963
    p = p * t + 0.247959654
    p = p * t - 0.79766238
    p = p * t + 0.499996039
    below = e * p
    value = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - t * (below + 0.39894228040143268 * t * e)
    sign = x.to(tl.int32, bitcast=True) & -2147483648
    away = ((0.5 - below).to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    return value, 0.5 + away


@triton.jit
def _block_activation_kernel(
    x_ptr,  # (R, C) int8
    x_scale_ptr,  # (ceil(R / BLOCK), ceil(C / BLOCK)) fp32
    y_ptr,  # (R, C) int8
    y_scale_ptr,
    R,
    C,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    EVEN: tl.constexpr,
):
    """y = f(x). A program computes one tile."""
    row, column = tile_origin(TILE_M, TILE_N)
    x = load_tile(x_ptr, x_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    y, y_scale = quantize_tile(activation(x, KIND), BLOCK)
    store_tile(y_ptr, y_scale_ptr, y, y_scale, row, column, R, C, BLOCK, EVEN)


@triton.jit
def _block_activation_backward_kernel(
    dy_ptr,  # (R, C) int8
    dy_scale_ptr,  # (ceil(R / BLOCK), ceil(C / BLOCK)) fp32
    x_ptr,  # (R, C) int8
    x_scale_ptr,
    dx_ptr,  # (R, C) int8
    dx_scale_ptr,
    R,
    C,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    EVEN: tl.constexpr,
):
    """dx = dy * f'(x). A program computes one tile."""
    row, column = tile_origin(TILE_M, TILE_N)
    dy = load_tile(dy_ptr, dy_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    x = load_tile(x_ptr, x_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    _, slope = activation_and_slope(x, KIND)
    dx, dx_scale = quantize_tile(dy * slope, BLOCK)
    store_tile(dx_ptr, dx_scale_ptr, dx, dx_scale, row, column, R, C, BLOCK, EVEN)


def _block_activation_triton(x: Tensor, x_scale: Tensor, kind: str, block_size: int) -> Blocks:
    rows, columns = rows_and_columns(x)
    y, y_scale = empty_blocks(x, block_size)
    if x.numel() > 0:
        tile = tile_of(rows, columns, block_size)
        launch(_block_activation_kernel, tiles_of(x, tile))(
            x.contiguous(), x_scale.contiguous(), y, y_scale, rows, columns, KIND=kind, **tile
        )
    return y, y_scale


def _block_activation_backward_triton(
    dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, kind: str, block_size: int
) -> Blocks:
    rows, columns = rows_and_columns(dy)
    dx, dx_scale = empty_blocks(x, block_size)
    if x.numel() > 0:
        tile = tile_of(rows, columns, block_size)
        operands = (each.contiguous() for each in (dy, dy_scale, x, x_scale))
        launch(_block_activation_backward_kernel, tiles_of(x, tile))(
            *operands, dx, dx_scale, rows, columns, KIND=kind, **tile
        )
    return dx, dx_scale


def check_kind(operator: str, kind: str) -> None:
    """Raise UnsupportedError unless ``kind`` is one of KINDS."""
    if kind not in KINDS:
        raise UnsupportedError(f"{operator}: kind={kind!r} is unknown; accepted: {', '.join(KINDS)}")


def _check_forward(x: Tensor, x_scale: Tensor, kind: str, block_size: int) -> None:
    check_kind("block_activation", kind)
    check_alike("block_activation", block_size, x=(x, x_scale))


def _check_backward(dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, kind: str, block_size: int) -> None:
    check_kind("block_activation_backward", kind)
    check_alike("block_activation_backward", block_size, dy=(dy, dy_scale), x=(x, x_scale))


register_block_operator(
    "block_activation(Tensor x, Tensor x_scale, str kind, int block_size) -> (Tensor, Tensor)",
    _check_forward,
    block_activation_ref,
    _block_activation_triton,
    lambda x, x_scale, kind, block_size: empty_blocks(x, block_size),
)
register_block_operator(
    "block_activation_backward(Tensor dy, Tensor dy_scale, Tensor x, Tensor x_scale, str kind, int block_size)"
    " -> (Tensor, Tensor)",
    _check_backward,
    block_activation_backward_ref,
    _block_activation_backward_triton,
    lambda dy, dy_scale, x, x_scale, kind, block_size: empty_blocks(x, block_size),
)


def block_activation(x: Tensor, x_scale: Tensor, kind: str, block_size: int = 32) -> Blocks:
    """``f(x)`` from blocks to blocks (Jetfire, algorithm 2).

    Args:
        x: ``(..., C)`` int8.
        x_scale: ``(ceil(R / B), ceil(C / B))`` fp32.
        kind: ``"gelu"``, ``"gelu_tanh"``, ``"silu"`` or ``"relu"``.
        block_size: 32, 64 or 128.

    Returns:
        The same format: int8 like ``x``, contiguous, and its scale. Off by half a step of its block and, on a GPU,
        1e-6 of the activation itself.

    Raises:
        UnsupportedError: kind, block size, dtype, or a GPU below sm_80.
        QFrameworkError: a scale of another shape or on another device.
    """
    return torch.ops.qframework.block_activation(x, x_scale, kind, block_size)


def block_activation_backward(
    dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, kind: str, block_size: int = 32
) -> Blocks:
    """``dy * f'(x)`` from blocks to blocks; ``dy`` and its scale like ``x`` and its own. See ``block_activation``."""
    return torch.ops.qframework.block_activation_backward(dy, dy_scale, x, x_scale, kind, block_size)
