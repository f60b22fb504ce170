"""elementwise.py and statistics.py: sums and products of blocks, and row statistics, against float64."""

from __future__ import annotations

import pytest
import torch
from block_oracle import BLOCK_SIZES, CASES, UNIT, assert_blocks, block_of, operand, values

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels import block_add, block_mul, block_quantize
from qframework.kernels.blocks import statistics as row_statistics
from qframework.kernels.blocks.elementwise import BLOCK_ADD, BLOCK_MUL


@pytest.fixture
def add(implementation):
    return {"cpu": block_add, "triton": BLOCK_ADD.cuda}[implementation]


@pytest.fixture
def mul(implementation):
    return {"cpu": block_mul, "triton": BLOCK_MUL.cuda}[implementation]


def assert_statistics(statistics, z):
    """Mean and biased variance of each row of ``z`` (float64), to float32's precision of the row's own values."""
    z = z.reshape(-1, z.shape[-1])
    mean, variance = z.mean(1), z.var(1, correction=0)
    assert statistics.shape == (z.shape[0], 2)
    got = statistics.cpu().double()
    assert ((got[:, 0] - mean).abs() <= 8 * UNIT * z.abs().mean(1)).all()
    # Tiles are merged around means with an error of a few units, without cancellation in the variance.
    assert ((got[:, 1] - variance).abs() <= 64 * UNIT * variance + (16 * UNIT * z.abs().amax(1)).square()).all()


@pytest.mark.parametrize(("shape", "block_size"), CASES)
def test_add_and_its_statistics(add, place, shape, block_size):
    x, y = operand(shape, block_size, place), operand(shape, block_size, place, seed=1)
    z, z_scale, statistics = add(*x, *y, block_size, True)
    exact = values(*x, block_size) + values(*y, block_size)
    rounding = 3 * UNIT * (values(*x, block_size).abs() + values(*y, block_size).abs())
    assert_blocks(z, z_scale, exact, rounding, block_size)
    assert_statistics(statistics, values(z, z_scale, block_size))
    without = add(*x, *y, block_size, False)
    assert torch.equal(without[0], z)
    assert without[2].shape == (0, 2)


@pytest.mark.parametrize("size", [32, (1, 128)])
@pytest.mark.parametrize("of_whole_rows", [True, False])
def test_statistics_of_long_rows(place, implementation, monkeypatch, of_whole_rows, size):
    """More columns than a program reads at a time, and more tiles than one merges at a time."""
    if implementation == "cpu":
        pytest.skip("the CPU reads rows as a whole")
    monkeypatch.setattr(row_statistics, "ROW_VALUES", 256)
    monkeypatch.setattr(row_statistics, "MERGED_TILES", 2)
    x = 3.0 + torch.randn(7, 1100) + torch.arange(1100) / 100
    z, z_scale = (each.to(place) for each in block_quantize(x, size))
    if of_whole_rows:
        found = row_statistics.row_statistics_triton(z, z_scale, size)
    else:
        zeros = (each.to(place) for each in block_quantize(torch.zeros_like(x), size))
        z, z_scale, found = BLOCK_ADD.cuda(z, z_scale, *zeros, size, True)
    assert_statistics(found, values(z, z_scale, size))


@pytest.mark.parametrize(
    ("shape", "size"), [((40, 300), 32), ((66, 300), 128), ((66, 300), (32, 128)), ((40, 300), (1, 128))]
)
def test_statistics_of_whole_rows(place, implementation, shape, size):
    """A program has 32 rows: a whole block, a part of one, or a block each; the last ones are incomplete."""
    if implementation == "cpu":
        pytest.skip("the CPU reads rows as a whole")
    z, z_scale = operand(shape, size, place)
    assert_statistics(row_statistics.row_statistics_triton(z, z_scale, size), values(z, z_scale, size))


def test_statistics_of_rows_far_from_zero(add, place):
    """The mean is a hundred times the deviation, so E[x^2] - E[x]^2 would be inaccurate in float32."""
    x = 1000 + 10 * torch.randn(40, 300)
    x, zeros = block_quantize(x.to(place), 32), block_quantize(torch.zeros(40, 300, device=place), 32)
    z, z_scale, statistics = add(*x, *zeros, 32, True)
    assert_statistics(statistics, values(z, z_scale, 32))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_mul(mul, place, block_size):
    shape = (3, 50, 130)
    x, y = operand(shape, block_size, place), operand(shape, block_size, place, seed=1)
    exact = values(*x, block_size) * values(*y, block_size)
    assert_blocks(*mul(*x, *y, block_size), exact, 3 * UNIT * exact.abs(), block_size)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64)])
def test_empty(add, mul, place, shape):
    q = block_quantize(torch.empty(shape, device=place), 32)
    assert add(*q, *q, 32, True)[2].shape == (0, 2)
    assert mul(*q, *q, 32)[0].shape == shape


@pytest.mark.parametrize("size", [32, (1, 128)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_stay_in_their_block(add, mul, place, bad, size):
    x = torch.ones(40, 140, device=place)
    x[2, 3] = bad
    x, good = block_quantize(x, size), block_quantize(torch.ones(40, 140, device=place), size)
    z, z_scale, statistics = add(*x, *good, size, True)
    hit = block_of(2, 3, (40, 140), size)
    for result in ((z, z_scale), mul(*x, *good, size)):
        assert torch.equal(values(*result, size).isfinite(), ~hit)
    assert torch.equal(statistics.isfinite().cpu(), ~hit[:, :1].expand(40, 2))


def test_opcheck(device):
    x, y = operand((2, 20, 40), 32, device), operand((2, 20, 40), 32, device, seed=1)
    ops = torch.ops.qframework
    torch.library.opcheck(ops.block_add.default, (*x, *y, 32, True))
    torch.library.opcheck(ops.block_add.default, (*x, *y, 32))
    torch.library.opcheck(ops.block_mul.default, (*x, *y, 32))


def test_bad_input():
    x, y = operand((40, 70), 32, "cpu"), operand((1, 70), 32, "cpu")
    with pytest.raises(QFrameworkError, match=r"block_add: y must have the shape of x, \(40, 70\), got \(1, 70\)"):
        block_add(*x, *y, 32)
    with pytest.raises(QFrameworkError, match=r"block_mul: y must have the shape of x, \(40, 70\), got \(1, 70\)"):
        block_mul(*x, *y, 32)
    with pytest.raises(UnsupportedError, match=r"block_size must be one of .*, got 16"):
        block_add(*x, *x, 16)
