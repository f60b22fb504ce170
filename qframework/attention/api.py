"""Quantized attention as functions: dense (``sage_attention``) and packed (``sage_attention_varlen``)."""

from __future__ import annotations

from typing import Literal, get_args, overload

import torch
from torch import Tensor

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.attention.variants import AttentionVariant, resolve
from qframework.kernels.runtime.operator import transform_in_force

TensorLayout = Literal["HND", "NHD"]


@overload
def sage_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    tensor_layout: TensorLayout = "HND",
    variant: str | AttentionVariant = "auto",
    smooth_k: bool = True,
    return_lse: Literal[False] = False,
    sm_scale: float | None = None,
) -> Tensor: ...
@overload
def sage_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    tensor_layout: TensorLayout = "HND",
    variant: str | AttentionVariant = "auto",
    smooth_k: bool = True,
    return_lse: Literal[True],
    sm_scale: float | None = None,
) -> tuple[Tensor, Tensor]: ...
def sage_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    tensor_layout: TensorLayout = "HND",
    variant: str | AttentionVariant = "auto",
    smooth_k: bool = True,
    return_lse: bool = False,
    sm_scale: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax(query @ key.T * scale + attn_mask) @ value`` with quantized products.

    The parameters of ``F.scaled_dot_product_attention`` in its order, then ours by keyword.

    Args:
        query: ``(..., Hq, Nq, D)``, 3-D ``(B, Nq, D)`` to 5-D, or with heads and tokens exchanged under ``"NHD"``;
            fp16, bf16 or fp32, any strides, D from 1 to 256.
        key: ``(..., Hkv, Nk, D)``, dtype and device of ``query``. Leading dimensions broadcast.
        value: ``(..., Hkv, Nk, Dv)``, likewise.
        attn_mask: bool (True takes part) or float (added to the logits), broadcastable to ``(..., Hq, Nq, Nk)`` in
            either layout. A row of False or -inf gives zeros; one of the lowest float gives the mean of the values, as
            in PyTorch.
        dropout_p: 0 only.
        is_causal: query i sees keys 0..i, whatever the lengths (aligned top left, as in PyTorch).
        scale: of the logits; ``1 / sqrt(D)`` when None.
        enable_gqa: allow Hkv < Hq where Hkv divides Hq.
        tensor_layout: ``"HND"`` is ``(..., heads, tokens, channels)``, ``"NHD"`` is ``(..., tokens, heads, channels)``.
        variant: ``"auto"``, a name of ``qframework.kernels.attention.variants.VARIANTS`` or an ``AttentionVariant``.
        smooth_k: subtract the mean over tokens from ``key``; exact in the softmax, and kinder to INT8.
        return_lse: also return the logarithm of the sum of exponentials.
        sm_scale: another name of ``scale``.

    Returns:
        ``(..., Hq, Nq, Dv)`` in ``query``'s dtype and layout; with ``return_lse`` also ``(..., Hq, Nq)`` fp32, natural
        logarithm of the exact logits' sum of exponentials.

    Numerics: those of the variant. Gradients are those of exact attention, recomputed through PyTorch's. Under
    ``torch.autocast`` query, key and value are cast first, as PyTorch's are; a mask keeps its dtype.

    Raises:
        UnsupportedError: dropout, a dtype, device, head dimension, layout or variant that no kernel can do; transforms
            of ``torch.func`` and forward-mode derivatives.
        QFrameworkError: shapes, dtypes or devices that do not fit together.

    Papers: SageAttention, SageAttention2, SageAttention2++, QAttn; which one is the variant's.
    """
    _refuse_dropout(dropout_p)
    scale = _one_scale("sage_attention", scale, sm_scale)
    _check_layout(tensor_layout)
    if tensor_layout == "NHD":
        query, key, value = _exchange("query", query), _exchange("key", key), _exchange("value", value)
    out, lse = attend(query, key, value, attn_mask, is_causal, scale, enable_gqa, variant, smooth_k, return_lse)
    if tensor_layout == "NHD":
        out = out.transpose(-3, -2)
    return (out, lse) if return_lse else out


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    variant: str | AttentionVariant,
    smooth_k: bool,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """The operator, with PyTorch's habits around it: autocast, and leading dimensions that broadcast."""
    _refuse_transforms("sage_attention", query, key, value, attn_mask)
    query, key, value = autocast(query, key, value)
    query, key, value, added = _broadcast_leading(query, key, value, enable_gqa)
    out, lse = torch.ops.qframework.sage_attention(
        query, key, value, attn_mask, is_causal, scale, enable_gqa, spec_of(variant), smooth_k, return_lse
    )
    if added:
        out, lse = out.squeeze(0), lse.squeeze(0) if return_lse else lse
    return out, lse


