"""Launches of block_linear and block_linear_sum: kernel, tile, split of K, grid, constants, descriptors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qframework.kernels.blocks.format import BlockSize, block_shape, canonical_size, operand_size
from qframework.kernels.blocks.linear import hopper as specialized
from qframework.kernels.blocks.linear.arguments import MAX_PAIRS, BlockLinearArguments, BlockLinearSumArguments
from qframework.kernels.blocks.linear.tiles import STEP, BlockTile, Choice, choice_for, count_tiles
from qframework.kernels.blocks.linear.triton import _block_linear_kernel, _block_linear_sum_kernel
from qframework.kernels.blocks.tiles import contiguous
from qframework.kernels.linear.hopper import describe
from qframework.kernels.runtime.chip import check_device, chip_of
from qframework.kernels.runtime.launch import cdiv, launch
from qframework.kernels.runtime.triton import TensorDescriptor


def block_linear_triton(args: BlockLinearArguments, choice: Choice | None = None) -> tuple[Tensor, Tensor]:
    """``block_linear`` on a GPU, with ``choice`` of tile and parts of K or the best one for the problem."""
    check_device(args.a.device)
    args = contiguous(args)
    out, out_scale = args.empty_result()
    if out.numel() == 0:
        return out, out_scale
    tile, parts = choice or _choice(args)
    sums = out if parts == 1 else out.new_empty((parts, *out.shape), dtype=torch.float32)
    kernel, grid, arguments, constants = _call(args, tile, parts, sums, out_scale)
    launch(kernel, grid)(*arguments, **constants)
    if parts > 1:
        add_parts(sums, args.bias, out)
    return out, out_scale


def block_linear_sum_triton(args: BlockLinearSumArguments, tile: BlockTile | None = None) -> tuple[Tensor, Tensor]:
    """``block_linear_sum`` on a GPU, with ``tile`` or the best one for the problem."""
    check_device(args.operands[0].device)
    pairs = [contiguous(each) for each in args.pairs]
    if len(pairs) == 1:
        return block_linear_triton(pairs[0])
    out, out_scale = pairs[0].empty_result()
    if out.numel() == 0:
        return out, out_scale
    kernel, grid, arguments, constants = _call_sum(pairs, tile or _tile_of_sum(pairs), out, out_scale)
    launch(kernel, grid)(*arguments, **constants)
    return out, out_scale


def _choice(args: BlockLinearArguments) -> Choice:
    n, k = args.b.shape
    m = args.a.shape[:-1].numel()
    return choice_for(args.a.device, m, n, k, canonical_size(args.block_size), _by_tma(args), args.in_blocks)


def _by_tma(args: BlockLinearArguments) -> bool:
    """Whether operands, and a result in blocks, are laid out as tensor descriptors require."""
    n, k = args.b.shape
    aligned = not any(t.data_ptr() % 16 for t in (args.a, args.b))
    return k > 0 and k % 16 == 0 and not (args.in_blocks and n % 16) and aligned


def _tile_of_sum(pairs: list[BlockLinearArguments]) -> BlockTile:
    """The tile for one product with all inner columns, in one part, since sums of parts are not added up."""
    first = pairs[0]
    m, n, k = first.a.shape[:-1].numel(), first.b.shape[0], sum(each.b.shape[1] for each in pairs)
    size, tma = canonical_size(first.block_size), all(map(_by_tma, pairs))
    return choice_for(first.a.device, m, n, k, size, tma, True).tile


def _call(
    args: BlockLinearArguments, tile: BlockTile, parts: int, out: Tensor, out_scale: Tensor
) -> tuple[Any, tuple[int, int, int], tuple[Any, ...], dict[str, Any]]:
    """The launch that writes ``out``, or the sums of each part of K: kernel, grid, arguments and constants."""
    n, k = args.b.shape
    m = args.a.shape[:-1].numel()
    operands = (*(of_pair := _operands(args, tile)), args.b_scale if args.bias is None else args.bias)
    sizes = (m, n, k, cdiv(cdiv(k, block_shape(args.block_size)[1]), parts))
    has_bias, tiles = args.bias is not None and parts == 1, count_tiles(tile, m, n)
    if not tile.consumers:
        constants = tile_constants(tile, k, args.block_size, has_bias)
        constants |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        return _block_linear_kernel, (tiles, parts, 1), (*operands, out, out_scale, *sizes), constants
    by_tma = stores_by_tma(out.dtype, n)
    to = describe(out, (m, n), n, (specialized.ROWS, specialized.COLUMNS)) if by_tma else of_pair[-1]
    constants = specialized_constants(tile, args.block_size, has_bias, by_tma) | specialized_options(tile)
    programs = min(tiles * parts, chip_of(out.device)[1] * tile.programs)
    return specialized.kernel, (programs, 1, 1), (*operands, to, out, out_scale, *sizes, parts), constants


def _operands(args: BlockLinearArguments, tile: BlockTile) -> tuple[Any, Any, Any, Any]:
    """The scales of a and b, and a and b as the kernel reads them."""
    n, k = args.b.shape
    m = args.a.shape[:-1].numel()
    width = min(block_shape(args.block_size)[1], STEP)
    a: Any = args.a
    b: Any = args.b
    if tile.tma and tile.consumers:
        a = describe(a, (m, k), k, (tile.block_m, width))
        b = describe(b, (n, k), k, (tile.block_n, width))
    elif tile.tma:
        a = TensorDescriptor(a, (m, k), (k, 1), (tile.block_m, width))
        b = TensorDescriptor(b, (n, k), (k, 1), (tile.block_n, width))
    return args.a_scale, args.b_scale, a, b


def _call_sum(
    pairs: list[BlockLinearArguments], tile: BlockTile, out: Tensor, out_scale: Tensor
) -> tuple[Any, tuple[int, int, int], tuple[Any, ...], dict[str, Any]]:
    """The launch that writes the sum of products to ``out``: kernel, grid, arguments and constants."""
    first, count = pairs[0], len(pairs)
    pairs = pairs + [first] * (MAX_PAIRS - count)  # of those past the last, the kernel reads nothing
    m, n, block_size = first.a.shape[:-1].numel(), first.b.shape[0], first.block_size
    inner = [each.b.shape[1] for each in pairs]
    operands = [x for each in pairs for x in _operands(each, tile)]
    tiles = count_tiles(tile, m, n)
    if not tile.consumers:
        even = tile.tma or not any(k % block_shape(block_size)[1] for k in inner)
        constants = {"PAIRS": count} | tile_constants(tile, 0, block_size, False) | {"EVEN_K": even}
        del constants["HAS_BIAS"]
        constants |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        return _block_linear_sum_kernel, (tiles, 1, 1), (*operands, out, out_scale, m, n, *inner), constants
    by_tma = stores_by_tma(out.dtype, n)
    to = describe(out, (m, n), n, (specialized.ROWS, specialized.COLUMNS)) if by_tma else operands[3]
    constants = sum_constants(count, tile, block_size, by_tma) | specialized_options(tile)
    sizes = (m, n, *inner, cdiv(max(inner), block_shape(block_size)[1]))
    programs = min(tiles, chip_of(out.device)[1] * tile.programs)
    return specialized.sum_kernel, (programs, 1, 1), (*operands, to, out, out_scale, *sizes), constants


def add_parts(sums: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Add ``sums (parts, ..., N)`` fp32 and the bias, in a fixed order, and round once to ``out``."""
    y = sums.sum(0)
    out.copy_(y if bias is None else y + bias.float())


