"""norm.py and norm_backward.py on every implementation, against float64 autograd."""

from __future__ import annotations

import pytest
import torch
from block_oracle import CASES, UNIT, assert_blocks, block_of, operand, values
from torch.nn import functional as F

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels import (
    block_layer_norm,
    block_layer_norm_backward,
    block_quantize,
    block_rms_norm,
    block_rms_norm_backward,
)
from qframework.kernels.blocks import norm_backward as backward_module
from qframework.kernels.blocks import sum_rows as sums_module
from qframework.kernels.blocks.norm import BLOCK_LAYER_NORM, BLOCK_RMS_NORM
from qframework.kernels.blocks.norm_backward import (
    BLOCK_LAYER_NORM_BACKWARD,
    BLOCK_NORM_GRADIENT,
    BLOCK_NORM_SUMS,
    BLOCK_RMS_NORM_BACKWARD,
)

OPERATORS = {
    "cpu": (block_layer_norm, block_layer_norm_backward, block_rms_norm, block_rms_norm_backward),
    "triton": (
        BLOCK_LAYER_NORM.cuda,
        BLOCK_LAYER_NORM_BACKWARD.cuda,
        BLOCK_RMS_NORM.cuda,
        BLOCK_RMS_NORM_BACKWARD.cuda,
    ),
}
EPS = 1e-5
# Of rstd: an approximate root, and a variance of a few roundings.
ROOT = 16 * UNIT


@pytest.fixture
def layer_norm(implementation):
    return OPERATORS[implementation][0]


@pytest.fixture
def layer_norm_backward(implementation):
    return OPERATORS[implementation][1]


@pytest.fixture
def rms_norm(implementation):
    return OPERATORS[implementation][2]


@pytest.fixture
def rms_norm_backward(implementation):
    return OPERATORS[implementation][3]


