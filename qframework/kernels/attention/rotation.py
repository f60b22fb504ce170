"""Rotary position embedding: formats of the cos and sin tables, the rotation in plain torch and in Triton.

Formula (RoPE of Su et al.), for channels ``a`` and ``b`` of a pair; channels from ``rotary_dim`` on do not change::

    r_a = x_a cos_a - x_b sin_a        r_b = x_b cos_b + x_a sin_b

Pairs are ``(i, i + rotary_dim / 2)`` (half-split) or ``(2 i, 2 i + 1)`` (interleaved).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.runtime.checks import check_dtype, check_same_device
from qframework.kernels.runtime.triton import tl, triton
from qframework.numerics import FLOAT_DTYPES


class Rotation(NamedTuple):
    """Tables as views ``(B, H, N, W)``; W is ``rotary_dim``, or half of it where pairs share a column."""

    cos: Tensor
    sin: Tensor
    rotary_dim: int

    @property
    def full(self) -> bool:
        """Whether the tables have a column for each channel instead of each pair."""
        return self.cos.shape[-1] == self.rotary_dim

    def columns(self, table: Tensor, interleaved: bool) -> Tensor:
        """``table`` with one column for each rotated channel, float32."""
        if self.full:
            return table.float()
        return table.float().repeat_interleave(2, dim=-1) if interleaved else torch.cat([table, table], -1).float()


def rotation_of(operator: str, x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int | None) -> Rotation:
    """Tables of any form that transformers or flash-attention use, as views. Raises QFrameworkError."""
    check_dtype(operator, "x", x, FLOAT_DTYPES)
    check_dtype(operator, "cos", cos, FLOAT_DTYPES)
    check_dtype(operator, "sin", sin, FLOAT_DTYPES)
    check_same_device(operator, x, cos=cos, sin=sin)
    if x.ndim != 4:
        raise UnsupportedError(f"{operator}: x must have shape (B, H, N, D), got {tuple(x.shape)}")
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise QFrameworkError(
            f"{operator}: cos and sin must have the same shape and dtype, got {tuple(cos.shape)} {cos.dtype} and "
            f"{tuple(sin.shape)} {sin.dtype}"
        )
    batch, heads, tokens, channels = x.shape
    width = cos.shape[-1] if cos.ndim else 0
    rotary_dim = _rotary_dim(operator, channels, width, rotary_dim)
    if cos.ndim == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    wanted = (1,) * (4 - cos.ndim) + tuple(cos.shape)
    sizes = (batch, heads, tokens)
    if len(wanted) != 4 or wanted[2] != tokens or any(w not in (1, n) for w, n in zip(wanted[:2], sizes, strict=False)):
        raise QFrameworkError(
            f"{operator}: cos must have shape (N, W), (B, N, W) or (B, H, N, W) with N = {tokens}, B = {batch} or 1 "
            f"and H = {heads} or 1, got {tuple(cos.shape)}"
        )
    cos, sin = (table.contiguous().expand(*sizes, width) for table in (cos, sin))
    return Rotation(cos, sin, rotary_dim)


def _rotary_dim(operator: str, channels: int, width: int, rotary_dim: int | None) -> int:
    """The number of rotated channels; derived from the width of the tables where that is unambiguous."""
    if rotary_dim is None:
        rotary_dim = channels if width * 2 == channels else width
        if width * 2 < channels:
            raise QFrameworkError(
                f"{operator}: rotary_dim must be given for {channels} channels with tables of {width} columns, which "
                f"may rotate {width} or {2 * width}"
            )
    if rotary_dim % 2 or not 0 < rotary_dim <= channels or width not in (rotary_dim, rotary_dim // 2):
        raise QFrameworkError(
            f"{operator}: rotary_dim must be even, at most {channels} and one or two times the {width} columns of the "
            f"tables, got {rotary_dim}"
        )
    return rotary_dim


def rope_ref(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, rotary_dim: int | None = None) -> Tensor:
    """Rotary embedding of ``x (B, H, N, D)`` in float32; arguments are those of :func:`rope_quantize`."""
    rotation = rotation_of("rope", x, cos, sin, rotary_dim)
    width = rotation.rotary_dim
    rotated = x[..., :width].float()
    if interleaved:
        partner = torch.stack([-rotated[..., 1::2], rotated[..., ::2]], dim=-1).flatten(-2)
    else:
        partner = torch.cat([-rotated[..., width // 2 :], rotated[..., : width // 2]], dim=-1)
    cos, sin = (rotation.columns(table, interleaved) for table in (rotation.cos, rotation.sin))
    return torch.cat([rotated * cos + partner * sin, x[..., width:].float()], dim=-1)


@triton.jit
def load_pairs(
    ptrs,  # (ROWS,) pointers to channel 0
    row_mask,
    pairs,
    other,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Both channels of every pair, (ROWS, BLOCK_P) float32 each; ``other`` past the last pair and the last row."""
    if INTERLEAVED:  # one contiguous load, split in registers
        c = tl.arange(0, 2 * BLOCK_P)
        mask = row_mask[:, None] & (c < 2 * pairs)[None, :]
        x = tl.load(ptrs[:, None] + c[None, :], mask=mask, other=other).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (ROWS, BLOCK_P, 2)))
    else:
        i = tl.arange(0, BLOCK_P)
        mask = row_mask[:, None] & (i < pairs)[None, :]
        a = tl.load(ptrs[:, None] + i[None, :], mask=mask, other=other).to(tl.float32)
        b = tl.load(ptrs[:, None] + pairs + i[None, :], mask=mask, other=other).to(tl.float32)
    return a, b


