"""Masks of windows that a model repeats for every image (window_masks.py)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attention_models import compiled, error_bound, qkv

WINDOWS, N = 3, 17
BIAS, MASK = torch.randn(1, 2, N, N), torch.randn(WINDOWS, N, N)


def repeated(mask, batch: int) -> torch.Tensor:
    """As timm's Swin does with fused attention."""
    mask = mask.view(1, WINDOWS, 1, N, N).expand(batch // WINDOWS, -1, 2, -1, -1)
    return mask.reshape(-1, 2, N, N)


FORMS = {
    "bias first": lambda q: BIAS + repeated(MASK, q.shape[0]),
    "mask first": lambda q: repeated(MASK, q.shape[0]) + BIAS,
    "heads alike": lambda q: BIAS[0] + repeated(MASK, q.shape[0]),
}


@pytest.mark.parametrize("images", [1, 4])
@pytest.mark.parametrize("form", FORMS)
def test_windows_keep_one_mask_for_all_images(form: str, images: int) -> None:
    q, k, v = qkv(images * WINDOWS)

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, FORMS[form](q))

    out, capture = compiled(attend, q, k, v)
    assert capture.calls[0]["attn_mask"].meta["example_value"].shape == (1, WINDOWS, 2, N, N)
    assert (out - attend(q, k, v)).abs().max() < error_bound(q, k, v, q.shape[-1] ** -0.5)


def changed(q) -> torch.Tensor:
    """The mask changes after it was added, so that it cannot be read later."""
    mask = MASK.clone()
    added = BIAS + repeated(mask, q.shape[0])
    mask.zero_()
    return added


OTHERS = {
    "changed": changed,
    "scaled": lambda q: torch.add(BIAS, repeated(MASK, q.shape[0]), alpha=2),
    "other order": lambda q: (
        BIAS + MASK.view(WINDOWS, 1, 1, N, N).expand(-1, q.shape[0] // WINDOWS, 2, -1, -1).reshape(-1, 2, N, N)
    ),
    "a mask for each": lambda q: BIAS + torch.ones(q.shape[0], 2, N, N),
}


@pytest.mark.parametrize("form", OTHERS)
def test_other_sums_stay_whole(form: str) -> None:
    q, k, v = qkv(2 * WINDOWS)

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, OTHERS[form](q))

    out, capture = compiled(attend, q, k, v)
    assert capture.calls[0]["attn_mask"].meta["example_value"].shape == (2 * WINDOWS, 2, N, N)
    assert (out - attend(q, k, v)).abs().max() < error_bound(q, k, v, q.shape[-1] ** -0.5)
