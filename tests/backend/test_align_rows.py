"""Rows of INT8 tensors that begin at multiples of 64 bytes: the same results, current weights, and which layers."""

from __future__ import annotations

import pytest
import torch
from lowered_models import converted, count, without_inductor
from torch import nn

from qframework.backend import align_rows as module
from qframework.graph.nodes import fake_value
from qframework.quantizer import dynamic_int8, static_int8

OURS = torch.ops.qframework
INT8_LINEAR, TRANSPOSE = OURS.int8_linear.default, OURS.transpose_rows.default
PAD = torch.ops.aten.constant_pad_nd.default
FROZEN = {"linear": "int8_dynamic", "freeze_weights": True}


@pytest.fixture(autouse=True)
def hopper(monkeypatch, fresh_dynamo):
    """As on a Hopper GPU, for layers of any number of rows."""
    monkeypatch.setattr(module, "capability_of", lambda _: (9, 0))
    monkeypatch.setattr(module, "FEWEST_ROWS", 1)
    monkeypatch.setattr(module, "TURNED", 1)
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Mlp(nn.Module):
    def __init__(self, width=72, dim=128, act=None, bias=True):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, width, bias), act or nn.GELU(), nn.Linear(width, dim, bias)

    def forward(self, x):
        return x + self.fc2(self.act(self.fc1(x)))


class Mixer(nn.Module):
    """A layer over tokens behind a norm."""

    def __init__(self, tokens=9, dim=64, outputs=None, turn=lambda x: x.transpose(1, 2)):
        super().__init__()
        self.norm, self.fc, self.turn = nn.LayerNorm(dim), nn.Linear(tokens, outputs or tokens), turn

    def forward(self, x):
        return self.fc(self.turn(self.norm(x))).transpose(1, 2).relu()


def aligned(model, x, **options):
    """What the lowered graph computes with and without the pass; the graph, and what to call."""
    found = []
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "capability_of", lambda _: None)
        expected = torch.compile(model, backend=without_inductor(found, **options))(x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=without_inductor(found, **options))
    return compiled(x), expected, found[-1], compiled


def layers(gm):
    """The sizes of the layers' weights, and the widths of their inputs and results, all as recorded."""
    nodes = [node for node in gm.graph.nodes if node.target is INT8_LINEAR]
    return [
        (*fake_value(node.args[2]).shape, fake_value(node.args[0]).shape[-1], fake_value(node).shape[-1])
        for node in nodes
    ]


@pytest.mark.parametrize(("width", "aligned_to"), [(72, 80), (65, 80), (100, 112), (120, 128), (116, 128)])
@pytest.mark.parametrize("config", [static_int8(), static_int8(symmetric=False)], ids=["symmetric", "zero_point"])
def test_a_layer_writes_aligned_rows_for_the_next(width, aligned_to, config):
    x = torch.randn(2, 7, 128)
    model = converted(Mlp(width), x, config)
    result, expected, gm, compiled = aligned(model, x)
    assert torch.equal(result, expected)
    assert layers(gm) == [(aligned_to, 128, 128, aligned_to), (128, aligned_to, aligned_to, 128)]
    assert count(gm, PAD) == 0
    model.get_parameter("fc2.bias").copy_(torch.randn(128))
    for weight in model.buffers():
        if weight.dtype == torch.int8:
            weight.copy_(weight.flip(0))
    again, expected, *_ = compiled(x), *aligned(model, x)[1:2]
    assert torch.equal(again, expected), "written weights are padded again"
    assert not torch.equal(again, result)


@pytest.mark.parametrize(("width", "aligned_to"), [(72, 80), (65, 80), (124, 128)])
def test_frozen_weights_are_padded_and_the_quantization_with_them(width, aligned_to):
    x = torch.randn(2, 7, 128)
    result, expected, gm, _ = aligned(Mlp(width), x, **FROZEN)
    assert torch.equal(result, expected)
    first, second = layers(gm)
    assert second == (128, aligned_to, aligned_to, 128)
    assert first[1] == 128
    assert count(gm, PAD) == 1
    assert not any(weight.shape[1:] == (width,) for weight in gm.buffers()), "the weight that nothing reads is gone"


def test_weights_that_each_call_quantizes_stay():
    result, expected, gm, _ = aligned(Mlp(), torch.randn(2, 7, 128), linear="int8_dynamic")
    assert torch.equal(result, expected)
    assert count(gm, PAD) == 0


def test_a_dynamic_model_pads_behind_its_quantization():
    x = torch.randn(2, 7, 128)
    result, expected, gm, _ = aligned(converted(Mlp(), x, dynamic_int8()), x)
    assert torch.equal(result, expected)
    assert count(gm, PAD) == 1


@pytest.mark.parametrize("tokens", [9, 64])
def test_the_transposed_copy_is_read_for_any_number_of_tokens(tokens):
    x = torch.randn(2, tokens, 64)
    result, expected, gm, _ = aligned(converted(Mixer(tokens), x, static_int8()), x)
    assert torch.equal(result, expected)
    (linear,) = (node for node in gm.graph.nodes if node.target is INT8_LINEAR)
    assert linear.args[0].target is TRANSPOSE
    assert count(gm, OURS.quantize.default) == 1, "what only the layer read is gone"


