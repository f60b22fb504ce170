"""Quantized scaled dot product attention: smoothing, quantization and the attention kernel as one operator.

Formula::

    K' = K - mean(K)          smooth K: softmax is invariant        (SageAttention eq. 6)
    Q' = Q - mean(Q_block)    smooth Q: the logits mean(Q_block) K'^T are added back in FP32      (SageAttention2)
    out = softmax(quantized(Q') quantized(K')^T + ...) quantized(V)

With a soft cap the softmax is not invariant to K's mean. Its logits, one for each query, are then added in FP32::

    out = softmax(softcap * tanh((quantized(Q') quantized(K')^T + Q mean(K)^T + ...) / softcap) + ...) quantized(V)

Layout: ``query (..., H, N, D)``, ``key`` and ``value (..., Hkv, Nk, D)``, 3-D (one head) to 5-D, any strides. The
result has the memory layout (..., N, H, D), so that merging the heads is a view.
Reference and CPU implementation: the same pipeline with the reference of every step.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from qframework.kernels.attention.arguments import (
    Canonical,
    SageAttentionArguments,
    VarlenArguments,
    canonical,
    default_scale,
    without_repeated_heads,
)
from qframework.kernels.attention.auto import choose_packed_variant, choose_variant
from qframework.kernels.attention.hopper import packed as hopper_packed
from qframework.kernels.attention.hopper import specialized
from qframework.kernels.attention.hopper.prepare import can_prepare, prepare_triton
from qframework.kernels.attention.hopper.prepare_packed import prepare_packed_triton
from qframework.kernels.attention.mask_blocks import MaskBlocks, mask_blocks_triton
from qframework.kernels.attention.operands import (
    LOG2_E,
    AttentionShape,
    Bias,
    Lengths,
    QuantizedQK,
    Values,
    last_contiguous,
    transposes_values,
)
from qframework.kernels.attention.padding import hidden_keys, without_hidden
from qframework.kernels.attention.quantize_qk import quantize_tokens_ref, quantize_tokens_triton
from qframework.kernels.attention.quantize_v import quantize_values_ref, quantize_values_triton, values_in_fp16
from qframework.kernels.attention.quantized_attention import quantized_attention_triton
from qframework.kernels.attention.reference import quantized_attention_ref
from qframework.kernels.attention.row_bias import row_bias_ref, row_bias_triton
from qframework.kernels.attention.token_statistics import _block_statistics_triton, block_statistics_ref
from qframework.kernels.attention.variants import (
    QUERY_BLOCK,
    AttentionVariant,
    fp8_ranges,
    resolve,
    token_groups,
    values_dtype,
)
from qframework.kernels.runtime.ahead import launches_of
from qframework.kernels.runtime.chip import capability_of, check_device
from qframework.kernels.runtime.operator import declare


class Steps(NamedTuple):
    """The pipeline's steps in one implementation."""

    block_sums: Callable[..., Tensor]
    row_bias: Callable[..., Tensor]
    quantize: Callable[..., tuple[Tensor, Tensor]]
    quantize_values: Callable[..., tuple[Tensor, Tensor, Tensor]]
    attend: Callable[..., tuple[Tensor, Tensor | None]]
    fuses: bool  # the attention kernel can quantize queries, and key quantization can compute the mean


def _attend_ref(qk, values, bias, variant, dtype, lse, lengths):
    out, sums = quantized_attention_ref(qk, values, bias, variant, qk.factor)
    return out.to(dtype).transpose(1, 2).contiguous().transpose(1, 2), sums if lse else None


def _attend_triton(qk, values, bias, variant, dtype, lse, lengths):
    return quantized_attention_triton(qk, values, bias, variant, qk.factor, dtype, lse=lse, lengths=lengths)


