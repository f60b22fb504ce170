"""int8_linear on every implementation, against the FP64 oracle."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import (
    INTERPRETED,
    UNIT,
    assert_float_close,
    assert_int8_close,
    linear,
    most_doubtful,
    numpy64,
    off_by_activation,
)

from qframework.errors import UnsupportedError
from qframework.kernels import int8_linear, zero_point_bias
from qframework.kernels.linear import launch as int8_linear_launch
from qframework.kernels.linear.arguments import Int8LinearArguments
from qframework.kernels.linear.int8_linear import INT8_LINEAR
from qframework.kernels.linear.reference import int8_linear_ref
from qframework.kernels.runtime.activation import ACTIVATIONS

SHAPES = [
    ((197, 768), 256),  # a ViT's tokens
    ((2, 7, 123), 65),  # odd, K no multiple of a tile
    ((1, 1), 1),
    ((1, 64), 33),
    ((3, 5, 2, 40), 17),
    ((130, 256), 130),  # one past a tile
    ((3, 32, 196), 49),  # an MLP-Mixer's tokens: many rows whose width is no multiple of 16 bytes
]


@pytest.fixture
def run(implementation):
    return {"cpu": torch.ops.qframework.int8_linear, "triton": INT8_LINEAR.cuda}[implementation]


@pytest.fixture
def case(place):
    return partial(make_case, place)


def make_case(place, shape, n, scale="per_token", residual=False, dtype=torch.float32):
    """Full-range operands with -127 and 127, a row of zeros and an outlier channel."""
    generator = torch.Generator().manual_seed(n)
    a = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
    b = torch.randint(-127, 128, (n, shape[-1]), dtype=torch.int8, generator=generator)
    a.view(-1, shape[-1])[0] = 127
    b[0] = 127
    if n > 1:
        b[1] = -127
    if a.numel() > shape[-1]:
        a.view(-1, shape[-1])[-1] = 0
    a_shape = {"per_token": (*shape[:-1], 1), "per_tensor": (1,), "position": (*shape[1:-1], 1)}[scale]
    a_scale = (1e-2 + torch.rand(a_shape, generator=generator) / 5) / max(shape[-1], 16)  # results fit float16
    b_scale = 1e-3 + torch.rand(n, generator=generator) / 50
    b_scale[0] *= 100
    bias = torch.randn(n, generator=generator)
    added = torch.randn((*shape[:-1], n), generator=generator, dtype=torch.float32).to(dtype) if residual else None
    return tuple(t if t is None else t.to(place) for t in (a, a_scale, b, b_scale, bias, added))


@pytest.mark.parametrize(("shape", "n"), [*SHAPES, ((4, 4096), 8)])
def test_accumulator_is_exact(run, case, shape, n):
    a, _, b, *_ = case(shape, n)
    one = torch.ones(1, device=a.device)
    got = run(a, one, b, one.expand(n).contiguous())
    exact = (numpy64(a) @ numpy64(b).T).astype(np.float32)  # INT32 sums, rounded once to the output's float32
    assert np.array_equal(got.cpu().numpy(), exact)


@pytest.mark.parametrize(("shape", "n"), SHAPES)
@pytest.mark.parametrize("scale", ["per_token", "per_tensor", "position"])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_float_output(run, case, shape, n, scale, out_dtype):
    a, a_scale, b, b_scale, bias, residual = case(shape, n, scale, residual=True, dtype=out_dtype)
    got = run(a, a_scale, b, b_scale, bias, "none", residual, None, out_dtype)
    assert got.dtype == out_dtype
    assert got.is_contiguous()
    assert_float_close(got, *linear(a, a_scale, b, b_scale, bias, "none", residual))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("scale", ["per_token", "per_tensor"])
@pytest.mark.parametrize("residual", [False, True])
def test_activations(run, case, activation, scale, residual):
    a, a_scale, b, b_scale, bias, added = case((2, 7, 123), 65, scale, residual)
    a_scale = a_scale / 10  # so that many values lie where the activations bend
    got = run(a, a_scale, b, b_scale, bias, activation, added)
    assert_float_close(got, *linear(a, a_scale, b, b_scale, bias, activation, added))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
def test_without_bias_and_with_one_weight_scale(run, case, bias, per_channel):
    a, a_scale, b, b_scale, a_bias, _ = case((5, 64), 33)
    b_scale = b_scale if per_channel else b_scale[1:2]
    got = run(a, a_scale, b, b_scale, a_bias if bias else None)
    assert_float_close(got, *linear(a, a_scale, b, b_scale, a_bias if bias else None))


@pytest.mark.parametrize("activation", ["none", "gelu", "relu"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("out_scale", ["per_tensor", "position"])
def test_requantized_output(run, case, activation, residual, out_scale):
    a, a_scale, b, b_scale, bias, added = case((3, 11, 200), 70, "per_tensor", residual)
    exact, error = linear(a, a_scale, b, b_scale, bias, activation, added)
    step = np.abs(exact).max() / 90  # the largest values saturate
    scale = torch.full((1,), step) if out_scale == "per_tensor" else step * (0.5 + torch.rand(11, 1))
    got = run(a, a_scale, b, b_scale, bias, activation, added, scale.to(a.device))
    error = error + off_by_activation(a, a_scale, b, b_scale, bias, activation, added, numpy64(scale))
    assert_int8_close(got, exact, error, numpy64(scale), most_doubtful(activation, added, numpy64(scale)))
    assert int(got.min()) >= -127


@pytest.mark.parametrize("activation", ["none", "gelu", "silu"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("a_scale", ["per_tensor", "per_token"])
def test_output_requantized_per_channel(run, case, activation, residual, bias, a_scale):
    a, scale, b, b_scale, added_bias, added = case((3, 11, 200), 70, a_scale, residual)
    added_bias = added_bias if bias else None
    exact, error = linear(a, scale, b, b_scale, added_bias, activation, added)
    step = np.abs(exact).max((0, 1)) / 90 * np.linspace(0.2, 2.0, 70)  # some channels saturate, some hardly move
    out_scale = torch.from_numpy(step).float()
    got = run(a, scale, b, b_scale, added_bias, activation, added, out_scale.to(a.device))
    error = error + off_by_activation(a, scale, b, b_scale, added_bias, activation, added, numpy64(out_scale))
    assert_int8_close(got, exact, error, numpy64(out_scale))
    assert int(got.min()) == -127 or activation != "none"
    with_ones = run(a, scale, b, b_scale, added_bias, activation, added, out_scale.view(1, 1, 70).to(a.device))
    assert torch.equal(got, with_ones)


def test_scales_of_channel_blocks_match_separate_layers(run, case):
    """Scales of three blocks of channels give what three layers would."""
    a, a_scale, b, b_scale, bias, _ = case((2, 9, 64), 48, "per_tensor")
    scales = torch.tensor([0.01, 0.2, 3.0], device=a.device)
    together = run(a, a_scale, b, b_scale, bias, "none", None, scales.repeat_interleave(16))
    apart = [
        run(a, a_scale, b[i : i + 16], b_scale[i : i + 16], bias[i : i + 16], "none", None, scale)
        for i, scale in zip((0, 16, 32), scales, strict=True)
    ]
    off = (together.int() - torch.cat(apart, -1).int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() < 0.01


@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("out_scale", ["per_tensor", "position", "channel"])
@pytest.mark.parametrize("zero_point", [-120, 3, 127])
def test_requantized_with_a_zero_point(run, case, activation, residual, out_scale, zero_point):
    a, a_scale, b, b_scale, bias, added = case((3, 11, 200), 70, "per_tensor", residual)
    exact, error = linear(a, a_scale, b, b_scale, bias, activation, added)
    step = np.abs(exact).max() / 90  # values beyond both ends
    shape = {"per_tensor": (1,), "position": (11, 1), "channel": (70,)}[out_scale]
    scale = torch.from_numpy(step * np.linspace(0.5, 1.5, math.prod(shape)).reshape(shape)).float()
    zero = torch.tensor([zero_point], dtype=torch.int32, device=a.device)
    got = run(a, a_scale, b, b_scale, bias, activation, added, scale.to(a.device), None, zero)
    error = error + off_by_activation(a, a_scale, b, b_scale, bias, activation, added, numpy64(scale), zero_point=True)
    most = most_doubtful(activation, added, numpy64(scale))
    assert_int8_close(got, exact + zero_point * numpy64(scale), error, numpy64(scale), most)
    assert int(got.min()) >= -127
    assert int(got.max()) == 127 or zero_point < 0


def test_a_zero_point_is_added_to_the_rounded_value(run, place):
    """Ties are rounded to even before the zero point is added, as PyTorch does; the sum saturates."""
    a = torch.tensor([[1], [3], [5], [-1], [-3], [127], [-127]], dtype=torch.int8, device=place)
    one, zero = torch.ones(1, device=place), torch.tensor(1, dtype=torch.int32, device=place)
    got = run(a, one, a[:1], one, None, "none", None, 2 * one, None, zero)
    assert got.flatten().tolist() == [1, 3, 3, 1, -1, 65, -63]
    got = run(a, one, a[:1], one, None, "none", None, one, None, zero)
    assert got.flatten().tolist() == [2, 4, 6, 0, -2, 127, -126]


@pytest.mark.parametrize("bias", [None, torch.float16, torch.float32])
@pytest.mark.parametrize("one_scale", [False, True])
def test_the_bias_of_a_zero_point(run, case, bias, one_scale):
    """Exact integers, then the product of ``a - zero_point``."""
    a, a_scale, b, b_scale, added, _ = case((5, 200), 70, "per_tensor")
    b_scale = b_scale[:1] if one_scale else b_scale
    added = None if bias is None else added.to(bias)
    zero = torch.tensor([-119], dtype=torch.int32, device=a.device)
    got = run(a, a_scale, b, b_scale, zero_point_bias(added, a_scale, zero, b, b_scale))
    shifted = torch.tensor(numpy64(a) + 119)
    scales = torch.tensor(numpy64(a_scale)) * torch.tensor(numpy64(b_scale))
    exact = shifted @ torch.tensor(numpy64(b)).T * scales
    exact = exact if added is None else exact + torch.tensor(numpy64(added))
    # two float32 sums of parts that may be larger than the result
    largest = (shifted.abs() + 119) @ torch.tensor(numpy64(b)).abs().T * scales
    assert ((torch.tensor(numpy64(got)) - exact).abs() <= 8 * UNIT[torch.float32] * (largest + exact.abs() + 8)).all()


def test_saturates_symmetrically(run, place):
    a = torch.tensor([[127], [-127]], dtype=torch.int8, device=place)
    one = torch.ones(1, device=place)
    got = run(a, one, a[:1], one, None, "none", None, one)
    assert got.flatten().tolist() == [127, -127]


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_small_negative_activations_saturate_symmetrically(run, place, activation):
    a = torch.tensor([[1], [-1]], dtype=torch.int8, device=place)
    one = torch.ones(1, device=place)
    for step in (1e-4, 1e-2):  # activation(-1) is about -0.16 or -0.27: beyond -127 steps, and within
        y = linear(a, one, a[:1], one, act=activation)[0]
        got = run(a, one, a[:1], one, None, activation, None, step * one)
        assert got.flatten().tolist() == np.clip(np.rint(y / step), -127, 127).flatten().tolist()


@pytest.mark.interpreter
@pytest.mark.parametrize(("bias", "expected"), [(math.inf, math.inf), (math.nan, math.nan), (1e30, 1e30), (-1e30, 0.0)])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_propagate_nan_and_infinity(bias, expected, activation, dtype):
    """For Triton only: PyTorch's vectorized GELU makes NaN of infinity, and oneDNN's ReLU makes 0 of NaN."""
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    a, one = torch.ones(2, 16, dtype=torch.int8, device=place), torch.ones(1, device=place)
    got = INT8_LINEAR.cuda(a, one, a[:1], one, torch.full((1,), bias, device=place), activation, None, None, dtype)
    # Three float32 roundings: scaled sum, bias and activation. bfloat16 adds its own, which the interpreter truncates.
    rounding = 3 * UNIT[torch.float32] if dtype == torch.float32 else UNIT[dtype] * (2 if INTERPRETED else 1)
    torch.testing.assert_close(got, torch.full_like(got, expected), equal_nan=True, atol=0, rtol=rounding)


@pytest.mark.parametrize("step", [2.0**-126, 2.0**-60, 2.0**100, 2.0**127, float("inf")])
def test_requantized_with_an_extreme_scale(run, place, step):
    a = torch.tensor([[3], [-3], [0]], dtype=torch.int8, device=place)
    one = torch.ones(1, device=place)
    got = run(a, one, a[:1], one, None, "none", None, torch.full((1,), step, device=place))
    assert got.flatten().tolist() == ([127, -127, 0] if step < 1 else [0, 0, 0])


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 0), (2, 0, 8)])
@pytest.mark.parametrize("n", [0, 3])
def test_empty(run, place, shape, n):
    a = torch.zeros(shape, dtype=torch.int8, device=place)
    b = torch.zeros((n, shape[-1]), dtype=torch.int8, device=place)
    bias = torch.arange(n, dtype=torch.float32, device=place)
    got = run(a, torch.ones(1, device=place), b, torch.ones(n, device=place), bias)
    assert torch.equal(got, bias.expand(*shape[:-1], n))


def test_strided_operands(run, case):
    a, a_scale, b, b_scale, bias, residual = case((6, 10, 48), 20, residual=True)
    plain = run(a, a_scale, b, b_scale, bias, "none", residual)
    strided = run(
        a.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        a_scale,
        torch.cat([b, b], 1)[:, :48],
        b_scale,
        bias,
        "none",
        torch.cat([residual, residual], -1)[..., :20],
    )
    assert torch.equal(plain, strided)
    sliced = run(a[::2, 1:9], a_scale[::2, 1:9], b, b_scale, bias)
    assert torch.equal(sliced, run(a, a_scale, b, b_scale, bias)[::2, 1:9])


@pytest.mark.parametrize(("rows", "k", "width"), [(65, 196, 208), (64, 196, 196), (65, 208, 208), (500, 1, 16)])
def test_many_rows_are_read_16_bytes_at_a_time(rows, k, width):
    a, a_scale, b, b_scale, *_ = make_case(torch.device("cpu"), (rows, k), 8)
    read = int8_linear_launch.readable(Int8LinearArguments(a, a_scale, b, b_scale))
    assert (read.a.shape, read.b.shape) == ((rows, width), (8, width))
    assert torch.equal(read.a[:, :k], a)
    assert torch.equal(read.b[:, :k], b)
    assert not read.b[:, k:].any() or not read.a[:, k:].any()


def test_inputs_are_unchanged(run, case):
    operands = case((4, 9, 40), 12, residual=True)
    before = [t.clone() for t in operands]
    a, a_scale, b, b_scale, bias, residual = operands
    run(a, a_scale, b, b_scale, bias, "relu", residual)
    assert all(torch.equal(x, y) for x, y in zip(operands, before, strict=True))


@settings(max_examples=40)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    k=st.integers(1, 80),
    exponent=st.integers(-30, 20),
    activation=st.sampled_from(ACTIVATIONS),
    out_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    strided=st.booleans(),
    outlier=st.sampled_from([1.0, 1e4]),
    seed=st.integers(0, 2**31),
)
def test_any_shape_stride_and_scale(m, n, k, exponent, activation, out_dtype, strided, outlier, seed):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-127, 128, (m, k), dtype=torch.int8, generator=generator)
    b = torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=generator)
    a[m // 2] = 0
    if strided:
        a, b = a.t().contiguous().t(), torch.stack([b, b], -1)[..., 0]
    a_scale = torch.rand(m, 1, generator=generator).clamp(min=1e-3) * 2.0**exponent
    b_scale = torch.rand(n, generator=generator).clamp(min=1e-3)
    b_scale[0] *= outlier
    bias = torch.randn(n, generator=generator)
    got = int8_linear(a, a_scale, b, b_scale, bias, activation, out_dtype=out_dtype)
    assert_float_close(got, *linear(a, a_scale, b, b_scale, bias, activation))


def test_reference_agrees_with_the_oracle():
    a, a_scale, b, b_scale, bias, residual = make_case(torch.device("cpu"), (2, 7, 123), 65, residual=True)
    got = int8_linear_ref(Int8LinearArguments(a, a_scale, b, b_scale, bias, "gelu", residual))
    assert_float_close(got, *linear(a, a_scale, b, b_scale, bias, "gelu", residual))


OPCHECK_CASES = {
    "float": {},
    "epilogue": {"activation": "gelu", "residual": True, "out_dtype": torch.bfloat16},
    "requantized": {"out_scale": torch.tensor([0.5])},
    "requantized per channel": {"out_scale": torch.linspace(0.1, 0.8, 8)},
    "zero point": {"out_scale": torch.tensor([0.5]), "out_zero_point": torch.tensor([-5], dtype=torch.int32)},
}


@pytest.mark.parametrize("name", OPCHECK_CASES)
def test_opcheck(device, name):
    a, a_scale, b, b_scale, bias, residual = make_case(device, (2, 5, 24), 8, residual=True)
    kwargs = dict(OPCHECK_CASES[name])
    kwargs["residual"] = residual if kwargs.pop("residual", False) else None
    for argument in kwargs.keys() & {"out_scale", "out_zero_point"}:
        kwargs[argument] = kwargs[argument].to(device)
    torch.library.opcheck(torch.ops.qframework.int8_linear.default, (a, a_scale, b, b_scale, bias), kwargs)


def test_opcheck_of_the_bias_of_a_zero_point(device):
    _, a_scale, b, b_scale, bias, _ = make_case(device, (2, 5, 24), 8, "per_tensor")
    zero = torch.tensor([-5], dtype=torch.int32, device=device)
    operator = torch.ops.qframework.zero_point_bias.default
    torch.library.opcheck(operator, (bias, a_scale, zero, b, b_scale))
    torch.library.opcheck(operator, (None, a_scale, zero, b, b_scale[:1]))


def test_compiles_without_graph_break(device, fresh_dynamo):
    a, a_scale, b, b_scale, bias, _ = make_case(device, (2, 5, 24), 8)

    def layer(a, a_scale):
        return int8_linear(a, a_scale, b, b_scale, bias, "gelu") * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    assert torch.equal(compiled(a, a_scale), layer(a, a_scale))
    assert torch.equal(compiled(a[:, :3], a_scale[:, :3]), layer(a[:, :3], a_scale[:, :3]))


def test_a_sum_that_may_overflow_is_refused(run, place):
    a, b = (torch.full((rows, 131_072), -128, dtype=torch.int8, device=place) for rows in (1, 2))
    one = torch.ones(1, device=place)
    message = r"int8_linear: K must be at most 131071, .* can overflow, got b of shape \(2, 131072\)"
    with pytest.raises(UnsupportedError, match=message):
        run(a, one, b, one)
    with pytest.raises(UnsupportedError, match=message):
        torch.ops.qframework.int8_linear(a.to("meta"), one.to("meta"), b.to("meta"), one.to("meta"))
