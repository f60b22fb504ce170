"""``attn_implementation="qframework"`` for models of the transformers library, through its own registries::

    import qframework  # before or after transformers: its import registers the name
    import transformers

    model = transformers.AutoModel.from_pretrained(name, attn_implementation="qframework")

The operator supports grouped heads, boolean masks, the soft cap of Gemma 2 and the sinks of GPT-OSS. Unsupported calls
(dropout in training, float64) fall back to PyTorch's attention, with a soft cap or sinks to plain torch, and are
counted in :data:`qframework.attention.fallbacks`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qframework.attention.drop_in import attention_or_fallback, checked_spec
from qframework.attention.int8_store import MAX_QUERIES, store_of
from qframework.attention.left_to_pytorch import fallbacks
from qframework.compat.transformers_modules import (
    SAM,
    SAM_HQ,
    all_run_with_sdpa,
    looks_up_implementations,
    may_ignore_implementations,
    sam_attention_classes,
    sam_hq_attention_classes,
)
from qframework.errors import UnsupportedError
from qframework.import_hook import when_imported
from qframework.kernels.attention.variants import AttentionVariant

_REFUSED = ("block_indices",)  # of keys (MiniMax M3): they change the result, and no variant supports them


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
    from transformers.masking_utils import eager_mask, sdpa_mask

    variant = checked_spec(variant)
    AttentionInterface.register(name, attention_function(variant, smooth_k))
    AttentionMaskInterface.register(name, partial(_mask, sdpa_mask, eager_mask))
    when_imported(SAM, partial(_register_sam, name, variant, smooth_k))
    when_imported(SAM_HQ, partial(_register_sam_hq, name, variant, smooth_k))


def _mask(
    boolean: Callable[..., Tensor | None],
    additive: Callable[..., Tensor | None],
    *sizes: Any,
    config: Any = None,
    **options: Any,
) -> Tensor | None:
    """transformers' mask; never None, which stands for a flag of the module, where that flag may be wrong.

    Models that transformers does not run with PyTorch's attention may lack the flag (Splinter) or have another one than
    their mask (NLLB-MoE). Before layers that share keys Gemma 4 drops queries, and with them its mask. Some of them
    compute attention themselves whatever the implementation (Bloom, MPT), and would add a boolean mask as a number.
    """
    if getattr(config, "num_kv_shared_layers", 0) or not _has_flags(type(config)):
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return (additive if _adds_masks(type(config)) else boolean)(*sizes, config=config, **options)


@torch.compiler.assume_constant_result  # Dynamo calls it while tracing; it would trace into a cached function
def _has_flags(configuration: type) -> bool:
    """Whether all models of a configuration say themselves what a missing mask means."""
    return _known_flags(configuration)


@torch.compiler.assume_constant_result
def _adds_masks(configuration: type) -> bool:
    """Whether models of a configuration may add its mask to their logits; notes those that surely do."""
    if not _known_adding(configuration):
        return False
    if not looks_up_implementations(configuration):
        reason = f"the models of {configuration.__name__} compute attention themselves"
        fallbacks.note(
            reason,
            f"attn_implementation='qframework': {reason}, so that it has no effect. The backend of torch.compile finds "
            "such attention",
        )
    return True


_known_adding = functools.cache(may_ignore_implementations)


@functools.cache
def _known_flags(configuration: type) -> bool:
    return all_run_with_sdpa(configuration) or hasattr(configuration, "attn_logit_softcapping")


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
    indices: Tensor | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    variant: str,
    smooth_k: bool,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``query (B, Hq, Nq, D)``, ``key`` and ``value (B, Hkv, Nk, D)`` to ``(B, Nq, Hq, D)``; no attention weights.

    ``indices (B, Nq, k)`` are the keys that each query sees (DeepSeek V3.2), if ``attention_mask`` lets it. Sinks are
    ``s_aux (Hq,)``, of each head (GPT-OSS), or ``sinks (B, Hq, Nq, 1)``, of each token (Inkling 2).
    """
    _refuse(module, cache, kwargs)
    tokens = query.shape[2]
    if indices is not None and indices.shape[-1] < key.shape[2]:
        attention_mask = _only(indices, attention_mask, key.shape[2])
    sinks = s_aux if sinks is None else sinks.squeeze(-1)
    store = store_of(key, value)
    if store is not None:
        if tokens <= MAX_QUERIES and dropout == 0.0 and position_bias is None:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            out = store.attend(query, attention_mask, attention_mask is None and causal, scaling, softcap, sinks)
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
        sinks=sinks,
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


def _only(indices: Tensor, mask: Tensor | None, keys: int) -> Tensor:
    """``mask`` of the selected keys alone; models that select keys always give one, which includes causality."""
    if mask is None:
        raise UnsupportedError("attn_implementation='qframework': attention_mask must be given with indices, got None")
    others = indices.new_ones((*indices.shape[:2], keys), dtype=torch.bool)
    others = others.scatter(-1, indices.long(), False).unsqueeze(1)
    return mask & ~others if mask.dtype == torch.bool else mask.masked_fill(others, torch.finfo(mask.dtype).min)


def _with_bias(mask: Tensor | None, bias: Tensor | None, is_causal: bool, query: Tensor, key: Tensor) -> Tensor | None:
    """Mask and position bias (T5) as one mask, including causality, since PyTorch takes a mask or the flag."""
    if bias is None:
        return mask
    if is_causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if mask is None:
        return bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
