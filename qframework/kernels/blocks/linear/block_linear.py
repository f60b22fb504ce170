"""Linear layer of INT8 training: operands, and the result on request, in INT8 blocks with one scale each.

Formula (Jetfire, section 5.3 and algorithm 1; i, j, k number blocks of B rows, columns and inner columns)::

    out[i, j] = sum over k of (a_int8[i, k] @ b_int8[j, k].T) * a_scale[i, k] * b_scale[j, k]  + bias[j]
                              INT32, exact                      float32 from here on

    out is rounded once to out_dtype, or to int8 blocks with scales of their own

It computes all three products of training: ``Y = block_linear(X, W)``, ``dX = block_linear(dY, W^T)`` and
``dW = block_linear(dY^T, X^T)``, with transposed operands from ``block_transpose`` or ``block_quantize_both``.
``block_linear_sum`` adds up such products of several pairs of operands in the same float32 sums, for the gradient of an
``X`` that several linears read.

Layout: ``a (..., K)``, ``b (N, K)``, both with K innermost, as tensor cores require for 8-bit operands; scales as in
blocks/format.py. Reference and CPU implementation: ``block_linear_ref``. On CUDA, launch.py chooses between triton.py,
which supports every problem, and hopper.py for Hopper.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qframework.kernels.blocks.format import (
    DEFAULT_BLOCK_SIZE,
    BlockSize,
    dequantize_blocks_ref,
    operand_size,
    quantize_blocks_ref,
)
from qframework.kernels.blocks.linear.arguments import BlockLinearArguments, BlockLinearSumArguments
from qframework.kernels.blocks.linear.launch import block_linear_sum_triton, block_linear_triton
from qframework.kernels.runtime.operator import declare, refuse_gradients
from qframework.numerics import product_dtype


def block_linear_ref(args: BlockLinearArguments) -> tuple[Tensor, Tensor]:
    """Reference of ``qframework::block_linear``: the float32 product of the dequantized operands."""
    return _rounded(_product(args), args)


def block_linear_sum_ref(args: BlockLinearSumArguments) -> tuple[Tensor, Tensor]:
    """Reference of ``qframework::block_linear_sum``: the sum of the products before they are rounded."""
    first, *others = args.pairs
    y = _product(first)
    for each in others:
        y += _product(each)
    return _rounded(y, first)


def _product(args: BlockLinearArguments) -> Tensor:
    a = dequantize_blocks_ref(args.a, args.a_scale, args.block_size)
    b = dequantize_blocks_ref(args.b, args.b_scale, operand_size(args.block_size))
    wide = product_dtype(a.device)
    return F.linear(a.to(wide), b.to(wide), None if args.bias is None else args.bias.to(wide)).float()


def _rounded(y: Tensor, args: BlockLinearArguments) -> tuple[Tensor, Tensor]:
    if args.in_blocks:
        return quantize_blocks_ref(y, args.block_size)
    # A copy, since F.linear of three dimensions returns a view, which Autograd lets nobody change in place.
    return y.to(args.out_dtype, copy=True), y.new_empty((0, 0))


BLOCK_LINEAR = declare(
    "block_linear(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, int[2] block_size, "
    "ScalarType out_dtype) -> (Tensor, Tensor)",
    BlockLinearArguments,
    cpu=block_linear_ref,
    cuda=block_linear_triton,
    fake=BlockLinearArguments.empty_result,
)

BLOCK_LINEAR_SUM = declare(
    "block_linear_sum(Tensor[] operands, int[2] block_size, ScalarType out_dtype) -> (Tensor, Tensor)",
    BlockLinearSumArguments,
    cpu=block_linear_sum_ref,
    cuda=block_linear_sum_triton,
    fake=BlockLinearSumArguments.empty_result,
)


def block_linear(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    block_size: BlockSize = DEFAULT_BLOCK_SIZE,
    out_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """``a @ b.T + bias`` of operands in blocks: INT8 within a block, float32 across blocks (Jetfire, algorithm 1).

    Args:
        a: ``(..., K)`` int8, contiguous.
        a_scale: ``(ceil(R / B), ceil(K / B))`` fp32 for the R rows of ``a``, dequantizes ``a``.
        b: ``(N, K)`` int8, contiguous.
        b_scale: ``(ceil(N / B), ceil(K / B))`` fp32, dequantizes ``b``, which is in blocks of ``operand_size``.
        bias: ``(N,)`` fp32, fp16 or bf16.
        block_size: of ``a`` and the result: 32, 64, 128, (32, 128), (1, 128) or (1, 256); for a float result also
            (32, 256). The INT8 sums along K run over the columns of a block; more columns are faster.
        out_dtype: float32, float16, bfloat16, or int8 for a result in blocks.

    Returns:
        ``(..., N)`` of ``out_dtype``, contiguous, and its scale ``(ceil(R / B), ceil(N / B))`` fp32, or ``(0, 0)`` for
        a float result.

    Numerics: the product of two blocks is exact. Products along K are summed in float32, in an order that depends only
    on the device and the shapes. The result is rounded once. Each block of an int8 result is scaled by its own largest
    magnitude, so nothing saturates; on a GPU a value next to a tie may round the other way. NaN and infinity in a scale
    or in the bias propagate to the results that use them.

    Raises:
        UnsupportedError: a dtype, block size or device that no kernel supports.
        QFrameworkError: shapes or devices that do not match; a bias that requires a gradient.
    """
    refuse_gradients("block_linear", "qframework.training.linear.Int8Linear", bias=bias)
    return torch.ops.qframework.block_linear(a, a_scale, b, b_scale, bias, block_size, out_dtype)


def block_linear_sum(
    *pairs: tuple[Tensor, Tensor, Tensor, Tensor],
    block_size: BlockSize = DEFAULT_BLOCK_SIZE,
    out_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """``a @ b.T`` summed over up to three pairs of operands in blocks, which is rounded once.

    Args:
        *pairs: each ``(a, a_scale, b, b_scale)`` as for :func:`block_linear`. Inner sizes may differ.
        block_size: of each ``a`` and the result: 32, 64, 128, (32, 128), (1, 128) or (1, 256).
        out_dtype: as for ``block_linear``.

    Returns:
        The result and its scale as ``block_linear`` returns them, with its numerics: as one product whose inner
        dimension is that of all pairs.

    Raises:
        UnsupportedError: a dtype, block size or device that no kernel supports.
        QFrameworkError: no pair or more than three, or shapes or devices that do not match.
    """
    operands = [operand for pair in pairs for operand in pair]
    return torch.ops.qframework.block_linear_sum(operands, block_size, out_dtype)
