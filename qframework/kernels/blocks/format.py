"""The block format of INT8 training: definition in plain torch, and checks.

A float tensor ``x (..., C)`` is seen as R = prod(leading) rows of C columns, cut into blocks of B x B values with one
scale each (Jetfire, eq. 1), or of rows x columns. ``block_size`` is B or such a pair; where a formula says B, here and
in other files, it means a block's rows along R and its columns along C. Within a block the numerics are those of
qframework/numerics.py::

    q      int8, like x, contiguous
    scale  fp32, (ceil(R / B), ceil(C / B)):  scale[i, j] = max|block i, j| / 127        (at least MIN_SCALE)
    x      is about  q * scale of its block

A product sums up whole blocks in INT8, so the longer their rows, the faster; the fewer rows they have, the fewer tokens
share a scale, and one with outliers spoils no other. Blocks of (1, 128) are both. Transposed, they are quantized anew,
see ``operand_size``; square blocks keep their values, as in the paper.

Blocks at the ends may be cut off; what is missing counts as zeros and is never stored. NaN and infinity pass through:
their block gets a NaN or infinite scale. Stochastic rounding adds uniform noise of one step and rounds down, so that
the mean of many roundings is x; for the same seed it gives the same result on the same device.

Triton functions on such tiles are in primitives.py.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from qframework import numerics
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.runtime.checks import check_dtype, check_same_device
from qframework.kernels.runtime.launch import cdiv

BlockSize = int | Sequence[int]  # B, or rows and columns
CanonicalSize = int | tuple[int, int]  # of canonical_size: equal where blocks are
BLOCK_SIZES: tuple[CanonicalSize, ...] = (32, 64, 128, (32, 128), (1, 128))
PHILOX_ROUNDS = 7  # the fewest that pass every test of Salmon et al. (2011); more cost more than the traffic of INT8


def check_block_size(operator: str, block_size: BlockSize) -> CanonicalSize:
    """``canonical_size`` of it. Raises UnsupportedError unless it is one of BLOCK_SIZES."""
    if (size := canonical_size(block_size)) not in BLOCK_SIZES:
        accepted = ", ".join(map(str, BLOCK_SIZES))
        raise UnsupportedError(f"{operator}: block_size={size!r} is unsupported; accepted: {accepted}")
    return size


def block_shape(block_size: BlockSize) -> tuple[int, int]:
    """Rows and columns of a block."""
    if isinstance(block_size, int):
        return block_size, block_size
    rows, columns = block_size
    return rows, columns


def canonical_size(block_size: BlockSize) -> CanonicalSize:
    """The one way to write a block size: a number where blocks are square, else a tuple."""
    if not isinstance(block_size, list | tuple) or len(block_size) != 2:
        return block_size  # type: ignore[return-value]  # a number, or refused
    rows, columns = block_size
    return rows if rows == columns else (rows, columns)


class BlockSizeTextError(argparse.ArgumentTypeError, QFrameworkError):
    """A block size on a command line that is none; argparse prints its message as it is."""


def parse_block_size(text: str) -> CanonicalSize:
    """The block size that a command line names as ``block_size_name`` does: a number, or ROWSxCOLUMNS.

    Raises:
        BlockSizeTextError: a ``ValueError`` that says what is accepted.
    """
    sizes = {block_size_name(size): size for size in BLOCK_SIZES}
    sizes |= {"x".join(map(str, block_shape(size))): size for size in BLOCK_SIZES}  # 32x32 as well
    if text not in sizes:
        accepted = ", ".join(map(block_size_name, BLOCK_SIZES))
        raise BlockSizeTextError(f"{text!r} is no block size; accepted: {accepted}")
    return sizes[text]


def block_size_name(block_size: BlockSize) -> str:
    """``"32"`` for square blocks, ``"1x128"`` (rows x columns) for others."""
    size = canonical_size(block_size)
    return str(size) if isinstance(size, int) else f"{size[0]}x{size[1]}"


def is_square(block_size: BlockSize) -> bool:
    """Whether a block has as many rows as columns."""
    rows, columns = block_shape(block_size)
    return rows == columns


def operand_size(block_size: BlockSize) -> CanonicalSize:
    """Block size of what a product of tensors in ``block_size`` takes besides them: weights and transposed tensors.

    Along the dimension that is summed up, blocks must be as long in both operands. Square ones are, transposed or not;
    of others, a transposed tensor is quantized anew, with as few rows in a block as do not take more memory.
    """
    rows, columns = block_shape(block_size)
    return rows if rows == columns else (32, columns)


def row_count(shape: torch.Size | tuple[int, ...]) -> int:
    """R: how many rows of ``shape[-1]`` values a tensor of this shape has."""
    return math.prod(shape[:-1])


def scale_shape(shape: torch.Size | tuple[int, ...], block_size: BlockSize) -> tuple[int, int]:
    """Shape of the scales of a tensor of ``shape``: ``(ceil(R / B), ceil(C / B))``, B the block's rows and columns."""
    rows, columns = block_shape(block_size)
    return cdiv(row_count(shape), rows), cdiv(shape[-1], columns)


