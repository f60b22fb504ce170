"""Attention with a soft cap on its logits, or with sinks, in plain torch, for calls that no kernel here takes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qframework.kernels.attention.arguments import default_scale, sink_of_row


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention in plain torch: products in the operands' dtype, the logits between them in float32.

    The arguments are those of :func:`qframework.sage_attention`. A row in which every key is hidden is zero.
    """
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3) for x in (key, value))
    wide = torch.promote_types(query.dtype, torch.float32)
    logits = ((query * default_scale(query, scale)) @ key.mT).to(wide)  # scaled first: float16 must not overflow
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if is_causal:
        later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        logits = logits.masked_fill(later, -torch.inf)
    if attn_mask is not None:
        boolean = attn_mask.dtype == torch.bool
        logits = logits.masked_fill(~attn_mask, -torch.inf) if boolean else logits + attn_mask
    hidden = (logits == -torch.inf).all(-1, keepdim=True)
    logits = logits.masked_fill(hidden, 0.0)  # without a gradient of NaN
    weights = logits.softmax(-1) if sinks is None else _beside(logits, sinks)
    weights = weights.masked_fill(hidden, 0.0)
    weights = F.dropout(weights, dropout_p) if dropout_p > 0.0 else weights
    return weights.to(query.dtype) @ value


def _beside(logits: Tensor, sinks: Tensor) -> Tensor:
    """The weights of keys in a softmax over them and a sink."""
    sinks = sink_of_row(sinks).unsqueeze(-1).to(logits.dtype).expand(*logits.shape[:-1], 1)
    return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
