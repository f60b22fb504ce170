"""activation.py and gated_activation.py on every implementation, against float64 autograd."""

from __future__ import annotations

import pytest
import torch
from block_oracle import BLOCK_SIZES, SHAPES, assert_blocks, block_of, operand, values
from torch.nn import functional as F

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels import (
    block_activation,
    block_activation_backward,
    block_gated_activation,
    block_gated_activation_backward,
    block_quantize,
)
from qframework.kernels.blocks.activation import BLOCK_ACTIVATION, BLOCK_ACTIVATION_BACKWARD, KINDS
from qframework.kernels.blocks.gated_activation import BLOCK_GATED_ACTIVATION, BLOCK_GATED_ACTIVATION_BACKWARD

FUNCTIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}
# Triton's own: float32's roundings of x and exponentials, and the fit that makes a tanh of gelu's integral.
ROUNDED, FITTED = 5e-6, {"gelu": 4e-5}
TANH_OFF = 2.0**-11  # of NVIDIA's instruction, which is 1 from 8 on
OPERATORS = {
    "cpu": (
        block_activation,
        block_activation_backward,
        block_gated_activation,
        block_gated_activation_backward,
    ),
    "triton": (
        BLOCK_ACTIVATION.cuda,
        BLOCK_ACTIVATION_BACKWARD.cuda,
        BLOCK_GATED_ACTIVATION.cuda,
        BLOCK_GATED_ACTIVATION_BACKWARD.cuda,
    ),
}


@pytest.fixture
def operators(implementation):
    return OPERATORS[implementation]


def tanh_off(kind, x):
    """The allowed error of tanh in f(x) = x / 2 (1 + tanh)."""
    hardware = TANH_OFF if torch.cuda.is_available() and kind != "relu" else 0.0
    return FITTED.get(kind, 0.0) + hardware * (x.detach().abs() <= 16)


def value_off(kind, x):
    return x.detach().abs() / 2 * tanh_off(kind, x) + ROUNDED * (1 + x.detach().abs())


def slope_off(kind, x):
    return ROUNDED + (tanh_off(kind, x) / 2 if kind == "gelu" else 0.0)


def test_every_kind_is_tested():
    assert set(FUNCTIONS) == set(KINDS)


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_forward_and_backward(operators, place, kind, block_size):
    forward, backward, _, _ = operators
    shape = (3, 50, 130)
    x, dy = operand(shape, block_size, place), operand(shape, block_size, place, seed=1)
    exact = values(*x, block_size).requires_grad_()
    y = FUNCTIONS[kind](exact)
    assert_blocks(*forward(*x, kind, block_size), y.detach(), value_off(kind, exact), block_size)
    gradient = values(*dy, block_size)
    y.backward(gradient)
    assert_blocks(*backward(*dy, *x, kind, block_size), exact.grad, slope_off(kind, exact) * gradient.abs(), block_size)


@pytest.mark.parametrize(
    ("shape", "size"), [*[(shape, 32) for shape in SHAPES], *[(shape, (1, 128)) for shape in SHAPES if shape[0] != 3]]
)
def test_shapes(operators, place, shape, size):
    """Other tests run (3, 50, 130), the slowest, with every kind."""
    forward, backward, gated_forward, gated_backward = operators
    x, dy = operand(shape, size, place), operand(shape, size, place, seed=1)
    exact, gradient = values(*x, size), values(*dy, size)
    assert_blocks(*forward(*x, "relu", size), exact.relu(), 0.0, size)
    assert_blocks(*backward(*dy, *x, "relu", size), gradient * (exact > 0), 0.0, size)
    assert_blocks(*gated_forward(*x, *dy, "relu", size), exact.relu() * gradient, 0.0, size)
    dgate, dgate_scale, dup, dup_scale = gated_backward(*dy, *x, *dy, "relu", size)
    assert_blocks(dgate, dgate_scale, gradient.square() * (exact > 0), 0.0, size)
    assert_blocks(dup, dup_scale, exact.relu() * gradient, 0.0, size)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_gated(operators, place, kind, block_size):
    _, _, forward, backward = operators
    shape = (2, 35, 150)
    gate, up, dy = (operand(shape, block_size, place, seed) for seed in range(3))
    g, u = values(*gate, block_size).requires_grad_(), values(*up, block_size).requires_grad_()
    y = FUNCTIONS[kind](g) * u
    error = value_off(kind, g)
    assert_blocks(*forward(*gate, *up, kind, block_size), y.detach(), error * u.detach().abs(), block_size)
    gradient = values(*dy, block_size)
    y.backward(gradient)
    dgate, dgate_scale, dup, dup_scale = backward(*dy, *gate, *up, kind, block_size)
    assert_blocks(dgate, dgate_scale, g.grad, slope_off(kind, g) * (gradient * u).detach().abs(), block_size)
    assert_blocks(dup, dup_scale, u.grad, error * gradient.abs(), block_size)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_activations_of_large_inputs(operators, place, kind):
    """Values for which a polynomial or an exponential alone is wrong; each has its own scale."""
    far = torch.tensor([-1e4, -300.0, -60.0, -16.0, -8.0, -5.5, 5.5, 8.0, 16.0, 60.0, 300.0, 1e4], device=place)
    size = (1, 128)
    x, dy = block_quantize(far[:, None], size), block_quantize(torch.ones_like(far)[:, None], size)
    exact = values(*x, size).requires_grad_()
    y = FUNCTIONS[kind](exact)
    y.sum().backward()
    assert_blocks(*operators[0](*x, kind, size), y.detach(), value_off(kind, exact), size)
    assert_blocks(*operators[1](*dy, *x, kind, size), exact.grad, slope_off(kind, exact), size)


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize(("bad", "size"), [(float("nan"), 32), (float("nan"), (1, 128)), (float("inf"), (1, 128))])
def test_nan_and_infinity_are_not_hidden(operators, place, kind, bad, size):
    x = torch.ones(40, 140, device=place)
    x[2, 3] = bad
    good = block_quantize(torch.ones(40, 140, device=place), size)
    blocks = block_quantize(x, size)
    results = [operators[0](*blocks, kind, size), operators[1](*blocks, *good, kind, size)]
    if kind != "relu":  # its slope at NaN is 1, as PyTorch has it
        results.append(operators[1](*good, *blocks, kind, size))
    hit = block_of(2, 3, (40, 140), size)
    for q, scale in results:
        assert torch.equal(values(q, scale, size).isfinite(), ~hit)


