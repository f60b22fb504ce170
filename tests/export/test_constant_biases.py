"""``fold_biases``: biases that a model computes from its parameters become buffers, all others stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qframework.export.constant_biases import fold_biases
from qframework.graph.nodes import linear_call


class Joined(nn.Module):
    """The projection of BEiT: queries and values have a bias, keys do not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight, self.q_bias = nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.randn(4))
        self.register_buffer("k_bias", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        values = {
            "constants": lambda: self.q_bias * 2,
            "an input": lambda: self.q_bias + x.mean(),
            "random": lambda: torch.randn_like(self.q_bias),
        }[self.kind]()
        return F.linear(x, self.weight, torch.cat([self.q_bias, self.k_bias, values]))


def test_a_bias_of_parameters_is_computed() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 8)
    model = Joined("constants").eval()
    gm = torch.export.export(model, (x,)).module()
    fold_biases(gm)
    assert [str(node.target) for node in gm.graph.nodes if node.op == "call_function"] == ["aten.linear.default"]
    torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["an input", "random"])
def test_other_biases_stay(kind: str) -> None:
    gm = torch.export.export(Joined(kind).eval(), (torch.randn(3, 8),)).module()
    fold_biases(gm)
    (call,) = [call for node in gm.graph.nodes if (call := linear_call(node)) is not None]
    assert "aten.cat" in str(call.bias.target)
