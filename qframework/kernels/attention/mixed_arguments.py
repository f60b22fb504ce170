"""The arguments of ``qframework::mixed_attention``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework.kernels.attention.arguments import check_dense, empty_result
from qframework.kernels.runtime.checks import check_dtype, check_out_dtype, check_same_device, check_shape

_NAME = "mixed_attention"


class MixedAttentionArguments(NamedTuple):
    """The arguments of ``qframework::mixed_attention``; see :func:`~qframework.kernels.mixed_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_scale: Tensor
    key_scale: Tensor
    value_scale: Tensor
    attn_mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    out_scale: Tensor | None = None
    out_dtype: torch.dtype | None = None
    rel_h: Tensor | None = None
    rel_w: Tensor | None = None

    @property
    def result_dtype(self) -> torch.dtype:
        """int8 where the result is quantized, else ``out_dtype``, float16 by default."""
        return torch.int8 if self.out_scale is not None else self.out_dtype or torch.float16

    def empty_result(self) -> Tensor:
        """An uninitialized result."""
        return empty_result(self.query, self.value, self.result_dtype)

    def check(self) -> None:
        """Raise QFrameworkError for an invalid argument."""
        check_dense(self, _NAME, (torch.int8,))
        scales = {name: getattr(self, name) for name in ("query_scale", "key_scale", "value_scale", "out_scale")}
        check_same_device(_NAME, self.query, **scales)
        for (argument, scale), x in zip(scales.items(), (*self[:3], self.query), strict=True):
            if scale is not None:
                check_dtype(_NAME, argument, scale, (torch.float32,))
                check_shape(_NAME, argument, scale, (), (1,), (x.shape[-3] if x.ndim > 3 else 1, 1, 1))
        check_out_dtype(_NAME, self.out_dtype, self.out_scale is not None)
