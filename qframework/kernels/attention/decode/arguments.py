"""The arguments of ``qframework::decode_attention``, and what its kernels read of them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.attention.arguments import MAX_HEAD_DIM, check_softcap, sink_of_row
from qframework.kernels.attention.operands import check_offsets, query_memory_order
from qframework.kernels.runtime.checks import check_dtype, check_same_device, check_shape
from qframework.kernels.runtime.launch import power_of_2
from qframework.numerics import FLOAT_DTYPES

NAME = "decode_attention"


class DecodeAttentionArguments(NamedTuple):
    """The arguments of ``qframework::decode_attention``; see :func:`decode_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    scales: Tensor
    lengths: Tensor | None = None
    attn_mask: Tensor | None = None
    is_causal: bool = False
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    key_mean: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def mean_of_logits(self) -> Tensor | None:
        """``key_mean`` where the weights depend on it: with a cap or a sink, the same added to all logits matters."""
        return None if self.softcap is None and self.sinks is None else self.key_mean

    @property
    def sink_of_row(self) -> Tensor | None:
        """``sinks`` as a view ``(B, H, N)``."""
        return None if self.sinks is None else sink_of_row(self.sinks).expand(self.query.shape[:3])

    @property
    def logit_scale(self) -> float:
        """The scale of the logits."""
        return 1.0 / math.sqrt(self.query.shape[-1]) if self.scale is None else self.scale

    @property
    def group(self) -> int:
        """Query heads of one key head."""
        return self.query.shape[1] // max(self.key.shape[1], 1)

    @property
    def rows(self) -> int:
        """Rows of a key head in the kernels: its query heads times N rounded up to a power of two."""
        return self.group * power_of_2(self.query.shape[2])

    @property
    def mask(self) -> Tensor | None:
        """``attn_mask`` as a view of four dimensions, ``(B, H, N, keys)``."""
        if self.attn_mask is None:
            return None
        batch, heads, tokens, _ = self.query.shape
        return self.attn_mask.expand(batch, heads, tokens, self.attn_mask.shape[-1])

    def empty_result(self) -> Tensor:
        """An uninitialized result."""
        batch, heads, tokens, _ = self.query.shape
        return query_memory_order(batch, heads, tokens, self.value.shape[-1], self.query, self.query.dtype)

    def check(self) -> None:
        """Raise QFrameworkError for an invalid argument."""
        check_dtype(NAME, "query", self.query, FLOAT_DTYPES)
        check_dtype(NAME, "key", self.key, (torch.int8,))
        check_dtype(NAME, "value", self.value, (torch.int8,))
        check_dtype(NAME, "scales", self.scales, (torch.bfloat16,))
        others = (*self._fields[1:6], "key_mean", "sinks")
        check_same_device(NAME, self.query, **{name: getattr(self, name) for name in others})
        for name in ("query", "key", "value"):
            if getattr(self, name).ndim != 4:
                shape = tuple(getattr(self, name).shape)
                raise QFrameworkError(f"{NAME}: {name} must have shape (B, heads, tokens, channels), got {shape}")
        self._check_shapes()
        self._check_options()

    def _check_shapes(self) -> None:
        batch, heads, _, channels = self.query.shape
        kv, capacity = self.key.shape[1:3]
        check_shape(NAME, "key", self.key, (batch, kv, capacity, channels))
        check_shape(NAME, "value", self.value, (batch, kv, capacity, self.value.shape[-1]))
        check_shape(NAME, "scales", self.scales, (batch, kv, capacity, 2))
        if kv == 0 or heads % kv:
            raise QFrameworkError(f"{NAME}: the heads of key must divide the {heads} of query, got {kv}")
        for name, width in {"key": channels, "value": self.value.shape[-1]}.items():
            if width % 2 or not 0 < width <= MAX_HEAD_DIM:
                raise UnsupportedError(f"{NAME}: {name} must have 2, 4, ... {MAX_HEAD_DIM} channels, got {width}")
        check_offsets(NAME, key=self.key, value=self.value)

    def _check_options(self) -> None:
        batch, heads, tokens, _ = self.query.shape
        if self.lengths is not None:
            check_dtype(NAME, "lengths", self.lengths, (torch.int32,))
            check_shape(NAME, "lengths", self.lengths, (1,), (batch,))
        check_softcap(NAME, self.softcap)
        if self.key_mean is not None:
            check_dtype(NAME, "key_mean", self.key_mean, (torch.float32,))
            check_shape(NAME, "key_mean", self.key_mean, (batch, self.key.shape[1], self.query.shape[3]))
        if self.sinks is not None:
            check_dtype(NAME, "sinks", self.sinks, FLOAT_DTYPES)
            shape, rows = tuple(self.sinks.shape), (batch, heads, tokens)
            of_rows = len(shape) == 3 and all(m in (1, size) for m, size in zip(shape, rows, strict=True))
            if not of_rows and shape != (heads,):
                raise QFrameworkError(f"{NAME}: sinks must have shape ({heads},) or broadcast to {rows}, got {shape}")
        if self.window is not None and self.window < 1:
            raise QFrameworkError(f"{NAME}: window must be positive or None, got {self.window}")
        if self.attn_mask is None:
            return
        check_dtype(NAME, "attn_mask", self.attn_mask, (torch.bool, *FLOAT_DTYPES))
        mask, sizes = self.attn_mask, (batch, heads, tokens)
        leading = (*(1,) * (4 - mask.ndim), *mask.shape)[:-1]
        fits = 1 <= mask.ndim <= 4 and all(m in (1, size) for m, size in zip(leading, sizes, strict=True))
        if not fits or mask.shape[-1] > self.key.shape[2]:
            raise QFrameworkError(
                f"{NAME}: attn_mask must broadcast to {sizes} and have at most {self.key.shape[2]} keys, got "
                f"{tuple(mask.shape)}"
            )


class Shares(NamedTuple):
    """What programs found for their shares of the keys.

    ``out (B * Hkv, splits, rows, Dv)`` is fp32, or fp16 where divided by units, the others ``(B * Hkv, splits, rows)``
    fp32.
    """

    out: Tensor  # sums of weighted values, or these divided by `unit`
    top: Tensor  # base of the weights' exponents in base 2
    total: Tensor  # sums of weights
    unit: Tensor  # `total` itself where nothing was divided

    @classmethod
    def empty(cls, x: DecodeAttentionArguments, splits: int, dtype: torch.dtype) -> Shares | None:
        """Uninitialized, with units for fp16; None where there is one share."""
        if splits == 1:
            return None
        batch, kv, _, width = x.value.shape
        out = x.query.new_empty((batch * kv, splits, x.rows, width), dtype=dtype)
        few = [out.new_empty(out.shape[:-1], dtype=torch.float32) for _ in range(3 if dtype == torch.float16 else 2)]
        return cls(out, few[0], few[1], few[-1])
