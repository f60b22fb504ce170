"""Gradients of LayerNorm and RMSNorm on INT8 blocks.

Formula, with ``n = (x - mean) * rstd`` (RMSNorm: ``x * rstd``) and ``g = dy * weight``, in float32::

    dx = Q(rstd * (g - sum(g) / C - n * sum(g n) / C)), sums over the row (RMSNorm: without the first sum)
    dweight = sum(dy * n), dbias = sum(dy), sums over all rows

dx needs two sums over whole rows, and B whole rows of both operands do not fit on a multiprocessor. A first pass
therefore reads dy and x and computes all four sums of each tile, a small kernel adds them in a fixed order, and a
second pass writes dx. Memory traffic per value is 5 bytes, less what stays in L2. No atomics, so results repeat bit for
bit. Layout: blocks as in format.py. Reference: ``block_norm_backward_ref``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework.errors import QFrameworkError
from qframework.kernels.blocks.format import (
    DEFAULT_BLOCK_SIZE,
    BlockSize,
    check_blocks,
    dequantize_blocks_ref,
    quantize_blocks_ref,
    row_count,
)
from qframework.kernels.blocks.primitives import load_tile, quantize_tile, store_tile
from qframework.kernels.blocks.sum_rows import add_up, store_sums, stretch_origin, stretches
from qframework.kernels.blocks.tiles import (
    Blocks,
    check_alike,
    check_vector,
    contiguous,
    dequantized,
    empty_blocks,
    fold_rows,
    inside_tile,
    load_rows,
    rows_and_columns,
    rows_of_tile,
    tile_of,
)
from qframework.kernels.runtime.checks import check_dtype, check_same_device
from qframework.kernels.runtime.launch import cdiv, launch
from qframework.kernels.runtime.operator import declare
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton

LayerNormGradients = tuple[Tensor, Tensor, Tensor, Tensor]
RMSNormGradients = tuple[Tensor, Tensor, Tensor]


class BlockLayerNormBackwardArguments(NamedTuple):
    """The arguments of ``qframework::block_layer_norm_backward``."""

    dy: Tensor
    dy_scale: Tensor
    x: Tensor
    x_scale: Tensor
    weight: Tensor | None
    mean: Tensor
    rstd: Tensor
    block_size: BlockSize

    def empty_result(self) -> LayerNormGradients:
        """Allocate dx in blocks, dweight and dbias."""
        dweight, dbias = (self.x.new_empty((self.x.shape[-1],), dtype=torch.float32) for _ in range(2))
        return *empty_blocks(self.x, self.block_size), dweight, dbias

    def check(self) -> None:
        """Raise QFrameworkError for invalid operands."""
        _check("block_layer_norm_backward", self)
        check_vector("block_layer_norm_backward", "mean", self.mean, row_count(self.x.shape), self.x)


class BlockRMSNormBackwardArguments(NamedTuple):
    """The arguments of ``qframework::block_rms_norm_backward``."""

    dy: Tensor
    dy_scale: Tensor
    x: Tensor
    x_scale: Tensor
    weight: Tensor | None
    rstd: Tensor
    block_size: BlockSize

    def empty_result(self) -> RMSNormGradients:
        """Allocate dx in blocks and dweight."""
        dweight = self.x.new_empty((self.x.shape[-1],), dtype=torch.float32)
        return *empty_blocks(self.x, self.block_size), dweight

    def check(self) -> None:
        """Raise QFrameworkError for invalid operands."""
        _check("block_rms_norm_backward", self)


class BlockNormSumsArguments(NamedTuple):
    """The arguments of ``qframework::block_norm_sums``; those of an RMSNorm have no mean."""

    dy: Tensor
    dy_scale: Tensor
    x: Tensor
    x_scale: Tensor
    weight: Tensor | None
    mean: Tensor | None
    rstd: Tensor
    block_size: BlockSize

    def empty_result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Allocate the sums of rows, dweight, and dbias, which is empty for an RMSNorm."""
        rows, columns = row_count(self.x.shape), self.x.shape[-1]
        shapes = (rows, 2), (columns,), (0 if self.mean is None else columns,)
        sums, dweight, dbias = (self.x.new_empty(shape, dtype=torch.float32) for shape in shapes)
        return sums, dweight, dbias

    def check(self) -> None:
        """Raise QFrameworkError for invalid operands."""
        _check("block_norm_sums", self)
        check_vector("block_norm_sums", "mean", self.mean, row_count(self.x.shape), self.x)


