"""Attention of quantized queries and keys, with P and V in 16 bit, INT8 or FP8: one kernel for every published variant.

Formula, over blocks j of keys with an online softmax (SageAttention algorithm 1, in base 2)::

    S_j = Q8 K8_j^T * s_q s_k * logit_scale + row_bias_j
    S_j = softcap * tanh((S_j + offsets) / softcap)        with a soft cap (Gemma 2, section 2)
    S_j = S_j + mask_j + relative positions
    m   = max(m, rowmax(S_j)),   P_j = P_range * exp2(S_j - m),   l = l * exp2(m_old - m) + rowsum(P_j)
    O   = O * exp2(m_old - m) + round(P_j) V_j          out = O / l * s_v + mean_v

``P_range`` (127 for INT8, 448 or 224 for FP8, 1/64 for FP16 accumulators, else 1) is folded into the exponent and
cancels with ``l``. INT8 and FP8 products, and those with an FP16 accumulator, start at zero in every block of keys and
are then added to the FP32 buffer O (the two-level accumulation of SageAttention2). 16-bit products with an FP32
accumulator are accumulated in O directly.

Layout: ``q (B, H, N, D)``, ``k (B, Hkv, Nk, D)`` int8 with scales ``(B, H, G)``; ``v (B, Hkv, Nk, Dv)`` in 16 or 32 bit
or int8 (QAttn), or ``(B, Hkv, Dv, P)`` int8 or FP8 from ``value_quantize``. ``out (B, H, N, Dv)`` in the memory order
(B, N, H, Dv), so that merging the heads is a view. Reference: ``quantized_attention_ref``. Causal is aligned top-left.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.attention.arguments import MAX_HEAD_DIM
from qframework.kernels.attention.hopper import dense as hopper_dense
from qframework.kernels.attention.hopper import packed as hopper_packed
from qframework.kernels.attention.hopper import specialized
from qframework.kernels.attention.hopper.bias import dense_bias
from qframework.kernels.attention.mask_blocks import MaskSizes, mask_blocks_triton
from qframework.kernels.attention.operands import (
    AttentionShape,
    Bias,
    Lengths,
    QuantizedQK,
    Values,
    check_offsets,
    last_contiguous,
    lse_shift,
    p_range,
    query_memory_order,
    transposes_values,
)
from qframework.kernels.attention.quantize_v import padded_tokens
from qframework.kernels.attention.reference import quantized_attention_ref
from qframework.kernels.attention.tiles import attention_tile
from qframework.kernels.attention.triton import (
    Heads,
    Layout,
    Mask,
    PositionFactors,
    Product,
    RowBias,
    Scales,
    _quantized_attention_kernel,
)
from qframework.kernels.attention.variants import (
    VARIANTS,
    AttentionVariant,
    check_fp16_ranges,
    fp8_ranges,
    resolve,
    token_groups,
)
from qframework.kernels.runtime.checks import check_dtype, check_same_device, check_shape
from qframework.kernels.runtime.chip import capability_of, check_device
from qframework.kernels.runtime.launch import cdiv, launch, power_of_2
from qframework.kernels.runtime.operator import declare
from qframework.numerics import FLOAT_DTYPES


def quantized_attention_triton(
    qk: QuantizedQK,
    values: Values,
    bias: Bias,
    variant: AttentionVariant,
    logit_scale: float,
    dtype: torch.dtype,
    out_scale: Tensor | None = None,
    lse: bool = False,
    lengths: Lengths | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Launch the kernel and return ``(out, lse)``, with ``out`` in ``dtype``, int8 where ``out_scale`` is given.

    With ``lengths`` queries and keys are packed, ``(total, H, D)``.
    """
    check_device(qk.q.device)
    transposed = transposes_values(variant.pv)
    q_starts, k_starts = (lengths.q_starts, lengths.k_starts) if lengths else (None, None)
    q_shape = AttentionShape.of(qk.q, q_starts, lengths.longest_q if lengths else 0)
    k_shape = AttentionShape.of(qk.k, k_starts, lengths.longest_k if lengths else 0)
    v_strides = values.v.stride()[:3] if transposed else AttentionShape.of(values.v, k_starts).strides(values.v)
    channels = values.channels(transposed)
    check_offsets("attention", query=qk.q, key=qk.k, value=values.v)
    batch, heads, tokens, stored = q_shape[:4]
    if lengths:
        out = values.v.new_empty((qk.q.shape[0], heads, channels), dtype=dtype)
    else:
        out = query_memory_order(batch, heads, tokens, channels, qk.q, dtype)
    sums = torch.empty((batch, heads, tokens), dtype=torch.float32, device=qk.q.device) if lse else None
    if out.numel() == 0 or k_shape.tokens == 0:
        return out.zero_(), sums.fill_(-torch.inf) if sums is not None else None
    uncapped = bias.softcap is None
    dense = lengths is None and logit_scale > 0 and uncapped
    added = dense_bias(bias) if dense and (bias.adds_nothing or not lse) else None
    exact = variant == VARIANTS["unquantized"]
    masked = bias.mask is not None and bias.only_bool
    operands = (qk.q, qk.k, values.v, hopper_dense.DenseScales(), logit_scale, dtype)
    if bias.mask is not None and masked and exact and dense:
        found = bias.blocks
        row = found.order.shape[2] == 1 if found else MaskSizes.of(bias.mask).rows == 1 and not bias.causal
        if hopper_dense.fits_mask(qk.q, qk.k, values.v, dtype, row):
            blocks = found or mask_blocks_triton(bias.mask, tokens, k_shape.tokens, bias.causal)
            return hopper_dense.attention_dense(*operands, blocks=blocks, lse=sums), sums
    if added is not None and exact and hopper_dense.fits(qk.q, qk.k, values.v, dtype, bias.causal, added):
        return hopper_dense.attention_dense(*operands, causal=bias.causal, bias=added, lse=sums), sums
    plain = lengths is None and out_scale is None and (values.scale is None or values.paired)
    plain = plain and (not lse or specialized.has_lse(variant, bias))
    int8 = qk.q_scale is not None and qk.marked and qk.row_bias is None
    normed = variant.exponential == "exact" or qk.k_norm is not None
    # Hopper's kernel takes maxima of products before it scales them.
    readable = normed and (int8 or not variant.quantizes_qk) and logit_scale > 0
    at = (capability_of(qk.q.device), masked, specialized.added_by(bias, k_shape.tokens))
    if plain and readable and specialized.fits(qk.q, qk.k, values.v, variant, dtype, *at, values.paired, not uncapped):
        return specialized.attention_hopper(qk, values, variant, logit_scale, bias, dtype, lse)
    if values.paired:
        raise QFrameworkError("quantized_attention: values must not be paired, got a call that Hopper's kernel leaves")
    unbiased = bias.mask is None and bias.rel_h is None and not lse and out_scale is None and values.scale is None
    int8 = int8 and qk.q.dtype == torch.int8
    packable = unbiased and normed and logit_scale > 0 and uncapped and (int8 or not variant.quantizes_qk)
    if lengths is not None and packable and hopper_packed.fits_packed(qk.q, qk.k, values.v, variant, lengths):
        return hopper_packed.attention_packed(qk, values.v, variant, logit_scale, bias.causal, lengths, dtype), None
    mode = _mode(variant, values.v)
    q_groups, k_groups = token_groups(variant.granularity, "query"), token_groups(variant.granularity, "key")
    quantize_q = qk.q_scale is None and variant.quantizes_qk
    tile = attention_tile(qk.q.device, tokens, max(qk.channels, channels), mode)
    if quantize_q:
        tile = tile.holding(q_groups.span)
    whole_rows = bias.rel_w is not None and bias.rel_w.shape[-1] == tile.block_n
    if whole_rows and tile.block_m >= 128:  # rel_w takes registers next to the accumulator
        tile = tile._replace(num_warps=8)
    accumulate_fp16 = variant.accumulator == "fp16" and (mode == "fp8" or values.v.dtype == torch.float16)
    if accumulate_fp16 and mode == "fp8":
        check_fp16_ranges(tile.block_n, *fp8_ranges("fp16"))
    v_scale, mean = values.scale, values.mean
    layout = Layout(
        d=stored,
        dv=channels,
        group=heads // k_shape.heads,
        block_d=max(power_of_2(stored), 32),
        block_dv=max(power_of_2(channels), 32),
        qk_bits=variant.qk_bits,
        marked=qk.marked and qk.q_scale is not None,
        mask="none" if bias.mask is None else "bool" if bias.mask.dtype == torch.bool else "float",
        whole_rows=whole_rows,
        whole_blocks=lengths is None and _whole_blocks(bias, qk.k, tile.block_n),
        v_scale_per_channel=v_scale is not None and v_scale.shape[-1] == channels,
        out_scale_per_head=out_scale is not None and out_scale.numel() > 1,
    )
    product = Product(
        mode=mode,
        accumulate_fp16=accumulate_fp16,
        round_fp8=mode == "fp8" and values.v.dtype == torch.float16,
        p_shift=math.log2(p_range(variant)),
        integer=variant.exponential == "integer",
        lse_shift=lse_shift(variant),
    )
    q_count, k_count = (1 if scale is None else scale.shape[2] for scale in (qk.q_scale, qk.k_scale))
    launch(_quantized_attention_kernel, (cdiv(tokens, tile.block_m) * heads * batch,))(
        Heads(qk.q, *q_shape.strides(qk.q)),
        Heads(qk.k, *k_shape.strides(qk.k)),
        Heads(values.v, *v_strides),
        Heads(out, *q_shape._replace(channels=channels).strides(out)),
        Scales(qk.q_scale, q_count, qk.k_scale, k_count, v_scale, mean, out_scale),
        None if qk.row_bias is None else RowBias(qk.row_bias, qk.row_bias.shape[2]),
        _mask(bias),
        _relative_positions(bias),
        sums,
        qk.offsets,
        None if lengths is None else (q_starts, k_starts),
        bias.softcap,
        logit_scale,
        heads,
        tokens,
        k_shape.tokens,
        q_shape.total,
        k_shape.total,
        LAYOUT=layout,
        PRODUCT=product,
        Q_GROUPS=q_groups,
        K_GROUPS=k_groups,
        CAUSAL=bias.causal,
        TILE=tile,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out, sums


def _mode(variant: AttentionVariant, v: Tensor) -> str:
    """The kernel's product of P and V: the variant's, or "fp32" where V stays in float32."""
    return "fp32" if variant.pv == "fp16" and v.dtype == torch.float32 else variant.pv


def _whole_blocks(bias: Bias, k: Tensor, block_n: int) -> bool:
    """Whether all blocks of ``k (B, Hkv, Nk, D)`` have ``block_n`` keys, and gain from a kernel that relies on it.

    Those with a mask do, whose next block is then copied to shared memory ahead, of which other chips have too little.
    """
    hopper = capability_of(k.device) in (None, (9, 0))
    small = bias.mask is not None and bias.mask.element_size() <= 2 and k.element_size() <= 2
    return hopper and small and k.shape[2] % block_n == 0


def _mask(bias: Bias) -> Mask | None:
    if bias.mask is None:
        return None
    data = bias.mask.view(torch.uint8) if bias.mask.dtype == torch.bool else bias.mask
    return Mask(data, bias.mask.shape[0], *_broadcast_strides(bias.mask, 4))


def _relative_positions(bias: Bias) -> PositionFactors | None:
    if bias.rel_h is None or bias.rel_w is None:
        return None
    height, width = last_contiguous(bias.rel_h), last_contiguous(bias.rel_w)
    (batch_h, head_h, token_h), (batch_w, head_w, token_w) = (_broadcast_strides(x, 3) for x in (height, width))
    return PositionFactors(height, batch_h, head_h, token_h, width, batch_w, head_w, token_w, width.shape[-1])


def _broadcast_strides(x: Tensor, count: int) -> tuple[int, ...]:
    """The first ``count`` strides, 0 where a dimension of 1 broadcasts."""
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape[:count], x.stride()[:count], strict=True))


