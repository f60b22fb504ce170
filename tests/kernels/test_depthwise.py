"""depthwise and depthwise_quantize on every implementation, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import assert_float_close, assert_int8_close, numpy64
from test_compile_targets import CHIPS, compile_for, stack_bytes

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels import depthwise as kernels
from qframework.kernels.depthwise import DEPTHWISE, DEPTHWISE_QUANTIZE, TAPS, tile
from qframework.kernels.runtime.activation import ACTIVATIONS
from qframework.kernels.runtime.triton import HAS_TRITON, INTERPRET

SHAPES = [(2, 5, 7, 40), (2, 1, 1, 8), (1, 2, 9, 300)]


@pytest.fixture
def depthwise(implementation):
    return {"cpu": torch.ops.qframework.depthwise, "triton": DEPTHWISE.cuda}[implementation]


@pytest.fixture
def static(implementation):
    return {"cpu": torch.ops.qframework.depthwise_quantize, "triton": DEPTHWISE_QUANTIZE.cuda}[implementation]


def operands(place, shape, taps, dtype=torch.float16):
    """Pixels and taps of different magnitudes, so that a shift by one would show."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.rand((*shape[:-1], 1), generator=generator))
    weight = torch.randn(taps, taps, shape[-1], generator=generator) / taps
    bias = torch.randn(shape[-1], generator=generator)
    return tuple(each.to(dtype).to(place) for each in (x, weight, bias))


