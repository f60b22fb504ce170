"""Shared by the block operators: checks, allocation of results, tile sizes and addresses."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from qframework.errors import QFrameworkError
from qframework.kernels.blocks.arithmetic import int8_to_float, prefetch
from qframework.kernels.blocks.format import BlockSize, block_shape, check_blocks, row_count, scale_shape
from qframework.kernels.runtime.checks import check_dtype, check_same_device
from qframework.kernels.runtime.chip import check_device, chip_of
from qframework.kernels.runtime.launch import cdiv, launch, power_of_2
from qframework.kernels.runtime.triton import tl, triton
from qframework.numerics import FLOAT_DTYPES

A = TypeVar("A", bound=NamedTuple)
Blocks = tuple[Tensor, Tensor]
TILE_COLUMNS = {32: 256, 64: 128, 128: 128}  # of a program, by its rows
ROW_COLUMNS = 256  # of a program that walks down the rows: whole lines of 128 bytes
GRID_LIMIT = 65535  # of the second and third dimension
SECTOR = tl.constexpr(32)  # bytes that memory is read by
VALUES_PER_THREAD = 64  # fewer would spend more on scales than on values
FEW_VALUES = 32  # for kernels whose registers would keep other programs from the multiprocessor
RUNNING_VALUES = 32768  # of all programs that a multiprocessor runs at a time: 32 warps of few, 16 of many in a thread
REGISTERS = 64  # of a thread with few values, at most: those of 32 warps


def check_alike(operator: str, block_size: BlockSize, **operands: tuple[Tensor, Tensor]) -> None:
    """Check operands in the block format, ``name=(q, scale)``, of one shape and device."""
    first: tuple[str, Tensor] | None = None
    for name, (q, scale) in operands.items():
        check_blocks(operator, name, q, scale, block_size)
        if first is None:
            first = name, q
            continue
        check_same_device(operator, first[1], **{name: q})
        if q.shape != first[1].shape:
            raise QFrameworkError(
                f"{operator}: {name} must have the shape of {first[0]}, {tuple(first[1].shape)}, got {tuple(q.shape)}"
            )


def check_vector(operator: str, argument: str, vector: Tensor | None, length: int, like: Tensor) -> None:
    """Check a float vector, one value for each of ``length`` columns or rows, on the device of ``like``."""
    if vector is None:
        return
    check_dtype(operator, argument, vector, FLOAT_DTYPES)
    check_same_device(operator, like, **{argument: vector})
    if tuple(vector.shape) != (length,):
        raise QFrameworkError(f"{operator}: {argument} has shape {tuple(vector.shape)}; accepted: ({length},)")


def check_seed(operator: str, seed: Tensor, like: Tensor) -> None:
    """Check a seed of random numbers: one int64 on the device of ``like``."""
    check_dtype(operator, "seed", seed, (torch.int64,))
    check_same_device(operator, like, seed=seed)
    if seed.numel() != 1:
        raise QFrameworkError(f"{operator}: seed has shape {tuple(seed.shape)}; accepted: one value")


def contiguous(arguments: A) -> A:
    """An operator's arguments with contiguous tensors, as kernels read them."""
    return arguments._make(x.contiguous() if isinstance(x, Tensor) else x for x in arguments)


def launch_by_tiles(kernel: Any, arguments: Any, values: int) -> Any:
    """Launch an activation's kernel, a program for each tile, and return its result in blocks.

    ``arguments``: the operator's, whose tensors, all of one shape, are the kernel's first parameters in the same order.
    ``values``: in a thread.
    """
    result = arguments.empty_result()
    operands = [each for each in contiguous(arguments) if isinstance(each, Tensor)]
    sizes = rows_and_columns(operands[0])
    if operands[0].numel() > 0:
        tile = tile_of(*sizes, arguments.block_size, values)
        ahead = rows_ahead(operands[0], tile)
        launch(kernel, tiles_of(operands[0], tile))(*operands, *result, *sizes, ahead, KIND=arguments.kind, **tile)
    return result


def empty_blocks(like: Tensor, block_size: BlockSize, shape: tuple[int, ...] | None = None) -> Blocks:
    """Room for a result in the block format, of the shape of ``like`` or another one."""
    shape = tuple(like.shape) if shape is None else shape
    scale = like.new_empty(scale_shape(shape, block_size), dtype=torch.float32)
    return like.new_empty(shape, dtype=torch.int8), scale


def tile_of(rows: int, columns: int, block_size: BlockSize, values: int = VALUES_PER_THREAD) -> dict[str, Any]:
    """Constants of a kernel: one row of blocks high, or 32 rows of values; ``values`` in a thread.

    EVEN: the tensor is cut into whole tiles, so that nothing needs a mask.
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
    """How many rows further down the tile begins that a program asks L2 for: ``ask_for_tile``.

    It is that of the program that will follow on the same multiprocessor: as many on as run at a time.
    """
    if like.device.type != "cuda":
        return tile["TILE_M"]
    running = chip_of(like.device)[1] * RUNNING_VALUES // (tile["TILE_M"] * tile["TILE_N"])
    return cdiv(running, cdiv(like.shape[-1], tile["TILE_N"])) * tile["TILE_M"]


def rows_of_tile(columns: int, block_size: BlockSize) -> dict[str, Any]:
    """Constants of a kernel that walks down the rows with ``load_rows``, four at a time: a warp by itself.

    LANES: how many of the rows lie in different threads, 16 bytes in each; ``fold_rows`` adds up the others. STAGES: 1
    where a step's values are asked for when it begins, more where earlier.
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
    """The grid of a kernel that asks ``tile_origin`` where its tile begins: across, and down in two dimensions.

    No kernel has to divide; with more rows of tiles than a dimension holds, some programs find nothing to do.
    """
    down = cdiv(row_count(like.shape), tile["TILE_M"])
    layers = cdiv(down, GRID_LIMIT)
    return cdiv(like.shape[-1], tile["TILE_N"]), cdiv(down, layers), layers


def rows_and_columns(like: Tensor) -> tuple[int, int]:
    """R and C of a tensor ``(..., C)``; checks the device, as every launcher must."""
    check_device(like.device)
    return row_count(like.shape), like.shape[-1]


@triton.jit
def tile_origin(TILE_M: tl.constexpr, TILE_N: tl.constexpr, LAST_FIRST: tl.constexpr = False):
    """Row and column where this program's tile begins. Along the rows first: neighbours share pages of memory.

    LAST_FIRST: from the last tile to the first, for a kernel behind one that ended there: the L2 cache still holds it.
    """
    across, down = tl.program_id(0), tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    if LAST_FIRST:
        across = tl.num_programs(0) - 1 - across
        down = tl.num_programs(2) * tl.num_programs(1) - 1 - down
    return down * TILE_M, across * TILE_N


@triton.jit
def ask_for_tile(q_ptr, row, column, R, C, BLOCK: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Have L2 fetch an int8 tile, an instruction for 32 values; rows and columns outside become the nearest ones.

    Where rows share a scale: a program's warps then wait for one another, and so for memory at the same time. Where
    they do not, it gains nothing.
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
    """``load_tile`` of a few rows, no more than a block has or of one row each, for kernels that quantize none."""
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
    """Sums over rows that are a multiple of LANES apart, (LANES, N) of a tile (M, N): all of them in one thread."""
    return tl.sum(tl.reshape(x, (x.shape[0] // LANES, LANES, x.shape[1])), 0)
