"""quantize, dynamic_quantize and dequantize on every implementation, against the FP64 oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import UNIT, assert_int8_close, numpy64

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.quantize import (
    DECOMPOSITIONS,
    DYNAMIC_QUANTIZE,
    QUANTIZE,
    dequantize,
    dynamic_quantize,
    quantize,
)
from qframework.numerics import MIN_SCALE

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(67, 24), (33, 200), (197, 768), (2, 7, 123), (1,), (3, 5, 2, 40), (4, 9000), (2, 16384)]


@pytest.fixture
def static(implementation):
    return {"cpu": torch.ops.qframework.quantize, "triton": QUANTIZE.cuda}[implementation]


@pytest.fixture
def dynamic(implementation):
    return {"cpu": torch.ops.qframework.dynamic_quantize, "triton": DYNAMIC_QUANTIZE.cuda}[implementation]


def sample(place, shape, dtype):
    """Normal values with an outlier row and a row of zeros."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    rows = x.view(-1, shape[-1])
    rows[0] *= 100
    rows[-1] = 0 if rows.shape[0] > 1 else rows[-1]
    return x.to(dtype).to(place)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_static_per_tensor(static, place, shape, dtype):
    x = sample(place, shape, dtype)
    for value in (0.02, 1.7):
        scale = torch.tensor(value, device=place)
        q = static(x, scale)
        assert_int8_close(q, numpy64(x), np.zeros(shape), numpy64(scale))
        assert q.is_contiguous()


@pytest.mark.parametrize("shape", [(2, 7, 123), (4, 9000)])
@pytest.mark.parametrize("zero_point", [-127, -5, 127])
def test_static_with_a_zero_point(static, place, shape, zero_point):
    x = sample(place, shape, torch.float32)
    scale, zero = torch.tensor([0.02], device=place), torch.tensor([zero_point], dtype=torch.int32, device=place)
    q = static(x, scale, zero)
    assert_int8_close(q, numpy64(x) + zero_point * numpy64(scale), np.zeros(shape), numpy64(scale))
    inside = q.abs() < 127
    back = dequantize(q, scale, zero_point=zero)
    assert float((back - x)[inside].abs().max()) <= 0.51 * 0.02
    assert static(torch.zeros(3, device=place), scale, zero).tolist() == [zero_point] * 3


@pytest.mark.parametrize(
    "zero_point", [torch.tensor([1.0]), torch.tensor([1, 2], dtype=torch.int32), torch.tensor([1], dtype=torch.int64)]
)
def test_a_zero_point_must_be_one_int32_integer(zero_point):
    x, scale = torch.ones(2, 3), torch.ones(1)
    with pytest.raises(QFrameworkError, match=r"quantize: zero_point must have (dtype int32|shape), got|shape \(\) or"):
        quantize(x, scale, zero_point)
    with pytest.raises(QFrameworkError, match=r"dequantize: zero_point must have"):
        dequantize(x.to(torch.int8), scale, zero_point=zero_point)


@pytest.mark.parametrize("dtype", DTYPES)
def test_static_per_position(static, place, dtype):
    x = sample(place, (4, 6, 5, 40), dtype)
    for shape in [(5, 1), (6, 5, 1), (4, 6, 5, 1), (1, 6, 5, 1)]:
        scale = (0.01 + torch.rand(shape)).to(place)
        assert_int8_close(static(x, scale), numpy64(x), np.zeros(x.shape), numpy64(scale))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("granularity", ["per_token", "per_tensor"])
def test_dynamic(dynamic, place, shape, dtype, granularity):
    x = sample(place, shape, dtype)
    q, scale = dynamic(x, granularity)
    amax = np.abs(numpy64(x)).max(axis=-1, keepdims=True) if granularity == "per_token" else np.abs(numpy64(x)).max()
    assert scale.dtype == torch.float32
    assert scale.shape == (() if granularity == "per_tensor" else (*shape[:-1], 1))
    np.testing.assert_allclose(numpy64(scale), np.maximum(amax / 127, MIN_SCALE), rtol=2 * UNIT[torch.float32])
    assert_int8_close(q, numpy64(x), np.zeros(shape), numpy64(scale))
    # Half a step, and the two roundings of x * (1 / scale).
    back = numpy64(q) * numpy64(scale)
    assert (np.abs(back - numpy64(x)) <= numpy64(scale) * (0.5 + 127 * 3 * UNIT[torch.float32])).all()


@pytest.mark.parametrize("granularity", ["per_token", "per_tensor"])
def test_zeros_stay_zero(dynamic, place, granularity):
    q, scale = dynamic(torch.zeros(3, 40, device=place), granularity)
    assert not q.any()
    assert (scale == MIN_SCALE).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_reach_the_scale(dynamic, place, bad):
    x = torch.ones(3, 40, device=place)
    x[1, 7] = bad
    q, scale = dynamic(x, "per_token")
    back = dequantize(q, scale)
    assert not back[1].isfinite().any()
    assert torch.allclose(back[[0, 2]], x[[0, 2]])


def test_saturates(static, place):
    x = torch.tensor([[-1e30, -130.0, -127.4, 0.5, 1.5, 2.5, 127.4, 1e30]], device=place)
    assert static(x, torch.ones(1, device=place)).tolist() == [[-127, -127, -127, 0, 2, 2, 127, 127]]


