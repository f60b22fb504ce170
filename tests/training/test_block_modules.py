"""norm.py, activation.py and dropout.py: the INT8 modules against the float modules, and in a model."""

from __future__ import annotations

import copy

import pytest
import torch
from block_models import loss_and_gradients
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.blocks.format import BLOCK_SIZES, dequantize_blocks_ref, spread_scale
from qframework.training import BlockTensor, fallbacks, quantize_blocks
from qframework.training.activation import Int8Activation, Int8GatedMLP, gated_activation
from qframework.training.dropout import Int8Dropout
from qframework.training.linear import Int8Linear
from qframework.training.norm import Int8LayerNorm, Int8RMSNorm

C = 70
# Half a step, the roundings of values up to 127 steps large, and what float32 makes of a formula.
STEP = 0.5 + 1e-3


def layer_norm(block_size=32):
    module = nn.LayerNorm(C)
    nn.init.normal_(module.weight, 1, 0.3)
    nn.init.normal_(module.bias)
    return module, Int8LayerNorm.from_float(module, block_size)


def rms_norm(block_size=32):
    module = nn.RMSNorm(C, eps=1e-6)
    nn.init.normal_(module.weight, 1, 0.3)
    return module, Int8RMSNorm.from_float(module, block_size)


MODULES = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "gelu": lambda block_size=32: (nn.GELU(), Int8Activation("gelu", block_size)),
    "gelu_tanh": lambda block_size=32: (nn.GELU("tanh"), Int8Activation("gelu_tanh", block_size)),
    "silu": lambda block_size=32: (nn.SiLU(), Int8Activation("silu", block_size)),
    "relu": lambda block_size=32: (nn.ReLU(), Int8Activation("relu", block_size)),
    "dropout": lambda block_size=32: (nn.Identity(), Int8Dropout(0.0, block_size)),
}


def float_values(x: BlockTensor) -> torch.Tensor:
    return dequantize_blocks_ref(x.q, x.scale, x.block_size).double()


def assert_rounded(got, exact):
    """Check that ``got`` is a BlockTensor within half of its own step of ``exact``."""
    assert isinstance(got, BlockTensor)
    allowed = STEP * spread_scale(got.scale, got.shape, got.block_size).double()
    assert ((float_values(got) - exact).abs() <= allowed).all()


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("name", MODULES)
def test_forward_and_backward(name, block_size):
    """Compare with the float module in float64 on the dequantized operands; gradients of blocks must be blocks."""
    reference, module = MODULES[name](block_size)
    reference = copy.deepcopy(reference).double()
    x = quantize_blocks(torch.randn(3, 50, C), block_size).detach().requires_grad_()
    exact = float_values(x.detach()).requires_grad_()
    y, right = module(x), reference(exact)
    assert_rounded(y.detach(), right.detach())
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    gradient = quantize_blocks(torch.randn(3, 50, C), block_size)
    y.backward(gradient)
    right.backward(float_values(gradient))
    assert_rounded(x.grad, exact.grad)
    for mine, other in zip(module.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine.grad.double(), other.grad, rtol=1e-4, atol=1e-4 * float(other.grad.abs().max()))


@pytest.mark.parametrize("name", MODULES)
def test_float_in(name):
    """A float input is quantized, and its gradient is float."""
    _, module = MODULES[name]()
    x = torch.randn(50, C, dtype=torch.bfloat16, requires_grad=True)
    y = module(x)
    assert isinstance(y, BlockTensor)
    assert y.dtype == torch.bfloat16
    y.dequantize().float().square().sum().backward()
    assert type(x.grad) is torch.Tensor
    assert x.grad.dtype == torch.bfloat16
    same = module(quantize_blocks(x.detach(), 32))
    assert torch.equal(same.q, y.q)


@pytest.mark.parametrize("block_size", [32, (1, 128)])
@pytest.mark.parametrize("make", [layer_norm, rms_norm])
def test_a_norm_takes_the_statistics_of_the_addition(make, block_size):
    """Its results with statistics equal those without, up to rounding."""
    _, module = make(block_size)
    a, b = (quantize_blocks(torch.randn(40, C), block_size) for _ in range(2))
    z, scale, statistics = torch.ops.qframework.block_add(a.q, a.scale, b.q, b.scale, block_size, True)
    with_them, without = (module(BlockTensor(z, scale, block_size, torch.float32, each)) for each in (statistics, None))
    off = (with_them.q.int() - without.q.int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() < 1e-3
    wrong = module(BlockTensor(z, scale, block_size, torch.float32, statistics + 1))
    assert not torch.equal(wrong.dequantize(), without.dequantize())


@pytest.mark.parametrize("make", [layer_norm, rms_norm])
def test_state_dicts_are_those_of_the_float_module(make):
    reference, module = make()
    assert list(module.state_dict()) == list(reference.state_dict())
    assert module.weight is reference.weight
    fresh = type(module)(C, reference.eps)
    fresh.load_state_dict(reference.state_dict())
    assert torch.equal(fresh.weight, reference.weight)


def test_a_llama_norm_keeps_its_epsilon():
    class LlamaRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(C))
            self.variance_epsilon = 0.5

    module = Int8RMSNorm.from_float(LlamaRMSNorm())
    assert module.eps == 0.5
    x = torch.full((4, C), 2.0)
    assert torch.allclose(module(x).dequantize(), x / 4.5**0.5, rtol=1e-2)


