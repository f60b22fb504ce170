"""Smoothing: scales of channels moved from activations, where they cost accuracy, into weights, where they do not.

With a scale ``s_j > 0`` for each input channel j of a linear (SmoothQuant eq. 3, arXiv:2211.10438)::

    y = x W^T = (x / s) (W * s)^T           s_j = max|x_j| ** a / max|w_j| ** (1 - a)          (eq. 4)

``x / s`` costs nothing if the layer before it has parameters to divide (qframework/graph/channel_groups.py). Otherwise
it is a product with a constant (qframework/quantizer/channel_scales.py). The strength ``a`` is searched for each group
of linears that share their input channels; it is the one whose quantized outputs are nearest to the float outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.graph.attributes import attribute
from qframework.graph.channel_groups import ChannelGroup, find_channel_groups, fold
from qframework.numerics import (
    MIN_AMAX,
    affine_parameters,
    dequantize,
    dynamic_scale,
    exact_matmul,
    quantize,
    scale_from_amax,
)
from qframework.quantizer.calibration import Batch
from qframework.quantizer.channel_statistics import ChannelStatistics, channel_statistics
from qframework.quantizer.config import ActivationConfig, LinearConfig
from qframework.quantizer.observers import WeightObserver, activation_observer
from qframework.quantizer.quantizer import QFrameworkQuantizer, layer_name

# The magnitude of a channel counts as at least this share of the largest, so that dead channels get no extreme scale.
_SMALLEST_SHARE = 1e-5
# Scales stay between 1 / this and this, so that scaled parameters stay within float16's range.
_LARGEST_SCALE = 1024.0


class Smoothing(NamedTuple):
    """The best strength, its scales ``(channels,)``, and its squared error relative to that without smoothing."""

    strength: float
    scales: Tensor
    error: float


def smooth(
    exported: GraphModule,
    quantizer: QFrameworkQuantizer,
    data: Iterable[Batch],
    *,
    strengths: Sequence[float],
    samples: int = 1024,
    batches: int | None = None,
    chosen: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Smooth every group of channels in which ``quantizer`` quantizes a linear, in place; the function stays the same.

    Args:
        exported: from ``torch.export.export(...).module()``. It gets new parameters; those of the original model stay.
        quantizer: the one the graph will be prepared with.
        data: calibration batches as ``calibrate`` takes them.
        strengths: candidates for ``a``.
        samples: rows of calibration data on which errors are measured.
        batches: use only this many batches.
        chosen: a former result for this graph; its strengths are applied to the ranges of ``data`` without a search.

    Returns:
        The strength of each quantized linear that was smoothed, by its layer's name.

    Raises:
        CalibrationError: no data, a batch that does not fit, or NaN or infinity in an activation.
    """
    groups = [(group, _quantized(group, quantizer)) for group in find_channel_groups(exported)]
    groups = [
        (group, linears)
        for group, linears in groups
        if linears and (chosen is None or layer_name(linears[0][0]) in chosen)
    ]
    nodes = {linear.args[0]: None for _, linears in groups for linear, _, _ in linears}
    samples = samples if chosen is None else 1
    statistics = channel_statistics(exported, data, nodes, samples, batches) if nodes else {}  # type: ignore[arg-type]
    strengths_found: dict[str, float] = {}
    for group, linears in groups:
        layers = [
            CalibratedLinear.of(exported, linear, config, channels, statistics[linear.args[0]])  # type: ignore[index]
            for linear, config, channels in linears
        ]
        free = group.free.to(layers[0].weight.device)
        if chosen is None:
            found = search_smoothing(layers, free, strengths)
            if found is None:
                continue
            strength, scales = found.strength, found.scales
        else:
            strength = chosen[layers[0].name]
            scales = smoothing_scales(*_extremes(layers, group.free.numel()), free, strength)
        fold(exported, group, scales)
        strengths_found.update((layer.name, strength) for layer in layers)
    return strengths_found


def _quantized(group: ChannelGroup, quantizer: QFrameworkQuantizer) -> list[tuple[Node, LinearConfig, Tensor]]:
    found = []
    for consumer in group.consumers:
        config = quantizer.config_for(consumer.linear)
        if isinstance(config, LinearConfig):
            found.append((consumer.linear, config, consumer.channels))
    return found


# ----------------------------------------------------------------------------------------------------------------------
# The search


