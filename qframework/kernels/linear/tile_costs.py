"""Estimated times of linears on Hopper, from 65 rows on: which tile of int8_linear is fastest, and what INT8 saves.

A tile's time is the sum of what does not overlap:

- what a launch takes, once;
- what a round takes beside its product, above all the epilogue; there are ``ceil(tiles / multiprocessors)`` rounds;
- the latency of 1,024 channels, once, since the tiles of a multiprocessor hide each other's;
- on Hopper's own kernel also their products, in every round;
- the operands of all tiles, which the L2 cache delivers: ``tiles (block_m + block_n) K`` bytes.

``python -m benchmarks.tile_costs`` measures 256 linears of 128 to 3,136 rows and fits the figures below by least
squares of relative errors: those of Hopper's own kernel on an H200 (``other/2026-11-30-h200-tile-costs.json``), the
others on an H100 (``other/2026-11-27-h100-tile-costs.json``). Both chips have the same multiprocessors, and the H100's
costs predict the H200's times of the tiles without TMA to 2 percent in the geometric mean. Estimates are within 8
percent (standard deviation), and the tile with the least takes 0.8 percent longer than the fastest of eleven in the
geometric mean, 21 at most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from qframework.kernels.linear.tile import (
    FLAT_160,
    FLAT_192,
    MAX_FEW_ROWS,
    PINGPONG,
    THIRDS,
    WIDE_160,
    WIDE_192,
    Tile,
)

MEMORY = 2.8e6
"""Bytes that an H100 reads or writes in a microsecond, ``other/2026-11-25-h100-small-linears.json``: 84 percent of its
rate."""
HALF = (2.66, 1.157, 2.204, 0.208, 0.532)
"""Costs of PyTorch's linear in 16 bit, in microseconds, fitted to the same linears as ``COSTS``."""


_STEP_CYCLES = {(128, 128): 155, (192, 128): 224, (256, 128): 288, (128, 256): 256}
"""Cycles of 32 channels by block_m and block_n, at 128 bytes of shared memory a cycle: what TMA writes, and what the
warpgroups read for their products, where those take no longer. A ping-pong takes 3 percent less than that."""
_EPILOGUE_CYCLES = 0.0915  # of a result, while nothing is multiplied
_TURN_CYCLES = 1000  # of a ping-pong's tile, whose epilogue runs beside the other warpgroup's products


class TileCost(NamedTuple):
    """Microseconds."""

    launch: float
    round: float
    channels: float  # 1,024 of them
    traffic: float  # a megabyte of operands
    products: float = 0.0  # 1,024 channels of every round


COSTS: Mapping[Tile, TileCost] = MappingProxyType(
    {
        PINGPONG: TileCost(2.012, 1.07, 0.181, 0.016, 1.944),
        PINGPONG._replace(block_n=64, num_stages=7): TileCost(1.844, 0.689, 0.206, 0.023, 0.946),
        FLAT_160: TileCost(0.693, 2.537, 0.138, 0.017, 1.376),
        FLAT_192: TileCost(0.549, 2.713, 0.214, 0.02, 1.349),
        WIDE_160: TileCost(1.207, 2.911, 0.451, 0.021, 2.43),
        WIDE_192: TileCost(1.301, 2.917, 0.328, 0.025, 2.781),
        THIRDS: TileCost(1.894, 1.983, 0.199, 0.022, 2.904),
        Tile(64, 64, 128, 4, 4): TileCost(1.28, 0.63, 1.38, 0.07),
        Tile(64, 32, 128, 4, 4): TileCost(1.26, 0.47, 1.08, 0.07),
        Tile(64, 32, 256, 4, 6, tma=True, tma_store=True): TileCost(0.69, 1.59, 0.37, 0.11),
        Tile(64, 16, 128, 4, 4): TileCost(1.38, 0.37, 0.72, 0.07),
    }
)

GATED_COSTS: Mapping[Tile, TileCost] = MappingProxyType(
    {
        PINGPONG: TileCost(1.34, 1.82, 1.78, 0.06),
        PINGPONG._replace(block_n=64, num_stages=7): TileCost(1.74, 0.71, 0.96, 0.08),
    }
)
"""Of tiles that hold two weights (hopper_gated.py). From plain linears on an H100, and nearer to the gated ones that
were measured there than ``COSTS``: the chosen tile takes 1.4 percent longer than the fastest in the geometric mean, and
8 percent at most."""


