"""The reference of quantized attention: the kernel's arithmetic in plain torch, in any float dtype.

Formula and layout: see :mod:`~qframework.kernels.attention.quantized_attention`. In float32 it is the CPU
implementation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qframework.kernels.attention.operands import (
    LOG2_E,
    Bias,
    QuantizedQK,
    Values,
    lse_shift,
    p_range,
    transposes_values,
)
from qframework.kernels.attention.quantize_qk import is_marked, unpack_int4
from qframework.kernels.attention.variants import KEY_BLOCK, QUERY_BLOCK, AttentionVariant, token_groups
from qframework.numerics import exact_matmul


def quantized_attention_ref(
    qk: QuantizedQK,
    values: Values,
    bias: Bias,
    variant: AttentionVariant,
    logit_scale: float = 1.0,
    block_n: int = KEY_BLOCK,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """``(out (B, H, N, Dv), lse (B, H, N))`` in ``dtype``, block by block like the kernel.

    In float64 it gives the kernel's result up to the kernel's own error: the operands are the same, and the arithmetic
    between the roundings that define the variant is exact.
    """
    q, k = (unpack_int4(x, qk.channels) if variant.qk_bits == 4 else x for x in (qk.q, qk.k))
    batch, heads, tokens, _ = q.shape
    keys, group = k.shape[2], heads // k.shape[1]
    unit = _unit(bias)
    q_scale, k_scale = _scales(qk, q, keys, variant)
    q_scale = q_scale * logit_scale / unit
    v = values.v.transpose(2, 3)[:, :, :keys] if transposes_values(variant.pv) else values.v
    v = v if v.is_floating_point() and v.dtype != torch.float8_e4m3fn else v.to(dtype)
    top = q.new_full((batch, heads, tokens), -torch.inf, dtype=dtype)
    total = torch.zeros_like(top)
    out = q.new_zeros((batch, heads, tokens, values.channels(transposes_values(variant.pv))), dtype=dtype)
    for start in range(0, keys, block_n):
        n = slice(start, min(start + block_n, keys))
        products = _products(q.to(dtype), _repeat(k[:, :, n].to(dtype), group).transpose(2, 3), variant)
        s = products * (q_scale.to(dtype)[..., None] * _repeat(k_scale[:, :, n].to(dtype), group)[:, :, None])
        s = _add_bias(s, qk, bias, n, keys, unit)
        new_top = torch.maximum(top, s.amax(-1))
        if variant.exponential == "integer":
            new_top = torch.where(new_top.abs() < 2.0**22, torch.ceil(new_top * unit) / unit, new_top)
        finite_top = torch.where(new_top == -torch.inf, 0.0, new_top)
        exponential = integer_exp2 if variant.exponential == "integer" else torch.exp2
        p = exponential((s - finite_top[..., None]) * unit) * p_range(variant)
        rescale = torch.exp2((top - finite_top) * unit)
        total = total * rescale + p.sum(-1)
        out = out * rescale[..., None] + _product_pv(p, _repeat(v[:, :, n], group), variant).to(dtype)
        top = new_top
    out = out / torch.where(total == 0, 1.0, total)[..., None]
    if values.scale is not None:
        out = out * _repeat(values.scale.to(dtype), group)[:, :, None]
    if values.mean is not None:
        out = torch.where((total == 0)[..., None], 0.0, out + _repeat(values.mean.to(dtype), group)[:, :, None])
    lse = top * (unit / LOG2_E) + (torch.log2(total) - lse_shift(variant)) / LOG2_E
    return out, torch.where(total == 0, -torch.inf, lse)


def integer_exp2(x: Tensor) -> Tensor:
    """2^x for x up to 0 with a linear mantissa of 8 bits, as the bits of ``128 x + 127 * 128`` say in BF16.

    Source: Schraudolph 1999. NaN stays NaN; below 2^-127 it is 0.
    """
    bits = (x * 128 + 127 * 128).round().clamp(min=0)
    return torch.where(x.isnan(), x, (bits.nan_to_num(0).to(torch.int32) << 16).view(torch.float32).to(x.dtype))


def _scales(qk: QuantizedQK, q: Tensor, keys: int, variant: AttentionVariant) -> tuple[Tensor, Tensor]:
    """The scale of each query and of each key: ``(B, H, N)`` and ``(B, Hkv, Nk)``, of ones in 16 bit."""
    if not variant.quantizes_qk:
        return q.new_ones(q.shape[:3], dtype=torch.float32), q.new_ones(qk.k.shape[:3], dtype=torch.float32)
    assert qk.q_scale is not None, "only the Triton kernel quantizes queries itself"
    assert qk.k_scale is not None
    q_scale = qk.q_scale[:, :, token_groups(variant.granularity, "query").index(q.shape[2], q.device)]
    if qk.marked:
        q_scale = q_scale.masked_fill(is_marked(q, variant.qk_bits), torch.nan)
    return q_scale, qk.k_scale[:, :, token_groups(variant.granularity, "key").index(keys, q.device)]


def _repeat(x: Tensor, group: int) -> Tensor:
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _unit(bias: Bias) -> float:
    """The factor from logits to base-2 logits: 1, or log2(e) with a float mask, next to which logits stay natural.

    Masks hold the lowest float32, which scaling would overflow.
    """
    return LOG2_E if bias.mask is not None and bias.mask.dtype != torch.bool else 1.0


def _add_bias(s: Tensor, qk: QuantizedQK, bias: Bias, n: slice, keys: int, unit: float) -> Tensor:
    """Cap the logits ``s`` of the keys in slice ``n`` and add all biases to them, in the unit of ``s``."""
    tokens, row_bias = s.shape[2], qk.row_bias
    if row_bias is not None:
        s = s + row_bias[..., n].repeat_interleave(QUERY_BLOCK, dim=2)[:, :, :tokens].to(s.dtype) / unit
    if qk.offsets is not None:
        s = s + qk.offsets[..., None].to(s.dtype) / unit
    if bias.softcap is not None:
        cap = bias.softcap * LOG2_E / unit
        s = cap * torch.tanh(s / cap)
    if (mask := bias.masks_of(s.shape[0])) is not None:
        mask = mask[..., n] if mask.shape[-1] == keys and keys > 1 else mask
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask.to(s.dtype)
    if bias.rel_h is not None and bias.rel_w is not None:
        key = torch.arange(n.start, n.stop, device=s.device)
        width = bias.rel_w.shape[-1]
        relative = bias.rel_h[..., key // width].to(s.dtype) + bias.rel_w[..., key % width].to(s.dtype)
        s = s + relative * (LOG2_E / unit)
    if bias.causal:
        query = torch.arange(tokens, device=s.device)[:, None]
        s = s.masked_fill(torch.arange(n.start, n.stop, device=s.device) > query, -torch.inf)
    return s


def _products(q: Tensor, k: Tensor, variant: AttentionVariant) -> Tensor:
    """Q K^T of one block of keys; integers are exact in float32, since sums stay below 2**24."""
    return exact_matmul(q, k) if not variant.quantizes_qk and q.dtype == torch.float32 else q @ k


def _product_pv(p: Tensor, v: Tensor, variant: AttentionVariant) -> Tensor:
    """P V of one block of keys with the variant's roundings of P; sums in P's dtype."""
    if variant.pv == "int8":
        return torch.round(p) @ v.to(p.dtype)
    if variant.pv == "fp8":
        p = p.float().to(torch.float8_e4m3fn).to(p.dtype)
    elif v.dtype != torch.float32:
        low = v.dtype if v.dtype in (torch.float16, torch.bfloat16) else torch.float16
        p = p.float().to(low).to(p.dtype)
    product = exact_matmul(p, v.float()) if p.dtype == torch.float32 else p @ v.to(p.dtype)
    narrow = variant.accumulator == "fp16" and (variant.pv == "fp8" or v.dtype == torch.float16)
    return product.to(torch.float16).to(p.dtype) if narrow else product
