"""Quantized attention as functions: dense (``sage_attention``) and packed (``sage_attention_varlen``)."""

from __future__ import annotations

from typing import Literal, get_args, overload

import torch
from torch import Tensor

from qframework.arguments import described
from qframework.attention import left_to_pytorch
from qframework.errors import QFrameworkError, UnsupportedError, either
from qframework.kernels.attention.arguments import (
    SageAttentionArguments,
    VarlenArguments,
    check_softcap,
    default_scale,
    sink_of_row,
)
from qframework.kernels.attention.int8_gradient.int8_gradient import PER_BLOCK
from qframework.kernels.attention.variants import AttentionVariant, resolve
from qframework.kernels.runtime.operator import transform_in_force

TensorLayout = Literal["HND", "NHD"]
Backward = Literal["exact", "int8", "mixed"]
_LAYOUTS, _BACKWARDS = get_args(TensorLayout), get_args(Backward)


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
    backward: Backward = "exact",
    softcap: float | None = None,
    sinks: Tensor | None = None,
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
    backward: Backward = "exact",
    softcap: float | None = None,
    sinks: Tensor | None = None,
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
    backward: Backward = "exact",
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax(query @ key.T * scale + attn_mask) @ value`` with quantized products.

    The parameters of ``F.scaled_dot_product_attention`` in its order, then additional ones by keyword.

    Args:
        query: ``(..., Hq, Nq, D)``, 3-D ``(B, Nq, D)`` to 5-D, or with heads and tokens exchanged for ``"NHD"``;
            fp16, bf16 or fp32, any strides, D from 1 to 256.
        key: ``(..., Hkv, Nk, D)``, dtype and device of ``query``. Leading dimensions broadcast.
        value: ``(..., Hkv, Nk, Dv)``, likewise.
        attn_mask: bool (True attends) or float (added to the logits), broadcastable to ``(..., Hq, Nq, Nk)`` in either
            layout. A row of False or -inf gives zeros; one of the lowest float gives the mean of the values, as in
            PyTorch.
        dropout_p: must be 0 with ``backward="exact"``. Otherwise weights are dropped with this probability, by a seed
            from torch's generator; not with variants that multiply P and V in 8 bit.
        is_causal: query i attends to keys 0..i, for any lengths (aligned top left, as in PyTorch).
        scale: of the logits; ``1 / sqrt(D)`` when None.
        enable_gqa: allow Hkv < Hq where Hkv divides Hq.
        tensor_layout: ``"HND"`` is ``(..., heads, tokens, channels)``, ``"NHD"`` is ``(..., tokens, heads, channels)``.
        variant: ``"auto"``, the fastest that is accurate for any input, which on Hopper is PyTorch's attention for many
            calls (:func:`~qframework.kernels.attention.auto.pytorch_is_faster`); a name of
            ``qframework.kernels.attention.variants.VARIANTS`` or an ``AttentionVariant``.
        smooth_k: subtract the mean over tokens from ``key``, which cancels in the softmax and reduces INT8 errors.
        return_lse: also return the logarithm of the sum of exponentials.
        sm_scale: another name of ``scale``.
        backward: what computes the gradient. ``"exact"``: exact attention, recomputed with PyTorch's. ``"int8"``: 8-bit
            products (SageBwd), all but dO V^T, of which one operand is the output's gradient. ``"mixed"``: logits of
            the forward pass, and 16-bit products of the rounded Q and K otherwise; on Hopper ``"auto"`` leaves calls
            to PyTorch's attention, backward pass included, where this would be no faster. The last two take
            no ``attn_mask``, variants that quantize Q and K per block (``"auto"``, ``"sage_b"``, ``"sage_vb"``,
            ``"integer_exp"``), first derivatives only, and change nothing where no gradient is needed.
        softcap: logits ``s = query @ key.T * scale`` become ``softcap * tanh(s / softcap)`` before ``attn_mask`` is
            added (Gemma 2); positive, up to 16,384. With ``backward="exact"`` only, whose gradient then builds the
            logits in memory in float32. ``"auto"`` takes plain PyTorch on a CPU, and on every GPU the kernel, since
            PyTorch's attention caps nothing.
        sinks: the logit of one more key of each row, which takes weight from the others and has no value (GPT-OSS):
            ``(Hq,)``, or broadcastable to ``(..., Hq, Nq)`` in either layout. Neither scaled, capped nor masked. With
            ``backward="exact"`` only. ``"auto"`` takes plain PyTorch on a CPU and the kernel on every GPU.

    Returns:
        ``(..., Hq, Nq, Dv)`` in ``query``'s dtype and layout; with ``return_lse`` also ``(..., Hq, Nq)`` fp32, the
        natural logarithm of the sum of exponentials of the logits before smoothing, without sinks.

    Numerics depend on the variant, those of gradients on ``backward``. Under
    ``torch.autocast`` query, key and value are cast as PyTorch casts them; a mask keeps its dtype.

    Raises:
        UnsupportedError: dropout; an unsupported dtype, device, head dimension, layout, variant or backward; a mask
            with another backward than ``"exact"``; transforms of ``torch.func`` and forward-mode derivatives.
        QFrameworkError: shapes, dtypes or devices that do not match; a ``softcap`` out of its range.

    Papers, depending on the variant: SageAttention, SageAttention2, SageAttention2++, QAttn. Of the gradient in 8 bit:
    SageAttention3 and SageBwd. Of the soft cap: Gemma 2, section 2.
    """
    # A traced graph must not depend on the kinds that are known.
    repeated = not torch.compiler.is_compiling() and bool(left_to_pytorch.known_kinds) and variant == "auto"
    if repeated and tensor_layout == "HND" and backward == "exact" and dropout_p == 0.0 and not return_lse:
        plain = attn_mask is None and sm_scale is None and softcap is None and sinks is None
        handed_over = left_to_pytorch.handed_over(query, key, value, is_causal, scale, enable_gqa) if plain else None
        if handed_over is not None:
            return handed_over
    _check_tensors("sage_attention", query=query, key=key, value=value)
    if backward == "exact":
        _refuse_dropout(dropout_p)
    scale = _one_scale("sage_attention", scale, sm_scale)
    _check_layout(tensor_layout)
    if tensor_layout == "NHD":
        query, key, value = _exchange("query", query), _exchange("key", key), _exchange("value", value)
    arguments = (query, key, value, attn_mask, is_causal, scale, enable_gqa, variant, smooth_k)
    out, lse = attend(*arguments, return_lse, backward, dropout_p, softcap, sinks)
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
    backward: str = "exact",
    dropout_p: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The operator, with autocast and broadcasting of leading dimensions as in PyTorch."""
    given = query, key, value
    check_backward(backward)
    if backward != "exact" and attn_mask is not None:
        raise UnsupportedError(
            f"sage_attention: attn_mask must be None with backward={backward!r}, got shape {tuple(attn_mask.shape)}. "
            "Pass is_causal=True, or backward='exact'"
        )
    check_softcap("sage_attention", softcap)
    if backward != "exact":
        _refuse("sage_attention", backward, softcap=softcap, sinks=sinks)
    _refuse_transforms("sage_attention", query, key, value, attn_mask, sinks)
    if sinks is not None:
        _check_sinks(sinks, query)
    query, key, value = autocast(query, key, value)
    query, key, value, added = _broadcast_leading(query, key, value, enable_gqa)
    call = SageAttentionArguments(query, key, value, attn_mask, is_causal, scale, enable_gqa, "auto", smooth_k)
    call = call._replace(softcap=softcap)
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if backward != "exact" and (needs_gradient or dropout_p != 0.0):
        plain = backward == "mixed" and variant == "auto" and dropout_p == 0.0 and not return_lse
        if plain and left_to_pytorch.is_gradient_left_to_pytorch(call):
            call.check()
            left_to_pytorch.note_left_to_pytorch(query.device.type)
            out = left_to_pytorch.attend_with_pytorch(call, None)
            return (out.squeeze(0) if added else out), query.new_empty(0)
        out, lse = _int8_gradient(call, spec_of(variant), return_lse, backward, dropout_p)
        return (out.squeeze(0), lse.squeeze(0)) if added else (out, lse)
    if variant == "auto" and not return_lse and left_to_pytorch.is_left_to_pytorch(call, sinks):
        call.check()
        left_to_pytorch.note_left_to_pytorch(query.device.type)
        plain = attn_mask is None and softcap is None and sinks is None
        if plain and query is given[0] and key is given[1] and value is given[2]:
            left_to_pytorch.remember(left_to_pytorch.kind_of(query, key, value, is_causal, enable_gqa))
        out = left_to_pytorch.attend_with_pytorch(call, sinks)
        return (out.squeeze(0) if added else out), query.new_empty(0)
    out, lse = torch.ops.qframework.sage_attention(
        query, key, value, attn_mask, is_causal, scale, enable_gqa, spec_of(variant), smooth_k,
        return_lse or sinks is not None, softcap=softcap,
    )  # fmt: skip
    if sinks is not None:
        out = beside_sinks(out, lse, sinks)
    if added:
        out, lse = out.squeeze(0), lse.squeeze(0) if return_lse else lse
    return out, lse


