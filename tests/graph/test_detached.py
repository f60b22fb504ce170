"""Gradients of quantized models that run without compilation (graph/rewrites/detached.py)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import qframework
from qframework.compat.dispatch import LOSES_TANGENTS
from qframework.errors import UnsupportedError
from qframework.graph.rewrites import detached
from qframework.quantizer import QFrameworkQuantizer, QuantizationConfig, dynamic_attention, dynamic_int8, static_int8


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


@pytest.mark.parametrize("backend", [None, "inductor", "qframework"])
def test_no_derivative_passes_beside_a_layer(backend) -> None:
    x = torch.randn(8, 16)
    quantized = qframework.quantize(Residual().eval(), x, static_int8(), [x]).requires_grad_(False)
    torch._dynamo.reset()
    model = quantized if backend is None else torch.compile(quantized, backend=backend)
    expected = model(x)["sum"]
    with forward_ad.dual_level():
        with pytest.raises(UnsupportedError, match=r"model.*: the call must be .*, got a forward-mode derivative"):
            model(forward_ad.make_dual(x, x))
        if backend is None or not LOSES_TANGENTS:
            torch.testing.assert_close(model(x)["sum"], expected)
    with pytest.raises(UnsupportedError, match=r"quantized model: the call must be .*, got torch\.func\.jvp"):
        torch.func.jvp(model, (x,), (x,))
    with pytest.raises(UnsupportedError, match=r"quantized model: the call must not compute derivatives, got"):
        torch.func.grad(lambda x: model(x)["sum"].sum())(x)
    torch.testing.assert_close(torch.vmap(model)(x[None])["sum"][0], expected)


@pytest.mark.parametrize("backend", [None, "aot_eager", "qframework"])
@pytest.mark.parametrize("config", [static_int8(), static_int8(activation="per_token"), dynamic_int8()])
def test_converted_models_carry_no_gradient(config, backend) -> None:
    """``convert_pt2e`` alone, as in PyTorch's own workflow."""
    x = torch.randn(8, 16, requires_grad=True)
    prepared = prepare_pt2e(
        torch.export.export(Residual().eval(), (x,)).module(), QFrameworkQuantizer().set_global(config)
    )
    qframework.calibrate(prepared, [x])
    converted = convert_pt2e(prepared)
    torch._dynamo.reset()
    y = (converted if backend is None else torch.compile(converted, backend=backend))(x)["sum"]
    assert not y.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(y, converted(x)["sum"])


def test_integers_are_not_detached() -> None:
    class Counted(Residual):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = super().forward(x)["sum"]
            return y, y.argmax(), y

    gm = torch.export.export(Counted().eval(), (torch.randn(8, 16),)).module()
    before = str(gm.graph)
    for _ in range(2):
        detached.write_detaches(gm)
        assert [node.target for node in gm.graph.nodes].count(torch.ops.aten.detach.default) == 1
    detached.erase_detaches(gm)
    assert str(gm.graph) == before


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
