"""Assignments as quantizers, options and JSON."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import Tensor, nn
from tuning_models import images, transformer

from qframework.backend import explain
from qframework.backend.options import parse_options
from qframework.conversion.exported import export_model, quantize_exported
from qframework.errors import UnsupportedError
from qframework.quantizer import ActivationConfig, AttentionConfig, QFrameworkQuantizer, dynamic_int8, static_int8
from qframework.tuning.assignment import OBSERVERS, Assignment, Meanings
from qframework.tuning.layers import find_layers


def test_the_quantizer_of_an_assignment_reaches_each_layer() -> None:
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


def test_wildcards_in_layer_names_are_escaped() -> None:
    model = nn.Sequential()
    model.add_module("a[0]", nn.Linear(16, 16))
    model.add_module("a0", nn.Linear(16, 16))
    batch = torch.randn(2, 16)
    exported = export_model(model.eval(), batch)
    layers = find_layers(exported, batch)
    quantizer = Assignment.uniform(layers).changed(("linear", "a[0]"), "static").quantizer()
    configs = [quantizer.config_for(node) for node in exported.graph.nodes if "linear" in str(node.target)]
    assert configs == [static_int8(), None]


def test_an_assignment_survives_a_json_round_trip() -> None:
    assignment = Assignment({("linear", "a"): "static", ("attention", "a"): "sage_b", ("linear", "b"): "float"})
    assert Assignment.from_dict(json.loads(json.dumps(assignment.to_dict()))) == assignment
    assert assignment.count() == {"attention sage_b": 1, "linear float": 1, "linear static": 1}


def test_options_keep_float_attention_in_float() -> None:
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
     (("linear", "a"), "static mse", "a linear must be one of float, static, dynamic, got 'static mse'"),
     (("attention", "a"), "static mse", "an attention must be one of float, static or a variant, got 'static mse'"),
     (("attention", "a"), "sage9", "variant must be auto, sage_t.*, got 'sage9'")],
)  # fmt: skip
def test_unknown_choices_are_refused(key, choice, message) -> None:
    with pytest.raises(UnsupportedError, match=message):
        Assignment({key: choice}).quantizer()


OBSERVED = Meanings(static_attention=AttentionConfig(output="always"), observers=OBSERVERS)


def test_a_static_choice_may_name_its_observer() -> None:
    choices = {("linear", "a"): "static mse", ("linear", "b"): "static zero_point", ("attention", "c"): "static mse"}
    assignment = Assignment(choices)
    configs = {rule.selector: rule.config for rule in assignment.quantizer(OBSERVED).rules}
    assert configs["a"].linear == static_int8(observer="mse")
    assert configs["b"].linear == static_int8(symmetric=False)
    assert configs["c"].attention == AttentionConfig(observer="mse", output="always")
    assert assignment.is_calibrated
    assert assignment.options() == {"attention": "off"}
    assert Assignment.from_dict(json.loads(json.dumps(assignment.to_dict()))) == assignment


def test_attention_takes_no_zero_points() -> None:
    names = {"static moving_average", "static percentile", "static mse", "static entropy", "static"}
    assert set(OBSERVED.statics("attention")) == names
    assert set(OBSERVED.statics("linear")) == names | {"static zero_point"}
    with pytest.raises(UnsupportedError, match=r"must be one of float, static, .*, got 'static zero_point'"):
        OBSERVED.attention("static zero_point")


def test_observers_run_the_same_kernels_but_zero_points_and_scales_of_positions_do_not() -> None:
    names = ("moving_average", "percentile", "mse", "entropy")
    assert {OBSERVED.kernel(f"static {name}") for name in names} == {"static"}
    positions = Meanings(observers={"position": ActivationConfig("per_token"), "mse": OBSERVERS["mse"]})
    others = [OBSERVED.kernel("static zero_point"), positions.kernel("static position")]
    assert len({"static", *others}) == 3
    assert [OBSERVED.kernel(choice) for choice in ("float", "dynamic", "sage_b")] == ["float", "dynamic", "sage_b"]
    some, same = (
        Assignment({("linear", "a"): a, ("attention", "b"): b, ("linear", "c"): "float"})
        for a, b in (("static mse", "static"), ("static", "static percentile"))
    )
    assert OBSERVED.kernels(some) == OBSERVED.kernels(same)
    assert OBSERVED.kernels(some) != OBSERVED.kernels(some.changed(("linear", "c"), "static mse"))


def test_graphs_of_equal_kernels_differ_in_scales_alone() -> None:
    """What ``kernels`` says, seen in converted graphs."""
    batch = images(4)
    exported = export_model(transformer(), batch)
    layers = find_layers(exported, batch)
    plain = Assignment.uniform(layers, "static")
    choices = ("static mse", "static percentile", "static entropy", "static moving_average", "static", "static mse")
    mixed = Assignment(zip(plain, choices, strict=True))
    zero_point = plain.changed(("linear", "fc2"), "static zero_point")

    def operations(assignment: Assignment) -> list[tuple[str, list[object]]]:
        graph = quantize_exported(copy.deepcopy(exported), assignment.quantizer(OBSERVED), [batch]).graph
        return [
            (str(node.target), [arg for arg in node.args if not isinstance(arg, float)])
            for node in graph.nodes
            if node.op == "call_function"
        ]

    def described(assignment: Assignment) -> str:
        return str(operations(assignment))

    assert described(mixed) == described(plain)
    assert described(zero_point) != described(plain)