# The operator ---------------------------------------------------------------------------------------------------------


class QuantizedAttentionArguments(NamedTuple):
    """The arguments of ``qframework::quantized_attention``; see :func:`quantized_attention`."""

    q: Tensor
    q_scale: Tensor
    k: Tensor
    k_scale: Tensor
    v: Tensor
    v_scale: Tensor | None = None
    v_mean: Tensor | None = None
    row_bias: Tensor | None = None
    attn_mask: Tensor | None = None
    rel_h: Tensor | None = None
    rel_w: Tensor | None = None
    is_causal: bool = False
    logit_scale: float = 1.0
    variant: str = "sage_b"
    channels: int | None = None
    return_lse: bool = False
    out_dtype: torch.dtype | None = None

    @property
    def chosen(self) -> AttentionVariant:
        """The resolved variant."""
        return resolve(self.variant)

    @property
    def width(self) -> int:
        """Channels of queries and keys; INT4 stores two to a byte."""
        return self.channels if self.channels is not None else self.q.shape[3] * (2 if self.chosen.qk_bits == 4 else 1)

    def empty_result(self) -> tuple[Tensor, Tensor]:
        """Uninitialized result and log-sum-exp."""
        q, width = self.q, self.v.shape[2 if transposes_values(self.chosen.pv) else 3]
        out = query_memory_order(q.shape[0], q.shape[1], q.shape[2], width, q, self.out_dtype or torch.float16)
        return out, q.new_empty(q.shape[:3] if self.return_lse else (0,), dtype=torch.float32)

    def check(self) -> None:
        """Raise QFrameworkError for an invalid argument."""
        q, q_scale, k, k_scale, v, v_scale, v_mean, row_bias, attn_mask, rel_h, rel_w = self[:11]
        variant = self.variant
        name, chosen = "quantized_attention", self.chosen
        others = {"v_scale": v_scale, "v_mean": v_mean, "row_bias": row_bias, "attn_mask": attn_mask}
        others |= {"rel_h": rel_h, "rel_w": rel_w}
        check_same_device(name, q, q_scale=q_scale, k=k, k_scale=k_scale, v=v, **others)
        for argument, x in (("q", q), ("k", k), ("v", v)):
            if x.ndim != 4:
                raise QFrameworkError(f"{name}: {argument} must have 4 dimensions, got shape {tuple(x.shape)}")
        if not chosen.quantizes_qk:
            raise UnsupportedError(f"{name}: variant must quantize Q and K, got {variant!r}. Call sage_attention")
        for argument, x in (("q", q), ("k", k)):
            check_dtype(name, argument, x, (torch.int8,))
        if chosen.pv == "fp16":
            check_dtype(name, "v", v, FLOAT_DTYPES)
        elif v_scale is None:
            raise QFrameworkError(f"{name}: v_scale must be value_quantize's scale for variant {variant!r}, got None")
        if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % max(k.shape[1], 1):
            raise QFrameworkError(
                f"{name}: q and k must have shapes (B, H, N, D) and (B, Hkv, Nk, D) where Hkv divides H, got "
                f"{tuple(q.shape)} and {tuple(k.shape)}"
            )
        for argument, scale, x, role in (("q_scale", q_scale, q, "query"), ("k_scale", k_scale, k, "key")):
            check_dtype(name, argument, scale, (torch.float32,))
            groups = token_groups(chosen.granularity, role).count(x.shape[2])
            check_shape(name, argument, scale, (*x.shape[:2], groups))
        _check_values(name, v, k, transposes_values(chosen.pv))
        if attn_mask is not None and attn_mask.ndim != 4:
            raise QFrameworkError(f"{name}: attn_mask must have 4 dimensions, got shape {tuple(attn_mask.shape)}")
        if max(self.width, q.shape[3]) > MAX_HEAD_DIM:
            raise UnsupportedError(
                f"{name}: q must have a head dimension of at most {MAX_HEAD_DIM}, got shape {tuple(q.shape)}"
            )


