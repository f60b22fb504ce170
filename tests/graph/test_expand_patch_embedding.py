"""Patch embeddings become one matrix product: the convolution's values, shape, strides and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lowered_models import Block, converted, exported
from patch_embeddings import Capture, captured, operands
from torch import nn
from torch._inductor.utils import run_and_get_code

from qframework import numerics
from qframework.graph.nodes import operation
from qframework.graph.rewrites import expand_patch_embedding


def rounding(conv, x, weight, bias, **arguments):
    """How far two float64 sums of the same products can be apart, in any order of the terms."""
    terms = weight[0].numel() + 1
    sizes = conv(x.abs(), weight.abs(), None if bias is None else bias.abs(), **arguments)
    return 2 * terms * 2**-53 * sizes


# Convolution, sizes of image and kernel, further arguments.
TILINGS = {
    "square": (F.conv2d, (3, 32, 32), (8, 8), {"stride": 8}),
    "oblong": (F.conv2d, (3, 12, 35), (4, 7), {"stride": (4, 7)}),
    "one patch": (F.conv2d, (3, 8, 8), (8, 8), {"stride": 8}),
    "a rest at the bottom": (F.conv2d, (3, 19, 16), (4, 4), {"stride": 4}),
    "rests on both sides": (F.conv2d, (1, 19, 23), (4, 5), {"stride": [4, 5]}),
    "columns": (F.conv2d, (2, 5, 12), (1, 4), {"stride": (1, 4)}),
    "all arguments": (F.conv2d, (3, 8, 8), (4, 4), {"stride": 4, "padding": (0, 0), "dilation": 1, "groups": 1}),
    "valid padding": (F.conv2d, (3, 9, 8), (4, 4), {"stride": 4, "padding": "valid"}),
    "latents": (F.conv2d, (16, 8, 8), (2, 2), {"stride": 2}),
    "signal": (F.conv1d, (4, 50), (8,), {"stride": 8}),
    "video": (F.conv3d, (3, 4, 13, 12), (2, 4, 4), {"stride": (2, 4, 4)}),
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", TILINGS)
def test_product_equals_the_convolution(name, bias, device):
    conv, sizes, kernel, arguments = TILINGS[name]
    x, weight, b = operands(sizes, kernel, device, bias)
    y, capture = captured(lambda x, w, b: conv(x, w, b, **arguments), x, weight, b)
    expected = conv(x, weight, b, **arguments)
    assert (capture.convolutions(), capture.products()) == (0, 1)
    assert y.shape == expected.shape
    assert ((y - expected).abs() <= rounding(conv, x, weight, b, **arguments)).all()


def test_channels_last(device):
    x, weight, bias = operands((3, 16, 16), (4, 4), device)
    x = x.to(memory_format=torch.channels_last)
    y, capture = captured(lambda x, w, b: F.conv2d(x, w, b, stride=4), x, weight, bias)
    expected = F.conv2d(x, weight, bias, stride=4)  # float64 on CUDA: contiguous, whatever its input
    assert capture.convolutions() == 0
    assert y.stride() == expected.stride()
    assert ((y - expected).abs() <= rounding(F.conv2d, x, weight, bias, stride=4)).all()


def test_inside_vmap_a_convolution_stays():
    x, weight, bias = operands((3, 16, 16), (4, 4))

    def ensemble(x, weights):
        return torch.vmap(lambda weight: F.conv2d(x, weight, bias, stride=4), in_dims=0)(weights)

    weights = torch.stack([weight, 2 * weight])
    compiled = torch.compile(ensemble, backend="qframework")(x, weights)
    torch.testing.assert_close(compiled, ensemble(x, weights))


UNTOUCHED = {
    "padding": ((3, 16, 16), (4, 4), {"stride": 4, "padding": 1}),
    "padding of one side": ((3, 16, 16), (4, 4), {"stride": 4, "padding": (0, 2)}),
    "overlap": ((3, 16, 16), (4, 4), {"stride": 2}),
    "overlap of rows": ((3, 16, 16), (4, 4), {"stride": (2, 4)}),
    "gaps": ((3, 16, 16), (4, 4), {"stride": 5}),
    "no stride": ((3, 16, 16), (4, 4), {}),
    "dilation": ((3, 16, 16), (4, 4), {"stride": 4, "dilation": 2}),
    "groups": ((4, 16, 16), (4, 4), {"stride": 4, "groups": 2}),
    "one pixel": ((3, 16, 16), (1, 1), {"stride": 1}),
    "many channels": ((17, 8, 8), (2, 2), {"stride": 2}),
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_other_convolutions_stay(name):
    sizes, kernel, arguments = UNTOUCHED[name]
    x, weight, bias = operands(sizes, kernel)
    if "groups" in arguments:
        weight = weight[:, : sizes[0] // arguments["groups"]]
    y, capture = captured(lambda x, w, b: F.conv2d(x, w, b, **arguments), x, weight, bias)
    assert (capture.convolutions(), capture.products()) == (1, 0)
    torch.testing.assert_close(y, F.conv2d(x, weight, bias, **arguments), rtol=0, atol=0)


def test_an_image_without_a_batch_and_a_transposed_convolution_stay():
    x, weight, bias = operands((3, 8, 8), (4, 4))
    _, capture = captured(lambda x, w, b: F.conv2d(x, w, b, stride=4), x[0], weight, bias)
    assert (capture.convolutions(), capture.products()) == (1, 0)
    _, capture = captured(lambda x, w: F.conv_transpose2d(x, w, stride=4), x, weight.transpose(0, 1))
    assert (capture.convolutions(), capture.products()) == (1, 0)


@pytest.mark.parametrize("size", [16, 19], ids=["whole patches", "a rest"])
def test_gradients(size, device):
    def gradients(function):
        torch.manual_seed(1)
        leaves = [each.requires_grad_() for each in operands((3, size, 16), (4, 4), device)]
        y = function(*leaves)
        return torch.autograd.grad(y, leaves, torch.randn_like(y.detach()))

    def embed(x, weight, bias):
        return F.conv2d(x, weight, bias, stride=4)

    compiled = gradients(torch.compile(embed, backend="qframework"))
    for gradient, expected in zip(compiled, gradients(embed), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_any_batch_and_any_size_of_image_share_a_compilation():
    capture = Capture()
    embed = torch.compile(lambda x, w, b: F.conv2d(x, w, b, stride=4), backend=capture, fullgraph=True)
    _, weight, bias = operands((3, 8, 8), (4, 4))
    for batch, height, width in ((2, 16, 20), (3, 17, 23), (5, 31, 8), (4, 20, 35)):
        x = torch.randn(batch, 3, height, width, dtype=torch.float64)
        for axis in (0, 2, 3):
            torch._dynamo.mark_dynamic(x, axis)  # raises where a guard pins the size
        torch.testing.assert_close(embed(x, weight, bias), F.conv2d(x, weight, bias, stride=4))
    assert len(capture.graphs) == 1
    assert capture.convolutions() == 0


@pytest.mark.parametrize("inside", [True, False], ids=["in the model", "around the model"])
def test_autocast(inside, device):
    x, weight, bias = (each.float() for each in operands((3, 16, 16), (4, 4), device))
    exact = [each.bfloat16().double() for each in (x, weight, bias)]

    def embed(x, w, b):
        with torch.autocast(device.type, torch.bfloat16, enabled=inside or torch.is_autocast_enabled(device.type)):
            return F.conv2d(x, w, b, stride=4)

    capture = Capture()
    for backend in (capture, "qframework"):
        with torch.autocast(device.type, torch.bfloat16, enabled=not inside):
            y = torch.compile(embed, backend=backend, fullgraph=True)(x, weight, bias)
        assert y.dtype == torch.bfloat16
        # One rounding to bfloat16 of a sum in float32.
        torch.testing.assert_close(y.double(), F.conv2d(*exact, stride=4), rtol=1.01 * 2**-8, atol=1e-5)
    assert capture.convolutions() == 0


class Embedding(nn.Module):
    """The embedding of a vision transformer: patches as tokens, plus positions."""

    def __init__(self, dim=32):
        super().__init__()
        self.proj = nn.Conv2d(3, dim, 4, stride=4)
        self.positions = nn.Parameter(torch.randn(1, 16, dim))

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2) + self.positions


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.block = Embedding(), Block()

    def forward(self, x):
        return self.block(self.embedding(x))


def test_inductor_copies_the_image_once_and_does_not_copy_the_product():
    model, x = Embedding().eval(), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        y, (code,) = run_and_get_code(torch.compile(model, backend="qframework", fullgraph=True), x)
        torch.testing.assert_close(y, model(x))
    assert code.count("= empty_strided_cpu(") == 3  # patches, their product, the sum with the positions
    assert "convolution" not in code


def test_exported_graph():
    x = torch.randn(2, 3, 16, 16)
    model = exported(Embedding(), x)
    with torch.no_grad():
        y, capture = captured(model, x)
        assert capture.convolutions() == 0
        torch.testing.assert_close(y, model(x))


def test_converted_graph():
    x = torch.randn(2, 3, 16, 16)
    model = converted(Model(), x)
    with torch.no_grad():
        _, capture = captured(model, x)
        compiled = torch.compile(model, backend="qframework", fullgraph=True)
        assert numerics.sqnr_db(model(x), compiled(x)) > 40
    assert (capture.convolutions(), capture.products()) == (0, 1)
    assert [layer.name for layer in capture.reports[-1].layers] == ["block.fc1", "block.fc2"]


def test_a_residual_of_tokens_is_contiguous():
    """With the strides of flatten and transpose, every sum with tokens would need a transposed copy."""
    model, x = nn.Sequential(Model(), nn.Linear(32, 5)).eval(), torch.randn(2, 3, 16, 16)
    options = {"linear": "int8_dynamic"}
    with torch.no_grad():
        y, (code,) = run_and_get_code(torch.compile(model, backend="qframework", fullgraph=True, options=options), x)
        assert numerics.sqnr_db(model(x), y) > 25
    assert code.count("qframework.int8_product.default(") + code.count("qframework.int8_linear.default(") >= 3
    assert "(2, 16, 32), (512, 32, 1)" in code
    assert "(2, 16, 32), (512, 1, 16)" not in code


def test_the_product_is_not_quantized():
    model, x = Model().eval(), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        _, capture = captured(model, x, linear="int8_dynamic")
    assert (capture.convolutions(), capture.products()) == (0, 1)
    assert [layer.name for layer in capture.reports[-1].layers] == ["block.fc1", "block.fc2"]
    assert capture.reports[-1].lowered == 2


class Parts(nn.Module):
    """Convolutions of some channels, as in InceptionNeXt, behind a patch embedding or an ordinary convolution."""

    def __init__(self, part, kernel=4, padding=0):
        super().__init__()
        self.stem, self.part = nn.Conv2d(3, 8, kernel, stride=4, padding=padding), part
        self.whole, self.some = nn.Conv2d(8, 8, 1), nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x):
        x = self.stem(x)
        return self.whole(x) + torch.cat([x[:, :6], self.some(self.part(x))], 1)


PARTS = {
    "split": lambda x: torch.split(x, [4, 2, 2], 1)[1],
    "split, from the end": lambda x: torch.split(x, 2, dim=-3)[3],
    "chunk": lambda x: x.chunk(4, 1)[2],
    "slice": lambda x: x[:, 2:4],
    "narrow": lambda x: x.narrow(1, 4, 2),
}


def read_copies(capture):
    """Convolutions that read one."""
    graph = capture.graphs[-1].graph
    convolutions = [node for node in graph.nodes if operation(node) == "conv2d"]
    return sum(node.args[0].target is torch.ops.aten.clone.default for node in convolutions[1:])


@pytest.mark.parametrize("part", PARTS)
def test_convolutions_read_copies_of_parts(monkeypatch, part):
    monkeypatch.setattr(expand_patch_embedding, "_is_on_gpu", lambda node: True)
    model, x = Parts(PARTS[part]).eval().double(), torch.randn(2, 3, 16, 16).double()
    y, capture = captured(model, x)
    assert (capture.convolutions(), read_copies(capture)) == (2, 1)
    torch.testing.assert_close(y, model(x))
    y.square().sum().backward()
    found = model.stem.weight.grad.clone()
    model.zero_grad()
    model(x).square().sum().backward()
    torch.testing.assert_close(found, model.stem.weight.grad)


@pytest.mark.parametrize(
    ("model", "gpu"),
    [
        (Parts(PARTS["split"], kernel=5), True),  # no patch embedding, so that Inductor chooses the layout
        (Parts(lambda x: x[:, :2] + 1), True),  # computed anyway
        (Parts(PARTS["split"]), False),
    ],
)
def test_other_inputs_are_not_copied(monkeypatch, model, gpu):
    monkeypatch.setattr(expand_patch_embedding, "_is_on_gpu", lambda node: gpu)
    _, capture = captured(model.eval(), torch.randn(2, 3, 17, 17))
    assert read_copies(capture) == 0


def test_parts_of_rows_are_not_copied(monkeypatch):
    monkeypatch.setattr(expand_patch_embedding, "_is_on_gpu", lambda node: True)
    stem, behind = nn.Conv2d(3, 8, 4, stride=4), nn.Conv2d(8, 8, 1)

    def forward(x):
        x = stem(x)
        return behind(torch.split(x, 2, 2)[1]), behind(x[:, :, 1:]), behind(x[:1])

    _, capture = captured(forward, torch.randn(2, 3, 16, 16))
    convolutions = [node for node in capture.graphs[-1].graph.nodes if operation(node) == "conv2d"]
    assert len(convolutions) == 3
    assert not any(node.args[0].target is torch.ops.aten.clone.default for node in convolutions)
