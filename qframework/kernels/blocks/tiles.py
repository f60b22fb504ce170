"""Shared by the block operators: checks, allocation of results, tile sizes and addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from qframework.errors import QFrameworkError
from qframework.kernels.blocks.arithmetic import int8_to_float, prefetch
from qframework.kernels.blocks.format import (
    BlockSize,
    block_shape,
    check_blocks,
    dequantize_blocks_ref,
    row_count,
    scale_shape,
)
from qframework.kernels.runtime.checks import check_dtype, check_same_device
from qframework.kernels.runtime.chip import check_device, chip_of
from qframework.kernels.runtime.launch import cdiv, launch, power_of_2
from qframework.kernels.runtime.triton import tl, triton
from qframework.numerics import FLOAT_DTYPES

A = TypeVar("A", bound=NamedTuple)
Blocks = tuple[Tensor, Tensor]
TILE_COLUMNS = {32: 256, 64: 128, 128: 128}  # columns of a tile, by its rows
ROW_COLUMNS = 256  # columns of a tile that moves down the rows: whole cache lines of 128 bytes
GRID_LIMIT = 65535  # size of a grid's second and third dimension
SECTOR = tl.constexpr(32)  # bytes of a memory transaction
VALUES_PER_THREAD = 64  # with fewer, loading scales would cost more than loading values
FEW_VALUES = 32  # per thread, for kernels that need many registers: more programs then fit on a multiprocessor
RUNNING_VALUES = 32768  # values in flight on a multiprocessor: 32 warps of FEW_VALUES or 16 of VALUES_PER_THREAD
REGISTERS = 64  # limit per thread with FEW_VALUES, so that 32 warps fit


def operands_of(arguments: Any) -> dict[str, Blocks]:
    """An operator's operands in blocks, ``(q, scale)`` by name: every argument ``x`` with an ``x_scale``."""
    names = [name for name in arguments._fields if f"{name}_scale" in arguments._fields]
    return {name: (getattr(arguments, name), getattr(arguments, f"{name}_scale")) for name in names}


def dequantized(arguments: Any) -> list[Tensor]:
    """An operator's operands in float32, for references."""
    return [dequantize_blocks_ref(*blocks, arguments.block_size) for blocks in operands_of(arguments).values()]


def check_alike(operator: str, arguments: Any) -> None:
    """Check that all of an operator's operands in blocks are valid and have the same shape and device."""
    first: tuple[str, Tensor] | None = None
    for name, (q, scale) in operands_of(arguments).items():
        check_blocks(operator, name, q, scale, arguments.block_size)
        if first is None:
            first = name, q
            continue
        check_same_device(operator, first[1], **{name: q})
        if q.shape != first[1].shape:
            raise QFrameworkError(
                f"{operator}: {name} must have the shape of {first[0]}, {tuple(first[1].shape)}, got {tuple(q.shape)}"
            )


def check_vector(operator: str, argument: str, vector: Tensor | None, length: int, like: Tensor) -> None:
    """Check that a float vector is None or has ``length`` values on the device of ``like``."""
    if vector is None:
        return
    check_dtype(operator, argument, vector, FLOAT_DTYPES)
    check_same_device(operator, like, **{argument: vector})
    if tuple(vector.shape) != (length,):
        raise QFrameworkError(f"{operator}: {argument} must have shape ({length},), got {tuple(vector.shape)}")


def check_seed(operator: str, seed: Tensor, like: Tensor) -> None:
    """Check a seed for random numbers: one int64 on the device of ``like``."""
    check_dtype(operator, "seed", seed, (torch.int64,))
    check_same_device(operator, like, seed=seed)
    if seed.numel() != 1:
        raise QFrameworkError(f"{operator}: seed must have one value, got shape {tuple(seed.shape)}")


def contiguous(arguments: A) -> A:
    """An operator's arguments with contiguous tensors, as kernels read them."""
    return arguments._make(x.contiguous() if isinstance(x, Tensor) else x for x in arguments)


