"""Bias correction: against NumPy, the reduction of the error, and the kinds of biases that linears have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quantizer_models import Mlp, exported, linears, quantized_layers
from torch import nn
from torch.nn import functional as F
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from qframework.errors import CalibrationError
from qframework.quantizer import QFrameworkQuantizer, calibrate, dynamic_int8, static_int8
from qframework.quantizer.bias_correction import correct_bias
from qframework.quantizer.quantizer import keep_in_float
from qframework.quantizer.weight_rounding import round_weights

CLIPPED = static_int8(observer="percentile", percentile=98.0)


def corrected(model, data, config=CLIPPED, **options):
    prepared = prepare_pt2e(exported(model, data[0], dynamic_batch=True), QFrameworkQuantizer().set_global(config))
    calibrate(prepared, data)
    correct_bias(prepared, data, **options)
    return prepared


def skewed(samples, channels, seed=0):
    """Positive values with a long tail: clipping it moves the mean."""
    return torch.randn(samples, channels, generator=torch.Generator().manual_seed(seed)).exp()


def uncorrected(model, data, config=CLIPPED):
    prepared = prepare_pt2e(exported(model, data[0], dynamic_batch=True), QFrameworkQuantizer().set_global(config))
    calibrate(prepared, data)
    return convert_pt2e(prepared)


def bias_twin(weight, bias, batches, threshold):
    """``b + E[W x + b] - E[W' x' + b]`` with weights per channel and one scale of ``threshold`` for the input."""
    x = np.concatenate(batches).astype(np.float64)
    x_int = np.clip(np.rint(x / (threshold / 127)), -127, 127)
    scale = np.abs(weight).max(1, keepdims=True) / 127
    w_int = np.rint(weight / scale)
    return bias + (x @ weight.T).mean(0) - ((x_int * threshold / 127) @ (w_int * scale).T).mean(0)


def test_a_layer_that_a_recipe_left_in_float_is_corrected_and_one_that_a_rule_left_is_not():
    torch.manual_seed(0)
    model, data = Mlp().eval(), [skewed(64, 8, seed=k) for k in range(3)]
    only_first = QFrameworkQuantizer().set_module_name("fc1", CLIPPED)
    for quantizer in (QFrameworkQuantizer().set_global(CLIPPED), only_first):
        graph = exported(model, data[0], dynamic_batch=True)
        if quantizer is not only_first:
            keep_in_float(linears(graph)[1])
        prepared = prepare_pt2e(graph, quantizer)
        calibrate(prepared, data)
        correct_bias(prepared, data)
        moved = prepared.get_parameter("fc2.bias") - model.fc2.bias
        assert bool(moved.abs().max() > 1e-3) == (quantizer is not only_first)
        if quantizer is not only_first:
            int8, x = convert_pt2e(prepared), torch.cat(data)
            assert quantized_layers(int8) == {"fc1"}
            torch.testing.assert_close(int8(x).mean(0), model(x).mean(0), rtol=0, atol=1e-5)


def test_it_matches_numpy():
    torch.manual_seed(0)
    model, data = nn.Linear(16, 6), [skewed(32, 16, seed=k) for k in range(3)]
    prepared = corrected(model, data)
    [node] = linears(prepared)
    threshold = float(prepared.get_submodule(node.args[0].target).threshold())
    expected = bias_twin(
        model.weight.detach().numpy(), model.bias.detach().numpy(), [x.numpy() for x in data], threshold
    )
    got = prepared.get_parameter("bias").detach().numpy()
    # values next to a tie round either way: few of 1,536 inputs, each at most a step times a weight over 96 samples
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert np.abs(got - model.bias.detach().numpy()).max() > 0.01


def test_every_layer_keeps_its_mean_after_corrected_layers():
    torch.manual_seed(0)
    model, data = Mlp(16, 32), [skewed(64, 16, seed=k) for k in range(2)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    converted = convert_pt2e(corrected(model, data))
    plain = uncorrected(model, data)
    y, ours, theirs = (torch.cat([m(x) for x in data]) for m in (model, converted, plain))
    # float32 sums of 32 products, averaged: well below one part in 10^5 of the outputs
    torch.testing.assert_close(ours.mean(0), y.mean(0), rtol=0, atol=1e-5 * float(y.abs().max()))
    assert (theirs.mean(0) - y.mean(0)).abs().max() > 1e-3 * float(y.abs().max())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())  # the user's model


def test_it_reduces_the_error():
    """What GELU gives, beside an outlier, on data never seen: all values from -0.17 to 0 round to zero.

    The error falls by the share of it that is a shift of the mean, less what 1,024 samples say wrongly of the mean.
    """
    torch.manual_seed(0)
    model = nn.Linear(32, 16)
    batches = [F.gelu(torch.randn(256, 32)) for _ in range(12)]
    for x in batches:
        x[0, 0] = 60.0
    data, unseen = batches[:4], torch.cat(batches[4:])
    y, plain = model(unseen), uncorrected(model, data, static_int8())(unseen)
    ours = convert_pt2e(corrected(model, data, static_int8()))(unseen)
    shift = (plain - y).mean(0).square().mean()
    error, remaining = (plain - y).square().mean(), (ours - y).square().mean()
    assert shift > 0.1 * error
    assert remaining < error - 0.9 * shift


def test_a_linear_without_a_bias_gets_one():
    torch.manual_seed(0)
    model, data = nn.Linear(16, 6, bias=False), [skewed(64, 16)]
    converted = convert_pt2e(corrected(model, data))
    [node] = linears(converted)
    assert node.args[2].op == "get_attr"
    assert converted.get_parameter(node.args[2].target).shape == (6,)
    atol = 1e-5 * float(model(data[0]).abs().max())
    torch.testing.assert_close(converted(data[0]).mean(0), model(data[0]).mean(0), rtol=0, atol=atol)


class Biases(nn.Module):
    """Two linears of one bias, and a linear whose bias is computed, as BEiT's."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.second.bias = self.first.bias
        self.weight, self.part = nn.Parameter(torch.randn(8, 8) / 3), nn.Parameter(torch.randn(4))

    def forward(self, x):
        x = self.second(self.first(x).relu()).relu()
        return F.linear(self.third(x).relu(), self.weight, torch.cat([self.part, torch.zeros_like(self.part)]))


