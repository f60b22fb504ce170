"""``attn_implementation="qframework"`` for models of the transformers library, through its own registries::

    import qframework  # before or after transformers: its import registers the name
    import transformers

    model = transformers.AutoModel.from_pretrained(name, attn_implementation="qframework")

The operator supports grouped heads, boolean masks and the soft cap of Gemma 2. Unsupported calls (dropout in training,
float64) fall back to PyTorch's attention, with a soft cap to plain torch, and are counted in
:data:`qframework.attention.fallbacks`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qframework.attention.drop_in import attention_or_fallback, checked_spec
from qframework.attention.int8_store import MAX_QUERIES, store_of
from qframework.compat.transformers_modules import SAM, SAM_HQ, sam_attention_classes, sam_hq_attention_classes
from qframework.errors import UnsupportedError
from qframework.import_hook import when_imported
from qframework.kernels.attention.variants import AttentionVariant

# Arguments that change the result and that no variant supports: attention sinks.
_REFUSED = ("s_aux",)


def register(name: str = "qframework", *, variant: str | AttentionVariant = "auto", smooth_k: bool = True) -> None:
    """Register ``attn_implementation=name`` with transformers, replacing an earlier entry of that name.

    Args:
        name: value of ``attn_implementation``.
        variant: as for :func:`qframework.sage_attention`; register each variant under its own name.
        smooth_k: subtract the mean over tokens from the keys.

    Raises:
        ImportError: transformers is not installed.
        UnsupportedError: an unknown variant.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    variant = checked_spec(variant)
    AttentionInterface.register(name, attention_function(variant, smooth_k))
    AttentionMaskInterface.register(name, sdpa_mask)
    when_imported(SAM, partial(_register_sam, name, variant, smooth_k))
    when_imported(SAM_HQ, partial(_register_sam_hq, name, variant, smooth_k))


def _register_sam(name: str, variant: str, smooth_k: bool) -> None:
    sam_attention_classes()[name] = partial(_sam_attention, variant=variant, smooth_k=smooth_k)


def _register_sam_hq(name: str, variant: str, smooth_k: bool) -> None:
    sam_hq_attention_classes()[name] = partial(_sam_hq_attention, variant=variant, smooth_k=smooth_k)


def _sam_attention(*args: Any, **settings: Any) -> torch.nn.Module:
    from qframework.attention.transformers_sam import SamVisionSageAttention

    return SamVisionSageAttention(*args, **settings)


def _sam_hq_attention(*args: Any, **settings: Any) -> torch.nn.Module:
    from qframework.attention.transformers_sam_hq import SamHQVisionSageAttention

    return SamHQVisionSageAttention(*args, **settings)


def attention_function(variant: str, smooth_k: bool) -> Callable[..., tuple[Tensor, None]]:
    """An attention function with transformers' interface for ``variant``."""
    return partial(_attention_forward, variant=variant, smooth_k=smooth_k)


def _attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    softcap: float | None = None,
    *,
    variant: str,
    smooth_k: bool,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``query (B, Hq, Nq, D)``, ``key`` and ``value (B, Hkv, Nk, D)`` to ``(B, Nq, Hq, D)``; no attention weights."""
    _refuse(module, cache, kwargs)
    tokens = query.shape[2]
    store = store_of(key, value)
    if store is not None:
        if tokens <= MAX_QUERIES and dropout == 0.0 and position_bias is None:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            out = store.attend(query, attention_mask, attention_mask is None and causal, scaling, softcap)
            return out.transpose(1, 2).contiguous(), None
        key, value = store.floats("key"), store.floats("value")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # The flag applies to a whole prompt: a single token attends to all earlier ones, and masks include causality.
    is_causal = tokens > 1 and attention_mask is None and is_causal
    if is_causal and key.shape[2] > tokens:  # a static cache, whose unused part must not affect scales and means
        key, value = key[:, :, :tokens], value[:, :, :tokens]
        position_bias = None if position_bias is None else position_bias[..., :tokens]
    mask = _with_bias(attention_mask, position_bias, is_causal, query, key)
    out = attention_or_fallback(
        variant, smooth_k, F.scaled_dot_product_attention, query, key, value, mask, dropout,
        is_causal and position_bias is None, scale=scaling, enable_gqa=query.shape[1] != key.shape[1], softcap=softcap,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _refuse(module: torch.nn.Module, cache: Any, kwargs: dict[str, Any]) -> None:
    """Raise UnsupportedError for unsupported arguments that would change the result."""
    seen = [name for name in _REFUSED if kwargs.get(name) is not None]
    if cache is not None:
        seen.append("cache (continuous batching)")
    if seen:
        raise UnsupportedError(
            f"{type(module).__name__}: {' and '.join(seen)} must be None with attn_implementation='qframework'. Use "
            "'eager' or the implementation that the model recommends"
        )


def _with_bias(mask: Tensor | None, bias: Tensor | None, is_causal: bool, query: Tensor, key: Tensor) -> Tensor | None:
    """Mask and position bias (T5) as one mask, including causality, since PyTorch takes a mask or the flag."""
    if bias is None:
        return mask
    if is_causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if mask is None:
        return bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
