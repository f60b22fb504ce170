"""Quantize the queries or keys of attention: subtract a mean, multiply by a factor, INT8 or INT4 per group of tokens.

Formula (SageAttention eq. 4 and 6, SageAttention2)::

    y = (x - mean) * factor                    factor: scale * log2(e) for Q (folded), 1 for K
    s = max|y| / qmax over a group of tokens   qmax = 127 or 7
    q = clamp(round_half_even(y * (1 / s)), -qmax, qmax)

Layout: ``x (B, H, N, D)`` any strides; ``mean (B, H, 1, D)`` of the head or ``(B, H, ceil(N / QUERY_BLOCK), D)``, one
for each block of queries; ``q (B, H, N, D)`` int8; scales ``(B, H, G)`` float32 in the order of
:func:`~qframework.kernels.attention.variants.token_groups`. INT4 is packed ``(B, H, N, ceil(D / 2))``: the low half of
byte ``j`` is channel ``j``, the high half channel ``j + ceil(D / 2)``, so that unpacking needs no shuffle.

NaN and infinity: a query that holds one is excluded from its group's scale and becomes a row of ``-qmax - 1``, which no
number maps to. Attention returns NaN for that row only, as float attention does. A key that holds one gives its group
the scale NaN, and so NaN to every query that attends to a key of the group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qframework.errors import UnsupportedError, either
from qframework.kernels.attention.operands import AttentionShape, check_offsets, last_contiguous, sequence_of
from qframework.kernels.attention.variants import QUERY_BLOCK, TokenGroups, token_groups
from qframework.kernels.runtime.checks import check_dtype, check_same_device
from qframework.kernels.runtime.chip import check_device
from qframework.kernels.runtime.launch import cdiv, launch, power_of_2
from qframework.kernels.runtime.operator import declare
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.rounding import integers
from qframework.kernels.runtime.triton import tl, triton
from qframework.numerics import FLOAT_DTYPES, MIN_SCALE

_TILE = QUERY_BLOCK  # tokens of one program; every span divides it


def qmax_of(bits: int) -> int:
    """127 for INT8, 7 for INT4."""
    return 127 if bits == 8 else 7


def pack_int4(q: Tensor) -> Tensor:
    """``(..., D)`` int8 in [-7, 7] to ``(..., ceil(D / 2))``: channel ``j`` low, channel ``j + ceil(D / 2)`` high."""
    half = -(-q.shape[-1] // 2)
    low, high = q[..., :half], F.pad(q[..., half:], (0, 2 * half - q.shape[-1]))
    return (low & 0xF) | (high << 4)


def unpack_int4(packed: Tensor, channels: int) -> Tensor:
    """The inverse of :func:`pack_int4`."""
    low, high = (packed << 4) >> 4, packed >> 4
    return torch.cat([low, high], dim=-1)[..., :channels]


def quantize_tokens_ref(
    x: Tensor, mean: Tensor | None, factor: float, granularity: str, role: str, bits: int = 8
) -> tuple[Tensor, Tensor]:
    """Reference of ``qframework::attention_quantize``, except that INT8 results need not be contiguous."""
    groups, tokens = token_groups(granularity, role), x.shape[2]
    y = x.float()
    if mean is not None:
        rows = mean if mean.shape[2] == 1 else mean.repeat_interleave(QUERY_BLOCK, dim=2)[:, :, :tokens]
        y = y - rows
    y = y * factor
    index = groups.index(tokens, x.device)
    count = groups.count(tokens)
    amax, rows = y.new_zeros(*y.shape[:2], count), y.new_zeros(y.shape[:3])
    if y.numel():
        rows = y.abs().amax(-1)
        counted = torch.where(rows.isfinite(), rows, 0.0) if role == "query" else rows
        amax = amax.scatter_reduce(2, index.expand_as(rows), counted, "amax")
    scale = scale_of(amax.amax().expand_as(amax) if granularity == "per_tensor" and amax.numel() else amax, bits)
    qmax = qmax_of(bits)
    q = torch.clamp(torch.round(y * (1.0 / scale)[:, :, index, None]), -qmax, qmax).nan_to_num(0.0).to(torch.int8)
    if role == "query":
        q.masked_fill_(~rows.isfinite()[..., None], -qmax - 1)
    return (q if bits == 8 else pack_int4(q)), scale


def is_marked(q: Tensor, bits: int) -> Tensor:
    """Which rows of unpacked queries ``(..., N, D)`` are marked as NaN or infinity: ``(..., N)`` bool."""
    return q[..., 0] < -qmax_of(bits)


def scale_of(amax: Tensor, bits: int) -> Tensor:
    """Scales from magnitudes; NaN for a group with NaN or infinity."""
    scale = (amax / qmax_of(bits)).clamp(min=MIN_SCALE)
    return torch.where(amax.isfinite(), scale, torch.nan)


@triton.jit
def group_scale(
    row_amax,
    QMAX: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    SPAN: tl.constexpr,
    GROUPS: tl.constexpr,
    MODULO: tl.constexpr,
    DIVISOR: tl.constexpr,
    TILE: tl.constexpr,
):
    """(scales (TILE // SPAN * GROUPS,), scale of each row (TILE,)) from each row's magnitude (TILE,)."""
    spans: tl.constexpr = TILE // SPAN
    amax = tl.reshape(row_amax, (spans, SPAN // MODULO, MODULO // DIVISOR, DIVISOR))
    amax = tl.max(tl.max(amax, 3), 1)
    scale = tl.maximum(tl.math.div_rn(amax, 1.0 * QMAX), MIN_SCALE)
    scale = tl.where(amax < float("inf"), scale, float("nan"))
    rows = tl.broadcast_to(scale[:, None, :, None], (spans, SPAN // MODULO, MODULO // DIVISOR, DIVISOR))
    return tl.reshape(scale, (spans * GROUPS,)), tl.reshape(rows, (TILE,))


@triton.jit
def _larger_or_nan(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_amax(y):
    """max|y| of each row; infinity for a row that holds NaN."""
    amax = tl.reduce(tl.abs(y), 1, _larger_or_nan)
    return tl.where(amax == amax, amax, float("inf"))


@triton.jit
def to_integers(y, inv_scale, QMAX: tl.constexpr):
    """y / scale, saturated and rounded half to even, as int8."""
    return integers(saturated(y, inv_scale, QMAX))


@triton.jit
def saturated(y, inv_scale, QMAX: tl.constexpr):
    """y / scale between -QMAX and QMAX."""
    return tl.minimum(tl.maximum(y * inv_scale, -1.0 * QMAX), 1.0 * QMAX)


@triton.jit
def finite_rows(amax):
    """Magnitudes of rows, 0 for queries that hold NaN or infinity, which the group's scale ignores."""
    return tl.where(amax < float("inf"), amax, 0.0)


@triton.jit
def mark_rows(q, amax, inside, QMAX: tl.constexpr):
    """Set queries that hold NaN or infinity to -QMAX - 1, in channels ``inside`` (BLOCK_D,)."""
    return tl.where((amax < float("inf"))[:, None] | ~inside[None, :], q, -QMAX - 1).to(tl.int8)


@triton.jit
def finite_or_zero(x):
    """``x`` with 0 for NaN and infinity, for means, whose exact value does not change the softmax."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _token_mean(base, stride, tokens, D, TILE: tl.constexpr, BLOCK_D: tl.constexpr):
    """Mean of all tokens of a head, (BLOCK_D,) float32, summed in the order of token_statistics."""
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, tokens, TILE):
        n = start + tl.arange(0, TILE)
        mask = (n < tokens)[:, None] & (d < D)[None, :]
        x = tl.load(base + n[:, None] * stride + d[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(finite_or_zero(x), 0)
    return tl.math.div_rn(total, tokens.to(tl.float32))


@triton.jit
def _load_shifted(x_ptrs, mean, mask, factor):
    """(x - mean) * factor, zero outside ``mask``."""
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, (x - mean[None, :]) * factor, 0.0)


@triton.jit(do_not_specialize=["N", "TOTAL"])
def _attention_quantize_kernel(
    x_ptr,  # (B, H, N, D) float, or (total, H, D) with starts_ptr
    mean_ptr,  # (B, H, MEANS, D) fp32
    starts_ptr,  # (B + 1,) int32, for VARLEN
    scale_ptr,  # (B, H, G) fp32
    q_ptr,  # like x, D or ceil(D / 2) channels, int8
    factor,
    H,
    N,
    TOTAL,
    D,
    G,
    MEANS,
    stride_xb,
    stride_xh,
    stride_xn,
    stride_qb,
    stride_qh,
    stride_qn,
    MIN_SCALE: tl.constexpr,
    MEAN: tl.constexpr,  # "none", "given", or "compute": of all tokens of the head, INT8 only
    GIVEN_SCALE: tl.constexpr,  # scale_ptr (B, H) is read
    STORE_Q: tl.constexpr,
    QUERIES: tl.constexpr,  # mark rows that hold NaN or infinity and ignore them in scales
    VARLEN: tl.constexpr,
    BITS: tl.constexpr,
    SPAN: tl.constexpr,
    GROUPS: tl.constexpr,
    MODULO: tl.constexpr,
    DIVISOR: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,  # channels, or half of them for INT4
    OVERLAP: tl.constexpr = False,
):
    """Grid (cdiv(N, TILE) * H * B,); a program quantizes TILE tokens of one head."""
    wait_for_previous_kernel(OVERLAP)
    QMAX: tl.constexpr = 127 if BITS == 8 else 7
    tiles = tl.cdiv(N, TILE)
    pid = tl.program_id(0).to(tl.int64)
    tile, h, b = (pid % tiles).to(tl.int32), (pid // tiles) % H, pid // (tiles * H)
    x_base = x_ptr + b * stride_xb + h * stride_xh
    q_base = q_ptr + b * stride_qb + h * stride_qh
    tokens = N
    if VARLEN:
        start, tokens = sequence_of(starts_ptr, b, TOTAL, N)
        x_base = x_ptr + start * stride_xn + h * stride_xh
        q_base = q_ptr + start * stride_qn + h * stride_qh
    n = tile * TILE + tl.arange(0, TILE)
    d = tl.arange(0, BLOCK_D)
    stored = D if BITS == 8 else (D + 1) // 2
    mean_base = mean_ptr + ((b * H + h) * MEANS + (tile if MEANS > 1 else 0)) * D + d
    mask = (n < tokens)[:, None] & (d < stored)[None, :]
    x_ptrs = x_base + n[:, None] * stride_xn + d[None, :]
    mean = tl.zeros((BLOCK_D,), tl.float32)
    if MEAN == "given":
        mean = tl.load(mean_base, mask=d < stored, other=0.0)
    elif MEAN == "compute":
        mean = _token_mean(x_base, stride_xn, tokens, D, TILE, BLOCK_D)
    low = _load_shifted(x_ptrs, mean, mask, factor)
    amax = row_amax(low)
    if BITS == 4:
        channels = d + stored < D
        high_mask = (n < tokens)[:, None] & channels[None, :]
        if MEAN == "given":
            mean = tl.load(mean_base + stored, mask=channels, other=0.0)
        high = _load_shifted(x_ptrs + stored, mean, high_mask, factor)
        amax = tl.maximum(amax, row_amax(high))

    if GIVEN_SCALE:
        row_scale = tl.zeros((TILE,), tl.float32) + tl.load(scale_ptr + b * H + h)
    else:
        counted = finite_rows(amax) if QUERIES else amax
        scale, row_scale = group_scale(counted, QMAX, MIN_SCALE, SPAN, GROUPS, MODULO, DIVISOR, TILE)
        g = tile * (TILE // SPAN * GROUPS) + tl.arange(0, TILE // SPAN * GROUPS)
        tl.store(scale_ptr + (b * H + h) * G + g, scale, mask=g < G)
    if STORE_Q:
        inv_scale = tl.math.div_rn(1.0, row_scale)[:, None]
        q = to_integers(low, inv_scale, QMAX)
        if QUERIES:
            q = mark_rows(q, amax, d < stored, QMAX)
        if BITS == 4:
            q_high = to_integers(high, inv_scale, QMAX)
            if QUERIES:
                q_high = mark_rows(q_high, amax, channels, QMAX)
            q = (q & 0xF) | (q_high << 4)
        tl.store(q_base + n[:, None] * stride_qn + d[None, :], q, mask=mask)


def quantize_tokens_triton(
    x: Tensor,
    mean: Tensor | None,
    factor: float,
    granularity: str,
    role: str,
    bits: int = 8,
    starts: Tensor | None = None,
    longest: int = 0,
    smooth: bool = False,
) -> tuple[Tensor, Tensor]:
    """``quantize_tokens_ref`` on a GPU, also for packed sequences with offsets ``starts``.

    ``smooth`` subtracts the mean over tokens, computed in the same kernel; for heads with few tokens.
    """
    check_device(x.device)
    x = last_contiguous(x)
    check_offsets("attention_quantize", x=x)
    shape = AttentionShape.of(x, starts, longest)
    groups = token_groups(granularity, role)
    channels = shape.channels if bits == 8 else -(-shape.channels // 2)
    q = torch.empty((*x.shape[:-1], channels), dtype=torch.int8, device=x.device)
    scale = torch.empty((shape.batch, shape.heads, groups.count(shape.tokens)), dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return q, scale.fill_(MIN_SCALE)
    if groups.span <= _TILE:
        _launch(x, mean, factor, shape, groups, role, bits, q, scale, given=False, smooth=smooth)
        return q, scale
    tiles = TokenGroups(_TILE)
    partial = scale.new_empty(shape.batch, shape.heads, tiles.count(shape.tokens))
    _launch(x, mean, factor, shape, tiles, role, bits, None, partial, given=False)
    whole = (0, 1, 2) if granularity == "per_tensor" else (2,)
    scale = partial.amax(whole, keepdim=True).expand_as(scale).contiguous()
    _launch(x, mean, factor, shape, tiles, role, bits, q, scale, given=True)
    return q, scale


def _launch(
    x: Tensor,
    mean: Tensor | None,
    factor: float,
    shape: AttentionShape,
    groups: TokenGroups,
    role: str,
    bits: int,
    q: Tensor | None,
    scale: Tensor,
    given: bool,
    smooth: bool = False,
) -> None:
    block_d = max(power_of_2(shape.channels if bits == 8 else -(-shape.channels // 2)), 16)
    out = q if q is not None else x
    launch(_attention_quantize_kernel, (cdiv(shape.tokens, _TILE) * shape.heads * shape.batch,))(
        x,
        mean if mean is not None else x,
        shape.starts if shape.starts is not None else x,
        scale,
        out,
        factor,
        shape.heads,
        shape.tokens,
        shape.total,
        shape.channels,
        scale.shape[2],
        mean.shape[2] if mean is not None else 1,
        *shape.strides(x),
        *shape.strides(out),
        MIN_SCALE=MIN_SCALE,
        MEAN="given" if mean is not None else "compute" if smooth else "none",
        GIVEN_SCALE=given,
        STORE_Q=q is not None,
        QUERIES=role == "query",
        VARLEN=shape.starts is not None,
        BITS=bits,
        SPAN=groups.span,
        GROUPS=groups.groups,
        MODULO=groups.modulo,
        DIVISOR=groups.divisor,
        TILE=_TILE,
        BLOCK_D=block_d,
        num_warps=4 if block_d <= 64 else 8,
    )


class AttentionQuantizeArguments(NamedTuple):
    """The arguments of ``qframework::attention_quantize``; see :func:`attention_quantize`."""

    x: Tensor
    mean: Tensor | None
    factor: float
    granularity: str
    role: str
    bits: int = 8

    def empty_result(self) -> tuple[Tensor, Tensor]:
        """Uninitialized integers and scales."""
        x, groups = self.x, token_groups(self.granularity, self.role)
        q = x.new_empty((*x.shape[:3], x.shape[3] if self.bits == 8 else (x.shape[3] + 1) // 2), dtype=torch.int8)
        if groups.span >= 2**30:
            return q, x.new_empty((*x.shape[:2], 1), dtype=torch.float32)
        spans = torch.sym_max((x.shape[2] + groups.span - 1) // groups.span, 1)
        return q, x.new_empty((*x.shape[:2], spans * groups.groups), dtype=torch.float32)

    def check(self) -> None:
        """Raise UnsupportedError for an invalid argument."""
        x, mean, _, granularity, role, bits = self
        name = "attention_quantize"
        check_dtype(name, "x", x, FLOAT_DTYPES)
        check_same_device(name, x, mean=mean)
        if x.ndim != 4:
            raise UnsupportedError(f"{name}: x must have shape (B, H, N, D), got {tuple(x.shape)}")
        if bits not in (8, 4):
            raise UnsupportedError(f"{name}: bits must be 8 or 4, got {bits}")
        token_groups(granularity, role)
        check_mean(name, x, mean)


def check_mean(operator: str, x: Tensor, mean: Tensor | None) -> None:
    """Raise UnsupportedError unless ``mean`` is None, or float32 for the head or for each block of queries of ``x``."""
    if mean is None:
        return
    check_dtype(operator, "mean", mean, (torch.float32,))
    batch, heads, tokens, channels = x.shape
    shapes = [(batch, heads, means, channels) for means in (1, -(-tokens // QUERY_BLOCK))]
    if mean.shape not in shapes:
        raise UnsupportedError(f"{operator}: mean must have shape {either(shapes)}, got {tuple(mean.shape)}")


def attention_quantize_cpu(x: AttentionQuantizeArguments) -> tuple[Tensor, Tensor]:
    """``attention_quantize`` on a CPU."""
    q, scale = quantize_tokens_ref(*x)
    return q.contiguous(), scale.contiguous()


def attention_quantize_triton(x: AttentionQuantizeArguments) -> tuple[Tensor, Tensor]:
    """``attention_quantize`` on a GPU."""
    return quantize_tokens_triton(*x._replace(mean=None if x.mean is None else x.mean.contiguous()))


ATTENTION_QUANTIZE = declare(
    "attention_quantize(Tensor x, Tensor? mean, float factor, str granularity, str role, int bits=8) "
    "-> (Tensor, Tensor)",
    AttentionQuantizeArguments,
    cpu=attention_quantize_cpu,
    cuda=attention_quantize_triton,
    fake=AttentionQuantizeArguments.empty_result,
)


def attention_quantize(
    x: Tensor, mean: Tensor | None, factor: float, granularity: str, role: str, bits: int = 8
) -> tuple[Tensor, Tensor]:
    """Quantize queries or keys for :func:`~qframework.kernels.attention.quantized_attention.quantized_attention`.

    Args:
        x: ``(B, H, N, D)`` fp32, fp16 or bf16.
        mean: float32, subtracted first: ``(B, H, 1, D)`` (smooth K) or one for each block of 128 tokens (smooth Q).
        factor: multiplied afterwards: ``scale * log2(e)`` for queries, 1.0 for keys.
        granularity: which tokens share a scale, see ``AttentionVariant``.
        role: ``"query"`` or ``"key"``, which group tokens differently.
        bits: 8, or 4, stored two to a byte.

    Returns:
        int8 ``(B, H, N, D)`` (INT4: ``ceil(D / 2)`` bytes) and float32 scales ``(B, H, G)``. NaN or infinity in a key
        gives its group a NaN scale; a query that holds one becomes a row of -128 (INT4: -8), whose result is NaN.

    Raises:
        UnsupportedError: an invalid dtype, shape, granularity, role or bits, or a GPU below sm_80.
    """
    return torch.ops.qframework.attention_quantize(x, mean, factor, granularity, role, bits)
