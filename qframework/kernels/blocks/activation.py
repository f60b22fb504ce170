"""Activation functions on INT8 blocks, and their gradients.

Formula (Jetfire, algorithm 2 and appendix A): everything between the two formats is float32 in registers::

    y = Q(f(x))        dx = Q(dy * f'(x))        x, dy = q * scale of their blocks

with f one of ``gelu, gelu_tanh, silu, relu``. Where Phi is the normal distribution's integral and phi its density::

    gelu'(x) = Phi(x) + x phi(x)        silu'(x) = s + x s (1 - s), s = 1 / (1 + exp(-x))

Layout: ``x (..., C)`` int8 in blocks of B x B, as in format.py. Memory traffic per value is 2 bytes in the forward
pass and 3 in the backward pass. References: ``block_activation_ref``, ``block_activation_backward_ref``.
"""

from __future__ import annotations

from functools import partial
from math import e, log2, pi, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qframework.errors import UnsupportedError
from qframework.kernels.blocks.arithmetic import reciprocal
from qframework.kernels.blocks.format import DEFAULT_BLOCK_SIZE, BlockSize, quantize_blocks_ref
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
    check_alike,
    dequantized,
    empty_blocks,
    launch_by_tiles,
    prefetch_tile,
    rows_and_columns,
    tensors_of,
    tile_of,
    tile_origin,
)
from qframework.kernels.runtime.activation import (
    HALF_ROOT,
    INVERSE_ROOT,
    ROOT,
    TANH_A,
    TANH_B,
    of_erf,
    saturated_product,
    tanh,
)
from qframework.kernels.runtime.operator import declare
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton

KINDS = ("gelu", "gelu_tanh", "silu", "relu")

_FALL = tl.constexpr(-16 * log2(e))  # exp(-x^2 / 2) as a power of two
_DENSITY = tl.constexpr(log2(2 * ROOT / sqrt(2 * pi)))  # of 2 x phi(x), without its factors x / sqrt(32) and exp()


class BlockActivationArguments(NamedTuple):
    """The arguments of ``qframework::block_activation``."""

    x: Tensor
    x_scale: Tensor
    kind: str
    block_size: BlockSize

    def empty_result(self) -> Blocks:
        """Allocate y in blocks."""
        return empty_blocks(self.x, self.block_size)

    def check(self) -> None:
        """Raise QFrameworkError for an unknown kind and for invalid operands."""
        check_activation("block_activation", self)


class BlockActivationBackwardArguments(NamedTuple):
    """The arguments of ``qframework::block_activation_backward``."""

    dy: Tensor
    dy_scale: Tensor
    x: Tensor
    x_scale: Tensor
    kind: str
    block_size: BlockSize

    def empty_result(self) -> Blocks:
        """Allocate dx in blocks."""
        return empty_blocks(self.x, self.block_size)

    def check(self) -> None:
        """Raise QFrameworkError for an unknown kind and for invalid operands."""
        check_activation("block_activation_backward", self)


def check_activation(operator: str, arguments: Any) -> None:
    """Check the kind and the operands of an activation or of its gradient."""
    check_kind(operator, arguments.kind)
    check_alike(operator, arguments)


def check_kind(operator: str, kind: str) -> None:
    """Raise UnsupportedError unless ``kind`` is one of KINDS."""
    if kind not in KINDS:
        raise UnsupportedError(f"{operator}: kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")


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
    (x,) = dequantized(args)
    return quantize_blocks_ref(activation_ref(x, args.kind), args.block_size)


def block_activation_backward_ref(args: BlockActivationBackwardArguments) -> Blocks:
    """Reference of ``qframework::block_activation_backward``."""
    dy, x = dequantized(args)
    return quantize_blocks_ref(activation_backward_ref(dy, x, args.kind), args.block_size)


