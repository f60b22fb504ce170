"""Attention of a few queries to a cache of keys and values in INT8: one step of decoding.

Formula, with the key head of each group of query heads, K less its fixed mean (which the softmax ignores)::

    S[m, n] = q[m] k8[n] * k_scale[n] * scale + mask[m, n]         P = exp(S - max S)
    out[m]  = sum_n P[m, n] v_scale[n] v8[n] / sum_n P[m, n]

With a soft cap, logits are ``softcap * tanh((q[m] k8[n] * k_scale[n] + q[m] mean) * scale / softcap) + mask[m, n]``, of
which the softmax does depend on K's mean.

Layout: ``query (B, H, N, D)`` float; ``key (B, Hkv, capacity, D)`` and ``value (B, Hkv, capacity, Dv)`` int8 of
:func:`~qframework.kernels.attention.decode.cache_append.cache_append`, with ``scales (B, Hkv, capacity, 2)`` bf16, of
a token's key and of its value. ``out (B, H, N, Dv)`` in the memory order (B, N, H, Dv). Reference:
``decode_attention_ref``, which is the CPU implementation as well.

The time of a step is that of reading the cache once. The keys are therefore split over programs (Dao et al., 2023,
"Flash-Decoding for long-context inference"), whose sums a second kernel adds, and all query heads of a key head share a
program. Numerics of the kernel: 16-bit queries as they are, float32 ones in fp16 relative to their row's maximum; their
products with k8 are exact in fp32. P and v8 in bf16, where v8 is exact, summed in fp32.

On Hopper, more than 32 rows of a key head (queries times heads), or 17 where there is much to read, take another
kernel, hopper.py. Numerics there: queries in 16 bit relative to their row's maximum, exact products; P times V's
scale in fp16 relative to the largest scale so far, summed in fp32, and the shares of programs in fp16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework.kernels.attention.decode import hopper as decode_hopper
from qframework.kernels.attention.decode.arguments import NAME, DecodeAttentionArguments, Shares
from qframework.kernels.attention.decode.hopper import RowsPlan
from qframework.kernels.attention.decode.triton import (
    _combine_kernel,
    _combine_rows_kernel,
    _decode_attention_kernel,
)
from qframework.kernels.attention.operands import LOG2_E
from qframework.kernels.runtime.chip import check_device, chip_of
from qframework.kernels.runtime.launch import cdiv, launch, power_of_2
from qframework.kernels.runtime.operator import declare, refuse_gradients
from qframework.numerics import exact_matmul

_INTERPRETED_MULTIPROCESSORS = 4  # where there is no GPU
_MANY_ROWS = 16  # of a key head, which are added by tiles of so many numbers, so many splits at a time
_ROW_TILE, _STEP = 512, 16
_MAX_SPLITS, _MAX_TILE = 256, 4096  # splits that one step of a combining program adds, and numbers of its tile


def decode_attention_ref(x: DecodeAttentionArguments) -> Tensor:
    """Reference in float32, and the CPU implementation: nothing is expanded to the heads of the queries."""
    result = x.empty_result()
    keys = x.key.shape[2] if x.mask is None else x.mask.shape[-1]
    if x.lengths is not None and x.lengths.device.type == "cpu" and x.lengths.numel():
        keys = max(0, min(keys, int(x.lengths.max())))
    if result.numel() == 0 or keys == 0:
        return result.zero_()
    batch, heads, tokens, _ = x.query.shape
    key_scale, value_scale = x.scales[:, :, :keys].float().unsqueeze(2).unbind(-1)
    q = x.query.float().unflatten(1, (-1, x.group)).flatten(2, 3) * x.logit_scale
    logits = exact_matmul(q, x.key[:, :, :keys].float().mT) * key_scale
    logits = logits.view(batch, heads, tokens, keys)
    if x.mean_of_logits is not None:
        logits = logits + exact_matmul(q, x.mean_of_logits.unsqueeze(-1)).view(batch, heads, tokens, 1)
    if x.softcap is not None:
        logits = x.softcap * torch.tanh(logits / x.softcap)
    if x.mask is not None and x.mask.dtype != torch.bool:
        logits = logits + x.mask[..., :keys].float()
    visible = visible_keys(x, keys)
    if visible is not None:
        logits = logits.masked_fill(~visible, -torch.inf)
    top = logits.amax(-1, keepdim=True)
    sink = torch.full_like(top, -torch.inf) if x.sink_of_row is None else x.sink_of_row.float().unsqueeze(-1)
    top = torch.maximum(top, sink)
    top = top.masked_fill(top == -torch.inf, 0.0)
    p = (logits - top).exp()
    total = p.sum(-1, keepdim=True) + (sink - top).exp()
    p = p.view(*q.shape[:-1], keys)
    weights = torch.where(p == 0, 0.0, p * value_scale)
    out = exact_matmul(weights, x.value[:, :, :keys].float()).view(batch, heads, tokens, -1)
    return result.copy_(torch.where(total == 0, 0.0, out / total))


def visible_keys(x: DecodeAttentionArguments, keys: int) -> Tensor | None:
    """``(B, H or 1, N or 1, keys)`` bool: what length, causality, window and a bool mask leave of the first keys.

    None where that is all of them.
    """
    masked = x.mask is not None and x.mask.dtype == torch.bool
    if not (masked or x.is_causal or x.window is not None or x.lengths is not None):
        return None
    tokens, device = x.query.shape[2], x.query.device
    lengths = torch.full((1,), keys, device=device) if x.lengths is None else x.lengths.clamp(max=keys)
    lengths = lengths[:, None, None, None]
    at = torch.arange(keys, device=device)
    position = lengths - tokens + torch.arange(tokens, device=device)[:, None]
    visible = (at < lengths).expand(-1, 1, tokens, keys)
    if x.is_causal:
        visible = visible & (at <= position)
    if x.window is not None:
        visible = visible & (at > position - x.window)
    return visible & x.mask[..., :keys] if x.mask is not None and masked else visible


# Kernel -------------------------------------------------------------------------------------------------------------


class DecodePlan(NamedTuple):
    """How a call is divided and compiled."""

    splits: int
    block_m: int = 16
    block_n: int = 128
    warps: int = 4
    stages: int = 3


# Bytes that a multiprocessor keeps on their way from memory: 64 KB were the fastest on an H100, more added splits only.
_IN_FLIGHT = 64 * 1024


def choose_plan(
    rows: int, heads: int, keys: int, channels: tuple[int, int], multiprocessors: int, row_mask: bool = False
) -> DecodePlan:
    """A plan for ``rows`` queries of each of ``heads`` key heads of the batch.

    ``channels`` are K's and V's; ``row_mask`` says that a mask differs between rows. The tiles keep their sums in
    registers. Up to 32 rows are better read twice, 16 at a time, by programs that share the L2 cache. There are as many
    programs as fill the multiprocessors once, with two blocks of keys and values on their way to each program.
    """
    wide = power_of_2(max(channels))
    block_m = 16 if rows <= 32 else 32 if wide > 128 or row_mask else 64  # a row's mask takes registers as well
    programs = max(heads * cdiv(rows, block_m), 1)
    block_n, warps = 64, 4
    if block_m == 16 and wide <= 64:
        block_n = 128
    elif block_m == 16 and wide <= 128 and not row_mask:
        # Where heads are few, blocks are larger and splits fewer; padded channels would only be work.
        large = rows <= 16 and sum(channels) == 2 * wide and 2 * programs <= multiprocessors
        block_n, warps = (128, 4) if large else (64, 2)
    elif block_m > 16 and wide > 128:
        block_n = 32
    resident = cdiv(_IN_FLIGHT, 2 * block_n * sum(channels))
    splits = resident * multiprocessors // programs
    return DecodePlan(max(1, min(splits, cdiv(keys, 2 * block_n))), block_m, block_n, warps)


def decode_attention_triton(x: DecodeAttentionArguments, plan: DecodePlan | RowsPlan | None = None) -> Tensor:
    """``decode_attention`` on a GPU, by the kernel that the plan is of."""
    check_device(x.query.device)
    result = x.empty_result()
    if result.numel() == 0 or x.value.shape[2] == 0 or (x.mask is not None and x.mask.shape[-1] == 0):
        return result.zero_()
    if plan is None:
        plan = decode_hopper.plan_of(x) if decode_hopper.fits(x) else _plan_of(x)
    shares = Shares.empty(x, plan.splits, torch.float16 if isinstance(plan, RowsPlan) else torch.float32)
    if isinstance(plan, RowsPlan):
        decode_hopper.attend_rows(x, plan, shares or Shares(result, result, result, result))
    else:
        _attend(x, plan, shares or Shares(result, result, result, result))
    if shares is not None:
        _combine(shares, result, x.group)
    return result


def _plan_of(x: DecodeAttentionArguments) -> DecodePlan:
    """The general kernel's plan for a call."""
    (batch, _, tokens, channels), (_, kv, capacity, width) = x.query.shape, x.value.shape
    keys = capacity if x.window is None else min(capacity, x.window + tokens)
    row_mask = x.mask is not None and _differs(x.mask, 1, 2)
    return choose_plan(x.rows, batch * kv, keys, (channels, width), _multiprocessors(x.query), row_mask)


