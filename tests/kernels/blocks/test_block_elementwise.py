"""Sums, products, dropout and sums over rows of blocks, on every implementation, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from block_oracle import BLOCK_SIZES, CASES, UNIT, assert_blocks, block_of, operand, values

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels import block_add, block_dropout, block_mul, block_quantize, block_sum_rows
from qframework.kernels.blocks import statistics as row_statistics
from qframework.kernels.blocks.dropout import BLOCK_DROPOUT
from qframework.kernels.blocks.elementwise import BLOCK_ADD, BLOCK_MUL
from qframework.kernels.blocks.sum_rows import BLOCK_SUM_ROWS

OPERATORS = {
    "cpu": (block_add, block_mul, block_dropout, block_sum_rows),
    "triton": (
        BLOCK_ADD.cuda,
        BLOCK_MUL.cuda,
        BLOCK_DROPOUT.cuda,
        BLOCK_SUM_ROWS.cuda,
    ),
}


@pytest.fixture
def add(implementation):
    return OPERATORS[implementation][0]


@pytest.fixture
def mul(implementation):
    return OPERATORS[implementation][1]


@pytest.fixture
def dropout(implementation):
    return OPERATORS[implementation][2]


@pytest.fixture
def sum_rows(implementation):
    return OPERATORS[implementation][3]


def seed_on(place, value=0x1234_5678_9ABC):
    return torch.tensor([value], device=place)


def assert_statistics(statistics, z):
    """Mean and biased variance of each row of ``z`` (float64), to float32's precision of the row's own values."""
    z = z.reshape(-1, z.shape[-1])
    mean, variance = z.mean(1), z.var(1, correction=0)
    assert statistics.shape == (z.shape[0], 2)
    got = statistics.cpu().double()
    assert ((got[:, 0] - mean).abs() <= 8 * UNIT * z.abs().mean(1)).all()
    # Tiles are merged around means that are off by a few units of their own: no cancellation in the variance.
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
    """Programs of 32 rows: a whole block, a part of it, or a block each; the last ones are cut off."""
    if implementation == "cpu":
        pytest.skip("the CPU reads rows as a whole")
    z, z_scale = operand(shape, size, place)
    assert_statistics(row_statistics.row_statistics_triton(z, z_scale, size), values(z, z_scale, size))


def test_statistics_of_rows_far_from_zero(add, place):
    """A mean a hundred times the deviation: the difference of E[x^2] and E[x]^2 would be wrong in float32."""
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


def philox(key: int, row: int, group: int, rounds: int = 7) -> list[int]:
    """Philox4x32 in Python's integers: four words for eight columns of a row."""
    c, k0, k1 = [group, row, 0, 0], key & 0xFFFFFFFF, key >> 32
    for _ in range(rounds):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k1, a & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