TORCH_STEPS = Steps(
    lambda x, starts, longest: block_statistics_ref(x).sum,
    lambda q_mean, k, k_mean, starts, longest: row_bias_ref(q_mean, k, k_mean),
    lambda x, mean, factor, variant, role, starts, longest: quantize_tokens_ref(
        x, mean, factor, variant.granularity, role, variant.qk_bits
    ),
    lambda v, kind, v_range, smooth, starts, longest: quantize_values_ref(v, kind, v_range, smooth),
    _attend_ref,
    fuses=False,
)
TRITON_STEPS = Steps(
    lambda x, starts, longest: (
        _block_statistics_triton(last_contiguous(x), AttentionShape.of(x, starts, longest), extremes=False).sum
    ),
    row_bias_triton,
    lambda x, mean, factor, variant, role, starts, longest: quantize_tokens_triton(
        x, mean, factor, variant.granularity, role, variant.qk_bits, starts, longest
    ),
    quantize_values_triton,
    _attend_triton,
    fuses=True,
)


def _token_counts(tokens: int, starts: Tensor | None) -> Tensor | int:
    """The number of tokens of each sequence, in a shape that broadcasts to (B, H, M, D)."""
    return tokens if starts is None else (starts[1:] - starts[:-1]).clamp(min=1).view(-1, 1, 1, 1)


def _block_means(sums: Tensor, tokens: int, starts: Tensor | None) -> Tensor:
    """Means of blocks of queries; the last block may be short."""
    first = torch.arange(sums.shape[2], device=sums.device) * QUERY_BLOCK
    return sums / (_token_counts(tokens, starts) - first.view(1, 1, -1, 1)).clamp(1, QUERY_BLOCK)


def mean_of_keys(k: Tensor, steps: Steps, starts: Tensor | None, longest: int) -> Tensor:
    """K's mean over the tokens of each sequence, ``(B, Hkv, 1, D)`` float32."""
    return steps.block_sums(k, starts, longest).sum(2, keepdim=True) / _token_counts(longest, starts)


