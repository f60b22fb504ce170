"""A prepared model run layer by layer computes the same as the converted model, or as the float model."""

from __future__ import annotations

import pytest
import torch
from quantizer_models import Mlp, Net, exported, linears, tiny_vit
from torch import nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import ComposableQuantizer
from torchao.quantization.pt2e.quantizer.embedding_quantizer import EmbeddingQuantizer

from qframework.errors import CalibrationError
from qframework.quantizer import (
    QFrameworkQuantizer,
    QuantizationConfig,
    calibrate,
    dynamic_int8,
    qattn_paper,
    static_attention,
    static_int8,
)
from qframework.quantizer.layerwise import LayerwiseRun, quantized_linears, take_batches

CONFIGS = {
    "static": static_int8(),
    "static per token": static_int8("per_token"),
    "one weight scale": static_int8(weight="per_tensor"),
    "entropy": static_int8(observer="entropy"),
    "dynamic": dynamic_int8(),
    "paper": qattn_paper(),
    "attention": QuantizationConfig(static_int8(), static_attention()),
    "attention per head": QuantizationConfig(dynamic_int8(), static_attention("per_head")),
}


def prepared_net(config, model, data, **export_options):
    prepared = prepare_pt2e(exported(model, data[0], **export_options), QFrameworkQuantizer().set_global(config))
    calibrate(prepared, data)
    return prepared


@pytest.mark.parametrize("name", CONFIGS)
def test_the_quantized_run_computes_the_converted_model(name):
    images = [torch.randn(2, 3, 32, 32) for _ in range(2)]
    quantizer = QFrameworkQuantizer().set_global(CONFIGS[name]).set_module_name("head", None)
    prepared = prepare_pt2e(exported(tiny_vit(), images[0], dynamic_batch=True), quantizer)
    calibrate(prepared, images)
    images.append(3 * torch.randn(3, 3, 32, 32))  # another batch size, and values outside the calibrated range
    run = LayerwiseRun(prepared, take_batches(prepared, images, None, "a test"), quantized=True)
    head = linears(prepared)[-1]
    run.advance(head.next)
    got = list(run.values(head))
    converted = convert_pt2e(prepared)
    for x, y in zip(images, got, strict=True):
        torch.testing.assert_close(y, converted(x), rtol=0, atol=0)


def test_the_float_run_computes_the_float_model():
    model, data = Net(), [torch.randn(3, 5, 8) for _ in range(2)]
    prepared = prepared_net(static_int8(), model, data)
    run = LayerwiseRun(prepared, take_batches(prepared, data, None, "a test"), quantized=False)
    head = linears(prepared)[-1]
    run.advance(head.next)
    for x, y in zip(data, run.values(head), strict=True):
        torch.testing.assert_close(y, model(x), rtol=0, atol=0)


def test_shift_reaches_the_layers_after():
    model, data = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), [torch.randn(2, 4)]
    prepared = prepared_net(static_int8(), model, data)
    run = LayerwiseRun(prepared, take_batches(prepared, data, None, "a test"), quantized=False)
    first, second = linears(prepared)
    run.advance(first.next)
    run.shift(first, torch.ones(4))
    run.advance(second.next)
    torch.testing.assert_close(next(run.values(second)), model[1](model[0](data[0]) + 1))


def test_only_what_will_be_read_stays_in_memory():
    model, data = Net(), [torch.randn(3, 5, 8)]
    prepared = prepared_net(static_int8(), model, data)
    run = LayerwiseRun(prepared, take_batches(prepared, data, None, "a test"), quantized=True)
    second = next(n for n in quantized_linears(prepared) if n.observer.layer == "blocks.0.mlp.fc2")
    run.advance(second.node)
    # the residual stream, and the quantized input of the layer
    assert sorted(len(v.shape) for v in run._values[0].values()) == [3, 3]


def test_mappings_and_keyword_inputs():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, a, *, b):
            return self.fc(a + 2 * b)

    a, b = torch.randn(2, 4), torch.randn(2, 4)
    program = torch.export.export(Sum().eval(), (a,), {"b": b})
    prepared = prepare_pt2e(program.module(), QFrameworkQuantizer().set_global(dynamic_int8()))
    run = LayerwiseRun(prepared, take_batches(prepared, [{"b": b, "a": a}], None, "a test"), quantized=False)
    [fc] = quantized_linears(prepared)
    run.advance(fc.node)
    torch.testing.assert_close(next(run.values(fc.input)), a + 2 * b)


def test_another_quantizers_embedding_stays_float():
    model = nn.Sequential(nn.Embedding(12, 8), Mlp())
    tokens = torch.randint(0, 12, (2, 5))
    ours = QFrameworkQuantizer().set_global(static_int8())
    prepared = prepare_pt2e(exported(model, tokens), ComposableQuantizer([EmbeddingQuantizer(), ours]))
    calibrate(prepared, [tokens])
    run = LayerwiseRun(prepared, take_batches(prepared, [tokens], None, "a test"), quantized=True)
    first, _ = quantized_linears(prepared)
    run.advance(first.node)
    x = model[0](tokens)
    step = x.abs().max() / 127
    assert (next(run.values(first.input)) - x).abs().max() <= step * 0.501


@pytest.mark.parametrize(
    ("data", "batches", "message"),
    [
        ([], None, "a test: data must hold at least one batch, got none"),
        ([torch.randn(3, 4, 8)], 0, "batches must be None or a positive integer, got 0"),
        ([torch.randn(3, 5, 8), torch.randn(3, 4, 8)], None, r"batch 1: input 'x' must have shape .*, got \(3, 4, 8\)"),
        ([torch.full((3, 5, 8), float("nan"))], None, "batch 0: input 'x' must be finite"),
    ],
)
def test_data_is_checked(data, batches, message):
    prepared = prepare_pt2e(exported(Net(), torch.randn(3, 5, 8)), QFrameworkQuantizer().set_global(dynamic_int8()))
    with pytest.raises(CalibrationError, match=message):
        take_batches(prepared, data, batches, "a test")


def test_an_uncalibrated_activation_is_named():
    prepared = prepare_pt2e(exported(Mlp(), torch.randn(3, 8)), QFrameworkQuantizer().set_global(static_int8()))
    with pytest.raises(CalibrationError, match="layer 'fc1': the activation was never observed"):
        LayerwiseRun(prepared, take_batches(prepared, [torch.randn(3, 8)], None, "a test"), quantized=True)
