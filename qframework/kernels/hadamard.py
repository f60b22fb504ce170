"""Turn blocks of channels by a Hadamard matrix, alone or as the first part of dynamic quantization.

Formula, for each block of B channels, B a power of two, with the matrix of ``hadamard_matrix`` over sqrt(B)::

    y = (x * factor) H / sqrt(B) - offset        H_ij = (-1) ** popcount(i & j)        H H = B
    scale = max|y| / 127 of a row                q = clamp(round_half_even(y * (1 / scale)), -127, 127)

``x * factor`` is rounded to the dtype of x, since tensor cores multiply it by H; all else is float32. One large value
of a token is spread over B channels, so that it costs the others less precision (QuaRot, Ashkboos et al.,
arXiv:2404.00456). H is symmetric and its own inverse up to B, so that a linear layer takes the transform back by its
weight.
Layout: ``x (..., C)`` is treated as rows of C values, with one scale each.
Reference: ``hadamard_ref`` and ``hadamard_quantize_ref``. In a compiled model, ``hadamard`` is decomposed; where it and
the quantization behind it run on a GPU, the backend makes them ``hadamard_quantize``, which reads x once from memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qframework import numerics
from qframework.errors import UnsupportedError
from qframework.kernels.quantize import (
    DynamicQuantizeArguments,
    dynamic_quantize_triton,
    row_scale_of,
    warm_up_dynamic_quantize,
)
from qframework.kernels.runtime.checks import check_dtype, check_float_input, check_same_device, check_shape, rows_of
from qframework.kernels.runtime.chip import check_device
from qframework.kernels.runtime.launch import cdiv, launch, warm_up
from qframework.kernels.runtime.operator import LIBRARY, declare
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.rounding import round_to_int8
from qframework.kernels.runtime.triton import INTERPRET, tl, triton
from qframework.numerics import FLOAT_DTYPES, MIN_SCALE, exact_matmul

BLOCK_SIZES = (16, 32, 64)  # larger ones gain nothing more and cost more
_BLOCK_M = 16  # rows of a program
_GROUPS = 4  # blocks of channels that a program turns at a time


class HadamardArguments(NamedTuple):
    """The arguments of ``qframework::hadamard`` and ``qframework::hadamard_quantize``."""

    x: Tensor
    factor: Tensor
    offset: Tensor
    block_size: int

    def empty_like_x(self) -> Tensor:
        """An uninitialized result of ``hadamard``, contiguous."""
        return self.x.new_empty(self.x.shape)

    def empty_result(self) -> tuple[Tensor, Tensor]:
        """Uninitialized int8 values and scale, contiguous."""
        x = self.x
        return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)

    def check(self) -> None:
        """Raise QFrameworkError for dtype, shape, device or block size."""
        check_float_input("hadamard", self.x)
        channels = self.x.shape[-1]
        if self.block_size not in BLOCK_SIZES or channels % self.block_size:
            raise UnsupportedError(
                f"hadamard: block_size must be one of {', '.join(map(str, BLOCK_SIZES))} and divide the channels, got "
                f"{self.block_size} for {channels} channels"
            )
        check_same_device("hadamard", self.x, factor=self.factor, offset=self.offset)
        for name, each in (("factor", self.factor), ("offset", self.offset)):
            check_dtype("hadamard", name, each, FLOAT_DTYPES)
            check_shape("hadamard", name, each, (channels,))


def hadamard_matrix(size: int, device: torch.device | str = "cpu") -> Tensor:
    """The Hadamard matrix ``(size, size)`` of ones and minus ones, float32; ``size`` is a power of two up to 256."""
    i = torch.arange(size, device=device)
    parity = i[:, None] & i
    for shift in (4, 2, 1):  # of up to 8 bits
        parity = parity ^ (parity >> shift)
    return 1.0 - 2.0 * (parity & 1).float()


def turn_blocks(x: Tensor, block_size: int) -> Tensor:
    """``x H / sqrt(B)`` of each block of B channels of ``x (..., C)``, in its dtype, float32 or float64."""
    matrix = hadamard_matrix(block_size, x.device)
    blocks = x.unflatten(-1, (-1, block_size))
    turned = exact_matmul(blocks, matrix) if x.dtype == torch.float32 else blocks @ matrix.to(x.dtype)
    return turned.flatten(-2) * block_size**-0.5


def hadamard_ref(x: Tensor, factor: Tensor, offset: Tensor, block_size: int) -> Tensor:
    """Reference of ``qframework::hadamard``."""
    return _turned(x, factor, offset, block_size).to(x.dtype)


def hadamard_quantize_ref(x: Tensor, factor: Tensor, offset: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Reference of ``qframework::hadamard_quantize``."""
    turned = _turned(x, factor, offset, block_size)
    scale = numerics.dynamic_scale(turned, "per_token")
    return numerics.quantize(turned, scale), scale


