"""Which convolutions our own kernel computes, and that it computes the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import qframework
from qframework.backend import lower_depthwise
from qframework.quantizer import static_int8

CHANNELS = 32
_ours = torch.ops.qframework


class MixFFN(nn.Module):
    """Tokens of an image between two linears, as PVT and SegFormer have them."""

    def __init__(self, activation=F.gelu, taps=3, channels_first=False, groups=CHANNELS, residual=False, **options):
        super().__init__()
        self.fc1 = nn.Linear(16, CHANNELS)
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, taps, padding=taps // 2, groups=groups, **options)
        self.fc2 = nn.Linear(CHANNELS, 16)
        self.activation, self.channels_first, self.residual = activation, channels_first, residual

    def forward(self, x):
        tokens = self.fc1(x)
        image = tokens.transpose(1, 2).view(x.shape[0], CHANNELS, 8, 8)
        if self.channels_first:
            image = image.contiguous()
        y = self.conv(image)
        y = y + image if self.residual else y
        return self.fc2(self.activation(y.flatten(2).transpose(1, 2)))


@pytest.fixture
def calls(monkeypatch):
    """What the kernel computes: activation and number of taps of each call, on a pretended Hopper GPU."""
    monkeypatch.setattr(lower_depthwise, "capability_of", lambda device: (9, 0))
    seen = []
    original = lower_depthwise._add_kernel

    def spy(node, chain):
        seen.append((chain.activation is not None, chain.quantize is not None, chain.call.taps))
        return original(node, chain)

    monkeypatch.setattr(lower_depthwise, "_add_kernel", spy)
    return seen


def model_of(**options):
    torch.manual_seed(0)
    return MixFFN(**options).eval().to(torch.bfloat16).requires_grad_(False)


def tokens(batch=2):
    return torch.randn(batch, 64, 16, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def compile_of(model, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend="qframework", options=options or None)


def close(got, model, x):
    """Within a few roundings to bfloat16 of the float32 model."""
    expected = model.float()(x.float())
    model.to(torch.bfloat16)
    assert float((got.float() - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("activation", [F.gelu, F.relu, F.silu])
@pytest.mark.parametrize("taps", [3, 9])
def test_convolution_and_activation(calls, activation, taps):
    model, x = model_of(activation=activation, taps=taps), tokens()
    got = compile_of(model)(x)
    assert calls == [(True, False, taps)]
    close(got, model, x)


LEFT = {
    "faster in cuDNN": {"taps": 5},
    "not depthwise": {"groups": 1},
    "nothing behind it": {"activation": lambda x: x},
    "a residual before the activation": {"residual": True},
    "another order in memory": {"channels_first": True},
    "another function behind it": {"activation": torch.sin},
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_pytorch(calls, name):
    model, x = model_of(**LEFT[name]), tokens()
    got = compile_of(model)(x)
    assert calls == []
    close(got, model, x)


def test_other_devices_are_left_to_pytorch(calls, monkeypatch):
    monkeypatch.setattr(lower_depthwise, "capability_of", lambda device: (8, 0))
    compile_of(model_of())(tokens())
    assert calls == []


def test_where_a_gradient_is_needed(calls):
    model = model_of().requires_grad_(True)
    compile_of(model)(tokens()).sum().backward()
    assert calls == []
    assert model.conv.weight.grad is not None


def test_float32_is_left_to_pytorch(calls):
    compile_of(model_of().float())(tokens().float())
    assert calls == []


@torch.no_grad()
def test_a_weight_that_is_written_later(calls):
    """Through ``.data`` too, which no version counts."""
    model, x = model_of(), tokens()
    compiled = compile_of(model)
    compiled(x)
    model.conv.weight.data.copy_(model.conv.weight.flip(0))
    close(compiled(x), model, x)
    model.conv.weight.mul_(-2)
    model.conv.bias.add_(1)
    close(compiled(x), model, x)
    model.load_state_dict({name: value.flip(0) for name, value in model.state_dict().items()})
    close(compiled(x), model, x)
    assert len(calls) == 1


@torch.no_grad()
def test_a_weight_that_the_graph_writes(calls):
    class Writing(MixFFN):
        def forward(self, x):
            self.conv.weight.mul_(2)
            return super().forward(x)

    torch.manual_seed(0)
    model, x = Writing().eval().to(torch.bfloat16).requires_grad_(False), tokens()
    compiled = compile_of(model)
    compiled(x)
    got = compiled(x)  # four times the first weight
    model.conv.weight.mul_(0.5)
    close(got, model, x)  # which writes it once more
    assert calls == [(True, False, 3)]


@torch.no_grad()
def test_a_computed_weight(calls):
    """With weight normalization."""
    model, x = model_of(), tokens()
    torch.nn.utils.parametrizations.weight_norm(model.conv)
    close(compile_of(model)(x), model, x)
    assert calls == [(True, False, 3)]


def test_batches_of_any_size(calls):
    model = model_of()
    compiled = torch.compile(model, backend="qframework", dynamic=True)
    for batch in (2, 5, 3):
        x = tokens(batch)
        close(compiled(x), model, x)
    assert calls == [(True, False, 3)]


@pytest.mark.parametrize("writes", [False, True])
def test_a_scale_that_is_written_before_its_quantization(monkeypatch, writes):
    """The kernel would read it where the convolution is."""
    monkeypatch.setattr(lower_depthwise, "capability_of", lambda device: (9, 0))
    graph = torch.fx.Graph()
    with FakeTensorMode():
        image = torch.empty(2, CHANNELS, 8, 8, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
        values = {"x": image, "w": image.new_empty(CHANNELS, 1, 3, 3), "scale": torch.empty(1)}
    x, w, scale = map(graph.placeholder, values)
    for each, value in zip((x, w, scale), values.values(), strict=True):
        each.meta["val"] = value
    node = graph.call_function(F.conv2d, (x, w, None, 1, 1, 1, CHANNELS))
    node.meta["val"] = torch.empty_like(image)
    if writes:
        graph.call_method("mul_", (scale, 2)).meta["val"] = values["scale"]
    graph.output(graph.call_function(_ours.quantize.default, (node, scale)))
    assert lower_depthwise.has_own_kernel(node) != writes


def test_static_int8_is_a_part_of_it(calls):
    """A model converted with PT2E: GELU's result is INT8 when the kernel writes it."""
    model, x = model_of(), tokens()
    converted = qframework.quantize(model, (x,), calibration_data=[(x,)], config=static_int8())
    eager = converted(x)
    got = compile_of(converted)(x)
    assert calls == [(True, True, 3)]
    assert float((got.float() - eager.float()).norm() / eager.float().norm()) < 0.02
