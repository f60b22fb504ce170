"""Depthwise convolution of images whose channels lie side by side, with activation and quantization in one pass.

Formula for a pixel (h, w) and a channel c of an image, with K x K taps, stride 1 and K // 2 zeros around the image::

    v = sum over i, j of x[h + i - K // 2, w + j - K // 2, c] * weight[i, j, c] + bias[c]        y = activation(v)

``depthwise`` returns ``y`` in the dtype of x, ``depthwise_quantize``::

    q = clamp(round_half_even(y * (1 / scale)), -127, 127)

All of it is float32. Layout: ``x (N, H, W, C)``, as tokens of an image lie in memory, and ``weight (K, K, C)``. A
program goes down the image with a strip of columns: it reads each row of pixels once, adds its products to the K rows
of results that need it, which are in registers, and finishes one of them. References: ``depthwise_ref`` and
``depthwise_quantize_ref``. A scale for each pixel was tried: the kernel that keeps all channels of a pixel takes more
time than an INT8 product behind it saves (docs/experiments.md, "Depthwise convolutions on Hopper").
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from qframework import numerics
from qframework.errors import QFrameworkError, UnsupportedError, either
from qframework.kernels.runtime.activation import ACTIVATIONS, activate, apply_activation
from qframework.kernels.runtime.checks import (
    check_dtype,
    check_float_input,
    check_one_scale,
    check_positive_scale,
    check_same_device,
    check_shape,
)
from qframework.kernels.runtime.chip import capability_of, check_device, chip_of
from qframework.kernels.runtime.launch import cdiv, launch, power_of_2, warm_up
from qframework.kernels.runtime.operator import declare
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.rounding import round_to_int8
from qframework.kernels.runtime.triton import tl, triton
from qframework.numerics import FLOAT_DTYPES

TAPS = (3, 5, 7, 9)
"""Widths of windows. Results of more rows would not fit into registers."""
_PROGRAMS = 12  # that a multiprocessor has registers for


class DepthwiseArguments(NamedTuple):
    """The arguments of ``qframework::depthwise``."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    activation: str

    def empty_result(self) -> Tensor:
        """Uninitialized values of the dtype of x, contiguous."""
        return self.x.new_empty(self.x.shape)

    def check(self) -> None:
        """Raise QFrameworkError for dtype, shape, device or activation."""
        check_depthwise("depthwise", self)


class DepthwiseQuantizeArguments(NamedTuple):
    """The arguments of ``qframework::depthwise_quantize``; ``scale`` is fp32 of one element."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    activation: str
    scale: Tensor

    def empty_result(self) -> Tensor:
        """Uninitialized int8 values, contiguous."""
        return self.x.new_empty(self.x.shape, dtype=torch.int8)

    def check(self) -> None:
        """Raise QFrameworkError for dtype, shape, device or activation; the implementations check the scale's value."""
        check_depthwise("depthwise_quantize", self)
        check_one_scale("depthwise_quantize", self.x, self.scale)


class Operands(Protocol):
    """What the arguments of every depthwise convolution have."""

    @property
    def x(self) -> Tensor: ...
    @property
    def weight(self) -> Tensor: ...
    @property
    def bias(self) -> Tensor | None: ...
    @property
    def activation(self) -> str: ...


def check_depthwise(operator: str, arguments: Operands) -> None:
    """Raise QFrameworkError for dtype, shape, device or activation."""
    x, weight, bias = arguments.x, arguments.weight, arguments.bias
    check_float_input(operator, x)
    check_same_device(operator, x, weight=weight, bias=bias)
    check_dtype(operator, "weight", weight, FLOAT_DTYPES)
    if arguments.activation not in ACTIVATIONS:
        raise UnsupportedError(f"{operator}: activation must be {either(ACTIVATIONS)}, got {arguments.activation!r}")
    if x.ndim != 4 or not x.shape[-1]:
        raise QFrameworkError(f"{operator}: x must have shape (N, H, W, C) with channels, got {tuple(x.shape)}")
    check_shape(operator, "weight", weight, *((taps, taps, x.shape[-1]) for taps in TAPS))
    if bias is not None:
        check_dtype(operator, "bias", bias, FLOAT_DTYPES)
        check_shape(operator, "bias", bias, (x.shape[-1],))