def check_blocks(operator: str, argument: str, q: Tensor, scale: Tensor, block_size: BlockSize) -> None:
    """Check one operand in the block format: dtypes, the scale's shape for that of ``q``, one device."""
    check_block_size(operator, block_size)
    check_dtype(operator, argument, q, (torch.int8,))
    check_dtype(operator, f"{argument}'s scale", scale, (torch.float32,))
    check_same_device(operator, q, **{f"{argument}'s scale": scale})
    if q.ndim == 0:
        raise UnsupportedError(f"{operator}: {argument} has shape (); accepted: one dimension or more")
    expected = scale_shape(q.shape, block_size)
    if tuple(scale.shape) != expected:
        raise QFrameworkError(
            f"{operator}: {argument}'s scale has shape {tuple(scale.shape)}; {argument} {tuple(q.shape)} in blocks of "
            f"{canonical_size(block_size)} needs {expected}"
        )


def block_scale(x: Tensor, block_size: BlockSize) -> Tensor:
    """Scale of every block of ``x (..., C)``: fp32, ``(ceil(R / B), ceil(C / B))``."""
    rows, columns = row_count(x.shape), x.shape[-1]
    height, width = block_shape(block_size)
    m, n = scale_shape(x.shape, block_size)
    padded = F.pad(x.reshape(rows, columns), (0, n * width - columns, 0, m * height - rows))
    return numerics.scale_from_amax(padded.abs().view(m, height, n, width).amax(dim=(1, 3)))


def spread_scale(scale: Tensor, shape: torch.Size | tuple[int, ...], block_size: BlockSize) -> Tensor:
    """The scale of every value of a tensor of ``shape``: fp32 of that shape."""
    m, n = scale.shape
    height, width = block_shape(block_size)
    spread = scale[:, None, :, None].expand(m, height, n, width).reshape(m * height, n * width)
    return spread[: row_count(shape), : shape[-1]].reshape(shape)


def quantize_blocks_ref(x: Tensor, block_size: BlockSize, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``x (..., C)`` float to the block format ``(q, scale)``.

    ``noise``, like ``x`` and uniform in [0, 1), rounds stochastically: ``floor(x / scale + noise)``.
    """
    scale = block_scale(x, block_size)
    spread = spread_scale(scale, x.shape, block_size)
    if noise is None:
        return numerics.quantize(x, spread).contiguous(), scale
    steps = torch.floor(x.float() * (1.0 / spread) + noise)
    return torch.clamp(steps, numerics.QMIN, numerics.QMAX).to(torch.int8).contiguous(), scale


def dequantize_blocks_ref(
    q: Tensor, scale: Tensor, block_size: BlockSize, dtype: torch.dtype = torch.float32
) -> Tensor:
    """``(q, scale)`` to a float tensor like ``q``: the product in fp32, rounded once to ``dtype``."""
    return numerics.dequantize(q, spread_scale(scale, q.shape, block_size), dtype).contiguous()
