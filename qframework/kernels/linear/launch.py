"""How int8_linear's kernels are launched: what is compiled in, tiles, grids, descriptors."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from qframework.kernels.linear import hopper as specialized
from qframework.kernels.linear.arguments import check_arguments, flat_out_scale, is_per_channel, result_dtype
from qframework.kernels.linear.tiles import Epilogue, Tile, tile_for
from qframework.kernels.linear.triton import _int8_linear_kernel
from qframework.kernels.runtime.checks import row_scale
from qframework.kernels.runtime.chip import check_device, chip_of
from qframework.kernels.runtime.launch import Launch, cdiv
from qframework.kernels.runtime.triton import TensorDescriptor

# a, a_scale, b, b_scale, bias, residual, out_scale
Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


class Plan:
    """Everything about a launch that follows from shapes, strides, dtypes and devices alone."""

    def __init__(self, operands: Operands, activation: str, out_dtype: torch.dtype) -> None:
        a, a_scale, b, b_scale, bias, residual, out_scale = operands
        check_device(a.device)
        n, k = b.shape
        row_scale("int8_linear", "a_scale", a_scale, a.shape)
        if out_scale is not None:
            flat_out_scale(out_scale, torch.Size((*a.shape[:-1], n)))
        self.shape = torch.Size((*a.shape[:-1], n))
        self.out_dtype = out_dtype
        self.sizes = (a.shape[:-1].numel(), n, k)
        self.periods = (a_scale.numel(), 1 if out_scale is None else out_scale.numel())
        rows = (rows_apart(a), rows_apart(b), n if residual is None else rows_apart(residual))
        vectors = [t for t in (a_scale, b_scale, bias, out_scale) if t is not None]
        self.in_place = None not in rows and all(t.is_contiguous() for t in vectors)
        self.strides = tuple(row or 0 for row in (*rows, n))
        self.epilogue = epilogue_of(activation, residual is not None, out_scale is not None)
        self.flags = (
            *(self._kind(a_scale), b_scale.numel() > 1, activation, bias is not None, residual is not None),
            "none" if out_scale is None else self._kind(out_scale),
        )
        steps = [self.strides[0], self.strides[1], n * out_dtype.itemsize]
        if residual is not None:
            steps.append(self.strides[2] * residual.dtype.itemsize)
        self.tma = self.in_place and k > 0 and all(step > 0 and step % 16 == 0 for step in steps)
        self.wide = out_dtype.itemsize == 4 or (residual is not None and residual.dtype != out_dtype)
        self._launches: dict[bool, tuple[Launch, Tile]] = {}

    def _kind(self, scale: Tensor) -> str:
        m, n, _ = self.sizes
        if scale.numel() == 1:
            return "tensor"
        if is_per_channel(scale, n):
            return "channel"
        return "row" if scale.numel() == m else "position"

    def launch(self, device: torch.device, aligned: bool) -> tuple[Launch, Tile]:
        """For operands that all begin at multiples of 16 bytes, or for any."""
        if aligned not in self._launches:
            tile = tile_for(device, *self.sizes, self.epilogue, self.tma and aligned, self.wide)
            self.use(tile, device, aligned)
        return self._launches[aligned]

    def use(self, tile: Tile, device: torch.device, aligned: bool = True) -> None:
        """Launch with ``tile`` from now on."""
        m, n, k = self.sizes
        tiles_m, tiles_n = cdiv(m, tile.block_m), cdiv(n, tile.block_n)
        slots = tile.programs * chip_of(device)[1] if tile.programs else 0
        walk = walk_of(tile, tiles_m * tiles_n, slots)
        grid = (tiles_m, tiles_n, 1) if walk == "grid" else (slots or tiles_m * tiles_n, 1, 1)
        kernel = specialized.kernel if tile.specialized else _int8_linear_kernel
        constants = (*self.flags, *tile_constants(tile, k, walk).values())
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        self._launches[aligned] = Launch(kernel, grid, constants, aligned, **options), tile


Walk = Literal["grid", "line", "persistent"]
_MAX_GRID = 1024  # tiles of a grid without groups: all of their operands stay in L2


def walk_of(tile: Tile, tiles: int, slots: int) -> Walk:
    """Which program takes which of ``tiles``, where ``slots`` programs run at a time: see the kernel."""
    if tiles <= (slots or _MAX_GRID):
        return "grid"
    return "persistent" if tile.programs else "line"


def tile_constants(tile: Tile, k: int, walk: Walk) -> dict[str, Any]:
    """What the kernel is compiled for because of its tile, in the order of its arguments."""
    blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "GROUP_M": tile.group_m}
    if tile.specialized:
        pingpong = tile.specialized == "pingpong"
        return {**blocks, "STAGES": tile.num_stages, "PINGPONG": pingpong, "SINGLE": walk == "grid"}
    return {
        "EVEN_K": tile.tma or k % tile.block_k == 0,  # descriptors give zeros past the edge
        **blocks,
        "WALK": walk,
        "SUBTILES": tile.subtiles,
        "TMA": tile.tma,
        "TMA_STORE": tile.tma_store,
    }


def epilogue_of(activation: str, residual: bool, int8: bool) -> Epilogue:
    """What the table of tiles calls an epilogue."""
    if residual:
        return "all" if activation != "none" or int8 else "residual"
    if activation != "none":
        return "activation" if int8 else "activation_float"
    return "int8" if int8 else "float"


def rows_apart(x: Tensor) -> int | None:
    """Elements from one row of ``(..., C)`` to the next, or None where rows are not evenly apart or not contiguous."""
    if x.ndim > 1 and x.numel() > 0:
        try:
            x = x.view(-1, x.shape[-1])
        except RuntimeError:  # no view holds the rows: a copy is needed
            return None
        return x.stride(0) if x.stride(1) == 1 or x.shape[1] == 1 else None
    return x.shape[-1] if x.is_contiguous() else None


_PLANS: dict[tuple[Any, ...], Plan] = {}
_MAX_PLANS = 8192  # beyond, shapes hardly repeat: begin anew rather than grow for ever


def int8_linear_triton(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``int8_linear`` in Triton; what was checked and chosen for operands holds for others like them."""
    operands = (a, a_scale, b, b_scale, bias, residual, out_scale)
    key = (activation, out_dtype, *[None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in operands])
    plan = _PLANS.get(key)
    if plan is None:
        check_arguments(a, a_scale, b, b_scale, bias, activation, residual, out_scale, out_dtype)
        if len(_PLANS) >= _MAX_PLANS:
            _PLANS.clear()
        plan = _PLANS[key] = Plan(operands, activation, result_dtype(out_scale, out_dtype))
    out = torch.empty(plan.shape, dtype=plan.out_dtype, device=a.device)
    if out.numel() == 0:
        return out
    if not plan.in_place:
        a, a_scale, b, b_scale, bias, residual, out_scale = _contiguous(operands)
        return int8_linear_triton(a, a_scale, b, b_scale, bias, activation, residual, out_scale, out_dtype)
    run_plan(plan, operands, out)
    return out


