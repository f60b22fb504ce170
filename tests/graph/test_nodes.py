"""What a node means: the same answer for Python's, torch's and ATen's form of an operation."""

from __future__ import annotations

import operator

import pytest
import torch
from lowered_models import exported
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

from qframework.graph.nodes import (
    Constants,
    activation_name,
    add_call,
    added_to,
    argument,
    fake_value,
    is_inactive_dropout,
    layer_name,
    linear_call,
    operation,
    why_not_plain,
)

aten = torch.ops.aten
X, Y = torch.empty(2, 3), torch.empty(2, 3)


def node_of(target, *args, **kwargs):
    """A node that calls ``target``, tensors among its arguments as placeholders."""
    graph = torch.fx.Graph()

    def placeholder(value):
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["example_value"] = value
        return node

    call = graph.call_method if isinstance(target, str) else graph.call_function
    return call(target, tuple(map(placeholder, args)), kwargs)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        *((target, "add") for target in (operator.add, operator.iadd, torch.add, "add_", "__radd__", aten.add.Tensor)),
        *((target, "matmul") for target in (operator.matmul, torch.matmul, "__matmul__", aten.matmul.default)),
        *((target, "softmax") for target in (F.softmax, torch.softmax, aten._softmax.default, aten.softmax.int)),
        *((target, "div") for target in (operator.truediv, torch.divide, "true_divide", aten.div_.Tensor)),
        (torch.ops.quantized_decomposed.dequantize_per_tensor.default, None),
        (len, None),
    ],
)
def test_an_operation_has_one_name_in_all_dialects(target, name):
    assert operation(node_of(target, X)) == name


def test_a_call_of_a_buffer_beside_fake_values_has_a_fake_value():
    """As a scale that the lowering adds, whose recorded value is the buffer itself."""
    with FakeTensorMode() as mode:
        fake = torch.empty(2, 3)
    graph = torch.fx.Graph()
    x, scale = graph.placeholder("x"), graph.get_attr("scale")
    x.meta["example_value"], scale.meta["example_value"] = fake, torch.ones(1)
    node = add_call(x, torch.ops.qframework.quantize.default, (x, scale))
    value = fake_value(node)
    assert isinstance(value, FakeTensor)
    assert value.fake_mode is mode
    assert (value.shape, value.dtype) == ((2, 3), torch.int8)
    assert not isinstance(
        fake_value(add_call(scale, torch.ops.qframework.quantize.default, (scale, scale))), FakeTensor
    )


def test_arguments_are_found_by_position_and_by_any_name():
    node = node_of(F.gelu, X, approximate="tanh")
    assert argument(node, 1, "approx", "approximate") == "tanh"
    assert argument(node, 2, "other", default=5) == 5
    assert argument(node, 0, "input") is node.args[0]


@pytest.mark.parametrize(
    ("node", "name"),
    [
        (node_of(F.gelu, X), "gelu"),
        (node_of(aten.gelu.default, X, approximate="tanh"), "gelu_tanh"),
        (node_of(torch.relu_, X), "relu"),
        (node_of(aten.silu.default, X), "silu"),
        (node_of(torch.sigmoid, X), None),
    ],
)
def test_activations_have_the_names_of_int8_linear(node, name):
    assert activation_name(node) == name


@pytest.mark.parametrize(
    ("node", "inactive"),
    [
        (node_of(F.dropout, X, 0.1, training=False), True),
        (node_of(aten.dropout.default, X, 0.0, True), True),
        (node_of(aten.dropout_.default, X, 0.1, False), True),
        (node_of(aten.dropout_.default, X, 0.1, True), False),
        (node_of(F.dropout, X, 0.1), False),
        (node_of(torch.relu, X), False),
    ],
)
def test_dropout_is_inactive_in_evaluation_and_at_probability_0(node, inactive):
    assert is_inactive_dropout(node) is inactive


@pytest.mark.parametrize(
    ("target", "value", "other", "options", "added"),
    [
        (torch.add, X, Y, {}, True),
        (operator.iadd, X, Y, {}, True),
        (torch.add, X, Y, {"alpha": 2}, False),
        (torch.add, X, torch.empty(3), {}, False),
        (torch.add, X, Y.double(), {}, False),
        (torch.mul, X, Y, {}, False),
    ],
)
def test_a_sum_of_equal_shapes_is_a_residual(target, value, other, options, added):
    node = node_of(target, value, other, **options)
    node.meta["example_value"] = X
    first, second = node.args
    assert added_to(node, first) is (second if added else None)


def test_an_in_place_sum_counts_for_the_tensor_that_it_changes_only():
    node = node_of(operator.iadd, X, Y)
    node.meta["example_value"] = X
    assert added_to(node, node.args[1]) is None


def test_sparse_and_nested_tensors_are_not_plain():
    assert why_not_plain(X) is None
    assert why_not_plain(None) is None
    assert "layout torch.sparse_coo" in str(why_not_plain(X.to_sparse()))
    assert "NestedTensor" in str(why_not_plain(torch.nested.nested_tensor([X], layout=torch.jagged)))


def test_constants_and_names_of_layers_in_an_exported_graph():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
    gm = exported(model, X)
    constants = Constants(gm, ())
    calls = {layer_name(node): call for node in gm.graph.nodes if (call := linear_call(node)) is not None}
    assert list(calls) == ["0", "2"]
    for name, call in calls.items():
        layer = model.get_submodule(name)
        assert torch.equal(constants.value(call.weight), layer.weight)
        assert torch.equal(constants.value(call.bias), layer.bias)
        assert constants.value(call.input) is None
