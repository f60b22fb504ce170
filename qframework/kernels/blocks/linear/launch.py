"""How block_linear's kernels are launched: tile, parts of K, descriptors, and all that is kept from call to call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qframework.compat.triton import descriptor_maker
from qframework.kernels.blocks.format import BlockSize, block_shape, canonical_size, operand_size, scale_shape
from qframework.kernels.blocks.linear import hopper as specialized
from qframework.kernels.blocks.linear.arguments import check_arguments
from qframework.kernels.blocks.linear.tiles import Choice, Tile, choice_for, count_tiles
from qframework.kernels.blocks.linear.triton import _block_linear_kernel
from qframework.kernels.linear.hopper import describe
from qframework.kernels.runtime.chip import check_device, chip_of
from qframework.kernels.runtime.launch import Launch, cdiv
from qframework.kernels.runtime.triton import TensorDescriptor

# a (M, K), a_scale, b (N, K), b_scale, bias
Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


class Prepared(NamedTuple):
    """A launch for operands that begin where they do: at multiples of 16 bytes, or at others."""

    launch: Launch
    parts: int  # of K
    a: Any  # what makes descriptors of tensors, None where the kernel takes pointers
    b: Any
    out: Any
    specialized: bool
    sizes: tuple[int, ...]  # the kernel's integers


class Plan:
    """Everything about a call that follows from shapes, strides, dtypes and the device alone.

    ``choice``: with this tile and these parts of K rather than those that are chosen.
    """

    def __init__(
        self, operands: Operands, block_size: BlockSize, out_dtype: torch.dtype, choice: Choice | None = None
    ) -> None:
        a, a_scale, b, b_scale, bias = operands
        check_arguments(a, a_scale, b, b_scale, bias, block_size, out_dtype)
        check_device(a.device)
        self.device, self.out_dtype, self.choice = a.device, out_dtype, choice
        self.block_size, self.step = canonical_size(block_size), block_shape(block_size)[1]
        self.has_bias, self.in_blocks = bias is not None, out_dtype == torch.int8
        n, k = b.shape
        self.sizes = (a.shape[:-1].numel(), n, k)
        self.shape = torch.Size((*a.shape[:-1], n))
        self.scale_shape = scale_shape(self.shape, block_size) if self.in_blocks else (0, 0)
        self.in_place = all(t is None or t.is_contiguous() for t in operands)
        self.tma = k > 0 and k % 16 == 0 and not (self.in_blocks and n % 16)
        # For AMD's GPUs, Triton compiles in whether memory is small.
        self.alike = torch.version.hip is None
        self._prepared: dict[tuple[bool, ...], Prepared] = {}

    def prepared(self, operands: Operands) -> Prepared:
        """The launch for operands like those the plan was made for."""
        alignment = tuple([t is not None and t.data_ptr() % 16 == 0 for t in operands])
        found = self._prepared.get(alignment)
        if found is None:
            tma = self.tma and alignment[0] and alignment[2]
            choice = self.choice or choice_for(self.device, *self.sizes, self.block_size, tma, self.in_blocks)
            prepare = self._specialized if choice.tile.consumers else self._anywhere
            found = self._prepared[alignment] = prepare(*choice, operands)
        return found

    def _anywhere(self, tile: Tile, parts: int, operands: Operands) -> Prepared:
        """Of the kernel for every size and chip."""
        m, n, k = self.sizes
        a = b = None
        if tile.tma:
            a = descriptor_maker(TensorDescriptor(operands[0], (m, k), (k, 1), (tile.block_m, self.step)))
            b = descriptor_maker(TensorDescriptor(operands[2], (n, k), (k, 1), (tile.block_n, self.step)))
        constants = tuple(tile_constants(tile, k, self.block_size, self.has_bias and parts == 1).values())
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        launch = Launch(_block_linear_kernel, (count_tiles(tile, m, n), parts, 1), constants, self.alike, **options)
        return Prepared(launch, parts, a, b, None, False, (m, n, k, self._depth(parts)))

    def _specialized(self, tile: Tile, parts: int, operands: Operands) -> Prepared:
        """Of the kernel for Hopper."""
        m, n, k = self.sizes
        a = descriptor_maker(describe(operands[0], (m, k), k, (tile.block_m, self.step)))
        b = descriptor_maker(describe(operands[2], (n, k), k, (tile.block_n, self.step)))
        dtype = self.out_dtype if parts == 1 else torch.float32
        by_tma = stores_by_tma(dtype, n)
        like = torch.empty((1, n), dtype=dtype, device=self.device)
        out = descriptor_maker(describe(like, (m, n), n, (specialized.ROWS, tile.block_n))) if by_tma else None
        programs = min(count_tiles(tile, m, n) * parts, chip_of(self.device)[1] * tile.programs)
        constants = specialized_constants(tile, self.block_size, self.has_bias and parts == 1, by_tma)
        options = specialized_options(tile)
        launch = Launch(specialized.kernel, (programs, 1, 1), tuple(constants.values()), self.alike, **options)
        return Prepared(launch, parts, a, b, out, True, (m, n, k, self._depth(parts), parts))

    def _depth(self, parts: int) -> int:
        """Blocks along K that a part has."""
        return cdiv(cdiv(self.sizes[2], self.step), parts)


_PLANS: dict[tuple[Any, ...], Plan] = {}
_MAX_PLANS = 8192  # beyond, shapes hardly repeat: begin anew rather than grow for ever


def block_linear_triton(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    block_size: BlockSize,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """``block_linear`` in Triton; what was checked and chosen for operands holds for others like them."""
    operands = (a, a_scale, b, b_scale, bias)
    block_size = canonical_size(block_size)
    key = (block_size, out_dtype, *[None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in operands])
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) >= _MAX_PLANS:
            _PLANS.clear()
        plan = _PLANS[key] = Plan(operands, block_size, out_dtype)
    if not plan.in_place:
        a, a_scale, b, b_scale = (t.contiguous() for t in operands[:4])
        return block_linear_triton(
            a, a_scale, b, b_scale, None if bias is None else bias.contiguous(), block_size, out_dtype
        )
    return run_plan(plan, operands)


def run_plan(plan: Plan, operands: Operands) -> tuple[Tensor, Tensor]:
    """Launch ``plan`` on operands like those it was made for."""
    out = torch.empty(plan.shape, dtype=plan.out_dtype, device=plan.device)
    out_scale = torch.empty(plan.scale_shape, dtype=torch.float32, device=plan.device)
    if out.numel() == 0:
        return out, out_scale
    prepared = plan.prepared(operands)
    if prepared.parts == 1:
        _launch(prepared, operands, out, out_scale)
        return out, out_scale
    sums = torch.empty((prepared.parts, *plan.sizes[:2]), dtype=torch.float32, device=plan.device)
    _launch(prepared, operands, sums, out_scale)
    return add_parts(sums, operands[4], out), out_scale


def _launch(prepared: Prepared, operands: Operands, out: Tensor, out_scale: Tensor) -> None:
    a, a_scale, b, b_scale, bias = operands
    a_ref, b_ref = (a, b) if prepared.a is None else (prepared.a(a), prepared.b(b))
    refs = (a_scale, b_scale, a_ref, b_ref, b_scale if bias is None else bias)
    if prepared.specialized:
        out_ref = b_ref if prepared.out is None else prepared.out(out)
        prepared.launch(*refs, out_ref, out, out_scale, *prepared.sizes)
    else:
        prepared.launch(*refs, out, out_scale, *prepared.sizes)


def add_parts(sums: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """``sums (parts, M, N)`` fp32 and the bias, added in an order of their own and rounded once to ``out``."""
    y = sums.sum(0)
    return out.copy_((y if bias is None else y + bias.float()).view(out.shape))


def tile_constants(tile: Tile, k: int, block_size: BlockSize, has_bias: bool) -> dict[str, Any]:
    """What the kernel is compiled for, in the order of its arguments."""
    return {
        "BLOCK": block_shape(block_size),
        "BLOCK_B": block_shape(operand_size(block_size)),
        "HAS_BIAS": has_bias,
        "EVEN_K": tile.tma or k % block_shape(block_size)[1] == 0,  # descriptors give zeros past the edge
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "GROUP_M": tile.group_m,
        "TMA": tile.tma,
    }


def stores_by_tma(dtype: torch.dtype, columns: int) -> bool:
    """Float32 goes to memory from registers: in shared memory it would take the place of operands."""
    return dtype != torch.float32 and columns * dtype.itemsize % 16 == 0


def specialized_constants(tile: Tile, block_size: BlockSize, has_bias: bool, tma_store: bool) -> dict[str, Any]:
    """What the kernel for Hopper is compiled for, in the order of its arguments."""
    return {
        "BLOCK": block_shape(block_size),
        "BLOCK_B": block_shape(operand_size(block_size)),
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
