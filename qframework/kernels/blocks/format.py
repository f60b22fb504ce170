"""The block format of INT8 training: definition in plain torch, and checks.

A float tensor ``x (..., C)`` is treated as R = prod(leading) rows of C columns and divided into blocks of B x B values,
or of (rows, columns), with one scale each (Jetfire, eq. 1). ``block_size`` is B or that pair. Where a formula says B,
here and in other files, it means a block's rows along R and its columns along C. Within a block the numerics are those
of qframework/numerics.py::

    q      int8, like x, contiguous
    scale  fp32, (ceil(R / B), ceil(C / B)):  scale[i, j] = max|block i, j| / 127        (at least MIN_SCALE)
    x      is about  q * scale of its block

A matrix product sums over a block's columns in INT8, so wide blocks are fast. With few rows in a block, few tokens
share a scale, so a token with outliers costs few others accuracy. Blocks of (1, 128), the default, have both
advantages, but their transpose must be quantized again, see ``transposed_size``; square blocks keep their values, as
in the paper.

Blocks at the edges may be incomplete: missing values count as zeros and are never stored. A block with NaN or infinity
gets a NaN or infinite scale. Stochastic rounding adds uniform noise of one step and rounds down, so that the mean of
many roundings is x; the same seed gives the same result on the same device.

Triton functions on such tiles are in primitives.py.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from qframework import numerics
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.runtime.checks import check_dtype, check_same_device
from qframework.kernels.runtime.launch import cdiv

BlockSize = int | Sequence[int]  # B, or rows and columns
CanonicalSize = int | tuple[int, int]  # what canonical_size returns
BLOCK_SIZES: tuple[CanonicalSize, ...] = (32, 64, 128, (32, 128), (1, 128), (1, 256))
_OPERANDS: tuple[CanonicalSize, ...] = ((32, 256),)  # sizes of operands alone, see transposed_size
DEFAULT_BLOCK_SIZE: CanonicalSize = (1, 128)
TOKENS = 256  # of a block of a transpose whose blocks had one row
PaperName = Literal["jetfire"]
_OF_PAPERS: dict[str, CanonicalSize] = {"jetfire": 32}


def check_block_size(operator: str, block_size: BlockSize) -> CanonicalSize:
    """Return ``canonical_size`` of a block size. Raises UnsupportedError unless it is one of BLOCK_SIZES."""
    if (size := canonical_size(block_size)) not in BLOCK_SIZES:
        raise UnsupportedError(
            f"{operator}: block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, got {size!r}"
        )
    return size


def check_operand_size(operator: str, block_size: BlockSize) -> CanonicalSize:
    """``check_block_size``, which also takes the sizes of weights and transposed tensors."""
    size = canonical_size(block_size)
    return size if size in _OPERANDS else check_block_size(operator, size)


def named_block_size(operator: str, block_size: BlockSize | PaperName) -> CanonicalSize:
    """``check_block_size``, which also takes the name of the paper, ``"jetfire"``."""
    if isinstance(block_size, str):
        if block_size not in _OF_PAPERS:
            sizes = ", ".join(map(str, [*BLOCK_SIZES, *map(repr, _OF_PAPERS)]))
            raise UnsupportedError(f"{operator}: block_size must be one of {sizes}, got {block_size!r}")
        return _OF_PAPERS[block_size]
    return check_block_size(operator, block_size)


def block_shape(block_size: BlockSize) -> tuple[int, int]:
    """Rows and columns of a block."""
    if isinstance(block_size, int):
        return block_size, block_size
    rows, columns = block_size
    return rows, columns


def canonical_size(block_size: BlockSize) -> CanonicalSize:
    """The canonical form of a block size: a number if blocks are square, otherwise a tuple."""
    if not isinstance(block_size, list | tuple) or len(block_size) != 2:
        return block_size  # type: ignore[return-value]  # a number, or something that check_block_size rejects
    rows, columns = block_size
    return rows if rows == columns else (rows, columns)


class BlockSizeTextError(argparse.ArgumentTypeError, QFrameworkError):
    """An invalid block size on a command line; argparse prints its message unchanged."""


def parse_block_size(text: str) -> CanonicalSize:
    """The block size of a name such as ``"32"``, ``"1x128"`` (ROWSxCOLUMNS) or ``"jetfire"``, for command lines.

    Raises:
        BlockSizeTextError: ``text`` names no supported block size.
    """
    sizes = {block_size_name(size): size for size in BLOCK_SIZES} | _OF_PAPERS
    sizes |= {"x".join(map(str, block_shape(size))): size for size in BLOCK_SIZES}  # 32x32 as well
    if text not in sizes:
        names = ", ".join([*map(block_size_name, BLOCK_SIZES), *_OF_PAPERS])
        raise BlockSizeTextError(f"block size must be one of {names}, got {text!r}")
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
    """Block size of weights, the other operand in a product with a tensor in ``block_size``.

    Both operands need blocks of the same length along the inner dimension. Square blocks have it; with others, weights
    are in blocks of 32 rows, whose scales take little memory.
    """
    rows, columns = block_shape(block_size)
    return rows if rows == columns else (32, columns)


def transposed_size(block_size: BlockSize) -> CanonicalSize:
    """Block size of the transpose of a tensor in ``block_size``.

    Square blocks are transposed as they are. Others are quantized again, in blocks of 32 rows. A transposed weight
    meets tensors in the size that it was quantized for, so its blocks keep their length. Transposed activations and
    gradients, whose blocks have one row, only meet each other, in a product over tokens with a float result: their
    blocks are 256 tokens long, which makes that product faster than 128.
    """
    rows, columns = block_shape(block_size)
    return rows if rows == columns else (32, columns if rows > 1 else max(columns, TOKENS))


def row_count(shape: torch.Size | tuple[int, ...]) -> int:
    """R, the number of rows of ``shape[-1]`` values in a tensor of this shape."""
    return math.prod(shape[:-1])


def scale_shape(shape: torch.Size | tuple[int, ...], block_size: BlockSize) -> tuple[int, int]:
    """Shape of the scales of a tensor of ``shape``: ``(ceil(R / B), ceil(C / B))``, B the block's rows and columns."""
    rows, columns = block_shape(block_size)
    return cdiv(row_count(shape), rows), cdiv(shape[-1], columns)


