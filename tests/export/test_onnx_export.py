"""``to_onnx``: ONNX Runtime on the CPU computes what our quantized model computes, with INT8 products."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_models
import pytest
import torch
from onnx import numpy_helper
from onnx_models import Session, mapped, output
from torch import Tensor, nn
from torch.nn import functional as F

import qframework
from qframework import numerics
from qframework.compat.torchao import prepare_pt2e
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.export import fallbacks, onnx_write, to_onnx
from qframework.quantizer import (
    ActivationConfig,
    AttentionConfig,
    LinearConfig,
    QFrameworkQuantizer,
    Recipe,
    Smooth,
    WeightConfig,
    dynamic_attention,
    dynamic_int8,
    static_int8,
)

LINEARS = {"vit": 5, "swin": 9, "bert": 7, "gpt2": 5, "clip": 6, "beit": 5, "hiera": 10}
WIDEST = 256  # products that one output sums, in these models
EPS = {torch.float32: WIDEST * 2**-24, torch.float16: 2**-11}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    fallbacks.clear()


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


def check_agreement(
    float_output: Tensor, ours: Tensor, found: Tensor, dtype: torch.dtype = torch.float32, same_rounding: bool = True
) -> None:
    """Check that ``found`` and ``ours`` are of one quantized model.

    A value nearer to a rounding boundary than its floating-point error is rounded differently, by a whole step, and the
    quantizations after it amplify that: two correct implementations may differ as much as two independent roundings
    would, which is twice the error of quantization. In float32 that happens to few rows; in the others nothing but the
    errors of about twenty operations may differ, unless ``found`` quantizes less often than ours (``same_rounding``).
    """
    quantization = 10 ** (-numerics.sqnr_db(float_output, ours) / 10)
    assert numerics.sqnr_db(ours, found) > -10 * math.log10(2 * quantization + 20 * EPS[dtype] ** 2)
    if dtype == torch.float32 and same_rounding:
        error, size = (x.flatten(0, -2).norm(dim=-1) for x in (ours - found, ours))
        assert (error / size).median() < 20 * EPS[dtype]


def exported(model: nn.Module, inputs: Any, path: Path, config: Any = None, **kwargs: Any) -> tuple[Any, Any]:
    """The quantized model and the report of its file."""
    quantized = qframework.quantize(model, inputs, config or static_int8(), [inputs, inputs], skip=(), **kwargs)
    return quantized, quantized.to_onnx(path)


@pytest.mark.sample(1 / 2)
@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("name", LINEARS)
def test_onnx_runtime_agrees_in_int8(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, inputs = getattr(onnx_models, name)()
    if dtype == torch.float16:
        model, inputs = onnx_models.in_half(model, inputs)
    quantized, report = exported(model, inputs, tmp_path / "model.onnx")
    assert len(report.int8) == LINEARS[name]
    assert report.left_in_float == {}
    session = Session(tmp_path / "model.onnx")
    file = onnx.load(tmp_path / "model.onnx")
    assert session.int8_products == sum(node.op_type == "QuantizeLinear" for node in file.graph.node)
    assert session.operators["DequantizeLinear"] == 0  # each was fused into a product
    for size in (4, 1):
        some = mapped(inputs, lambda x: x[:size])  # noqa: B023
        ours = output(quantized, some)
        check_agreement(output(model, some), ours, session(some), dtype)


def test_fixed_shapes_and_newer_operators(tmp_path: Path) -> None:
    model, inputs = onnx_models.vit()
    quantized = qframework.quantize(model, inputs, static_int8(), [inputs], skip=(), dynamic_shapes=None)
    report = quantized.to_onnx(tmp_path / "model.onnx", opset=21)
    assert onnx.load(tmp_path / "model.onnx").opset_import[0].version == 21
    session = Session(tmp_path / "model.onnx")
    assert session.operators["DequantizeLinear"] == session.operators["Gemm"] == 0
    assert 0 < session.int8_products <= len(report.int8)
    ours = output(quantized, inputs)
    check_agreement(output(model, inputs), ours, session(inputs))


# The file -------------------------------------------------------------------------------------------------------------


def initializers(file: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {value.name: numpy_helper.to_array(value).copy() for value in file.graph.initializer}


@pytest.fixture(scope="module")
def bert_file(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    """Keyword inputs, with the shapes that the graph records."""
    path = tmp_path_factory.mktemp("bert") / "bert.onnx"
    model, inputs = onnx_models.bert()
    to_onnx(qframework.quantize(model, inputs, static_int8(), [inputs]), path)
    return onnx.load(path)


def test_the_form_that_tensorrt_asks_for(bert_file: onnx.ModelProto) -> None:
    file = bert_file
    onnx.checker.check_model(file, full_check=True)
    constants = initializers(file)
    by_output = {name: node for node in file.graph.node for name in node.output}
    readers = [node for node in file.graph.node for name in node.input if "Linear" in _producer(by_output, name)]
    assert {node.op_type for node in readers} == {"DequantizeLinear", "MatMul"}
    for node in file.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            _, scale, zero_point = node.input
            assert constants[scale].dtype == np.float32
            assert (constants[scale] > 0).all()
            assert constants[zero_point].dtype == np.int8
            assert not constants[zero_point].any()
        if node.op_type == "DequantizeLinear" and node.input[0] in constants:
            weight = constants[node.input[0]]
            (axis,) = (attribute.i for attribute in node.attribute if attribute.name == "axis")
            assert weight.dtype == np.int8
            assert constants[node.input[1]].shape == (weight.shape[axis],) == (weight.shape[1],)
    floats = {value.shape for value in constants.values() if value.dtype == np.float32 and value.ndim > 1}
    assert floats.isdisjoint({(64, 64), (64, 128), (128, 64), (64, 192), (192, 64)})


def _producer(by_output: dict[str, Any], name: str) -> str:
    return by_output[name].op_type if name in by_output else ""


def test_names(bert_file: onnx.ModelProto) -> None:
    graph = bert_file.graph
    axes = {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in [*graph.input, *graph.output]
    }
    assert axes == {
        "input_ids": ["batch", 16],
        "attention_mask": ["batch", 16],
        "last_hidden_state": ["batch", 16, 64],
        "pooler_output": ["batch", 64],
    }
    names = {value.name for value in graph.initializer}
    attention = "encoder.layer.0.attention.self.query_key_value"
    assert {f"{attention}.weight_int8", f"{attention}.weight_scale"} <= names
    assert not any("site-packages" in str(node) for node in graph.node)


@pytest.mark.parametrize(
    ("shapes", "name"),
    [
        (({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},), "x_axis_1"),
        ({"x": (torch.export.Dim.DYNAMIC, torch.export.Dim("tokens", min=2), None)}, "tokens"),
    ],
    ids=["unnamed", "named"],
)
def test_a_second_axis_that_varies(shapes: Any, name: str, tmp_path: Path) -> None:
    model, x = MLP().eval(), torch.randn(4, 5, 16)
    quantized, _ = exported(model, (x,), tmp_path / "mlp.onnx", dynamic_shapes=shapes)
    graph = onnx.load(tmp_path / "mlp.onnx").graph
    dims = graph.output[0].type.tensor_type.shape.dim
    assert [axis.dim_param or axis.dim_value for axis in dims] == ["batch", name, 8]
    other = torch.randn(2, 9, 16)
    check_agreement(output(model, (other,)), output(quantized, (other,)), Session(tmp_path / "mlp.onnx")((other,)))


# Arithmetic -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [static_int8(), LinearConfig(weight=WeightConfig("per_tensor"))], ids=["rows", "one"]
)
def test_a_layer_is_its_integers(config: LinearConfig, tmp_path: Path) -> None:
    """Against float64, from the integers in the file; values that saturate are -128, not -127."""
    layer = nn.Sequential(nn.Linear(16, 8)).eval()
    calibration, x = torch.randn(4, 16), torch.randn(4, 16) * 3
    quantized = qframework.quantize(layer, calibration, config, [calibration])
    quantized.to_onnx(tmp_path / "layer.onnx")
    constants = initializers(onnx.load(tmp_path / "layer.onnx"))
    scale = np.float64(next(value for value in constants.values() if value.dtype == np.float32 and value.size == 1))
    if config.weight.granularity == "per_tensor":
        scales = [np.float64(v) for v in constants.values() if v.dtype == np.float32 and v.ndim == 0]
        x_scale = float(calibration.abs().max()) / 127
        scale = min(scales, key=lambda value: abs(value - x_scale))
        weight_scale: Any = next(value for value in scales if value != scale)
    else:
        weight_scale = constants["0.weight_scale"].astype(np.float64)
    q = np.clip(np.rint(x.double().numpy() / scale), -128, 127)
    assert (q == -128).any()
    assert (q == 127).any()
    expected = q @ constants["0.weight_int8"].astype(np.float64) * scale * weight_scale + layer[0].bias.detach().numpy()
    np.testing.assert_allclose(Session(tmp_path / "layer.onnx")((x,)).numpy(), expected, rtol=1e-5, atol=1e-5)
    inside = x.clamp(-127 * float(scale), 127 * float(scale))
    torch.testing.assert_close(
        Session(tmp_path / "layer.onnx")((inside,)), output(quantized, (inside,)), rtol=1e-5, atol=1e-5
    )


def test_zero_points_become_a_shift(tmp_path: Path) -> None:
    """TensorRT accepts no zero point but 0."""
    model, x = MLP().eval(), torch.randn(4, 5, 16)
    model.fc2.bias = None
    quantized, report = exported(model, x, tmp_path / "mlp.onnx", static_int8(symmetric=False))
    assert report.int8 == ("fc1", "fc2")
    found = [node.args[2] for node in quantized.graph.nodes if "quantize_per_tensor" in str(node.target)]
    assert any(found)
    file = onnx.load(tmp_path / "mlp.onnx")
    constants = initializers(file)
    zero_points = {node.input[2] for node in file.graph.node if node.op_type.lower().endswith("quantizelinear")}
    assert not any(constants[name].any() for name in zero_points)
    session = Session(tmp_path / "mlp.onnx")
    assert session.int8_products == 2
    ours = output(quantized, (x,))
    check_agreement(output(model, (x,)), ours, session((x,)))


@pytest.mark.parametrize("config", [static_int8(), static_int8(symmetric=False)], ids=["symmetric", "zero point"])
def test_a_linear_that_reads_another_one(config: LinearConfig, tmp_path: Path) -> None:
    """As in factors of low rank, and beside other readers of the first result."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up, self.other = nn.Linear(32, 8), nn.Linear(8, 32), nn.Linear(8, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            low = self.down(x)
            return self.up(low) + self.other(low) + low.sum(-1, keepdim=True)

    model, inputs = Chain().eval(), (torch.randn(4, 6, 32),)
    quantized, report = exported(model, inputs, tmp_path / "chain.onnx", config)
    assert sorted(report.int8) == ["down", "other", "up"]
    assert not report.left_in_float
    session = Session(tmp_path / "chain.onnx")
    check_agreement(output(model, inputs), output(quantized, inputs), session(inputs))