def _turned(x: Tensor, factor: Tensor, offset: Tensor, block_size: int) -> Tensor:
    scaled = (x.float() * factor.float()).to(x.dtype).float()
    return turn_blocks(scaled, block_size) - offset.float()


@triton.jit
def _signs(BLOCK: tl.constexpr):
    """The Hadamard matrix ``(BLOCK, BLOCK)``, float32."""
    i = tl.arange(0, BLOCK)
    parity = i[:, None] & i[None, :]
    parity = parity ^ (parity >> 4)
    parity = parity ^ (parity >> 2)
    parity = parity ^ (parity >> 1)
    return 1.0 - 2.0 * (parity & 1).to(tl.float32)


@triton.jit
def _turned_tile(x_ptr, factor_ptr, offset_ptr, signs, rows, columns, mask, ROOT: tl.constexpr):
    """``y`` of a tile of blocks ``(R, BLOCK)``; ``rows (R, 1)`` are offsets of rows and ``columns`` of channels."""
    x = tl.load(x_ptr + rows + columns, mask=mask, other=0.0)
    factor = tl.load(factor_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    offset = tl.load(offset_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    scaled = (x.to(tl.float32) * factor).to(x.dtype)
    return tl.dot(scaled.to(signs.dtype), signs) * ROOT - offset


@triton.jit
def _hadamard_quantize_kernel(
    x_ptr,  # (M, C) float
    factor_ptr,  # (C,) float
    offset_ptr,  # (C,) float
    q_ptr,  # (M, C) int8
    scale_ptr,  # (M,) fp32
    M,
    C,
    stride_xm,
    ROOT: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    FLOAT32: tl.constexpr = False,
    OVERLAP: tl.constexpr = False,
):
    """Quantize BLOCK_M rows. Grid (cdiv(M, BLOCK_M),).

    Tiles have GROUPS blocks of each row, one below the other. The rows are turned twice, once for their scales: the
    second time they come from the cache, and the product costs little.
    """
    signs = _signs(BLOCK) if FLOAT32 else _signs(BLOCK).to(x_ptr.dtype.element_ty)
    at = tl.arange(0, BLOCK_M * GROUPS)
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + at // GROUPS
    channel = ((at % GROUPS) * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    wait_for_previous_kernel(OVERLAP)
    amax = tl.zeros((BLOCK_M * GROUPS,), tl.float32)
    nan = tl.zeros((BLOCK_M * GROUPS,), tl.int32)
    for start in range(0, C, BLOCK * GROUPS):
        columns = start + channel
        mask = (m < M)[:, None] & (columns < C)
        y = _turned_tile(x_ptr, factor_ptr, offset_ptr, signs, (m * stride_xm)[:, None], columns, mask, ROOT)
        amax = tl.maximum(amax, tl.max(tl.abs(y), 1))
        nan = nan | tl.max((y != y).to(tl.int32), 1)  # maximum ignores NaN, which must reach the scale
    amax = tl.max(tl.reshape(amax, (BLOCK_M, GROUPS)), 1)
    nan = tl.max(tl.reshape(nan, (BLOCK_M, GROUPS)), 1)
    scale = row_scale_of(amax, nan, MIN_SCALE)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(scale_ptr + row, scale, mask=row < M)
    inverse = tl.broadcast_to(tl.math.div_rn(1.0, scale)[:, None], (BLOCK_M, GROUPS))
    inverse = tl.reshape(inverse, (BLOCK_M * GROUPS,))[:, None]
    for start in range(0, C, BLOCK * GROUPS):
        columns = start + channel
        mask = (m < M)[:, None] & (columns < C)
        y = _turned_tile(x_ptr, factor_ptr, offset_ptr, signs, (m * stride_xm)[:, None], columns, mask, ROOT)
        tl.store(q_ptr + (m * C)[:, None] + columns, round_to_int8(y * inverse), mask=mask)


def hadamard_quantize_triton(x: HadamardArguments) -> tuple[Tensor, Tensor]:
    """``hadamard_quantize`` on a GPU; torch turns float32, which tensor cores would round."""
    check_device(x.x.device)
    if x.x.dtype == torch.float32:
        return dynamic_quantize_triton(DynamicQuantizeArguments(hadamard_ref(*x), "per_token"))
    q, scale = x.empty_result()
    if q.numel():
        grid, arguments, constants = _call(x, q, scale)
        launch(_hadamard_quantize_kernel, grid)(*arguments, **constants)
    return q, scale


def warm_up_hadamard_quantize(device: torch.device, x: HadamardArguments) -> Any:
    """Compile what ``hadamard_quantize_triton`` launches for such arguments, which may be on "meta"."""
    if x.x.dtype == torch.float32:
        return warm_up_dynamic_quantize(device, DynamicQuantizeArguments(x.empty_like_x(), "per_token"))
    q, scale = x.empty_result()
    if not q.numel():
        return None
    grid, arguments, constants = _call(x, q, scale)
    return warm_up(_hadamard_quantize_kernel, grid)(*arguments, **constants)


def _call(x: HadamardArguments, q: Tensor, scale: Tensor) -> tuple[tuple[int], tuple[Any, ...], dict[str, Any]]:
    """Grid, arguments and constants of the launch."""
    rows = rows_of(x.x)
    arguments = (rows, x.factor, x.offset, q, scale, rows.shape[0], rows.shape[1], rows.stride(0))
    sizes = {"BLOCK_M": _BLOCK_M, "GROUPS": _GROUPS, "BLOCK": x.block_size}
    # Triton's interpreter multiplies the bits of bfloat16
    constants = {"ROOT": x.block_size**-0.5, "MIN_SCALE": MIN_SCALE, **sizes, "FLOAT32": INTERPRET, "num_warps": 4}
    return (cdiv(rows.shape[0], _BLOCK_M),), arguments, constants


def _hadamard_quantize_cpu(x: HadamardArguments) -> tuple[Tensor, Tensor]:
    q, scale = hadamard_quantize_ref(*x)
    return q.contiguous(), scale.contiguous()


_SCHEMA = "(Tensor x, Tensor factor, Tensor offset, int block_size)"


def _hadamard_decomposed(x: Tensor, factor: Tensor, offset: Tensor, block_size: int) -> Tensor:
    return hadamard_ref(x, factor, offset, block_size).contiguous()  # as the operator's result


HADAMARD = declare(
    f"hadamard{_SCHEMA} -> Tensor",
    HadamardArguments,
    everywhere=lambda x: _hadamard_decomposed(*x),
    fake=HadamardArguments.empty_like_x,
)
HADAMARD_QUANTIZE = declare(
    f"hadamard_quantize{_SCHEMA} -> (Tensor, Tensor)",
    HadamardArguments,
    cpu=_hadamard_quantize_cpu,
    cuda=hadamard_quantize_triton,
    fake=HadamardArguments.empty_result,
    warm_up=warm_up_hadamard_quantize,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, factor, _, ctx.block_size = inputs
    ctx.save_for_backward(factor)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    """With respect to x: factor and offset are constants of a recipe."""
    (factor,) = ctx.saved_tensors
    turned = turn_blocks(grad.float(), ctx.block_size) * factor.float()
    return turned.to(grad.dtype), None, None, None


torch.library.register_autograd("qframework::hadamard", _backward, setup_context=_save, lib=LIBRARY)


def hadamard(x: Tensor, factor: Tensor, offset: Tensor, block_size: int) -> Tensor:
    """``(x * factor) H / sqrt(B) - offset`` for each block of B channels; differentiable in x.

    Args:
        x: ``(..., C)`` fp32, fp16 or bf16, any strides.
        factor: ``(C,)`` float, what each channel is multiplied by.
        offset: ``(C,)`` float, what is subtracted afterwards.
        block_size: 16, 32 or 64, a divisor of C.

    Returns:
        contiguous, of ``x``'s shape and dtype.

    Raises:
        UnsupportedError: an unsupported dtype or block size.
        QFrameworkError: ``factor`` or ``offset`` of another shape or on another device.
    """
    return torch.ops.qframework.hadamard(x, factor, offset, block_size)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {torch.ops.qframework.hadamard.default: _hadamard_decomposed}
