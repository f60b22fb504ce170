"""``explain`` and its report: what the backend does to each layer of a model (explanation.py, report.py)."""

from __future__ import annotations

import pytest
import torch
from lowered_models import Block, converted, example
from torch import nn

import qframework


def test_compiled_converted_model():
    x = example()
    gm = converted(Block(), x, fc2=None)
    report = qframework.explain(torch.compile(gm, backend="qframework"), x)
    assert (report.lowered, report.total) == (1, 2)
    assert [layer.name for layer in report.layers] == ["fc1", "fc2"]
    assert "1 of 2 linear layers lowered" in str(report)
    assert "not quantized" in report.layers[1].reason


def test_the_model_is_left_as_it_was():
    x = example()
    gm = converted(Block(), x)
    nodes = len(gm.graph.nodes)
    qframework.explain(gm, x)
    assert len(gm.graph.nodes) == nodes


def test_compiled_float_model_keeps_its_options():
    model, x = nn.Sequential(Block(), Block()).eval(), example()
    options = {"linear": "int8_dynamic"}
    report = qframework.explain(torch.compile(model, backend="qframework", options=options), x)
    assert [layer.name for layer in report.layers] == ["0.fc1", "0.fc2", "1.fc1", "1.fc2"]
    assert report.lowered == 4


def test_names_are_those_of_the_model_however_it_is_reached():
    """Llama's ``forward`` in transformers is decorated: Dynamo reaches the model as ``args[0]``."""

    def decorated(forward):
        return lambda *args: forward(*args)

    class Decorated(nn.Sequential):
        forward = decorated(nn.Sequential.forward)

    class Renamed(nn.Sequential):
        def forward(this, x):
            return this[1](this[0](x))

    options = {"linear": "int8_dynamic"}
    for model in (Decorated(Block(), Block()), Renamed(Block(), Block())):
        report = qframework.explain(model.eval(), example(), options=options)
        assert [layer.name for layer in report.layers] == ["0.fc1", "0.fc2", "1.fc1", "1.fc2"], type(model)


def test_float_model():
    report = qframework.explain(Block().eval(), (example(),))
    assert (report.lowered, report.total) == (0, 2)


def test_options_of_a_float_model():
    model, x = Block().eval(), example()
    report = qframework.explain(model, x)
    assert all("options={'linear': 'int8_dynamic'}" in layer.reason for layer in report.layers)
    report = qframework.explain(model, {"x": x}, options={"linear": "int8_dynamic", "freeze_weights": True})
    assert [layer.operator for layer in report.layers] == [
        "qframework::int8_linear (gelu) after dynamic_quantize, weight quantized once",
        "qframework::int8_linear (residual) after dynamic_quantize, weight quantized once",
    ]
    with pytest.raises(qframework.errors.UnsupportedError, match="option 'linear' must be one of"):
        qframework.explain(model, x, options={"linear": "int4"})
    compiled = torch.compile(model, backend="qframework")
    with pytest.raises(qframework.errors.QFrameworkError, match="mode and options must be None for a compiled model"):
        qframework.explain(compiled, x, options={"linear": "int8_dynamic"})


def test_reasons_name_the_remedy():
    x = example()
    (_, skipped) = qframework.explain(converted(Block(), x, fc2=None), x).layers
    assert skipped.reason.startswith("not quantized: a rule, skip=, filter_fn or a recipe left it in float")


def test_a_computed_weight_is_the_reason():
    class Scaled(Block):
        def forward(self, x):
            return (
                super().forward(x)
                + torch.nn.functional.linear(x, self.fc2.weight.t() * self.fc2.weight.mean())[..., :32]
            )

    x = example()
    *_, scaled = qframework.explain(converted(Scaled(), x), x).layers
    assert not scaled.lowered
    assert scaled.reason.startswith("its weight must be a parameter of a module")


def test_keyword_inputs():
    assert qframework.explain(Block().eval(), {"x": example()}).total == 2


def test_another_backend_is_refused():
    with pytest.raises(qframework.errors.QFrameworkError, match="must be compiled with backend='qframework'"):
        qframework.explain(torch.compile(Block(), backend="eager"), example())


def test_inputs_that_the_model_does_not_take_are_refused():
    for inputs in (None, (), {"a": 1}):
        with pytest.raises(qframework.errors.QFrameworkError, match="explain: inputs must be the model's input"):
            qframework.explain(torch.nn.Linear(4, 3), inputs)
