"""The arguments of block_linear and block_linear_sum and their checks: dtypes, shapes, devices."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.blocks.format import BlockSize, check_block_size, check_blocks, operand_size, scale_shape
from qframework.kernels.blocks.tiles import check_vector
from qframework.kernels.runtime.checks import check_same_device
from qframework.numerics import FLOAT_DTYPES

OUT_DTYPES = (*FLOAT_DTYPES, torch.int8)
MAX_PAIRS = 3  # of operands, whose products a kernel sums


class BlockLinearArguments(NamedTuple):
    """The arguments of ``qframework::block_linear``; shapes and units are those of the function ``block_linear``."""

    a: Tensor
    a_scale: Tensor
    b: Tensor
    b_scale: Tensor
    bias: Tensor | None
    block_size: BlockSize
    out_dtype: torch.dtype

    @property
    def in_blocks(self) -> bool:
        """Whether the result is in blocks."""
        return self.out_dtype == torch.int8

    def empty_result(self) -> tuple[Tensor, Tensor]:
        """Allocate the result and its scale, which has shape (0, 0) for a float result."""
        shape = (*self.a.shape[:-1], self.b.shape[0])
        of_scale = scale_shape(shape, self.block_size) if self.in_blocks else (0, 0)
        return self.a.new_empty(shape, dtype=self.out_dtype), self.a.new_empty(of_scale, dtype=torch.float32)

    def check(self, name: str = "block_linear") -> None:
        """Raise QFrameworkError for invalid arguments. Reads metadata only, since it also gets fake tensors."""
        a, b = self.a, self.b
        check_blocks(name, "a", a, self.a_scale, self.block_size)
        check_blocks(name, "b", b, self.b_scale, operand_size(self.block_size))
        if self.in_blocks:
            check_block_size(name, self.block_size)  # a result may not have a size of operands alone
        check_same_device(name, a, b=b)
        if b.ndim != 2 or a.shape[-1] != b.shape[1]:
            raise QFrameworkError(
                f"{name}: a and b must have shapes (..., K) and (N, K), got {tuple(a.shape)} and {tuple(b.shape)}"
            )
        check_vector(name, "bias", self.bias, b.shape[0], a)
        if self.out_dtype not in OUT_DTYPES:
            raise UnsupportedError(
                f"{name}: out_dtype must be float32, float16, bfloat16 or int8, got {self.out_dtype}"
            )


class BlockLinearSumArguments(NamedTuple):
    """The arguments of ``qframework::block_linear_sum``: a, its scale, b and its scale of each pair in turn."""

    operands: list[Tensor]
    block_size: BlockSize
    out_dtype: torch.dtype

    @property
    def pairs(self) -> list[BlockLinearArguments]:
        """The products that are summed."""
        fours = [self.operands[i : i + 4] for i in range(0, len(self.operands), 4)]
        return [BlockLinearArguments._make((*four, None, self.block_size, self.out_dtype)) for four in fours]

    def empty_result(self) -> tuple[Tensor, Tensor]:
        """Allocate the result and its scale."""
        return self.pairs[0].empty_result()

    def check(self) -> None:
        """Raise QFrameworkError for invalid arguments, and for products of different shapes."""
        name, count = "block_linear_sum", len(self.operands)
        if count % 4 or not 1 <= count // 4 <= MAX_PAIRS:
            raise QFrameworkError(
                f"{name}: operands must be a, its scale, b and its scale of 1 to {MAX_PAIRS} pairs, got {count} tensors"
            )
        check_block_size(name, self.block_size)
        first, *others = self.pairs
        first.check(name)
        shape = (*first.a.shape[:-1], first.b.shape[0])
        for each in others:
            each.check(name)
            check_same_device(name, first.a, a=each.a)
            if (*each.a.shape[:-1], each.b.shape[0]) != shape:
                raise QFrameworkError(
                    f"{name}: all products must have the shape of the first, {tuple(shape)}, got a "
                    f"{tuple(each.a.shape)} and b {tuple(each.b.shape)}"
                )
