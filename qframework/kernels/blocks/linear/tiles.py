"""Tiles of block_linear: a heuristic per chip, from the block size and the number of tiles.

On Hopper it also chooses the kernel, as measured on an H100 (docs/experiments.md).
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
    """The compile-time choices of a kernel. The step along K is the number of columns in a block, but at most STEP."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False  # operands through tensor descriptors
    group_m: int = 8  # rows of tiles before the next column of tiles
    consumers: int = 0  # warpgroups that multiply in hopper.py; 0: triton.py
    early: bool = False  # hopper.py dequantizes a half before it waits for its next turn: spares wide tiles a spill

    @property
    def programs(self) -> int:
        """How many programs of the kernel for Hopper a multiprocessor runs at a time."""
        return 2 if self.consumers == 1 else 1


# By the columns of a block; largest tile first. The last one also serves smaller problems.
_BY_POINTERS = {
    32: [BlockTile(128, 128, 8, 5), BlockTile(64, 128, 8, 5), BlockTile(64, 64, 4, 5)],
    64: [BlockTile(128, 128, 8, 4), BlockTile(64, 128, 8, 4), BlockTile(64, 64, 4, 4)],
    128: [BlockTile(128, 128, 8, 3), BlockTile(64, 128, 8, 3), BlockTile(64, 64, 4, 3)],
    256: [BlockTile(64, 256, 8, 2), BlockTile(128, 128, 8, 3), BlockTile(64, 128, 8, 3), BlockTile(64, 64, 4, 3)],
}
_BY_TMA = {size: [tile._replace(tma=True) for tile in tiles] for size, tiles in _BY_POINTERS.items()}
INTERPRETED = {
    32: BlockTile(32, 64, 4, 1),
    64: BlockTile(64, 64, 4, 1),
    128: BlockTile(128, 128, 4, 1),
    256: BlockTile(64, 256, 4, 1),
}
# 192 KB and 96 KB of stages: what shared memory can hold beside the result for one or two programs per multiprocessor.
COOPERATIVE = {size: BlockTile(256, 128, 4, 512 // size, tma=True, group_m=4, consumers=2) for size in (32, 64, 128)}
COOPERATIVE[256] = COOPERATIVE[128]._replace(block_m=128, block_n=256, early=True)  # whole blocks of a result
SINGLE = {size: BlockTile(128, 128, 4, 384 // size, tma=True, group_m=4, consumers=1) for size in (32, 64, 128)}
STEP = 128  # the most columns that a kernel loads at a time
_MIN_DEPTH = 1024  # the least number of columns in a part of K: smaller parts do not justify a pass over the sums


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
        tma: whether operands, and a result in blocks, are laid out as tensor descriptors require.
        whole: whether the result is in blocks: tiles must then hold whole blocks, and K is not split.
    """
    if tma and capability == (9, 0) and HAS_GLUON:
        tile = specialized_tile(m, n, k, block_shape(block_size)[1], processors, whole)
        if m > 64 and count_tiles(tile, m, n) * parts_of(tile, m, n, k, processors, whole) >= processors // 2:
            return tile
    rows, columns = block_shape(block_size)
    tiles = (_BY_TMA if tma and capability[0] == 9 else _BY_POINTERS)[columns]
    if whole:
        tiles = [tile for tile in tiles if tile.block_m >= rows and tile.block_n >= columns]
    else:
        spills = (
            (rows <= 32 and capability == (9, 0) and not tma)
            or (rows == 1 and capability[0] in (8, 12))
            or (rows == 128 and capability[0] == 10)
        )
        tiles = [tile for tile in tiles if tile.block_n <= STEP][spills:]  # the largest tile spills there
    chosen = next((t for t in tiles if m > t.block_m // 2 and count_tiles(t, m, n) >= processors), tiles[-1])
    large_memory = capability in ((8, 0), (9, 0), (10, 0), (10, 3))
    return chosen if large_memory else chosen._replace(num_stages=2)


def specialized_tile(m: int, n: int, k: int, columns: int, processors: int, whole: bool) -> BlockTile:
    """The tile of the kernel for Hopper, for blocks with this many columns.

    Wide blocks keep the tensor cores busy, so one program with two warpgroups is best, since it reads less. With
    narrower blocks two programs take turns. Small tiles are also better if each gets a multiprocessor of its own: large
    ones would leave half of the multiprocessors idle.
    """
    if columns > STEP:
        return COOPERATIVE[columns]
    single = SINGLE[columns]
    programs = count_tiles(single, m, n) * parts_of(single, m, n, k, processors, whole)
    if columns < 128 or programs <= processors:
        return single
    return COOPERATIVE[columns]


def count_tiles(tile: BlockTile, m: int, n: int) -> int:
    """How many tiles cover a result."""
    return math.ceil(m / tile.block_m) * math.ceil(n / tile.block_n)


def parts_of(tile: BlockTile, m: int, n: int, k: int, processors: int, whole: bool) -> int:
    """Number of parts into which K is split, so that products with few tiles and a large K fill the chip.

    An example is the gradient of a weight, a small matrix summed over thousands of tokens.
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
