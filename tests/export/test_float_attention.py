"""``write_float_attention``: the operator of a variant becomes exact attention with the same arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qframework.errors import UnsupportedError
from qframework.export.float_attention import REASON, write_float_attention

B, H, N, D = 2, 2, 12, 16  # keys in 3 rows of 4


class Sage(nn.Module):
    def __init__(self, returns: int = 0, **arguments: Any) -> None:
        super().__init__()
        self.returns, self.arguments = returns, arguments

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, h: Tensor | None, w: Tensor | None) -> Any:
        return torch.ops.qframework.sage_attention(q, k, v, mask, rel_h=h, rel_w=w, variant="sage_b", **self.arguments)[
            self.returns
        ]


def rewritten(model: nn.Module, *inputs: Any) -> Tensor:
    gm = torch.export.export(model, inputs).module()
    assert list(write_float_attention(gm).values()) == [REASON]
    assert not any("qframework" in str(node.target) for node in gm.graph.nodes)
    return gm(*inputs)


def bool_mask() -> Tensor:
    return torch.rand(B, 1, N, N) < 0.7


@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("relative", [False, True])
def test_masks_and_relative_positions(mask: str, relative: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, B, H, N, D)
    attn_mask = {"none": None, "bool": bool_mask(), "float": torch.randn(B, 1, N, N)}[mask]
    h, w = (torch.randn(B, H, N, 3), torch.randn(B, H, N, 4)) if relative else (None, None)
    bias = torch.zeros(B, H, N, N)
    if h is not None and w is not None:
        bias = torch.stack([h[..., key // 4] + w[..., key % 4] for key in range(N)], -1)
    if attn_mask is not None:
        bias = bias.masked_fill(~attn_mask, -torch.inf) if mask == "bool" else bias + attn_mask
    expected = torch.softmax(q @ k.mT / D**0.5 + bias, -1) @ v
    torch.testing.assert_close(rewritten(Sage(), q, k, v, attn_mask, h, w), expected, rtol=1e-5, atol=1e-5)


def test_other_arguments() -> None:
    q, (k, v) = torch.randn(B, 4, N, D), torch.randn(2, B, 2, N, D)
    out = rewritten(Sage(is_causal=True, scale=0.3, enable_gqa=True), q, k, v, None, None, None)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, expected)


def test_a_soft_cap_is_refused() -> None:
    q, k, v = torch.randn(3, B, H, N, D)
    gm = torch.export.export(Sage(softcap=50.0), (q, k, v, None, None, None)).module()
    with pytest.raises(UnsupportedError, match=r"to_onnx: attention '.*' must have no softcap, got 50\.0"):
        write_float_attention(gm)


def test_log_sum_exp_is_refused() -> None:
    q, k, v = torch.randn(3, B, H, N, D)
    gm = torch.export.export(Sage(1, return_lse=True), (q, k, v, None, None, None)).module()
    with pytest.raises(UnsupportedError, match=r"must return its output alone, but the model reads its log-sum-exp"):
        write_float_attention(gm)
