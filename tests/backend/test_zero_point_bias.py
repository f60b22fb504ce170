"""Linears whose input has a zero point: lowering, the bias that takes it, and writes to what the bias depends on."""

from __future__ import annotations

import copy

import pytest
import torch
from lowered_models import Block, converted, count, example, lowered, targets, without_inductor
from torch import nn

from qframework import numerics
from qframework.backend.compile import lower
from qframework.backend.options import BackendOptions
from qframework.quantizer import QFrameworkQuantizer, dynamic_int8, static_int8

INT8_LINEAR = torch.ops.qframework.int8_linear.default
BIAS = torch.ops.qframework.zero_point_bias.default
ASYMMETRIC = static_int8(symmetric=False)


@pytest.fixture(autouse=True)
def no_grad(fresh_dynamo):
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class WithoutBias(nn.Module):
    """GELU behind a linear and before one without a bias; its input is a user's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(32, 48)
        self.fc2 = nn.Linear(48, 24, bias=False)

    def forward(self, x):
        return self.fc2(torch.nn.functional.gelu(self.fc1(x)))


@pytest.mark.parametrize("model", [Block(), Block(nn.ReLU()), WithoutBias()], ids=["block", "relu", "without bias"])
@pytest.mark.parametrize("weight", ["per_channel", "per_tensor"])
def test_the_lowered_graph_computes_what_the_converted_one_does(model, weight):
    x = example() + 0.5
    gm = converted(model, x, static_int8(weight=weight, symmetric=False))
    reference = gm(x)
    zero_points = [node.args[2] for node in gm.graph.nodes if "quantize_per_tensor" in str(node.target)]
    assert len(set(zero_points) - {0}) == 2, "the inputs have no zero points"
    gm, reports = lowered(gm)
    assert [report.lowered for report in reports] == [True, True]
    assert not [target for target in targets(gm) if "dequantize" in str(target)]
    first, second = (node for node in gm.graph.nodes if node.target is INT8_LINEAR)
    assert second.args[0] is first, "the second linear must read the int8 that the first one wrote"
    assert numerics.sqnr_db(reference, gm(x)) > 55, "the same integers but for a few ties"
    assert numerics.sqnr_db(model(x), gm(x)) > numerics.sqnr_db(model(x), converted(model, x)(x))


def test_known_biases_are_buffers_and_unknown_ones_stay_in_the_graph():
    x = example()
    gm = converted(Block(), x, ASYMMETRIC)
    known, _ = lowered(copy.deepcopy(gm))
    assert count(known, BIAS) == 0
    weights = [name for name, value in gm.named_buffers() if value.dtype == torch.int8]
    names = weights + [name for name, value in gm.named_parameters() if value.dtype == torch.int8]
    assert names

    class Outside(nn.Module):
        """The INT8 weights are arguments, whose values the backend does not know."""

        def forward(self, x, *values):
            return torch.func.functional_call(gm, dict(zip(names, values, strict=True)), (x,))

    values = [gm.get_parameter(n) if n not in weights else gm.get_buffer(n) for n in names]
    found = []

    def backend(graph, inputs):
        lower(graph, inputs, BackendOptions())
        found.append(count(graph, BIAS))
        return graph.forward

    got = torch.compile(Outside(), backend=backend)(x, *[value.clone() for value in values])
    assert sum(found) == 2
    assert numerics.sqnr_db(gm(x), got) > 55


def test_the_compiled_model_computes_what_the_converted_one_does():
    x = example() + 0.5
    gm = converted(Block(), x, ASYMMETRIC)
    compiled = torch.compile(gm, backend="qframework")
    _int8(gm).neg_()
    for _ in range(3):
        assert numerics.sqnr_db(gm(x), compiled(x)) > 50
        _int8(gm).neg_()


def _int8(gm):
    """The weight of the last linear."""
    return [value for value in [*gm.parameters(), *gm.buffers()] if value.dtype == torch.int8][-1]


WRITES = {
    "weight": lambda gm: _int8(gm).copy_(_int8(gm) // 2 + 40),
    "bias": lambda gm: gm.get_parameter("fc2.bias").add_(1.0),
    "load_state_dict": lambda gm: gm.load_state_dict(
        {name: value + 1 if value.dtype == torch.float32 else value for name, value in gm.state_dict().items()}
    ),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_written_parameter_changes_the_bias(write):
    x = example() + 0.5
    gm = converted(Block(), x, ASYMMETRIC)
    compiled = torch.compile(gm, backend=without_inductor())
    before = compiled(x)
    WRITES[write](gm)
    assert numerics.sqnr_db(gm(x), before) < 40, "the write must change the result"
    for _ in range(2):
        assert numerics.sqnr_db(gm(x), compiled(x)) > 50


def test_a_frozen_bias_follows_a_new_parameter_and_no_write():
    x = example() + 0.5
    gm = converted(Block(), x, ASYMMETRIC)
    compiled = torch.compile(gm, backend=without_inductor(freeze_weights=True))
    expected = compiled(x)
    assert numerics.sqnr_db(gm(x), expected) > 50
    gm.get_submodule("fc2").bias = nn.Parameter(gm.get_parameter("fc2.bias") + 1.0)
    assert numerics.sqnr_db(gm(x), compiled(x)) > 50


def test_another_model_with_the_same_code_has_biases_of_its_own():
    x = example() + 0.5
    gm = converted(Block(), x, ASYMMETRIC)
    other = copy.deepcopy(gm)
    _int8(other).neg_()
    first, second = (torch.compile(each, backend=without_inductor()) for each in (gm, other))
    for _ in range(2):
        assert numerics.sqnr_db(gm(x), first(x)) > 50
        assert numerics.sqnr_db(other(x), second(x)) > 50


def test_a_zero_point_of_a_reader_without_one_is_left_in_float():
    """A dynamic layer reads the float value; a static one with a zero point quantizes it on its own."""
    x = example() + 0.5
    model = Block()
    quantizer = QFrameworkQuantizer().set_global(ASYMMETRIC).set_module_name("fc2", dynamic_int8())
    from lowered_models import exported
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    from qframework.quantizer import calibrate

    prepared = prepare_pt2e(exported(model, x), quantizer)
    calibrate(prepared, [x], progress=False)
    gm = convert_pt2e(prepared)
    reference = gm(x)
    gm, reports = lowered(gm)
    assert [report.lowered for report in reports] == [True, True]
    assert numerics.sqnr_db(reference, gm(x)) > 50
