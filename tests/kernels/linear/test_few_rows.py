"""int8_linear's kernels for few rows: the same bits as the general kernel, at any shape, with every tile."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from oracle import assert_float_close, assert_int8_close, linear, most_doubtful, numpy64, off_by_activation
from test_int8_linear import make_case

from qframework.kernels.linear import launch as int8_linear_launch
from qframework.kernels.linear.arguments import Int8LinearArguments
from qframework.kernels.linear.launch import readable, write_result
from qframework.kernels.linear.tile import MAX_FEW_ROWS, FewRowsTile, Tile
from qframework.kernels.linear.tiles import INTERPRETED, choose_tile, few_rows_tile

TILES = {
    "whole K": FewRowsTile(64, 16, 32, 4, 2),
    "two parts": FewRowsTile(64, 16, 64, 4, 2, parts=2, ahead=256),
    "eight parts": FewRowsTile(64, 32, 32, 4, 2, parts=8, ahead=512),
}
SHAPES = [(1, 33, 64), (3, 16, 1000), (17, 70, 123), (64, 40, 272), (2, 5, 1)]  # M, N, K
OUTPUTS = ["float16", "bfloat16", "float32", "residual", "int8", "int8 per row", "int8 per channel", "everything"]
OUTPUTS += ["zero point"]


@functools.cache
def place() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def arguments(output: str, m: int, n: int, k: int) -> Int8LinearArguments:
    """A call with bias whose epilogue is named ``output``."""
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}.get(output, torch.float16)
    scale = "per_tensor" if output == "int8" else "per_token"
    a, a_scale, b, b_scale, bias, added = make_case(place(), (m, k), n, scale, residual=True, dtype=dtype)
    x = Int8LinearArguments(a, a_scale, b, b_scale, bias, out_dtype=dtype)
    if output in ("residual", "everything"):
        x = x._replace(residual=added)
    if output in ("everything", "zero point"):
        x = x._replace(activation="gelu")
    if output in ("everything", "zero point", "int8", "int8 per row", "int8 per channel"):
        exact, _ = linear(x.a, x.a_scale, x.b, x.b_scale, x.bias, x.activation, x.residual)
        step = float(np.abs(exact).max() / 90)
        shape = {"int8 per row": (m, 1), "int8 per channel": (n,)}.get(output, (1,))
        sizes = (
            torch.linspace(0.5, 2.0, m if len(shape) > 1 else n, device=place()).reshape(shape)
            if shape != (1,)
            else 1.0
        )
        x = x._replace(out_scale=torch.full(shape, step, device=place()) * sizes, out_dtype=None)
    if output == "zero point":
        x = x._replace(out_zero_point=torch.full((1,), -90, dtype=torch.int32, device=place()))
    return x


def result(x: Int8LinearArguments, tile: Tile | FewRowsTile) -> torch.Tensor:
    out = x.empty_result()
    write_result(readable(x), out, tile)
    return out


@pytest.mark.interpreter
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_bits_as_the_general_kernel(tile, output, shape):
    x = arguments(output, *shape)
    got = result(x, TILES[tile])
    assert torch.equal(got, result(x, INTERPRETED))
    exact, error = linear(x.a, x.a_scale, x.b, x.b_scale, x.bias, x.activation, x.residual)
    if x.out_scale is None:
        assert_float_close(got, exact, error)
    else:
        shift = 0 if x.out_zero_point is None else numpy64(x.out_zero_point) * numpy64(x.out_scale)
        scale = numpy64(x.out_scale)
        error = error + off_by_activation(*x[:7], scale, x.out_zero_point is not None)
        assert_int8_close(got, exact + shift, error, scale, most_doubtful(x.activation, x.residual, scale))


@pytest.mark.interpreter
@pytest.mark.parametrize("parts", [1, 4])
def test_operands_with_gaps(parts):
    """Rows of a, b and the residual that are not next to each other, and weights off multiples of 16 bytes."""
    x = arguments("residual", 5, 24, 90)
    wide = torch.zeros(24, 107, dtype=torch.int8, device=place())
    wide[:, 3:93] = x.b
    gaps = x._replace(
        a=torch.cat([x.a, x.a], 1)[:, :90], b=wide[:, 3:93], residual=torch.cat([x.residual, x.residual], 1)[:, :24]
    )
    tile = FewRowsTile(16, 16, 32, 4, 2, parts, ahead=256)
    assert torch.equal(result(gaps, tile), result(x, tile))


@pytest.mark.interpreter
def test_unused_rows_and_columns_are_not_written():
    """Neither beyond the result's last row nor beyond its last column."""
    x = arguments("float16", 3, 21, 64)
    for tile in TILES.values():
        room = torch.full((5, 21), 7.0, dtype=torch.float16, device=place())
        write_result(readable(x), room[:3], tile)
        assert (room[3:] == 7).all()


