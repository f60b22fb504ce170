"""Launches of int8_linear: choice of kernel and tile, grid, constants, tensor descriptors."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from qframework.compat.triton import OutOfResources
from qframework.kernels.linear import hopper, hopper_ring
from qframework.kernels.linear.arguments import Int8LinearArguments, is_per_channel
from qframework.kernels.linear.epilogue import EpilogueForm
from qframework.kernels.linear.few_rows import CHUNK, _add_parts_kernel, _int8_linear_few_rows_kernel
from qframework.kernels.linear.local_tiles import ignore_tiles, tile_for
from qframework.kernels.linear.tile import MAX_FEW_ROWS, Epilogue, FewRowsTile, Tile
from qframework.kernels.linear.triton import _int8_linear_kernel
from qframework.kernels.runtime.chip import check_device, chip_of
from qframework.kernels.runtime.launch import cdiv, launch, warm_up
from qframework.kernels.runtime.triton import TensorDescriptor


def int8_linear_triton(x: Int8LinearArguments) -> Tensor:
    """``int8_linear`` on a GPU."""
    check_device(x.a.device)
    x.check_scales()
    out = x.empty_result()
    if out.numel():
        write_result(readable(x), out)
    return out


def write_result(x: Int8LinearArguments, out: Tensor, tile: Tile | FewRowsTile | None = None) -> None:
    """Launch for ``readable`` operands, with ``tile`` or by default the best one for the problem."""
    try:
        _launch_all(_calls(x, out, x.a.device, tile))
    except OutOfResources as error:  # of a tile that another version of Triton has measured
        if tile is not None or not ignore_tiles(x.a.device, error):
            raise
        _launch_all(_calls(x, out, x.a.device, None))


def _launch_all(calls: list[_Call]) -> None:
    for kernel, grid, arguments, constants in calls:
        launch(kernel, grid)(*arguments, **constants)


def warm_up_tile(device: torch.device, x: Int8LinearArguments, tile: Tile) -> list[Any]:
    """As ``warm_up_int8_linear`` with ``tile``, for ``readable`` operands."""
    calls = _calls(x, x.empty_result(), device, tile)
    return [warm_up(kernel, grid)(*arguments, **constants) for kernel, grid, arguments, constants in calls]


def warm_up_int8_linear(device: torch.device, x: Int8LinearArguments) -> list[Any]:
    """Compile what ``int8_linear_triton`` launches on ``device`` for such arguments, which may be on "meta"."""
    x.check_scales()
    x = readable(x)
    out = x.empty_result()
    if not out.numel():
        return []
    calls = _calls(x, out, device, None)
    return [warm_up(kernel, grid)(*arguments, **constants) for kernel, grid, arguments, constants in calls]


class _Call(NamedTuple):
    """A launch."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


def _calls(x: Int8LinearArguments, out: Tensor, device: torch.device, tile: Tile | FewRowsTile | None) -> list[_Call]:
    """One launch; two for few rows whose inner size is in parts."""
    n, k = x.b.shape
    m = x.a.shape[:-1].numel()
    strides = _Strides(
        a=rows_apart(x.a) or 0,
        b=rows_apart(x.b) or 0,
        residual=n if x.residual is None else rows_apart(x.residual) or 0,
        out=n,
    )
    if tile is None:
        epilogue = epilogue_of(x.activation, x.residual is not None, x.out_scale is not None)
        wide = out.dtype.itemsize == 4 or (x.residual is not None and x.residual.dtype != out.dtype)
        tma = k > 0 and _aligned(x, (strides.a, strides.b, n * out.dtype.itemsize), strides.residual)
        tile = tile_for(device, m, n, k, epilogue, tma, wide)
    if isinstance(tile, FewRowsTile):
        return _few_rows_calls(x, out, tile, strides)
    return [_call(x, out, device, tile, strides)]


class _Strides(NamedTuple):
    """Elements between rows."""

    a: int
    b: int
    residual: int
    out: int