def test_zeros_stay_zero(operators, place):
    zeros = block_quantize(torch.zeros(40, 70, device=place), 32)
    for kind in FUNCTIONS:
        for q, _ in (operators[0](*zeros, kind, 32), operators[1](*zeros, *zeros, kind, 32)):
            assert not q.any()


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64)])
def test_empty(operators, place, shape):
    q = block_quantize(torch.empty(shape, device=place), 32)
    assert operators[0](*q, "gelu", 32)[0].shape == shape
    assert operators[1](*q, *q, "gelu", 32)[0].shape == shape
    assert operators[2](*q, *q, "gelu", 32)[1].shape == (0, 2)
    assert operators[3](*q, *q, *q, "gelu", 32)[3].shape == (0, 2)


def test_operands_may_be_strided(operators, place):
    q, scale = operand((64, 96), 32, place)
    turned = q.t().contiguous().t(), scale.t().contiguous().t()
    for one, other in zip(operators[0](q, scale, "silu", 32), operators[0](*turned, "silu", 32), strict=True):
        assert torch.equal(one, other)


def test_opcheck(device):
    x, dy = operand((2, 20, 40), 32, device), operand((2, 20, 40), 32, device, seed=1)
    ops = torch.ops.qframework
    torch.library.opcheck(ops.block_activation.default, (*x, "gelu", 32))
    torch.library.opcheck(ops.block_activation_backward.default, (*dy, *x, "silu", 32))
    torch.library.opcheck(ops.block_gated_activation.default, (*x, *dy, "silu", 32))
    torch.library.opcheck(ops.block_gated_activation_backward.default, (*dy, *x, *dy, "silu", 32))


def test_bad_input():
    x, y = operand((40, 70), 32, "cpu"), operand((41, 70), 32, "cpu")
    with pytest.raises(
        UnsupportedError, match=r"block_activation: kind must be one of 'gelu', 'gelu_tanh', .*, got 'tanh'"
    ):
        block_activation(*x, "tanh", 32)
    with pytest.raises(UnsupportedError, match=r"block_size must be one of 32, 64, 128, .*, got 48"):
        block_activation(*x, "gelu", 48)
    with pytest.raises(
        QFrameworkError, match=r"x's scale must have shape \(1, 2\) for x \(40, 70\) in blocks of 64, got \(2, 3\)"
    ):
        block_activation(*x, "gelu", 64)
    with pytest.raises(
        QFrameworkError, match=r"block_activation_backward: x must have the shape of dy, \(40, 70\), got \(41, 70\)"
    ):
        block_activation_backward(*x, *y, "gelu", 32)
    with pytest.raises(
        QFrameworkError, match=r"block_gated_activation: up must have the shape of gate, \(40, 70\), got \(41, 70\)"
    ):
        block_gated_activation(*x, *y, "gelu", 32)
    with pytest.raises(UnsupportedError, match=r"dy must have dtype int8, got torch.float32"):
        block_gated_activation_backward(x[0].float(), x[1], *x, *x, "gelu", 32)
