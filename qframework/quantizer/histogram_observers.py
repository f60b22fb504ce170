"""Observers that use a histogram of magnitudes: percentile, mean squared error, entropy."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from qframework.compat.torchao import ObserverBase
from qframework.numerics import MIN_AMAX, MIN_SCALE, QMAX, affine_parameters
from qframework.quantizer.static_observer import AsymmetricObserver, StaticObserver


class MagnitudeHistogram(StaticObserver, ObserverBase):
    """Counts of ``|x|`` in equal bins over ``[0, limit]``, in int64, without magnitudes below MIN_AMAX.

    ``limit`` starts at the first maximum and doubles when a value exceeds it. Pairs of bins then merge, so that earlier
    counts stay exact and at least half of the bins stay in use.
    """

    counts: Tensor  # (bins,) int64
    limit: Tensor  # () float64, 0 before anything was counted
    amax: Tensor  # () float32, largest magnitude seen, -1 before the first batch
    held_nonfinite: Tensor  # () bool

    def __init__(self, layer: str, bins: int, **_: Any) -> None:
        super().__init__(dtype=torch.int8)
        self.layer, self.bins = layer, bins
        self.register_buffer("counts", torch.zeros(bins, dtype=torch.int64))
        self.register_buffer("limit", torch.tensor(0.0, dtype=torch.float64))
        self.register_buffer("amax", torch.tensor(-1.0))
        self.register_buffer("held_nonfinite", torch.tensor(False))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Count the magnitudes of ``x`` (any shape and float dtype) and return ``x``."""
        if x.numel() == 0:
            return x
        magnitude = x.detach().abs().float()
        amax = magnitude.amax()
        if not bool(torch.isfinite(amax)):
            self.held_nonfinite.fill_(True)
            return x
        self.amax.copy_(torch.maximum(self.amax, amax))
        magnitude = magnitude[magnitude >= MIN_AMAX]
        if magnitude.numel() == 0:
            return x
        self._grow(amax)
        width = float(self.limit) / self.bins
        index = (magnitude / width).to(torch.int64).clamp_(max=self.bins - 1)
        self.counts += torch.bincount(index, minlength=self.bins)
        return x

    def _grow(self, amax: Tensor) -> None:
        if float(self.limit) == 0:
            self.limit.copy_(amax)
        while float(self.limit) < float(amax):
            pairs = self.counts.reshape(-1, 2).sum(1)
            self.counts.zero_()[: pairs.numel()] = pairs
            self.limit.mul_(2)

    def nonfinite(self) -> Tensor:
        return self.held_nonfinite

    def magnitude(self) -> Tensor | None:
        return None if float(self.amax) < 0 else self.amax

    def threshold(self) -> Tensor | None:
        if not bool(self.counts.any()):
            return None
        counts = self.counts.cpu().double()
        threshold = self.search(counts, float(self.limit) / self.bins)
        return self.amax.new_tensor(threshold).minimum(self.amax)

    @abstractmethod
    def search(self, counts: Tensor, width: float) -> float:
        """The threshold for ``counts (bins,)``, float64 on the CPU, of bins of this ``width``."""


class PercentileObserver(MagnitudeHistogram):
    """Magnitude below which ``percentile`` percent of the nonzero values lie, interpolated within a bin."""

    def __init__(self, layer: str, percentile: float = 99.99, bins: int = 16384, **kwargs: Any) -> None:
        super().__init__(layer, bins, **kwargs)
        self.percentile = percentile

    def search(self, counts: Tensor, width: float) -> float:
        below = counts.cumsum(0)
        wanted = self.percentile / 100 * float(below[-1])
        bin_ = int(torch.searchsorted(below, wanted).clamp(max=self.bins - 1))
        inside = float(counts[bin_])
        missing = wanted - (float(below[bin_]) - inside)
        return (bin_ + (missing / inside if inside else 1.0)) * width


