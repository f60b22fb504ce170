"""Excludes keys that no query attends to from the means and scales of attention.

Formula, for the keys that the mask hides from every query::

    K = mean of the other keys (smooth K), or 0        V = mean of the other values (smooth V), or 0

These keys have weight 0, so what padding holds does not change the result. Only masks that are cheap to reduce are
considered: those that broadcast over queries, and bool masks that broadcast over heads. Does not synchronize.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Keys whose mask is this far below its maximum are hidden: masks of padding add -10000 (PixArt, LTX, older language
# models) or less. Only logits of thousands could give such a key a weight, and those in INT8 err by tens.
_HIDING = 9e3


def hidden_keys(mask: Tensor | None, batch: int, heads: int, keys: int) -> Tensor | None:
    """``(B or 1, Hkv or 1, Nk, 1)`` bool: keys that ``mask`` hides from every query; None where it is not reduced.

    ``mask`` is 4-D and broadcasts, as in :class:`~qframework.kernels.attention.operands.Bias`; ``heads`` are K's.
    """
    if mask is None or mask.shape[-1] != keys or keys == 1:
        return None
    if mask.stride(1) == 0:
        mask = mask[:, :1]
    if mask.stride(2) == 0:
        mask = mask[:, :, :1]
    by_key = mask.shape[2] == 1
    if mask.dtype == torch.bool and (by_key or mask.shape[1] == 1):
        hidden = ~(mask if by_key else mask.any(2, keepdim=True))
    elif by_key:
        hidden = mask < mask.amax(-1, keepdim=True) - _HIDING  # a row of equal numbers hides nothing
    else:
        return None
    if hidden.shape[1] > max(heads, 1):
        hidden = hidden.unflatten(1, (heads, -1)).all(2)
    if hidden.shape[0] not in (1, batch):
        hidden = hidden.repeat(batch // hidden.shape[0], 1, 1, 1)
    return hidden.transpose(2, 3)


def without_hidden(x: Tensor, hidden: Tensor, smooth: bool) -> Tensor:
    """``x (B, Hkv, Nk, D)`` with tokens in ``hidden`` replaced by the mean of the others (``smooth``) or 0."""
    seen = x.masked_fill(hidden, 0.0)
    if not smooth:
        return seen
    count = (x.shape[2] - hidden.sum(2, keepdim=True)).clamp(min=1)
    mean = (seen.sum(2, keepdim=True, dtype=torch.float32) / count).nan_to_num(0.0, 0.0, 0.0)
    return torch.where(hidden, mean.to(x.dtype), x)
