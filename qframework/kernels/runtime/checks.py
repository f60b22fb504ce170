"""Checks of operands that several operators share, and row-wise scales."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qframework.errors import QFrameworkError, UnsupportedError, either
from qframework.numerics import FLOAT_DTYPES, MIN_SCALE


def check_dtype(operator: str, argument: str, tensor: Tensor, accepted: tuple[torch.dtype, ...]) -> None:
    """Raise UnsupportedError unless ``tensor`` has one of the accepted dtypes."""
    if tensor.dtype not in accepted:
        names = either(str(dtype).removeprefix("torch.") for dtype in accepted)
        raise UnsupportedError(f"{operator}: {argument} must have dtype {names}, got {tensor.dtype}")


def check_shape(operator: str, argument: str, tensor: Tensor, *accepted: tuple[int, ...]) -> None:
    """Raise QFrameworkError unless ``tensor`` has one of the accepted shapes."""
    if tensor.shape not in accepted:
        raise QFrameworkError(f"{operator}: {argument} must have shape {either(accepted)}, got {tuple(tensor.shape)}")


def check_out_dtype(operator: str, out_dtype: torch.dtype | None, requantizes: bool) -> None:
    """Raise UnsupportedError unless ``out_dtype`` is None, int8 for a result that is requantized, or else a float."""
    if requantizes and out_dtype not in (None, torch.int8):
        raise UnsupportedError(f"{operator}: out_dtype must be int8 or None with out_scale, got {out_dtype}")
    if not requantizes and out_dtype not in (None, *FLOAT_DTYPES):
        raise UnsupportedError(
            f"{operator}: out_dtype must be float32, float16 or bfloat16, or int8 with out_scale, got {out_dtype}"
        )


def check_same_device(operator: str, reference: Tensor, **others: Tensor | None) -> None:
    """Raise QFrameworkError naming the first tensor on another device than ``reference``."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != reference.device:
            raise QFrameworkError(
                f"{operator}: {name} must be on the input's device {reference.device}, got {tensor.device}"
            )


def check_float_input(operator: str, x: Tensor) -> None:
    """Raise UnsupportedError unless ``x`` is fp32, fp16 or bf16 with at least one dimension."""
    check_dtype(operator, "x", x, FLOAT_DTYPES)
    if x.ndim == 0:
        raise UnsupportedError(f"{operator}: x must have at least one dimension, got shape ()")


def row_scale(operator: str, argument: str, scale: Tensor, shape: torch.Size, also: str = "") -> Tensor:
    """Flatten a scale that broadcasts against ``shape`` into one of period P: row m uses element m % P.

    P is 1 per tensor, the number of positions for static per-token scales and the number of rows for dynamic ones.
    Raises QFrameworkError when the scale does not broadcast row-wise; ``also`` names other shapes the caller accepts.
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
            f"{operator}: {argument} must have shape (1,), {also}{per_row} or a trailing part of {per_row}, "
            f"got {tuple(scale.shape)}"
        )
    return scale.reshape(-1).contiguous()


def _trailing(shape: torch.Size, n: int) -> tuple[int, ...] | None:
    """The n dimensions before the last one, or None where there are fewer."""
    return tuple(shape[len(shape) - 1 - n : -1]) if n < len(shape) else None


def check_zero_point(operator: str, argument: str, zero_point: Tensor) -> None:
    """Raise QFrameworkError unless ``zero_point`` is one int32 integer, ``()`` or ``(1,)``."""
    check_dtype(operator, argument, zero_point, (torch.int32,))
    check_shape(operator, argument, zero_point, (), (1,))


def check_positive_scale(operator: str, argument: str, scale: Tensor, signed: bool = False) -> None:
    """Raise QFrameworkError for a zero or negative scale. CPU only: on a GPU the check would cost a synchronization.

    ``signed`` allows negative scales: a constant of any sign may have been folded into them.
    """
    if scale.device.type == "cpu" and bool(((scale == 0) if signed else (scale <= 0)).any()):
        worst = 0.0 if signed else float(scale.min())
        raise QFrameworkError(f"{operator}: {argument} must be positive (at least {MIN_SCALE:.3g}), got {worst}")


def check_one_scale(operator: str, x: Tensor, scale: Tensor) -> None:
    """Raise QFrameworkError unless ``scale`` is one fp32 number on the device of x."""
    check_same_device(operator, x, scale=scale)
    check_dtype(operator, "scale", scale, (torch.float32,))
    if scale.numel() != 1:
        raise QFrameworkError(f"{operator}: scale must have one element, got the shape {tuple(scale.shape)}")


def rows_of(x: Tensor) -> Tensor:
    """View ``(..., C)`` as ``(rows, C)`` with a contiguous last dimension, copying only where no view exists."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