class MSEObserver(MagnitudeHistogram):
    """Threshold of least mean squared error of quantize then dequantize, clipping included.

    There are 16 candidates per octave below the largest magnitude, down to a quantization step of one bin, which is the
    histogram's resolution. The error curve is flat at its minimum, so a finer search gains less than one percent.
    """

    def __init__(self, layer: str, bins: int = 8192, **kwargs: Any) -> None:
        super().__init__(layer, bins, **kwargs)

    def search(self, counts: Tensor, width: float) -> float:
        used = counts.nonzero().flatten()
        # four points represent the values of a bin: with its center alone, steps of a few bins would alias
        points = ((used.unsqueeze(1) + (torch.arange(4, dtype=torch.float64) + 0.5) / 4) * width).flatten()
        weights = counts[used].repeat_interleave(4)
        amax = float(self.amax)
        candidates = [amax * 2 ** (-k / 16) for k in range(16 * 20)]
        candidates = [c for c in candidates if c >= QMAX * width] or [amax]
        errors = torch.stack([_squared_error(points, weights, c, self.step(c)) for c in candidates])
        return candidates[int(errors.argmin())]

    def step(self, threshold: float) -> float:
        """The scale for a threshold."""
        return max(threshold / QMAX, MIN_SCALE)


def _squared_error(points: Tensor, weights: Tensor, threshold: float, scale: float) -> Tensor:
    rounded = torch.round(points.clamp(max=threshold) / scale) * scale
    return torch.dot((points - rounded).square(), weights)


class _BothEnds(AsymmetricObserver, MagnitudeHistogram):
    """Also keeps the smallest and the largest value; magnitudes above the threshold are clipped at both ends."""

    low: Tensor  # () float32, at most 0
    high: Tensor  # () float32, at least 0

    def __init__(self, layer: str, **kwargs: Any) -> None:
        super().__init__(layer, **kwargs)
        self.register_buffer("low", torch.tensor(0.0))
        self.register_buffer("high", torch.tensor(0.0))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Count the magnitudes of ``x`` (any shape and float dtype) and return ``x``."""
        if x.numel():
            low, high = torch.aminmax(x.detach())
            if bool(torch.isfinite(high - low)):  # others are noted where they are counted
                self.low.copy_(torch.minimum(self.low, low.float()))
                self.high.copy_(torch.maximum(self.high, high.float()))
        return super().forward(x)

    def ends(self) -> tuple[Tensor, Tensor]:
        threshold = self.threshold()
        assert threshold is not None
        return self.ends_at(threshold)

    def ends_at(self, threshold: Tensor) -> tuple[Tensor, Tensor]:
        """The range without magnitudes above ``threshold``."""
        return torch.maximum(self.low, -threshold), torch.minimum(self.high, threshold)


class AffinePercentileObserver(_BothEnds, PercentileObserver):
    """A range that ends at the percentile of the magnitudes, and where values end."""


class AffineMSEObserver(_BothEnds, MSEObserver):
    """A range that ends at the magnitude of least mean squared error, and where values end."""

    def step(self, threshold: float) -> float:
        low, high = self.ends_at(self.amax.new_tensor(threshold))
        return float(affine_parameters(low, high)[0])


class EntropyObserver(MagnitudeHistogram):
    """Threshold of least Kullback-Leibler divergence KL(P || Q).

    P is the histogram up to the threshold, with all counts above added to its last bin. Q is the histogram up to the
    threshold on the 128 levels of ``|q|``; the mass of a level spreads evenly over the level's bins that P uses.
    """

    def __init__(self, layer: str, bins: int = 2048, **kwargs: Any) -> None:
        super().__init__(layer, bins, **kwargs)

    def search(self, counts: Tensor, width: float) -> float:
        top = int(counts.nonzero().max()) + 1
        candidates = [*range(QMAX + 1, top, max(1, top // 256)), top]
        divergences = torch.stack([_divergence(counts, n) for n in candidates])
        return candidates[int(divergences.argmin())] * width


def _divergence(counts: Tensor, n: int) -> Tensor:
    """KL(P || Q) for a threshold at the upper end of bin ``n - 1``; infinite where Q misses a value of P."""
    inside = counts[:n]
    p = inside.clone()
    p[-1] += counts[n:].sum()
    level = torch.round((torch.arange(n, dtype=torch.float64) + 0.5) * (QMAX / n)).long()
    used = (p > 0).double()
    mass = torch.zeros(QMAX + 1, dtype=torch.float64).scatter_add_(0, level, inside)
    members = torch.zeros(QMAX + 1, dtype=torch.float64).scatter_add_(0, level, used)
    q = used * (mass / members.clamp(min=1))[level]
    if not bool(inside.any()):
        return torch.tensor(float("inf"), dtype=torch.float64)
    p, q = p / p.sum(), q / q.sum()
    keep = p > 0
    return (p[keep] * (p[keep] / q[keep]).log()).sum()
