"""Activations without a scale after calibration stay in float, with a warning, and are right for real data."""

import copy

import pytest
import torch
from quantizer_models import Mlp, exported, tiny_vit
from torch import nn
from torch.nn import functional as F
from torchao.quantization.pt2e import disable_fake_quant, disable_observer
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e

from qframework import explain
from qframework.errors import CalibrationError
from qframework.numerics import sqnr_db
from qframework.quantizer import (
    ActivationConfig,
    AttentionConfig,
    LinearConfig,
    QFrameworkQuantizer,
    Recipe,
    Smooth,
    calibrate,
    dynamic_int8,
    static_attention,
    static_int8,
    uncalibrated,
)
from qframework.quantizer.smooth import smoothing_scales

X = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(0))
OBSERVERS = ["minmax", "moving_average", "percentile", "mse", "entropy"]


class Branches(nn.Module):
    """A gate that is closed for inputs below 10, and a second layer after the same gate."""

    def __init__(self):
        super().__init__()
        self.main, self.dead, self.twin = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        gated = torch.relu(x - 10)
        return self.main(x) + self.dead(gated) + self.twin(gated)


@pytest.fixture
def warned(caplog):
    uncalibrated.clear()
    return lambda: [record.getMessage().removeprefix("qframework: ") for record in caplog.records]


def prepared(model, config, *inputs, is_qat=False):
    torch.manual_seed(0)
    quantizer = QFrameworkQuantizer(is_qat=is_qat).set_global(config)
    return (prepare_qat_pt2e if is_qat else prepare_pt2e)(exported(model, *inputs), quantizer)


def converted(model, config, *batches):
    ready = prepared(model, config, *batches[0])
    calibrate(ready, batches)
    return convert_pt2e(ready)


def reasons(model, *inputs):
    return {layer.name: layer.reason for layer in explain(model, inputs).layers}


@pytest.mark.parametrize("observer", OBSERVERS)
def test_a_layer_whose_input_was_always_zero_stays_in_float(observer, warned):
    model = Branches()
    found = converted(model, static_int8(observer=observer), (X,), (X / 2,))
    assert warned() == ["calibration saw nothing but zeros in the input of layer 'dead', which stays in float"]
    assert uncalibrated == {"dead": 1}
    why = "calibration saw nothing but zeros in its input, which stays in float"
    assert reasons(found, X) == {"main": "", "dead": why, "twin": why}
    opened = X.clone()
    opened[0] = 11 + X[0].abs()
    # 'main' clips at what calibration showed; the other two compute in float, but for their weights' rounding
    clipped = opened.clamp(-X.abs().max(), X.abs().max())
    gated = torch.relu(opened - 10)
    assert sqnr_db(model.main(clipped) + model.dead(gated) + model.twin(gated), found(opened)) > 35


@pytest.mark.parametrize("value", [0.0, 1e-40, 1e-20])
def test_tiny_values_count_as_zero(value, warned):
    class Shrinks(Mlp):
        def forward(self, x):
            return super().forward(x) + self.fc1(value * x)[..., :8]

    found = converted(Shrinks(), static_int8(), (X,))
    assert len(warned()) == len(uncalibrated) == 1
    assert sum("zeros in its input" in layer.reason for layer in explain(found, X).layers) == 1


@pytest.mark.parametrize("observer", OBSERVERS)
def test_a_batch_of_zeros_before_data_changes_nothing(observer, warned):
    for data in ([(0 * X,), (X,)], [(X,), (0 * X,)], [(1e-30 * X,), (X,)]):
        model = nn.Linear(8, 8)
        found = converted(model, static_int8(observer=observer), *data)
        expected = converted(model, static_int8(observer=observer), (X,))
        assert torch.equal(found(X), expected(X))
    assert not warned()


def test_a_calibration_of_zeros_then_one_of_data(warned):
    ready = prepared(nn.Linear(8, 8), static_int8(), X)
    calibrate(ready, [0 * X])
    calibrate(ready, [X])
    convert_pt2e(ready)
    assert not warned()


def test_calibration_with_zeros_only_is_an_error(warned):
    ready = prepared(nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8)), static_int8(), X)
    calibrate(ready, [0 * X, 0 * X])
    with pytest.raises(CalibrationError, match=r"layer '0': the calibration data was all zeros.*dynamic_int8"):
        convert_pt2e(ready)


def test_zeros_as_calibration_data_are_logged(warned):
    found = converted(Mlp(), static_int8(), (0 * X,))
    layer, data = warned()
    assert "zeros in the input of layer 'fc1'" in layer
    assert "data held nothing but the value 0" in data
    assert "zeros in its input" in reasons(found, X)["fc1"]