def exact(x, weight, bias, activation):
    """float64, by shifted sums; and what float32 sums may be off."""
    x, weight = numpy64(x), numpy64(weight)
    taps, (_, height, width, _) = len(weight), x.shape
    padded = np.pad(x, ((0, 0), (taps // 2,) * 2, (taps // 2,) * 2, (0, 0)))
    windows = [(padded[:, i : i + height, j : j + width] * weight[i, j]) for i in range(taps) for j in range(taps)]
    v = sum(windows) + (0 if bias is None else numpy64(bias))
    y = torch.tensor(v)
    y = {
        "none": lambda y: y,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
        "relu": torch.relu,
        "silu": torch.nn.functional.silu,
    }[activation](y)
    return y.numpy(), 2e-6 * (sum(map(np.abs, windows)) + 1)


@pytest.mark.parametrize(
    ("taps", "dtype"), [(3, torch.float32), (3, torch.bfloat16), *((taps, torch.float16) for taps in TAPS)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_values(depthwise, place, shape, taps, dtype):
    x, weight, bias = operands(place, shape, taps, dtype)
    out = depthwise(x, weight, bias, "gelu")
    assert_float_close(out, *exact(x, weight, bias, "gelu"))
    assert (out.shape, out.dtype, out.is_contiguous()) == (x.shape, dtype, True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [True, False])
def test_activation_and_bias(depthwise, place, activation, has_bias):
    x, weight, bias = operands(place, (2, 6, 5, 48), 3)
    bias = bias if has_bias else None
    assert_float_close(depthwise(x, weight, bias, activation), *exact(x, weight, bias, activation))


@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_given_scale(static, place, shape, activation):
    x, weight, bias = operands(place, shape, 3)
    q = static(x, weight, bias, activation, torch.tensor([0.02], device=place))  # values beyond 2.54 saturate
    expected, error = exact(x, weight, bias, activation)
    assert_int8_close(q, np.clip(expected, -2.54, 2.54), error, 0.02)
    assert (q.shape, q.dtype, q.is_contiguous()) == (x.shape, torch.int8, True)


def test_strips_cover_the_image(depthwise, place, monkeypatch):
    """Whatever their sizes: strips of rows that end in the image or at its edge, columns and channels beyond it."""
    x, weight, bias = operands(place, (2, 7, 5, 72), 3)
    expected, error = exact(x, weight, bias, "none")
    for chosen in ((7, 8, 64), (3, 4, 128), (1, 2, 32), (4, 16, 32)):
        monkeypatch.setattr(kernels, "tile", lambda *_, chosen=chosen: chosen)
        assert_float_close(depthwise(x, weight, bias, "none"), expected, error)


def test_strided_and_empty(depthwise, place):
    """A part of the channels, as a split of a linear's result has them."""
    x, weight, bias = operands(place, (2, 6, 5, 80), 3)
    for view, own in ((x[..., 16:48], slice(16, 48)), (x[..., ::2], slice(0, None, 2)), (x[:, ::2, ::2], slice(None))):
        given = weight[..., own], bias[own], "gelu"
        assert torch.equal(depthwise(view, *given), depthwise(view.contiguous(), *given))
    assert depthwise(x[:0], weight, bias, "gelu").shape == (0, 6, 5, 80)


def test_nan_stays_in_its_window(depthwise, place):
    x, weight, bias = operands(place, (1, 8, 8, 32), 3)
    x[0, 4, 4, 7] = float("nan")
    bad = depthwise(x, weight, bias, "gelu").isnan()
    assert bad[0, 3:6, 3:6, 7].all()
    assert bad.sum() == 9


def test_opcheck():
    x, weight, bias = operands("cpu", (2, 4, 5, 16), 3, torch.float32)
    torch.library.opcheck(torch.ops.qframework.depthwise.default, (x, weight, bias, "gelu"))
    torch.library.opcheck(torch.ops.qframework.depthwise_quantize.default, (x, weight, None, "none", torch.ones(1)))


def test_bad_input():
    depthwise = torch.ops.qframework.depthwise
    x, weight = torch.randn(1, 4, 4, 8), torch.randn(3, 3, 8)
    with pytest.raises(QFrameworkError, match=r"weight must have shape \(3, 3, 8\), .* got \(3, 3, 4\)"):
        depthwise(x, weight[..., :4], None, "none")
    with pytest.raises(QFrameworkError, match=r"weight must have shape .* got \(4, 4, 8\)"):
        depthwise(x, torch.randn(4, 4, 8), None, "none")
    with pytest.raises(QFrameworkError, match=r"x must have shape \(N, H, W, C\) with channels, got \(4, 8\)"):
        depthwise(x[0, 0], weight, None, "none")
    with pytest.raises(UnsupportedError, match=r"activation must be .* got 'mish'"):
        depthwise(x, weight, None, "mish")
    with pytest.raises(QFrameworkError, match=r"bias must have shape \(8,\), got \(4,\)"):
        depthwise(x, weight, torch.zeros(4), "none")
    with pytest.raises(QFrameworkError, match="scale must be positive"):
        torch.ops.qframework.depthwise_quantize(x, weight, None, "none", torch.zeros(1))


def test_strips_are_as_long_as_takes_the_fewest_steps():
    """132 multiprocessors with 12 programs each: 1,584 at a time."""
    assert tile(64, 14, 14, 384, 3, 132) == (7, 4, 128)  # 1,536 programs, where strips of 14 rows leave half idle
    assert tile(16, 32, 32, 1280, 3, 132)[0] == 32  # 1,280 programs, where halves would come in two rounds
    assert tile(1, 14, 14, 1280, 3, 132)[0] == 1  # few pixels: as many programs as there are rows
    assert tile(1, 1, 1, 8, 3, 132) == (1, 2, 32)


@pytest.mark.skipif(INTERPRET or not HAS_TRITON, reason="interpreted kernels cannot be compiled")
@pytest.mark.parametrize("channels", [32, 192, 1280])
@pytest.mark.parametrize("quantizes", [False, True])
@pytest.mark.parametrize("taps", [3, 9])
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.sample(1 / 6)
def test_the_kernel_compiles(chip, taps, quantizes, channels, tmp_path):
    """Without spills."""
    _, block_w, block_c = tile(16, 32, 32, channels, taps, 132)
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr"), "*fp16")
    pointers |= {"out_ptr": "*i8" if quantizes else "*fp16", "scale_ptr": "*fp32"}
    sizes = dict.fromkeys(("H", "W", "C", "stride_xn", "stride_xh", "stride_xw", "rows_of_strip"), "i32")
    constants = {"K": taps, "HAS_BIAS": True, "ACTIVATION": "gelu", "QUANTIZES": quantizes}
    constants |= {"BLOCK_W": block_w, "BLOCK_C": block_c}
    compiled = compile_for(chip, kernels._depthwise_kernel, {**pointers, **sizes}, constants, num_warps=1)
    assert stack_bytes(compiled, tmp_path) == 0
