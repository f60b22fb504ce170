"""A massive first token, as in language models, affects only the tokens that share scales with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from qframework.kernels.blocks.format import BLOCK_SIZES, CanonicalSize, block_shape
from qframework.training import quantize_blocks
from qframework.training.linear import Int8Linear
from qframework.training.norm import Int8LayerNorm

SEQUENCES, TOKENS, CHANNELS, TIMES = 2, 256, 256, 300
# The mean square of a rounding is step^2 / 12, a step 1 / 127 of a block's largest: of normal ones, 4.5 deviations.
ROUNDING = 4.5 / 127 / 12**0.5
each_size = pytest.mark.parametrize("block_size", BLOCK_SIZES)


def residual() -> Tensor:
    """``(SEQUENCES, TOKENS, CHANNELS)``; the first token of each sequence is TIMES as large as the others."""
    x = torch.randn(SEQUENCES, TOKENS, CHANNELS)
    x[:, 0] *= TIMES
    return x


def others(block_size: CanonicalSize) -> tuple[slice, slice]:
    """Tokens of a sequence that share scales with the first one, and all later tokens."""
    rows = block_shape(block_size)[0]
    return slice(1, rows), slice(rows, TOKENS)


def error(got: Tensor, exact: Tensor, tokens: slice) -> float:
    """The relative error of these tokens."""
    exact = exact.detach().double()[:, tokens]
    return float((got.detach().double()[:, tokens] - exact).norm() / exact.norm())


@each_size
def test_the_residual_stream(block_size: CanonicalSize) -> None:
    """In blocks with a massive token values below half of its step become zero; other blocks do not change."""
    x = residual()
    got = quantize_blocks(x, block_size).dequantize()
    near, behind = others(block_size)
    assert error(got, x, behind) < ROUNDING
    assert (got - x)[:, behind].abs().max() <= 1.001 * x[:, behind].abs().max() / 254
    if near.start == near.stop:
        return
    half_a_step = x[:, 0].abs().unflatten(-1, (-1, block_shape(block_size)[1])).amax(-1).min() / 254
    lost = torch.where(x.abs() < half_a_step, x, 0.0)[:, near]
    assert error(got, x, near) >= float(lost.norm() / x[:, near].norm()) > 0.6


@each_size
def test_a_normalization_followed_by_a_linear(block_size: CanonicalSize) -> None:
    """Results, gradients of tokens and of the weight; each has at most six roundings behind it, which are independent.

    What is beside a massive token is no longer itself once it is normalized, and the weight's gradient knows it.
    """
    norm, linear = nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, CHANNELS)
    x, grad = residual(), torch.randn(SEQUENCES, TOKENS, CHANNELS)
    exact_x = x.clone().requires_grad_()
    exact = linear(norm(exact_x))
    exact.backward(grad)
    exact_weight = linear.weight.grad
    linear.weight.grad = None
    got_x = x.clone().requires_grad_()
    blocks = quantize_blocks(got_x, block_size)
    got = Int8Linear.from_float(linear, block_size, "float")(Int8LayerNorm.from_float(norm, block_size)(blocks))
    got.backward(grad)
    assert got_x.grad is not None
    assert exact_x.grad is not None
    near, behind = others(block_size)
    limit = 6**0.5 * ROUNDING
    assert error(got, exact, behind) < limit
    assert error(got_x.grad, exact_x.grad, behind) < limit
    of_weight = error(linear.weight.grad[None], exact_weight[None], slice(None))
    if near.start == near.stop:
        assert of_weight < limit
        return
    assert error(got, exact, near) > 0.5
    assert error(got_x.grad, exact_x.grad, near) > 0.5
    assert of_weight > 0.2