def test_strided(static, dynamic, place):
    x = sample(place, (6, 10, 48), torch.float16)
    turned = x.permute(2, 0, 1)
    scale = torch.tensor(0.05, device=place)
    assert torch.equal(static(turned, scale), static(turned.contiguous(), scale))
    for one, other in zip(dynamic(turned, "per_token"), dynamic(turned.contiguous(), "per_token"), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0,)])
def test_empty(static, dynamic, place, shape):
    x = torch.empty(shape, device=place)
    assert static(x, torch.ones(1, device=place)).shape == shape
    q, scale = dynamic(x, "per_token")
    assert q.shape == shape
    assert scale.shape == (*shape[:-1], 1)


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    exponent=st.integers(-60, 60),
    dtype=st.sampled_from(DTYPES),
    granularity=st.sampled_from(["per_token", "per_tensor"]),
    strided=st.booleans(),
    outlier=st.sampled_from([0.0, 1.0, 1e4]),
    seed=st.integers(0, 2**31),
)
def test_dynamic_for_any_shape_stride_and_magnitude(shape, exponent, dtype, granularity, strided, outlier, seed):
    generator = torch.Generator().manual_seed(seed)
    limit = torch.finfo(dtype).max
    x = torch.randn(shape, generator=generator) * 2.0**exponent
    x[0] *= outlier  # 0: a group of zeros
    x = x.clamp(-limit, limit).to(dtype)
    x = x.movedim(0, -1) if strided else x
    q, scale = dynamic_quantize(x, granularity)
    assert (scale >= MIN_SCALE).all()
    assert scale.isfinite().all()
    back = dequantize(q, scale).double()
    assert ((back - x.double()).abs() <= scale.double() * (0.5 + 127 * 3 * UNIT[torch.float32])).all()


@given(value=st.integers(-127, 127), exponent=st.integers(-40, 40))
def test_round_trip_of_representable_values(value, exponent):
    scale = torch.tensor(2.0**exponent)
    q = torch.tensor([value], dtype=torch.int8)
    assert torch.equal(quantize(dequantize(q, scale), scale), q)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize(device, dtype):
    q = torch.arange(-127, 128, dtype=torch.int8, device=device).view(3, 85)
    scale = torch.tensor([[0.1], [1.0], [3e-3]], device=device)
    got = dequantize(q, scale, dtype)
    assert got.dtype == dtype
    np.testing.assert_allclose(numpy64(got), numpy64(q) * numpy64(scale), rtol=1.01 * UNIT[dtype] + UNIT[torch.float32])


def test_opcheck(device):
    x = torch.randn(3, 4, 8, device=device)
    torch.library.opcheck(torch.ops.qframework.quantize.default, (x, torch.full((4, 1), 0.1, device=device)))
    zero = torch.tensor([-5], dtype=torch.int32, device=device)
    torch.library.opcheck(torch.ops.qframework.quantize.default, (x, torch.full((1,), 0.1, device=device), zero))
    torch.library.opcheck(torch.ops.qframework.dynamic_quantize.default, (x, "per_token"))
    torch.library.opcheck(torch.ops.qframework.dynamic_quantize.alone, (x, "per_token"))
    torch.library.opcheck(torch.ops.qframework.dynamic_quantize.default, (x.half(), "per_tensor"))
    q, scale = dynamic_quantize(x)
    torch.library.opcheck(torch.ops.qframework.dequantize.default, (q, scale, torch.float16))
    torch.library.opcheck(torch.ops.qframework.dequantize.default, (q, scale, torch.float16, zero))


def test_bad_input():
    x = torch.randn(2, 3, 4)
    with pytest.raises(UnsupportedError, match=r"x must have dtype float32, float16 or bfloat16, got torch.float64"):
        quantize(x.double(), torch.ones(1))
    with pytest.raises(UnsupportedError, match="granularity must be per_tensor or per_token, got 'per_row'"):
        dynamic_quantize(x, "per_row")
    with pytest.raises(QFrameworkError, match=r"scale must have shape \(1,\), .*, got \(2, 1\)"):
        quantize(x, torch.ones(2, 1))
    with pytest.raises(QFrameworkError, match=r"scale must be positive .*, got 0.0"):
        quantize(x, torch.zeros(1))
    with pytest.raises(UnsupportedError, match=r"x must have at least one dimension, got shape \(\)"):
        dynamic_quantize(torch.tensor(1.0), "per_token")
    with pytest.raises(UnsupportedError, match=r"q must have dtype int8, got torch.float32"):
        dequantize(x, torch.ones(1))


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1), (2, 1, 0)])
@pytest.mark.parametrize("op", ["quantize", "dynamic_quantize"])
def test_decompositions_have_the_operators_layout(op, order):
    """Contiguous: of a permuted input, elementwise operations would keep the order of dimensions."""
    x, argument = torch.randn(3, 4, 5).permute(order), torch.tensor(0.02) if op == "quantize" else "per_token"
    operator = getattr(torch.ops.qframework, op).default
    expected, found = (torch.utils._pytree.tree_leaves(f(x, argument)) for f in (operator, DECOMPOSITIONS[operator]))
    for ours, decomposed in zip(expected, found, strict=True):
        assert decomposed.is_contiguous()  # not compared with the operator, whose CPU form shares the code
        assert torch.equal(decomposed, ours)