class BlockNormGradientArguments(NamedTuple):
    """The arguments of ``qframework::block_norm_gradient``; z is another gradient of x, or None."""

    dy: Tensor
    dy_scale: Tensor
    x: Tensor
    x_scale: Tensor
    weight: Tensor | None
    mean: Tensor | None
    rstd: Tensor
    sums: Tensor
    z: Tensor | None
    z_scale: Tensor | None
    block_size: BlockSize

    def empty_result(self) -> Blocks:
        """Allocate the gradient in blocks."""
        return empty_blocks(self.x, self.block_size)

    def check(self) -> None:
        """Raise QFrameworkError for invalid operands."""
        name = "block_norm_gradient"
        _check(name, self.of_norm)
        check_vector(name, "mean", self.mean, row_count(self.x.shape), self.x)
        check_dtype(name, "sums", self.sums, (torch.float32,))
        check_same_device(name, self.x, sums=self.sums)
        if tuple(self.sums.shape) != (row_count(self.x.shape), 2):
            raise QFrameworkError(
                f"{name}: sums must have shape {(row_count(self.x.shape), 2)}, got {tuple(self.sums.shape)}"
            )
        if (self.z is None) != (self.z_scale is None):
            raise QFrameworkError(f"{name}: z and z_scale must both be given or both be None")
        if self.z is not None and self.z_scale is not None:
            check_blocks(name, "z", self.z, self.z_scale, self.block_size)
            check_same_device(name, self.x, z=self.z)
            if self.z.shape != self.x.shape:
                raise QFrameworkError(
                    f"{name}: z must have the shape of x, {tuple(self.x.shape)}, got {tuple(self.z.shape)}"
                )

    @property
    def of_norm(self) -> BlockNormSumsArguments:
        """The arguments of the norm alone."""
        return BlockNormSumsArguments(*self[:7], self.block_size)


BackwardArguments = BlockLayerNormBackwardArguments | BlockRMSNormBackwardArguments


def _sums_arguments(args: BackwardArguments) -> BlockNormSumsArguments:
    mean = args.mean if isinstance(args, BlockLayerNormBackwardArguments) else None
    return BlockNormSumsArguments(
        args.dy, args.dy_scale, args.x, args.x_scale, args.weight, mean, args.rstd, args.block_size
    )


def _check(operator: str, args: BackwardArguments | BlockNormSumsArguments) -> None:
    check_alike(operator, args)
    check_vector(operator, "weight", args.weight, args.x.shape[-1], args.x)
    check_vector(operator, "rstd", args.rstd, row_count(args.x.shape), args.x)


def block_norm_backward_ref(args: BackwardArguments) -> tuple[Tensor, ...]:
    """Reference of ``qframework::block_layer_norm_backward`` and ``qframework::block_rms_norm_backward``."""
    of_norm = _sums_arguments(args)
    sums, dweight, dbias = block_norm_sums_ref(of_norm)
    gradients = *block_norm_gradient_ref(_gradient_arguments(of_norm, sums)), dweight
    return (*gradients, dbias) if of_norm.mean is not None else gradients


def _gradient_arguments(args: BlockNormSumsArguments, sums: Tensor) -> BlockNormGradientArguments:
    return BlockNormGradientArguments(*args[:7], sums, None, None, args.block_size)


def _values(args: BlockNormSumsArguments) -> tuple[Tensor, Tensor, Tensor]:
    """dy, g and n of a reference, (R, C) fp32."""
    columns = args.x.shape[-1]
    dy, x = (each.reshape(-1, columns) for each in dequantized(args))
    g = dy if args.weight is None else dy * args.weight.float()
    return dy, g, (x if args.mean is None else x - args.mean[:, None]) * args.rstd[:, None]


