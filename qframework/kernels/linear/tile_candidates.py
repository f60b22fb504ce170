"""The tiles that int8_linear's kernels may be told to use on a chip: what is measured, and all that a file may name.

The lists are the winners of larger sweeps on an H100, and for other chips what their shared memory and registers allow:
every one compiles for its chip without spills in the tests. ``tiles.py`` says what is chosen without a measurement.
"""

from __future__ import annotations

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
from qframework.kernels.linear.tiles import chip_key, unmeasured

_BIG = Tile(128, 128, 128, 4, 3, programs=2, subtiles=4, tma=True, tma_store=True)
_SPECIALIZED = [
    *(PINGPONG._replace(group_m=group) for group in (1, 4, 8)),
    *(COOPERATIVE._replace(group_m=group) for group in (1, 4)),
    COOPERATIVE._replace(num_stages=3),  # leaves room for the residual
    WIDE,
    WIDE_160,
    WIDE_192,
    THIRDS,
    THIRDS._replace(num_stages=5),  # fits beside an INT8 result
]
_HOPPER_LARGE = [*_SPECIALIZED, _BIG, _BIG._replace(subtiles=2)]
_HOPPER_SMALL = [
    PINGPONG,
    PINGPONG._replace(group_m=8),
    PINGPONG._replace(block_n=64, num_stages=7),  # fits beside a 16-bit result
    PINGPONG._replace(block_n=64, block_k=256, num_stages=3),
    COOPERATIVE._replace(num_stages=3),
    WIDE,
    WIDE_160,
    WIDE_192,
    FLAT_160,
    FLAT_192,
    THIRDS,
    _BIG._replace(programs=0, subtiles=2),
    *(Tile(64, 128, 128, 4, 4, programs=n, tma=True, tma_store=True) for n in (0, 2)),
    Tile(128, 64, 128, 4, 4, tma=True, tma_store=True),
    *(Tile(64, 64, 128, 4, stages, tma=True, tma_store=True) for stages in (4, 6)),
    *(Tile(64, 64, 256, 4, stages, tma=True, tma_store=True) for stages in (3, 6)),
    *(Tile(64, 32, 256, 4, stages, tma=True, tma_store=True) for stages in (4, 6)),
    Tile(64, 32, 256, 4, 3),
    *(Tile(64, n, 128, 4, 4) for n in (32, 128)),
]
# Operands through registers and cp.async. 160 KB of shared memory and more: deep rounds of 128 channels.
_ROOMY_LARGE = [
    Tile(128, 128, 128, 8, 3, subtiles=2),
    Tile(128, 128, 128, 8, 4, subtiles=2),
    Tile(128, 128, 64, 8, 4, subtiles=2),
    Tile(128, 128, 128, 8, 3, subtiles=2, group_m=4),
    Tile(64, 128, 128, 4, 3),
    Tile(64, 128, 64, 4, 4),
    Tile(128, 64, 128, 4, 3),
]
_ROOMY_SMALL = [
    Tile(128, 128, 128, 8, 3, subtiles=2),
    Tile(64, 128, 128, 4, 3),
    Tile(128, 64, 128, 4, 3),
    Tile(64, 64, 128, 4, 4),
    Tile(64, 64, 128, 4, 6),
    Tile(64, 32, 128, 4, 4),
    Tile(32, 64, 128, 4, 4),
    Tile(64, 32, 256, 4, 3),
]
# 99 KB for a program, 100 KB for a multiprocessor: rounds of 64 channels leave room for two programs.
_NARROW_LARGE = [
    Tile(128, 128, 64, 8, 3, subtiles=2),
    Tile(128, 128, 64, 8, 5, subtiles=2),
    Tile(128, 128, 64, 8, 3, subtiles=2, group_m=4),
    Tile(64, 128, 64, 4, 3),
    Tile(64, 128, 64, 4, 4),
    Tile(64, 128, 128, 4, 3),
    Tile(128, 64, 64, 4, 4),
]
_NARROW_SMALL = [
    Tile(128, 128, 64, 8, 3, subtiles=2),
    Tile(64, 128, 64, 4, 3),
    Tile(128, 64, 64, 4, 4),
    Tile(64, 64, 128, 4, 3),
    Tile(64, 64, 64, 4, 5),
    Tile(64, 32, 128, 4, 4),
    Tile(32, 64, 128, 4, 4),
]
MANY_ROWS = 8192  # from here on every multiprocessor has several of the largest tiles
_LISTS = {
    "sm_90": (_HOPPER_LARGE, _HOPPER_SMALL),
    "sm_80": (_ROOMY_LARGE, _ROOMY_SMALL),
    "sm_100": (_ROOMY_LARGE, _ROOMY_SMALL),
    "99 KB": (_NARROW_LARGE, _NARROW_SMALL),
}


def candidates(capability: tuple[int, int], m: int) -> list[Tile]:
    """What to measure for ``m`` rows on a chip of a compute capability."""
    return _LISTS[chip_key(capability)][0 if m >= MANY_ROWS else 1]


def allowed(capability: tuple[int, int]) -> set[Tile]:
    """Every tile that may run on a chip, which a file of tiles may name: candidates, and what is chosen without it."""
    base = {tile for tiles in _LISTS[chip_key(capability)] for tile in tiles} | unmeasured(capability)
    return base | {tile._replace(block_k=64) for tile in base if not tile.specialized}