def test_philox_is_the_published_one():
    """Known answers of Random123 for counter and key zero."""
    assert philox(0, 0, 0) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    assert philox(0, 0, 0, 10) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def mask(key: int, rows: int, columns: int, p: float) -> np.ndarray:
    bits = np.empty((rows, -(-columns // 8) * 8), dtype=np.int64)
    for r in range(rows):
        for group in range(bits.shape[1] // 8):
            halves = [half for word in philox(key, r, group) for half in (word & 0x7FFF, word >> 16 & 0x7FFF)]
            bits[r, 8 * group : 8 * group + 8] = halves
    return bits[:, :columns] >= round(p * 32768)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout(dropout, place, p, block_size):
    """The mask is that of the seed bit for bit, whatever the block size and the implementation."""
    shape = (2, 21, 140)
    q, scale = operand(shape, block_size, place)
    q = torch.where(q == 0, 1, q).to(torch.int8)  # a zero would hide what happened to it
    y, y_scale = dropout(q, scale, p, seed_on(place), block_size)
    kept = torch.from_numpy(mask(0x1234_5678_9ABC, 42, 140, p)).view(shape)
    met = round(p * 32768) / 32768
    exact = torch.where(kept, values(q, scale, block_size) / (1 - met), 0.0)
    assert_blocks(y, y_scale, exact, 3 * UNIT * exact.abs(), block_size)
    assert not y.cpu()[~kept].any()


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_dropout_hides_nothing_that_is_not_finite(dropout, place, p):
    q, scale = operand((64, 96), 32, place)
    scale[0, :2] = torch.tensor([torch.nan, torch.inf])
    finite = torch.isfinite(dropout(q, scale, p, seed_on(place), 32)[1])
    assert finite.tolist() == [[False, False, True], [True, True, True]]


def test_the_gradient_drops_what_the_forward_pass_dropped(dropout, place):
    ones = block_quantize(torch.ones(70, 200, device=place), 32)
    gradient = block_quantize(torch.full((70, 200), -3.0, device=place), 32)
    y, _ = dropout(*ones, 0.3, seed_on(place), 32)
    dx, _ = dropout(*gradient, 0.3, seed_on(place), 32)
    assert torch.equal(y == 0, dx == 0)
    other, _ = dropout(*ones, 0.3, seed_on(place, 7), 32)
    assert not torch.equal(y == 0, other == 0)


def test_dropout_drops_as_often_as_asked(dropout, place):
    """Five standard deviations of a binomial; rows, columns and neighbours are not alike."""
    ones = block_quantize(torch.ones(256, 512, device=place), 32)
    dropped = (dropout(*ones, 0.1, seed_on(place), 32)[0] == 0).float()
    deviation = (0.1 * 0.9 / dropped.numel()) ** 0.5
    assert abs(float(dropped.mean()) - 0.1) < 5 * deviation
    for apart in (1, 2, 4, 8):
        both = (dropped[:, apart:] * dropped[:, :-apart]).mean()
        assert abs(float(both) - 0.01) < 6 * (0.01 * 0.99 / dropped.numel()) ** 0.5
    assert (dropped[1:] != dropped[:-1]).any(1).all()


@pytest.mark.parametrize(("p", "factor"), [(0.0, 1.0), (1.0, 0.0)])
def test_dropout_of_nothing_and_of_everything(dropout, place, p, factor):
    q, scale = operand((40, 70), 32, place)
    y, y_scale = dropout(q, scale, p, seed_on(place), 32)
    assert torch.equal(values(y, y_scale, 32), values(q, scale, 32) * factor)


@pytest.mark.parametrize(("shape", "block_size"), [*CASES, ((100, 40), 32), ((100, 40), (1, 128))])
def test_sum_rows(sum_rows, place, shape, block_size):
    x = operand(shape, block_size, place)
    rows = values(*x, block_size).reshape(-1, shape[-1])
    got = sum_rows(*x, block_size)
    assert got.shape == (shape[-1],)
    assert got.dtype == torch.float32
    # Each addition may round the sum so far; those of a stretch and of stretches are short.
    assert ((got.cpu().double() - rows.sum(0)).abs() <= 64 * UNIT * rows.abs().sum(0)).all()
    assert torch.equal(got, sum_rows(*x, block_size))


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64)])
def test_empty(add, mul, dropout, sum_rows, place, shape):
    q = block_quantize(torch.empty(shape, device=place), 32)
    assert add(*q, *q, 32, True)[2].shape == (0, 2)
    assert mul(*q, *q, 32)[0].shape == shape
    assert dropout(*q, 0.5, seed_on(place), 32)[0].shape == shape
    assert torch.equal(sum_rows(*q, 32), torch.zeros(64, device=place))


@pytest.mark.parametrize("size", [32, (1, 128)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_are_not_hidden(add, mul, dropout, sum_rows, place, bad, size):
    x = torch.ones(40, 140, device=place)
    x[2, 3] = bad
    x, good = block_quantize(x, size), block_quantize(torch.ones(40, 140, device=place), size)
    z, z_scale, statistics = add(*x, *good, size, True)
    hit = block_of(2, 3, (40, 140), size)
    for result in ((z, z_scale), mul(*x, *good, size), dropout(*x, 0.1, seed_on(place), size)):
        assert torch.equal(values(*result, size).isfinite(), ~hit)
    assert torch.equal(statistics.isfinite().cpu(), ~hit[:, :1].expand(40, 2))
    assert torch.equal(sum_rows(*x, size).isfinite().cpu(), ~hit[2])


def test_opcheck(device):
    x, y = operand((2, 20, 40), 32, device), operand((2, 20, 40), 32, device, seed=1)
    ops = torch.ops.qframework
    torch.library.opcheck(ops.block_add.default, (*x, *y, 32, True))
    torch.library.opcheck(ops.block_add.default, (*x, *y, 32))
    torch.library.opcheck(ops.block_mul.default, (*x, *y, 32))
    torch.library.opcheck(ops.block_dropout.default, (*x, 0.1, seed_on(device), 32))
    torch.library.opcheck(ops.block_sum_rows.default, (*x, 32))


def test_bad_input():
    x, y = operand((40, 70), 32, "cpu"), operand((1, 70), 32, "cpu")
    with pytest.raises(QFrameworkError, match=r"block_add: y must have the shape of x, \(40, 70\), got \(1, 70\)"):
        block_add(*x, *y, 32)
    with pytest.raises(QFrameworkError, match=r"block_mul: y must have the shape of x, \(40, 70\), got \(1, 70\)"):
        block_mul(*x, *y, 32)
    with pytest.raises(UnsupportedError, match="block_size=16 is unsupported"):
        block_add(*x, *x, 16)
    with pytest.raises(QFrameworkError, match=r"block_dropout: p is 1\.5; accepted: 0 to 1"):
        block_dropout(*x, 1.5, seed_on("cpu"), 32)
    with pytest.raises(QFrameworkError, match=r"block_dropout: seed has shape \(2,\); accepted: one value"):
        block_dropout(*x, 0.5, torch.zeros(2, dtype=torch.int64), 32)
    with pytest.raises(UnsupportedError, match=r"block_dropout: seed must have dtype int64, got torch.float32"):
        block_dropout(*x, 0.5, torch.zeros(1), 32)
    with pytest.raises(UnsupportedError, match=r"block_sum_rows: x must have dtype int8, got torch.float32"):
        block_sum_rows(x[0].float(), x[1], 32)
