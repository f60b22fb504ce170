"""Linears of a compiled model that read the same tensor are computed together, with the same results."""

from __future__ import annotations

import copy

import pytest
import torch
from lowered_models import count, without_inductor
from torch import nn
from torch.nn import functional as F

from qframework.kernels.blocks.format import BLOCK_SIZES
from qframework.training import BlockTensor, quantize_blocks
from qframework.training.convert import convert_to_int8_training
from qframework.training.joined_linears import linears_in_blocks
from qframework.training.linear import Int8Linear, linear_in_blocks

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Attention(nn.Module):
    """Queries, keys and values of one tensor; fewer heads of keys and values, and keys without a bias."""

    def __init__(self, columns=512, few=256, block_size=(1, 128), **options):
        super().__init__()
        options = {"block_size": block_size, "output": "float", **options}
        self.query = Int8Linear(columns, columns, **options)
        self.key = Int8Linear(columns, few, bias=False, **options)
        self.value = Int8Linear(columns, few, **options)

    def forward(self, x):
        heads = [layer(x).unflatten(-1, (-1, 64)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        y = F.scaled_dot_product_attention(*heads, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)


def results(model, run, *inputs):
    """The result and all gradients of a weighted sum, those of blocks dequantized."""
    model.zero_grad()
    inputs = [x.detach().requires_grad_() for x in inputs]
    y = run(*inputs)
    (y * torch.linspace(-1, 2, y.shape[-1])).square().sum().backward()
    grads = {f"input {i}": x.grad for i, x in enumerate(inputs)}
    grads |= {name: each.grad for name, each in model.named_parameters()}
    grads = {k: g.dequantize() if isinstance(g, BlockTensor) else g for k, g in grads.items() if g is not None}
    return y.detach(), grads


def assert_close(got, expected, tolerance):
    assert got.keys() == expected.keys()
    for name, grad in got.items():
        assert (grad - expected[name]).norm() <= tolerance * expected[name].norm(), name


def joined(model, run, *inputs):
    """The same of the compiled model, and how often its graphs compute several layers together."""
    kept = []
    y, grads = results(model, torch.compile(run, backend=without_inductor(kept)), *inputs)
    return y, grads, sum(count(gm, linears_in_blocks) for gm in kept)


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_gradients(block_size, in_blocks):
    """Those of weights are the same; that of x is rounded once instead of added up, those of biases are not rounded."""
    torch.manual_seed(0)
    model, x = Attention(block_size=block_size), torch.randn(2, 40, 512)
    x = quantize_blocks(x, block_size) if in_blocks else x
    y, expected = results(model, model, x)
    together, grads, products = joined(model, model, x)
    assert products == 1
    assert torch.equal(together, y)
    for name in ("query.weight", "key.weight", "value.weight"):
        assert torch.equal(grads[name], expected[name])
    assert_close(grads, expected, 0.02)


def test_gradients_of_biases_are_sums_of_floats():
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 40, 512)
    plain = copy.deepcopy(model)
    for each in (model, plain):
        each.value.weight.data.zero_()  # so that queries and keys have no part in the result
    _, grads, products = joined(model, model, x)
    assert products == 1
    wanted = torch.zeros(256, requires_grad=True)
    values = (plain.value.bias.detach() + wanted).expand(2, 40, 256).unflatten(-1, (-1, 64)).repeat_interleave(2, -2)
    (values.flatten(-2) * torch.linspace(-1, 2, 512)).square().sum().backward()
    torch.testing.assert_close(grads["value.bias"], wanted.grad, rtol=1e-5, atol=1e-5)


def test_frozen_parameters():
    """Of what needs no gradient none is computed: with adapters, say."""
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 40, 512)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "value.bias")
    _, expected = results(model, model, x)
    _, grads, products = joined(model, model, x)
    assert products == 1
    assert grads.keys() == {"input 0", "value.bias"}
    assert_close(grads, expected, 0.02)


def test_results_that_nothing_reads():
    """Their weights get no gradient, which an optimizer tells from zeros."""
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 40, 512)

    def run(x):
        return model.query(x) + model.key(x).detach().repeat(1, 1, 2) + model.value(x).detach().repeat(1, 1, 2)

    _, expected = results(model, run, x)
    _, grads, products = joined(model, run, x)
    assert products == 1
    assert grads.keys() == {"input 0", "query.weight", "query.bias"}
    assert_close(grads, expected, 0.02)


def test_results_without_a_gradient():
    """A layer whose weight is frozen, of an input without a gradient, is no part of the backward pass."""
    model, x = Attention(), torch.randn(2, 40, 512)
    model.query.requires_grad_(False)
    model.key.requires_grad_(False)
    kept = []
    run = torch.compile(lambda x: [layer(x) for layer in model.children()], backend=without_inductor(kept))
    assert [y.requires_grad for y in run(x)] == [False, False, True]
    assert [count(gm, linears_in_blocks) for gm in kept] == [0]


def test_more_than_three_are_groups_of_three():
    torch.manual_seed(0)
    layers = nn.ModuleList(Int8Linear(64, 256, output="float") for _ in range(7))

    def run(x):
        return torch.cat([layer(x) for layer in layers], -1)

    x = torch.randn(2, 40, 64)
    y, expected = results(layers, run, x)
    together, grads, products = joined(layers, run, x)
    assert products == 2
    assert torch.equal(together, y)
    assert_close(grads, expected, 0.02)


