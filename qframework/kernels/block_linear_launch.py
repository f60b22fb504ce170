"""How block_linear's kernels are launched: tile, parts of K, descriptors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qframework.kernels import block_linear_specialized as specialized
from qframework.kernels._blocks import scale_shape
from qframework.kernels._common import check_device
from qframework.kernels._launch import cdiv, launch
from qframework.kernels._triton import TensorDescriptor
from qframework.kernels.block_linear_kernel import _block_linear_kernel
from qframework.kernels.block_linear_tiles import Tile, choice_for, count_tiles
from qframework.kernels.int8_linear_specialized import describe
from qframework.kernels.int8_linear_tiles import chip_of

# a (M, K), a_scale, b (N, K), b_scale
Operands = tuple[Tensor, Tensor, Tensor, Tensor]


def block_linear_triton(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    block_size: int,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """``block_linear`` in Triton, of arguments that were checked."""
    check_device(a.device)
    a, a_scale, b, b_scale = (t.contiguous() for t in (a, a_scale, b, b_scale))
    m, (n, k) = a.shape[:-1].numel(), b.shape
    in_blocks = out_dtype == torch.int8
    out = torch.empty((*a.shape[:-1], n), dtype=out_dtype, device=a.device)
    out_scale = torch.empty(
        scale_shape(out.shape, block_size) if in_blocks else (0, 0), dtype=torch.float32, device=a.device
    )
    if out.numel() == 0:
        return out, out_scale
    operands = (a.view(m, k), a_scale, b, b_scale)
    tma = k > 0 and k % 16 == 0 and not (in_blocks and n % 16) and a.data_ptr() % 16 == b.data_ptr() % 16 == 0
    tile, parts = choice_for(a.device, m, n, k, block_size, tma, in_blocks)
    run = run_specialized if tile.consumers else run_anywhere
    if parts == 1:
        run(tile, operands, bias, out, out_scale, block_size, parts)
        return out, out_scale
    sums = torch.empty((parts, m, n), dtype=torch.float32, device=a.device)
    run(tile, operands, None, sums, out_scale, block_size, parts)
    return add_parts(sums, bias, out), out_scale


def add_parts(sums: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """``sums (parts, M, N)`` fp32 and the bias, added in an order of their own and rounded once to ``out``."""
    y = sums.sum(0)
    return out.copy_((y if bias is None else y + bias.float()).view(out.shape))


def run_anywhere(
    tile: Tile, operands: Operands, bias: Tensor | None, out: Tensor, out_scale: Tensor, block_size: int, parts: int
) -> None:
    """Launch the kernel for every size and chip."""
    a, a_scale, b, b_scale = operands
    (m, k), n = a.shape, b.shape[0]
    a_ref: Any = TensorDescriptor(a, (m, k), (k, 1), (tile.block_m, block_size)) if tile.tma else a
    b_ref: Any = TensorDescriptor(b, (n, k), (k, 1), (tile.block_n, block_size)) if tile.tma else b
    depth = cdiv(cdiv(k, block_size), parts)
    launch(_block_linear_kernel, (count_tiles(tile, m, n), parts))(
        a_scale, b_scale, a_ref, b_ref, b_scale if bias is None else bias, out, out_scale, m, n, k, depth,
        **tile_constants(tile, k, block_size, bias is not None), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def tile_constants(tile: Tile, k: int, block_size: int, has_bias: bool) -> dict[str, Any]:
    """What the kernel is compiled for, in the order of its arguments."""
    return {
        "BLOCK": block_size,
        "HAS_BIAS": has_bias,
        "EVEN_K": tile.tma or k % block_size == 0,  # descriptors give zeros past the edge
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "GROUP_M": tile.group_m,
        "TMA": tile.tma,
    }


def run_specialized(
    tile: Tile, operands: Operands, bias: Tensor | None, out: Tensor, out_scale: Tensor, block_size: int, parts: int
) -> None:
    """Launch the kernel for Hopper."""
    a, a_scale, b, b_scale = operands
    (m, k), n = a.shape, b.shape[0]
    a_desc = describe(a, (m, k), k, (tile.block_m, block_size))
    b_desc = describe(b, (n, k), k, (tile.block_n, block_size))
    by_tma = stores_by_tma(out)
    out_desc = describe(out, (m, n), n, (specialized.ROWS, tile.block_n)) if by_tma else b_desc
    steps = cdiv(cdiv(k, block_size), parts)
    programs = min(count_tiles(tile, m, n) * parts, chip_of(a.device)[1] * tile.programs)
    launch(specialized.kernel, (programs,))(
        a_scale, b_scale, a_desc, b_desc, b_scale if bias is None else bias, out_desc, out, out_scale,
        m, n, k, steps, parts, **specialized_constants(tile, block_size, bias is not None, by_tma),
        **specialized_options(tile),
    )  # fmt: skip


def stores_by_tma(out: Tensor) -> bool:
    """Float32 goes to memory from registers: in shared memory it would take the place of operands."""
    return out.dtype != torch.float32 and out.shape[-1] * out.dtype.itemsize % 16 == 0


def specialized_constants(tile: Tile, block_size: int, has_bias: bool, tma_store: bool) -> dict[str, Any]:
    """What the kernel for Hopper is compiled for, in the order of its arguments."""
    return {
        "BLOCK": block_size,
        "HAS_BIAS": has_bias,
        "BLOCK_M": tile.block_m,
        "GROUP_M": tile.group_m,
        "STAGES": tile.num_stages,
        "CONSUMERS": tile.consumers,
        "TMA_STORE": tma_store,
    }


def specialized_options(tile: Tile) -> dict[str, int]:
    """Warps, and registers a thread where two programs share a multiprocessor's."""
    return {"num_warps": tile.num_warps} | ({"maxnreg": 128} if tile.programs == 2 else {})
