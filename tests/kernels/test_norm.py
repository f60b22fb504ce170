"""norm, norm_quantize and norm_dynamic_quantize on every implementation, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import assert_float_close, assert_int8_close, numpy64
from test_compile_targets import CHIPS, compile_for, stack_bytes

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels import norm as norms
from qframework.kernels.norm import MAX_CHANNELS, NORM, NORM_DYNAMIC_QUANTIZE, NORM_QUANTIZE
from qframework.kernels.runtime.launch import tile_of_rows
from qframework.kernels.runtime.triton import HAS_TRITON, INTERPRET
from qframework.numerics import MIN_SCALE

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(37, 192), (2, 9, 40), (64,), (3, 5, 768), (70, 24), (3, 2500)]


@pytest.fixture
def dynamic(implementation):
    return {"cpu": torch.ops.qframework.norm_dynamic_quantize, "triton": NORM_DYNAMIC_QUANTIZE.cuda}[implementation]


@pytest.fixture
def norm(implementation):
    return {"cpu": torch.ops.qframework.norm, "triton": NORM.cuda}[implementation]


@pytest.fixture
def static(implementation):
    return {"cpu": torch.ops.qframework.norm_quantize, "triton": NORM_QUANTIZE.cuda}[implementation]


def operands(place, shape, dtype):
    """Rows of different magnitudes and means, one of them constant; weights from 0.5 to 2; biases."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    rows = x.view(-1, shape[-1])
    rows.mul_(torch.exp2(4 * torch.rand(len(rows), 1, generator=generator) - 2)).add_(
        torch.randn(len(rows), 1, generator=generator)
    )
    rows[-1] = 0.75 if len(rows) > 1 else rows[-1]
    weight = torch.exp2(2 * torch.rand(shape[-1], generator=generator) - 1)
    bias = torch.randn(shape[-1], generator=generator)
    return tuple(each.to(dtype).to(place) for each in (x, weight, bias))


def exact(x, weight, bias, eps, center, offset=0.0):
    """float64."""
    y = numpy64(x)
    y = y - y.mean(-1, keepdims=True) if center else y
    y = y / np.sqrt((y * y).mean(-1, keepdims=True) + eps)
    y = y if weight is None else y * (numpy64(weight) + offset)
    return y if bias is None else y + numpy64(bias)


def tolerance(expected):
    """Of float32 sums and of the hardware's square root."""
    return 4e-6 * np.abs(expected).max(-1, keepdims=True) + 0 * expected


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_scale_for_each_row(dynamic, place, shape, dtype, center):
    x, weight, bias = operands(place, shape, dtype)
    q, scale = dynamic(x, weight, bias, 1e-5, center, 0.0)
    expected = exact(x, weight, bias, 1e-5, center)
    np.testing.assert_allclose(numpy64(scale), np.abs(expected).max(-1, keepdims=True) / 127, rtol=1e-5)
    assert_int8_close(q, expected, tolerance(expected), numpy64(scale))
    assert (q.shape, q.dtype, q.is_contiguous()) == (x.shape, torch.int8, True)
    assert scale.shape == (*shape[:-1], 1)


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_given_scale(static, place, shape, dtype, center):
    x, weight, bias = operands(place, shape, dtype)
    scale = torch.tensor([0.02], device=place)  # values beyond 2.54 saturate
    expected = exact(x, weight, bias, 1e-5, center)
    q = static(x, weight, bias, 1e-5, center, 0.0, scale)
    assert_int8_close(q, np.clip(expected, -2.54, 2.54), tolerance(expected), 0.02)
    assert (q.shape, q.dtype, q.is_contiguous()) == (x.shape, torch.int8, True)


@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm(norm, place, shape, dtype, center, has_residual):
    x, weight, bias = operands(place, shape, dtype)
    residual = x.flip(0).contiguous() if has_residual else None
    out = norm(x, weight, bias, 1e-5, center, 0.0, residual)
    expected = exact(x, weight, bias, 1e-5, center) + (numpy64(residual) if has_residual else 0)
    assert_float_close(out, expected, tolerance(expected))
    assert (out.shape, out.dtype, out.is_contiguous()) == (x.shape, dtype, True)


def test_an_offset_of_the_weight(norm, dynamic, static, place):
    """Weights around zero, to which 1 is added, as in Gemma."""
    x, weight, _ = operands(place, (9, 1152), torch.float16)
    weight = weight - 1
    expected = exact(x, weight, None, 1e-6, False, 1.0)
    assert_float_close(norm(x, weight, None, 1e-6, False, 1.0, None), expected, tolerance(expected))
    q, scale = dynamic(x, weight, None, 1e-6, False, 1.0)
    assert_int8_close(q, expected, tolerance(expected), numpy64(scale))
    q = static(x, weight, None, 1e-6, False, 1.0, torch.tensor([0.05], device=place))
    assert_int8_close(q, np.clip(expected, -6.35, 6.35), tolerance(expected), 0.05)


