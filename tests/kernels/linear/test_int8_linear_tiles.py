"""Every kind of tile of int8_linear's kernels, with partial tiles and several turns, against the FP64 oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import (
    assert_float_close,
    assert_int8_close,
    linear,
    most_doubtful,
    numpy64,
    off_by_activation,
)
from test_int8_linear import make_case

from qframework.kernels.linear import launch as int8_linear_launch
from qframework.kernels.linear import tiles as int8_linear_tiles
from qframework.kernels.linear.int8_linear import INT8_LINEAR
from qframework.kernels.linear.tile import (
    COOPERATIVE,
    FLAT_160,
    FLAT_192,
    PINGPONG,
    THIRDS,
    WIDE,
    WIDE_160,
    WIDE_192,
    Tile,
)
from qframework.kernels.linear.triton import first_inside
from qframework.kernels.runtime.triton import tl, triton

TILES = {
    "by pointers": int8_linear_tiles.INTERPRETED,
    "along a line": int8_linear_tiles.INTERPRETED._replace(group_m=2),
    "descriptors": Tile(32, 32, 32, 4, 1, tma=True, tma_store=True),
    "persistent": Tile(32, 32, 32, 4, 1, programs=1, subtiles=2, tma=True),
    "quarters": Tile(32, 64, 32, 4, 1, programs=2, subtiles=4, tma=True, tma_store=True, group_m=2),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("output", ["float16", "residual", "int8", "gelu", "zero point"])
@pytest.mark.parametrize(("shape", "n"), [((3, 67, 96), 80), ((1, 48), 16), ((130, 32), 144)])
def test_every_tile(monkeypatch, tile, output, shape, n):
    """Rows, columns and inner sizes that fill no tile; two programs for many tiles."""
    if tile == "along a line":
        monkeypatch.setattr(int8_linear_launch, "_MAX_GRID", 0)
    check_tile(monkeypatch, TILES[tile], output, shape, n)


@triton.jit
def _first_inside_kernel(out_ptr, size, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    tl.store(out_ptr + tile, first_inside(tile * BLOCK, size, BLOCK))


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("size", "first"), [(64, [0]), (65, [0, 1]), (128, [0, 64]), (197, [0, 64, 128, 133]), (40, [0]), (1, [0])]
)
def test_the_last_tile_ends_with_the_matrix(size, first):
    """One that is larger than the matrix begins with it."""
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = torch.empty(len(first), dtype=torch.int32, device=place)
    _first_inside_kernel[(len(first),)](found, size, 64)
    assert found.tolist() == first


SPECIALIZED = {
    "pingpong": PINGPONG,
    "pingpong, groups of 8": PINGPONG._replace(group_m=8),
    "cooperative": COOPERATIVE,
    "three warpgroups": THIRDS,
    "128 and 128 columns": WIDE,
    "128 and 32 columns": WIDE_160,
    "128 and 64 columns": WIDE_192,
    "128 and 32 columns, one warpgroup": FLAT_160,
    "128 and 64 columns, one warpgroup": FLAT_192,
}


@pytest.mark.gpu
@pytest.mark.parametrize("tile", SPECIALIZED)
@pytest.mark.parametrize("output", ["float16", "residual", "int8", "gelu", "zero point"])
@pytest.mark.parametrize(
    ("shape", "n"), [((130, 32), 144), ((1, 48), 16), ((3, 197, 96), 400), ((5, 260, 1536), 528), ((2600, 704), 272)]
)
def test_specialized_tiles(monkeypatch, tile, output, shape, n):
    """More rounds of stages and turns of warpgroups than one, partial tiles everywhere, two programs or all."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compiled for Hopper only")
    chosen = SPECIALIZED[tile]
    if output == "residual":
        chosen = int8_linear_tiles._with_room(chosen, "residual")
    check_tile(monkeypatch, chosen, output, shape, n)


def check_tile(monkeypatch, chosen: Tile, output: str, shape: tuple[int, ...], n: int) -> None:
    """``chosen``, on a chip with two multiprocessors."""
    monkeypatch.setattr(int8_linear_launch, "tile_for", lambda *_: chosen)
    monkeypatch.setattr(int8_linear_launch, "chip_of", lambda _: ((9, 0), 2))
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    a, a_scale, b, b_scale, bias, added = make_case(place, shape, n, residual=True, dtype=torch.float16)
    act, residual = "gelu" if output in ("gelu", "zero point") else "none", added if output == "residual" else None
    exact, error = linear(a, a_scale, b, b_scale, bias, act, residual)
    to_int8 = output in ("int8", "gelu", "zero point")
    scale = torch.full((1,), float(np.abs(exact).max() / 120), device=place) if to_int8 else None
    zero_point = torch.tensor([-77], dtype=torch.int32, device=place) if output == "zero point" else None
    dtype = torch.float16 if scale is None else None
    for _ in range(2):  # the second launch goes past Triton
        got = INT8_LINEAR.cuda(a, a_scale, b, b_scale, bias, act, residual, scale, dtype, zero_point)
        if scale is None:
            assert_float_close(got, exact, error)
        else:
            shifted = exact if zero_point is None else exact - 77 * numpy64(scale)
            off = off_by_activation(a, a_scale, b, b_scale, bias, act, residual, numpy64(scale))
            most = most_doubtful(act, residual, numpy64(scale))
            assert_int8_close(got, shifted, error + off, numpy64(scale), most)