def tile_constants(tile: BlockTile, k: int, block_size: BlockSize, has_bias: bool) -> dict[str, Any]:
    """The compile-time constants of triton.py's kernel, in the order of its arguments."""
    return {
        "BLOCK": block_shape(block_size),
        "BLOCK_B": block_shape(operand_size(block_size)),
        "HAS_BIAS": has_bias,
        "STEP": min(block_shape(block_size)[1], STEP),
        "EVEN_K": tile.tma or k % block_shape(block_size)[1] == 0,  # descriptors read zeros past the edge
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "GROUP_M": tile.group_m,
        "TMA": tile.tma,
    }


def stores_by_tma(dtype: torch.dtype, columns: int) -> bool:
    """Whether the result is stored by TMA. Float32 is stored from registers: shared memory is needed for operands."""
    return dtype != torch.float32 and columns * dtype.itemsize % 16 == 0


def specialized_constants(tile: BlockTile, block_size: BlockSize, has_bias: bool, tma_store: bool) -> dict[str, Any]:
    """The compile-time constants of the kernel for Hopper."""
    return {"FORM": _form(tile, block_size, has_bias, tma_store)}


def sum_constants(pairs: int, tile: BlockTile, block_size: BlockSize, tma_store: bool) -> dict[str, Any]:
    """``specialized_constants`` for the sum of ``pairs`` products, which spills less if it is early."""
    return {"FORM": _form(tile, block_size, False, tma_store)._replace(early=True, pairs=pairs)}


def _form(tile: BlockTile, block_size: BlockSize, has_bias: bool, tma_store: bool) -> specialized.BlockLinearForm:
    return specialized.BlockLinearForm(
        block_shape(block_size),
        block_shape(operand_size(block_size)),
        has_bias,
        tile.block_m,
        tile.block_n,
        tile.group_m,
        tile.num_stages,
        tile.consumers,
        tma_store,
        tile.early,
    )


def specialized_options(tile: BlockTile) -> dict[str, int]:
    """The number of warps, and a limit of registers per thread if two programs share a multiprocessor."""
    return {"num_warps": tile.num_warps} | ({"maxnreg": 128} if tile.programs == 2 else {})
