"""QAttn's static mixed-precision attention: INT8 in, INT8 or float out, softmax and P V in floating point.

Formula (QAttn eq. 15-18)::

    S = s_q s_k / sqrt(d) * (Q8 K8^T)        INT32, exact; scales are positive
    O = softmax(S) (V8 * s_v)                P and V8 in float16 (V8 is exact there), FP32 accumulator
    out = clamp(round(O / out_scale), -127, 127) as int8, or O rounded once to out_dtype

Layout: as in ``qframework::sage_attention``. Scales are float32, one per tensor ``(1,)`` or per head ``(H, 1, 1)``.
Reference: ``quantized_attention_ref``. CPU: without relative positions C++ (native.py) where ``int8_linear`` is, with a
more exact P; else PyTorch's attention of the integers in float32.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor
from torch.nn import functional as F

from qframework import numerics
from qframework.kernels.attention.arguments import canonical, default_scale
from qframework.kernels.attention.hopper import dense as hopper_dense
from qframework.kernels.attention.hopper.bias import dense_bias
from qframework.kernels.attention.mixed_arguments import MixedAttentionArguments
from qframework.kernels.attention.native import native_attention
from qframework.kernels.attention.operands import LOG2_E, Bias, QuantizedQK, Values, check_offsets, last_contiguous
from qframework.kernels.attention.quantized_attention import quantized_attention_triton
from qframework.kernels.attention.reference import quantized_attention_ref
from qframework.kernels.attention.variants import AttentionVariant
from qframework.kernels.linear.cpu import CpuChoice, cpu_implementation, in_a_clean_thread
from qframework.kernels.runtime.ahead import launches_of
from qframework.kernels.runtime.chip import check_device
from qframework.kernels.runtime.native import NATIVE
from qframework.kernels.runtime.operator import declare

logger = logging.getLogger(__name__)

_NAME = "mixed_attention"
_VARIANT = AttentionVariant(8, "per_head", "int8_dequantized")


def _per_head(scale: Tensor, x: Tensor, heads: int) -> Tensor:
    """A scale per tensor or per head as ``(B, H, 1)``, contiguous."""
    return scale.reshape(1, -1, 1).expand(x.shape[0], heads, 1).contiguous()


def _operands(x: MixedAttentionArguments) -> tuple[QuantizedQK, Values, Bias]:
    call = canonical(x)
    qk = QuantizedQK(
        last_contiguous(call.q),
        _per_head(x.query_scale, call.q, call.q.shape[1]),
        last_contiguous(call.k),
        _per_head(x.key_scale, call.k, call.k.shape[1]),
        x.query.shape[-1],
        marked=False,
    )
    values = Values(last_contiguous(call.v), _per_head(x.value_scale, call.v, call.v.shape[1]))
    return qk, values, Bias(call.mask, call.rel_h, call.rel_w, x.is_causal)


def _float_products(qk: QuantizedQK, values: Values, bias: Bias, logit_scale: float) -> Tensor:
    """The same attention through PyTorch's; sums of int8 products are exact in float32, as 127**2 * 256 < 2**24."""
    assert qk.q_scale is not None
    assert qk.k_scale is not None
    assert values.scale is not None
    group = qk.q.shape[1] // qk.k.shape[1]
    q_scale = qk.q_scale * qk.k_scale.repeat_interleave(group, dim=1) * logit_scale
    wide = numerics.product_dtype(qk.q.device)
    q = qk.q.to(wide) * q_scale[..., None]
    mask = bias.masks_of(q.shape[0])
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(wide)
    if bias.causal and mask is not None:
        keep = torch.ones(q.shape[2], qk.k.shape[2], dtype=torch.bool).tril()
        mask = mask & keep if mask.dtype == torch.bool else mask.masked_fill(~keep, -torch.inf)
    k, v = qk.k.to(wide), values.v.to(wide)
    causal = bias.causal and mask is None
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=1.0, enable_gqa=group > 1)
    return out.float() * values.scale.repeat_interleave(group, dim=1)[..., None]


@functools.cache
def mixed_attention_choice() -> CpuChoice:
    """What computes ``mixed_attention`` on this CPU, one of ``NATIVE`` or ``"torch"``; tried once per process."""
    name = cpu_implementation()
    if name not in NATIVE:
        return CpuChoice("torch", {})
    reason = in_a_clean_thread(_reason_against, name)
    if reason is None:
        return CpuChoice(name, {})
    logger.info("qframework: the CPU's INT8 attention %s is not used: %s", name, reason)
    return CpuChoice("torch", {name: reason})


def _reason_against(implementation: str) -> str | None:
    generator = torch.Generator("cpu").manual_seed(0)  # also under torch.set_default_device
    q, k, v = torch.randint(-127, 128, (3, 1, 2, 70, 40), dtype=torch.int8, generator=generator, device="cpu")
    scale = torch.full((1,), 0.01, device="cpu")
    x = MixedAttentionArguments(q, k, v, scale, scale, scale, is_causal=True, out_dtype=torch.float32)
    try:
        out = native_attention(x, implementation)
    except (RuntimeError, NotImplementedError, OSError) as error:
        return f"it is not available: {error}"
    if out is None or not torch.allclose(out, _torch_attention(x), rtol=0, atol=2.0**-11):
        return "it is not exact on this processor"
    return None