def run_plan(plan: Plan, operands: Operands, out: Tensor) -> None:
    """Launch ``plan`` on operands like those it was made for."""
    launch, arguments = _launch_and_arguments(plan, operands, out, out.device)
    launch(*arguments)


def warm_up_int8_linear(
    device: torch.device,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    out_scale: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Any:
    """Compile what ``int8_linear_triton`` launches on ``device`` for operands like these, which may lie on "meta".

    Returns what ``Launch.warm_up`` returns, None where nothing is launched.
    """
    check_arguments(a, a_scale, b, b_scale, bias, activation, residual, out_scale, out_dtype)
    operands = (a, a_scale, b, b_scale, bias, residual, out_scale)
    plan = Plan(operands, activation, result_dtype(out_scale, out_dtype))
    if not plan.in_place:
        operands = _contiguous(operands)
        plan = Plan(operands, activation, plan.out_dtype)
    out = torch.empty(plan.shape, dtype=plan.out_dtype, device=a.device)
    if out.numel() == 0:
        return None
    launch, arguments = _launch_and_arguments(plan, operands, out, device)
    return launch.warm_up(*arguments)


def _contiguous(operands: Operands) -> Operands:
    """Operands as the kernel can read them; matrices whose rows are evenly apart stay where they are."""
    a, a_scale, b, b_scale, bias, residual, out_scale = operands
    a, b = (t if rows_apart(t) is not None else t.contiguous() for t in (a, b))
    if residual is not None and rows_apart(residual) is None:
        residual = residual.contiguous()
    bias, out_scale = (t if t is None else t.contiguous() for t in (bias, out_scale))
    return a, a_scale.contiguous(), b, b_scale.contiguous(), bias, residual, out_scale


def _launch_and_arguments(
    plan: Plan, operands: Operands, out: Tensor, device: torch.device
) -> tuple[Launch, tuple[Any, ...]]:
    a, a_scale, b, b_scale, bias, residual, out_scale = operands
    pointers = [t for t in operands if t is not None]
    aligned = not any(t.data_ptr() % 16 for t in pointers)
    launch, tile = plan.launch(device, aligned)
    m, n, k = plan.sizes
    vectors = (bias if bias is not None else b_scale, residual if residual is not None else out)
    scales = out_scale if out_scale is not None else a_scale
    sizes = (m, n, k, *plan.periods)
    row, column, residual_row, out_row = plan.strides
    if tile.specialized:
        a_ref: Any = specialized.describe(a, (m, k), row, (tile.block_m, tile.block_k))
        b_ref: Any = specialized.describe(b, (n, k), column, (tile.block_n, tile.block_k))
        block = (specialized.ROWS, tile.block_n)
        out_ref: Any = specialized.describe(out, (m, n), out_row, block)
        residual_ref = out_ref if residual is None else specialized.describe(residual, (m, n), residual_row, block)
        return launch, (a_ref, a_scale, b_ref, b_scale, vectors[0], residual_ref, scales, out_ref, *sizes)
    a_ref, b_ref, out_ref = a, b, out
    if tile.tma:
        a_ref = TensorDescriptor(a, (m, k), (row, 1), (tile.block_m, tile.block_k))
        b_ref = TensorDescriptor(b, (n, k), (column, 1), (tile.block_n, tile.block_k))
    if tile.tma_store:
        out_ref = TensorDescriptor(out, (m, n), (n, 1), (tile.block_m, tile.block_n // tile.subtiles))
    return launch, (a_ref, a_scale, b_ref, b_scale, *vectors, scales, out_ref, *sizes, *plan.strides)
