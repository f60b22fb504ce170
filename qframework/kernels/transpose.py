"""Transpose INT8 matrices, with zeros behind each row of the result.

Tensor cores read INT8 operands along the inner dimension only, so that a linear layer over tokens, as in MLP-Mixer,
needs a transposed copy. A kernel that computes one token writes such a copy byte by byte, each into another sector of
memory; this one writes whole rows. Zeros fill rows up to a width that the next kernel reads quickly.
Reference: ``transpose_rows_ref``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qframework.errors import UnsupportedError
from qframework.kernels.runtime.checks import check_dtype
from qframework.kernels.runtime.chip import check_device
from qframework.kernels.runtime.launch import cdiv, launch, warm_up
from qframework.kernels.runtime.operator import declare
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton

_BLOCK = 64  # tokens and channels of a program


class TransposeRowsArguments(NamedTuple):
    """The arguments of ``qframework::transpose_rows``."""

    x: Tensor
    width: int

    def empty_result(self) -> Tensor:
        """An uninitialized result, contiguous."""
        *batch, _, channels = self.x.shape
        return self.x.new_empty((*batch, channels, self.width))

    def check(self) -> None:
        """Raise UnsupportedError for dtype, shape or width."""
        check_dtype("transpose_rows", "x", self.x, (torch.int8,))
        if self.x.ndim < 2 or self.width < self.x.shape[-2]:
            raise UnsupportedError(
                "transpose_rows: x must have shape (..., T, C) and width must be at least T, got "
                f"{tuple(self.x.shape)} and {self.width}"
            )


def transpose_rows_ref(x: Tensor, width: int) -> Tensor:
    """Reference of ``qframework::transpose_rows``."""
    return torch.nn.functional.pad(x.transpose(-1, -2), (0, width - x.shape[-2])).contiguous()


@triton.jit
def _transpose_rows_kernel(
    x_ptr,  # (B, T, C) int8
    y_ptr,  # (B, C, WIDTH) int8
    T,
    C,
    WIDTH,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (B, cdiv(C, BLOCK), cdiv(WIDTH, BLOCK)); a program transposes a square."""
    wait_for_previous_kernel(OVERLAP)
    batch = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = (t[:, None] < T) & (c[None, :] < C)
    x = tl.load(x_ptr + batch * T * C + t[:, None] * C + c[None, :], mask=inside, other=0)
    to = y_ptr + batch * C * WIDTH + c[:, None] * WIDTH + t[None, :]
    tl.store(to, tl.trans(x), mask=(c[:, None] < C) & (t[None, :] < WIDTH))


def transpose_rows_triton(x: TransposeRowsArguments) -> Tensor:
    """``transpose_rows`` on a GPU."""
    check_device(x.x.device)
    y = x.empty_result()
    if y.numel():
        grid, arguments, constants = _call(x, y)
        launch(_transpose_rows_kernel, grid)(*arguments, **constants)
    return y


def warm_up_transpose_rows(device: torch.device, x: TransposeRowsArguments) -> Any:
    """Compile what ``transpose_rows_triton`` launches for such an ``x``, which may be on "meta"."""
    y = x.empty_result()
    if not y.numel():
        return None
    grid, arguments, constants = _call(x, y)
    return warm_up(_transpose_rows_kernel, grid)(*arguments, **constants)


def _call(x: TransposeRowsArguments, y: Tensor) -> tuple[tuple[int, int, int], tuple[Any, ...], dict[str, Any]]:
    """Grid, arguments and constants of the launch."""
    tokens, channels = x.x.shape[-2:]
    grid = (x.x.shape[:-2].numel(), cdiv(channels, _BLOCK), cdiv(x.width, _BLOCK))
    return grid, (x.x.contiguous(), y, tokens, channels, x.width), {"BLOCK": _BLOCK, "num_warps": 4}


TRANSPOSE_ROWS = declare(
    "transpose_rows(Tensor x, SymInt width) -> Tensor",
    TransposeRowsArguments,
    cpu=lambda x: transpose_rows_ref(*x),
    cuda=transpose_rows_triton,
    fake=TransposeRowsArguments.empty_result,
    warm_up=warm_up_transpose_rows,
)
