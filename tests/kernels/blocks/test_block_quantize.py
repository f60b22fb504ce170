"""quantize.py and format.py on every implementation, against an FP64 oracle that goes from block to block."""

from __future__ import annotations

import argparse
import math

import numpy as np
import pytest
import torch
from block_oracle import BLOCK_SIZES, OBLONGS, SQUARES, assert_blocks, block_of, sides, values
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import UNIT, assert_float_close, assert_int8_close, numpy64

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels import (
    block_dequantize,
    block_quantize,
    block_quantize_both,
    block_transpose,
    block_transpose_sum,
)
from qframework.kernels.blocks.format import block_size_name, parse_block_size
from qframework.kernels.blocks.quantize import (
    BLOCK_DEQUANTIZE,
    BLOCK_QUANTIZE,
    BLOCK_QUANTIZE_BOTH,
)
from qframework.kernels.blocks.transpose_blocks import BLOCK_TRANSPOSE, BLOCK_TRANSPOSE_SUM
from qframework.kernels.quantize import dynamic_quantize
from qframework.numerics import MIN_SCALE

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Whole blocks, a real model's, tails on both sides, one row, one column, fewer than a block, no leading dimension.
SHAPES = [(64, 128), (197, 192), (2, 7, 123), (1, 300), (300, 1), (3, 5), (40,)]
# Half a step, and the two roundings of x * (1 / scale).
HALF_STEP = 0.5 + 127 * 3 * UNIT[torch.float32]
OPERATORS = {
    "cpu": (block_quantize, block_dequantize, block_transpose, block_quantize_both, block_transpose_sum),
    "triton": (
        BLOCK_QUANTIZE.cuda,
        BLOCK_DEQUANTIZE.cuda,
        BLOCK_TRANSPOSE.cuda,
        BLOCK_QUANTIZE_BOTH.cuda,
        BLOCK_TRANSPOSE_SUM.cuda,
    ),
}


@pytest.fixture
def quantize(implementation):
    return OPERATORS[implementation][0]


@pytest.fixture
def dequantize(implementation):
    return OPERATORS[implementation][1]


@pytest.fixture
def transpose(implementation):
    return OPERATORS[implementation][2]


@pytest.fixture
def quantize_both(implementation):
    return OPERATORS[implementation][3]


@pytest.fixture
def transpose_sum(implementation):
    return OPERATORS[implementation][4]


