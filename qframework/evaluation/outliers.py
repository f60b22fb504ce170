"""Outlier channels for any trained transformer: what large models have, given to small ones that can be tested with.

A few channels of the activations of large transformers are 10 to 100 times as large as all others, in every layer the
same ones (arXiv:2208.07339), and min-max INT8 spends its steps on them. The same is brought about here without
training: chosen channels of every norm are multiplied, and the columns of the next linears divided, so that the model
computes what it did before.
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
    """A copy of ``model`` that computes the same, to rounding, with outlier channels behind its norms.

    Args:
        model: in eval mode; its norms are LayerNorm, RMSNorm, or end in a product with a parameter. Norms whose output
            something else than linears reads stay as they are.
        example: what the model is called with, to export it: one tensor or a tuple of arguments.
        channels: how many channels become outliers. Norms of one width get the same ones.
        factor: how many times as large: one number, or the ends of a range to draw from, evenly in the logarithm.
        seed: of the choice of channels and factors.

    Raises:
        UnsupportedError: a factor that is not positive, more channels than there are, or no norm to give them to.
    """
    low, high = factor if isinstance(factor, tuple) else (factor, factor)
    if not 0 < low <= high < math.inf:
        raise UnsupportedError(f"transplant_outliers: factor={factor!r}; accepted: a positive number or a rising pair")
    arguments = example if isinstance(example, tuple) else (example,)
    found = find_channel_groups(torch.export.export(model, arguments).module())
    groups = [group for group in found if group.is_norm]
    if not groups:
        raise UnsupportedError(
            f"{type(model).__name__} has no norm whose output only linears read; accepted: one or more"
        )
    changed = copy.deepcopy(model)
    for group in groups:
        fold(changed, group, 1.0 / _factors(group, channels, (low, high), seed))
    return changed


def _factors(group: ChannelGroup, channels: int, ends: tuple[float, float], seed: int) -> Tensor:
    """``(group.size,)`` float64: the same for all groups of one size, 1 for what cannot be scaled."""
    if not is_count(channels) or channels > group.size:
        raise UnsupportedError(f"transplant_outliers: channels={channels!r}; accepted: 1 to {group.size}")
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(group.size, generator=generator)[:channels]
    low, high = ends
    factors = torch.ones(group.size, dtype=torch.float64)
    factors[chosen] = low * (high / low) ** torch.rand(channels, generator=generator, dtype=torch.float64)
    return torch.where(group.free, factors, 1.0)
