"""add_norm, add_norm_quantize and add_norm_dynamic_quantize on every implementation, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import assert_float_close, assert_int8_close, numpy64
from test_norm import exact, operands, tolerance

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.add_norm import ADD_NORM, ADD_NORM_DYNAMIC_QUANTIZE, ADD_NORM_QUANTIZE
from qframework.kernels.norm import NORM, NORM_DYNAMIC_QUANTIZE, NORM_QUANTIZE

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(37, 192), (2, 9, 40), (64,), (3, 5, 768), (70, 23), (5, 1280), (3, 2501)]
_ours = torch.ops.qframework


@pytest.fixture
def dynamic(implementation):
    return {"cpu": _ours.add_norm_dynamic_quantize, "triton": ADD_NORM_DYNAMIC_QUANTIZE.cuda}[implementation]


@pytest.fixture
def add_norm(implementation):
    return {"cpu": _ours.add_norm, "triton": ADD_NORM.cuda}[implementation]


@pytest.fixture
def static(implementation):
    return {"cpu": _ours.add_norm_quantize, "triton": ADD_NORM_QUANTIZE.cuda}[implementation]


def summands(place, shape, dtype):
    """x and residual, whose last row's sum is constant, weight and bias."""
    x, weight, bias = operands(place, shape, dtype)
    residual = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(place)
    rows, added = x.view(-1, shape[-1]), residual.view(-1, shape[-1])
    if len(rows) > 1:
        rows[-1], added[-1] = 0.5, 0.25
    return x, residual, weight, bias


def assert_is_sum(total, x, residual):
    """The sum, rounded once."""
    expected = numpy64(x) + numpy64(residual)
    assert_float_close(total, expected, 0 * expected)
    assert (total.shape, total.dtype, total.is_contiguous()) == (x.shape, x.dtype, True)


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_norm_is_that_of_the_rounded_sum(add_norm, place, shape, dtype, center):
    x, residual, weight, bias = summands(place, shape, dtype)
    total, out = add_norm(x, residual, weight, bias, 1e-5, center, 0.0)
    assert_is_sum(total, x, residual)
    expected = exact(total, weight, bias, 1e-5, center)
    assert_float_close(out, expected, tolerance(expected))
    assert (out.shape, out.dtype, out.is_contiguous()) == (x.shape, dtype, True)


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_scale_for_each_row_of_the_sum(dynamic, place, shape, dtype, center):
    x, residual, weight, bias = summands(place, shape, dtype)
    total, q, scale = dynamic(x, residual, weight, bias, 1e-5, center, 0.0)
    assert_is_sum(total, x, residual)
    expected = exact(total, weight, bias, 1e-5, center)
    np.testing.assert_allclose(numpy64(scale), np.abs(expected).max(-1, keepdims=True) / 127, rtol=1e-5)
    assert_int8_close(q, expected, tolerance(expected), numpy64(scale))
    assert (q.shape, q.is_contiguous(), scale.shape) == (x.shape, True, (*shape[:-1], 1))


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_given_scale_for_the_sum(static, place, shape, dtype, center):
    x, residual, weight, bias = summands(place, shape, dtype)
    total, q = static(x, residual, weight, bias, 1e-5, center, 0.0, torch.tensor([0.02], device=place))
    assert_is_sum(total, x, residual)
    expected = exact(total, weight, bias, 1e-5, center)  # values beyond 2.54 saturate
    assert_int8_close(q, np.clip(expected, -2.54, 2.54), tolerance(expected), 0.02)
    assert (q.shape, q.is_contiguous()) == (x.shape, True)


@pytest.mark.parametrize(("has_weight", "has_bias", "offset"), [(0, 0, 0.0), (1, 0, 1.0), (0, 1, 0.0)])
def test_optional_parameters_of_the_norm(add_norm, dynamic, static, place, has_weight, has_bias, offset):
    x, residual, weight, bias = summands(place, (9, 1152), torch.float16)
    given = weight - offset if has_weight else None, bias if has_bias else None
    total, out = add_norm(x, residual, *given, 1e-6, True, offset)
    expected = exact(total, *given, 1e-6, True, offset)
    assert_float_close(out, expected, tolerance(expected))
    _, q, scale = dynamic(x, residual, *given, 1e-6, True, offset)
    assert_int8_close(q, expected, tolerance(expected), numpy64(scale))
    _, q = static(x, residual, *given, 1e-6, True, offset, torch.tensor(0.05, device=place))
    assert_int8_close(q, np.clip(expected, -6.35, 6.35), tolerance(expected), 0.05)


