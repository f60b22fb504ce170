"""INT8 linear layer with its whole epilogue in one operator.

Formula (QAttn eq. 4-11, with a per-channel weight scale; ``a`` activations, ``b`` the weight)::

    acc = a_int8 @ b_int8.T                                   INT32, exact
    y   = activation(acc * a_scale * b_scale + bias) + residual    float32
    out = y rounded once to out_dtype, or clamp(round(y / out_scale), -127, 127) as int8

``out_scale`` is one scale, one for each position, or one for each output channel: a linear that computes queries, keys
and values at once writes each with its own.

Layout: ``a (..., K)`` row-major, ``b (N, K)`` row-major (K-major for both tensor-core operands), ``out (..., N)``.
Reference: ``int8_linear_ref``. CPU: oneDNN's packed u8 x s8 kernel or ``torch._int_mm``, see int8_linear_cpu.py.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from qframework import numerics
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels._common import (
    LIBRARY,
    check_device,
    check_dtype,
    check_same_device,
    round_to_int8,
    row_scale,
    rows_of,
)
from qframework.kernels._triton import tl, triton
from qframework.numerics import FLOAT_DTYPES

Activation = Literal["none", "gelu", "gelu_tanh", "relu", "silu"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)


def apply_activation(y: Tensor, activation: str) -> Tensor:
    """The named activation in torch: ``gelu`` is the erf form, ``gelu_tanh`` the tanh approximation."""
    if activation == "none":
        return y
    if activation == "gelu":
        return F.gelu(y)
    if activation == "gelu_tanh":
        return F.gelu(y, approximate="tanh")
    return F.relu(y) if activation == "relu" else F.silu(y)


def int8_linear_ref(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    activation: Activation = "none",
    residual: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Reference of ``qframework::int8_linear``; the accumulator is float64, exact for every INT32 sum."""
    acc = (a.double() @ b.double().t()).float()
    y = acc * a_scale * b_scale
    if bias is not None:
        y = y + bias.float()
    y = apply_activation(y, activation)
    if residual is not None:
        y = y + residual.float()
    return numerics.quantize(y, out_scale) if out_scale is not None else y.to(out_dtype or torch.float32)