class Decoder(nn.Module):
    """Layers that all read one tensor, as a decoder's read the encoder's result, and each the layer before."""

    def __init__(self, layers=2, width=256):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: Int8Linear(width, width, output="float") for name in ("q", "k", "v")})
            for _ in range(layers)
        )

    def forward(self, x, encoded):
        for layer in self.layers:
            q, k, v = layer["q"](x), layer["k"](encoded), layer["v"](encoded)
            x = x + F.scaled_dot_product_attention(q, k, v)
        return x


def test_layers_that_read_one_tensor_stay_apart():
    torch.manual_seed(0)
    model, inputs, kept = Decoder(), [torch.randn(2, 40, 256) for _ in range(2)], []
    y, expected = results(model, model, *inputs)
    got, grads = results(model, torch.compile(model, backend=without_inductor(kept)), *inputs)
    (gm,) = kept
    assert [len(node.args[1]) for node in gm.graph.nodes if node.target is linears_in_blocks] == [2, 2]
    assert torch.equal(got, y)
    assert_close(grads, expected, 0.02)


class Other(Attention):
    """Attention with something that keeps a layer alone."""

    def __init__(self, kind):
        options = {
            "in blocks": {"output": "block"},
            "stochastic": {"stochastic_gradients": True},
            "weights again": {"keep_weight": False},
            "narrow": {"few": 128},
        }
        super().__init__(**options.get(kind, {}))
        self.kind = kind
        if kind == "another dtype":
            self.key.to(torch.bfloat16)

    def forward(self, x):
        q = self.query(x)
        if self.kind == "written between":
            x.mul_(2)
        k, v = self.key(x if self.kind != "another input" else x * 2), self.value(x)
        if self.kind == "written":
            k.mul_(0.5)
        if self.kind == "view":
            return q + v.view(2, -1).view(2, 20, 512).repeat(1, 2, 1) + k.repeat(1, 1, 2)
        return q + torch.cat([k, v], -1).repeat(1, 1, q.shape[-1] // (k.shape[-1] * 2))


JOINED = {"plain": 1, "another dtype": 1, "written": 1, "view": 1}
KINDS = ["in blocks", "stochastic", "weights again", "narrow", "written between", "another input", *JOINED]


@pytest.mark.parametrize("kind", KINDS)
def test_what_stays_alone(kind):
    """The graph computes the same in any case; ``JOINED`` says what else is joined."""
    torch.manual_seed(0)
    model = Other(kind)
    x = torch.randn(2, 40, 512)
    if kind == "in blocks":
        x = quantize_blocks(x)

    def run(x):
        return model(x.clone() if kind == "written between" else x).to(torch.float32)

    torch.manual_seed(1)
    y, expected = results(model, run, x)
    torch.manual_seed(1)
    got, grads, products = joined(model, run, x)
    assert products == JOINED.get(kind, 0)
    torch.testing.assert_close(got, y)
    if kind != "stochastic":
        assert_close(grads, expected, 0.02)


def test_weights_that_layers_computed():
    """A joined result that is the weight of others, as in a hypernetwork: these come behind it."""
    torch.manual_seed(0)
    model = Attention(256)
    options = (1, 128), torch.float32, "float", False, None, True, True

    def run(x):
        q, k = model.query(x), model.key(x)
        return linear_in_blocks(k, q, None, *options) + linear_in_blocks(k, k, None, *options)

    x = torch.randn(256, 256)
    y, expected = results(model, run, x)
    got, grads, products = joined(model, run, x)
    assert products == 2
    torch.testing.assert_close(got, y)
    assert_close(grads, expected, 0.02)


def test_inference_quantizes_weights_once():
    """Without gradients nothing is joined: the transposed weights would be computed in vain."""
    kept = []
    with torch.no_grad():
        torch.compile(Attention(), backend=without_inductor(kept))(torch.randn(2, 40, 512))
    assert [count(gm, linears_in_blocks) for gm in kept] == [0]


def bert():
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 64}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertModel(BertConfig(**sizes, **dropout, num_attention_heads=4), add_pooling_layer=False)


def llama():
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 64}
    return LlamaModel(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False))


def vit():
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8}
    return ViTModel(ViTConfig(**sizes, num_attention_heads=4), add_pooling_layer=False)


def phi():
    """Attention and MLP both read the norm: of four linears, that of the MLP has a result in blocks."""
    from transformers import PhiConfig, PhiModel

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 64}
    return PhiModel(PhiConfig(**sizes, num_attention_heads=4, use_cache=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [bert, llama, vit, phi])
def test_models_of_transformers(build, dtype):
    """Two blocks, each with three layers together; under autocast too."""
    torch.manual_seed(0)
    model = convert_to_int8_training(build().train(), skip_slower=False)
    x = torch.randn(2, 3, 32, 32) if build is vit else torch.randint(0, 64, (2, 24))

    def run(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            return model(x).last_hidden_state.float()

    def loss(run):
        model.zero_grad()
        y = run(x)
        (y * torch.linspace(-1, 2, y.shape[-1])).square().mean().backward()
        # The exact gradient of a bias of keys is zero.
        named = [(k, p) for k, p in model.named_parameters() if not k.endswith(("key.bias", "k_proj.bias"))]
        return y.detach(), {name: each.grad for name, each in named if each.grad is not None}

    y, expected = loss(run)
    kept = []
    got, grads = loss(torch.compile(run, backend=without_inductor(kept)))
    assert sum(count(gm, linears_in_blocks) for gm in kept) == 2
    assert (got - y).norm() <= 0.02 * y.norm()
    assert_close(grads, expected, 0.06)