def sample(place, shape, dtype=torch.float32):
    """Values of many magnitudes, a column of outliers, and zeros in the last rows and columns."""
    x = torch.randn(shape) * torch.randn(shape[-1]).exp()
    rows = x.view(-1, shape[-1])
    rows[:, shape[-1] // 2] *= 50
    rows[rows.shape[0] // 2 :, shape[-1] // 3 :] = 0
    return x.to(dtype).to(place)


def blocks(shape, block_size):
    """Row and column slices of every block, with its place among the scales."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    height, width = sides(block_size)
    for i in range(math.ceil(rows / height)):
        for j in range(math.ceil(columns / width)):
            down = slice(i * height, min((i + 1) * height, rows))
            across = slice(j * width, min((j + 1) * width, columns))
            yield i, j, down, across


def spread(scale, shape, block_size) -> np.ndarray:
    """The scale of every value, in float64."""
    spread = np.empty((math.prod(shape[:-1]), shape[-1]))
    for i, j, down, across in blocks(shape, block_size):
        spread[down, across] = float(scale[i, j])
    return spread.reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize(quantize, place, shape, block_size, dtype):
    x = sample(place, shape, dtype)
    assert_quantized(*quantize(x, block_size), numpy64(x), block_size)


def assert_quantized(q, scale, exact, block_size):
    """Scales are those of the largest values, and values roundings of ``exact``, whatever is no tie to the nearest."""
    rows = exact.reshape(-1, exact.shape[-1])
    found = {(i, j) for i, j, _, _ in blocks(exact.shape, block_size)}
    assert scale.numel() == len(found)
    for i, j, down, across in blocks(exact.shape, block_size):
        amax = np.abs(rows[down, across]).max()
        np.testing.assert_allclose(float(scale[i, j]), max(amax / 127, MIN_SCALE), rtol=2 * UNIT[torch.float32])
    assert_int8_close(q, exact, np.zeros(exact.shape), spread(scale, exact.shape, block_size))
    assert q.is_contiguous()
    assert scale.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_dequantize(dequantize, place, block_size, dtype):
    shape = (3, 50, 170)
    q = torch.randint(-127, 128, shape, dtype=torch.int8, device=place)
    _, scale = block_quantize(sample(place, shape), block_size)
    got = dequantize(q, scale, block_size, dtype)
    exact = numpy64(q) * spread(scale, shape, block_size)
    assert got.dtype == dtype
    assert_float_close(got, exact, UNIT[torch.float32] * np.abs(exact))


@pytest.mark.parametrize("block_size", SQUARES)
@pytest.mark.parametrize("shape", SHAPES)
def test_transpose_moves_values_and_scales(quantize, dequantize, transpose, quantize_both, place, shape, block_size):
    x = sample(place, shape)
    q, scale = quantize(x, block_size)
    turned, turned_scale = transpose(q, scale, block_size)
    assert turned.is_contiguous()
    assert turned_scale.is_contiguous()
    back = dequantize(q, scale, block_size).view(-1, shape[-1])
    assert torch.equal(dequantize(turned, turned_scale, block_size), back.t())
    both = quantize_both(x, block_size)
    for got, expected in zip(both, (q, scale, turned, turned_scale), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("shape", [*SHAPES, (500, 130)])
def test_a_transpose_and_the_sum_of_rows(quantize, transpose, transpose_sum, place, shape, block_size):
    """The transpose of ``transpose``; sums within the error of FP32 sums in any order, equal in every call."""
    q, scale = quantize(sample(place, shape), block_size)
    *turned, sums = transpose_sum(q, scale, block_size)
    for got, expected in zip(turned, transpose(q, scale, block_size), strict=True):
        assert torch.equal(got, expected)
    stored = numpy64(values(q, scale, block_size)).reshape(-1, shape[-1])
    assert sums.dtype == torch.float32
    assert_float_close(sums, stored.sum(0), (len(stored) + 1) * UNIT[torch.float32] * np.abs(stored).sum(0))
    assert torch.equal(sums, transpose_sum(q, scale, block_size)[2])


def turned_size(block_size):
    """Blocks of what is transposed, where they are not square: 256 tokens, or as long as before for weights."""
    return {(1, 128): (32, 256), (1, 256): (32, 256), (32, 128): (32, 128)}[block_size]


@pytest.mark.parametrize("block_size", OBLONGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_transposed_oblong_blocks_are_quantized_again(quantize, transpose, quantize_both, place, shape, block_size):
    """block_transpose quantizes the dequantized blocks, block_quantize_both the floats."""
    x = sample(place, shape)
    q, scale = quantize(x, block_size)
    stored = values(q, scale, block_size).reshape(-1, shape[-1]).t()
    assert_blocks(*transpose(q, scale, block_size), stored, UNIT[torch.float32] * stored.abs(), turned_size(block_size))
    both = quantize_both(x, block_size)
    assert torch.equal(both[0], q)
    assert torch.equal(both[1], scale)
    assert_quantized(*both[2:], numpy64(x).reshape(-1, shape[-1]).T, turned_size(block_size))


@pytest.mark.parametrize("block_size", OBLONGS)
def test_transposed_oblong_blocks_use_the_same_noise(quantize, quantize_both, place, block_size):
    """Each value rounded up or down, in either direction, and by one draw of noise: no bias that both share remains."""
    shape, seed = (150, 200), torch.tensor([5], device=place)
    x = sample(place, shape)
    q, scale, turned, turned_scale = quantize_both(x, block_size, seed)
    alone = quantize(x, block_size, seed)
    assert torch.equal(q, alone[0])
    assert torch.equal(scale, alone[1])
    assert torch.equal(turned_scale, quantize_both(x, block_size)[3])
    steps = numpy64(x).T / spread(turned_scale, shape[::-1], turned_size(block_size))
    off = numpy64(turned) - steps
    assert np.abs(off).max() < 1 + 1e-4
    fraction = steps - np.floor(steps)
    deviation = np.sqrt((fraction * (1 - fraction)).sum())
    assert abs(off.sum()) <= 6 * deviation
    assert np.abs(off).max() > 0.7, "rounded to nearest"
    assert torch.equal(turned, quantize_both(x, block_size, seed)[2])
    assert not torch.equal(turned, quantize_both(x, block_size, seed + 1)[2])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("block_size", OBLONGS)
def test_nan_and_infinity_in_a_transpose(dequantize, transpose, quantize_both, place, block_size, bad):
    """They reach one block of the transpose, or with block_transpose every block that they had reached before."""
    shape = (150, 140)
    x = torch.ones(shape, device=place)
    x[40, 33] = bad
    q, scale, turned, turned_scale = quantize_both(x, block_size)
    spoiled = ~dequantize(q, scale, block_size).isfinite().cpu()
    assert torch.equal(spoiled, block_of(40, 33, shape, block_size))
    spoiled_t = ~dequantize(turned, turned_scale, turned_size(block_size)).isfinite().cpu()
    assert torch.equal(spoiled_t, block_of(33, 40, shape[::-1], turned_size(block_size)))
    again = ~dequantize(*transpose(q, scale, block_size), turned_size(block_size)).isfinite().cpu()
    expected = torch.zeros(shape[::-1], dtype=torch.bool)
    for row, column in spoiled.t().nonzero()[::8].tolist():  # blocks are longer than that
        expected |= block_of(row, column, shape[::-1], turned_size(block_size))
    assert torch.equal(again, expected)


@pytest.mark.parametrize("block_size", OBLONGS)
def test_transposes_of_strided_tensors(quantize, transpose, quantize_both, place, block_size):
    x = sample(place, (6, 30, 40))
    for view in (x.permute(2, 0, 1), x[:, ::2], x[..., 3:20]):
        for one, other in zip(
            quantize_both(view, block_size), quantize_both(view.contiguous(), block_size), strict=True
        ):
            assert torch.equal(one, other)
    q, scale = quantize(sample(place, (150, 140)), block_size)
    strided = transpose(q.t().contiguous().t(), scale.t().contiguous().t(), block_size)
    for one, other in zip(strided, transpose(q, scale, block_size), strict=True):
        assert torch.equal(one, other)


def test_blocks_of_zeros(quantize, place):
    q, scale = quantize(torch.zeros(70, 40, device=place), 32)
    assert not q.any()
    assert (scale == MIN_SCALE).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("size", [32, (32, 128), (1, 128)])
def test_nan_and_infinity_stay_in_their_block(quantize, dequantize, place, bad, size):
    x = torch.ones(64, 160, device=place)
    x[40, 33] = bad
    back = dequantize(*quantize(x, size), size).cpu()
    hit = block_of(40, 33, (64, 160), size)
    assert torch.equal(back.isfinite(), ~hit)
    assert torch.allclose(back[~hit], torch.ones(1))


def test_strided(quantize, place):
    x = sample(place, (6, 10, 48), torch.float16)
    for view in (x.permute(2, 0, 1), x[:, ::2], x[..., 3:20], x.expand(2, 6, 10, 48)):
        for one, other in zip(quantize(view, 32), quantize(view.contiguous(), 32), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0,), (2, 0, 40)])
def test_empty(quantize, dequantize, transpose, transpose_sum, quantize_both, place, shape):
    q, scale = quantize(torch.empty(shape, device=place), 32)
    assert q.shape == shape
    assert scale.shape == (math.ceil(math.prod(shape[:-1]) / 32), math.ceil(shape[-1] / 32))
    assert dequantize(q, scale, 32).shape == shape
    assert transpose(q, scale, 32)[0].shape == (shape[-1], math.prod(shape[:-1]))
    assert torch.equal(transpose_sum(q, scale, 32)[2].cpu(), torch.zeros(shape[-1]))
    assert quantize_both(torch.empty(shape, device=place), 32)[3].shape == scale.t().shape


def seeded(place, value: int):
    return torch.tensor([value], device=place)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_stochastic_rounding_is_unbiased(quantize, dequantize, quantize_both, place, block_size):
    """The mean of many values with the same fraction is within six standard deviations."""
    n = 130
    fractions = torch.linspace(0.05, 0.95, n, device=place)
    x = (fractions + torch.arange(n, device=place) % 100 - 50).expand(n, n).contiguous()
    for _, _, down, across in blocks(x.shape, block_size):
        x[down.start, across.start] = 127  # scale 1: x is in steps
    q, scale = quantize(x, block_size, seeded(place, 3))
    assert (scale == 1).all()
    error = (dequantize(q, scale, block_size) - x).double()
    assert error.abs().max() < 1 + 1e-4
    deviation = (fractions * (1 - fractions)).sqrt().double() / math.sqrt(n)
    assert (error.mean(0).abs() <= 6 * deviation).all()
    assert error.mean(1).abs().max() <= 6 * 0.5 / math.sqrt(n), "rows share their noise"
    assert error.std() > 0.3, "the noise is no noise"
    assert torch.equal(quantize_both(x, block_size, seeded(place, 3))[0], q)


def test_all_parts_of_a_tensor_have_different_noise(quantize, place):
    """Each quarter has different noise, independent of tiles."""
    x = torch.rand(128, 128, device=place).repeat(2, 2)
    q, _ = quantize(x, 64, seeded(place, 3))
    quarters = [q[i : i + 128, j : j + 128] for i in (0, 128) for j in (0, 128)]
    for i, quarter in enumerate(quarters):
        assert (quarter == quarter.roll(64, 0)).float().mean() < 0.1
        for other in quarters[:i]:
            assert 0.4 < (quarter == other).float().mean() < 0.9


def test_stochastic_rounding_follows_its_seed(quantize, place):
    x = sample(place, (70, 90))
    first, again, other = (quantize(x, 32, seeded(place, seed))[0] for seed in (5, 5, 2**61))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert (first.int() - other.int()).abs().max() == 1


def test_stochastic_rounding_keeps_representable_values(quantize, place):
    q = torch.randint(-127, 128, (64, 64), dtype=torch.int8, device=place)
    q[::32, ::32] = 127
    again, scale = quantize(q.float() * 0.25, 32, seeded(place, 1))
    assert (scale == 0.25).all()
    assert torch.equal(again, q)


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    exponent=st.integers(-60, 60),
    dtype=st.sampled_from(DTYPES),
    block_size=st.sampled_from(BLOCK_SIZES),
    strided=st.booleans(),
    outlier=st.sampled_from([0.0, 1.0, 1e4]),
    seed=st.none() | st.integers(0, 2**62),
)
def test_any_shape_stride_and_magnitude(shape, exponent, dtype, block_size, strided, outlier, seed):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 2.0**exponent
    x[0] *= outlier  # 0: a block of zeros where there is one row
    limit = torch.finfo(dtype).max
    x = x.clamp(-limit, limit).to(dtype)
    x = x.movedim(0, -1) if strided else x
    q, scale = block_quantize(x, block_size, None if seed is None else torch.tensor(seed))
    assert (scale >= MIN_SCALE).all()
    steps = spread(scale, x.shape, block_size)
    off = np.abs(numpy64(block_dequantize(q, scale, block_size)) - numpy64(x))
    assert (off <= steps * (HALF_STEP if seed is None else HALF_STEP + 0.5)).all()
    for i, j, down, across in blocks(x.shape, block_size):
        part = q.reshape(-1, x.shape[-1])[down, across].abs().max()
        assert scale[i, j] == MIN_SCALE or part >= 126 + (seed is None), "the scale is too large"
    if block_size in SQUARES:
        twice = block_transpose(*block_transpose(q, scale, block_size), block_size)
        assert torch.equal(twice[0], q.reshape(-1, x.shape[-1]))
        assert torch.equal(twice[1], scale)


def activations_with_outlier_channels(seed: int, rows=512, columns=768):
    """What section 7.3 looks at: a few channels of a last layer are tens of times as large as the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    outliers = torch.randperm(columns, generator=generator)[:6]
    x[:, outliers] *= 30 + 30 * torch.rand(6, generator=generator)
    return x


@pytest.mark.parametrize("seed", range(3))
def test_outlier_channels_affect_only_their_blocks(seed):
    """Jetfire, section 7.3: per-block error far below per-token, and within reach of per-channel.

    A token's step is set by its largest outlier, about 50 times a usual value; of 24 blocks across, at most 6 hold one.
    The mean error, which outliers do not dominate, says how much the other channels suffer.
    """
    x = activations_with_outlier_channels(seed)
    errors = {}
    for name, y in (("per_token", x), ("per_channel", x.t())):
        q, scale = dynamic_quantize(y, "per_token")
        errors[name] = (q.float() * scale - y).double()
    q, scale = block_quantize(x, 32)
    errors["per_block"] = (block_dequantize(q, scale, 32) - x).double()
    squared = {name: float(error.square().mean()) for name, error in errors.items()}
    mean = {name: float(error.abs().mean()) for name, error in errors.items()}
    for error in (squared, mean):
        assert error["per_channel"] < error["per_block"] < 0.5 * error["per_token"]
    # Blocks without an outlier have steps of a channel's size: 18 of 24 at the least, and so the median.
    median = {name: float(error.abs().median()) for name, error in errors.items()}
    assert median["per_block"] < 2 * median["per_channel"] < median["per_token"]


def test_opcheck(device):
    x = torch.randn(3, 4, 40, device=device)
    seed = torch.tensor([7], device=device)
    operators = torch.ops.qframework
    for operator in (operators.block_quantize.default, operators.block_quantize_both.default):
        torch.library.opcheck(operator, (x, 32))
        torch.library.opcheck(operator, (x.transpose(0, 1).half(), 64, seed))
    q, scale = block_quantize(x, 32)
    torch.library.opcheck(operators.block_dequantize.default, (q, scale, 32, torch.float16))
    torch.library.opcheck(operators.block_transpose.default, (q, scale, 32))
    oblong = block_quantize(x, (1, 128))
    torch.library.opcheck(operators.block_quantize_both.default, (x, (1, 128), seed))
    torch.library.opcheck(operators.block_dequantize.default, (*oblong, (1, 128)))
    torch.library.opcheck(operators.block_transpose.default, (*oblong, (1, 128)))
    torch.library.opcheck(operators.block_transpose_sum.default, (*oblong, (1, 128)))


@pytest.mark.usefixtures("fresh_dynamo")
def test_dynamic_shapes_trace():
    def round_trip(x):
        q, scale, turned, turned_scale = block_quantize_both(x, 32)
        return block_dequantize(q, scale, 32), block_dequantize(turned, turned_scale, 32)

    compiled = torch.compile(round_trip, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 40, 65):
        x = torch.randn(2, rows, 48)
        for got, expected in zip(compiled(x), round_trip(x), strict=True):
            assert torch.equal(got, expected)


def test_bad_input():
    x = torch.randn(2, 3, 40)
    q, scale = block_quantize(x, 32)
    with pytest.raises(UnsupportedError, match=r"block_quantize: block_size must be one of 32, 64, 128, .*, got 48"):
        block_quantize(x, 48)
    with pytest.raises(UnsupportedError, match=r"block_quantize_both: x must have dtype float32.*, got torch.float64"):
        block_quantize_both(x.double())
    with pytest.raises(UnsupportedError, match=r"block_quantize: x must have at least one dimension, got shape \(\)"):
        block_quantize(torch.tensor(1.0))
    with pytest.raises(UnsupportedError, match=r"seed must have dtype int64, got torch.float32"):
        block_quantize(x, 32, torch.ones(1))
    with pytest.raises(QFrameworkError, match=r"seed must have one value, got shape \(2,\)"):
        block_quantize(x, 32, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(UnsupportedError, match=r"block_dequantize: q must have dtype int8, got torch.float32"):
        block_dequantize(x, scale)
    with pytest.raises(
        UnsupportedError, match=r"block_dequantize: the result must have dtype float32.*, got torch.int32"
    ):
        block_dequantize(q, scale, 32, torch.int32)
    with pytest.raises(
        QFrameworkError, match=r"q's scale must have shape \(1, 1\) for q \(2, 3, 40\) in blocks of 64, got \(1, 2\)"
    ):
        block_transpose(q, scale, 64)


@pytest.mark.parametrize(
    ("text", "size", "name"),
    [
        ("32", 32, "32"),
        ("jetfire", 32, "32"),
        ("128", 128, "128"),
        ("64x64", 64, "64"),
        ("32x128", (32, 128), "32x128"),
        ("1x128", (1, 128), "1x128"),
    ],
)
def test_block_sizes_on_command_lines(text, size, name):
    assert parse_block_size(text) == size
    assert block_size_name(size) == name
    assert parse_block_size(name) == size


def test_a_block_size_given_as_a_list_has_its_canonical_name():
    """Implementations of operators get lists from the dispatcher."""
    assert block_size_name([32, 32]) == "32"
    assert block_size_name([1, 128]) == "1x128"


@pytest.mark.parametrize("text", ["48", "128x1", "1 x 128", "x", "", "-32"])
def test_invalid_block_sizes_on_command_lines(text, capsys):
    with pytest.raises(ValueError, match="block size must be one of 32, 64, 128, 32x128, 1x128, 1x256, jetfire, got"):
        parse_block_size(text)
    parser = argparse.ArgumentParser()
    parser.add_argument("--block-size", type=parse_block_size)
    with pytest.raises(SystemExit):
        parser.parse_args([f"--block-size={text}"])
    assert (
        f"block size must be one of 32, 64, 128, 32x128, 1x128, 1x256, jetfire, got {text!r}" in capsys.readouterr().err
    )
