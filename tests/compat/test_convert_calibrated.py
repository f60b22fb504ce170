"""Models with batch norms are converted without torchao's search for those that train."""

from __future__ import annotations

import threading
import types

import pytest
import torch
from torch import nn
from torchao.quantization.pt2e import quantize_pt2e
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from qframework.compat.missing import replaced
from qframework.compat.torchao import convert_calibrated
from qframework.numerics import sqnr_db
from qframework.quantizer import QFrameworkQuantizer, calibrate, static_int8


class WithBatchNorms(nn.Module):
    """One before a convolution, which stays, and one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.patches, self.norm = nn.BatchNorm2d(3), nn.Conv2d(3, 16, 4, 4), nn.BatchNorm2d(16)
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 8)
        for norm in (self.first, self.norm):
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)

    def forward(self, x):
        x = self.norm(self.patches(self.first(x))).mean((2, 3))
        return self.fc2(torch.relu(self.fc1(x)))


def prepared(x):
    torch.manual_seed(0)
    graph = torch.export.export(WithBatchNorms().eval(), (x,)).module()
    found = prepare_pt2e(graph, QFrameworkQuantizer().set_global(static_int8()))
    calibrate(found, [x])
    return found


@pytest.fixture
def searched(monkeypatch):
    """Models that torchao searched."""
    models = []

    def fold(model):
        models.append(model)
        return model

    monkeypatch.setattr(quantize_pt2e, "_fold_conv_bn_qat", fold)
    return models


@pytest.mark.full  # the search takes half a minute
def test_nothing_differs():
    x = torch.randn(4, 3, 16, 16)
    expected = convert_pt2e(prepared(x))  # with the search
    found = convert_calibrated(prepared(x))
    assert [str(node.target) for node in found.graph.nodes] == [str(node.target) for node in expected.graph.nodes]
    assert torch.equal(found(x), expected(x))


def test_the_search_is_back_behind_each_call(searched):
    x = torch.randn(4, 3, 16, 16)
    convert_calibrated(prepared(x))
    assert not searched
    with pytest.raises(AttributeError):
        convert_calibrated(nn.Linear(2, 2))  # type: ignore[arg-type]
    convert_pt2e(prepared(x))
    assert len(searched) == 1
    assert any("batch_norm" in str(node.target) for node in searched[0].graph.nodes)


def test_without_torchaos_function_models_are_converted_as_usual(monkeypatch):
    called = []
    monkeypatch.delattr(quantize_pt2e, "_fold_conv_bn_qat")
    monkeypatch.setattr("qframework.compat.torchao.convert_pt2e", called.append)
    convert_calibrated(nn.Identity())  # type: ignore[arg-type]
    assert len(called) == 1
    assert replaced["torchao.quantization.pt2e.quantize_pt2e._fold_conv_bn_qat"] >= 1


def test_another_thread_searches(searched, monkeypatch):
    """While one thread converts, the function that it replaced still searches for others."""
    x = torch.randn(4, 3, 16, 16)
    model = prepared(x)
    fold_of = {}

    def convert(graph):
        thread = threading.Thread(target=lambda: quantize_pt2e._fold_conv_bn_qat(graph))
        thread.start()
        thread.join()
        fold_of["own"] = quantize_pt2e._fold_conv_bn_qat(graph)
        return graph

    monkeypatch.setattr("qframework.compat.torchao.convert_pt2e", convert)
    assert convert_calibrated(model) is model
    assert searched == [model]
    assert fold_of["own"] is model


def test_without_torch_fx_set_of_functions_models_are_converted_as_usual(searched, monkeypatch):
    x = torch.randn(4, 3, 16, 16)
    model = prepared(x)
    expected = model(x)
    monkeypatch.setattr("qframework.compat.torchao.fx_node", types.SimpleNamespace())
    assert sqnr_db(expected, convert_calibrated(model)(x)) > 20
    assert replaced["torch.fx.node._side_effectful_functions"] >= 1