def tensors_of(arguments: Any) -> list[Tensor]:
    """The tensors among an operator's arguments, contiguous."""
    return [each.contiguous() for each in arguments if isinstance(each, Tensor)]


def launch_by_tiles(
    kernel: Any,
    operands: Sequence[Any],
    results: Sequence[Tensor],
    tile: dict[str, Any],
    *numbers: float,
    prefetches: bool = True,
    **flags: Any,
) -> None:
    """Launch one program for each tile of a tensor that is not empty.

    Args:
        kernel: takes operands, results, R, C, the distance to prefetch if it prefetches, numbers, flags and the tile.
        operands: contiguous tensors; the first one is cut into tiles.
        results: tensors that the kernel writes.
        tile: from ``tile_of``.
        *numbers: further scalars.
        prefetches: whether the kernel prefetches a tile, see ``rows_ahead``.
        **flags: the kernel's compile-time constants besides the tile.
    """
    like = operands[0]
    ahead = (rows_ahead(like, tile),) if prefetches else ()
    sizes = row_count(like.shape), like.shape[-1]
    launch(kernel, tiles_of(like, tile))(*operands, *results, *sizes, *ahead, *numbers, **flags, **tile)


def empty_blocks(like: Tensor, block_size: BlockSize, shape: tuple[int, ...] | None = None) -> Blocks:
    """Allocate a result in the block format, of the shape of ``like`` or of ``shape``."""
    shape = tuple(like.shape) if shape is None else shape
    scale = like.new_empty(scale_shape(shape, block_size), dtype=torch.float32)
    return like.new_empty(shape, dtype=torch.int8), scale