def _attend(x: DecodeAttentionArguments, plan: DecodePlan, shares: Shares) -> None:
    """Write the shares, or with one split the result, by the general kernel."""
    (batch, _, tokens, channels), (_, kv, capacity, width) = x.query.shape, x.value.shape
    query, key, value = _aligned(x.query), _aligned(x.key), _aligned(x.value)
    (mask, kind), sinks = _kernel_mask(x), x.sink_of_row
    scales = x.scales if x.scales.stride()[2:] == (2, 1) else x.scales.contiguous()
    launch(_decode_attention_kernel, (cdiv(x.rows, plan.block_m), plan.splits, batch * kv))(
        query,
        key,
        value,
        scales,
        scales if x.lengths is None else x.lengths,
        scales if mask is None else mask,
        None if x.mean_of_logits is None else x.mean_of_logits.contiguous(),
        sinks,
        *shares[:3],
        kv,
        x.group,
        tokens,
        capacity,
        0 if mask is None else mask.shape[-1],
        plan.splits,
        x.window or 0,
        x.logit_scale * LOG2_E,
        x.softcap,
        *query.stride()[:3],
        *key.stride()[:2],
        *value.stride()[:2],
        *scales.stride()[:2],
        x.lengths.stride(0) if x.lengths is not None and x.lengths.shape[0] > 1 else 0,
        *((0,) * 4 if mask is None else mask.stride()),
        *((0,) * 3 if sinks is None else sinks.stride()),
        D=channels,
        DV=width,
        READ_D=_readable(key),
        READ_DV=_readable(value),
        STRIDE_KN=key.stride(2),
        STRIDE_VN=value.stride(2),
        QUERIES=power_of_2(tokens),
        BF16=query.dtype == torch.bfloat16,
        LENGTHS=x.lengths is not None,
        MASK=kind,
        MASK_PER_ROW=mask is not None and _differs(mask, 1, 2),
        CAUSAL=x.is_causal and tokens > 1,
        WINDOW=x.window is not None,
        SPLIT=plan.splits > 1,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_D=max(32, power_of_2(channels)),
        BLOCK_DV=max(32, power_of_2(width)),
        STAGES=plan.stages,
        num_warps=plan.warps,
    )