def beside_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The output of a softmax over keys and a sink: with log-sum-exp L of the keys, ``out * sigmoid(L - sink)``.

    Overwrites ``out``, a result of the operator, unless a gradient or a graph is recorded: a product in float32, and
    its copy in the dtype of ``out``, pass through memory three times as often.
    """
    lse = lse.clamp(min=torch.finfo(lse.dtype).min)  # of a row without keys, whose sink may be -inf as well
    weight = torch.sigmoid(lse - sink_of_row(sinks)).unsqueeze(-1)
    if torch.compiler.is_compiling() or out.requires_grad or weight.requires_grad:
        return (out * weight).to(out.dtype)
    return out.mul_(weight)


def _int8_gradient(
    call: SageAttentionArguments, variant: str, return_lse: bool, backward: str, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Attention whose gradient is computed in 8 bit, and with ``return_lse`` its log-sum-exp, of exact exponentials."""
    query, key = call.query, call.key
    variant = PER_BLOCK.spec if return_lse and variant == "auto" else variant
    # from torch's generator, on the device: a compiled graph draws a new one in each call, checkpointing the same twice
    seed = torch.randint(0, 2**62, (1,), dtype=torch.int64, device=query.device) if dropout_p != 0.0 else None
    settings = (call.is_causal, call.scale, call.enable_gqa, variant, backward, call.smooth_k, dropout_p, seed)
    out, lse, k_mean, *_ = torch.ops.qframework.int8_gradient_attention(query, key, call.value, *settings)
    if return_lse:  # of the logits with the mean, which is a constant here: the logits do not depend on it
        group = query.shape[-3] // key.shape[-3] if call.enable_gqa and query.ndim > 3 else 1
        means = k_mean.repeat_interleave(group, dim=-3) if group > 1 else k_mean
        lse = lse + (query.float() * means).sum(-1) * default_scale(query, call.scale)
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
    backward: Backward = "exact",
    softcap: float | None = None,
) -> Tensor:
    """Attention of B packed sequences, each of which attends to itself only.

    Args:
        query: ``(total_q, Hq, D)`` fp16, bf16 or fp32.
        key: ``(total_k, Hkv, D)``, dtype and device of ``query``; Hkv divides Hq.
        value: ``(total_k, Hkv, Dv)``, likewise.
        cu_seqlens_q: ``(B + 1,)`` int32 on the same device: 0, then the end of each sequence of queries. Results of
            tokens after the last sequence are zero.
        cu_seqlens_k: ``(B + 1,)`` int32, likewise for keys and values.
        max_seqlen_q: length of the longest sequence of queries.
        max_seqlen_k: length of the longest sequence of keys.
        is_causal: query i of a sequence attends to keys 0..i of the same sequence.
        scale: of the logits; ``1 / sqrt(D)`` when None.
        variant: as for :func:`sage_attention`.
        smooth_k: subtract each sequence's mean over tokens from ``key``.
        sm_scale: another name of ``scale``.
        backward: as for :func:`sage_attention`. With another one than ``"exact"``, and where a gradient is needed,
            sequences are computed one after another, and reading the offsets synchronizes with a GPU.
        softcap: as for :func:`sage_attention`.

    Returns:
        ``(total_q, Hq, Dv)`` in ``query``'s dtype. The gradient is what ``backward`` says.

    Raises:
        UnsupportedError: an unsupported dtype, device, head dimension, variant or backward; no tensor.
        QFrameworkError: shapes, dtypes or devices that do not match; offsets that do not start at 0, decrease, exceed
            the number of tokens or are further apart than ``max_seqlen``. On a GPU, where reading offsets would cost a
            synchronization, they are checked only if the environment variable ``QFRAMEWORK_CHECK_OFFSETS`` is 1 when
            qframework is imported; otherwise the kernels clamp them to the tensors. A ``softcap`` out of its range.
    """
    offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    _check_tensors("sage_attention_varlen", query=query, key=key, value=value, **offsets)
    scale = _one_scale("sage_attention_varlen", scale, sm_scale)
    _refuse_transforms("sage_attention_varlen", query, key, value)
    query, key, value = autocast(query, key, value)
    check_backward(backward)
    check_softcap("sage_attention_varlen", softcap)
    if backward != "exact":
        _refuse("sage_attention_varlen", backward, softcap=softcap)
    if backward != "exact" and torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        call = VarlenArguments(
            *(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, scale),
            spec_of(variant),
            smooth_k,
        )
        return _int8_gradient_varlen(call, backward)
    return torch.ops.qframework.sage_attention_varlen(
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, scale,
        spec_of(variant), smooth_k, softcap,
    )  # fmt: skip


