"""Activation functions on INT8 blocks, and their gradients.

Formula (Jetfire, algorithm 2 and appendix A): everything between the two formats is float32 in registers::

    y = Q(f(x))        dx = Q(dy * f'(x))        x, dy = q * scale of their blocks

with f one of ``gelu, gelu_tanh, silu, relu``. Where Phi is the normal distribution's integral and phi its density::

    gelu'(x) = Phi(x) + x phi(x)        silu'(x) = s + x s (1 - s), s = 1 / (1 + exp(-x))

Layout: ``x (..., C)`` int8 in blocks of B x B, as in format.py. A value is read once and written
once: 2 bytes for the forward pass, 3 for the backward pass. Reference: ``block_activation_ref``,
``block_activation_backward_ref``.
"""

from __future__ import annotations

from math import e, log2, pi, sqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qframework.errors import UnsupportedError
from qframework.kernels.blocks.arithmetic import reciprocal, saturated_product, tanh
from qframework.kernels.blocks.format import BlockSize, dequantize_blocks_ref, quantize_blocks_ref
from qframework.kernels.blocks.primitives import (
    load_blocks,
    quantize_scaled_tile,
    spread_blocks,
    store_tile,
    times_blocks,
)
from qframework.kernels.blocks.tiles import (
    FEW_VALUES,
    Blocks,
    ask_for_tile,
    check_alike,
    empty_blocks,
    launch_by_tiles,
    tile_origin,
)
from qframework.kernels.runtime.operator import declare
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton

KINDS = ("gelu", "gelu_tanh", "silu", "relu")

# erf(x / sqrt(2)) is about tanh(a x + b x^3 + c x^5), to within 4e-5; beyond x^2 = 32 both are 1. A minimax fit.
_A, _B, _C = 0.797717507, 0.0367987671, -0.000315922155
# Kernels have it of x / sqrt(32), whose square saturates at 1.
_ROOT = 32**0.5
_INVERSE_ROOT, _HALF_ROOT = tl.constexpr(1 / _ROOT), tl.constexpr(_ROOT / 2)
_ROOT_A, _ROOT_B, _ROOT_C = (tl.constexpr(each) for each in (_A * _ROOT, _B * _ROOT**3, _C * _ROOT**5))
_FALL = tl.constexpr(-16 * log2(e))  # exp(-x^2 / 2) as a power of two
_DENSITY = tl.constexpr(log2(2 * _ROOT / sqrt(2 * pi)))  # 2 x phi(x) at its middle, a factor x / sqrt(32) apart
_TANH_A, _TANH_B = tl.constexpr(0.79788456080286536), tl.constexpr(0.035677408136300125)  # those of gelu_tanh


class BlockActivationArguments(NamedTuple):
    """The arguments of ``qframework::block_activation``."""

    x: Tensor
    x_scale: Tensor
    kind: str
    block_size: BlockSize

    def empty_result(self) -> Blocks:
        """y in blocks before it is computed."""
        return empty_blocks(self.x, self.block_size)

    def check(self) -> None:
        """Raise QFrameworkError for an unknown kind and for operands that do not fit."""
        check_kind("block_activation", self.kind)
        check_alike("block_activation", self.block_size, x=(self.x, self.x_scale))


class BlockActivationBackwardArguments(NamedTuple):
    """The arguments of ``qframework::block_activation_backward``."""

    dy: Tensor
    dy_scale: Tensor
    x: Tensor
    x_scale: Tensor
    kind: str
    block_size: BlockSize

    def empty_result(self) -> Blocks:
        """dx in blocks before it is computed."""
        return empty_blocks(self.x, self.block_size)

    def check(self) -> None:
        """Raise QFrameworkError for an unknown kind and for operands that do not fit."""
        operands = {"dy": (self.dy, self.dy_scale), "x": (self.x, self.x_scale)}
        check_kind("block_activation_backward", self.kind)
        check_alike("block_activation_backward", self.block_size, **operands)


def check_kind(operator: str, kind: str) -> None:
    """Raise UnsupportedError unless ``kind`` is one of KINDS."""
    if kind not in KINDS:
        raise UnsupportedError(f"{operator}: kind={kind!r} is unknown; accepted: {', '.join(KINDS)}")


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


def block_activation_ref(args: BlockActivationArguments) -> Blocks:
    """Reference of ``qframework::block_activation``."""
    x = dequantize_blocks_ref(args.x, args.x_scale, args.block_size)
    return quantize_blocks_ref(activation_ref(x, args.kind), args.block_size)