class GatedMLP(nn.Module):
    """The float module that Int8GatedMLP replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(C, 90), nn.Linear(C, 90), nn.Linear(90, C)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("block_size", [32, (1, 128)])
def test_gated_mlp(block_size):
    """Close to the float module within the error of 8 bits in five products, with the same names of parameters."""
    reference = GatedMLP()
    linears = (Int8Linear.from_float(each, block_size) for each in reference.children())
    module = Int8GatedMLP(*linears, "silu", block_size)
    assert list(module.state_dict()) == list(reference.state_dict())
    x = torch.randn(64, C)

    def gradients(model, call):
        model.zero_grad()
        return [each.clone() for each in loss_and_gradients(call, model, x)]

    exact = gradients(reference, reference)
    got = gradients(module, lambda given: module(quantize_blocks(given, block_size)).dequantize())
    for mine, right in zip(got, exact, strict=True):
        assert float((mine - right).norm() / right.norm()) < 0.06


def test_gated_activation_of_a_float_and_a_block_operand():
    gate = torch.randn(40, C, requires_grad=True)
    up = quantize_blocks(torch.randn(40, C)).detach().requires_grad_()
    y = gated_activation(gate, up, "gelu")
    assert isinstance(y, BlockTensor)
    y.sum().backward()
    assert type(gate.grad) is torch.Tensor
    assert isinstance(up.grad, BlockTensor)


def test_dropout_repeats_with_the_generator_and_in_the_backward_pass():
    module = Int8Dropout(0.3)
    x = torch.ones(64, C)

    def run():
        torch.manual_seed(3)
        given = x.clone().requires_grad_()
        y = module(given).dequantize()
        y.sum().backward()
        return y.detach(), given.grad

    (y, gradient), (again, _) = run(), run()
    assert torch.equal(y, again)
    assert torch.equal(y == 0, gradient == 0)
    assert 0.2 < float((y == 0).float().mean()) < 0.4
    torch.manual_seed(4)
    assert not torch.equal(module(x).dequantize(), y)
    module.eval()
    assert torch.equal(module(x).dequantize(), quantize_blocks(x).dequantize())


class Block(nn.Module):
    """A residual block of all these modules."""

    def __init__(self, block_size=32) -> None:
        super().__init__()
        self.block_size, size = block_size, {"block_size": block_size}
        self.norm, self.up = Int8LayerNorm(C, **size), Int8Linear(C, 90, **size)
        self.activation, self.down = Int8Activation("gelu", **size), Int8Linear(90, C, **size)
        self.dropout, self.rms = Int8Dropout(0.2, **size), Int8RMSNorm(C, 1e-6, **size)
        linears = Int8Linear(C, 80, **size), Int8Linear(C, 80, **size), Int8Linear(80, C, **size)
        self.mlp = Int8GatedMLP(*linears, **size)

    def forward(self, x):
        x = quantize_blocks(x, self.block_size)
        x = x + self.dropout(self.down(self.activation(self.up(self.norm(x)))))
        return (x + self.mlp(self.rms(x))).dequantize()


@pytest.mark.parametrize("block_size", [32, (1, 128)])
def test_a_block_stays_in_int8_and_checkpointing_repeats_it(block_size):
    """Also the mask: checkpointing restores the generator before it computes the block again."""
    model, x = Block(block_size), torch.randn(3, 20, C)
    fallbacks.clear()

    def run(call):
        torch.manual_seed(1)
        return loss_and_gradients(call, model, x)

    expected = run(model)
    assert fallbacks == {}
    for reentrant in (True, False):
        got = run(lambda given, reentrant=reentrant: checkpoint(model, given, use_reentrant=reentrant))
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("block_size", [32, (1, 128)])
def test_a_block_compiles_without_graph_breaks(fresh_dynamo, block_size):
    model, x = Block(block_size).eval(), torch.randn(3, 20, C)
    expected = loss_and_gradients(model, model, x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for one, other in zip(loss_and_gradients(compiled, model, x), expected, strict=True):
        assert torch.equal(one, other)


def test_saved_tensors_take_one_byte_per_value():
    saved = []
    module = nn.Sequential(Int8LayerNorm(128), Int8Activation("gelu"), Int8Dropout(0.1))
    x = quantize_blocks(torch.randn(512, 128)).detach().requires_grad_()

    def pack(tensor):
        inside = [tensor.q, tensor.scale] if isinstance(tensor, BlockTensor) else [tensor]
        saved.append(sum(each.numel() * each.element_size() for each in inside))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x)
    values = x.numel()
    assert 2 * values <= sum(saved) < 2.2 * values  # the inputs of LayerNorm and GELU, and vectors


def test_bad_input():
    with pytest.raises(
        UnsupportedError, match=r"Int8LayerNorm: normalized_shape must have one dimension, the last, got \(3, 4\)"
    ):
        Int8LayerNorm((3, 4))
    with pytest.raises(UnsupportedError, match=r"Int8RMSNorm: block_size must be one of 32, 64, 128, .*, got 16"):
        Int8RMSNorm(4, block_size=16)
    with pytest.raises(UnsupportedError, match=r"Int8Activation: kind must be one of 'gelu', .*, got 'mish'"):
        Int8Activation("mish")
    with pytest.raises(ValueError, match="dropout probability"):
        Int8Dropout(2.0)
    with pytest.raises(QFrameworkError, match=r"must be in blocks of \(1, 128\), got blocks of 64"):
        Int8Activation("gelu")(quantize_blocks(torch.randn(4, 64), 64))
    modules = (layer_norm, rms_norm, *(lambda size, kind=kind: MODULES[kind](size) for kind in ("gelu", "dropout")))
    for make in modules:
        assert "block_size=(1, 128)" in repr(make([1, 128])[1])
        assert make([32, 32])[1].block_size == 32
    with pytest.raises(QFrameworkError, match=r"weight must have shape \(64,\), got \(70,\)"):
        Int8LayerNorm(C)(torch.randn(4, 64))
