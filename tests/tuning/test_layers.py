"""The layers that can be quantized one by one: names, operands, times, and assignments to them."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from tuning_models import CHANNELS, NAMES, TOKENS, images, transformer

from qframework.backend import explain
from qframework.backend.options import parse_options
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.evaluation.pt2e import export_model, quantize_exported
from qframework.quantizer import QFrameworkQuantizer, dynamic_int8, static_int8
from qframework.tuning.assignment import Assignment, Meanings
from qframework.tuning.layer_times import milliseconds
from qframework.tuning.layers import AttentionOperands, LinearOperands, TensorShape, find_layers

FLOAT = torch.float32


def shape(*sizes: int, dtype: torch.dtype = FLOAT) -> TensorShape:
    return TensorShape(sizes, dtype)


LINEAR = LinearOperands(shape(4, 6, 16), shape(32, 16), shape(32))
ATTENTION = AttentionOperands(*[shape(2, 2, 6, 8)] * 3)


# find_layers


@pytest.mark.parametrize("spelled_out", [False, True])
def test_layers_are_found_with_what_they_are_called_with(spelled_out: bool) -> None:
    batch = images(4)
    layers = find_layers(export_model(transformer(spelled_out=spelled_out), batch), batch)
    assert [layer.key for layer in layers] == NAMES
    assert all(layer.static for layer in layers)
    by_key = {layer.key: layer.calls for layer in layers}
    heads = shape(4, 2, TOKENS, CHANNELS // 2)
    assert by_key["attention", "attn"] == [AttentionOperands(heads, heads, heads)]
    assert by_key["linear", "fc1"] == [LinearOperands(shape(4, TOKENS, CHANNELS), shape(32, CHANNELS), shape(32))]


def test_finding_layers_leaves_the_graph_as_it_is() -> None:
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


def test_a_layer_has_all_its_calls_and_what_no_operator_computes_is_left_out() -> None:
    batch = torch.randn(2, 5, 16)
    (layer,) = find_layers(export_model(Twice().eval(), batch), batch)
    assert layer.key == ("linear", "fc")
    assert layer.calls == [LinearOperands(shape(2, 5, 16), shape(16, 16), None)] * 2


def test_nothing_to_quantize_is_an_error() -> None:
    with pytest.raises(QFrameworkError, match="must have an attention or a linear with a parameter as its weight"):
        find_layers(export_model(nn.ReLU(), torch.randn(2, 3)), torch.randn(2, 3))


# milliseconds


class Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("operands", "choice", "operators"),
    [
        (LINEAR, "float", ["aten.addmm.default"]),
        (LINEAR, "static", ["qframework.int8_linear.default"]),
        (LINEAR, "dynamic", ["qframework.dynamic_quantize.alone", "qframework.int8_linear.default"]),
        (ATTENTION, "static", ["qframework.mixed_attention.default"]),
        (ATTENTION, "sage_b", ["qframework.sage_attention.default"]),
    ],
)
def test_what_is_timed_is_the_operator_that_the_backend_launches(operands, choice, operators) -> None:
    with Operators() as mode:
        assert milliseconds(operands, choice, "cpu", repeats=1) > 0
    ours = [name for name in mode.seen if name in operators]
    # two calls to warm up, one for the number of repeats, three at least that count
    assert ours == operators * 6
    assert not [name for name in mode.seen if name.startswith("qframework") and name not in operators]


@pytest.mark.parametrize("choice", ["float", "static", "sage_b"])
@pytest.mark.parametrize(
    "bias",
    [
        {"mask": shape(2, 1, 6, 6)},
        {"mask": shape(6, 6, dtype=torch.bool)},
        {"rel_h": shape(2, 2, 6, 2), "rel_w": shape(2, 2, 6, 3)},
        {"is_causal": True},
    ],
    ids=["float mask", "bool mask", "relative positions", "causal"],
)
def test_attention_is_timed_with_its_bias(bias, choice) -> None:
    assert milliseconds(AttentionOperands(*[shape(2, 2, 6, 8)] * 3, **bias), choice, "cpu", repeats=1) > 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("operands", "choice"),
    [(o, c) for o, cs in ((LINEAR, ("static", "dynamic")), (ATTENTION, ("static", "sage_b"))) for c in ("float", *cs)],
)
def test_a_call_is_timed_on_a_gpu_without_its_launch(operands, choice) -> None:
    # tensors this small take microseconds; launched one by one from Python they would take tens of them
    assert 0 < milliseconds(operands, choice, "cuda") < 0.1


# Assignment


def test_an_assignment_as_a_quantizer_reaches_each_layer() -> None:
    batch = images(4)
    exported = export_model(transformer(), batch)
    layers = find_layers(exported, batch)
    assignment = Assignment.uniform(layers, "static")
    for key, choice in {
        ("linear", "fc1"): "dynamic",
        ("attention", "attn"): "sage_b",
        ("linear", "head"): "float",
    }.items():
        assignment = assignment.changed(key, choice)
    converted = quantize_exported(copy.deepcopy(exported), assignment.quantizer(), [batch])
    report = {(layer.kind, layer.name): layer for layer in explain(converted, (batch,)).layers}
    assert {key for key, layer in report.items() if not layer.lowered} == {("linear", "head")}
    assert report["attention", "attn"].operator == "qframework::sage_attention (sage_b)"
    targets = [str(node.target) for node in converted.graph.nodes]
    assert targets.count("qframework.dynamic_quantize.default") == 1  # fc1


def test_a_layer_inside_another_has_its_own_choice() -> None:
    """nn.MultiheadAttention is a linear and an attention by the name of the module that holds ``out_proj``."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x, x, x, need_weights=False)[0]

    batch = torch.randn(2, 5, 16)
    with torch.no_grad():
        model = Model().train()  # in eval mode PyTorch fuses all of it
        exported = export_model(model, batch)
    layers = find_layers(exported, batch)
    keys = [layer.key for layer in layers]
    assert set(keys) == {("linear", "attn"), ("attention", "attn"), ("linear", "attn.out_proj")}
    for wanted in keys:
        quantizer = Assignment.uniform(layers).changed(wanted, "static").quantizer()
        converted = quantize_exported(copy.deepcopy(exported), quantizer, [batch])
        lowered = [layer.kind for layer in explain(converted, (batch,)).layers if layer.lowered]
        assert lowered == [wanted[0]]