def offsets_of(q: Tensor, k_mean: Tensor | None, scale: float, steps: Steps, lengths: Lengths | None) -> Tensor | None:
    """The base-2 logits of each query and K's mean, ``(B, H, N)`` float32: what smooth K leaves out."""
    if k_mean is None:
        return None
    heads = q.shape[1]
    of = (lengths.q_starts, lengths.longest_q) if lengths else (None, q.shape[2])
    means = (k_mean * (scale * LOG2_E)).repeat_interleave(heads // k_mean.shape[1], dim=1)
    return steps.row_bias(means, q, None, *of).squeeze(2)


def quantized_qk(
    q: Tensor,
    k: Tensor,
    variant: AttentionVariant,
    scale: float,
    smooth_k: bool,
    steps: Steps,
    lengths: Lengths | None,
) -> tuple[QuantizedQK, Tensor | None]:
    """Q and K as the variant multiplies them, and K's mean ``(B, Hkv, 1, D)`` where it was subtracted."""
    if not variant.quantizes_qk:
        operands = (last_contiguous(q), None, last_contiguous(k), None, q.shape[-1])
        return QuantizedQK(*operands, factor=scale * LOG2_E, marked=False), None
    q_of = (lengths.q_starts, lengths.longest_q) if lengths else (None, q.shape[2])
    k_of = (lengths.k_starts, lengths.longest_k) if lengths else (None, k.shape[2])
    k_mean = q_mean = row_bias = None
    if smooth_k:
        k_mean = mean_of_keys(k, steps, *k_of)
    if variant.smooth_q:
        q_mean = _block_means(steps.block_sums(q, *q_of), q_of[1], q_of[0])
        row_bias = steps.row_bias(q_mean * (scale * LOG2_E), k, k_mean, *k_of)
    q8, q_scale = steps.quantize(q, q_mean, scale * LOG2_E, variant, "query", *q_of)
    k8, k_scale = steps.quantize(k, k_mean, 1.0, variant, "key", *k_of)
    return QuantizedQK(q8, q_scale, k8, k_scale, q.shape[-1], row_bias), k_mean


# Up to this many keys, every program computes their mean itself from cached data; more keys get a kernel for the mean.
_FEW_KEYS = 512


def _fused(
    q: Tensor,
    k: Tensor,
    variant: AttentionVariant,
    scale: float,
    smooth_k: bool,
    capped: bool,
    lengths: Lengths | None,
) -> QuantizedQK:
    """Quantized K and float queries: each program of the attention kernel quantizes its own tile of queries."""
    starts, longest = (lengths.k_starts, lengths.longest_k) if lengths else (None, k.shape[2])
    smooth_within = smooth_k and longest <= _FEW_KEYS and not capped
    k_mean = None
    if smooth_k and not smooth_within:
        k_mean = mean_of_keys(k, TRITON_STEPS, starts, longest)
    k8, k_scale = quantize_tokens_triton(
        k, k_mean, 1.0, variant.granularity, "key", 8, starts, longest, smooth=smooth_within
    )
    offsets = offsets_of(q, k_mean, scale, TRITON_STEPS, lengths) if capped else None
    return QuantizedQK(last_contiguous(q), None, k8, k_scale, q.shape[-1], offsets=offsets, factor=scale * LOG2_E)


def _can_fuse(q: Tensor, variant: AttentionVariant, return_lse: bool) -> bool:
    """Whether the attention kernel can quantize the queries.

    Groups of queries must fit a tile. Heads wider than 128 would spill registers, and LSE needs K's mean.
    """
    spans = token_groups(variant.granularity, "query").span <= QUERY_BLOCK
    return variant.qk_bits == 8 and spans and not variant.smooth_q and q.shape[-1] <= 128 and not return_lse


def quantized_values(v: Tensor, variant: AttentionVariant, steps: Steps, lengths: Lengths | None) -> Values:
    """V ``(B, Hkv, Nk, Dv)`` as the variant multiplies it: in 8 bit with scales per channel, or in float."""
    of = (lengths.k_starts, lengths.longest_k) if lengths else (None, 0)
    if transposes_values(variant.pv):
        v_range = 127.0 if variant.pv == "int8" else fp8_ranges(variant.accumulator)[1]
        q, scale, mean = steps.quantize_values(v, variant.pv, v_range, variant.smooth_v, *of)
        return Values(q, scale, mean if variant.smooth_v else None)
    if variant.pv == "int8_dequantized":
        whole = AttentionVariant(8, "per_tensor" if variant.granularity == "per_tensor" else "per_head")
        q, scale = steps.quantize(v, None, 1.0, whole, "key", *of)
        return Values(q, scale)
    if values_dtype(variant, v.dtype, capability_of(v.device)) != v.dtype:
        v, scale = values_in_fp16(v, packed=lengths is not None)
        return Values(v, scale.expand(lengths.q_starts.shape[0] - 1, -1, -1).contiguous() if lengths else scale)
    return Values(last_contiguous(v))


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias, variant: AttentionVariant, scale: float, smooth_k: bool
) -> tuple[Tensor, Tensor | None]:
    """Hopper's kernel with the integer exponential or with FP8 values, whose operands are prepared in one pass."""
    seen = None
    if bias.mask is not None:
        blocks = bias.blocks
        if blocks is None or blocks.seen is None:
            blocks = mask_blocks_triton(bias.mask, q.shape[2], k.shape[2], bias.causal, k.shape[1])
        bias, seen = bias._replace(blocks=blocks), blocks.seen
    qk, values = prepare_triton(q, k, v, variant, scale, smooth_k, seen)
    return _attend_triton(qk, values, bias, variant, q.dtype, False, None)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias,
    variant: AttentionVariant,
    scale: float,
    smooth_k: bool,
    return_lse: bool,
    steps: Steps,
    lengths: Lengths | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Dense ``(B, H, N, D)``, or packed with ``lengths``."""
    if return_lse:
        variant = replace(variant, exponential="exact")
    capped = bias.softcap is not None
    plain = bias.only_bool and lengths is None and not return_lse and not capped
    at = (q.dtype, capability_of(q.device), bias.mask is not None)
    if plain and steps.fuses and can_prepare(variant) and specialized.fits(q, k, v, variant, *at):
        return _prepared(q, k, v, bias, variant, scale, smooth_k)
    integer = steps.fuses and variant.exponential == "integer" and not return_lse and not capped
    if integer and lengths is not None and hopper_packed.fits_packed(q, k, v, variant, lengths):
        qk, cast = prepare_packed_triton(q, k, v, variant, scale, smooth_k, lengths)
        return hopper_packed.attention_packed(qk, cast, variant, 1.0, bias.causal, lengths, q.dtype), None
    k, v = _without_hidden(k, v, bias.mask, variant, smooth_k)
    values = quantized_values(v, variant, steps, lengths)
    plain = plain and values.scale is None
    on_hopper = plain and specialized.fits(q, k, values.v, variant, *at)
    if lengths is not None and values.scale is None and not return_lse and not capped:
        on_hopper = hopper_packed.fits_packed(q, k, values.v, variant, lengths)
    if steps.fuses and not on_hopper and variant.quantizes_qk and _can_fuse(q, variant, return_lse):
        qk = _fused(q, k, variant, scale, smooth_k, capped, lengths)
        return _attend_triton(qk, values, bias, variant, q.dtype, False, lengths)
    qk, k_mean = quantized_qk(q, k, variant, scale, smooth_k, steps, lengths)
    if capped:
        qk = qk._replace(offsets=offsets_of(q, k_mean, scale, steps, lengths))
    out, lse = steps.attend(qk, values, bias, variant, q.dtype, return_lse, lengths)
    if lse is not None and k_mean is not None and not capped:
        # softmax is invariant to the mean, the sum of exponentials is not
        group = q.shape[1] // k.shape[1]
        lse = lse + (q.float() * k_mean.repeat_interleave(group, dim=1)).sum(-1) * scale
    return out, lse


def _sage_attention(x: SageAttentionArguments, steps: Steps, blocks: MaskBlocks | None = None) -> tuple[Tensor, Tensor]:
    """``blocks`` are those of the mask, if they are known."""
    shape = (*x.query.shape[:-1], x.value.shape[-1])
    call = canonical(x)
    if blocks is None or blocks.seen is None:  # which are of as many heads
        call = without_repeated_heads(call)
    if call.q.numel() == 0 or call.k.numel() == 0 or x.value.shape[-1] == 0:
        out, lse = x.empty_result()
        return out.zero_(), lse.fill_(-torch.inf)
    call = reached(call) if x.is_causal else call
    bias = Bias(call.mask, call.rel_h, call.rel_w, x.is_causal, blocks, x.softcap)
    plain = bias.only_bool and not x.return_lse and x.softcap is None
    auto = x.variant == "auto"
    masked = call.mask is not None
    chosen = resolve(choose_variant(call.q, call.k, call.v, call.k.shape[2], plain, masked) if auto else x.variant)
    scale = default_scale(x.query, x.scale)
    result, sums = _attention(call.q, call.k, call.v, bias, chosen, scale, x.smooth_k, x.return_lse, steps)
    return result.view(shape), sums.view(shape[:-1]) if sums is not None else x.empty_lse()


def reached(call: Canonical) -> Canonical:
    """A causal ``call`` without the keys and values after the last query: they must not affect means and scales."""
    queries, keys = call.q.shape[2], call.k.shape[2]
    if keys <= queries or call.rel_h is not None:
        return call
    mask = call.mask[..., :queries] if call.mask is not None and call.mask.shape[-1] == keys else call.mask
    return call._replace(k=call.k[:, :, :queries], v=call.v[:, :, :queries], mask=mask)


def _without_hidden(
    k: Tensor, v: Tensor, mask: Tensor | None, variant: AttentionVariant, smooth_k: bool
) -> tuple[Tensor, Tensor]:
    """K and V where keys that the mask hides from every query do not affect means and scales either."""
    if mask is None or (not variant.quantizes_qk and variant.pv == "fp16" and not variant.smooth_v):
        return k, v  # with nothing quantized, nothing is shared among keys
    hidden = hidden_keys(mask, *k.shape[:3])
    if hidden is None:
        return k, v
    return without_hidden(k, hidden, smooth_k), without_hidden(v, hidden, variant.smooth_v)


def sage_attention_cpu(x: SageAttentionArguments) -> tuple[Tensor, Tensor]:
    """``sage_attention`` by the reference of every step."""
    return _sage_attention(x, TORCH_STEPS)


def sage_attention_triton(x: SageAttentionArguments, blocks: MaskBlocks | None = None) -> tuple[Tensor, Tensor]:
    """``sage_attention`` on a GPU, with the ``blocks`` of its mask if they are known."""
    check_device(x.query.device)
    return _sage_attention(x, TRITON_STEPS, blocks)


SAGE_ATTENTION = declare(
    "sage_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, bool is_causal=False, "
    "float? scale=None, bool enable_gqa=False, str variant='auto', bool smooth_k=True, bool return_lse=False, "
    "Tensor? rel_h=None, Tensor? rel_w=None, float? softcap=None) -> (Tensor, Tensor)",
    SageAttentionArguments,
    cpu=sage_attention_cpu,
    cuda=sage_attention_triton,
    fake=SageAttentionArguments.empty_result,
    warm_up=launches_of(sage_attention_triton),
)


# Packed sequences -----------------------------------------------------------------------------------------------------

# On a GPU, checking the offsets would synchronize in every call; the kernels clip offsets that are out of range.
_CHECK_ON_GPU = os.environ.get("QFRAMEWORK_CHECK_OFFSETS", "0") == "1"


def _varlen_variant(x: VarlenArguments, lengths: Lengths) -> AttentionVariant:
    if x.variant != "auto":
        return resolve(x.variant)
    if x.softcap is not None:
        return resolve(choose_variant(x.query, x.key, x.value, lengths.longest_k, plain=False))
    return resolve(choose_packed_variant(x.query, x.key, x.value, lengths, x.is_causal))


def sage_attention_varlen_cpu(x: VarlenArguments) -> Tensor:
    """``sage_attention_varlen``, one sequence at a time."""
    chosen = _varlen_variant(x, Lengths(x.cu_seqlens_q, x.cu_seqlens_k, x.max_seqlen_q, x.max_seqlen_k))
    out = x.empty_result().zero_()
    scale = default_scale(x.query, x.scale)
    for q_rows, k_rows in zip(*x.sequences(), strict=True):
        q, k, v = (t.transpose(0, 1)[None] for t in (x.query[q_rows], x.key[k_rows], x.value[k_rows]))
        if q.numel() and k.numel():
            if x.is_causal:
                q, k, v, *_ = reached(Canonical(q, k, v, None, None, None))
            bias = Bias(causal=x.is_causal, softcap=x.softcap)
            dense, _ = _attention(q, k, v, bias, chosen, scale, x.smooth_k, False, TORCH_STEPS)
            out[q_rows] = dense[0].transpose(0, 1)
    return out


def sage_attention_varlen_triton(x: VarlenArguments) -> Tensor:
    """``sage_attention_varlen`` on a GPU, all sequences in one launch."""
    check_device(x.query.device)
    if _CHECK_ON_GPU:
        x.sequences()
    lengths = Lengths(x.cu_seqlens_q.contiguous(), x.cu_seqlens_k.contiguous(), x.max_seqlen_q, x.max_seqlen_k)
    chosen = _varlen_variant(x, lengths)
    if x.query.numel() == 0 or x.key.numel() == 0:
        return x.empty_result().zero_()
    query, key, value = last_contiguous(x.query), last_contiguous(x.key), last_contiguous(x.value)
    bias, scale = Bias(causal=x.is_causal, softcap=x.softcap), default_scale(x.query, x.scale)
    out, _ = _attention(query, key, value, bias, chosen, scale, x.smooth_k, False, TRITON_STEPS, lengths)
    return out


SAGE_ATTENTION_VARLEN = declare(
    "sage_attention_varlen(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, bool is_causal=False, float? scale=None, str variant='auto', "
    "bool smooth_k=True, float? softcap=None) -> Tensor",
    VarlenArguments,
    cpu=sage_attention_varlen_cpu,
    cuda=sage_attention_varlen_triton,
    fake=VarlenArguments.empty_result,
)
