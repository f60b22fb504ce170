"""What block_linear accepts: its arguments' dtypes, shapes and devices."""

from __future__ import annotations

import torch
from torch import Tensor

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.blocks.format import BlockSize, check_blocks, operand_size
from qframework.kernels.runtime.checks import check_dtype, check_same_device
from qframework.numerics import FLOAT_DTYPES

OUT_DTYPES = (*FLOAT_DTYPES, torch.int8)


def check_arguments(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    block_size: BlockSize,
    out_dtype: torch.dtype,
) -> None:
    """Everything that can be told from metadata; also run on fake tensors, so nothing here may look at values."""
    name = "block_linear"
    check_blocks(name, "a", a, a_scale, block_size)
    check_blocks(name, "b", b, b_scale, operand_size(block_size))
    check_same_device(name, a, b=b, bias=bias)
    if b.ndim != 2 or a.shape[-1] != b.shape[1]:
        raise QFrameworkError(
            f"{name}: a {tuple(a.shape)} and b {tuple(b.shape)} do not fit; accepted: a (..., K) with b (N, K)"
        )
    if bias is not None:
        check_dtype(name, "bias", bias, FLOAT_DTYPES)
        if tuple(bias.shape) != (b.shape[0],):
            raise QFrameworkError(f"{name}: bias has shape {tuple(bias.shape)}; accepted: ({b.shape[0]},)")
    if out_dtype not in OUT_DTYPES:
        raise UnsupportedError(f"{name}: out_dtype={out_dtype}; accepted: float32, float16, bfloat16, int8")
