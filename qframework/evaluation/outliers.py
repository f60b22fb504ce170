"""Gives small trained transformers the outlier channels of large ones, to test quantization with.

In large transformers, a few activation channels are 10 to 100 times as large as the others, the same ones in every
layer (arXiv:2208.07339), and ruin min-max INT8. ``transplant_outliers`` multiplies chosen channels of every norm and
divides the matching columns of the next linears, so the model computes the same function.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from qframework.arguments import is_count
from qframework.errors import UnsupportedError
from qframework.graph.channel_groups import ChannelGroup, find_channel_groups, fold


def transplant_outliers(
    model: nn.Module,
    example: Tensor | tuple[Any, ...],
    *,
    channels: int = 4,
    factor: float | tuple[float, float] = (10.0, 100.0),
    seed: int = 0,
) -> nn.Module:
    """A copy of ``model`` with outlier channels behind its norms, which computes the same function up to rounding.

    Args:
        model: in eval mode; its norms are LayerNorm, RMSNorm, or end in a product with a parameter. Norms that feed
            anything but linears are left as they are.
        example: the arguments to export the model with: one tensor or a tuple.
        channels: number of outlier channels; norms of equal width get the same ones.
        factor: how many times as large, or a range to draw from, uniformly in the logarithm.
        seed: of the choice of channels and factors.

    Raises:
        UnsupportedError: a factor is not positive, there are fewer channels than asked for, or no norm is suitable.
    """
    low, high = factor if isinstance(factor, tuple) else (factor, factor)
    if not 0 < low <= high < math.inf:
        raise UnsupportedError(
            f"transplant_outliers: factor must be a positive number or a rising pair, got {factor!r}"
        )
    arguments = example if isinstance(example, tuple) else (example,)
    found = find_channel_groups(torch.export.export(model, arguments).module())
    groups = [group for group in found if group.is_norm]
    if not groups:
        raise UnsupportedError(
            f"transplant_outliers: model must have a norm that feeds only linears, got {type(model).__name__}"
        )
    changed = copy.deepcopy(model)
    for group in groups:
        fold(changed, group, 1.0 / _factors(group, channels, (low, high), seed))
    return changed


def _factors(group: ChannelGroup, channels: int, ends: tuple[float, float], seed: int) -> Tensor:
    """``(group.size,)`` float64: equal for groups of equal size, 1 for channels that cannot be scaled."""
    if not is_count(channels) or channels > group.size:
        raise UnsupportedError(f"transplant_outliers: channels must be 1 to {group.size}, got {channels!r}")
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(group.size, generator=generator)[:channels]
    low, high = ends
    factors = torch.ones(group.size, dtype=torch.float64)
    factors[chosen] = low * (high / low) ** torch.rand(channels, generator=generator, dtype=torch.float64)
    return torch.where(group.free, factors, 1.0)