def _check_values(name: str, v: Tensor, k: Tensor, transposed: bool) -> None:
    """Raise QFrameworkError where ``v`` has fewer tokens than the kernel reads, or other heads than ``k``."""
    keys = padded_tokens(k.shape[2]) if transposed else k.shape[2]
    if v.shape[:2] != k.shape[:2] or v.shape[3 if transposed else 2] != keys:
        layout = f"(B, Hkv, Dv, {keys}) from value_quantize" if transposed else f"(B, Hkv, {keys}, Dv)"
        raise QFrameworkError(f"{name}: v must have shape {layout} for k {tuple(k.shape)}, got {tuple(v.shape)}")


def _operands(x: QuantizedAttentionArguments) -> tuple[QuantizedQK, Values, Bias]:
    v_scale, v_mean = (t.contiguous() if t is not None else None for t in (x.v_scale, x.v_mean))
    row_bias = x.row_bias.contiguous() if x.row_bias is not None else None
    q, k = last_contiguous(x.q), last_contiguous(x.k)
    qk = QuantizedQK(q, x.q_scale.contiguous(), k, x.k_scale.contiguous(), x.width, row_bias)
    values = x.v.contiguous() if transposes_values(x.chosen.pv) else last_contiguous(x.v)
    return qk, Values(values, v_scale, v_mean), Bias(x.attn_mask, x.rel_h, x.rel_w, x.is_causal)


