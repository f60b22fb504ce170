"""The layers that can be quantized one by one: names and operands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from tuning_models import CHANNELS, NAMES, TOKENS, images, transformer

from qframework.conversion.exported import export_model
from qframework.errors import QFrameworkError
from qframework.tuning.layers import AttentionOperands, LinearOperands, TensorShape, find_layers

FLOAT = torch.float32


def shape(*sizes: int, dtype: torch.dtype = FLOAT) -> TensorShape:
    return TensorShape(sizes, dtype)


@pytest.mark.parametrize("spelled_out", [False, True])
def test_layers_are_found_with_their_operands(spelled_out: bool) -> None:
    batch = images(4)
    layers = find_layers(export_model(transformer(spelled_out=spelled_out), batch), batch)
    assert [layer.key for layer in layers] == NAMES
    assert all(layer.static for layer in layers)
    by_key = {layer.key: layer.calls for layer in layers}
    heads = shape(4, 2, TOKENS, CHANNELS // 2)
    assert by_key["attention", "attn"] == [AttentionOperands(heads, heads, heads)]
    assert by_key["linear", "fc1"] == [LinearOperands(shape(4, TOKENS, CHANNELS), shape(32, CHANNELS), shape(32))]


def test_finding_layers_does_not_change_the_graph() -> None:
    exported = export_model(transformer(spelled_out=True), images())
    before = exported.print_readable(print_output=False)
    find_layers(exported, images())
    assert exported.print_readable(print_output=False) == before


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.wide = nn.Linear(16, 16, bias=False), _WideHeads()

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.fc(self.fc(x)))


class _WideHeads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.unsqueeze(1).repeat(1, 1, 1, 20)  # 320 channels a head; the operators take 256
        return nn.functional.scaled_dot_product_attention(wide, wide, wide)


def test_a_layer_lists_all_its_calls_and_unsupported_layers_are_left_out() -> None:
    batch = torch.randn(2, 5, 16)
    (layer,) = find_layers(export_model(Twice().eval(), batch), batch)
    assert layer.key == ("linear", "fc")
    assert layer.calls == [LinearOperands(shape(2, 5, 16), shape(16, 16), None)] * 2


class _Capped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = _CappedHeads()

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x.unflatten(-1, (2, 8)).transpose(1, 2))


class _CappedHeads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x @ x.mT / 5) * 5).softmax(-1) @ x


def test_a_soft_cap_belongs_to_the_operands_and_is_not_static() -> None:
    batch = torch.randn(2, 5, 16)
    (layer,) = find_layers(export_model(_Capped().eval(), batch), batch)
    heads = shape(2, 2, 5, 8)
    assert layer.calls == [AttentionOperands(heads, heads, heads, softcap=5.0)]
    assert str(layer.calls[0]).endswith("softcap 5")
    assert not layer.static


def test_nothing_to_quantize_is_an_error() -> None:
    with pytest.raises(QFrameworkError, match="must have an attention or a linear with a parameter as its weight"):
        find_layers(export_model(nn.ReLU(), torch.randn(2, 3)), torch.randn(2, 3))


def test_linears_that_read_one_tensor_say_so() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.a(x) + self.b(x))

    batch = torch.randn(2, 16)
    a, b, c = find_layers(export_model(Two().eval(), batch), batch)
    assert a.reads == b.reads != c.reads
    assert c.reads is not None
    by_key = {layer.key: layer for layer in find_layers(export_model(transformer(), images()), images())}
    assert by_key["attention", "attn"].reads is None
