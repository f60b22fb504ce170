"""Checks of operands that several operators share, and row-wise scales."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.numerics import FLOAT_DTYPES, MIN_SCALE


def check_dtype(operator: str, argument: str, tensor: Tensor, accepted: tuple[torch.dtype, ...]) -> None:
    """Raise UnsupportedError unless ``tensor`` has one of the accepted dtypes."""
    if tensor.dtype not in accepted:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in accepted)
        raise UnsupportedError(f"{operator}: {argument} has dtype {tensor.dtype}; accepted: {names}")


def check_same_device(operator: str, reference: Tensor, **others: Tensor | None) -> None:
    """Raise QFrameworkError naming the first tensor that lives on another device than ``reference``."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != reference.device:
            raise QFrameworkError(
                f"{operator}: {name} is on {tensor.device} but the input is on {reference.device}; move them together"
            )


def check_float_input(operator: str, x: Tensor) -> None:
    """Raise UnsupportedError unless ``x`` is fp32, fp16 or bf16 with at least one dimension."""
    check_dtype(operator, "x", x, FLOAT_DTYPES)
    if x.ndim == 0:
        raise UnsupportedError(f"{operator}: x has shape (); accepted: one dimension or more")


def row_scale(operator: str, argument: str, scale: Tensor, shape: torch.Size, also: str = "") -> Tensor:
    """Flatten a scale that broadcasts against ``shape`` into one of period P: row m uses element m % P.

    P is 1 per tensor, the number of positions for static per-token scales and the number of rows for dynamic ones.
    Raises QFrameworkError when the scale does not broadcast row-wise; ``also`` names what else the caller accepts.
    """
    check_dtype(operator, argument, scale, (torch.float32,))
    if scale.numel() == 1:
        return scale.reshape(1)
    positions = tuple(scale.shape[:-1])
    while positions[:1] == (1,) and positions != _trailing(shape, len(positions)):
        positions = positions[1:]
    if scale.shape[-1] != 1 or positions != _trailing(shape, len(positions)):
        per_row = (*tuple(shape[:-1]), 1)
        raise QFrameworkError(
            f"{operator}: {argument} has shape {tuple(scale.shape)}, which is no scale per tensor or per row of "
            f"{tuple(shape)}; accepted: {also}(1,), {per_row} or a trailing part of {per_row}"
        )
    return scale.reshape(-1).contiguous()


def _trailing(shape: torch.Size, n: int) -> tuple[int, ...] | None:
    """The n dimensions before the last one, or None where there are fewer."""
    return tuple(shape[len(shape) - 1 - n : -1]) if n < len(shape) else None


def check_positive_scale(operator: str, argument: str, scale: Tensor, signed: bool = False) -> None:
    """Raise QFrameworkError for a zero or negative scale. CPU only: on a GPU the look would cost a synchronization.

    ``signed`` allows what is negative: a constant of any sign may have been folded into the scale.
    """
    if scale.device.type == "cpu" and bool(((scale == 0) if signed else (scale <= 0)).any()):
        worst = 0.0 if signed else float(scale.min())
        raise QFrameworkError(
            f"{operator}: {argument} holds {worst}; scales must be positive (at least {MIN_SCALE:.3g})"
        )


def rows_of(x: Tensor) -> Tensor:
    """View ``(..., C)`` as ``(rows, C)`` with a contiguous last dimension, copying only where no view exists."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
