"""What tests of operators between blocks share: operands, their values in float64, and what a step allows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qframework.kernels import block_quantize
from qframework.numerics import MIN_SCALE

BlockSize = int | tuple[int, int]
SQUARES: list[BlockSize] = [32, 64, 128]
OBLONGS: list[BlockSize] = [(32, 128), (1, 128), (1, 256)]
BLOCK_SIZES = SQUARES + OBLONGS
# Whole blocks and whole tiles, tails on both sides, one row, more columns than a tile, no leading dimension.
SHAPES = [(64, 128), (3, 50, 130), (1, 70), (40, 300), (33,)]
# The interpreter is slow: blocks that are not square see the first three shapes.
CASES = [(shape, size) for size in BLOCK_SIZES for shape in (SHAPES if size in SQUARES else SHAPES[:3])]
UNIT = 2.0**-24
# Half a step, and three roundings of values that are up to 127 steps large.
HALF_STEP = 0.5 + 127 * 3 * UNIT


def sides(block_size: BlockSize) -> tuple[int, int]:
    """Rows and columns of a block."""
    return (block_size, block_size) if isinstance(block_size, int) else block_size


def operand(shape: tuple[int, ...], block_size: BlockSize, place: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A tensor in blocks: rows and columns of many magnitudes, an offset, a column of outliers and a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.randn(shape[-1], generator=generator).exp() + 0.3
    rows = x.view(-1, shape[-1])
    rows[:, shape[-1] // 2] *= 20
    rows[rows.shape[0] // 2] = 0 if rows.shape[0] > 1 else rows[0]
    q, scale = block_quantize(x, block_size)
    return q.to(place), scale.to(place)


def values(q: Tensor, scale: Tensor, block_size: BlockSize) -> Tensor:
    """What ``(q, scale)`` stands for, in float64 on the CPU, without the package's own code."""
    rows = q.detach().cpu().double().reshape(-1, q.shape[-1])
    height, width = sides(block_size)
    spread = scale.cpu().double().repeat_interleave(height, 0).repeat_interleave(width, 1)
    return (rows * spread[: rows.shape[0], : rows.shape[1]]).view(q.shape)


def block_of(row: int, column: int, shape: tuple[int, int], block_size: BlockSize) -> Tensor:
    """Which values share a block with that of ``row`` and ``column``: bool of ``shape``."""
    height, width = sides(block_size)
    down, across = torch.arange(shape[0]) // height, torch.arange(shape[1]) // width
    return (down == row // height)[:, None] & (across == column // width)[None, :]


def assert_blocks(q: Tensor, scale: Tensor, exact: Tensor, error: Tensor | float, block_size: BlockSize) -> None:
    """``(q, scale)`` is ``exact`` quantized, each value computed to within ``error`` before it was rounded."""
    rows = math.prod(exact.shape[:-1])
    height, width = sides(block_size)
    assert q.dtype == torch.int8
    assert q.shape == exact.shape
    assert q.is_contiguous()
    assert scale.shape == (-(-rows // height), -(-exact.shape[-1] // width))
    assert scale.dtype == torch.float32
    error = torch.as_tensor(error, dtype=torch.float64).expand(exact.shape)
    spread = values(torch.ones_like(q), scale, block_size)
    off = (values(q, scale, block_size) - exact).abs()
    assert (off <= HALF_STEP * spread + error).all(), f"{float((off / spread).max()):.4g} steps off"
    for i, j in [(i, j) for i in range(scale.shape[0]) for j in range(scale.shape[1])]:
        block = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
        largest = float(exact.reshape(rows, -1)[block].abs().max())
        allowed = float(error.reshape(rows, -1)[block].max()) + 4 * UNIT * largest
        assert abs(float(scale[i, j]) - max(largest / 127, MIN_SCALE)) <= allowed / 127 + UNIT * MIN_SCALE