def block_norm_sums_ref(args: BlockNormSumsArguments) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of ``qframework::block_norm_sums``."""
    dy, g, n = _values(args)
    dbias = dy.new_empty(0) if args.mean is None else dy.sum(0)
    return torch.stack((g.sum(-1), (g * n).sum(-1)), 1), (dy * n).sum(0), dbias


def block_norm_gradient_ref(args: BlockNormGradientArguments) -> Blocks:
    """Reference of ``qframework::block_norm_gradient``."""
    _, g, n = _values(args.of_norm)
    mean_g, mean_gn = (args.sums / args.x.shape[-1]).split(1, 1)
    dx = ((g if args.mean is None else g - mean_g) - n * mean_gn) * args.rstd[:, None]
    if args.z is not None and args.z_scale is not None:
        dx = dx + dequantize_blocks_ref(args.z, args.z_scale, args.block_size).view_as(dx)
    dx, dx_scale = quantize_blocks_ref(dx, args.block_size)
    return dx.view(args.x.shape), dx_scale


@triton.jit
def _normalized(x, mean_ptr, rstd_ptr, row, R, RMS: tl.constexpr):
    """n of a tile (M, N) that begins at ``row``, and rstd of its rows."""
    r = row + tl.arange(0, x.shape[0])
    rstd = tl.load(rstd_ptr + r, mask=r < R, other=0.0)
    if not RMS:
        x -= tl.load(mean_ptr + r, mask=r < R, other=0.0)[:, None]
    return x * rstd[:, None], rstd


@triton.jit
def _load_weight(weight_ptr, column, C, TILE_N: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    """Weights of the columns of a tile, (1, TILE_N) fp32; ones without HAS_WEIGHT."""
    c = column + tl.arange(0, TILE_N)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    else:
        weight = tl.full((TILE_N,), 1.0, tl.float32)
    return weight[None, :]


@triton.jit
def _norm_sums_kernel(
    dy_ptr,  # (R, C) int8
    dy_scale_ptr,  # (ceil(R / BLOCK[0]), ceil(C / BLOCK[1])) fp32
    x_ptr,  # like dy
    x_scale_ptr,
    weight_ptr,  # (C,) float
    mean_ptr,  # (R,) fp32, read unless RMS
    rstd_ptr,  # (R,) fp32
    rows_ptr,  # (P, R, 2) fp32: sum(g) and sum(g n) of each row and tile, P = ceil(C / TILE_N)
    dweight_ptr,  # (S, C) fp32: sum(dy n) of each column and stretch of rows
    dbias_ptr,  # (S, C) fp32: sum(dy), written unless RMS
    R,
    C,
    RMS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    STRETCH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """All sums of STRETCH rows and the columns of one tile. Grid (S * cdiv(C, TILE_N),)."""
    wait_for_previous_kernel(OVERLAP)
    first, column = stretch_origin(C, STRETCH, TILE_N)
    weight = _load_weight(weight_ptr, column, C, TILE_N, HAS_WEIGHT)
    dweight = tl.zeros((LANES, TILE_N), tl.float32)
    dbias = tl.zeros((LANES, TILE_N), tl.float32)
    both = tl.arange(0, 2)[None, :]
    for start in tl.range(0, STRETCH, TILE_M, num_stages=STAGES):
        row = first + start
        dy = load_rows(dy_ptr, dy_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK)
        x = load_rows(x_ptr, x_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK)
        n, _ = _normalized(x, mean_ptr, rstd_ptr, row, R, RMS)
        g = dy * weight
        sums = tl.join(tl.sum(g, 1), tl.sum(g * n, 1))
        r = (row + tl.arange(0, TILE_M))[:, None]
        where = ((column // TILE_N).to(tl.int64) * R + r) * 2 + both
        tl.store(rows_ptr + where, sums, mask=(r < R) & (both < 2))
        dweight += fold_rows(dy * n, LANES)
        if not RMS:
            dbias += fold_rows(dy, LANES)
    store_sums(dweight_ptr, dweight, first // STRETCH, column, C)
    if not RMS:
        store_sums(dbias_ptr, dbias, first // STRETCH, column, C)


@triton.jit
def _last_read_first(R, C, STRETCH: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """First row and column of this program's tile; the order goes from the end of each stretch to its beginning.

    ``_norm_sums_kernel`` moves down all stretches at the same time, so L2 holds their last rows. Where the last stretch
    extends beyond the tensor, some tiles lie outside and are empty.
    """
    LENGTH: tl.constexpr = STRETCH // TILE_M
    across, count = tl.cdiv(C, TILE_N), tl.cdiv(R, STRETCH)
    i = tl.program_id(0) // across
    return (i % count * LENGTH + LENGTH - 1 - i // count) * TILE_M, tl.program_id(0) % across * TILE_N


@triton.jit
def _norm_backward_kernel(
    dy_ptr,  # (R, C) int8
    dy_scale_ptr,  # (ceil(R / BLOCK[0]), ceil(C / BLOCK[1])) fp32
    x_ptr,  # like dy
    x_scale_ptr,
    weight_ptr,  # (C,) float
    mean_ptr,  # (R,) fp32, read unless RMS
    rstd_ptr,  # (R,) fp32
    sums_ptr,  # (R, 2) fp32: sum(g), read unless RMS, and sum(g n) of each row
    z_ptr,  # like dy, read where ADDS
    z_scale_ptr,
    dx_ptr,  # like dy
    dx_scale_ptr,
    R,
    C,
    RMS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ADDS: tl.constexpr,
    STRETCH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """dx, or dx + z. A program computes one tile; grid (tiles of all stretches,)."""
    wait_for_previous_kernel(OVERLAP)
    row, column = _last_read_first(R, C, STRETCH, TILE_M, TILE_N)
    dy = load_tile(dy_ptr, dy_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    x = load_tile(x_ptr, x_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    n, rstd = _normalized(x, mean_ptr, rstd_ptr, row, R, RMS)
    g = dy * _load_weight(weight_ptr, column, C, TILE_N, HAS_WEIGHT)
    r = row + tl.arange(0, TILE_M)
    g -= n * (tl.load(sums_ptr + 2 * r.to(tl.int64) + 1, mask=r < R, other=0.0) / C)[:, None]
    if not RMS:
        g -= (tl.load(sums_ptr + 2 * r.to(tl.int64), mask=r < R, other=0.0) / C)[:, None]
    dx = g * rstd[:, None]
    if not EVEN:
        dx = tl.where(inside_tile(row, column, R, C, TILE_M, TILE_N), dx, 0.0)
    if ADDS:
        dx += load_tile(z_ptr, z_scale_ptr, row, column, R, C, TILE_M, TILE_N, BLOCK, EVEN)
    q, dx_scale = quantize_tile(dx, BLOCK)
    store_tile(dx_ptr, dx_scale_ptr, q, dx_scale, row, column, R, C, BLOCK, EVEN)


def block_norm_backward_triton(args: BackwardArguments) -> tuple[Tensor, ...]:
    """``block_layer_norm_backward`` and ``block_rms_norm_backward`` on a GPU."""
    of_norm = _sums_arguments(args)
    sums, dweight, dbias = block_norm_sums_triton(of_norm)
    gradients = *block_norm_gradient_triton(_gradient_arguments(of_norm, sums)), dweight
    return (*gradients, dbias) if of_norm.mean is not None else gradients


def _operands(args: BlockNormSumsArguments) -> tuple[tuple[Tensor, ...], dict[str, bool]]:
    """The tensors that both kernels read, and their flags. Any tensor serves as a pointer that they do not use."""
    args, unread = contiguous(args), args.rstd
    vectors = (unread if args.weight is None else args.weight, unread if args.mean is None else args.mean, args.rstd)
    flags = {"RMS": args.mean is None, "HAS_WEIGHT": args.weight is not None}
    return (args.dy, args.dy_scale, args.x, args.x_scale, *vectors), flags


def block_norm_sums_triton(args: BlockNormSumsArguments) -> tuple[Tensor, Tensor, Tensor]:
    """``block_norm_sums`` on a GPU."""
    rows, columns = rows_and_columns(args.x)
    empty = args.empty_result()
    if args.x.numel() == 0:
        return empty[0].zero_(), empty[1].zero_(), empty[2].zero_()
    operands, flags = _operands(args)
    tile = rows_of_tile(columns, args.block_size)
    length, count = stretches(rows, columns, tile)
    across = cdiv(columns, tile["TILE_N"])
    per_row = args.x.new_empty((across, 2 * rows), dtype=torch.float32)
    dweight, dbias = (args.x.new_empty((count, columns), dtype=torch.float32) for _ in range(2))
    launch(_norm_sums_kernel, (count * across,))(
        *operands, per_row, dweight, dbias, rows, columns, **flags, STRETCH=length, **tile
    )
    if args.mean is None:
        row_sums, dweight = add_up(per_row, dweight)
        return row_sums.view(rows, 2), dweight, empty[2]
    row_sums, dweight, dbias = add_up(per_row, dweight, dbias)
    return row_sums.view(rows, 2), dweight, dbias


def block_norm_gradient_triton(args: BlockNormGradientArguments) -> Blocks:
    """``block_norm_gradient`` on a GPU."""
    rows, columns = rows_and_columns(args.x)
    dx = args.empty_result()
    if args.x.numel() == 0:
        return dx
    operands, flags = _operands(args.of_norm)
    adds = args.z is not None and args.z_scale is not None
    z = (args.z.contiguous(), args.z_scale.contiguous()) if adds else dx  # type: ignore[union-attr]
    length, _ = stretches(rows, columns, rows_of_tile(columns, args.block_size))
    tile = tile_of(rows, columns, args.block_size)
    length = max(length, tile["TILE_M"])
    tile["EVEN"] = tile["EVEN"] and rows % length == 0  # otherwise tiles of the last stretch lie outside
    grid = (cdiv(rows, length) * (length // tile["TILE_M"]) * cdiv(columns, tile["TILE_N"]),)
    launch(_norm_backward_kernel, grid)(
        *operands, args.sums.contiguous(), *z, *dx, rows, columns, **flags, ADDS=adds, STRETCH=length, **tile
    )
    return dx


BLOCK_LAYER_NORM_BACKWARD = declare(
    "block_layer_norm_backward(Tensor dy, Tensor dy_scale, Tensor x, Tensor x_scale, Tensor? weight, Tensor mean, "
    "Tensor rstd, int[2] block_size) -> (Tensor, Tensor, Tensor, Tensor)",
    BlockLayerNormBackwardArguments,
    cpu=block_norm_backward_ref,
    cuda=block_norm_backward_triton,
    fake=BlockLayerNormBackwardArguments.empty_result,
)
BLOCK_RMS_NORM_BACKWARD = declare(
    "block_rms_norm_backward(Tensor dy, Tensor dy_scale, Tensor x, Tensor x_scale, Tensor? weight, Tensor rstd, "
    "int[2] block_size) -> (Tensor, Tensor, Tensor)",
    BlockRMSNormBackwardArguments,
    cpu=block_norm_backward_ref,
    cuda=block_norm_backward_triton,
    fake=BlockRMSNormBackwardArguments.empty_result,
)

BLOCK_NORM_SUMS = declare(
    "block_norm_sums(Tensor dy, Tensor dy_scale, Tensor x, Tensor x_scale, Tensor? weight, Tensor? mean, Tensor rstd, "
    "int[2] block_size) -> (Tensor, Tensor, Tensor)",
    BlockNormSumsArguments,
    cpu=block_norm_sums_ref,
    cuda=block_norm_sums_triton,
    fake=BlockNormSumsArguments.empty_result,
)
BLOCK_NORM_GRADIENT = declare(
    "block_norm_gradient(Tensor dy, Tensor dy_scale, Tensor x, Tensor x_scale, Tensor? weight, Tensor? mean, "
    "Tensor rstd, Tensor sums, Tensor? z, Tensor? z_scale, int[2] block_size) -> (Tensor, Tensor)",
    BlockNormGradientArguments,
    cpu=block_norm_gradient_ref,
    cuda=block_norm_gradient_triton,
    fake=BlockNormGradientArguments.empty_result,
)


def block_layer_norm_backward(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    block_size: BlockSize = DEFAULT_BLOCK_SIZE,
) -> LayerNormGradients:
    """Gradients of ``block_layer_norm``.

    Args:
        dy: ``(..., C)`` int8, the gradient of ``y``.
        dy_scale: ``(ceil(R / B), ceil(C / B))`` fp32.
        x: the input of the forward pass, like ``dy``.
        x_scale: like ``dy_scale``.
        weight: ``(C,)`` float, or None.
        mean: ``(R,)`` fp32, from the forward pass.
        rstd: ``(R,)`` fp32, from the forward pass.
        block_size: 32, 64, 128, (32, 128), (1, 128) or (1, 256).

    Returns:
        dx and its scale in the same format, with an error of at most half a step of its block; dweight and dbias,
        ``(C,)`` fp32, always summed in the same order.

    Raises:
        UnsupportedError: a block size, a dtype, or a GPU below sm_80.
        QFrameworkError: shapes or devices that do not match.
    """
    return torch.ops.qframework.block_layer_norm_backward(dy, dy_scale, x, x_scale, weight, mean, rstd, block_size)


def block_rms_norm_backward(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    block_size: BlockSize = DEFAULT_BLOCK_SIZE,
) -> RMSNormGradients:
    """Gradients of ``block_rms_norm``: ``(dx, its scale, dweight)``. See ``block_layer_norm_backward``."""
    return torch.ops.qframework.block_rms_norm_backward(dy, dy_scale, x, x_scale, weight, rstd, block_size)