def _quantized_attention_cpu(x: QuantizedAttentionArguments) -> tuple[Tensor, Tensor]:
    result, no_lse = x._replace(return_lse=False).empty_result()
    out, lse = quantized_attention_ref(*_operands(x), x.chosen, x.logit_scale)
    return result.copy_(out), lse if x.return_lse else no_lse


def _quantized_attention_cuda(x: QuantizedAttentionArguments) -> tuple[Tensor, Tensor]:
    dtype = x.out_dtype or torch.float16
    out, lse = quantized_attention_triton(*_operands(x), x.chosen, x.logit_scale, dtype, lse=x.return_lse)
    return out, lse if lse is not None else x.q_scale.new_empty(0)


QUANTIZED_ATTENTION = declare(
    "quantized_attention(Tensor q, Tensor q_scale, Tensor k, Tensor k_scale, Tensor v, Tensor? v_scale=None, "
    "Tensor? v_mean=None, Tensor? row_bias=None, Tensor? attn_mask=None, Tensor? rel_h=None, Tensor? rel_w=None, "
    "bool is_causal=False, float logit_scale=1.0, str variant='sage_b', SymInt? channels=None, bool return_lse=False, "
    "ScalarType? out_dtype=None) -> (Tensor, Tensor)",
    QuantizedAttentionArguments,
    cpu=_quantized_attention_cpu,
    cuda=_quantized_attention_cuda,
    fake=QuantizedAttentionArguments.empty_result,
)