@triton.jit
def load_table(
    ptrs, row_mask, pairs, INTERLEAVED: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr
):
    """Columns of a table for both channels of every pair, which share one without FULL."""
    if FULL:
        a, b = load_pairs(ptrs, row_mask, pairs, 0.0, INTERLEAVED, ROWS, BLOCK_P)
    else:
        i = tl.arange(0, BLOCK_P)
        mask = row_mask[:, None] & (i < pairs)[None, :]
        a = tl.load(ptrs[:, None] + i[None, :], mask=mask, other=0.0).to(tl.float32)
        b = a
    return a, b


@triton.jit
def load_rotated(
    x_ptrs,
    cos_ptrs,
    sin_ptrs,
    row_mask,
    pairs,
    INTERLEAVED: tl.constexpr,
    FULL: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The rotated pairs of TILE tokens, zero past the last pair and token."""
    a, b = load_pairs(x_ptrs, row_mask, pairs, 0.0, INTERLEAVED, TILE, BLOCK_P)
    cos_a, cos_b = load_table(cos_ptrs, row_mask, pairs, INTERLEAVED, FULL, TILE, BLOCK_P)
    sin_a, sin_b = load_table(sin_ptrs, row_mask, pairs, INTERLEAVED, FULL, TILE, BLOCK_P)
    return a * cos_a - b * sin_a, b * cos_b + a * sin_b


@triton.jit
def store_pairs(ptrs, a, b, row_mask, pairs, INTERLEAVED: tl.constexpr, TILE: tl.constexpr, BLOCK_P: tl.constexpr):
    """The inverse of load_pairs."""
    if INTERLEAVED:
        c = tl.arange(0, 2 * BLOCK_P)
        mask = row_mask[:, None] & (c < 2 * pairs)[None, :]
        tl.store(ptrs[:, None] + c[None, :], tl.reshape(tl.join(a, b), (TILE, 2 * BLOCK_P)), mask=mask)
    else:
        i = tl.arange(0, BLOCK_P)
        mask = row_mask[:, None] & (i < pairs)[None, :]
        tl.store(ptrs[:, None] + i[None, :], a, mask=mask)
        tl.store(ptrs[:, None] + pairs + i[None, :], b, mask=mask)