@pytest.mark.parametrize("outputs", [9, 64])
@pytest.mark.parametrize(
    "turn",
    [lambda x: x.transpose(1, 2), lambda x: x.transpose(-1, -2), lambda x: x.permute(0, 2, 1)],
    ids=["transpose", "negative", "permute"],
)
def test_a_layer_over_tokens_reads_a_transposed_copy(turn, outputs):
    x = torch.randn(2, 9, 64)
    result, expected, gm, _ = aligned(converted(Mixer(turn=turn, outputs=outputs), x, static_int8()), x)
    assert torch.equal(result, expected)
    assert count(gm, TRANSPOSE) == 1
    node = gm.graph.find_nodes(op="call_function", target=TRANSPOSE)[0]
    assert fake_value(node).shape == (2, 64, 64)
    assert fake_value(node.args[0]).shape == (2, 9, 64)
    rows, columns, read, written = layers(gm)[0]
    assert (columns, read) == (64, 64)
    assert rows == written == (12 if outputs == 9 else 64)


def test_results_that_leave_the_model_keep_their_strides():
    class Leaves(Mixer):
        def forward(self, x):
            return self.fc(self.norm(x).transpose(1, 2))

    x = torch.randn(2, 9, 64)
    result, expected, gm, _ = aligned(converted(Leaves(), x, static_int8()), x)
    assert torch.equal(result, expected)
    assert result.stride() == expected.stride()
    assert layers(gm)[0][:2] == (9, 64)


def test_one_input_of_several_layers_is_padded_once():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.a, self.b = nn.LayerNorm(72), nn.Linear(72, 64), nn.Linear(72, 64)

        def forward(self, x):
            x = self.norm(x)
            return self.a(x).relu() * self.b(x).relu()

    x = torch.randn(2, 7, 72)
    result, expected, gm, _ = aligned(converted(Two(), x), x)
    assert torch.equal(result, expected)
    assert count(gm, PAD) == 1
    assert {each[1:3] for each in layers(gm)} == {(80, 80)}


def test_a_layer_that_is_called_twice_has_one_padded_weight():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(72), nn.Linear(72, 72)

        def forward(self, x):
            return self.fc(self.norm(self.fc(x))).relu()

    x = torch.randn(2, 7, 72)
    model = converted(Twice(), x)
    result, expected, gm, compiled = aligned(model, x)
    assert torch.equal(result, expected)
    first, second = (node for node in gm.graph.nodes if node.target is INT8_LINEAR)
    assert first.args[2] is second.args[2]
    assert [weight.shape for weight in gm.buffers() if weight.shape[-1] == 80 and weight.ndim == 2] == [(72, 80)]
    (weight,) = (each for each in model.buffers() if each.dtype == torch.int8 and each.ndim == 2)
    weight.copy_(weight.flip(0))
    assert torch.equal(compiled(x), aligned(model, x)[1])
    assert not torch.equal(compiled(x), result)


def test_inputs_that_are_too_long_to_be_padded_stay():
    """An INT32 sum of more than 131,071 products may overflow, so the operator takes no more."""
    x = torch.randn(2, 3, 131_070)
    result, expected, gm, _ = aligned(converted(nn.Sequential(nn.Linear(131_070, 4), nn.ReLU()), x), x)
    assert torch.equal(result, expected)
    assert layers(gm)[0][1:3] == (131_070, 131_070)


def test_merged_weights_follow_writes(monkeypatch):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.q, self.k = nn.LayerNorm(72), nn.Linear(72, 64), nn.Linear(72, 32, bias=False)

        def forward(self, x):
            x = self.norm(x)
            return torch.cat([self.q(x), self.k(x)], -1)

    monkeypatch.setattr("qframework.backend.merge_linears.pays_to_join", lambda *_: True)
    x = torch.randn(2, 7, 72)
    model = converted(Both(), x)
    result, expected, gm, compiled = aligned(model, x)
    assert torch.equal(result, expected)
    assert layers(gm) == [(96, 80, 80, 96)]
    for parameter in [*model.parameters(), *model.buffers()]:
        if parameter.dtype == torch.int8:
            parameter.copy_(parameter.flip(0))
    assert torch.equal(compiled(x), aligned(model, x)[1])
    assert not torch.equal(compiled(x), result)


def test_biases_of_frozen_layers_that_are_joined_follow_writes():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 9), nn.Linear(64, 10)

        def forward(self, x):
            return torch.cat([self.a(x), self.b(x)], -1).relu()

    model, x = Both(), torch.randn(2, 7, 64)
    result, expected, gm, compiled = aligned(model, x, **FROZEN)
    assert torch.equal(result, expected)
    assert layers(gm) == [(20, 64, 64, 20)]
    model.a.bias.add_(1)
    again = compiled(x)
    assert torch.equal(again, aligned(model, x, **FROZEN)[1])
    assert not torch.equal(again, result)


@pytest.mark.parametrize("why", ["few rows", "aligned", "long", "another reader", "no Hopper"])
def test_what_stays(why, monkeypatch):
    class Reads(Mlp):
        def forward(self, x):
            x = self.act(self.fc1(x))
            return self.fc2(x) + x.mean()

    model = Reads() if why == "another reader" else Mlp({"aligned": 64, "long": 80}.get(why, 72))
    if why == "few rows":
        monkeypatch.setattr(module, "FEWEST_ROWS", 15)
    if why == "no Hopper":
        monkeypatch.setattr(module, "capability_of", lambda _: (8, 0))
    x = torch.randn(2, 7, 128)
    result, expected, gm, _ = aligned(converted(model, x), x)
    assert torch.equal(result, expected)
    assert [each[0] for each in layers(gm)] == [64 if why == "aligned" else 80 if why == "long" else 72, 128]
    assert count(gm, PAD) == (1 if why == "another reader" else 0)


def test_a_weight_that_forward_writes_stays():
    class Writes(Mlp):
        def forward(self, x):
            self.fc2.bias.add_(1)
            return super().forward(x)

    x = torch.randn(2, 7, 128)
    result, expected, gm, _ = aligned(Writes(), x, **FROZEN)
    torch.testing.assert_close(result, expected + 1)
    assert (128, 72, 72, 128) in layers(gm)
