"""What block_linear accepts: its arguments' dtypes, shapes and devices."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.blocks.format import BlockSize, check_blocks, operand_size, scale_shape
from qframework.kernels.runtime.checks import check_dtype, check_same_device
from qframework.numerics import FLOAT_DTYPES

OUT_DTYPES = (*FLOAT_DTYPES, torch.int8)


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
        """The result before it is computed, and its scale: of shape (0, 0) where it is float."""
        shape = (*self.a.shape[:-1], self.b.shape[0])
        of_scale = scale_shape(shape, self.block_size) if self.in_blocks else (0, 0)
        return self.a.new_empty(shape, dtype=self.out_dtype), self.a.new_empty(of_scale, dtype=torch.float32)

    def check(self) -> None:
        """Everything that can be told from metadata; also run on fake tensors, so nothing here may look at values."""
        name, a, b, bias = "block_linear", self.a, self.b, self.bias
        check_blocks(name, "a", a, self.a_scale, self.block_size)
        check_blocks(name, "b", b, self.b_scale, operand_size(self.block_size))
        check_same_device(name, a, b=b, bias=bias)
        if b.ndim != 2 or a.shape[-1] != b.shape[1]:
            raise QFrameworkError(
                f"{name}: a {tuple(a.shape)} and b {tuple(b.shape)} do not fit; accepted: a (..., K) with b (N, K)"
            )
        if bias is not None:
            check_dtype(name, "bias", bias, FLOAT_DTYPES)
            if tuple(bias.shape) != (b.shape[0],):
                raise QFrameworkError(f"{name}: bias has shape {tuple(bias.shape)}; accepted: ({b.shape[0]},)")
        if self.out_dtype not in OUT_DTYPES:
            raise UnsupportedError(f"{name}: out_dtype={self.out_dtype}; accepted: float32, float16, bfloat16, int8")
