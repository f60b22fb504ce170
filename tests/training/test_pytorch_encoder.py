"""``nn.TransformerEncoder``, which in evaluation makes nested tensors and has a fast path that calls no linear."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from qframework.errors import UnsupportedError
from qframework.numerics import sqnr_db
from qframework.training import convert_to_int8_training, restore_float

KEPT = ["layers.*.self_attn"]


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[1, 8:] = True
    return torch.randn(2, 12, 64), padding


@pytest.mark.parametrize("scope", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("mode", ["per_block", "per_tensor"])
def test_padded_inputs_in_evaluation(mode: Any, scope: Any) -> None:
    model = encoder().eval()
    converted = convert_to_int8_training(copy.deepcopy(model), mode=mode, keep_float=KEPT, skip_slower=False)
    x, padding = padded()
    with scope():
        wanted, got = (each(x, src_key_padding_mask=padding) for each in (model, converted))
    assert sqnr_db(wanted[0], got[0]) > 30
    assert sqnr_db(wanted[1, :8], got[1, :8]) > 30


def test_a_restored_encoder_makes_nested_tensors_again() -> None:
    model, fixed = encoder(), encoder()
    fixed.use_nested_tensor = False
    for each, makes in ((model, True), (fixed, False)):
        convert_to_int8_training(each, keep_float=KEPT, skip_slower=False)
        assert not each.use_nested_tensor
        assert bool(restore_float(each).use_nested_tensor) is makes


@torch.no_grad()
@pytest.mark.parametrize("mode", ["per_token", "per_tensor"])
@pytest.mark.parametrize("keep", [[], KEPT], ids=["", "kept"])
def test_evaluation_is_quantized_as_training_is(mode: Any, keep: list[str]) -> None:
    """PyTorch's fast path would multiply the float weights."""
    model = encoder().eval()
    converted = convert_to_int8_training(copy.deepcopy(model), mode=mode, keep_float=keep, skip_slower=False)
    x = torch.randn(2, 12, 64)
    wanted, trained, evaluated = model(x), converted.train()(x), converted.eval()(x)
    assert 30 < sqnr_db(wanted, evaluated) < 70
    assert sqnr_db(trained, evaluated) > 80
    restored = restore_float(converted)
    assert torch.equal(restored(x), wanted)
    for layer, before in zip(restored.layers, model.layers, strict=True):
        assert layer.activation_relu_or_gelu == before.activation_relu_or_gelu
        assert layer.__dict__.keys() == before.__dict__.keys()


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_inputs_are_named(layout: torch.layout) -> None:
    model = convert_to_int8_training(encoder(), keep_float=KEPT, skip_slower=False)
    nested = torch.nested.nested_tensor([torch.randn(5, 64), torch.randn(3, 64)], layout=layout)
    with pytest.raises(UnsupportedError, match="x must be dense, got a nested tensor of 2 parts"):
        model(nested)