def terms(tile: Tile, m: int, n: int, k: int, processors: int) -> tuple[float, float, float, float, float]:
    """What the costs of a tile are multiplied with for ``a (m, k)`` and ``b (n, k)``."""
    tiles = math.ceil(m / tile.block_m) * math.ceil(n / tile.block_n)
    rounds = math.ceil(tiles / processors)
    megabytes = tiles * (tile.block_m + tile.block_n) * k / 1e6
    return 1.0, rounds, k / 1024, megabytes, rounds * k / 1024 if tile.specialized else 0.0


def tile_us(tile: Tile, m: int, n: int, k: int, processors: int, costs: Mapping[Tile, TileCost] = COSTS) -> float:
    """Microseconds that a tile of ``costs`` takes."""
    return sum(cost * term for cost, term in zip(costs[tile], terms(tile, m, n, k, processors), strict=True))


def fastest_tile(m: int, n: int, k: int, processors: int, tma: bool = True) -> Tile:
    """The tile of ``COSTS`` with the least estimate; without ``tma`` of those that read operands by pointers."""
    return min(_usable(m, n, tma), key=lambda tile: tile_us(tile, m, n, k, processors))


def _usable(m: int, n: int, tma: bool = True) -> list[Tile]:
    """Tiles whose operands are read by pointers, and those by TMA that are no larger than the matrix.

    Rows past its end take long (``first_inside`` in triton.py).
    """
    return [tile for tile in COSTS if not tile.tma or (tma and tile.block_m <= m and tile.block_n <= n)]


def fastest_for_long_rows(tiles: Sequence[Tile], m: int, n: int, k: int, processors: int) -> Tile:
    """The ping-pong or cooperative tile with the least estimate for 2,048 channels and more, by shared memory.

    The 35 linears to which the costs were fitted, of 512 to 50,432 rows and up to 14,336 channels, take 1 percent
    longer with it on an H100 than with the fastest of five tiles, in the geometric mean, and 7 at most
    (``other/2026-11-28-h100-wide-tiles.json`` and ``-2``).
    """
    return min(tiles, key=lambda tile: _cycles(tile, m, n, k, processors))


def _cycles(tile: Tile, m: int, n: int, k: int, processors: int) -> float:
    _, rounds, *_ = terms(tile, m, n, k, processors)
    product = k / 32 * _STEP_CYCLES[tile.block_m, tile.block_n]
    epilogue = _EPILOGUE_CYCLES * tile.block_m * tile.block_n
    if tile.specialized == "pingpong":
        return rounds * (product + _TURN_CYCLES) + epilogue
    return rounds * (product + epilogue)


def memory_us(size: int, memory: float = MEMORY) -> float:
    """Microseconds in which ``size`` bytes are read or written, ``memory`` of them in a microsecond."""
    return size / memory


def int8_us(m: int, n: int, k: int, processors: int, memory: float = MEMORY) -> float:
    """Microseconds of ``int8_linear`` by estimate; bytes decide up to 64 rows, and where there are very many."""
    if m <= MAX_FEW_ROWS:
        return 1.2 + memory_us(n * k, memory)
    product = min(tile_us(tile, m, n, k, processors) for tile in _usable(m, n))
    return max(product, memory_us(m * k + n * k + 2 * m * n, memory))


def half_terms(m: int, n: int, k: int) -> tuple[float, float, float, float, float]:
    """What ``HALF`` is multiplied with: a launch, the latency of channels, operations, weight and result."""
    return 1.0, k / 1024, m * n * k / 1e9, n * k / 1e6, m * n / 1e6


def half_us(m: int, n: int, k: int, memory: float = MEMORY) -> float:
    """Microseconds of PyTorch's linear in 16 bit by estimate, within 8 percent (standard deviation) of the measured."""
    if m <= MAX_FEW_ROWS:
        return 2.3 + memory_us(2 * n * k, memory)
    estimate = sum(cost * term for cost, term in zip(HALF, half_terms(m, n, k), strict=True))
    return max(estimate, memory_us(2 * (m * k + n * k + m * n), memory))