def test_names_are_no_patterns() -> None:
    model = nn.Sequential()
    model.add_module("a[0]", nn.Linear(16, 16))
    model.add_module("a0", nn.Linear(16, 16))
    batch = torch.randn(2, 16)
    exported = export_model(model.eval(), batch)
    layers = find_layers(exported, batch)
    quantizer = Assignment.uniform(layers).changed(("linear", "a[0]"), "static").quantizer()
    configs = [quantizer.config_for(node) for node in exported.graph.nodes if "linear" in str(node.target)]
    assert configs == [static_int8(), None]


def test_an_assignment_is_json_and_back() -> None:
    assignment = Assignment({("linear", "a"): "static", ("attention", "a"): "sage_b", ("linear", "b"): "float"})
    assert Assignment.from_dict(json.loads(json.dumps(assignment.to_dict()))) == assignment
    assert assignment.count() == {"attention sage_b": 1, "linear float": 1, "linear static": 1}


def test_options_are_those_of_the_backend_and_keep_float_attention_float() -> None:
    choices = {("attention", "a"): "sage_b", ("attention", "b"): "float", ("attention", "c"): "static"}
    assert parse_options(options=Assignment(choices).options()).attention == {"a": "sage_b"}
    assert parse_options(options=Assignment({("attention", "b"): "float"}).options()).attention == "off"


def test_meanings_decide_what_static_is() -> None:
    meanings = Meanings(static=static_int8(observer="mse"), dynamic=dynamic_int8("per_tensor"))
    assignment = Assignment({("linear", "a"): "static", ("linear", "b"): "dynamic"})
    rules = assignment.quantizer(meanings).rules
    assert [rule.config.linear for rule in rules] == [static_int8(observer="mse"), dynamic_int8("per_tensor")]
    assert QFrameworkQuantizer.from_dict(assignment.quantizer(meanings).to_dict()).rules == rules


@pytest.mark.parametrize(
    ("key", "choice", "message"),
    [(("linear", "a"), "sage_b", "a linear must be one of float, static, dynamic, got 'sage_b'"),
     (("attention", "a"), "sage9", "variant='sage9' is unknown")],
)  # fmt: skip
def test_unknown_choices_are_refused(key, choice, message) -> None:
    with pytest.raises(UnsupportedError, match=message):
        Assignment({key: choice}).quantizer()
