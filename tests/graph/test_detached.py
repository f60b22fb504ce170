"""Gradients of quantized models that run without compilation (graph/rewrites/detached.py)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qframework
from qframework.graph.rewrites import detached
from qframework.quantizer import QuantizationConfig, dynamic_attention, dynamic_int8, static_int8


class Residual(nn.Module):
    """Rounding cuts the branch off from autograd, and the residual sum would pass its own part of the gradient on."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"sum": x + self.fc(x).relu()}


@pytest.mark.parametrize("config", [static_int8(), dynamic_int8()], ids=["static", "dynamic"])
def test_outputs_carry_no_gradient(config, tmp_path, caplog) -> None:
    x = torch.randn(8, 16)
    quantized = qframework.quantize(Residual().eval(), x, config, [x])
    quantized.save(tmp_path / "model.pt2")
    loaded = qframework.load(tmp_path / "model.pt2")
    for model in (quantized, loaded, copy.deepcopy(quantized), copy.deepcopy(copy.deepcopy(loaded))):
        detached._tell.cache_clear()
        caplog.clear()
        with torch.no_grad():
            expected = model(x)["sum"]
        assert not caplog.text
        y = model(x.clone().requires_grad_())["sum"]
        assert not y.requires_grad
        assert torch.equal(y, expected)
        assert detached.NO_GRADIENT in caplog.text
        lowered = torch.compile(model, backend="aot_eager", fullgraph=True)  # the hook ends no graph
        with torch.no_grad():
            torch.testing.assert_close(lowered(x)["sum"], expected)
        y = lowered(x.clone().requires_grad_())["sum"]
        assert not y.requires_grad
        torch.testing.assert_close(y, expected)


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


def test_attention_keeps_its_gradient() -> None:
    q, k, v = torch.randn(3, 2, 4, 32, 16)
    config = QuantizationConfig(linear=None, attention=dynamic_attention("sage_b"))
    quantized = qframework.quantize(Attention().eval(), (q, k, v), config)
    found, wanted = (
        torch.autograd.grad(model(q.requires_grad_(), k, v).square().sum(), q)[0] for model in (quantized, Attention())
    )
    assert qframework.numerics.sqnr_db(wanted, found) > 25
