"""Quantization-aware training: gradients, the same model after convert_pt2e, and the effect of a short fine-tuning."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from quantizer_models import Attention, Mlp, count, exported, tiny_vit
from torch import nn
from torch.nn import functional as F
from torchao.quantization.pt2e import move_exported_model_to_eval, move_exported_model_to_train
from torchao.quantization.pt2e.fake_quantize import disable_fake_quant, disable_observer, enable_fake_quant
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e

from qframework.errors import CalibrationError, UnsupportedError
from qframework.evaluation.digits import load_digits
from qframework.quantizer import (
    QFrameworkQuantizer,
    QuantizationConfig,
    calibrate,
    dynamic_int8,
    qattn_paper,
    static_attention,
    static_int8,
)
from qframework.quantizer.bias_correction import correct_bias
from qframework.quantizer.fake_quantize import FakeQuantize, fake_quantize
from qframework.quantizer.weight_rounding import round_weights

CONFIGS = {
    "static": static_int8(),
    "moving average": static_int8("per_token", observer="moving_average"),
    "mse": static_int8(observer="mse", weight="per_tensor"),
    "dynamic": dynamic_int8(),
    "paper": qattn_paper(),
    "zero points": static_int8(symmetric=False),
    "attention per head": QuantizationConfig(static_int8(), static_attention("per_head")),
}


def trainable(model, x, config, **rules):
    """A model exported with gradients, prepared for training and calibrated with ``x``."""
    quantizer = QFrameworkQuantizer(is_qat=True).set_global(config)
    for name, rule in rules.items():
        quantizer.set_module_name(name, rule)
    prepared = prepare_qat_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    calibrate(prepared, [x])
    return prepared


def fake_quantize_twin(x, scale):
    steps = np.rint(x.astype(np.float64) / scale)
    return np.clip(steps, -127, 127) * scale, np.abs(steps) <= 127


@pytest.mark.parametrize("shape", [(1,), (6, 1), (5, 6, 1)])
def test_fake_quantize_matches_numpy(shape):
    torch.manual_seed(0)
    x = torch.randn(5, 6, 7, requires_grad=True)
    scale = torch.rand(shape) / 100 + 1 / 127  # the largest values are clipped
    y = fake_quantize(x, scale)
    y.backward(torch.arange(x.numel()).reshape(x.shape).float())
    expected, inside = fake_quantize_twin(x.detach().numpy(), scale.double().numpy())
    assert 0 < (~inside).sum() < inside.sum()
    np.testing.assert_allclose(y.detach().numpy(), expected, rtol=2**-22)
    np.testing.assert_array_equal(x.grad.numpy(), np.arange(x.numel()).reshape(x.shape) * inside)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fake_quantize_keeps_the_dtype(dtype):
    x = torch.randn(4, 4, dtype=dtype, requires_grad=True)
    y = fake_quantize(x, torch.tensor([0.01]))
    y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype


@pytest.mark.parametrize("name", CONFIGS)
def test_the_converted_model_computes_the_same_as_the_trained_one(name):
    images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    prepared = trainable(tiny_vit(), images, CONFIGS[name], head=None)
    optimizer = torch.optim.SGD(prepared.parameters(), 0.01)
    before = {key: value.detach().clone() for key, value in prepared.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(prepared(images), labels).backward()
        optimizer.step()
    moved = {key for key, value in prepared.named_parameters() if not torch.equal(value, before[key])}
    linears = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert {f"blocks.{k}.{linear}.weight" for k in (0, 1) for linear in linears} <= moved
    prepared.apply(disable_observer)
    trained = prepared(images)
    assert (trained - float_output(prepared, images)).abs().max() > 0
    converted = convert_pt2e(prepared)
    torch.testing.assert_close(converted(images), trained, rtol=0, atol=0)
    quantizer = QFrameworkQuantizer().set_global(CONFIGS[name]).set_module_name("head", None)
    plain = prepare_pt2e(exported(tiny_vit(), images), quantizer)
    calibrate(plain, [images])
    assert count(converted) == count(convert_pt2e(plain))  # the nodes that observers write


def float_output(prepared, x):
    prepared.apply(disable_fake_quant)
    y = prepared(x)
    prepared.apply(enable_fake_quant)
    return y


def test_a_shared_observer_stays_shared():
    prepared = trainable(Attention().eval(), torch.randn(2, 5, 8), static_int8())
    places = [module for module in prepared.modules() if isinstance(module, FakeQuantize)]
    assert len(places) == 4  # one input, three weights
    graph = exported(Attention(), torch.randn(2, 5, 8))
    observed = prepare_pt2e(graph, QFrameworkQuantizer().set_global(static_int8()))
    assert not any(isinstance(module, FakeQuantize) for module in observed.modules())


def test_torchao_switches():
    model, x = Mlp().eval(), torch.randn(4, 8)
    prepared = trainable(model, x, static_int8())
    prepared.apply(disable_observer)
    frozen = prepared(x)
    prepared(100 * x)
    torch.testing.assert_close(prepared(x), frozen, rtol=0, atol=0)
    torch.testing.assert_close(float_output(prepared, x), model(x), rtol=0, atol=0)


def test_dropout_trains_and_is_off_in_the_converted_model():
    x = torch.randn(64, 8)
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 4)).train()
    prepared = trainable(model, x, static_int8())
    move_exported_model_to_train(prepared)
    assert not torch.equal(prepared(x), prepared(x))
    move_exported_model_to_eval(prepared)
    prepared.apply(disable_observer)
    trained = prepared(x)
    torch.testing.assert_close(move_exported_model_to_eval(convert_pt2e(prepared))(x), trained, rtol=0, atol=0)


def test_weights_can_be_rounded_and_biases_corrected_after_training():
    model, x = Mlp().eval(), torch.randn(64, 8)
    prepared = trainable(model, x, static_int8())
    round_weights(prepared, [x])
    correct_bias(prepared, [x])
    prepared.apply(disable_observer)
    rounded = prepared(x)
    torch.testing.assert_close(rounded.mean(0), model(x).mean(0), rtol=0, atol=1e-5)
    torch.testing.assert_close(convert_pt2e(prepared)(x), rounded, rtol=0, atol=0)


def digits():
    """Images ``(N, 64)`` and labels for training, and others for testing."""
    split = load_digits()
    return [
        values.flatten(1) if values.ndim > 1 else values
        for data in (split.train, split.held_out)
        for values in data.tensors
    ]


def trained_classifier(x, labels):
    """An MLP trained on digits; two channels between its layers are scaled by 300 without changing its function."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    fit(model, optimizer, x, labels, 120)
    with torch.no_grad():
        model[0].weight[:2] *= 300
        model[0].bias[:2] *= 300
        model[2].weight[:, :2] /= 300
    return model.eval()


