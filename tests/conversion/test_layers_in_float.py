"""Which layers ``quantize_`` replaces; those whose weight something else reads, or that compute otherwise, stay."""

from __future__ import annotations

import logging

import pytest
import torch
from quantized_models import MLP, quantized, vit
from torch import nn
from torch.nn import functional as F

import qframework
from qframework import conversion, numerics, quantize_
from qframework.errors import UnsupportedError
from qframework.quantizer import dynamic_int8, static_int8
from qframework.training import convert_to_int8_training


@pytest.fixture(autouse=True)
def _no_fallbacks():
    conversion.fallbacks.clear()


@torch.no_grad()
def test_multi_head_attention_stays_right(caplog) -> None:
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    model, x = nn.Sequential(nn.Linear(16, 16)), torch.randn(2, 5, 16)
    model.add_module("attention", attention)
    reference = attention.eval()(x, x, x)[0]
    quantize_(model.eval(), dynamic_int8())
    assert quantized(model) == {"0"}
    assert torch.equal(attention(x, x, x)[0], reference)
    assert "layer 'attention.out_proj' stays in float: the MultiheadAttention around it reads its weight" in caplog.text


@torch.no_grad()
def test_only_children_whose_weight_is_read_stay_in_float() -> None:
    class Reader(MLP):
        def forward(self, x):
            return self.head(F.linear(F.gelu(self.fc1(x)), self.fc2.weight, self.fc2.bias))

    class Other(MLP):
        def forward(self, x):
            for layer in (self.fc1, self.fc2, self.head):
                x = F.linear(x, layer.weight)
            return x

    class Either(MLP):
        """As the query, key and value projections of timm's BEiT, EVA and Swin V2."""

        def forward(self, x):
            x = F.gelu(self.fc1(x))
            return self.head(self.fc2(x) if x is None else F.linear(x, weight=self.fc2.weight, bias=self.fc2.bias))

    for kind in (Reader, Either):
        model, x = nn.Sequential(kind()).eval(), torch.randn(4, 16)
        reference = model(x)
        assert quantized(quantize_(model, dynamic_int8())) == {"0.fc1", "0.head"}
        assert numerics.sqnr_db(reference, model(x)) > 30
    with pytest.raises(UnsupportedError, match=r"got none in a Other\. Warnings name the layers"):
        quantize_(Other(), dynamic_int8())


def test_why_no_layer_is_quantized() -> None:
    with pytest.raises(
        UnsupportedError, match=r"none in a MLP\. filter_fn selects none of its 3 linear layers, such as"
    ):
        quantize_(MLP(), dynamic_int8(), filter_fn=lambda module, name: name == "fc3")
    with pytest.raises(UnsupportedError, match=r"none in a ReLU\. It has no linear layer$"):
        quantize_(nn.ReLU(), dynamic_int8())
    exported = qframework.quantize(MLP().eval(), torch.randn(4, 16), dynamic_int8())
    with pytest.raises(UnsupportedError, match=r"QuantizedModel\. An exported model has none"):
        quantize_(exported, dynamic_int8())
    trained = convert_to_int8_training(vit()[0], skip_slower=False)
    with pytest.raises(
        UnsupportedError, match=r"model must be a float model, got a VisionTransformer that convert_to_int8_"
    ):
        quantize_(trained, dynamic_int8())


def test_a_lazy_layer_stays_in_float(caplog) -> None:
    quantize_(nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8)), dynamic_int8())
    assert "layer '0' stays in float: weight is not initialized: run the float model once first" in caplog.text


