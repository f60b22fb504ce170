"""Sums over the rows of blocks, on every implementation, against float64."""

from __future__ import annotations

import pytest
import torch
from block_oracle import CASES, UNIT, block_of, operand, values

from qframework.errors import UnsupportedError
from qframework.kernels import block_quantize, block_sum_rows
from qframework.kernels.blocks.sum_rows import BLOCK_SUM_ROWS


@pytest.fixture
def sum_rows(implementation):
    return {"cpu": block_sum_rows, "triton": BLOCK_SUM_ROWS.cuda}[implementation]


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
def test_empty(sum_rows, place, shape):
    q = block_quantize(torch.empty(shape, device=place), 32)
    assert torch.equal(sum_rows(*q, 32), torch.zeros(64, device=place))


@pytest.mark.parametrize("size", [32, (1, 128)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_reach_the_columns_of_their_block(sum_rows, place, bad, size):
    x = torch.ones(40, 140, device=place)
    x[2, 3] = bad
    hit = block_of(2, 3, (40, 140), size)
    assert torch.equal(sum_rows(*block_quantize(x, size), size).isfinite().cpu(), ~hit[2])


def test_opcheck(device):
    torch.library.opcheck(torch.ops.qframework.block_sum_rows.default, (*operand((2, 20, 40), 32, device), 32))


def test_bad_input():
    q, scale = operand((40, 70), 32, "cpu")
    with pytest.raises(UnsupportedError, match=r"block_sum_rows: x must have dtype int8, got torch.float32"):
        block_sum_rows(q.float(), scale, 32)
