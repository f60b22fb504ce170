"""int8_gated_linear on every implementation, against float64."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from oracle import GELU_OFF, UNIT, assert_float_close, assert_int8_close, linear, numpy64

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.linear import gated
from qframework.kernels.linear.gated import INT8_GATED_LINEAR, Int8GatedLinearArguments
from qframework.kernels.linear.tile import COOPERATIVE, PINGPONG
from qframework.kernels.linear.tiles import gated_few_rows_tile
from qframework.kernels.runtime.activation import ACTIVATIONS

TILES = [PINGPONG, COOPERATIVE, PINGPONG._replace(block_n=64, num_stages=7)]
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="Hopper's kernel"
)
SHAPES = [
    ((197, 64), 48),
    ((2, 70, 256), 144),  # a tile's columns end in the middle
    ((3, 5, 2, 40), 17),  # no multiple of 16 bytes
    ((70, 128), 64),
    ((1, 16), 16),
]


@pytest.fixture
def run(implementation):
    return {"cpu": torch.ops.qframework.int8_gated_linear, "triton": INT8_GATED_LINEAR.cuda}[implementation]


@pytest.fixture
def case(place):
    return partial(make_case, place)


def make_case(place, shape, n, scale="per_token", bias=False, packed=False):
    """Full-range operands; the weights are two, or the rows of one."""
    generator = torch.Generator().manual_seed(n)
    integers = partial(torch.randint, -127, 128, dtype=torch.int8, generator=generator)
    a, both = integers(shape), integers((2 * n, shape[-1])).to(place)
    gate, up = (both[:n], both[n:]) if packed else (both[:n].clone(), both[n:].clone())
    a_shape = {"per_token": (*shape[:-1], 1), "per_tensor": (1,), "position": (*shape[1:-1], 1)}[scale]
    a_scale = (0.5 + torch.rand(a_shape, generator=generator)) / 73
    scales = (0.5 + torch.rand((2, n), generator=generator)) / 73 / shape[-1] ** 0.5
    biases = torch.randn((2, n), generator=generator).half() if bias else (None, None)
    vectors = [None if each is None else each.to(place) for each in (*scales, *biases)]
    return a.to(place), a_scale.to(place), gate, vectors[0], vectors[2], up, vectors[1], vectors[3]


def exact(a, a_scale, gate, gate_scale, gate_bias, up, up_scale, up_bias, activation):
    """The product, and what float32 may be off."""
    left, left_error = linear(a, a_scale, gate, gate_scale, gate_bias, activation)
    right, right_error = linear(a, a_scale, up, up_scale, up_bias)
    left_error = left_error + GELU_OFF * (activation == "gelu")
    error = np.abs(left) * right_error + (np.abs(right) + right_error) * left_error
    return left * right, error + UNIT[torch.float32] * np.abs(left * right)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", ["per_token", "per_tensor", "position"])
@pytest.mark.parametrize(("shape", "n"), SHAPES)
def test_float_results(run, case, shape, n, scale, dtype):
    operands = case(shape, n, scale)
    out = run(*operands, "silu", None, dtype)
    assert_float_close(out, *exact(*operands, "silu"))
    assert (out.shape, out.dtype, out.is_contiguous()) == ((*shape[:-1], n), dtype, True)


@pytest.mark.parametrize("rows", [70, 20])
@pytest.mark.parametrize("zero_point", [None, -20])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_int8_results(run, case, activation, zero_point, rows):
    operands = case((2, rows, 256), 144, bias=True)
    expected, error = exact(*operands, activation)
    step = np.abs(expected).max() / 90  # with the zero point, the largest values saturate
    given = None if zero_point is None else torch.tensor([zero_point], dtype=torch.int32, device=operands[0].device)
    scale = torch.full((1,), step, device=operands[0].device)
    q = run(*operands, activation, scale, None, given)
    shift = (zero_point or 0) * numpy64(scale)
    assert_int8_close(q, expected + shift, error + 2e-6 * np.abs(expected), numpy64(scale))
    assert q.is_contiguous()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [50, 16])
def test_activation_and_bias(run, case, activation, bias, rows):
    operands = case((3, rows, 128), 80, bias=bias)
    assert_float_close(run(*operands, activation, None, torch.float16), *exact(*operands, activation))


@pytest.mark.parametrize("rows", [90, 9])
def test_one_scale_of_each_weight(run, case, rows):
    a, a_scale, gate, gate_scale, _, up, up_scale, _ = case((rows, 64), 32)
    operands = a, a_scale, gate, gate_scale[:1], None, up, up_scale[1:2], None
    assert_float_close(run(*operands, "silu", None, torch.float16), *exact(*operands, "silu"))


@pytest.mark.parametrize("rows", [80, 8])
def test_parts_of_one_weight(run, case, rows):
    apart, packed = case((rows, 64), 48), case((rows, 64), 48, packed=True)
    assert torch.equal(run(*apart, "gelu", None, torch.float16), run(*packed, "gelu", None, torch.float16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [80, 7])
def test_strided_and_empty(run, case, rows, dtype):
    a, a_scale, *rest = case((2, rows, 64), 48)
    rest = [*rest, "silu", None, dtype]
    wide = torch.cat([a, a], -1)[..., 64:]
    assert torch.equal(run(wide, a_scale, *rest), run(a, a_scale, *rest))
    transposed = run(a.mT.contiguous().mT, a_scale, *rest)  # two linears, whose float32 results are multiplied
    exactly = {"rtol": 0, "atol": 0} if dtype == torch.float32 else {}  # which is by two linears in both forms
    torch.testing.assert_close(transposed, run(a, a_scale, *rest), **exactly)
    assert run(a[:0], a_scale[:0], *rest).shape == (0, rows, 48)


@pytest.mark.parametrize("m", [1, 16, 17, 64, 65])
def test_one_kernel_for_few_rows(monkeypatch, m):
    """Of 16 bits and of INT8; float32 has the accuracy of two linears."""
    a, *rest = make_case(torch.device("cpu"), (m, 64), 48)
    x = Int8GatedLinearArguments(a, *rest, "silu", None, torch.float16)
    monkeypatch.setattr(gated, "chip_of", lambda device: ((8, 9), 142))
    found = gated.tile_of(x, x.empty_result(), torch.device("cuda"))
    assert (found is not None) == (m <= 64)
    assert found is None or (found.block_m >= m and found.block_n == 16 and found.parts == 1)
    x = x._replace(out_dtype=torch.float32)
    assert gated.tile_of(x, x.empty_result(), torch.device("cuda")) is None


@pytest.mark.parametrize("moved", ["", "gate", "up"])
def test_only_weights_at_multiples_of_16_bytes_are_prefetched(moved):
    a, a_scale, gate, gate_scale, _, up, up_scale, _ = make_case(torch.device("cpu"), (3, 256), 32)

    def place(weight, name):
        return torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view(32, 256) if name == moved else weight

    weights = place(gate, "gate"), place(up, "up")
    x = Int8GatedLinearArguments(
        a, a_scale, weights[0], gate_scale, None, weights[1], up_scale, None, "silu", None, torch.float16
    )
    tile = gated_few_rows_tile(3, 32, 256, 132)
    assert tile.ahead == 256
    call = gated._call(x, x.empty_result(), a.device, tile)
    assert call.constants["AHEAD"] == (0 if moved else 256)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("int8", [False, True], ids=["float16", "int8"])
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.specialized}-{tile.block_n}")
@pytest.mark.parametrize(
    ("shape", "n"),
    [
        ((197, 768), 2048),
        ((5000, 320), 1040),
        ((3000, 128), 96),
        ((1, 16), 32),
        ((9, 1024, 2048), 1152),
        ((700, 144), 16),
    ],
)
def test_every_tile_on_hopper(shape, n, tile, int8):
    """More tiles than programs, tiles that end beyond both edges, an inner size shorter than a stage."""
    operands = make_case(torch.device("cuda"), shape, n, bias=True)
    scale = torch.full((1,), 0.05, device="cuda") if int8 else None
    x = Int8GatedLinearArguments(*operands, "silu", scale, None if int8 else torch.float16)
    x.check()
    out = torch.full_like(x.empty_result(), 99)
    gated.write_result(x, out, tile)
    expected, error = exact(*operands, "silu")
    if int8:
        assert_int8_close(out, np.clip(expected, -6.35, 6.35), error + 2e-6 * np.abs(expected), 0.05)
    else:
        assert_float_close(out, expected, error)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("rows", [1024, 64, 16, 1])
def test_a_call_on_hopper_is_one_kernel(rows):
    operands = make_case(torch.device("cuda"), (rows, 2048), 1152)
    run = partial(INT8_GATED_LINEAR.cuda, *operands, "silu", None, torch.float16)
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
    assert len([event for event in profile.events() if event.device_type.name == "CUDA"]) == 1


def test_scales_of_other_rows_are_refused(run, case):
    a, _, *rest = case((2, 40, 64), 48)
    with pytest.raises(QFrameworkError, match="a_scale must have shape"):
        run(a, torch.ones(41, 1, device=a.device), *rest, "silu")


def test_refused():
    a, a_scale, gate, gate_scale, _, up, up_scale, _ = make_case(torch.device("cpu"), (8, 32), 16)
    run = torch.ops.qframework.int8_gated_linear
    with pytest.raises(UnsupportedError, match=r"activation must be none, .*got 'swish'"):
        run(a, a_scale, gate, gate_scale, None, up, up_scale, None, "swish")
    with pytest.raises(QFrameworkError, match=r"up must have shape .*16, 32.*got .*15, 32"):
        run(a, a_scale, gate, gate_scale, None, up[1:], up_scale[1:], None, "silu")
    with pytest.raises(QFrameworkError, match="gate_bias and up_bias must be both given or both None"):
        run(a, a_scale, gate, gate_scale, torch.zeros(16), up, up_scale, None, "silu")
    with pytest.raises(QFrameworkError, match="up_scale must have shape"):
        run(a, a_scale, gate, gate_scale, None, up, up_scale[:1], None, "silu")
    with pytest.raises(UnsupportedError, match=r"b must have dtype int8, got torch\.int16"):
        run(a, a_scale, gate, gate_scale, None, up.short(), up_scale, None, "silu")
    with pytest.raises(QFrameworkError, match="out_zero_point must be None without out_scale"):
        run(
            a,
            a_scale,
            gate,
            gate_scale,
            None,
            up,
            up_scale,
            None,
            "silu",
            None,
            None,
            torch.zeros(1, dtype=torch.int32),
        )
    with pytest.raises(QFrameworkError, match="scale must have one element"):
        run(a, a_scale, gate, gate_scale, None, up, up_scale, None, "silu", torch.ones(16))
