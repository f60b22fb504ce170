"""Two ranges for GELU: the same function, against a NumPy version of PTQ4ViT, and what the backend computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quantizer_models import LINEAR, Mlp, count, exported, linears
from torch import nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from qframework.backend.compile import lower
from qframework.backend.options import BackendOptions
from qframework.numerics import sqnr_db
from qframework.quantizer import QFrameworkQuantizer, calibrate, dynamic_int8, static_int8
from qframework.quantizer.split_range import split_gelu_ranges

STATIC = QFrameworkQuantizer().set_global(static_int8())
RELU = torch.ops.aten.relu.default
INT8_LINEAR = torch.ops.qframework.int8_linear.default


def outlying(dim=16, hidden=32, seed=0):
    """An MLP one of whose hidden channels is 40 times as large as the others."""
    torch.manual_seed(seed)
    model = Mlp(dim, hidden).eval()
    with torch.no_grad():
        model.fc1.weight[0] *= 40
        model.fc2.weight[:, 0] /= 40
    return model


def converted(model, data, split, quantizer=STATIC):
    graph = exported(model, data[0], dynamic_batch=True)
    if split:
        assert split_gelu_ranges(graph, quantizer) == 1
    prepared = prepare_pt2e(graph, quantizer)
    calibrate(prepared, data)
    return convert_pt2e(prepared)


def two_ranges_twin(x):
    """PTQ4ViT: 7 bits for each sign; the negative range has a step of its own."""
    x = x.astype(np.float64)
    up, down = x.max() / 127, -x.min() / 127
    return np.where(x >= 0, np.rint(x / up) * up, np.rint(x / down) * down)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_the_function_stays_the_same(approximate):
    model, x = Mlp(16, 32), torch.randn(4, 5, 16)
    model.act = nn.GELU(approximate)
    graph = exported(model, x, dynamic_batch=True)
    assert split_gelu_ranges(graph, STATIC) == 1
    graph.graph.lint()
    assert count(graph)[LINEAR] == 3
    # two float32 sums of up to 32 products, whose parts are no larger than the outputs' terms
    torch.testing.assert_close(graph(x), model(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(graph(torch.cat([x, x])), model(torch.cat([x, x])), rtol=1e-5, atol=1e-6)


def test_it_matches_numpy():
    model, x = outlying(), torch.randn(64, 16)
    quantizer = QFrameworkQuantizer().set_module_name("fc2", static_int8())
    hidden = model.act(model.fc1(x)).detach().numpy()
    weight = model.fc2.weight.detach().numpy().astype(np.float64)
    scale = np.abs(weight).max(1, keepdims=True) / 127
    expected = two_ranges_twin(hidden) @ (np.rint(weight / scale) * scale).T + model.fc2.bias.detach().numpy()
    got = converted(model, [x], True, quantizer)(x).detach().numpy()
    # the same integers but for ties, so float32's rounding and, rarely, one step of one input
    assert (np.abs(got - expected) < 1e-5 * np.abs(expected).max()).mean() > 0.97


def test_it_reduces_the_error():
    """With positive outliers the negative values, all above -0.17, become zero in one range but not in two."""
    model, data = outlying(), [torch.randn(64, 16) for _ in range(2)]
    quantizer = QFrameworkQuantizer().set_module_name("fc2", static_int8())
    unseen = torch.randn(256, 16)
    one, two = (sqnr_db(model(unseen), converted(model, data, split, quantizer)(unseen)) for split in (False, True))
    assert two > one + 1.5


def test_both_products_read_one_weight_and_have_scales_of_their_own():
    model, data = outlying(), [torch.randn(64, 16)]
    graph = converted(model, data, True)
    _, positive, negative = linears(graph)
    assert positive.args[1].args[0].target == negative.args[1].args[0].target
    scales = [node.args[0].args[1] for node in (positive, negative)]
    hidden = model.act(model.fc1(data[0]))
    assert scales[1] <= 0.17 / 127 < 0.1 * scales[0]
    assert scales[0] == pytest.approx(float(hidden.max()) / 127, rel=0.02)
    int8 = [value for value in graph.state_dict().values() if value.dtype == torch.int8]
    assert sum(value.numel() for value in int8) == 2 * 16 * 32
    stacks = [list(node.meta["nn_module_stack"].values())[-1][0] for node in (positive, negative)]
    assert stacks == ["fc2", "fc2"]


def test_the_backend_computes_both_in_int8():
    model, x = outlying(), torch.randn(3, 5, 16)
    graph = converted(model, [x], True)
    reference = graph(x)
    reports = lower(graph, (), BackendOptions())
    assert count(graph)[INT8_LINEAR] == 3
    assert count(graph)[LINEAR] == 0
    assert [report.lowered for report in reports] == [True] * 3
    assert reports[1].name == reports[2].name == "fc2"
    assert sqnr_db(reference, graph(x)) > 60  # the same integers but for a few ties
    # the sum of both is in an epilogue
    assert count(graph)[torch.ops.aten.add.Tensor] == 0


class Branches(nn.Module):
    """Linears after a GELU, after a ReLU and after neither."""

    def __init__(self):
        super().__init__()
        self.fc, self.relu, self.left, self.right, self.dynamic = (nn.Linear(8, 8) for _ in range(5))

    def forward(self, x):
        x = nn.functional.gelu(self.fc(x))
        return self.relu((self.left(x) + self.right(x) + self.dynamic(x)).relu())


def test_which_linears_are_split():
    model, x = Branches(), torch.randn(4, 8)
    quantizer = QFrameworkQuantizer().set_global(static_int8()).set_module_name("dynamic", dynamic_int8())
    graph = exported(model, x)
    assert split_gelu_ranges(graph, quantizer) == 2
    assert count(graph)[RELU] == 2  # the model's own, and one for both linears
    torch.testing.assert_close(graph(x), model(x), rtol=1e-5, atol=1e-6)
    assert split_gelu_ranges(graph, quantizer) == 0  # a second time there is nothing left to split
    for nothing in (QFrameworkQuantizer().set_global(dynamic_int8()), QFrameworkQuantizer().set_global(None)):
        assert split_gelu_ranges(exported(model, x), nothing) == 0
