"""``write_plain_attention``: attention of any number of dimensions computes the same in the form of ``torch.onnx``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qframework.export.onnx_attention import write_plain_attention

H, N, D = 2, 6, 8
SDPA = torch.ops.aten.scaled_dot_product_attention.default


class Attention(nn.Module):
    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(x, x.flip(-2), x * 2, attn_mask=mask, **self.arguments)


@pytest.mark.parametrize("lead", [(), (3,), (3, 2), (3, 2, 2)], ids=str)
@pytest.mark.parametrize("mask", [None, (N, N), (H, N, N), "lead"], ids=str)
def test_other_numbers_of_dimensions(lead: tuple[int, ...], mask: Any) -> None:
    """A mask with a size of 1 before the heads broadcasts over all leading dimensions."""
    torch.manual_seed(0)
    x = torch.randn(*lead, H, N, D)
    shape = (*(1 for _ in lead), H, N, N) if mask == "lead" else mask
    attn_mask = None if mask is None else torch.randn(shape)
    model = Attention(scale=0.3)
    sizes = {0: torch.export.Dim.DYNAMIC} if lead else None
    gm = torch.export.export(model, (x, attn_mask), dynamic_shapes=(sizes, None)).module()
    write_plain_attention(gm)
    (call,) = [node for node in gm.graph.nodes if node.target is SDPA]
    program = torch.export.export(gm, (x, attn_mask))
    (traced,) = [node for node in program.graph.nodes if node.target is SDPA]
    assert traced.args[0].meta["val"].dim() == 4
    assert call.kwargs["scale"] == 0.3
    torch.testing.assert_close(gm(x, attn_mask), model(x, attn_mask), rtol=1e-6, atol=1e-6)
    if lead:
        more = torch.cat([x, x[:1]])
        torch.testing.assert_close(gm(more, attn_mask), model(more, attn_mask), rtol=1e-6, atol=1e-6)