@pytest.mark.interpreter
def test_the_operator_takes_them(monkeypatch):
    taken = []
    few = int8_linear_launch._few_rows_calls
    monkeypatch.setattr(int8_linear_launch, "_few_rows_calls", lambda *args: taken.append(args[2]) or few(*args))
    for m in (1, MAX_FEW_ROWS, MAX_FEW_ROWS + 1):
        x = arguments("float16", m, 16, 32)
        int8_linear_launch.int8_linear_triton(x)
    assert len(taken) == 2
    assert all(tile.block_m >= m for tile, m in zip(taken, (1, MAX_FEW_ROWS), strict=True))


SIZES = [1, 16, 200, 512, 1000, 2048, 4096, 8192, 14336, 128256]


@pytest.mark.parametrize("m", [1, 2, 16, 17, 33, 64])
@pytest.mark.parametrize("processors", [20, 58, 108, 132, 170])
def test_tiles_for_any_shape(m, processors):
    """All rows in a tile, no part without work, and as many programs as multiprocessors where the weight is large."""
    for n in SIZES:
        for k in (1, 32, 100, 576, 2048, 4096, 8192, 14336, 131071):
            tile = choose_tile(m, n, k, (9, 0), processors, "float")
            assert tile == few_rows_tile(m, n, k, processors)
            assert tile.block_m >= m
            steps = -(-k // tile.block_k)
            assert (tile.parts - 1) * -(-steps // tile.parts) < steps, "a part begins beyond K"
            if n * k >= 2**22 and n >= 2048:
                assert -(-n // tile.block_n) * tile.parts >= 0.5 * min(processors, 128)


def test_more_rows_take_the_general_tile():
    assert isinstance(choose_tile(MAX_FEW_ROWS + 1, 768, 768, (9, 0), 132, "float"), Tile)
    assert isinstance(choose_tile(4, 768, 0, (9, 0), 132, "float"), Tile), "nothing to multiply"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_weight_written_by_the_kernel_before(rows):
    """Every second product reads a weight that the kernel before it writes, which the product may have prefetched."""
    from qframework.kernels import int8_linear
    from qframework.kernels.quantize import dynamic_quantize

    width = 2048
    weights = torch.randint(-127, 128, (4, width, width), dtype=torch.int8, device="cuda")
    scale = torch.full((width,), 1 / (73 * width**0.5), device="cuda")
    x = torch.randn(rows, width, device="cuda", dtype=torch.half)
    written, out = torch.zeros_like(weights[0]), torch.zeros_like(x)

    def run(synchronize):
        y = x
        for i in range(12):
            q, q_scale = dynamic_quantize(y)
            weight = written.copy_(weights[i % 4]) if i % 2 else weights[i % 4]
            if synchronize:
                torch.cuda.synchronize()
            y = int8_linear(q, q_scale, weight, scale, out_dtype=torch.half)
            if synchronize:
                torch.cuda.synchronize()
        out.copy_(y)

    run(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(False)
    for _ in range(20):
        x.normal_()
        run(True)
        expected = out.clone()
        assert expected.count_nonzero() > expected.numel() / 2
        for again in (graph.replay, functools.partial(run, False)):
            out.zero_()
            again()
            assert torch.equal(out, expected)