def sage_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    variant: str | AttentionVariant = "auto",
    smooth_k: bool = True,
    sm_scale: float | None = None,
) -> Tensor:
    """Attention of B sequences packed end to end, each to itself alone.

    Args:
        query: ``(total_q, Hq, D)`` fp16, bf16 or fp32.
        key: ``(total_k, Hkv, D)``, dtype and device of ``query``; Hkv divides Hq.
        value: ``(total_k, Hkv, Dv)``, likewise.
        cu_seqlens_q: ``(B + 1,)`` int32 on the same device: 0, then where each sequence of queries ends. Tokens behind
            the last one get zeros.
        cu_seqlens_k: ``(B + 1,)`` int32, likewise for keys and values.
        max_seqlen_q: the longest sequence of queries.
        max_seqlen_k: the longest sequence of keys.
        is_causal: query i of a sequence sees keys 0..i of the same sequence.
        scale: of the logits; ``1 / sqrt(D)`` when None.
        variant: as for :func:`sage_attention`.
        smooth_k: subtract each sequence's mean over tokens from ``key``.
        sm_scale: another name of ``scale``.

    Returns:
        ``(total_q, Hq, Dv)`` in ``query``'s dtype. Gradients are those of exact attention.

    Raises:
        UnsupportedError: a dtype, device, head dimension or variant that no kernel can do.
        QFrameworkError: shapes, dtypes or devices that do not fit together; offsets that do not rise from 0 to the
            number of tokens at most, or by more than ``max_seqlen``. On a GPU, where reading them would cost a
            synchronization, offsets are checked if the environment variable ``QFRAMEWORK_CHECK_OFFSETS`` is 1 when
            qframework is imported; else the kernels cut off what lies outside of the tensors.
    """
    scale = _one_scale("sage_attention_varlen", scale, sm_scale)
    _refuse_transforms("sage_attention_varlen", query, key, value)
    query, key, value = autocast(query, key, value)
    return torch.ops.qframework.sage_attention_varlen(
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, scale,
        spec_of(variant), smooth_k,
    )  # fmt: skip


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p != 0.0:
        raise UnsupportedError(
            f"sage_attention: dropout_p={dropout_p}; accepted: 0.0. Call F.scaled_dot_product_attention, or let "
            "use_sage_attention fall back to it"
        )


def _refuse_transforms(function: str, *tensors: Tensor | None) -> None:
    transform = transform_in_force(*tensors)
    if transform is not None:
        raise UnsupportedError(
            f"{function}: {transform}; accepted: plain calls and reverse-mode gradients. Call "
            "F.scaled_dot_product_attention, or let use_sage_attention fall back to it"
        )


def _check_layout(tensor_layout: str) -> None:
    """Raise UnsupportedError unless ``tensor_layout`` is one of TensorLayout."""
    if tensor_layout not in get_args(TensorLayout):
        accepted = ", ".join(get_args(TensorLayout))
        raise UnsupportedError(f"sage_attention: tensor_layout={tensor_layout!r} is unknown; accepted: {accepted}")


def _one_scale(function: str, scale: float | None, sm_scale: float | None) -> float | None:
    if scale is not None and sm_scale is not None:
        raise QFrameworkError(f"{function}: scale={scale} and sm_scale={sm_scale} are the same thing; give one")
    return scale if sm_scale is None else sm_scale


def _exchange(name: str, x: Tensor) -> Tensor:
    """Heads and tokens exchanged."""
    if x.ndim < 3:
        raise QFrameworkError(f"sage_attention: {name} has shape {tuple(x.shape)}; accepted: 3 dimensions or more")
    return x.transpose(-3, -2)


def spec_of(variant: str | AttentionVariant) -> str:
    """A variant as the string that operators take. Raises UnsupportedError for what is neither a name nor a variant."""
    return variant if isinstance(variant, str) else resolve(variant).spec


def autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The operands as ``torch.autocast`` would hand them to PyTorch's attention; unchanged outside of it.

    A mask keeps its dtype: in float16 the lowest float32 would be -inf.
    """
    device = query.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    return _cast(query, dtype), _cast(key, dtype), _cast(value, dtype)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def _broadcast_leading(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Expand the dimensions before heads and tokens; True when a batch of one was added (3-D tensors of heads)."""
    ndims = (query.ndim, key.ndim, value.ndim)
    if max(ndims) == 3 and enable_gqa:  # dimension 0 counts heads, which groups need to know
        return query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), True
    own = 3 if enable_gqa else 2  # grouped heads differ rightly
    if min(ndims) < 2 or query.shape[:-own] == key.shape[:-own] == value.shape[:-own]:
        return query, key, value, False
    query, key, value = (x[(None,) * (max(ndims) - x.ndim)] for x in (query, key, value))
    try:
        leading = torch.broadcast_shapes(query.shape[:-own], key.shape[:-own], value.shape[:-own])
    except RuntimeError:
        return query, key, value, False  # the operator's error says more
    query, key, value = (x.expand(*leading, *x.shape[-own:]) for x in (query, key, value))
    return query, key, value, False