def test_constant_calibration_data_is_logged(warned):
    images = torch.zeros(2, 3, 32, 32)
    converted(tiny_vit(), static_int8(), (images,))
    assert [message for message in warned() if "data held nothing but the value 0;" in message]


def test_constant_data_has_scales_and_a_warning(warned):
    found = converted(nn.Linear(8, 8), static_int8(), (0 * X - 3,), (0 * X - 3,))
    [message] = warned()
    assert "nothing but the value -3;" in message
    assert list(reasons(found, X).values()) == [""]


def test_a_layer_that_calibration_never_reached_stays_in_float(warned):
    ready = prepared(Branches(), static_int8(), X)
    for observer in ready.children():
        if getattr(observer, "layer", "") in ("dead", "twin"):
            observer.forward = lambda x: x  # as of experts without tokens
    calibrate(ready, [X])
    found = convert_pt2e(ready)
    assert warned() == ["calibration never reached the input of layer 'dead', which stays in float"]
    assert "never reached its input" in reasons(found, X)["dead"]


def test_without_any_calibration_converting_is_an_error():
    with pytest.raises(CalibrationError, match=r"layer 'main': the activation was never observed\. Run calibrate"):
        convert_pt2e(prepared(Branches(), static_int8(), X))


def test_a_single_static_layer_may_be_dead(warned):
    quantizer = QFrameworkQuantizer().set_global(dynamic_int8()).set_module_name("dead", static_int8())
    ready = prepare_pt2e(exported(Branches(), X), quantizer)
    calibrate(ready, [X])
    assert set(reasons(convert_pt2e(ready), X)) == {"main", "dead", "twin"}
    assert uncalibrated == {"dead": 1}


@pytest.mark.parametrize("observer", ["minmax", "moving_average"])
def test_positions_that_were_always_padding_fit_real_tokens(observer, warned):
    model, padded = nn.Linear(8, 8), X.clone()
    padded[:, 3:] = 0
    found = converted(model, static_int8("per_token", observer=observer), (padded,))
    [message] = warned()
    assert "nothing but zeros in 2 of the 5 positions or heads of the input of layer" in message
    assert "2 of the 5 positions" in next(iter(reasons(found, X).values()))
    real = X.clamp(-padded.abs().max(), padded.abs().max())
    assert sqnr_db(model(real)[:, 3:], found(real)[:, 3:]) > 30


class Gated(nn.Module):
    def __init__(self, role):
        super().__init__()
        self.role = role
        self.out = nn.Linear(8, 8)

    def forward(self, x, gate):
        operands = {role: x.unflatten(1, (2, -1)) for role in ("query", "key", "value")}
        operands[self.role] = operands[self.role] * gate
        return self.out(F.scaled_dot_product_attention(**operands).flatten(1, 2))


@pytest.mark.parametrize("role", ["query", "key", "value"])
@pytest.mark.parametrize("observer", OBSERVERS)
def test_attention_with_an_operand_that_was_always_zero(role, observer, warned):
    model, x = Gated(role).eval(), torch.randn(2, 6, 8)
    found = converted(model, static_attention(observer=observer), (x, torch.zeros(1)))
    [message] = warned()
    assert f"nothing but zeros in the {role} of layer 'scaled_dot_product_attention'" in message
    attention = next(layer for layer in explain(found, (x, torch.ones(1))).layers if layer.kind == "attention")
    assert not attention.lowered
    assert f"nothing but zeros in its {role}" in attention.reason
    assert sqnr_db(model(x, torch.ones(1)), found(x, torch.ones(1))) > 25


def test_heads_that_were_always_zero_take_the_scale_of_the_others(warned):
    class Heads(nn.Module):
        def forward(self, x, gate):
            q = x.unflatten(1, (2, -1))
            return F.scaled_dot_product_attention(q, q, q * gate)

    model, x = Heads(), torch.randn(2, 6, 8)
    gate = torch.tensor([1.0, 0]).reshape(2, 1, 1)
    found = converted(model, static_attention(granularity="per_head"), (x, gate))
    [message] = warned()
    assert "1 of the 2 positions or heads of the value" in message
    both = torch.ones(2, 1, 1)
    assert sqnr_db(model(x, both)[:, 1], found(x, both)[:, 1]) > 25


