"""Masks, biases and relative positions as Hopper's kernels for many small programs read them: pointers and strides."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qframework.kernels.attention.hopper.piece_form import Added
from qframework.kernels.attention.operands import Bias, last_contiguous
from qframework.kernels.runtime.launch import power_of_2
from qframework.numerics import FLOAT_DTYPES


class DenseBias(NamedTuple):
    """A float or bool mask in memory, or relative heights and widths, or nothing."""

    mask: Tensor | None = None  # (masks, mask heads, N or 1, Nk or 1)
    added: Added = "none"
    step: int = 1  # strides are multiples of it, and the mask begins at a multiple of 16 bytes; 0: any strides
    heights: Tensor | None = None  # (masks, mask heads, N or 1, Nk / widths)
    widths: Tensor | None = None  # (masks, mask heads, N or 1, widths)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is added."""
        return self.mask is None and self.heights is None

    @property
    def masks(self) -> int:
        """How many masks batches take turns with: batch ``b`` uses ``b % masks``."""
        return self.sizes[0]

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of masks and of their heads."""
        some = self.mask if self.mask is not None else self.heights
        return (1, 1) if some is None else (some.shape[0], some.shape[1])

    @property
    def itemsize(self) -> int:
        """Bytes of a number of the mask in shared memory, 0 without one."""
        return 0 if self.mask is None else max(self.mask.element_size(), 2)

    @property
    def columns(self) -> int:
        """Columns of relative positions as an operand of tensor cores, 0 without them."""
        if self.heights is None or self.widths is None:
            return 0
        return max(power_of_2(self.heights.shape[3] + self.widths.shape[3]), 32)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The pointer, and strides of masks, heads, queries and keys in multiples of ``step``."""
        some = self.mask if self.mask is not None else self.heights
        if some is None:
            return None, 0, 0, 0, 0
        unit = max(self.step, 1)
        data = some.view(torch.uint8) if self.added == "bool" else some
        return data, *(stride // unit for stride in _strides(some))

    @property
    def width_arguments(self) -> tuple[Any, ...]:
        """The pointer to widths, strides of masks, heads and queries, and their number."""
        if self.widths is None:
            return None, 0, 0, 0, 1
        return self.widths, *_strides(self.widths)[:3], self.widths.shape[3]


NO_BIAS = DenseBias()


def dense_bias(bias: Bias) -> DenseBias | None:
    """``bias`` as the kernels read it; None where they do not: two of causality, a mask and relative positions.

    Relative positions that are infinite give NaN in all keys of their query: they are multiplied by 0 and 1.
    """
    if bias.adds_nothing:
        return NO_BIAS
    if bias.causal:
        return None
    if bias.rel_h is not None and bias.rel_w is not None:
        heights, widths = _without_copies(last_contiguous(bias.rel_h), last_contiguous(bias.rel_w))
        alike = heights.dtype == widths.dtype and heights.shape[:2] == widths.shape[:2]
        return DenseBias(heights=heights, widths=widths) if alike and bias.mask is None else None
    mask = bias.mask
    if mask is None or mask.dtype not in (torch.bool, *FLOAT_DTYPES):
        return None
    (mask,) = _without_copies(mask)
    contiguous = mask.shape[3] > 1 and mask.stride(3) == 1
    pairs = mask.data_ptr() % 16 == 0 and all(stride % 2 == 0 for stride in _strides(mask)[:3])
    step = (2 if pairs else 1) if contiguous else 0
    return DenseBias(mask, "bool" if mask.dtype == torch.bool else "float", step)


def _without_copies(*given: Tensor) -> tuple[Tensor, ...]:
    """Masks with dimensions of 1 for batches and heads where all are expanded."""
    for dim in range(2):
        if all(x.shape[dim] > 1 and x.stride(dim) == 0 for x in given):
            given = tuple(x.narrow(dim, 0, 1) for x in given)
    return given


def _strides(mask: Tensor) -> tuple[int, ...]:
    """Strides in elements, 0 where a dimension of 1 broadcasts."""
    return tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