@torch.no_grad()
def test_a_child_is_quantized_that_one_path_calls_and_another_reads() -> None:
    class Sliced(MLP):
        sliced = False

        def forward(self, x):
            x = F.gelu(self.fc1(x.to(self.fc1.weight.dtype)))
            if self.sliced:
                half = self.fc2.weight.shape[1] // 2
                x = F.linear(x[:, :half], self.fc2.weight[:, :half]) + F.linear(x[:, half:], self.fc2.weight[:, half:])
                return self.head(x + self.fc2.bias)
            return self.head(self.fc2(x))

    model, x = nn.Sequential(Sliced()).eval(), torch.randn(4, 16)
    reference = model(x)
    assert quantized(quantize_(model, dynamic_int8())) == {"0.fc2", "0.head"}
    for model[0].sliced in (False, True):
        assert numerics.sqnr_db(reference, model(x)) > 30


@torch.no_grad()
def test_the_layer_under_an_adapter_is_quantized() -> None:
    class Adapter(nn.Module):
        """As PEFT's LoRA: calls the layer with any arguments, and reads the dtype of a weight that is not its own."""

        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base_layer = base
            self.down = nn.ModuleDict({"default": nn.Linear(16, 4, bias=False)})
            self.up = nn.ModuleDict({"default": nn.Linear(4, 32, bias=False)})

        def forward(self, x, *args, **kwargs):
            result = self.base_layer(x, *args, **kwargs)
            for name in self.down:
                down, up = self.down[name], self.up[name]
                result = result + up(down(x.to(down.weight.dtype)))
            return result

    model, x = MLP().eval(), torch.randn(4, 16)
    model.fc1 = Adapter(model.fc1)
    reference = model(x)
    quantize_(model, dynamic_int8(), filter_fn=lambda module, name: "default" not in name)
    assert quantized(model) == {"fc1.base_layer", "fc2", "head"}
    assert numerics.sqnr_db(reference, model(x)) > 30


@torch.no_grad()
def test_filter_fn() -> None:
    seen = []

    def filter_fn(module, name):
        seen.append((type(module), name))
        return name != "head"

    model = quantize_(MLP(), dynamic_int8(), filter_fn=filter_fn)
    assert quantized(model) == {"fc1", "fc2"}
    assert seen == [(nn.Linear, "fc1"), (nn.Linear, "fc2"), (nn.Linear, "head")]


@torch.no_grad()
def test_layers_that_cannot_be_replaced(caplog) -> None:
    class Other(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model = nn.Sequential(
        nn.Linear(8, 8),
        nn.Linear(8, 8),
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        Other(8, 8),
        nn.Linear(8, 8),
        nn.Linear(8, 8).double(),
        nn.Linear(8, 8),
    )
    model[1].register_forward_hook(lambda *_: None)
    model[4].forward = lambda x: x
    quantize_(model, dynamic_int8())
    assert quantized(model) == {"0", "6"}
    for name, reason in (("1", "it has hooks"), ("2", "its weight is parametrized"), ("4", "its forward was replaced")):
        assert f"layer {name!r} stays in float: {reason}" in caplog.text
    assert "layer '5' stays in float: weight has dtype torch.float64" in caplog.text
    assert "layer '3' stays in float: its class Other computes something else than nn.Linear" in caplog.text
    assert conversion.fallbacks.total() == 5


@torch.no_grad()
def test_linears_with_a_forward_of_their_own_that_computes_the_same() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.FalconConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)
    model = transformers.FalconModel(config).eval()
    ids = torch.arange(24).view(2, 12)
    wanted = model(ids).last_hidden_state
    quantize_(model, dynamic_int8())
    assert len(quantized(model)) == 8
    error = model(ids).last_hidden_state - wanted
    assert 0 < float(error.norm() / wanted.norm()) < 0.05


@torch.no_grad()
def test_layers_without_a_scale_stay_in_float(caplog) -> None:
    class Unused(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.zeros = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x):
            return super().forward(x) + self.zeros(torch.zeros_like(x))

    with caplog.at_level(logging.WARNING):
        model = quantize_(Unused().eval(), static_int8(), [torch.randn(4, 16)])
    assert quantized(model) == {"fc1", "fc2", "head"}
    assert "layer 'unused', 'zeros' stays in float: calibration saw nothing but zeros" in caplog.text
    assert conversion.fallbacks.total() == 2