def test_shared_and_computed_biases():
    torch.manual_seed(0)
    model, data = Biases(), [skewed(64, 8)]
    shared = model.first.bias.clone()
    prepared = corrected(model, data)
    converted = convert_pt2e(prepared)
    assert torch.equal(model.first.bias, shared)
    first, second, *_ = (converted.get_parameter(node.args[2].target) for node in linears(converted)[:2])
    assert not torch.equal(first, second)
    atol = 1e-5 * float(model(data[0]).abs().max())
    torch.testing.assert_close(converted(data[0]).mean(0), model(data[0]).mean(0), rtol=0, atol=atol)


def test_the_float_model_has_the_weights_before_rounding():
    torch.manual_seed(0)
    model, data = nn.Linear(8, 4), [skewed(256, 8)]
    with torch.no_grad():
        model.weight.mul_(torch.tensor([1.0, 1.0, 1.0, 50.0])[:, None])
    config = static_int8(weight="per_tensor")
    prepared = prepare_pt2e(exported(model, data[0], dynamic_batch=True), QFrameworkQuantizer().set_global(config))
    calibrate(prepared, data)
    round_weights(prepared, data)
    assert not torch.equal(prepared.get_parameter("weight"), model.weight)
    correct_bias(prepared, data)
    y, got = model(data[0]).mean(0), convert_pt2e(prepared)(data[0]).mean(0)
    # the small rows, whose weights are a few steps each, say whether the float weights were meant
    torch.testing.assert_close(got, y, rtol=0, atol=1e-5 * float(y.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_biases_are_rounded_once(dtype):
    torch.manual_seed(0)
    model, data = nn.Linear(16, 6).to(dtype), [skewed(64, 16).to(dtype)]
    prepared = corrected(model, data)
    bias = prepared.get_parameter("bias")
    assert bias.dtype == dtype
    error = (convert_pt2e(prepared)(data[0]).double().mean(0) - model(data[0]).double().mean(0)).abs()
    # half a step of the bias, and of each output where it is written (errors of many average out, one does not)
    assert (error <= 2 * torch.finfo(dtype).eps * model(data[0]).abs().max()).all()


def test_errors():
    model, x = Mlp(), torch.randn(4, 8)
    with pytest.raises(CalibrationError, match=r"batches must be .*, got 0"):
        corrected(model, [x], batches=0)
    prepared = prepare_pt2e(exported(model, x), QFrameworkQuantizer().set_global(dynamic_int8()))
    with pytest.raises(CalibrationError, match="correct_bias: data must hold at least one batch"):
        correct_bias(prepared, [])
    with torch.no_grad():
        model.fc1.bias[0] = float("inf")
    with pytest.raises(CalibrationError, match="layer 'fc1': the outputs must be finite"):
        corrected(model, [x], dynamic_int8())