def test_an_output_that_was_always_zero_stays_in_float(warned):
    class Closed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8, bias=False)
            nn.init.zeros_(self.fc.weight)
            self.attn = nn.Linear(8, 8)

        def forward(self, x):
            return torch.tanh(self.fc(x)) + self.attn(x)

    model = Closed()
    found = converted(model, LinearConfig(ActivationConfig(), output="always"), (X,))
    assert uncalibrated == {"fc:output": 1}
    assert "its output, which stays in float" in reasons(found, X)["fc"]
    assert sqnr_db(model(X), found(X)) > 30


def test_attention_output_that_was_always_zero(warned):
    model, x = Gated("value").eval(), torch.randn(2, 6, 8)
    found = converted(model, AttentionConfig(mode="static", output="always"), (x, torch.zeros(1)))
    assert {name.partition(":")[2] for name in uncalibrated} == {"value", "output"}
    assert sqnr_db(model(x, torch.ones(1)), found(x, torch.ones(1))) > 25


@pytest.mark.parametrize("sign", [1, -1])
def test_two_range_gelu_of_which_one_range_was_always_zero(sign, warned):
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(F.gelu(x))

    model = Split().eval()
    exported_model = exported(model, X)
    quantizer = QFrameworkQuantizer().set_global(static_int8())
    recipe, data = Recipe(split_gelu=True, weight_rounding="gptq", bias_correction=True), [sign * X.abs()]
    recipe.before_prepare(exported_model, quantizer, data)
    ready = prepare_pt2e(exported_model, quantizer)
    calibrate(ready, data)
    recipe.after_calibrate(ready, data)
    found = convert_pt2e(ready)
    assert len(warned()) == 1
    reachable = X if sign == 1 else X.clamp(max=0.2)
    assert sqnr_db(model(reachable), found(reachable)) > 20


def test_recipes_work_with_a_dead_layer(warned):
    model = Branches()
    graph, quantizer, recipe = exported(model, X), QFrameworkQuantizer().set_global(static_int8()), Recipe.best()
    recipe.before_prepare(graph, quantizer, [X])
    ready = prepare_pt2e(graph, quantizer)
    calibrate(ready, [X])
    recipe.after_calibrate(ready, [X])
    assert sqnr_db(model(X), convert_pt2e(ready)(X)) > 30
    assert uncalibrated == {"dead": 1}


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_smoothing_skips_channels_that_were_always_zero(strength):
    amax_x, amax_w = torch.tensor([4.0, 0, 1, 1e-30]), torch.tensor([1.0, 2, 3, 4])
    scales = smoothing_scales(amax_x, amax_w, torch.ones(4, dtype=torch.bool), strength)
    assert scales[[1, 3]].tolist() == [1, 1]
    assert torch.equal(smoothing_scales(0 * amax_x, amax_w, torch.ones(4, dtype=torch.bool), strength), torch.ones(4))


def test_channels_that_were_always_zero_are_right_for_real_data():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.RMSNorm(8), nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(self.norm(x))

    model, data = Normed().eval(), X.clone()
    data[..., 2] = 0
    graph, quantizer = exported(model, X), QFrameworkQuantizer().set_global(static_int8())
    Recipe(smooth=Smooth((0.5,))).before_prepare(graph, quantizer, [data])
    ready = prepare_pt2e(graph, quantizer)
    calibrate(ready, [data])
    assert sqnr_db(model(X), convert_pt2e(ready)(X)) > 25


@pytest.mark.parametrize("observer", OBSERVERS)
def test_fake_quantization_of_a_dead_layer_passes_floats(observer, warned):
    model = Branches()
    ready = prepared(model, static_int8(observer=observer), X, is_qat=True)
    ready(X)
    ready.apply(disable_observer)
    opened = 11 + X.abs()
    gated = torch.relu(opened - 10)
    main = model.main(opened.clamp(max=float(X.abs().max())))
    expected = main + model.dead(gated) + model.twin(gated)
    for _ in range(2):  # what is kept of the first call holds in the second
        assert sqnr_db(expected, ready(opened)) > 30
    state = copy.deepcopy(ready.state_dict())
    ready.load_state_dict(state)
    assert sqnr_db(expected, ready(opened)) > 30
    assert sqnr_db(expected, convert_pt2e(ready)(opened)) > 30
    assert uncalibrated == {"dead": 1}


def test_fake_quantization_learns_the_scale_when_data_comes():
    ready = prepared(Branches(), static_int8(), X, is_qat=True)
    ready(X)
    ready(X + 11)
    ready.apply(disable_observer)
    quantized = ready(X + 11)
    ready.apply(disable_fake_quant)
    assert not torch.equal(quantized, ready(X + 11))
    assert all(module.always_zero is False for module in ready.modules() if hasattr(module, "always_zero"))