def mixed_attention_cpu(x: MixedAttentionArguments) -> Tensor:
    """``mixed_attention`` on a CPU: C++, PyTorch's attention, or with relative positions the reference."""
    if x.query.numel() == 0 or x.key.numel() == 0 or x.value.numel() == 0:
        return x.empty_result().zero_()
    chosen = mixed_attention_choice().name
    out = native_attention(x, chosen) if chosen in NATIVE else None
    return _torch_attention(x) if out is None else out


def _torch_attention(x: MixedAttentionArguments) -> Tensor:
    result = x.empty_result()
    qk, values, bias = _operands(x)
    logit_scale = default_scale(x.query, x.scale)
    if x.rel_h is None:
        out = _float_products(qk, values, bias, logit_scale)
    else:
        out, _ = quantized_attention_ref(qk, values, bias, _VARIANT, logit_scale * LOG2_E)
    if x.out_scale is not None:
        out = numerics.quantize(out, x.out_scale)
    return result.copy_(out.view(result.shape))


def _on_hopper(x: MixedAttentionArguments, logit_scale: float) -> Tensor | None:
    """``mixed_attention`` by Hopper's kernels for dense calls; None for calls that they do not compute."""
    call = canonical(x)
    q, k, v = (last_contiguous(t) for t in call[:3])
    bias = dense_bias(Bias(call.mask, call.rel_h, call.rel_w, x.is_causal))
    if bias is None or logit_scale <= 0 or not hopper_dense.fits(q, k, v, x.result_dtype, x.is_causal, bias):
        return None
    check_offsets(_NAME, query=q, key=k, value=v)
    given = (x.query_scale, x.key_scale, x.value_scale, x.out_scale)
    scales = hopper_dense.DenseScales(*(None if scale is None else scale.reshape(-1) for scale in given))
    out = hopper_dense.attention_dense(q, k, v, scales, logit_scale, x.result_dtype, causal=x.is_causal, bias=bias)
    return out.view(*x.query.shape[:-1], x.value.shape[-1])


def mixed_attention_triton(x: MixedAttentionArguments) -> Tensor:
    """``mixed_attention`` on a GPU."""
    check_device(x.query.device)
    if x.query.numel() == 0 or x.key.numel() == 0:
        return x.empty_result().zero_()
    logit_scale = default_scale(x.query, x.scale) * LOG2_E
    out = _on_hopper(x, logit_scale)
    if out is not None:
        return out
    qk, values, bias = _operands(x)
    out_scale = x.out_scale.reshape(-1) if x.out_scale is not None else None
    out, _ = quantized_attention_triton(qk, values, bias, _VARIANT, logit_scale, x.result_dtype, out_scale)
    return out.view(*x.query.shape[:-1], x.value.shape[-1])


MIXED_ATTENTION = declare(
    "mixed_attention(Tensor query, Tensor key, Tensor value, Tensor query_scale, Tensor key_scale, Tensor value_scale, "
    "Tensor? attn_mask=None, bool is_causal=False, float? scale=None, bool enable_gqa=False, Tensor? out_scale=None, "
    "ScalarType? out_dtype=None, Tensor? rel_h=None, Tensor? rel_w=None) -> Tensor",
    MixedAttentionArguments,
    cpu=mixed_attention_cpu,
    cuda=mixed_attention_triton,
    fake=MixedAttentionArguments.empty_result,
    warm_up=launches_of(mixed_attention_triton),
)


def mixed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_scale: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    out_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    rel_h: Tensor | None = None,
    rel_w: Tensor | None = None,
) -> Tensor:
    """Attention of INT8 queries, keys and values with static scales.

    Args:
        query: ``(..., H, N, D)`` int8, 3-D to 5-D, any strides.
        key: ``(..., Hkv, Nk, D)`` int8.
        value: ``(..., Hkv, Nk, Dv)`` int8.
        query_scale: fp32, positive, dequantizes ``query``: ``()`` or ``(1,)`` per tensor, ``(H, 1, 1)`` per head.
        key_scale: the same for ``key``, ``(Hkv, 1, 1)`` per head.
        value_scale: the same for ``value``.
        attn_mask: bool (True attends) or float, broadcastable to ``(..., H, N, Nk)``.
        is_causal: query ``i`` attends to keys ``0..i``.
        scale: of the logits, default ``1 / sqrt(D)``.
        enable_gqa: allow ``Hkv`` to divide ``H``.
        out_scale: quantizes the result to int8, per tensor or per head (QAttn eq. 17).
        out_dtype: float16 (default), bfloat16 or float32 (QAttn eq. 18).
        rel_h: ``(..., H, N, Kh)``: adds ``rel_h[k // Kw] + rel_w[k % Kw]`` to the logits of key ``k``.
        rel_w: ``(..., H, N, Kw)``, with ``rel_h``; ``Kh * Kw`` is ``Nk``.

    Returns:
        ``(..., H, N, Dv)``, in memory ``(..., N, H, Dv)``. A row in which every key is masked is zero.

    Raises:
        UnsupportedError, QFrameworkError: an invalid dtype, device, shape or scale; a GPU below sm_80.
    """
    return torch.ops.qframework.mixed_attention(
        query, key, value, query_scale, key_scale, value_scale, attn_mask, is_causal, scale, enable_gqa, out_scale,
        out_dtype, rel_h, rel_w,
    )  # fmt: skip