def test_the_model_is_not_changed(tmp_path: Path) -> None:
    x = torch.randn(4, 16)
    quantized = qframework.quantize(MLP().eval(), x, static_int8(), [x])
    graph, before, state = str(quantized.graph), quantized(x), set(quantized.state_dict())
    quantized.to_onnx(tmp_path / "mlp.onnx")
    assert str(quantized.graph) == graph
    assert set(quantized.state_dict()) == state
    assert torch.equal(quantized(x), before)


@pytest.mark.parametrize("symmetric", [True, False])
def test_quantized_outputs_in_half_precision(symmetric: bool, tmp_path: Path) -> None:
    """Older QuantizeLinear takes no float16, and TensorRT no zero point: also where no linear reads the result."""
    model, x = MLP().eval().half(), torch.randn(4, 5, 16).half()
    config = LinearConfig(ActivationConfig(symmetric=symmetric), output="always")
    quantized, _ = exported(model, (x,), tmp_path / "mlp.onnx", config)
    file = onnx.load(tmp_path / "mlp.onnx")
    pairs = [node for node in file.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert len(pairs) == 2 * 4 + 2  # two inputs, two outputs, two weights
    assert not any(initializers(file)[node.input[2]].any() for node in pairs)
    ours = output(quantized, (x,))
    check_agreement(output(model, (x,)), ours, Session(tmp_path / "mlp.onnx")((x,)), torch.float16)


@pytest.mark.parametrize("weight", ["per_channel", "per_tensor"])
def test_a_model_quantized_in_place(weight: Any, tmp_path: Path) -> None:
    model, x = MLP().eval(), torch.randn(4, 5, 16)
    before = output(model, (x,))
    qframework.quantize_(model, static_int8(weight=weight), [x], filter_fn=lambda module, name: name == "fc1")
    qframework.quantize_(model, dynamic_int8())
    assert to_onnx(model, tmp_path / "mlp.onnx", x).left_in_float.keys() == {"fc2"}
    session = Session(tmp_path / "mlp.onnx")
    assert session.int8_products == 1
    with torch.no_grad():
        hidden, weight_of_fc2 = F.gelu(model.fc1(x)), model.fc2.weight
        expected = F.linear(hidden, weight_of_fc2, model.fc2.bias)
    check_agreement(before, expected, session((x,)))


# What QDQ cannot express ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [dynamic_int8(), static_int8("per_token")], ids=["dynamic", "per_token"])
def test_layers_left_in_float_are_listed(
    config: LinearConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = MLP().eval(), torch.randn(4, 5, 16)
    quantizer = QFrameworkQuantizer().set_global(static_int8()).set_module_name("fc1", config)
    quantized, report = exported(model, x, tmp_path / "mlp.onnx", quantizer)
    assert report.int8 == ("fc2",)
    assert list(report.left_in_float) == ["fc1"]
    assert fallbacks == {report.left_in_float["fc1"]: 1}
    assert "'fc1' is left in float" in caplog.text
    assert "fc1" in str(report)
    constants = initializers(onnx.load(tmp_path / "mlp.onnx"))
    (scale,) = (float(v) for v in constants.values() if v.dtype == np.float32 and v.ndim == 0 and _near(v, model, x))
    weight = model.fc1.weight.detach()
    row = weight.abs().amax(1, keepdim=True) / 127
    hidden = F.gelu(F.linear(x, torch.round(weight / row) * row, model.fc1.bias))
    integers = torch.from_numpy(constants["fc2.weight_int8"].astype(np.float32))
    expected = torch.round(hidden / scale).clamp(-128, 127) * scale
    expected = expected @ (integers * torch.from_numpy(constants["fc2.weight_scale"])) + model.fc2.bias
    check_agreement(output(model, (x,)), expected.detach(), Session(tmp_path / "mlp.onnx")((x,)))
    assert quantized(x).shape == expected.shape


def _near(value: np.ndarray, model: MLP, x: Tensor) -> bool:
    """Whether a constant is the scale of fc2's input."""
    return math.isclose(float(value), float(F.gelu(model.fc1(x)).detach().abs().max()) / 127, rel_tol=0.02)


@pytest.mark.parametrize(
    "config",
    [AttentionConfig("static", "per_head", output="always"), dynamic_attention("sage_b")],
    ids=["static", "sage_b"],
)
def test_attention_is_left_in_float(config: AttentionConfig, tmp_path: Path) -> None:
    model, inputs = onnx_models.vit()
    quantizer = QFrameworkQuantizer().set_global(static_int8())
    linears_alone = qframework.quantize(model, inputs, quantizer, [inputs])
    quantizer.set_global(config)
    _, report = exported(model, inputs, tmp_path / "vit.onnx", quantizer)
    assert len(report.int8) == 5
    assert list(report.left_in_float) == ["blocks.0.attn"]
    ours = output(linears_alone, inputs)
    # with output="always" the output of attention is rounded once more than in linears_alone
    check_agreement(
        output(model, inputs), ours, Session(tmp_path / "vit.onnx")(inputs), same_rounding=config.output != "always"
    )


def test_nothing_to_express(tmp_path: Path) -> None:
    x = torch.randn(4, 16)
    quantized = qframework.quantize(MLP().eval(), x, dynamic_int8())
    with pytest.raises(UnsupportedError, match=r"got 2 others, such as 'fc1': its input is quantized with scales that"):
        quantized.to_onnx(tmp_path / "mlp.onnx")
    float_model = torch.export.export(MLP().eval(), (x,)).module()
    with pytest.raises(UnsupportedError, match=r"static INT8 inputs per tensor, got none that is quantized"):
        to_onnx(float_model, tmp_path / "mlp.onnx", x)
    assert not (tmp_path / "mlp.onnx").exists()


# Recipes, files -------------------------------------------------------------------------------------------------------


def test_recipe_and_loaded_model(tmp_path: Path) -> None:
    model, inputs = onnx_models.vit()
    recipe = Recipe(smooth=Smooth(), channel_scales=True, split_gelu=True)
    quantized = qframework.quantize(model, inputs, static_int8(), [inputs] * 3, recipe=recipe)
    quantized.to_onnx(tmp_path / "one.onnx")
    ours = output(quantized, inputs)
    check_agreement(output(model, inputs), ours, Session(tmp_path / "one.onnx")(inputs))
    quantized.save(tmp_path / "vit.pt2")
    loaded = qframework.load(tmp_path / "vit.pt2")
    to_onnx(loaded, tmp_path / "two.onnx")
    again = Session(tmp_path / "two.onnx")
    check_agreement(output(model, inputs), ours, again(inputs))
    assert again(mapped(inputs, lambda x: x[:3])).shape == (3, 10)


def test_weights_in_a_second_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_write, "LARGEST", 0)
    x = torch.randn(4, 16)
    model = MLP().eval()
    quantized, report = exported(model, x, tmp_path / "mlp.onnx")
    assert report.data == tmp_path / "mlp.onnx.data"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlp.onnx", "mlp.onnx.data"]
    check_agreement(output(model, (x,)), output(quantized, (x,)), Session(tmp_path / "mlp.onnx")((x,)))


# Errors ---------------------------------------------------------------------------------------------------------------


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 16)
    quantized = qframework.quantize(MLP().eval(), x, static_int8(), [x])
    with pytest.raises(UnsupportedError, match=r"opset must be 18 to 23, got 11"):
        quantized.to_onnx(tmp_path / "mlp.onnx", opset=11)
    with pytest.raises(UnsupportedError, match=r"model must be in eval mode"):
        to_onnx(MLP(), tmp_path / "mlp.onnx", x)
    with pytest.raises(UnsupportedError, match=r"example_inputs must be given for a model that is not exported"):
        to_onnx(MLP().eval(), tmp_path / "mlp.onnx")
    with pytest.raises(UnsupportedError, match=r"model must not be compiled"):
        to_onnx(torch.compile(quantized), tmp_path / "mlp.onnx", x)  # type: ignore[arg-type]
    prepared = prepare_pt2e(
        torch.export.export(MLP().eval(), (x,)).module(), QFrameworkQuantizer().set_global(static_int8())
    )
    with pytest.raises(UnsupportedError, match=r"must not hold observers"):
        to_onnx(prepared, tmp_path / "mlp.onnx", x)
    with pytest.raises(UnsupportedError, match=r"dynamic_shapes must be None without example_inputs"):
        to_onnx(quantized, tmp_path / "mlp.onnx", dynamic_shapes=({0: 2},))
    with pytest.raises(QFrameworkError, match=r"torch.export cannot capture the model"):
        to_onnx(quantized, tmp_path / "mlp.onnx", torch.randn(4, 17))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        QFrameworkError, match=r"onnx and onnxscript must be installed. Run pip install onnx onnxscript"
    ):
        quantized.to_onnx(tmp_path / "mlp.onnx")
