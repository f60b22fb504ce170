"""Rotary position embedding fused with the quantization of the queries or keys of attention.

Formula (SageAttention section 4.6; RoPE of Su et al.), for channels ``a`` and ``b`` of a pair::

    r_a = x_a cos_a - x_b sin_a        r_b = x_b cos_b + x_a sin_b        channels from rotary_dim on: r = x
    y   = (r - mean) * factor          factor: scale * log2(e) for Q, 1 for K
    s   = max|y| / 127 over a group of tokens,    q = clamp(round_half_even(y * (1 / s)), -127, 127)

Pairs are ``(i, i + rotary_dim / 2)`` (half-split: GPT-NeoX, Llama, transformers) or ``(2 i, 2 i + 1)`` (interleaved:
GPT-J, flash-attention's ``interleaved=True``). The rotated tensor stays in float32 registers: it is neither rounded to
16 bit nor written to memory.

Layout: ``x (B, H, N, D)`` any strides; ``q`` and scales as in :mod:`~qframework.kernels.attention.quantize_qk`, ready
for ``quantized_attention``. Smooth K needs the mean of the rotated keys, which ``rope_mean`` computes in one pass.
Reference: ``rope_ref``, ``rope_mean_ref``, ``rope_quantize_ref``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qframework.kernels.attention.operands import check_offsets, last_contiguous
from qframework.kernels.attention.quantize_qk import (
    AttentionQuantizeArguments,
    check_mean,
    finite_or_zero,
    finite_rows,
    group_scale,
    mark_rows,
    quantize_tokens_ref,
    row_amax,
    to_integers,
)
from qframework.kernels.attention.rotation import Rotation, load_pairs, load_rotated, rope_ref, rotation_of, store_pairs
from qframework.kernels.attention.variants import QUERY_BLOCK, TokenGroups, token_groups
from qframework.kernels.runtime.checks import check_same_device
from qframework.kernels.runtime.chip import check_device
from qframework.kernels.runtime.launch import cdiv, launch, power_of_2
from qframework.kernels.runtime.operator import declare, refuse_backward, refuse_transforms
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton
from qframework.numerics import MIN_SCALE


class RopeMeanArguments(NamedTuple):
    """The arguments of ``qframework::rope_mean``; see :func:`rope_quantize`."""

    x: Tensor
    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    rotary_dim: int | None = None

    def empty_result(self) -> Tensor:
        """An uninitialized mean."""
        return self.x.new_empty((*self.x.shape[:2], 1, self.x.shape[3]), dtype=torch.float32)

    def check(self) -> None:
        """Raise QFrameworkError for an invalid argument."""
        rotation_of("rope_mean", self.x, self.cos, self.sin, self.rotary_dim)


class RopeQuantizeArguments(NamedTuple):
    """The arguments of ``qframework::rope_quantize``; see :func:`rope_quantize`."""

    x: Tensor
    cos: Tensor
    sin: Tensor
    interleaved: bool
    factor: float
    granularity: str
    role: str
    mean: Tensor | None = None
    rotary_dim: int | None = None

    def empty_result(self) -> tuple[Tensor, Tensor]:
        """Uninitialized integers and scales."""
        return AttentionQuantizeArguments(self.x, self.mean, self.factor, self.granularity, self.role).empty_result()

    def check(self) -> None:
        """Raise QFrameworkError for an invalid argument."""
        name = "rope_quantize"
        rotation_of(name, self.x, self.cos, self.sin, self.rotary_dim)
        token_groups(self.granularity, self.role)
        check_same_device(name, self.x, mean=self.mean)
        check_mean(name, self.x, self.mean)


def rope_mean_ref(x: RopeMeanArguments) -> Tensor:
    """Reference of ``qframework::rope_mean``."""
    rotated = rope_ref(x.x, x.cos, x.sin, x.interleaved, x.rotary_dim).nan_to_num(0.0, 0.0, 0.0)
    return rotated.sum(2, keepdim=True) / max(rotated.shape[2], 1)


def rope_quantize_ref(x: RopeQuantizeArguments) -> tuple[Tensor, Tensor]:
    """Reference of ``qframework::rope_quantize``."""
    rotated = rope_ref(x.x, x.cos, x.sin, x.interleaved, x.rotary_dim)
    q, scale = quantize_tokens_ref(rotated, x.mean, x.factor, x.granularity, x.role)
    return q.contiguous(), scale.contiguous()


@triton.jit
def _rope_quantize_kernel(
    x_ptr,  # (B, H, N, D) float
    cos_ptr,  # (B, H, N, W) float, W = 2 pairs where FULL, else pairs
    sin_ptr,  # like cos
    mean_ptr,  # (B, H, MEANS, D) fp32
    scale_ptr,  # (B, H, G) fp32
    q_ptr,  # (B, H, N, D) int8; (B, H, tiles, D) fp32 sums where SUM
    factor,
    H,
    N,
    D,
    pairs,
    G,
    MEANS,
    stride_xb,
    stride_xh,
    stride_xn,
    stride_cb,
    stride_ch,
    stride_cn,
    MIN_SCALE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FULL: tl.constexpr,
    PARTIAL: tl.constexpr,  # 2 pairs < D: some channels are not rotated
    HAS_MEAN: tl.constexpr,
    MODE: tl.constexpr,  # "sum"; "scale"; "quantize" with a given scale, SPAN a multiple of TILE; "both", a divisor
    QUERIES: tl.constexpr,  # mark rows that hold NaN or infinity and ignore them in scales
    SPAN: tl.constexpr,
    GROUPS: tl.constexpr,
    MODULO: tl.constexpr,
    DIVISOR: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,  # tokens of each mean where there are several
    TILE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (cdiv(N, TILE) * H * B,); a program rotates TILE tokens of one head and sums or quantizes them."""
    wait_for_previous_kernel(OVERLAP)
    tiles = tl.cdiv(N, TILE)
    pid = tl.program_id(0).to(tl.int64)
    tile, h, b = (pid % tiles).to(tl.int32), (pid // tiles) % H, pid // (tiles * H)
    n = tile * TILE + tl.arange(0, TILE)
    rows = n < N
    x_ptrs = x_ptr + b * stride_xb + h * stride_xh + n * stride_xn
    table = b * stride_cb + h * stride_ch + n * stride_cn
    first, second = load_rotated(
        x_ptrs, cos_ptr + table, sin_ptr + table, rows, pairs, INTERLEAVED, FULL, TILE, BLOCK_P
    )
    r = 2 * pairs + tl.arange(0, BLOCK_R)
    rest_mask = rows[:, None] & (r < D)[None, :]
    if PARTIAL:
        rest = tl.load(x_ptrs[:, None] + r[None, :], mask=rest_mask, other=0.0).to(tl.float32)

    one = tl.arange(0, 1)
    if MODE == "sum":
        sums = q_ptr + ((b * H + h) * tiles + tile) * D
        total_first, total_second = tl.sum(finite_or_zero(first), 0), tl.sum(finite_or_zero(second), 0)
        store_pairs(sums + one, total_first[None, :], total_second[None, :], one == 0, pairs, INTERLEAVED, 1, BLOCK_P)
        if PARTIAL:
            tl.store(sums + r, tl.sum(finite_or_zero(rest), 0), mask=r < D)
    else:
        if HAS_MEAN:
            means = mean_ptr + ((b * H + h) * MEANS + (tile * TILE // QUERY_BLOCK if MEANS > 1 else 0)) * D
            mean_first, mean_second = load_pairs(means + one, one == 0, pairs, 0.0, INTERLEAVED, 1, BLOCK_P)
            first = tl.where(rows[:, None], first - mean_first, 0.0)
            second = tl.where(rows[:, None], second - mean_second, 0.0)
            if PARTIAL:
                mean_rest = tl.load(means + r, mask=r < D, other=0.0)
                rest = tl.where(rows[:, None], rest - mean_rest[None, :], 0.0)
        first, second = first * factor, second * factor
        amax = tl.maximum(row_amax(first), row_amax(second))
        if PARTIAL:
            rest = rest * factor
            amax = tl.maximum(amax, row_amax(rest))
        if MODE == "quantize":
            row_scale = tl.zeros((TILE,), tl.float32) + tl.load(scale_ptr + (b * H + h) * G + tile * TILE // SPAN)
        else:
            counted = finite_rows(amax) if QUERIES else amax
            scale, row_scale = group_scale(counted, 127, MIN_SCALE, SPAN, GROUPS, MODULO, DIVISOR, TILE)
            g = tile * (TILE // SPAN * GROUPS) + tl.arange(0, TILE // SPAN * GROUPS)
            tl.store(scale_ptr + (b * H + h) * G + g, scale, mask=g < G)
        if MODE != "scale":
            inv_scale = tl.math.div_rn(1.0, row_scale)[:, None]
            if INTERLEAVED:  # may store single bytes, whose 64-bit addresses Triton 3.6 spills: offsets in the tile
                q_ptrs = q_ptr + ((b * H + h) * N + tile * TILE) * D + tl.arange(0, TILE) * D
            else:
                q_ptrs = q_ptr + (b * H + h) * N * D + n.to(tl.int64) * D
            first, second = to_integers(first, inv_scale, 127), to_integers(second, inv_scale, 127)
            if QUERIES:
                every = tl.full((BLOCK_P,), 1, tl.int1)
                first, second = mark_rows(first, amax, every, 127), mark_rows(second, amax, every, 127)
            store_pairs(q_ptrs, first, second, rows, pairs, INTERLEAVED, TILE, BLOCK_P)
            if PARTIAL:
                rest = to_integers(rest, inv_scale, 127)
                if QUERIES:
                    rest = mark_rows(rest, amax, r < D, 127)
                tl.store(q_ptrs[:, None] + r[None, :], rest, mask=rest_mask)


def choose_tile(channels: int, span: int) -> tuple[int, int]:
    """``(tokens, warps)`` of a program, so that a thread holds 16 to 32 values of each half of x and of each table.

    Above 128 channels the registers do not hold a block of 128 queries, which is then read twice.
    """
    if span == 128 and channels <= 128:
        return 128, 8 if channels <= 64 else 16
    return 64, 4 if channels <= 64 else 8


def sum_tile(channels: int) -> tuple[int, int]:
    """``(tokens, warps)`` of a program that sums, with more warps than ``choose_tile``, or Blackwell spills."""
    return 64, 8 if channels <= 64 else 16


def _launch(
    x: Tensor,
    rotation: Rotation,
    interleaved: bool,
    mode: str,
    out: Tensor,
    scale: Tensor,
    groups: TokenGroups,
    tile: tuple[int, int],
    role: str = "key",
    factor: float = 1.0,
    mean: Tensor | None = None,
) -> None:
    batch, heads, tokens, channels = x.shape
    pairs = rotation.rotary_dim // 2
    rest = channels - 2 * pairs
    launch(_rope_quantize_kernel, (cdiv(tokens, tile[0]) * heads * batch,))(
        x,
        rotation.cos,
        rotation.sin,
        mean if mean is not None else x,
        scale,
        out,
        factor,
        heads,
        tokens,
        channels,
        pairs,
        scale.shape[2],
        mean.shape[2] if mean is not None else 1,
        *x.stride()[:3],
        *rotation.cos.stride()[:3],
        MIN_SCALE=MIN_SCALE,
        INTERLEAVED=interleaved,
        FULL=rotation.full,
        PARTIAL=rest > 0,
        HAS_MEAN=mean is not None,
        MODE=mode,
        QUERIES=role == "query",
        SPAN=groups.span,
        GROUPS=groups.groups,
        MODULO=groups.modulo,
        DIVISOR=groups.divisor,
        QUERY_BLOCK=QUERY_BLOCK,
        TILE=tile[0],
        BLOCK_P=max(power_of_2(pairs), 8),
        BLOCK_R=max(power_of_2(rest), 8),
        num_warps=tile[1],
    )


def rope_quantize_triton(x: RopeQuantizeArguments) -> tuple[Tensor, Tensor]:
    """``rope_quantize`` on a GPU."""
    check_device(x.x.device)
    source = last_contiguous(x.x)
    check_offsets("rope_quantize", x=source)
    rotation = rotation_of("rope_quantize", source, x.cos, x.sin, x.rotary_dim)
    groups = token_groups(x.granularity, x.role)
    q, scale = x.empty_result()
    if q.numel() == 0:
        return q, scale.fill_(MIN_SCALE)
    mean = x.mean.contiguous() if x.mean is not None else None
    tile = choose_tile(source.shape[3], groups.span)
    if groups.span <= tile[0]:
        _launch(source, rotation, x.interleaved, "both", q, scale, groups, tile, x.role, x.factor, mean)
        return q, scale
    tiles = TokenGroups(tile[0])
    partial = scale.new_empty(*source.shape[:2], tiles.count(source.shape[2]))
    _launch(source, rotation, x.interleaved, "scale", q, partial, tiles, tile, x.role, x.factor, mean)
    scale = _join_scales(partial, groups, tile[0], x.granularity)
    _launch(source, rotation, x.interleaved, "quantize", q, scale, groups, tile, x.role, x.factor, mean)
    return q, scale


def _join_scales(partial: Tensor, groups: TokenGroups, tile: int, granularity: str) -> Tensor:
    """Scales of groups that span several tiles: the maximum of the tiles' scales, ``(B, H, tiles)``."""
    if granularity == "per_tensor":
        return partial.amax().expand(*partial.shape[:2], 1).contiguous()
    if groups.span >= partial.shape[2] * tile:
        return partial.amax(2, keepdim=True)
    each = groups.span // tile
    return F.pad(partial, (0, -partial.shape[2] % each)).unflatten(2, (-1, each)).amax(3)


def rope_mean_triton(x: RopeMeanArguments) -> Tensor:
    """``rope_mean`` on a GPU."""
    check_device(x.x.device)
    source = last_contiguous(x.x)
    check_offsets("rope_mean", x=source)
    tile = sum_tile(source.shape[3])
    tiles = TokenGroups(tile[0])
    shape = (*source.shape[:2], tiles.count(source.shape[2]), source.shape[3])
    sums = source.new_empty(shape, dtype=torch.float32)
    if source.numel() == 0:
        return sums.zero_()
    rotation = rotation_of("rope_mean", source, x.cos, x.sin, x.rotary_dim)
    _launch(source, rotation, x.interleaved, "sum", sums, sums, tiles, tile)
    return sums.sum(2, keepdim=True) / source.shape[2]


ROPE_QUANTIZE = declare(
    "rope_quantize(Tensor x, Tensor cos, Tensor sin, bool interleaved, float factor, str granularity, str role, "
    "Tensor? mean=None, int? rotary_dim=None) -> (Tensor, Tensor)",
    RopeQuantizeArguments,
    cpu=rope_quantize_ref,
    cuda=rope_quantize_triton,
    fake=RopeQuantizeArguments.empty_result,
)
ROPE_MEAN = declare(
    "rope_mean(Tensor x, Tensor cos, Tensor sin, bool interleaved=False, int? rotary_dim=None) -> Tensor",
    RopeMeanArguments,
    cpu=rope_mean_ref,
    cuda=rope_mean_triton,
    fake=RopeMeanArguments.empty_result,
)


refuse_backward("rope_quantize", "rope_mean")


def rope_mean(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, rotary_dim: int | None = None) -> Tensor:
    """Mean over tokens of the rotated ``x``, which smooth K subtracts: ``(B, H, 1, D)`` float32.

    Arguments and errors are those of :func:`rope_quantize`. The rotated keys are not written to memory.
    """
    refuse_transforms("rope_mean", x, cos, sin)
    return torch.ops.qframework.rope_mean(x, cos, sin, interleaved, rotary_dim)


def rope_quantize(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    factor: float,
    granularity: str,
    role: str,
    mean: Tensor | None = None,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate queries or keys and quantize them in one pass (SageAttention section 4.6).

    Args:
        x: ``(B, H, N, D)`` fp32, fp16 or bf16, any strides.
        cos: fp32, fp16 or bf16 ``(N, W)``, ``(B, N, W)``, ``(B, 1, N, W)`` or ``(B, H, N, W)``. ``W`` is ``rotary_dim``
            with a column for each channel (transformers), or ``rotary_dim / 2`` with one for each pair
            (flash-attention).
        sin: like ``cos``.
        interleaved: pairs are ``(2 i, 2 i + 1)``; else ``(i, i + rotary_dim / 2)``.
        factor: multiplied after the rotation: ``scale * log2(e)`` for queries, 1.0 for keys.
        granularity: which tokens share a scale, see ``AttentionVariant``.
        role: ``"query"`` or ``"key"``, which group tokens differently.
        mean: float32, subtracted after the rotation: ``(B, H, 1, D)`` (smooth K, see :func:`rope_mean`) or one for each
            block of 128 tokens (smooth Q).
        rotary_dim: the number of leading channels that are rotated. Default: D where W is D or D / 2, W where it is
            between them; required for narrower tables.

    Returns:
        int8 ``(B, H, N, D)`` and float32 scales ``(B, H, G)``, the layout of
        :func:`~qframework.kernels.attention.quantize_qk.attention_quantize`.

    Numerics: the rotation is float32 with up to four roundings per channel, and is not rounded to 16 bit.

    Raises:
        UnsupportedError: an unsupported dtype, rank, granularity or role, or a GPU below sm_80.
        QFrameworkError: tables, mean or rotary_dim that do not match ``x``, or tensors on different devices.
    """
    refuse_transforms("rope_quantize", x, cos, sin, mean)
    return torch.ops.qframework.rope_quantize(x, cos, sin, interleaved, factor, granularity, role, mean, rotary_dim)