@triton.jit
def _activate(y, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        y = 0.5 * y * (1.0 + tl.math.erf(y * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # 0.5 * (1 + tanh(u)) = sigmoid(2 u)
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    elif ACTIVATION == "relu":
        y = tl.maximum(y, 0.0)
    elif ACTIVATION == "silu":
        y = y * tl.sigmoid(y)
    return y


@triton.jit
def _int8_linear_kernel(
    a_ptr,  # (M, K) int8
    a_scale_ptr,  # (PA,) fp32, row m uses m % PA
    b_ptr,  # (N, K) int8
    b_scale_ptr,  # (N,) or (1,) fp32
    bias_ptr,  # (N,) float
    residual_ptr,  # (M, N) float
    out_scale_ptr,  # (PO,) fp32, row m uses m % PO; (N,) with OUT_PER_CHANNEL
    out_ptr,  # (M, N) float or int8
    M,
    N,
    K,
    PA,
    PO,
    stride_am,
    stride_bn,
    stride_rm,
    stride_om,
    PER_CHANNEL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    REQUANTIZE: tl.constexpr,
    OUT_PER_CHANNEL: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """out = epilogue(a @ b.T). Grid (cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N),); a program computes one tile of out.

    Programs run through GROUP_M rows of tiles before the next column of tiles, so that tiles of b stay in L2.
    """
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group_size = GROUP_M * tiles_n
    first_m = (pid // group_size) * GROUP_M
    rows_in_group = tl.minimum(tiles_m - first_m, GROUP_M)
    pid_m = first_m + (pid % group_size) % rows_in_group
    pid_n = (pid % group_size) // rows_in_group

    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past the edge wrap around instead of being masked: their results are never stored.
    a_ptrs = a_ptr + (m % M).to(tl.int64)[:, None] * stride_am + k[None, :]
    b_ptrs = b_ptr + (n % N).to(tl.int64)[None, :] * stride_bn + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=k[None, :] < K - start, other=0)
            b = tl.load(b_ptrs, mask=k[:, None] < K - start, other=0)
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K

    a_scale = tl.load(a_scale_ptr + m % PA)
    b_scale = tl.load(b_scale_ptr + n, mask=n < N, other=0.0) if PER_CHANNEL else tl.load(b_scale_ptr)
    y = acc.to(tl.float32) * a_scale[:, None]
    y = y * b_scale[None, :] if PER_CHANNEL else y * b_scale
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    y = _activate(y, ACTIVATION)
    rows = m.to(tl.int64)[:, None]
    mask = (m < M)[:, None] & (n < N)[None, :]
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + rows * stride_rm + n[None, :], mask=mask, other=0.0).to(tl.float32)
    if REQUANTIZE:
        if OUT_PER_CHANNEL:
            out_scale = tl.load(out_scale_ptr + n, mask=n < N, other=1.0)[None, :]
        else:
            out_scale = tl.load(out_scale_ptr + m % PO)[:, None]
        out = round_to_int8(y * tl.math.div_rn(1.0, out_scale))
    else:
        out = y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows * stride_om + n[None, :], out, mask=mask)


class Tile(NamedTuple):
    """One compile-time choice of the kernel."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# Candidates for a chip, largest first. The last one also serves everything smaller.
_TILES: dict[str, list[Tile]] = {
    "sm_90": [Tile(128, 128, 128, 4, 3), Tile(64, 128, 128, 4, 3), Tile(64, 64, 128, 4, 4)],  # swept on an H100
    "sm_100": [Tile(128, 128, 128, 8, 3), Tile(64, 128, 128, 4, 3), Tile(64, 64, 128, 4, 4)],
    "sm_80": [Tile(128, 128, 128, 8, 3), Tile(64, 128, 128, 4, 3), Tile(64, 64, 128, 4, 4), Tile(16, 64, 128, 4, 4)],
    "99 KB": [Tile(128, 128, 64, 8, 3), Tile(64, 128, 64, 4, 3), Tile(64, 64, 128, 4, 3), Tile(16, 64, 128, 4, 4)],
    "amd": [Tile(128, 128, 64, 8, 2), Tile(64, 64, 64, 4, 2), Tile(16, 64, 128, 4, 2)],
}


def choose_tile(
    m: int,
    n: int,
    k: int,
    capability: tuple[int, int],
    processors: int,
    activation: bool = False,
    residual: bool = False,
    out_per_channel: bool = False,
) -> Tile:
    """Tile for a problem on a chip: the largest that still gives every multiprocessor a tile of its own.

    ``capability`` is CUDA's, (9, 0) for Hopper; (0, 0) stands for an AMD GPU. The flags say what the epilogue has
    to keep in registers beside the accumulator.
    """
    chip = {(0, 0): "amd", (8, 0): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100"}.get(
        capability, "99 KB"
    )
    candidates = _TILES[chip]
    if chip == "sm_90" and activation:  # 128 accumulators a thread leave no registers for erf or exp
        candidates = candidates[1:]
    elif chip == "sm_90" and (residual or out_per_channel):
        candidates = [candidates[0]._replace(num_warps=8), *candidates[1:]]
    for tile in candidates:
        if m > tile.block_m // 2 and math.ceil(m / tile.block_m) * math.ceil(n / tile.block_n) >= processors:
            break
    return tile if k > 64 else tile._replace(block_k=64)


@functools.lru_cache(4096)
def _tile_for(device: torch.device, m: int, n: int, k: int, *epilogue: bool) -> Tile:
    if device.type != "cuda":  # interpreted: any tile is right, a small one shows masks and loops at work
        return Tile(32, 32, 32, 4, 1)
    properties = torch.cuda.get_device_properties(device)
    capability = (0, 0) if torch.version.hip else (properties.major, properties.minor)
    return choose_tile(m, n, k, capability, properties.multi_processor_count, *epilogue)


def _int8_linear_triton(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    check_device(a.device)
    n, k = b.shape
    shape = torch.Size((*a.shape[:-1], n))
    out = torch.empty(shape, dtype=_result_dtype(out_scale, out_dtype), device=a.device)
    if out.numel() == 0:
        return out
    a_rows, b_rows, out_rows = rows_of(a), rows_of(b), out.view(-1, n)
    residual_rows = rows_of(residual) if residual is not None else out_rows
    a_period = row_scale("int8_linear", "a_scale", a_scale, a.shape)
    out_period = flat_out_scale(out_scale, shape) if out_scale is not None else a_period
    m = a_rows.shape[0]
    out_per_channel = out_scale is not None and is_per_channel(out_scale, n)
    tile = _tile_for(a.device, m, n, k, activation != "none", residual is not None, out_per_channel)
    _int8_linear_kernel[(triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n),)](
        a_rows,
        a_period,
        b_rows,
        b_scale,
        bias if bias is not None else b_scale,
        residual_rows,
        out_period,
        out_rows,
        m,
        n,
        k,
        a_period.numel(),
        out_period.numel(),
        a_rows.stride(0),
        b_rows.stride(0),
        residual_rows.stride(0),
        out_rows.stride(0),
        PER_CHANNEL=b_scale.numel() > 1,
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        REQUANTIZE=out_scale is not None,
        OUT_PER_CHANNEL=out_per_channel,
        EVEN_K=k % tile.block_k == 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=8,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def is_per_channel(out_scale: Tensor, n: int) -> bool:
    """Whether ``out_scale`` holds one scale for each of ``n`` output channels: ``(N,)``, or ones before the N."""
    return n > 1 and out_scale.ndim > 0 and out_scale.shape[-1] == n == out_scale.numel()


def flat_out_scale(out_scale: Tensor, shape: torch.Size) -> Tensor:
    """``out_scale`` as ``(N,)`` per channel, else as row_scale gives it. Raises QFrameworkError where it is neither."""
    name, n = "int8_linear", shape[-1]
    check_dtype(name, "out_scale", out_scale, (torch.float32,))
    if is_per_channel(out_scale, n):
        return out_scale.reshape(-1).contiguous()
    return row_scale(name, "out_scale", out_scale, shape, also=f"({n},) per channel, ")


def _result_dtype(out_scale: Tensor | None, out_dtype: torch.dtype | None) -> torch.dtype:
    return torch.int8 if out_scale is not None else out_dtype or torch.float32


def check_arguments(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    out_scale: Tensor | None,
    out_dtype: torch.dtype | None,
) -> None:
    """Everything that can be told from metadata; also run on fake tensors, so nothing here may look at values."""
    name = "int8_linear"
    if activation not in ACTIVATIONS:
        raise UnsupportedError(f"{name}: activation={activation!r} is unknown; accepted: {', '.join(ACTIVATIONS)}")
    check_dtype(name, "a", a, (torch.int8,))
    check_dtype(name, "b", b, (torch.int8,))
    check_dtype(name, "b_scale", b_scale, (torch.float32,))
    check_same_device(name, a, a_scale=a_scale, b=b, b_scale=b_scale, bias=bias, residual=residual, out_scale=out_scale)
    if b.ndim != 2 or a.ndim < 1 or a.shape[-1] != b.shape[1]:
        raise QFrameworkError(
            f"{name}: a {tuple(a.shape)} and b {tuple(b.shape)} do not fit; accepted: a (..., K) with b (N, K)"
        )
    n = b.shape[0]
    if b_scale.shape not in ((n,), (1,)):
        raise QFrameworkError(f"{name}: b_scale has shape {tuple(b_scale.shape)}; accepted: ({n},) or (1,)")
    if bias is not None and bias.shape != (n,):
        raise QFrameworkError(f"{name}: bias has shape {tuple(bias.shape)}; accepted: ({n},)")
    if residual is not None and residual.shape != (*a.shape[:-1], n):
        raise QFrameworkError(
            f"{name}: residual has shape {tuple(residual.shape)}; accepted: {(*tuple(a.shape[:-1]), n)}"
        )
    for argument, tensor in (("bias", bias), ("residual", residual)):
        if tensor is not None:
            check_dtype(name, argument, tensor, FLOAT_DTYPES)
    if out_scale is not None and out_dtype not in (None, torch.int8):
        raise UnsupportedError(f"{name}: out_dtype={out_dtype} with out_scale; accepted: torch.int8 or None")
    if out_scale is None and out_dtype not in (None, *FLOAT_DTYPES):
        raise UnsupportedError(
            f"{name}: out_dtype={out_dtype}; accepted: float32, float16, bfloat16, int8 with out_scale"
        )


LIBRARY.define(
    "int8_linear(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias=None, str activation='none', "
    "Tensor? residual=None, Tensor? out_scale=None, ScalarType? out_dtype=None) -> Tensor"
)


@torch.library.impl(LIBRARY, "int8_linear", "CUDA")
def _int8_linear_cuda(
    a, a_scale, b, b_scale, bias=None, activation="none", residual=None, out_scale=None, out_dtype=None
):
    check_arguments(a, a_scale, b, b_scale, bias, activation, residual, out_scale, out_dtype)
    return _int8_linear_triton(a, a_scale, b, b_scale, bias, activation, residual, out_scale, out_dtype)


@torch.library.register_fake("qframework::int8_linear", lib=LIBRARY)
def _int8_linear_fake(
    a, a_scale, b, b_scale, bias=None, activation="none", residual=None, out_scale=None, out_dtype=None
):
    check_arguments(a, a_scale, b, b_scale, bias, activation, residual, out_scale, out_dtype)
    return a.new_empty((*a.shape[:-1], b.shape[0]), dtype=_result_dtype(out_scale, out_dtype))


def _no_backward(ctx, grad):
    raise QFrameworkError(
        "int8_linear is an inference operator and has no gradient; run the model under torch.no_grad()"
    )


torch.library.register_autograd("qframework::int8_linear", _no_backward, lib=LIBRARY)


def int8_linear(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    activation: Activation = "none",
    residual: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``activation(a @ b.T * a_scale * b_scale + bias) + residual``, in INT8 with an exact INT32 accumulator.

    Args:
        a: ``(..., K)`` int8, any strides and leading dimensions.
        a_scale: fp32, dequantizes ``a``: ``()`` or ``(1,)`` per tensor, ``(..., 1)`` per token or position.
        b: ``(N, K)`` int8, the weight of a linear layer.
        b_scale: ``(N,)`` or ``(1,)`` fp32, dequantizes ``b``.
        bias: ``(N,)`` fp32, fp16 or bf16.
        activation: ``"none"``, ``"gelu"`` (erf), ``"gelu_tanh"``, ``"relu"`` or ``"silu"``, applied after the bias.
        residual: ``(..., N)`` fp32, fp16 or bf16, added after the activation.
        out_scale: fp32 like ``a_scale``, or ``(N,)`` per output channel; the result is requantized to int8 with it
            (QAttn eq. 7-8).
        out_dtype: float32 (default), float16 or bfloat16; int8 goes with ``out_scale``.

    Returns:
        ``(..., N)`` of ``out_dtype``, contiguous.

    Numerics: the accumulator is exact for K up to 133,000; the epilogue is float32 and rounds once at the end; a
    requantized value saturates at +-127.

    Raises:
        UnsupportedError: a dtype, activation or device no kernel can do.
        QFrameworkError: shapes or devices that do not fit together; on the CPU also a scale that is not positive.
    """
    return torch.ops.qframework.int8_linear(a, a_scale, b, b_scale, bias, activation, residual, out_scale, out_dtype)