def _int8_gradient_varlen(call: VarlenArguments, backward: str) -> Tensor:
    """Packed attention whose gradient is computed in 8 bit, one sequence after another."""
    call.check()
    parts, end = [], 0
    for q_rows, k_rows in zip(*call.sequences(), strict=True):
        q, k, v = (x[rows].transpose(0, 1)[None] for x, rows in zip(call[:3], (q_rows, k_rows, k_rows), strict=True))
        dense = SageAttentionArguments(q, k, v, None, call.is_causal, call.scale, True, "auto", call.smooth_k)
        parts.append(_int8_gradient(dense, call.variant, False, backward, 0.0)[0][0].transpose(0, 1))
        end = q_rows.stop
    rest = (call.query.shape[0] - end, call.query.shape[1], call.value.shape[2])
    return torch.cat([*parts, call.query.new_zeros(rest)])


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p != 0.0:
        raise UnsupportedError(
            f"sage_attention: dropout_p must be 0.0 with backward='exact', got {dropout_p}. Call "
            "F.scaled_dot_product_attention, or let use_sage_attention fall back to it"
        )


def _refuse(function: str, backward: str, **arguments: float | Tensor | None) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedError(
                f"{function}: {name} must be None with backward={backward!r}, got {described(value)}. Pass "
                "backward='exact'"
            )


