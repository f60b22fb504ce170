"""Tiles of block_linear: a rule for each chip, from the block size and how many tiles there are."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from qframework.kernels.int8_linear_tiles import chip_of


class Tile(NamedTuple):
    """The compile-time choices of the kernel. Its step along K is the block size."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False  # operands through tensor descriptors
    group_m: int = 8  # rows of tiles before the next column of tiles


# Largest first; the last one also serves everything smaller. By block size: a result in blocks needs whole blocks.
_BY_POINTERS = {
    32: [Tile(128, 128, 8, 5), Tile(64, 128, 4, 5), Tile(64, 64, 4, 5)],
    64: [Tile(128, 128, 8, 4), Tile(64, 128, 4, 4), Tile(64, 64, 4, 4)],
    128: [Tile(128, 128, 8, 3), Tile(64, 128, 4, 3), Tile(64, 64, 4, 3)],
}
_BY_TMA = {size: [tile._replace(tma=True) for tile in tiles] for size, tiles in _BY_POINTERS.items()}
INTERPRETED = {32: Tile(32, 64, 4, 1), 64: Tile(64, 64, 4, 1), 128: Tile(128, 128, 4, 1)}
_MIN_DEPTH = 8  # inner blocks of 128 that a part of K has at least: less is not worth a pass over the parts


def choose_tile(
    m: int, n: int, block_size: int, capability: tuple[int, int], processors: int, tma: bool, int8_out: bool
) -> Tile:
    """Tile for a problem on a chip.

    Args:
        m: rows of ``a (M, K)``.
        n: rows of ``b (N, K)``, columns of the result.
        block_size: B.
        capability: CUDA's, (9, 0) for Hopper; (0, 0) stands for an AMD GPU.
        processors: multiprocessors of the chip.
        tma: whether the operands lie in memory as tensor descriptors need it.
        int8_out: whether the result is in blocks, which a tile must hold whole.
    """
    tiles = (_BY_TMA if tma and capability[0] == 9 else _BY_POINTERS)[block_size]
    if int8_out:
        tiles = [tile for tile in tiles if min(tile.block_m, tile.block_n) >= block_size]
    chosen = next((t for t in tiles if m > t.block_m // 2 and count_tiles(t, m, n) >= processors), tiles[-1])
    large_memory = capability in ((8, 0), (9, 0), (10, 0), (10, 3))
    return chosen if large_memory else chosen._replace(num_stages=2)


def count_tiles(tile: Tile, m: int, n: int) -> int:
    """How many tiles cover a result."""
    return math.ceil(m / tile.block_m) * math.ceil(n / tile.block_n)


def parts_of(k: int, block_size: int, tiles: int, processors: int) -> int:
    """Parts into which K is cut, so that few tiles of a long product still fill the chip.

    Gradients of weights are such: thousands of tokens summed up into a small matrix.
    """
    longest = k // (_MIN_DEPTH * 128)
    return max(min(processors // max(tiles, 1), longest), 1)


@functools.lru_cache(4096)
def tile_for(device: torch.device, m: int, n: int, block_size: int, tma: bool, int8_out: bool) -> Tile:
    """``choose_tile`` on ``device``."""
    if device.type != "cuda":
        return INTERPRETED[block_size]
    capability, processors = chip_of(device)
    return choose_tile(m, n, block_size, capability, processors, tma, int8_out)
