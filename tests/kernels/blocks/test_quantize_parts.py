"""block_quantize_parts on every implementation: the blocks of each part, and sums against FP64."""

from __future__ import annotations

import pytest
import torch
from block_oracle import BLOCK_SIZES
from oracle import UNIT, numpy64
from torch.library import opcheck

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels import block_quantize_both, block_quantize_parts
from qframework.kernels.blocks.quantize import BLOCK_QUANTIZE_BOTH
from qframework.kernels.blocks.quantize_parts import BLOCK_QUANTIZE_PARTS, part_multiple

IMPLEMENTATIONS = {
    "cpu": (torch.ops.qframework.block_quantize_parts, torch.ops.qframework.block_quantize_both),
    "triton": (BLOCK_QUANTIZE_PARTS.cuda, BLOCK_QUANTIZE_BOTH.cuda),
}


@pytest.fixture
def quantize_parts(implementation):
    return IMPLEMENTATIONS[implementation][0]


@pytest.fixture
def quantize_both(implementation):
    return IMPLEMENTATIONS[implementation][1]


def parts_of(place, multiples, beside, block_size, dtype=torch.float32):
    """Parts of different sizes, the last with rows apart, as slices of one result are."""
    step = part_multiple(block_size)
    shapes = [(2, 35, step * each) if beside else (step * each, 70) for each in multiples]
    *parts, last = [torch.randn(shape, dtype=dtype, device=place) * (1 + i) for i, shape in enumerate(shapes)]
    apart = torch.randn(*last.shape[:-1], last.shape[-1] + 16, dtype=dtype, device=place)[..., : last.shape[-1]]
    return [*parts, apart]


@pytest.mark.parametrize("multiples", [(1,), (1, 2), (2, 1, 1)])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_blocks_of_the_whole(quantize_parts, quantize_both, place, block_size, beside, multiples):
    parts = parts_of(place, multiples, beside, block_size)
    *blocks, total = quantize_parts(parts, beside, False, block_size)
    expected = quantize_both(torch.cat(parts, -1 if beside else 0), block_size)
    for got, wanted in zip(blocks, expected, strict=True):
        assert torch.equal(got, wanted)
        assert got.is_contiguous()
    assert total.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_sums(quantize_parts, place, block_size, dtype):
    """Of the floats themselves, not of what they are rounded to."""
    parts = parts_of(place, (1, 1, 2), True, block_size, dtype)
    *_, total = quantize_parts(parts, True, True, block_size)
    rows = numpy64(torch.cat(parts, -1)).reshape(70, -1)
    assert total.dtype == torch.float32
    assert (abs(numpy64(total) - rows.sum(0)) <= 70 * UNIT[torch.float32] * abs(rows).sum(0)).all()


def test_one_part_may_have_any_size(quantize_parts, quantize_both, place):
    x = torch.randn(3, 5, 41, device=place)
    *blocks, total = quantize_parts([x], True, True, (1, 128))
    for got, wanted in zip(blocks, quantize_both(x, (1, 128)), strict=True):
        assert torch.equal(got, wanted)
    torch.testing.assert_close(total, x.sum((0, 1)))


def test_no_rows(quantize_parts, place):
    *_, q_t, scale_t, total = quantize_parts([torch.empty(0, 256, device=place)] * 2, True, True, (1, 128))
    assert q_t.shape == (512, 0)
    assert scale_t.numel() == 0
    assert torch.equal(total, torch.zeros(512, device=place))


def test_opcheck_parts(device):
    parts = [torch.randn(64, 40, device=device), torch.randn(128, 40, device=device)]
    opcheck(torch.ops.qframework.block_quantize_parts.default, (parts, False, True, 32))
    turned = [part.t() for part in parts]
    opcheck(torch.ops.qframework.block_quantize_parts.default, (turned, True, False, 64))


def test_bad_parts():
    x = torch.randn(256, 256)
    expected = block_quantize_both(torch.cat([x, x], -1))
    assert all(map(torch.equal, block_quantize_parts(x, x, beside=True), expected))
    with pytest.raises(QFrameworkError, match=r"block_quantize_parts: parts must be one to 3 tensors, got 4"):
        block_quantize_parts(*[x] * 4, beside=True)
    with pytest.raises(QFrameworkError, match=r"the same rows, got torch.float32 \(256, 256\) and .* \(64, 256\)"):
        block_quantize_parts(x, x[:64], beside=True)
    with pytest.raises(QFrameworkError, match=r"the same columns, got .* and torch.float16 \(256, 256\)"):
        block_quantize_parts(x, x.half(), beside=False)
    with pytest.raises(UnsupportedError, match=r"rows of parts must be a multiple of 256 for blocks of .*, got 128"):
        block_quantize_parts(x[:128], x, beside=False)
    with pytest.raises(UnsupportedError, match=r"columns of parts must be a multiple of 64 for blocks of 32, got 40"):
        block_quantize_parts(x[:, :40], x[:, :40], beside=True, block_size=32)
