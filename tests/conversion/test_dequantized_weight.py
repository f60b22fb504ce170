"""The dequantized weight of an INT8 layer: code reads it as any tensor, and a write to it is an error."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qframework import quantize_
from qframework.errors import UnsupportedError
from qframework.quantizer import dynamic_int8


@torch.no_grad()
def test_code_that_reads_a_weight_gets_the_dequantized_one() -> None:
    layer = quantize_(nn.Sequential(nn.Linear(16, 8)), dynamic_int8())[0]
    x = torch.randn(4, 16)
    torch.testing.assert_close(F.linear(x, layer.weight, layer.bias), layer(x), rtol=0.05, atol=0.05)
    with pytest.raises((AttributeError, KeyError)):
        layer.weight = nn.Parameter(torch.zeros(8, 16))


def _merge(layer: nn.Module) -> None:
    """As adapters of PEFT are merged."""
    layer.weight.data += torch.ones(8, 16)


def _merge_safely(layer: nn.Module) -> None:
    layer.weight.data = layer.weight.data.clone().add_(1)


def _set_a_row(layer: nn.Module) -> None:
    layer.weight[0] = 1


@pytest.mark.parametrize(
    "write",
    [
        _merge,
        _merge_safely,
        _set_a_row,
        lambda layer: layer.weight.t().mul_(2),
        lambda layer: layer.weight.detach()[0].zero_(),
        lambda layer: nn.init.normal_(layer.weight),
        lambda layer: torch.add(torch.ones(8, 16), 1, out=layer.weight),
    ],
)
def test_a_write_to_the_dequantized_weight_is_an_error(write) -> None:
    layer = quantize_(nn.Sequential(nn.Linear(16, 8)), dynamic_int8())[0]
    with pytest.raises(UnsupportedError, match=r"QuantizedLinear: weight must not be written, got .* before quantize_"):
        write(layer)


def test_the_dequantized_weight_is_read_as_any_tensor() -> None:
    layer = quantize_(nn.Sequential(nn.Linear(16, 8)), dynamic_int8())[0]
    weight = layer.weight
    assert (weight.shape, weight.dtype, weight.device) == ((8, 16), torch.float32, torch.device("cpu"))
    assert not weight.requires_grad_(False).requires_grad
    for computed in (weight + 1, F.relu(weight), torch.cat([weight, weight]), copy.deepcopy(weight), weight.clone()):
        assert type(computed) is torch.Tensor
        computed.mul_(2)
    torch.testing.assert_close(weight.sum(), weight.numpy().sum().item() * torch.ones(()))
    x = torch.randn(4, 16, requires_grad=True)
    F.linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(4, 16) * 1)
    read = torch.compile(lambda x: F.linear(x, layer.weight), backend="eager", fullgraph=True)
    torch.testing.assert_close(read(x), F.linear(x, weight))
    torch.save({"weight": weight + 0}, io.BytesIO())