def tile_of(rows: int, columns: int, block_size: BlockSize, values: int = VALUES_PER_THREAD) -> dict[str, Any]:
    """Constants of a kernel whose tile has one row of blocks, or 32 rows if blocks have fewer; ``values`` per thread.

    EVEN: the tensor consists of whole tiles, so the kernel needs no mask.
    """
    block = block_shape(block_size)
    height = max(block[0], 32)
    width = max(block[1], min(TILE_COLUMNS[height], power_of_2(columns)))
    warps = max(height * width // (32 * values), 1)
    even = rows % height == 0 and columns % width == 0 and rows <= GRID_LIMIT * height
    tile = {"BLOCK": block, "TILE_M": height, "TILE_N": width, "EVEN": even, "num_warps": warps}
    if values <= FEW_VALUES and block[0] > 1:
        tile["maxnreg"] = REGISTERS
    return tile


def rows_ahead(like: Tensor, tile: dict[str, Any]) -> int:
    """Rows between a program's own tile and the tile that it prefetches into L2 with ``prefetch_tile``.

    The prefetched tile belongs to the next program on the same multiprocessor, which is as many tiles away as the chip
    runs at a time.
    """
    if like.device.type != "cuda":
        return tile["TILE_M"]
    running = chip_of(like.device)[1] * RUNNING_VALUES // (tile["TILE_M"] * tile["TILE_N"])
    return cdiv(running, cdiv(like.shape[-1], tile["TILE_N"])) * tile["TILE_M"]


def rows_of_tile(columns: int, block_size: BlockSize) -> dict[str, Any]:
    """Constants of a kernel of one warp that moves down the rows with ``load_rows``, four rows at a time.

    LANES is the number of these rows that different threads hold, with 16 bytes of a row in each thread; ``fold_rows``
    sums the others. STAGES is the number of pipeline stages of the loop.
    """
    block = block_shape(block_size)
    width = max(block[1], min(ROW_COLUMNS, power_of_2(columns)))
    return {
        "BLOCK": block,
        "TILE_M": 4,
        "TILE_N": width,
        "LANES": min(512 // width, 4),
        "STAGES": 3,
        "num_warps": 1,
    }


def tiles_of(like: Tensor, tile: dict[str, Any]) -> tuple[int, int, int]:
    """The grid of a kernel that calls ``tile_origin``: tiles across, then rows of tiles in two dimensions.

    Kernels need no division. With more than GRID_LIMIT rows of tiles, some programs lie outside the tensor.
    """
    down = cdiv(row_count(like.shape), tile["TILE_M"])
    layers = cdiv(down, GRID_LIMIT)
    return cdiv(like.shape[-1], tile["TILE_N"]), cdiv(down, layers), layers


def rows_and_columns(like: Tensor) -> tuple[int, int]:
    """R and C of a tensor ``(..., C)``. Checks the device, as every launcher must."""
    check_device(like.device)
    return row_count(like.shape), like.shape[-1]


@triton.jit
def tile_origin(TILE_M: tl.constexpr, TILE_N: tl.constexpr, LAST_FIRST: tl.constexpr = False):
    """First row and column of this program's tile. Consecutive programs are neighbours in a row and share memory pages.

    LAST_FIRST: go from the last tile to the first, for a kernel whose predecessor ended there: L2 still holds it.
    """
    across, down = tl.program_id(0), tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    if LAST_FIRST:
        across = tl.num_programs(0) - 1 - across
        down = tl.num_programs(2) * tl.num_programs(1) - 1 - down
    return down * TILE_M, across * TILE_N


@triton.jit
def prefetch_tile(q_ptr, row, column, R, C, BLOCK: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Prefetch an int8 tile into L2, one instruction per 32 values; rows and columns outside are clamped.

    Only where rows share a scale: there all warps of a program wait for memory at the same time. Elsewhere a prefetch
    gains nothing.
    """
    if BLOCK[0] > 1:
        r = tl.minimum(tl.maximum(row + tl.arange(0, TILE_M), 0), R - 1)
        c = tl.minimum(column + SECTOR * tl.arange(0, TILE_N // SECTOR), C - 1)
        prefetch(q_ptr + r.to(tl.int64)[:, None] * C + c[None, :])


@triton.jit
def inside_tile(row, column, R, C, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Which values of a tile belong to the tensor, (TILE_M, TILE_N)."""
    return ((row + tl.arange(0, TILE_M)) < R)[:, None] & ((column + tl.arange(0, TILE_N)) < C)[None, :]


@triton.jit
def load_rows(q_ptr, scale_ptr, row, column, R, C, ROWS: tl.constexpr, TILE_N: tl.constexpr, BLOCK: tl.constexpr):
    """``load_tile`` of a few rows, for kernels that do not quantize: at most a block's rows, or blocks of one row."""
    r = row + tl.arange(0, ROWS)
    c = column + tl.arange(0, TILE_N)
    inside = (r < R)[:, None] & (c < C)[None, :]
    q = tl.load(q_ptr + r.to(tl.int64)[:, None] * C + c[None, :], mask=inside, other=0)
    across = tl.cdiv(C, BLOCK[1])
    n = (column // BLOCK[1] + tl.arange(0, TILE_N // BLOCK[1]))[None, :]
    first = row + tl.arange(0, ROWS if BLOCK[0] == 1 else 1)
    m = (tl.minimum(first, R - 1) // BLOCK[0])[:, None]
    scale = tl.load(scale_ptr + m.to(tl.int64) * across + n, mask=n < across, other=0.0)
    values = tl.reshape(int8_to_float(q), (ROWS, TILE_N // BLOCK[1], BLOCK[1])) * scale[:, :, None]
    return tl.reshape(values, (ROWS, TILE_N))


@triton.jit
def fold_rows(x, LANES: tl.constexpr):
    """Sum the rows of a tile (M, N) that are a multiple of LANES apart, which one thread holds, to (LANES, N)."""
    return tl.sum(tl.reshape(x, (x.shape[0] // LANES, LANES, x.shape[1])), 0)