def quantized_attention(
    q: Tensor,
    q_scale: Tensor,
    k: Tensor,
    k_scale: Tensor,
    v: Tensor,
    v_scale: Tensor | None = None,
    v_mean: Tensor | None = None,
    row_bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    rel_h: Tensor | None = None,
    rel_w: Tensor | None = None,
    is_causal: bool = False,
    logit_scale: float = 1.0,
    variant: str = "sage_b",
    channels: int | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of quantized queries and keys, for pipelines that quantize elsewhere (RoPE, a KV cache).

    Args:
        q: ``(B, H, N, D)`` int8 from ``attention_quantize`` or ``rope_quantize`` with role ``"query"``. They mark a
            query with NaN by a row that starts with -128 (INT4: -8), whose result is NaN.
        q_scale: its scales, ``(B, H, G)`` fp32.
        k: ``(B, Hkv, Nk, D)`` int8, quantized with role ``"key"``; ``Hkv`` divides ``H``.
        k_scale: its scales.
        v: ``(B, Hkv, Nk, Dv)`` float for ``pv="fp16"``, int8 with ``v_scale (B, Hkv, 1)`` for
            ``pv="int8_dequantized"``, else from ``value_quantize``.
        v_scale: V's scale, with quantized values.
        v_mean: ``value_quantize``'s mean, with smooth V.
        row_bias: ``(B, H, ceil(N / 128), Nk)`` float32, smooth Q's logits in base 2.
        attn_mask: bool or float, four dimensions, 1 where it broadcasts.
        rel_h: decomposed relative positions as in ``mixed_attention``.
        rel_w: with ``rel_h``.
        is_causal: query ``i`` attends to keys ``0..i``.
        logit_scale: factor from ``q k`` to base-2 logits; 1.0 where ``attention_quantize`` folded it into Q.
        variant: name or spec of the variant that the operands belong to.
        channels: D, for packed INT4 operands with an odd D.
        return_lse: also return the log of the sum of exponentials, without a correction for K's mean.
        out_dtype: float16 by default.

    Returns:
        ``out (B, H, N, Dv)``, in memory (B, N, H, Dv), and ``lse (B, H, N)`` float32 or an empty tensor.

    Raises:
        UnsupportedError, QFrameworkError: an invalid dtype, device, shape or scale; a GPU below sm_80.
    """
    return torch.ops.qframework.quantized_attention(
        q, q_scale, k, k_scale, v, v_scale, v_mean, row_bias, attn_mask, rel_h, rel_w, is_causal, logit_scale, variant,
        channels, return_lse, out_dtype,
    )  # fmt: skip
