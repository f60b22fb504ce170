"""Dropout on blocks, on every implementation, against float64 and Philox in Python's integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from block_oracle import BLOCK_SIZES, UNIT, assert_blocks, block_of, operand, values

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels import block_dropout, block_quantize
from qframework.kernels.blocks.dropout import BLOCK_DROPOUT


@pytest.fixture
def dropout(implementation):
    return {"cpu": block_dropout, "triton": BLOCK_DROPOUT.cuda}[implementation]


def seed_on(place, value=0x1234_5678_9ABC):
    return torch.tensor([value], device=place)


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
def test_dropout_keeps_scales_that_are_nan_or_infinite(dropout, place, p):
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


def test_the_share_of_dropped_values_is_p(dropout, place):
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
def test_probabilities_zero_and_one(dropout, place, p, factor):
    q, scale = operand((40, 70), 32, place)
    y, y_scale = dropout(q, scale, p, seed_on(place), 32)
    assert torch.equal(values(y, y_scale, 32), values(q, scale, 32) * factor)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64)])
def test_empty(dropout, place, shape):
    q = block_quantize(torch.empty(shape, device=place), 32)
    assert dropout(*q, 0.5, seed_on(place), 32)[0].shape == shape


@pytest.mark.parametrize("size", [32, (1, 128)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_stay_in_their_block(dropout, place, bad, size):
    x = torch.ones(40, 140, device=place)
    x[2, 3] = bad
    result = dropout(*block_quantize(x, size), 0.1, seed_on(place), size)
    assert torch.equal(values(*result, size).isfinite(), ~block_of(2, 3, (40, 140), size))


def test_opcheck(device):
    x = operand((2, 20, 40), 32, device)
    torch.library.opcheck(torch.ops.qframework.block_dropout.default, (*x, 0.1, seed_on(device), 32))


def test_bad_input():
    x = operand((40, 70), 32, "cpu")
    with pytest.raises(QFrameworkError, match=r"block_dropout: p must be between 0 and 1, got 1\.5"):
        block_dropout(*x, 1.5, seed_on("cpu"), 32)
    with pytest.raises(QFrameworkError, match=r"block_dropout: seed must have one value, got shape \(2,\)"):
        block_dropout(*x, 0.5, torch.zeros(2, dtype=torch.int64), 32)
    with pytest.raises(UnsupportedError, match=r"block_dropout: seed must have dtype int64, got torch.float32"):
        block_dropout(*x, 0.5, torch.zeros(1), 32)