@pytest.mark.parametrize("center", [True, False])
def test_as_the_sum_and_the_norm_alone(add_norm, dynamic, static, implementation, place, center):
    """Bit for bit: both norms are one kernel."""
    x, residual, weight, bias = summands(place, (11, 320), torch.float16)
    norm = (weight, bias, 1e-5, center, 0.0)
    scale = torch.tensor([0.03], device=place)
    if implementation == "triton":
        plain = NORM.cuda, NORM_DYNAMIC_QUANTIZE.cuda, NORM_QUANTIZE.cuda
    else:
        plain = _ours.norm, _ours.norm_dynamic_quantize, _ours.norm_quantize
    total = x + residual
    expected = [
        (total, plain[0](total, *norm, None)),
        (total, *plain[1](total, *norm)),
        (total, plain[2](total, *norm, scale)),
    ]
    got = [
        add_norm(x, residual, *norm),
        dynamic(x, residual, *norm),
        static(x, residual, *norm, scale),
    ]
    for one, other in zip(got, expected, strict=True):
        assert all(map(torch.equal, one, other))


def test_a_sum_that_overflows_or_is_nan(add_norm, dynamic, place):
    x, residual, weight, bias = summands(place, (20, 128), torch.float16)
    x[2, 100], x[5, 7], residual[5, 7] = float("nan"), 6e4, 6e4
    total, out = add_norm(x, residual, weight, bias, 1e-5, True, 0.0)
    _, _, scale = dynamic(x, residual, weight, bias, 1e-5, True, 0.0)
    assert total[2, 100].isnan()
    assert total[5, 7].isinf()
    for rows in (out.isfinite().all(-1), scale.isfinite().flatten()):
        assert not rows[[2, 5]].any()
        assert rows.sum() == 18


def test_strided_and_empty_summands(dynamic, place):
    x, residual, weight, bias = summands(place, (20, 256), torch.float16)
    for part in (np.s_[::2, :128], np.s_[1::2, 128:], np.s_[:, ::2], np.s_[:0, :128]):
        a, b, parameters = x[part], residual[part], (weight[part[1]], bias[part[1]])
        whole = dynamic(a.contiguous(), b.contiguous(), *(each.contiguous() for each in parameters), 1e-5, True, 0.0)
        for strided in (dynamic(a, b, *parameters, 1e-5, True, 0.0), dynamic(b, a, *parameters, 1e-5, True, 0.0)):
            assert all(map(torch.equal, strided, whole))


def test_transposed_summands(add_norm, place):
    """The sum is contiguous, and so is its norm."""
    x, residual, weight, bias = summands(place, (4, 6, 64), torch.float32)
    a, b = x.transpose(0, 1), residual.transpose(0, 1)
    for got, expected in zip(
        add_norm(a, b, weight, bias, 1e-5, True, 0.0),
        add_norm(a.contiguous(), b.contiguous(), weight, bias, 1e-5, True, 0.0),
        strict=True,
    ):
        assert torch.equal(got, expected)
        assert got.is_contiguous()


def test_opcheck_of_sums():
    x, residual, weight, bias = summands("cpu", (3, 64), torch.float32)
    norm = (x, residual, weight, bias, 1e-5, True, 0.0)
    torch.library.opcheck(_ours.add_norm.default, norm)
    torch.library.opcheck(_ours.add_norm_quantize.default, (*norm, torch.tensor([0.1])))
    torch.library.opcheck(_ours.add_norm_dynamic_quantize.default, norm)


def test_summands_that_are_refused():
    x, weight = torch.randn(3, 96), torch.ones(96)
    with pytest.raises(QFrameworkError, match=r"add_norm: residual must have shape \(3, 96\), got \(96,\)"):
        _ours.add_norm(x, weight, weight, None, 1e-5, True, 0.0)
    with pytest.raises(UnsupportedError, match="add_norm_dynamic_quantize: residual must have dtype float32, got"):
        _ours.add_norm_dynamic_quantize(x, x.half(), weight, None, 1e-5, True, 0.0)
    with pytest.raises(
        QFrameworkError, match=r"add_norm_quantize: scale must have one element, got the shape \(3, 1\)"
    ):
        _ours.add_norm_quantize(x, x, weight, None, 1e-5, True, 0.0, torch.ones(3, 1))
    with pytest.raises(QFrameworkError, match="scale must be positive"):
        _ours.add_norm_quantize(x, x, weight, None, 1e-5, True, 0.0, torch.zeros(1))
    with pytest.raises(QFrameworkError, match=r"add_norm: weight must have shape \(96,\), got \(32,\)"):
        _ours.add_norm(x, x, weight[:32], None, 1e-5, True, 0.0)