def check_blocks(operator: str, argument: str, q: Tensor, scale: Tensor, block_size: BlockSize) -> None:
    """Check an operand in the block format: block size, dtypes, device, and the scale's shape."""
    check_operand_size(operator, block_size)
    check_dtype(operator, argument, q, (torch.int8,))
    check_dtype(operator, f"{argument}'s scale", scale, (torch.float32,))
    check_same_device(operator, q, **{f"{argument}'s scale": scale})
    if q.ndim == 0:
        raise UnsupportedError(f"{operator}: {argument} must have at least one dimension, got shape ()")
    expected = scale_shape(q.shape, block_size)
    if tuple(scale.shape) != expected:
        raise QFrameworkError(
            f"{operator}: {argument}'s scale must have shape {expected} for {argument} {tuple(q.shape)} in blocks of "
            f"{canonical_size(block_size)}, got {tuple(scale.shape)}"
        )


def block_scale(x: Tensor, block_size: BlockSize) -> Tensor:
    """Scale of each block of ``x (..., C)``: fp32, ``(ceil(R / B), ceil(C / B))``."""
    rows, columns = row_count(x.shape), x.shape[-1]
    height, width = block_shape(block_size)
    m, n = scale_shape(x.shape, block_size)
    padded = F.pad(x.reshape(rows, columns), (0, n * width - columns, 0, m * height - rows))
    return numerics.scale_from_amax(padded.abs().view(m, height, n, width).amax(dim=(1, 3)))


def spread_scale(scale: Tensor, shape: torch.Size | tuple[int, ...], block_size: BlockSize) -> Tensor:
    """The scale of each value of a tensor of ``shape``: fp32 of that shape."""
    m, n = scale.shape
    height, width = block_shape(block_size)
    spread = scale[:, None, :, None].expand(m, height, n, width).reshape(m * height, n * width)
    return spread[: row_count(shape), : shape[-1]].reshape(shape)


def quantize_blocks_ref(x: Tensor, block_size: BlockSize, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize a float ``x (..., C)`` to the block format ``(q, scale)``.

    With ``noise`` of the shape of ``x``, uniform in [0, 1), it rounds stochastically: ``floor(x / scale + noise)``.
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
    """Dequantize ``(q, scale)`` to a float tensor shaped as ``q``: the fp32 product, rounded once to ``dtype``."""
    return numerics.dequantize(q, spread_scale(scale, q.shape, block_size), dtype).contiguous()