@triton.jit
def activation(q, scale, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Compute f(q * scale) for whole steps ``q`` (M, N) fp32 as a pair ``(value, factor per block)`` to be multiplied.

    With h = x / 2, gelu and silu are ``h + h tanh(u)`` for a u that is odd in x. The value is computed from a multiple
    of x; the remaining constant is the factor. The error of ``tanh`` amounts to at most 2^-12 |x|, which is 3 percent
    of a step where a block's largest value is positive.
    """
    if KIND == "relu":
        value = tl.maximum(q, 0.0)
        factor = scale
    elif KIND == "gelu":
        x = times_blocks(q, scale * INVERSE_ROOT, BLOCK)
        value = x * tanh(of_erf(x, saturated_product(x, x))) + x
        factor = HALF_ROOT
    else:
        value = q * tanh(_of_sigmoid(q, scale, KIND, BLOCK)) + q
        factor = 0.5 * scale
    return value, factor


@triton.jit
def _of_sigmoid(q, scale, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """``u`` of silu and of gelu_tanh, with ``tanh(u) = 2 s - 1``; powers of the scale are computed once per block."""
    if KIND == "silu":
        u = times_blocks(q, 0.5 * scale, BLOCK)
    else:
        scale = tl.minimum(scale, 64.0)  # tanh saturates at one step of 64 already, and powers of 64 are finite
        a, b = spread_blocks(scale * TANH_A, BLOCK), spread_blocks(scale * TANH_B * scale * scale, BLOCK)
        u = q * (a + q * q * b)
    return u


@triton.jit
def gradient(g, q, scale, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """``g f'(q * scale)`` for whole steps ``q`` (M, N) fp32 as a pair ``(value, factor per block)`` to be multiplied.

    gelu uses ``2 (Phi + x phi) = 1 + tanh(u) + 2 x phi``, whose error is that of ``tanh``: 2^-12 of g, 3 percent of a
    step. A derivative of tanh would have x times that error, so the other kinds use exponentials.
    """
    factor = 1.0 + (scale - scale)  # NaN where the scale is not finite
    if KIND == "relu":
        value = tl.where(q <= 0.0, 0.0, g)
    elif KIND == "gelu":
        x = times_blocks(q, scale * INVERSE_ROOT, BLOCK)
        square = x * x
        t = tanh(of_erf(x, tl.minimum(square, 1.0)))
        value = g * (x * tl.exp2(square * _FALL + _DENSITY) + t) + g
        factor *= 0.5
    else:
        value = g * _sigmoid_slope(times_blocks(q, scale, BLOCK), KIND)
    return value, factor


@triton.jit
def _sigmoid_slope(x, KIND: tl.constexpr):
    """f'(x) for ``f = x s`` with s = sigmoid(v): ``s + s (1 - s) x v'``, to within 1e-6."""
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
    prefetch_tile(x_ptr, row + ahead, column, R, C, BLOCK, TILE_M, TILE_N)
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
    # Loading x first saves two registers.
    x, x_scale = load_blocks(x_ptr, x_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    dy, dy_scale = load_blocks(dy_ptr, dy_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    prefetch_tile(dy_ptr, row + ahead, column, R, C, BLOCK, TILE_M, TILE_N)
    prefetch_tile(x_ptr, row + ahead, column, R, C, BLOCK, TILE_M, TILE_N)
    value, factor = gradient(dy, x, x_scale, KIND, BLOCK)
    dx, dx_scale = quantize_scaled_tile(value, factor * dy_scale, BLOCK)
    store_tile(dx_ptr, dx_scale_ptr, dx, dx_scale, row, column, R, C, BLOCK, EVEN)


def activation_triton(kernel: Any, args: Any, values: int = FEW_VALUES) -> Any:
    """An activation, or the gradient of one, on a GPU: its result in blocks. ``values``: per thread."""
    result = args.empty_result()
    operands = tensors_of(args)
    sizes = rows_and_columns(operands[0])
    if operands[0].numel() > 0:
        launch_by_tiles(kernel, operands, result, tile_of(*sizes, args.block_size, values), KIND=args.kind)
    return result


BLOCK_ACTIVATION = declare(
    "block_activation(Tensor x, Tensor x_scale, str kind, int[2] block_size) -> (Tensor, Tensor)",
    BlockActivationArguments,
    cpu=block_activation_ref,
    cuda=partial(activation_triton, _block_activation_kernel),
    fake=BlockActivationArguments.empty_result,
)
BLOCK_ACTIVATION_BACKWARD = declare(
    "block_activation_backward(Tensor dy, Tensor dy_scale, Tensor x, Tensor x_scale, str kind, int[2] block_size)"
    " -> (Tensor, Tensor)",
    BlockActivationBackwardArguments,
    cpu=block_activation_backward_ref,
    cuda=partial(activation_triton, _block_activation_backward_kernel),
    fake=BlockActivationBackwardArguments.empty_result,
)


def block_activation(x: Tensor, x_scale: Tensor, kind: str, block_size: BlockSize = DEFAULT_BLOCK_SIZE) -> Blocks:
    """``f(x)`` from blocks to blocks (Jetfire, algorithm 2).

    Args:
        x: ``(..., C)`` int8.
        x_scale: ``(ceil(R / B), ceil(C / B))`` fp32.
        kind: ``"gelu"``, ``"gelu_tanh"``, ``"silu"`` or ``"relu"``.
        block_size: 32, 64, 128, (32, 128), (1, 128) or (1, 256).

    Returns:
        ``y`` int8 like ``x``, contiguous, and its scale like ``x_scale``. The error is at most half a step of its block
        and, on a GPU, another 2^-12 of ``x``: 3 percent of a step where no value of ``x`` exceeds the results.

    Raises:
        UnsupportedError: an unknown kind or block size, a dtype, or a GPU below sm_80.
        QFrameworkError: a scale of another shape or on another device.
    """
    return torch.ops.qframework.block_activation(x, x_scale, kind, block_size)


def block_activation_backward(
    dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, kind: str, block_size: BlockSize = DEFAULT_BLOCK_SIZE
) -> Blocks:
    """``dy * f'(x)`` from blocks to blocks. ``dy`` has the shape and format of ``x``, see ``block_activation``."""
    return torch.ops.qframework.block_activation_backward(dy, dy_scale, x, x_scale, kind, block_size)