@pytest.mark.parametrize(("has_weight", "has_bias"), [(False, False), (True, False), (False, True)])
def test_weight_and_bias_are_optional(dynamic, static, place, has_weight, has_bias):
    x, weight, bias = operands(place, (5, 96), torch.float16)
    given = weight if has_weight else None, bias if has_bias else None
    expected = exact(x, *given, 1e-6, True)
    q, scale = dynamic(x, *given, 1e-6, True, 0.0)
    assert_int8_close(q, expected, tolerance(expected), numpy64(scale))
    q = static(x, *given, 1e-6, True, 0.0, torch.tensor(0.05, device=place))
    assert_int8_close(q, np.clip(expected, -6.35, 6.35), tolerance(expected), 0.05)


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_reach_the_scale(dynamic, place, bad, center):
    x, weight, bias = operands(place, (20, 128), torch.float32)
    x[2, 100] = bad
    _, scale = dynamic(x, weight, bias, 1e-5, center, 0.0)
    finite = scale.isfinite().flatten()
    assert not finite[2]
    assert finite.sum() == 19
    weight[5] = bad
    _, scale = dynamic(x, weight, bias, 1e-5, center, 0.0)
    assert not scale.isfinite().any()


def test_strided_and_empty(dynamic, place):
    x, weight, bias = operands(place, (20, 256), torch.float16)
    for view, own in ((x[::2, :128], slice(128)), (x[:, ::2], slice(0, None, 2)), (x[:0, :128], slice(128))):
        parameters = weight[own], bias[own]
        whole = dynamic(view.contiguous(), *(each.contiguous() for each in parameters), 1e-5, True, 0.0)
        for a, b in zip(dynamic(view, *parameters, 1e-5, True, 0.0), whole, strict=True):
            assert torch.equal(a, b)


def test_opcheck():
    x, weight, bias = operands("cpu", (3, 64), torch.float32)
    torch.library.opcheck(torch.ops.qframework.norm_dynamic_quantize.default, (x, weight, bias, 1e-5, True, 0.0))
    scale = torch.tensor([0.1])
    torch.library.opcheck(torch.ops.qframework.norm_quantize.default, (x, weight, None, 1e-5, False, 0.0, scale))
    torch.library.opcheck(torch.ops.qframework.norm.default, (x, weight, None, 1e-5, False, 1.0, x.flip(0)))


def test_bad_input():
    dynamic, static = torch.ops.qframework.norm_dynamic_quantize, torch.ops.qframework.norm_quantize
    x, weight = torch.randn(3, 96), torch.ones(96)
    with pytest.raises(QFrameworkError, match=r"weight must have shape \(96,\), got \(32,\)"):
        dynamic(x, weight[:32], None, 1e-5, True, 0.0)
    with pytest.raises(UnsupportedError, match="x must have dtype"):
        dynamic(x.int(), weight, None, 1e-5, True, 0.0)
    with pytest.raises(QFrameworkError, match=f"x must have 1 to {MAX_CHANNELS} channels, got 9000"):
        dynamic(torch.randn(2, 9000), None, None, 1e-5, True, 0.0)
    with pytest.raises(QFrameworkError, match=r"scale must have one element, got the shape \(3, 1\)"):
        static(x, weight, None, 1e-5, True, 0.0, torch.ones(3, 1))
    with pytest.raises(QFrameworkError, match=r"norm: residual must have shape \(3, 96\), got \(96,\)"):
        torch.ops.qframework.norm(x, weight, None, 1e-5, True, 0.0, weight)
    with pytest.raises(QFrameworkError, match="scale"):
        static(x, weight, None, 1e-5, True, 0.0, torch.zeros(1))


@pytest.mark.skipif(INTERPRET or not HAS_TRITON, reason="interpreted kernels cannot be compiled")
@pytest.mark.parametrize("channels", [24, 64, 256, 768, 2048, 8192])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("form", ["norm", "static", "dynamic"])
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.sample(1 / 8)
def test_the_kernel_compiles(chip, channels, form, adds, tmp_path):
    """Without spills; rows within one warp need no barrier."""
    block_m, block_c, warps = tile_of_rows(channels)
    quantizes = form != "norm"
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "residual_ptr", "sum_ptr"), "*fp16")
    pointers |= {"out_ptr": "*i8" if quantizes else "*fp16", "scale_ptr": "*fp32"}
    types = {**pointers, "M": "i32", "stride_xm": "i32", "stride_rm": "i32", "eps": "fp32"}
    constants = {
        "C": channels,
        "OFFSET": 0.0,
        "CENTER": True,
        "HAS_WEIGHT": True,
        "HAS_BIAS": True,
        "ADDS": adds,
        "HAS_RESIDUAL": not quantizes and not adds,
        "QUANTIZES": quantizes,
        "DYNAMIC": form == "dynamic",
        "MIN_SCALE": MIN_SCALE,
    }
    constants |= {"BLOCK_M": block_m, "BLOCK_C": block_c}
    compiled = compile_for(chip, norms._norm_kernel, types, constants, num_warps=warps)
    assert stack_bytes(compiled, tmp_path) == 0
    if channels in (768, 2048):
        assert "bar.sync" not in compiled.asm["ptx"]