def _call(x: Int8LinearArguments, out: Tensor, device: torch.device, tile: Tile, strides: _Strides) -> _Call:
    n, k = x.b.shape
    m = x.a.shape[:-1].numel()
    a: Any = x.a
    b: Any = x.b
    to: Any = out
    residual: Any = out if x.residual is None else x.residual
    if tile.specialized:
        a = hopper.describe(a, (m, k), strides.a, (hopper.rows_of_a(tile.block_m), tile.block_k))
        width = hopper.width_of_block(tile.block_n)
        b = hopper.describe(b, (n, k), strides.b, (width, tile.block_k))
        block = (hopper.ROWS, width)
        to = hopper.describe(out, (m, n), n, block)
        residual = to if x.residual is None else hopper.describe(residual, (m, n), strides.residual, block)
    if tile.tma and not tile.specialized:
        a = TensorDescriptor(a, (m, k), (strides.a, 1), (tile.block_m, tile.block_k))
        b = TensorDescriptor(b, (n, k), (strides.b, 1), (tile.block_n, tile.block_k))
    if tile.tma_store and not tile.specialized:
        to = TensorDescriptor(out, (m, n), (n, 1), (tile.block_m, tile.block_n // tile.subtiles))
    pointers = (a, x.a_scale, b, x.b_scale, _bias(x), residual, *_requantization(x), to)
    tiles_m, tiles_n = cdiv(m, tile.block_m), cdiv(n, tile.block_n)
    slots = tile.programs * chip_of(device)[1] if tile.programs else 0
    walk = walk_of(tile, tiles_m * tiles_n, slots)
    grid = (tiles_m, tiles_n, 1) if walk == "grid" else (slots or tiles_m * tiles_n, 1, 1)
    constants = {
        "EPILOGUE": _epilogue_form(x, m, n),
        **tile_constants(tile, k, walk),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    kernel = hopper.kernel if tile.specialized else _int8_linear_kernel
    sizes = (m, n, k, *_periods(x), *(() if tile.specialized else strides))
    return _Call(kernel, grid, (*pointers, *sizes), constants)


def _few_rows_calls(x: Int8LinearArguments, out: Tensor, tile: FewRowsTile, strides: _Strides) -> list[_Call]:
    n, k = x.b.shape
    m = x.a.shape[:-1].numel()
    residual = out if x.residual is None else x.residual
    epilogue = _epilogue_form(x, m, n)
    parts = tile.parts
    to = out if parts == 1 else x.a.new_empty((parts, m, n), dtype=torch.int32)
    pointers = (x.a, x.a_scale, x.b, x.b_scale, _bias(x), residual, *_requantization(x), to)
    aligned = math.gcd(16, k, strides.a, strides.b)
    constants = {
        "EPILOGUE": epilogue,
        **few_rows_constants(tile, k, aligned, prefetch=aligned == 16 and x.b.data_ptr() % 16 == 0),
        "PARTS": parts,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    grid = (cdiv(n, tile.block_n), parts, 1)
    calls = [_Call(_int8_linear_few_rows_kernel, grid, (*pointers, m, n, k, *_periods(x), *strides), constants)]
    if parts > 1:
        block_m, block_n = ADDED_TILE
        operands = (to, x.a_scale, x.b_scale, _bias(x), residual, *_requantization(x), out)
        sizes = (m, n, *_periods(x), strides.residual, strides.out)
        constants = {"EPILOGUE": epilogue, "BLOCK_M": block_m, "BLOCK_N": block_n, "PARTS": parts, "num_warps": 4}
        grid = (cdiv(m, block_m), cdiv(n, block_n), 1)
        calls.append(_Call(_add_parts_kernel, grid, (*operands, *sizes), constants))
    return calls


ADDED_TILE = (4, 128)  # rows and columns of the result for which one program adds the parts


def few_rows_constants(tile: FewRowsTile, k: int, aligned: int, prefetch: bool) -> dict[str, Any]:
    """The compile-time constants that ``int8_linear`` and ``int8_gated_linear`` of few rows share.

    ``aligned`` divides K and the strides of all matrices; ``prefetch`` is whether rows of weights begin at multiples of
    16 bytes.
    """
    return {
        "ALIGNED": aligned,
        "EVEN_K": k % tile.block_k == 0,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "AHEAD": tile.ahead if prefetch and k >= CHUNK else 0,
    }


def _bias(x: Int8LinearArguments) -> Tensor:
    return x.b_scale if x.bias is None else x.bias


def _requantization(x: Int8LinearArguments) -> tuple[Tensor, Tensor]:
    """Scale and zero point of the result."""
    return (
        x.a_scale if x.out_scale is None else x.out_scale,
        x.a_scale if x.out_zero_point is None else x.out_zero_point,
    )


def _periods(x: Int8LinearArguments) -> tuple[int, int]:
    """Numbers of input scales and of output scales."""
    return x.a_scale.numel(), 1 if x.out_scale is None else x.out_scale.numel()


def _epilogue_form(x: Int8LinearArguments, m: int, n: int) -> EpilogueForm:
    return EpilogueForm(
        a_scale=_kind(x.a_scale, m, n),
        b_per_channel=x.b_scale.numel() > 1,
        activation=x.activation,
        has_bias=x.bias is not None,
        has_residual=x.residual is not None,
        out_scale="none" if x.out_scale is None else _kind(x.out_scale, m, n),
        zero_point=x.out_zero_point is not None,
    )


def _kind(scale: Tensor, m: int, n: int) -> str:
    if scale.numel() == 1:
        return "tensor"
    if is_per_channel(scale, n):
        return "channel"
    return "row" if scale.numel() == m else "position"


def _aligned(x: Int8LinearArguments, steps: tuple[int, ...], residual_row: int) -> bool:
    """Whether all addresses and row strides are multiples of 16 bytes, as TMA requires."""
    if x.residual is not None:
        steps = (*steps, residual_row * x.residual.dtype.itemsize)
    operands = [each for each in x if isinstance(each, Tensor)]
    return all(step > 0 and step % 16 == 0 for step in steps) and not any(t.data_ptr() % 16 for t in operands)


Walk = Literal["grid", "line", "persistent"]
_MAX_GRID = 1024  # up to this many tiles, all operands stay in L2 without grouping


def walk_of(tile: Tile, tiles: int, slots: int) -> Walk:
    """How ``tiles`` are assigned to programs, of which ``slots`` run at a time; see the kernel."""
    if tiles <= (slots or _MAX_GRID):
        return "grid"
    return "persistent" if tile.programs else "line"


def tile_constants(tile: Tile, k: int, walk: Walk, weights: int = 1) -> dict[str, Any]:
    """The kernel's compile-time constants for a tile, in the order of its parameters.

    ``weights`` of the same shape are multiplied together, on Hopper.
    """
    if tile.specialized:
        form = hopper_ring.LinearForm(
            tile.block_m,
            tile.block_n,
            tile.block_k,
            columns=tile.block_n // weights,
            group_m=tile.group_m,
            stages=tile.num_stages,
            pingpong=tile.specialized == "pingpong",
            single=walk == "grid",
        )
        return {"FORM": form}
    return {
        "EVEN_K": tile.tma or k % tile.block_k == 0,  # descriptors load zeros past the edge
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": tile.group_m,
        "WALK": walk,
        "SUBTILES": tile.subtiles,
        "TMA": tile.tma,
        "TMA_STORE": tile.tma_store,
    }


def epilogue_of(activation: str, residual: bool, int8: bool) -> Epilogue:
    """Name of an epilogue in the table of tiles."""
    if residual:
        return "all" if activation != "none" or int8 else "residual"
    if activation != "none":
        return "activation" if int8 else "activation_float"
    return "int8" if int8 else "float"


def rows_apart(x: Tensor) -> int | None:
    """Stride between rows of ``(..., C)`` in elements, None where rows are not evenly spaced or not contiguous."""
    if x.ndim > 1 and x.numel() > 0:
        try:
            x = x.view(-1, x.shape[-1])
        except RuntimeError:  # rows are not evenly spaced
            return None
        return x.stride(0) if x.stride(1) == 1 or x.shape[1] == 1 else None
    return x.shape[-1] if x.is_contiguous() else None


_WIDTH = 16  # bytes of a load; rows of other widths are read byte by byte


def readable(x: Int8LinearArguments) -> Int8LinearArguments:
    """Operands as the kernels can read them. Matrices are copied if their rows are not evenly spaced, and with zeros
    behind each row if there are many rows of a width that is no multiple of 16: that takes less time than to read them.
    """
    k = x.b.shape[1]
    missing = -k % _WIDTH if x.a.shape[:-1].numel() > MAX_FEW_ROWS else 0

    def rows(t: Tensor) -> Tensor:
        return t if rows_apart(t) is not None else t.contiguous()

    def wide(t: Tensor) -> Tensor:
        return torch.nn.functional.pad(t, (0, missing)) if missing else rows(t)

    return x._replace(
        a=wide(x.a),
        a_scale=x.a_scale.contiguous(),
        b=wide(x.b),
        b_scale=x.b_scale.contiguous(),
        bias=None if x.bias is None else x.bias.contiguous(),
        residual=None if x.residual is None else rows(x.residual),
        out_scale=None if x.out_scale is None else x.out_scale.contiguous(),
    )
