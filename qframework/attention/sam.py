"""SAM's image encoder in transformers, with decomposed relative positions passed to the kernel as two factors.

SAM adds ``rel_h[q, k // width] + rel_w[q, k % width]`` to the logits. transformers builds the N x N sum for every head,
4096 x 4096 at 1024 pixels; here the kernel adds the ``(N, height)`` and ``(N, width)`` factors.

transformers_sam.py and transformers_sam_hq.py make attention classes of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qframework.attention.drop_in import note_fallback, why_not


def _forward(module: Any, hidden_states: Tensor) -> Tensor | None:
    """``hidden_states (B, H, W, C)`` to the same shape; None, counted as a fallback, where it is unsupported."""
    batch, height, width, _ = hidden_states.shape
    qkv = module.qkv(hidden_states).view(batch, height * width, 3, module.num_attention_heads, -1)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    reason = why_not(query, key, value, None, 0.0, False)
    if reason is not None:
        note_fallback(reason)
        return None
    rel_h, rel_w = _factors(module, query, height, width) if module.use_rel_pos else (None, None)
    out, _ = torch.ops.qframework.sage_attention(
        query, key, value, None, False, module.scale, False, module.variant, module.smooth_k, False, rel_h, rel_w
    )
    return module.proj(out.transpose(1, 2).reshape(batch, height, width, -1))


def _factors(module: Any, query: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """``(B, heads, N, height)`` and ``(B, heads, N, width)``."""
    grid = query.unflatten(2, (height, width))
    rows = module.get_rel_pos(height, height, module.rel_pos_h)
    columns = module.get_rel_pos(width, width, module.rel_pos_w)
    rel_h = torch.einsum("bnhwc,hkc->bnhwk", grid, rows)
    rel_w = torch.einsum("bnhwc,wkc->bnhwk", grid, columns)
    return rel_h.flatten(2, 3), rel_w.flatten(2, 3)


class SamSageAttention(torch.nn.Module):
    """Quantized attention, to be inherited before one of SAM's attention classes, which has the weights."""

    def __init__(self, config: Any, window_size: int, variant: str = "auto", smooth_k: bool = True) -> None:
        super().__init__(config, window_size)
        self.variant, self.smooth_k = variant, smooth_k

    def forward(self, hidden_states: Tensor, output_attentions: bool = False) -> tuple[Tensor, None]:
        """``hidden_states (B, H, W, C)`` to the same shape, without attention weights."""
        out = _forward(self, hidden_states)
        return super().forward(hidden_states, output_attentions) if out is None else (out, None)