@dataclass
class CalibratedLinear:
    """A linear and the calibration data of its input.

    Attributes:
        name: name of its layer.
        weight: ``(N, K)`` float32.
        channels: ``(K,)`` int64, the group's channel of each input feature.
        config: how it is quantized.
        rows: ``(n, K)`` float32, a sample of its inputs.
        amax: ``(K,)`` float32, the largest magnitudes of all of its inputs.
    """

    name: str
    weight: Tensor
    channels: Tensor
    config: LinearConfig
    rows: Tensor
    amax: Tensor

    @classmethod
    def of(
        cls, exported: GraphModule, linear: Node, config: LinearConfig, channels: Tensor, seen: ChannelStatistics
    ) -> CalibratedLinear:
        """The linear of a node of ``exported``."""
        weight = attribute(exported, linear.args[1]).detach().float()  # type: ignore[arg-type]
        return cls(layer_name(linear), weight, channels.to(weight.device), config, seen.rows, seen.amax)

    def error(self, scales: Tensor) -> float:
        """Squared error of the quantized output relative to the squared output, with ``scales`` of the group."""
        return self.squared_error(scales) / float(self._exact.double().square().sum().clamp(min=1e-30))

    def squared_error(self, scales: Tensor) -> float:
        """Squared error of the quantized output with ``scales`` of the group."""
        own = scales[self.channels]
        wrong = exact_matmul(self._quantized_rows(own), self._quantized_weight(own).T) - self._exact
        return float(wrong.double().square().sum())

    @cached_property
    def _exact(self) -> Tensor:
        return exact_matmul(self.rows, self.weight.T)

    def _quantized_rows(self, scales: Tensor) -> Tensor:
        rows = self.rows / scales
        scale, zero_point = _activation_parameters(self.config.activation, self.name, rows, self.amax / scales)
        return dequantize(quantize(rows, scale, zero_point), scale, zero_point=zero_point)

    def _quantized_weight(self, scales: Tensor) -> Tensor:
        weight = self.weight * scales
        scale = WeightObserver(self.name, self.config.weight).broadcast_scale(weight)
        return quantize(weight, scale).float() * scale


def _activation_parameters(
    config: ActivationConfig, name: str, rows: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point that ``config`` gives inputs like ``rows (n, K)``; ``amax (K,)``: maxima over all data.

    Static scales per position are approximated by scales per row, which fits if positions differ more than batches.
    """
    if config.granularity == "per_token":
        return dynamic_scale(rows, "per_token"), None
    if config.dynamic:
        return dynamic_scale(rows, "per_tensor"), None
    extremes = config.observer in ("minmax", "moving_average")
    if extremes and not config.symmetric:  # the ends of the sample, of which one is that of all data
        low, high = rows.amin(), rows.amax()
        longer = amax.max() / torch.maximum(-low, high).clamp(min=MIN_AMAX)
        return affine_parameters(low * longer, high * longer)
    if extremes:
        return scale_from_amax(amax.max()), None
    observer = activation_observer(config, name, ())().to(rows.device)
    observer(rows)
    known = observer.has_scale()
    return (observer.scale(), observer.zero_point()) if known else (scale_from_amax(amax.max()), None)


def search_smoothing(layers: Sequence[CalibratedLinear], free: Tensor, strengths: Sequence[float]) -> Smoothing | None:
    """The best strength for linears that share their input channels, or None if no smoothing is better.

    Args:
        layers: the linears.
        free: ``(channels,)`` bool, the channels that may be scaled.
        strengths: candidates for ``a``.
    """
    unscaled = torch.ones(free.numel(), device=free.device)
    error_of: Callable[[Tensor], float] = lambda scales: sum(layer.error(scales) for layer in layers)  # noqa: E731
    before = error_of(unscaled)
    amax_x, amax_w = _extremes(layers, free.numel())
    best: Smoothing | None = None
    for strength in strengths:
        scales = smoothing_scales(amax_x, amax_w, free, strength)
        error = error_of(scales)
        if error < (before if best is None else best.error * before):
            best = Smoothing(strength, scales, error / before)
    return best


def smoothing_scales(amax_x: Tensor, amax_w: Tensor, free: Tensor, strength: float) -> Tensor:
    """``s_j = max|x_j| ** a / max|w_j| ** (1 - a)``, with geometric mean 1, and 1 for channels that are not free.

    Scales are clamped to [2^-10, 2^10].

    Args:
        amax_x: ``(channels,)`` float, largest magnitudes of the activation.
        amax_w: ``(channels,)`` float, largest magnitudes in the columns of the weights.
        free: ``(channels,)`` bool, the channels that may be scaled. Channels that were always zero keep 1 too.
        strength: ``a``.
    """
    free = free & (amax_x >= MIN_AMAX)  # calibration says nothing about a channel that was always zero
    log_x, log_w = (a.double().clamp(min=max(float(a.max()) * _SMALLEST_SHARE, 1e-30)).log() for a in (amax_x, amax_w))
    log_s = strength * log_x - (1 - strength) * log_w
    scales = (log_s - log_s[free].mean()).exp().clamp(1 / _LARGEST_SCALE, _LARGEST_SCALE)
    return torch.where(free, scales, 1.0).float()


def _extremes(layers: Sequence[CalibratedLinear], channels: int) -> tuple[Tensor, Tensor]:
    """The largest magnitudes of each channel in the activations and in the weights' columns."""
    amax_x = layers[0].weight.new_zeros(channels)
    amax_w = amax_x.clone()
    for layer in layers:
        amax_x.scatter_reduce_(0, layer.channels, layer.amax, "amax")
        amax_w.scatter_reduce_(0, layer.channels, layer.weight.abs().amax(0), "amax")
    return amax_x, amax_w