def fit(model, optimizer, x, labels, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()


def accuracy(model, x, labels):
    with torch.no_grad():
        return 100 * float((model(x).argmax(1) == labels).float().mean())


def test_a_short_fine_tuning_recovers_what_static_lost():
    x, labels, *unseen = digits()
    model = trained_classifier(x, labels)
    full = accuracy(model, *unseen)
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (x[:8],), dynamic_shapes=({0: batch},))
    config = static_int8()
    static = prepare_pt2e(program.module(), QFrameworkQuantizer().set_global(config))
    calibrate(static, [x])
    lost = accuracy(convert_pt2e(static), *unseen)
    prepared = prepare_qat_pt2e(program.module(), QFrameworkQuantizer(is_qat=True).set_global(config))
    calibrate(prepared, [x])
    prepared.apply(disable_observer)
    fit(prepared, torch.optim.Adam(prepared.parameters(), 3e-3), x, labels, 60)
    recovered = accuracy(convert_pt2e(prepared), *unseen)
    assert full > 95
    assert lost < full - 10
    assert recovered > full - 0.2 * (full - lost)


def test_errors():
    with pytest.raises(UnsupportedError, match="is_qat must be True or False, got 1"):
        QFrameworkQuantizer(is_qat=1)
    quantizer = QFrameworkQuantizer(is_qat=True).set_global(static_int8())
    prepared = prepare_qat_pt2e(exported(Mlp(), torch.randn(4, 8)), quantizer)
    with pytest.raises(CalibrationError, match="layer 'fc1': the activation must be finite during calibration"):
        prepared(torch.full((4, 8), float("nan")))
    prepared = prepare_qat_pt2e(exported(Mlp(), torch.randn(4, 8)), quantizer)
    prepared.apply(disable_observer)
    with pytest.raises(CalibrationError, match="layer 'fc1': the activation was never observed"):
        prepared(torch.randn(4, 8))


@pytest.mark.parametrize("name", ["static", "dynamic", "mse"])
def test_it_compiles_without_graph_breaks_once_its_scales_are_fixed(name, fresh_dynamo):
    torch.manual_seed(0)
    model, x = Mlp().eval(), torch.randn(4, 8)
    prepared = trainable(model, x, CONFIGS[name])
    prepared.apply(disable_observer)
    expected = prepared(x)
    expected.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in prepared.parameters()]
    prepared.zero_grad()
    got = torch.compile(prepared, backend="aot_eager", fullgraph=True)(x)
    got.square().sum().backward()
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    for parameter, gradient in zip(prepared.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6)  # sums in another order


def test_training_resumes_from_a_checkpoint():
    model, x = Mlp().eval(), torch.randn(4, 8)
    first = trainable(model, x, static_int8(observer="moving_average"))
    first.apply(disable_observer)
    second = trainable(copy.deepcopy(model), 10 * x, static_int8(observer="moving_average"))
    assert not torch.equal(second(x), first(x))
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(second(x), first(x), rtol=0, atol=0)
    second(100 * x)
    torch.testing.assert_close(second(x), first(x), rtol=0, atol=0)  # its observers are disabled as well
