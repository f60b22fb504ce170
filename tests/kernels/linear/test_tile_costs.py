"""The tile of a shape that no table has, by estimated times."""

import pytest

from qframework.kernels.linear import tiles
from qframework.kernels.linear.tile import (
    COOPERATIVE,
    FLAT_160,
    FLAT_192,
    PINGPONG,
    THIRDS,
    WIDE,
    WIDE_160,
    WIDE_192,
    Epilogue,
    Tile,
)
from qframework.kernels.linear.tile_candidates import allowed
from qframework.kernels.linear.tile_costs import COSTS, fastest_tile, int8_us, tile_us
from qframework.kernels.linear.tiles import general_tile

HOPPER = (9, 0)


def chosen(m: int, n: int, k: int, epilogue: Epilogue = "float", **options) -> Tile:
    return general_tile(m, n, k, HOPPER, 132, epilogue, **options)


def test_almost_all_multiprocessors_at_work_are_enough_for_the_largest_tile():
    """13 x 10 tiles on 132 multiprocessors took the smallest tile, and twice as long."""
    assert chosen(1568, 1280, 5120, "residual") == PINGPONG


@pytest.mark.parametrize("shape", [(128, 384, 384), (197, 512, 512), (100, 320, 1280)])
def test_small_products_have_a_program_for_many_multiprocessors(shape):
    m, n, _ = shape
    tile = chosen(*shape)
    assert -(-m // tile.block_m) * -(-n // tile.block_n) >= 40


@pytest.mark.parametrize(("epilogue", "tile"), [("residual", WIDE), ("float", COOPERATIVE), ("int8", COOPERATIVE)])
@pytest.mark.parametrize("shape", [(16384, 2048, 8192), (4096, 4096, 4096), (2048, 4096, 14336)])
def test_long_rows_of_large_products_take_cooperative_tiles(epilogue, tile, shape):
    assert chosen(*shape, epilogue) == tile


@pytest.mark.parametrize(
    ("shape", "tile"),
    [((6304, 1024, 4096), THIRDS), ((12608, 768, 3072), THIRDS), ((8192, 1280, 5120), PINGPONG)],
)
def test_a_round_that_is_hardly_begun_takes_other_tiles(monkeypatch, shape, tile):
    """Of 12608 rows, 297 tiles of 128 x 256 take three rounds of 132 multiprocessors, and so do 396 of 192 x 128."""
    monkeypatch.setattr(tiles, "_table", lambda chip: {})
    assert chosen(*shape, "residual") == tile


@pytest.mark.parametrize(
    ("shape", "tiles"),
    [
        ((1576, 768, 3072), (FLAT_160, FLAT_192)),  # 78 tiles of 128 x 128 leave 54 multiprocessors idle
        ((1576, 768, 768), (FLAT_160, FLAT_192)),
        ((2048, 1280, 5120), (WIDE_160,)),  # two rounds of 128 x 128, one of 128 x 160
        ((392, 6144, 2048), (WIDE_192,)),  # one round of 128 x 192
        ((197, 3072, 1024), (PINGPONG._replace(block_n=64, num_stages=7),)),  # ViT-L, one image: 96 tiles
        ((2048, 4096, 1024), (PINGPONG,)),  # whole rounds
    ],
)
def test_tiles_fill_a_round(shape, tiles):
    assert chosen(*shape) in tiles


def test_many_columns_are_read_in_groups_of_rows():
    assert chosen(4096, 28672, 4096) == COOPERATIVE._replace(group_m=4)


def test_an_activation_runs_beside_another_tiles_product():
    assert chosen(3136, 8192, 2048, "activation") == PINGPONG


@pytest.mark.parametrize("shape", [(50176, 384, 128), (200704, 192, 64), (12608, 2048, 192)])
def test_many_rounds_take_the_largest_tile(shape):
    assert chosen(*shape) == PINGPONG


def test_operands_that_tma_cannot_read_take_pointers():
    assert fastest_tile(128, 768, 3072, 132).tma
    for shape in [(128, 768, 3072), (100, 520, 520), (800, 520, 520)]:
        assert not chosen(*shape, tma=False).tma
    assert chosen(100, 520, 520, tma=False).block_n < 64


@pytest.mark.parametrize(
    "shape", [(65, 8192, 2048), (100, 3072, 768), (127, 768, 3072), (150, 5120, 5120), (6000, 150, 512)]
)
def test_matrices_fill_the_tiles_that_tma_loads(shape):
    m, n, k = shape
    tile = fastest_tile(m, n, k, 132)
    usable = [each for each in COSTS if not each.tma or (each.block_m <= m and each.block_n <= n)]
    assert tile in usable
    assert int8_us(m, n, k, 132) >= min(tile_us(each, m, n, k, 132) for each in usable)


def test_few_channels_take_short_rounds():
    assert chosen(200, 512, 64).block_k == 64


def test_every_tile_with_a_cost_may_be_named_in_a_file():
    assert set(COSTS) <= allowed(HOPPER)


def test_more_work_never_takes_less_time():
    for tile in COSTS:
        assert (
            tile_us(tile, 200, 512, 512, 132) <= tile_us(tile, 400, 512, 512, 132) <= tile_us(tile, 400, 512, 1024, 132)
        )


def test_fewer_multiprocessors_take_larger_tiles():
    few, many = (fastest_tile(128, 512, 1024, processors) for processors in (4, 132))
    assert few.block_m * few.block_n > many.block_m * many.block_n