def _combine(shares: Shares, result: Tensor, group: int) -> None:
    """Add the shares, writing ``result``."""
    _, heads, tokens, width = result.shape
    if group * tokens >= _MANY_ROWS:
        _combine_rows(shares, result, group)
        return
    rows, multiprocessors, splits = result.shape[0] * heads * tokens, _multiprocessors(result), shares.out.shape[1]
    block_s, block = min(_MAX_SPLITS, power_of_2(splits)), max(16, power_of_2(width))
    while block > 16 and (block_s * block > _MAX_TILE or rows * cdiv(width, block) < 2 * multiprocessors):
        block //= 2
    launch(_combine_kernel, (group * tokens, cdiv(width, block), shares.out.shape[0]))(
        *shares,
        result,
        heads // group,
        group,
        tokens,
        splits,
        DV=width,
        QUERIES=power_of_2(tokens),
        BLOCK_S=block_s,
        BLOCK_DV=block,
        HAS_UNITS=shares.unit is not shares.total,
        num_warps=max(1, min(4, block_s * block // 512)),
    )


def _combine_rows(shares: Shares, result: Tensor, group: int) -> None:
    """Add the shares of many rows of a key head."""
    _, heads, tokens, width = result.shape
    splits, block = shares.out.shape[1], max(16, power_of_2(width))
    rows = max(1, _ROW_TILE // block)
    launch(_combine_rows_kernel, (cdiv(group * power_of_2(tokens), rows), shares.out.shape[0]))(
        *shares,
        result,
        heads // group,
        group,
        tokens,
        splits,
        DV=width,
        QUERIES=power_of_2(tokens),
        STEP=min(_STEP, power_of_2(splits)),
        BLOCK_R=rows,
        BLOCK_DV=block,
        HAS_UNITS=shares.unit is not shares.total,
        num_warps=max(1, rows * block // 256),
    )


def _multiprocessors(x: Tensor) -> int:
    return chip_of(x.device)[1] if x.device.type == "cuda" else _INTERPRETED_MULTIPROCESSORS


def _aligned(x: Tensor) -> Tensor:
    """``x (..., tokens, channels)`` itself where pairs of channels are aligned, else a contiguous copy."""
    even = all(stride % 2 == 0 for stride in x.stride()[:3]) and x.storage_offset() % 2 == 0
    return x if even and x.stride(-1) == 1 else x.contiguous()


def _readable(x: Tensor) -> int:
    """How many channels of a row of ``x (B, Hkv, capacity, D)`` int8 to read: whole vectors where rows allow.

    Channels past D are multiplied by zeros of the query, or not stored. An aligned vector that holds a byte of a tensor
    lies inside of the tensor's allocation.
    """
    padded = cdiv(x.shape[3], 16) * 16
    aligned = x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in x.stride()[:3])
    return padded if aligned and padded <= x.stride(2) else x.shape[3]


def _differs(x: Tensor, *dimensions: int) -> bool:
    """Whether ``x`` may have different values along one of ``dimensions``."""
    return any(x.shape[i] > 1 and x.stride(i) != 0 for i in dimensions)


def _kernel_mask(x: DecodeAttentionArguments) -> tuple[Tensor | None, str]:
    """The mask as the kernel reads it, ``(B, H, N, keys)``, bool as int8; strides of 0 where it is broadcast."""
    mask = x.mask
    if mask is None:
        return None, "none"
    if mask.dtype == torch.bool:
        return mask.view(torch.int8), "bool"
    return mask, "float"


DECODE_ATTENTION = declare(
    "decode_attention(Tensor query, Tensor key, Tensor value, Tensor scales, Tensor? lengths=None, "
    "Tensor? attn_mask=None, bool is_causal=False, int? window=None, float? scale=None, float? softcap=None, "
    "Tensor? key_mean=None, Tensor? sinks=None) -> Tensor",
    DecodeAttentionArguments,
    cpu=decode_attention_ref,
    cuda=decode_attention_triton,
    fake=DecodeAttentionArguments.empty_result,
)


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scales: Tensor,
    lengths: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    key_mean: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a few queries to keys and values in INT8: ``softmax(query @ key.T * scale + attn_mask) @ value``.

    Args:
        query: ``(B, H, N, D)`` fp16, bf16 or fp32, any strides; meant for N of 1 to 16.
        key: ``(B, Hkv, capacity, D)`` int8, where Hkv divides H; D is even and at most 256. Keys may lack a constant
            (their mean), the same for all tokens of a head.
        value: ``(B, Hkv, capacity, Dv)`` int8, likewise.
        scales: ``(B, Hkv, capacity, 2)`` bf16; ``[..., 0]`` dequantizes a token's key, ``[..., 1]`` its value.
        lengths: ``(B,)`` or ``(1,)`` int32 on the same device: the number of tokens in the cache; what lies behind is
            not read. All of ``capacity`` when None. Read on the device, so a CUDA graph follows its changes.
        attn_mask: bool (True attends) or float (added to the logits), broadcastable to ``(B, H, N, keys)``. It may have
            fewer keys than ``capacity``, which then bounds ``lengths``.
        is_causal: the queries are the last N tokens (aligned bottom right): query i attends to the first
            ``length - N + i + 1`` keys.
        window: query i attends to the last ``window`` keys up to its own; older ones are not read.
        scale: of the logits; ``1 / sqrt(D)`` when None.
        softcap: logits s become ``softcap * tanh(s / softcap)`` before ``attn_mask`` is added; positive. By the general
            kernel, on Hopper too.
        key_mean: ``(B, Hkv, D)`` fp32, the constant that the keys lack, on which the weights depend with a ``softcap``
            or ``sinks`` alone.
        sinks: the logit of one more key of each row, which has no value, as of :func:`qframework.sage_attention`:
            ``(H,)``, or ``(B, H, N)`` with sizes of 1 where they are the same. By the general kernel, on Hopper too.

    Returns:
        ``(B, H, N, Dv)`` in ``query``'s dtype, in memory ``(B, N, H, Dv)``. A row that sees no key is zero.

    Numerics: on a GPU a float32 query is rounded to fp16 relative to its largest value, and P to bf16; K and V are
    exact in these formats, and sums are fp32. On Hopper, with many rows of a key head (its query heads times N, 33
    or more), queries are integers up to 32,512 times a step of their row, and P times V's scale is fp16: values whose
    scale is less than 2^-14 of the largest lose bits. On a CPU everything is fp32.

    Raises:
        UnsupportedError: an unsupported dtype or head dimension; a GPU below sm_80.
        QFrameworkError: shapes or devices that do not match; a query that requires a gradient.
    """
    refuse_gradients(NAME, "F.scaled_dot_product_attention", query=query, attn_mask=attn_mask, sinks=sinks)
    return torch.ops.qframework.decode_attention(
        query, key, value, scales, lengths, attn_mask, is_causal, window, scale, softcap, key_mean, sinks
    )
