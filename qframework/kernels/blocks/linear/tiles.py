"""Tiles of block_linear: a heuristic per chip, from the block size and the number of tiles.

On Hopper the choice is between kernels, as measured on an H100 (docs/experiments.md).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from qframework.kernels.blocks.format import BlockSize, block_shape
from qframework.kernels.runtime.chip import chip_of
from qframework.kernels.runtime.gluon import HAS_GLUON


class BlockTile(NamedTuple):
    """The compile-time choices of a kernel. Its step along K is the block size."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False  # operands through tensor descriptors
    group_m: int = 8  # rows of tiles before the next column of tiles
    consumers: int = 0  # warpgroups that multiply in hopper.py; 0: triton.py

    @property
    def programs(self) -> int:
        """How many programs of the specialized kernel a multiprocessor runs at a time."""
        return 2 if self.consumers == 1 else 1


# Largest first; the last one also serves everything smaller. By columns of a block, the step along K.
_BY_POINTERS = {
    32: [BlockTile(128, 128, 8, 5), BlockTile(64, 128, 8, 5), BlockTile(64, 64, 4, 5)],
    64: [BlockTile(128, 128, 8, 4), BlockTile(64, 128, 8, 4), BlockTile(64, 64, 4, 4)],
    128: [BlockTile(128, 128, 8, 3), BlockTile(64, 128, 8, 3), BlockTile(64, 64, 4, 3)],
}
_BY_TMA = {size: [tile._replace(tma=True) for tile in tiles] for size, tiles in _BY_POINTERS.items()}
INTERPRETED = {32: BlockTile(32, 64, 4, 1), 64: BlockTile(64, 64, 4, 1), 128: BlockTile(128, 128, 4, 1)}
# 192 KB and 96 KB of stages: what shared memory holds beside the result, with one program or two on a multiprocessor.
COOPERATIVE = {size: BlockTile(256, 128, 4, 512 // size, tma=True, group_m=4, consumers=2) for size in (32, 64, 128)}
SINGLE = {size: BlockTile(128, 128, 4, 384 // size, tma=True, group_m=4, consumers=1) for size in (32, 64, 128)}
_MIN_DEPTH = 1024  # columns that a part of K has at least: less is not worth a pass over the parts


def choose_tile(
    m: int,
    n: int,
    k: int,
    block_size: BlockSize,
    capability: tuple[int, int],
    processors: int,
    tma: bool,
    whole: bool,
) -> BlockTile:
    """Tile for a problem on a chip.

    Args:
        m: rows of ``a (M, K)``.
        n: rows of ``b (N, K)``, columns of the result.
        k: the inner size.
        block_size: of ``a`` and the result.
        capability: CUDA's, (9, 0) for Hopper.
        processors: multiprocessors of the chip.
        tma: whether operands, and a result in blocks, lie in memory as tensor descriptors need it.
        whole: whether the result is in blocks: a tile must hold whole ones, and K stays in one part.
    """
    if tma and capability == (9, 0) and HAS_GLUON:
        tile = specialized_tile(m, n, k, block_shape(block_size)[1], processors, whole)
        if m > 64 and count_tiles(tile, m, n) * parts_of(tile, m, n, k, processors, whole) >= processors // 2:
            return tile
    rows, columns = block_shape(block_size)
    tiles = (_BY_TMA if tma and capability[0] == 9 else _BY_POINTERS)[columns]
    if whole:
        tiles = [tile for tile in tiles if tile.block_m >= rows and tile.block_n >= columns]
    elif (rows <= 32 and capability == (9, 0) and not tma) or (rows == 1 and capability[0] in (8, 12)):
        tiles = tiles[1:]  # there the largest one spills
    chosen = next((t for t in tiles if m > t.block_m // 2 and count_tiles(t, m, n) >= processors), tiles[-1])
    large_memory = capability in ((8, 0), (9, 0), (10, 0), (10, 3))
    return chosen if large_memory else chosen._replace(num_stages=2)


def specialized_tile(m: int, n: int, k: int, columns: int, processors: int, whole: bool) -> BlockTile:
    """For blocks of so many columns.

    Long ones keep the tensor cores busy, and two warpgroups read less; shorter ones wait, two programs in turn. So it
    is too where the small tile's programs get a multiprocessor each: the large one leaves half of them idle.
    """
    single = SINGLE[columns]
    programs = count_tiles(single, m, n) * parts_of(single, m, n, k, processors, whole)
    return single if columns < 128 or programs <= processors else COOPERATIVE[columns]


def count_tiles(tile: BlockTile, m: int, n: int) -> int:
    """How many tiles cover a result."""
    return math.ceil(m / tile.block_m) * math.ceil(n / tile.block_n)


def parts_of(tile: BlockTile, m: int, n: int, k: int, processors: int, whole: bool) -> int:
    """Parts into which K is cut, so that few tiles of a long product still fill the chip.

    Gradients of weights are such: thousands of tokens summed up into a small matrix.
    """
    if whole:
        return 1
    return max(min(processors * tile.programs // count_tiles(tile, m, n), k // _MIN_DEPTH), 1)


class Choice(NamedTuple):
    """A tile and the parts of K."""

    tile: BlockTile
    parts: int


@functools.lru_cache(4096)
def choice_for(
    device: torch.device, m: int, n: int, k: int, block_size: int | tuple[int, int], tma: bool, whole: bool
) -> Choice:
    """``choose_tile`` and ``parts_of`` on ``device``."""
    if device.type != "cuda":
        return Choice(INTERPRETED[block_shape(block_size)[1]], 1)
    capability, processors = chip_of(device)
    tile = choose_tile(m, n, k, block_size, capability, processors, tma, whole)
    return Choice(tile, parts_of(tile, m, n, k, processors, whole))
