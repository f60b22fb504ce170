"""The choice of scales per head by the error of the model's output."""

from __future__ import annotations

import pytest
import torch
from quantizer_models import exported
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from qframework.numerics import sqnr_db
from qframework.quantizer import (
    QFrameworkQuantizer,
    QuantizationConfig,
    Recipe,
    calibrate,
    dynamic_attention,
    static_attention,
    static_int8,
)
from qframework.quantizer.attention_choice import choose_heads

QUANTIZER = QFrameworkQuantizer().set_global(static_attention())


class Heads(nn.Module):
    """Values of the first head are ``size`` times as large as the others', and the output equalizes heads."""

    def __init__(self, size: float, spelled_out: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(32, 96)
        self.spelled_out = spelled_out
        self.register_buffer("size", torch.tensor([size, 1.0, 1.0, 1.0]).view(1, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        if self.spelled_out:
            y = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1) @ (v * self.size)
        else:
            y = F.scaled_dot_product_attention(q, k, v * self.size)
        return y / self.size


def data(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 12, 32, generator=generator) for _ in range(3)]


def converted(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    prepared = prepare_pt2e(graph, QUANTIZER)
    calibrate(prepared, data(), progress=False)
    return convert_pt2e(prepared)


def test_uneven_heads_get_scales_of_their_own() -> None:
    model, graph = Heads(30.0).eval(), exported(Heads(30.0), data()[0], dynamic_batch=True)
    (layer,) = choose_heads(graph, QUANTIZER, data()).items()
    assert layer[1] == "per_head"
    plain, (x, *_) = converted(exported(Heads(30.0), data()[0], dynamic_batch=True)), data(7)
    better = converted(graph)
    assert any("quantize_per_channel" in str(node.target) for node in better.graph.nodes)
    assert sqnr_db(model(x), better(x)) > sqnr_db(model(x), plain(x)) + 10


def test_it_is_used_only_where_the_output_gains(monkeypatch) -> None:
    from qframework.quantizer import attention_choice

    errors = iter([1.0, 1.0])
    monkeypatch.setattr(attention_choice, "relative_error", lambda *_: next(errors))
    graph = exported(Heads(30.0), data()[0], dynamic_batch=True)
    assert choose_heads(graph, QUANTIZER, data()) == {}
    assert not any("quantize_per_channel" in str(node.target) for node in converted(graph).graph.nodes)


def test_other_attention_keeps_its_configuration() -> None:
    graph = exported(Heads(30.0), data()[0])
    for config in (static_attention("per_head"), static_attention(observer="mse"), dynamic_attention(), None):
        assert choose_heads(graph, QFrameworkQuantizer().set_global(config), data()) == {}
    assert choose_heads(exported(Heads(30.0, spelled_out=True), data()[0]), QUANTIZER, data()) == {}


def test_a_recipe_says_which_attention_has_scales_per_head() -> None:
    graph = exported(Heads(30.0), data()[0], dynamic_batch=True)
    quantizer = QFrameworkQuantizer().set_global(QuantizationConfig(static_int8(), static_attention()))
    done = Recipe(attention_heads=True).before_prepare(graph, quantizer, data())
    assert list(done["attention"].values()) == ["per_head"]


def test_attention_gets_a_margin_where_other_data_exceeds_its_ranges() -> None:
    x = data()[0]
    batches = [1.6 * x, x, x]  # the first is what is judged
    graph = exported(Heads(1.0), x, dynamic_batch=True)
    assert choose_heads(graph, QUANTIZER, batches, heads=False) == {}
    ((_, name),) = choose_heads(graph, QUANTIZER, batches, heads=False, margins=True).items()
    margin = float(name.removeprefix("+ "))
    assert margin > 0.2
    observed = [n.args[1] for n in converted(graph).graph.nodes if "quantize_per_tensor" in str(n.target)]
    plain = converted(exported(Heads(1.0), x, dynamic_batch=True))
    narrow = [n.args[1] for n in plain.graph.nodes if "quantize_per_tensor" in str(n.target)]
    assert observed == pytest.approx([(1 + margin) * scale for scale in narrow], rel=1e-5)
    same = exported(Heads(1.0), x, dynamic_batch=True)
    assert choose_heads(same, QUANTIZER, [x, x, x], heads=False, margins=True) == {}