def vectors(columns, place, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    return tuple((1 + 0.5 * torch.randn(columns, generator=generator)).to(dtype).to(place) for _ in range(2))


def normalized(x, is_rms):
    """n, rstd and the allowed float32 error of n, for float64 rows."""
    mean = torch.zeros(x.shape[0], 1, dtype=torch.float64) if is_rms else x.mean(1, keepdim=True)
    rstd = ((x - mean).square().mean(1, keepdim=True) + EPS).rsqrt()
    n = (x - mean) * rstd
    return n, rstd, ROOT * n.abs() + 16 * UNIT * (x.abs() + x.abs().mean(1, keepdim=True)) * rstd


def assert_gradients(got, exact, x, dy, weight, is_rms, shape, block_size, added=0.0):
    """dx is within a step plus the error of three float32 terms, gradients of parameters within their roundings."""
    n, rstd, n_off = normalized(x, is_rms)
    g = dy * weight
    terms = g.abs() + g.abs().mean(1, keepdim=True) + n.abs() * (g * n).abs().mean(1, keepdim=True)
    spread = n_off * (g * n).abs().mean(1, keepdim=True) + n.abs() * (g.abs() * n_off).mean(1, keepdim=True)
    error = rstd * (4 * ROOT * terms + 2 * spread) + 4 * UNIT * abs(added)
    assert_blocks(got[0], got[1], exact[0].view(shape), error.view(shape), block_size)
    off = 64 * UNIT * (dy * n).abs().sum(0) + (dy.abs() * n_off).sum(0)
    assert ((got[2].cpu().double() - exact[1]).abs() <= off).all()
    if not is_rms:
        assert ((got[3].cpu().double() - exact[2]).abs() <= 64 * UNIT * dy.abs().sum(0)).all()


@pytest.mark.parametrize(("shape", "block_size"), CASES)
def test_layer_norm(layer_norm, layer_norm_backward, place, shape, block_size):
    x, dy = operand(shape, block_size, place), operand(shape, block_size, place, seed=1)
    weight, bias = vectors(shape[-1], place)
    y, y_scale, mean, rstd = layer_norm(*x, weight, bias, EPS, block_size, None)
    rows = values(*x, block_size).reshape(-1, shape[-1]).requires_grad_()
    w, b = weight.cpu().double().requires_grad_(), bias.cpu().double().requires_grad_()
    exact = F.layer_norm(rows, shape[-1:], w, b, EPS)
    _, _, n_off = normalized(rows.detach(), False)
    error = n_off * w.detach().abs() + 4 * UNIT * (exact.detach().abs() + b.detach().abs())
    assert_blocks(y, y_scale, exact.detach().view(shape), error.view(shape), block_size)
    assert mean.shape == rstd.shape == (rows.shape[0],)
    gradient = values(*dy, block_size).reshape(rows.shape)
    exact.backward(gradient)
    got = layer_norm_backward(*dy, *x, weight, mean, rstd, block_size)
    found = (rows.grad, w.grad, b.grad)
    assert_gradients(got, found, rows.detach(), gradient, w.detach(), False, shape, block_size)


@pytest.mark.parametrize(("shape", "block_size"), CASES)
def test_rms_norm(rms_norm, rms_norm_backward, place, shape, block_size):
    x, dy = operand(shape, block_size, place), operand(shape, block_size, place, seed=1)
    weight, _ = vectors(shape[-1], place)
    y, y_scale, rstd = rms_norm(*x, weight, EPS, block_size, None)
    rows = values(*x, block_size).reshape(-1, shape[-1]).requires_grad_()
    w = weight.cpu().double().requires_grad_()
    exact = rows * (rows.square().mean(1, keepdim=True) + EPS).rsqrt() * w
    _, _, n_off = normalized(rows.detach(), True)
    error = n_off * w.detach().abs() + 4 * UNIT * exact.detach().abs()
    assert_blocks(y, y_scale, exact.detach().view(shape), error.view(shape), block_size)
    gradient = values(*dy, block_size).reshape(rows.shape)
    exact.backward(gradient)
    got = rms_norm_backward(*dy, *x, weight, rstd, block_size)
    assert_gradients(got, (rows.grad, w.grad), rows.detach(), gradient, w.detach(), True, shape, block_size)


@pytest.fixture
def passes(implementation):
    ops = torch.ops.qframework
    return {
        "cpu": (ops.block_norm_sums, ops.block_norm_gradient),
        "triton": (BLOCK_NORM_SUMS.cuda, BLOCK_NORM_GRADIENT.cuda),
    }[implementation]


@pytest.mark.parametrize(("shape", "block_size"), CASES)
@pytest.mark.parametrize("is_rms", [False, True])
def test_another_gradient_is_added_before_rounding(passes, layer_norm, rms_norm, place, shape, block_size, is_rms):
    """As for a residual stream; without another one, the result is bit for bit that of the gradient's own operator."""
    x, dy, z = (operand(shape, block_size, place, seed=seed) for seed in range(3))
    weight, bias = vectors(shape[-1], place)
    if is_rms:
        mean, rstd = None, rms_norm(*x, weight, EPS, block_size, None)[2]
    else:
        mean, rstd = layer_norm(*x, weight, bias, EPS, block_size, None)[2:]
    of_sums, gradient = passes
    operands = *dy, *x, weight, mean, rstd
    sums, *of_parameters = of_sums(*operands, block_size)
    got = *gradient(*operands, sums, *z, block_size), *of_parameters

    rows = values(*x, block_size).reshape(-1, shape[-1]).requires_grad_()
    w = weight.cpu().double().requires_grad_()
    n, _, _ = normalized(rows, is_rms)
    given, others = (values(*each, block_size).reshape(rows.shape) for each in (dy, z))
    (n * w).backward(given)
    exact = rows.grad + others, w.grad, given.sum(0)
    assert_gradients(got, exact, rows.detach(), given, w.detach(), is_rms, shape, block_size, others)

    whole = (BLOCK_RMS_NORM_BACKWARD if is_rms else BLOCK_LAYER_NORM_BACKWARD).implementations
    run = whole["CPU" if gradient is torch.ops.qframework.block_norm_gradient else "CUDA"]
    vectors_of_rows = (rstd,) if is_rms else (mean, rstd)
    expected = run(*dy, *x, weight, *vectors_of_rows, block_size)
    alone = *gradient(*operands, sums, None, None, block_size), *of_parameters
    for one, other in zip(alone, expected, strict=False):  # an RMSNorm's has no dbias
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_of_16_bit(layer_norm, layer_norm_backward, rms_norm, place, dtype):
    x, dy = operand((40, 70), 32, place), operand((40, 70), 32, place, seed=1)
    small, exact = vectors(70, place, dtype), tuple(each.float() for each in vectors(70, place, dtype))
    for one, other in zip(layer_norm(*x, *small, EPS, 32), layer_norm(*x, *exact, EPS, 32), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(rms_norm(*x, small[0], EPS, 32), rms_norm(*x, exact[0], EPS, 32), strict=True):
        assert torch.equal(one, other)
    _, _, mean, rstd = layer_norm(*x, *small, EPS, 32)
    results = [layer_norm_backward(*dy, *x, weight, mean, rstd, 32) for weight in (small[0], exact[0])]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_without_parameters(layer_norm, rms_norm, place):
    x = operand((40, 70), 32, place)
    ones, zeros = torch.ones(70, device=place), torch.zeros(70, device=place)
    pairs = [*zip(layer_norm(*x, None, None, EPS, 32), layer_norm(*x, ones, zeros, EPS, 32), strict=True)]
    pairs += zip(rms_norm(*x, None, EPS, 32), rms_norm(*x, ones, EPS, 32), strict=True)
    for one, other in pairs:
        assert torch.equal(one, other)


@pytest.mark.parametrize("is_rms", [False, True])
def test_gradients_without_parameters(layer_norm, layer_norm_backward, rms_norm, rms_norm_backward, place, is_rms):
    """Not bit for bit those with a weight of ones: without the product, the compiler may fuse two roundings."""
    shape = (40, 70)
    x, dy = operand(shape, 32, place), operand(shape, 32, place, seed=1)
    if is_rms:
        got = rms_norm_backward(*dy, *x, None, rms_norm(*x, None, EPS, 32)[2], 32)
    else:
        got = layer_norm_backward(*dy, *x, None, *layer_norm(*x, None, None, EPS, 32)[2:], 32)
    rows = values(*x, 32).requires_grad_()
    n, _, _ = normalized(rows, is_rms)
    gradient = values(*dy, 32)
    n.backward(gradient)
    found = rows.grad, (gradient * n.detach()).sum(0), gradient.sum(0)
    assert_gradients(got, found, rows.detach(), gradient, torch.ones(70).double(), is_rms, shape, 32)


def test_statistics_are_used(layer_norm, rms_norm, place):
    """Given statistics are used even if wrong, here those of other rows. Empty statistics count as None."""
    x = operand((40, 70), 32, place)
    statistics = torch.stack((torch.full((40,), 0.5), torch.full((40,), 4.0)), 1).to(place)
    y, y_scale, mean, rstd = layer_norm(*x, None, None, 0.0, 32, statistics)
    assert_blocks(y, y_scale, (values(*x, 32) - 0.5) / 2, ROOT * values(*x, 32).abs() + UNIT, 32)
    assert torch.equal(mean, statistics[:, 0])
    assert ((rstd - 0.5).abs() <= ROOT).all()
    y, y_scale, rstd = rms_norm(*x, None, 0.0, 32, statistics)
    exact = values(*x, 32) / 4.25**0.5
    assert_blocks(y, y_scale, exact, ROOT * exact.abs(), 32)
    none = torch.empty(0, 2, device=place)
    for one, other in zip(layer_norm(*x, None, None, EPS, 32, none), layer_norm(*x, None, None, EPS, 32), strict=True):
        assert torch.equal(one, other)


def test_rows_of_equal_values(layer_norm, layer_norm_backward, place):
    """Variance zero: eps alone keeps rstd finite."""
    x = block_quantize(torch.full((40, 70), 3.0, device=place), 32)
    y, y_scale, _, rstd = layer_norm(*x, None, None, EPS, 32)
    assert (rstd.cpu() / EPS**-0.5 - 1).abs().max() < 1e-2
    assert values(y, y_scale, 32).abs().max() <= 16 * UNIT * 3 * EPS**-0.5
    dx, dx_scale, *_ = layer_norm_backward(*x, *x, None, torch.full_like(rstd, 3.0), rstd, 32)
    assert values(dx, dx_scale, 32).isfinite().all()


@pytest.mark.parametrize("size", [32, (1, 128)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_are_not_hidden(layer_norm, layer_norm_backward, place, bad, size):
    """The whole row becomes NaN; rows of other blocks keep their values."""
    good = torch.randn(40, 70, device=place)
    x = good.clone()
    x[2, 3] = bad
    blocks, dy = block_quantize(x, size), block_quantize(good, size)
    y, y_scale, mean, rstd = layer_norm(*blocks, None, None, EPS, size)
    dx, dx_scale, *_ = layer_norm_backward(*dy, *blocks, None, mean, rstd, size)
    hit = block_of(2, 3, (40, 70), size)[:, :1].expand(40, 70)
    for q, scale in ((y, y_scale), (dx, dx_scale)):
        assert torch.equal(values(q, scale, size).isfinite(), ~hit)


def test_results_repeat(layer_norm_backward, place):
    x, dy = operand((100, 40), 32, place), operand((100, 40), 32, place, seed=1)
    mean, rstd = torch.zeros(100, device=place), torch.ones(100, device=place)
    for one, other in zip(*[layer_norm_backward(*dy, *x, None, mean, rstd, 32) for _ in range(2)], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("block_size", [32, 128, (1, 128)])
def test_long_stretches_of_rows_give_the_same_gradients(layer_norm_backward, place, monkeypatch, block_size):
    """As for large tensors, with an incomplete last stretch. Sums of rows, and so dx, do not depend on stretches."""
    shape = (300, 40)
    x, dy = operand(shape, block_size, place), operand(shape, block_size, place, seed=1)
    mean, rstd = torch.full((300,), 0.1, device=place), torch.full((300,), 0.7, device=place)
    weight, _ = vectors(40, place)
    short = layer_norm_backward(*dy, *x, weight, mean, rstd, block_size)
    monkeypatch.setattr(sums_module, "PROGRAMS", 1)
    long = layer_norm_backward(*dy, *x, weight, mean, rstd, block_size)
    assert torch.equal(short[0], long[0])
    assert torch.equal(short[1], long[1])
    for one, other in zip(short[2:], long[2:], strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=64 * UNIT * float(one.abs().max()))


@pytest.mark.parametrize(("rows", "even"), [(512, True), (480, False)])
@pytest.mark.parametrize("block_size", [32, (1, 128)])
def test_tiles_outside_the_tensor_are_masked(monkeypatch, block_size, rows, even):
    """With stretches of 256 rows, whole tiles of the last stretch lie outside a tensor of whole tiles."""
    launched = []
    monkeypatch.setattr(backward_module, "launch", lambda *_: lambda *_, **constants: launched.append(constants))
    monkeypatch.setattr(backward_module, "add_up", lambda *matrices: matrices)
    monkeypatch.setattr(sums_module, "PROGRAMS", 1)
    x, vector = operand((rows, 256), block_size, torch.device("cpu")), torch.ones(rows)
    BLOCK_LAYER_NORM_BACKWARD.cuda(*x, *x, None, vector, vector, block_size)
    assert [constants["STRETCH"] for constants in launched] == [256, 256]
    assert launched[1]["EVEN"] == even


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64)])
def test_empty(layer_norm, layer_norm_backward, rms_norm, place, shape):
    x = block_quantize(torch.empty(shape, device=place), 32)
    y, _, mean, rstd = layer_norm(*x, None, None, EPS, 32)
    assert y.shape == shape
    dx, _, dweight, dbias = layer_norm_backward(*x, *x, None, mean, rstd, 32)
    assert dx.shape == shape
    assert not dweight.any()
    assert not dbias.any()
    assert rms_norm(*x, None, EPS, 32)[2].shape == (0,)


def test_opcheck(device):
    x, dy = operand((2, 20, 40), 32, device), operand((2, 20, 40), 32, device, seed=1)
    weight, bias = vectors(40, device)
    ops = torch.ops.qframework
    torch.library.opcheck(ops.block_layer_norm.default, (*x, weight, bias, EPS, 32, None))
    torch.library.opcheck(ops.block_rms_norm.default, (*x, weight, EPS, 32))
    mean, rstd = torch.zeros(40, device=device), torch.ones(40, device=device)
    torch.library.opcheck(ops.block_layer_norm_backward.default, (*dy, *x, weight, mean, rstd, 32))
    torch.library.opcheck(ops.block_rms_norm_backward.default, (*dy, *x, None, rstd, 32))
    for of_mean in (mean, None):
        torch.library.opcheck(ops.block_norm_sums.default, (*dy, *x, weight, of_mean, rstd, 32))
        sums = torch.zeros(40, 2, device=device)
        for z in ((None, None), dy):
            torch.library.opcheck(ops.block_norm_gradient.default, (*dy, *x, weight, of_mean, rstd, sums, *z, 32))


def test_parameters_that_require_a_gradient_are_refused():
    x, weight, bias = operand((40, 70), 32, "cpu"), torch.ones(70), torch.zeros(70, requires_grad=True)
    with pytest.raises(QFrameworkError, match=r"bias must not require a gradient.*training\.norm\.Int8LayerNorm"):
        block_layer_norm(*x, weight, bias, EPS, 32)
    with pytest.raises(QFrameworkError, match=r"weight must not require a gradient.*training\.norm\.Int8RMSNorm"):
        block_rms_norm(*x, weight.requires_grad_(), EPS, 32)
    with torch.no_grad():
        assert not block_layer_norm(*x, weight, bias, EPS, 32)[1].requires_grad


def test_bad_input():
    x = operand((40, 70), 32, "cpu")
    with pytest.raises(QFrameworkError, match=r"block_layer_norm: weight must have shape \(70,\), got \(7,\)"):
        block_layer_norm(*x, torch.ones(7), None, EPS, 32)
    with pytest.raises(UnsupportedError, match=r"block_rms_norm: weight must have dtype float32.*, got torch.int64"):
        block_rms_norm(*x, torch.ones(70, dtype=torch.int64), EPS, 32)
    with pytest.raises(
        QFrameworkError, match=r"statistics must be None or empty, or have shape \(40, 2\), got \(40, 3\)"
    ):
        block_layer_norm(*x, None, None, EPS, 32, torch.zeros(40, 3))
    with pytest.raises(QFrameworkError, match=r"block_layer_norm_backward: mean must have shape \(40,\), got \(1,\)"):
        block_layer_norm_backward(*x, *x, None, torch.zeros(1), torch.ones(40), 32)
    with pytest.raises(UnsupportedError, match=r"block_size must be one of .*, got 100"):
        block_rms_norm_backward(*x, *x, None, torch.ones(40), 100)
    ops, ones, sums = torch.ops.qframework, torch.ones(40), torch.zeros(40, 2)
    with pytest.raises(QFrameworkError, match=r"block_norm_gradient: sums must have shape \(40, 2\), got \(40,\)"):
        ops.block_norm_gradient(*x, *x, None, None, ones, ones, None, None, 32)
    with pytest.raises(QFrameworkError, match=r"z and z_scale must both be given"):
        ops.block_norm_gradient(*x, *x, None, None, ones, sums, x[0], None, 32)
    with pytest.raises(QFrameworkError, match=r"block_norm_gradient: z must have the shape of x, \(40, 70\)"):
        ops.block_norm_gradient(*x, *x, None, None, ones, sums, *operand((40, 60), 32, "cpu"), 32)