def _activated(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """``y`` in float32."""
    windows = weight.float().permute(2, 0, 1)[:, None]
    bias = None if bias is None else bias.float()
    y = F.conv2d(x.float().permute(0, 3, 1, 2), windows, bias, padding=weight.shape[0] // 2, groups=x.shape[-1])
    return apply_activation(y.permute(0, 2, 3, 1), activation)


def depthwise_ref(x: DepthwiseArguments) -> Tensor:
    """Reference of ``qframework::depthwise``."""
    return _activated(*x).to(x.x.dtype).contiguous()


def depthwise_quantize_ref(x: DepthwiseQuantizeArguments) -> Tensor:
    """Reference of ``qframework::depthwise_quantize``."""
    return numerics.quantize(_activated(*x[:4]), x.scale.reshape(())).contiguous()


@triton.jit
def _depthwise_kernel(
    x_ptr,  # (N, H, W, C) float
    weight_ptr,  # (K, K, C) float
    bias_ptr,  # (C,) float, with HAS_BIAS
    out_ptr,  # (N, H, W, C) float, or int8 with QUANTIZES
    scale_ptr,  # (1,) fp32, with QUANTIZES
    H,
    W,
    C,
    stride_xn,
    stride_xh,
    stride_xw,
    rows_of_strip,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    QUANTIZES: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """A strip of BLOCK_W columns. Grid (blocks of channels * strips of columns * strips of rows * N,)."""
    wait_for_previous_kernel(OVERLAP)
    blocks, columns, strips = tl.cdiv(C, BLOCK_C), tl.cdiv(W, BLOCK_W), tl.cdiv(H, rows_of_strip)
    at = tl.program_id(0)
    c = (at % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    w = (at // blocks % columns) * BLOCK_W + tl.arange(0, BLOCK_W)
    top = at // blocks // columns % strips * rows_of_strip
    n = (at // blocks // columns // strips).to(tl.int64)
    channels = c < C
    x_ptr += n * stride_xn + (w * stride_xw)[:, None] + c
    out_at = (n * H * W + w)[:, None] * C + c
    bias = tl.load(bias_ptr + c, mask=channels, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
    if QUANTIZES:
        inverse = 1.0 / tl.load(scale_ptr)
    zeros = tl.zeros((BLOCK_W, BLOCK_C), tl.float32)
    sums = ()  # of the K - 1 rows of results that the next row of pixels belongs to
    for _ in tl.static_range(K - 1):
        sums = sums + (zeros,)  # type: ignore[assignment]  # noqa: RUF005 (Triton unpacks no tuple)
    for step in range(rows_of_strip + K - 1):
        row = top + step - K // 2
        rows = sums + (zeros,)  # noqa: RUF005
        if K == 3:
            for j in tl.static_range(K):
                rows = _add_taps(rows, x_ptr, weight_ptr, row, w, c, j, H, W, C, stride_xh, stride_xw, K)
        else:  # unrolled, all loads would come first, and not fit into registers
            for j in range(K):
                rows = _add_taps(rows, x_ptr, weight_ptr, row, w, c, j, H, W, C, stride_xh, stride_xw, K)
        sums = rows[1:]
        row -= K // 2
        if (row >= top) & (row < H):
            y = activate(rows[0] + bias, ACTIVATION, EXACT=out_ptr.dtype.element_ty == tl.float32)
            stored = (w < W)[:, None] & channels
            out = round_to_int8(y * inverse) if QUANTIZES else y.to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_at + row.to(tl.int64) * W * C, out, mask=stored)


@triton.jit
def _add_taps(rows, x_ptr, weight_ptr, row, w, c, j, H, W, C, stride_xh, stride_xw, K: tl.constexpr):
    """Add the products of a row of pixels, shifted to tap j, to the K rows of results that need it."""
    column = w + (j - K // 2)
    inside = (column >= 0) & (column < W) & (row >= 0) & (row < H)
    shift = row.to(tl.int64) * stride_xh + (j - K // 2) * stride_xw
    x = tl.load(x_ptr + shift, mask=inside[:, None] & (c < C), other=0.0).to(tl.float32)
    added = ()
    for i in tl.static_range(K):
        tap = tl.load(weight_ptr + ((K - 1 - i) * K + j) * C + c, mask=c < C, other=0.0)
        added = added + (rows[i] + x * tap.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return added


def depthwise_triton(x: DepthwiseArguments) -> Tensor:
    """``depthwise`` on a GPU."""
    out = x.empty_result()
    _run(x, out)
    return out


def depthwise_quantize_triton(x: DepthwiseQuantizeArguments) -> Tensor:
    """``depthwise_quantize`` on a GPU."""
    q = x.empty_result()
    _run(x, q, x.scale)
    return q


def _run(x: Operands, out: Tensor, scale: Tensor | None = None) -> None:
    check_device(x.x.device)
    if out.numel():
        grid, arguments, constants = _call(x, out, scale, _processors(x.x.device))
        launch(_depthwise_kernel, grid)(*arguments, **constants)


def _warm_up(device: torch.device, x: Operands, out: Tensor, scale: Tensor | None = None) -> Any:
    """Compile what ``_run`` launches for such arguments, which may be on "meta"; None where nothing is."""
    if not out.numel():
        return None
    grid, arguments, constants = _call(x, out, scale, _processors(device))
    return warm_up(_depthwise_kernel, grid)(*arguments, **constants)


def _processors(device: torch.device) -> int:
    """Multiprocessors; 1 for a CPU, on which Triton's interpreter runs."""
    return 1 if capability_of(device) is None else chip_of(device)[1]


def _call(
    x: Operands, out: Tensor, scale: Tensor | None, processors: int
) -> tuple[tuple[int], tuple[Any, ...], dict[str, Any]]:
    """Grid, arguments and constants of the launch; what is missing is represented by the result."""
    images = x.x if x.x.stride(-1) == 1 else x.x.contiguous()
    n, height, width, channels = images.shape
    taps = x.weight.shape[0]
    rows, block_w, block_c = tile(n, height, width, channels, taps, processors)
    weight, bias = (out if each is None else each.contiguous() for each in (x.weight, x.bias))
    constants = {
        "K": taps,
        "HAS_BIAS": x.bias is not None,
        "ACTIVATION": x.activation,
        "QUANTIZES": scale is not None,
        "BLOCK_W": block_w,
        "BLOCK_C": block_c,
        "num_warps": 1,
    }
    pointers = (images, weight, bias, out, out if scale is None else scale)
    programs = n * cdiv(height, rows) * cdiv(width, block_w) * cdiv(channels, block_c)
    return (programs,), (*pointers, height, width, channels, *images.stride()[:3], rows), constants


def tile(n: int, height: int, width: int, channels: int, taps: int, processors: int) -> tuple[int, int, int]:
    """Rows, columns and channels of a program, which is one warp with 512 values of a row of pixels.

    Strips are as long as takes the fewest steps: a multiprocessor has registers for twelve programs at a time, each of
    which reads K - 1 rows beside its own. That ranks strips as they were measured on an H100, half and twice as long
    (``other/2026-11-28-h100-depthwise.json``).
    """
    block_c = _block_of_channels(channels)
    block_w = max(min(512 // block_c, power_of_2(width)), 2)
    others = n * cdiv(width, block_w) * cdiv(channels, block_c)

    def steps(rows: int) -> int:
        return cdiv(others * cdiv(height, rows), _PROGRAMS * processors) * (rows + taps)

    strips = dict.fromkeys(cdiv(height, strips) for strips in range(1, height + 1))
    return min(strips, key=steps), block_w, block_c


def _block_of_channels(channels: int) -> int:
    """The widest block that leaves at most a tenth of the channels of all blocks empty."""
    blocks = (256, 128, 64, 32)
    return next((b for b in blocks if cdiv(channels, b) * b <= 1.1 * channels), 32)


def _quantize_cpu(x: DepthwiseQuantizeArguments) -> Tensor:
    check_positive_scale("depthwise_quantize", "scale", x.scale)
    return depthwise_quantize_ref(x)


_OPERANDS = "Tensor x, Tensor weight, Tensor? bias, str activation"
DEPTHWISE = declare(
    f"depthwise({_OPERANDS}) -> Tensor",
    DepthwiseArguments,
    cpu=depthwise_ref,
    cuda=depthwise_triton,
    fake=DepthwiseArguments.empty_result,
    warm_up=lambda device, x: _warm_up(device, x, x.empty_result()),
)
DEPTHWISE_QUANTIZE = declare(
    f"depthwise_quantize({_OPERANDS}, Tensor scale) -> Tensor",
    DepthwiseQuantizeArguments,
    cpu=_quantize_cpu,
    cuda=depthwise_quantize_triton,
    fake=DepthwiseQuantizeArguments.empty_result,
    warm_up=lambda device, x: _warm_up(device, x, x.empty_result(), x.scale),
)