def block_activation_backward_ref(args: BlockActivationBackwardArguments) -> Blocks:
    """Reference of ``qframework::block_activation_backward``."""
    dy = dequantize_blocks_ref(args.dy, args.dy_scale, args.block_size)
    x = dequantize_blocks_ref(args.x, args.x_scale, args.block_size)
    return quantize_blocks_ref(activation_backward_ref(dy, x, args.kind), args.block_size)


@triton.jit
def activation(q, scale, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """f(q * scale) of whole steps ``q`` (M, N) fp32 as ``(value, factor of each block)``, their product.

    With h = x / 2, gelu and silu are ``h + h tanh(u)``, u odd in x: a multiple of x and its tanh suffice, and the rest
    is the factor. What ``tanh`` is off by comes to at most 2^-12 |x|, 3 percent of a step where a block's largest
    value is positive.
    """
    if KIND == "relu":
        value = tl.maximum(q, 0.0)
        factor = scale
    elif KIND == "gelu":
        x = times_blocks(q, scale * _INVERSE_ROOT, BLOCK)
        value = x * tanh(_of_erf(x, saturated_product(x, x))) + x
        factor = _HALF_ROOT
    else:
        value = q * tanh(_of_sigmoid(q, scale, KIND, BLOCK)) + q
        factor = 0.5 * scale
    return value, factor


@triton.jit
def _of_erf(x, square):
    """``u`` of gelu, ``tanh(u) = 2 Phi - 1``, from x / sqrt(32) and its square, at most 1."""
    return x * (_ROOT_A + square * (_ROOT_B + square * _ROOT_C))


@triton.jit
def _of_sigmoid(q, scale, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """``u`` of silu and of gelu_tanh, ``tanh(u) = 2 s - 1``, with powers of the scale in numbers of the block."""
    if KIND == "silu":
        u = times_blocks(q, 0.5 * scale, BLOCK)
    else:
        scale = tl.minimum(scale, 64.0)  # one step is then as far from zero as infinity is, and powers are finite
        a, b = spread_blocks(scale * _TANH_A, BLOCK), spread_blocks(scale * _TANH_B * scale * scale, BLOCK)
        u = q * (a + q * q * b)
    return u


@triton.jit
def gradient(g, q, scale, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """``g f'(q * scale)`` of whole steps ``q`` (M, N) fp32 as ``(value, factor of each block)``, their product.

    gelu: ``2 (Phi + x phi) = 1 + tanh(u) + 2 x phi``, off by what ``tanh`` is, 2^-12 of g: 3 percent of a step. That
    of tanh's own derivative would be off by x times as much, so the others are made of exponentials.
    """
    factor = 1.0 + (scale - scale)  # NaN where no scale is finite
    if KIND == "relu":
        value = tl.where(q <= 0.0, 0.0, g)
    elif KIND == "gelu":
        x = times_blocks(q, scale * _INVERSE_ROOT, BLOCK)
        square = x * x
        t = tanh(_of_erf(x, tl.minimum(square, 1.0)))
        value = g * (x * tl.exp2(square * _FALL + _DENSITY) + t) + g
        factor *= 0.5
    else:
        value = g * _sigmoid_slope(times_blocks(q, scale, BLOCK), KIND)
    return value, factor


@triton.jit
def _sigmoid_slope(x, KIND: tl.constexpr):
    """f'(x) of ``f = x s``, s = sigmoid(v), to within 1e-6: ``s + s (1 - s) x v'``."""
    if KIND == "silu":
        v = x
        rise = x
    else:
        square = x * x
        v = x * (1.5957691216057308 + 0.071354816272600252 * square)
        rise = x * (1.5957691216057308 + 0.21406444881780076 * square)
    s = reciprocal(1.0 + tl.exp2(-1.4426950408889634 * v))
    return s + s * (rise - rise * s)


@triton.jit
def _block_activation_kernel(
    x_ptr,  # (R, C) int8
    x_scale_ptr,  # (ceil(R / BLOCK[0]), ceil(C / BLOCK[1])) fp32
    y_ptr,  # (R, C) int8
    y_scale_ptr,
    R,
    C,
    ahead,  # rows, see ``rows_ahead``
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """y = f(x). A program computes one tile."""
    wait_for_previous_kernel(OVERLAP)
    row, column = tile_origin(TILE_M, TILE_N)
    q, scale = load_blocks(x_ptr, x_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    ask_for_tile(x_ptr, row + ahead, column, R, C, BLOCK, TILE_M, TILE_N)
    value, factor = activation(q, scale, KIND, BLOCK)
    y, y_scale = quantize_scaled_tile(value, factor, BLOCK)
    store_tile(y_ptr, y_scale_ptr, y, y_scale, row, column, R, C, BLOCK, EVEN)


@triton.jit
def _block_activation_backward_kernel(
    dy_ptr,  # (R, C) int8
    dy_scale_ptr,  # (ceil(R / BLOCK[0]), ceil(C / BLOCK[1])) fp32
    x_ptr,  # (R, C) int8
    x_scale_ptr,
    dx_ptr,  # (R, C) int8
    dx_scale_ptr,
    R,
    C,
    ahead,  # rows, see ``rows_ahead``
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """dx = dy * f'(x). A program computes one tile."""
    wait_for_previous_kernel(OVERLAP)
    row, column = tile_origin(TILE_M, TILE_N)
    # In this order: eight bytes of registers fewer.
    x, x_scale = load_blocks(x_ptr, x_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    dy, dy_scale = load_blocks(dy_ptr, dy_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    ask_for_tile(dy_ptr, row + ahead, column, R, C, BLOCK, TILE_M, TILE_N)
    ask_for_tile(x_ptr, row + ahead, column, R, C, BLOCK, TILE_M, TILE_N)
    value, factor = gradient(dy, x, x_scale, KIND, BLOCK)
    dx, dx_scale = quantize_scaled_tile(value, factor * dy_scale, BLOCK)
    store_tile(dx_ptr, dx_scale_ptr, dx, dx_scale, row, column, R, C, BLOCK, EVEN)


def block_activation_triton(args: BlockActivationArguments) -> Blocks:
    """``block_activation`` on a GPU."""
    result: Blocks = launch_by_tiles(_block_activation_kernel, args, FEW_VALUES)
    return result


def block_activation_backward_triton(args: BlockActivationBackwardArguments) -> Blocks:
    """``block_activation_backward`` on a GPU."""
    result: Blocks = launch_by_tiles(_block_activation_backward_kernel, args, FEW_VALUES)
    return result


BLOCK_ACTIVATION = declare(
    "block_activation(Tensor x, Tensor x_scale, str kind, int[2] block_size) -> (Tensor, Tensor)",
    BlockActivationArguments,
    cpu=block_activation_ref,
    cuda=block_activation_triton,
    fake=BlockActivationArguments.empty_result,
)
BLOCK_ACTIVATION_BACKWARD = declare(
    "block_activation_backward(Tensor dy, Tensor dy_scale, Tensor x, Tensor x_scale, str kind, int[2] block_size)"
    " -> (Tensor, Tensor)",
    BlockActivationBackwardArguments,
    cpu=block_activation_backward_ref,
    cuda=block_activation_backward_triton,
    fake=BlockActivationBackwardArguments.empty_result,
)


def block_activation(x: Tensor, x_scale: Tensor, kind: str, block_size: BlockSize = 32) -> Blocks:
    """``f(x)`` from blocks to blocks (Jetfire, algorithm 2).

    Args:
        x: ``(..., C)`` int8.
        x_scale: ``(ceil(R / B), ceil(C / B))`` fp32.
        kind: ``"gelu"``, ``"gelu_tanh"``, ``"silu"`` or ``"relu"``.
        block_size: 32, 64, 128, (32, 128) or (1, 128).

    Returns:
        The same format: int8 like ``x``, contiguous, and its scale. Off by half a step of its block and, on a GPU,
        2^-12 of ``x``: 3 percent of a step at most where no value of ``x`` is larger than those of the result.

    Raises:
        UnsupportedError: kind, block size, dtype, or a GPU below sm_80.
        QFrameworkError: a scale of another shape or on another device.
    """
    return torch.ops.qframework.block_activation(x, x_scale, kind, block_size)


def block_activation_backward(
    dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, kind: str, block_size: BlockSize = 32
) -> Blocks:
    """``dy * f'(x)`` from blocks to blocks; ``dy`` and its scale like ``x`` and its own. See ``block_activation``."""
    return torch.ops.qframework.block_activation_backward(dy, dy_scale, x, x_scale, kind, block_size)