def _check_sinks(sinks: Tensor, query: Tensor) -> None:
    _check_tensors("sage_attention", sinks=sinks)
    rows = query.shape[:-1]
    fits = sinks.shape == rows[-2:-1] if sinks.ndim == 1 else _broadcasts(sinks.shape, rows)
    if not fits or not sinks.is_floating_point() or sinks.device != query.device:
        raise QFrameworkError(
            f"sage_attention: sinks must be floating point, of shape {tuple(rows[-2:-1])} or {tuple(rows)}, on "
            f"{query.device}, got {sinks.dtype} of shape {tuple(sinks.shape)} on {sinks.device}"
        )


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    sizes = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, wanted) for size, wanted in sizes)


def _check_tensors(function: str, **operands: object) -> None:
    for name, x in operands.items():
        if not isinstance(x, Tensor):
            raise UnsupportedError(f"{function}: {name} must be a tensor, got {described(x)}")
        if x.is_nested:
            raise UnsupportedError(
                f"{function}: {name} must be a dense tensor, got a nested one. Pad it, or pass its values and offsets "
                "to sage_attention_varlen"
            )


def _refuse_transforms(function: str, *tensors: Tensor | None) -> None:
    transform = transform_in_force(*tensors)
    if transform is not None:
        raise UnsupportedError(
            f"{function}: the call must be a plain one or under reverse-mode autograd, got {transform}. Call "
            "F.scaled_dot_product_attention, or let use_sage_attention fall back to it"
        )


def check_backward(backward: str) -> None:
    """Raise UnsupportedError unless ``backward`` is one of Backward."""
    if backward not in _BACKWARDS:
        raise UnsupportedError(f"sage_attention: backward must be {either(_BACKWARDS)}, got {backward!r}")


def _check_layout(tensor_layout: str) -> None:
    """Raise UnsupportedError unless ``tensor_layout`` is one of TensorLayout."""
    if tensor_layout not in _LAYOUTS:
        accepted = either(_LAYOUTS)
        raise UnsupportedError(f"sage_attention: tensor_layout must be {accepted}, got {tensor_layout!r}")


def _one_scale(function: str, scale: float | None, sm_scale: float | None) -> float | None:
    if scale is not None and sm_scale is not None:
        raise QFrameworkError(f"{function}: scale or its alias sm_scale must be None, got {scale} and {sm_scale}")
    return scale if sm_scale is None else sm_scale


def _exchange(name: str, x: Tensor) -> Tensor:
    """Heads and tokens exchanged."""
    if x.ndim < 3:
        raise QFrameworkError(f"sage_attention: {name} must have at least 3 dimensions, got shape {tuple(x.shape)}")
    return x.transpose(-3, -2)


def spec_of(variant: str | AttentionVariant) -> str:
    """A variant as the string that operators take. Raises UnsupportedError unless it is a string or a variant."""
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
    if max(ndims) == 3 and enable_gqa:  # dimension 0 is that of the heads, which may be grouped
        return query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), True
    own = 3 if enable_gqa else 2  # numbers of grouped heads may differ
    if min(ndims) < 2 or query.shape[:-own] == key.shape[:-own] == value.shape[:-own]:
        return query, key, value, False
    query, key, value = (x[(None,) * (max(ndims) - x.ndim)] for x in (query, key, value))
    try:
        leading = torch.broadcast_shapes(query.shape[:-own], key.shape[:-own], value.shape[:-own])
    except RuntimeError:
        return query, key, value, False  # the operator raises a clearer error
    query, key, value = (x.expand(*leading, *x.shape[-own:]) for x in (query, key, value))
    return query, key, value, False
