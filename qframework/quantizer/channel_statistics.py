"""Statistics of calibration data at chosen nodes of a float graph: extremes of each channel, and a sample of rows.

Other data exceeds the extremes of some channels. How far is estimated from the largest values of single examples. If
these have an exponential tail, the mean of the four largest minus the fifth is its decay ``b``, and a range that ends
``u b`` beyond the largest value clips ``2 b^2 exp(-u)`` of squared error in as much data again, while ``n`` rows are
rounded to ``width / 254``. The sum is least where::

    exp(-u) = n width / (12 * 254^2 b)

Channels that a few examples dominate get much room, and others hardly any.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from qframework.errors import CalibrationError
from qframework.numerics import MIN_AMAX, QMAX, QMIN
from qframework.quantizer.calibration import Batch, run_batches

# The tail of a channel is estimated from the largest values of so many examples and one more.
_TAIL = 4
_FARTHEST = 4.0  # in decays of the tail, since little data tells little


class ChannelStatistics:
    """Statistics of one tensor ``(..., C)``.

    ``low`` and ``high`` ``(C,)`` float32 are the extremes of each channel in all data, and ``amax`` its largest
    magnitude. ``rows`` ``(n, C)`` float32 with
    n <= ``samples`` is a uniform sample of all rows, from a generator with a fixed seed: the same data gives the same
    rows. ``count`` is the number of all rows.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.low: Tensor
        self.high: Tensor
        self.rows: Tensor
        self.count = 0
        self._keys: Tensor
        self._lows: Tensor  # of the examples where a channel has its smallest values, (up to _TAIL + 1, C)
        self._highs: Tensor
        self._generator = torch.Generator().manual_seed(0)
        self.seen = False

    def add(self, value: Tensor) -> None:
        """Add one batch of the tensor."""
        rows = value.detach().reshape(-1, value.shape[-1]).float()
        keys = torch.rand(rows.shape[0], generator=self._generator, dtype=torch.float64)
        if rows.shape[0] == 0:
            return
        low, high = torch.aminmax(rows, dim=0)
        if not bool((low.isfinite() & high.isfinite()).all()):
            raise CalibrationError("the activation must be finite, got NaN or infinity")
        examples = rows.reshape(value.shape[0], -1, value.shape[-1]) if value.dim() > 2 else rows.unsqueeze(1)
        lows, highs = examples.amin(1), examples.amax(1)
        self.count += rows.shape[0]
        chosen = keys.argsort(stable=True)[: self.samples]
        rows, keys = rows[chosen.to(rows.device)], keys[chosen]
        if self.seen:
            lows, highs = torch.cat([self._lows, lows]), torch.cat([self._highs, highs])
            rows, keys = torch.cat([self.rows, rows]), torch.cat([self._keys, keys])
            low, high = torch.minimum(self.low, low), torch.maximum(self.high, high)
            chosen = keys.argsort(stable=True)[: self.samples]
            rows, keys = rows[chosen.to(rows.device)], keys[chosen]
        self.rows, self._keys, self.seen = rows, keys, True
        self.low, self.high = low, high
        kept = min(_TAIL + 1, len(lows))
        self._lows = lows.topk(kept, 0, largest=False).values
        self._highs = highs.topk(kept, 0).values

    def reaching(self) -> ChannelStatistics:
        """The same, with extremes as far as those of other data are likely to go."""
        found = copy.copy(self)
        width = (self.high - self.low).clamp(min=MIN_AMAX)
        found.low, found.high = -self._reach(-self._lows, width), self._reach(self._highs, width)
        return found

    def _reach(self, largest: Tensor, width: Tensor) -> Tensor:
        """Where the range of each channel should end, from the values ``(k, C)`` of its k largest examples."""
        if len(largest) < 2:
            return largest[0]
        decay = largest[:-1].mean(0) - largest[-1]
        clipped = (decay * (12 * (QMAX - QMIN) ** 2 / self.count) / width).clamp(min=1.0)
        return largest[0] + decay * clipped.log().clamp(max=_FARTHEST)

    @property
    def amax(self) -> Tensor:
        """The largest magnitude of each channel."""
        return torch.maximum(-self.low, self.high)


def channel_statistics(
    exported: fx.GraphModule,
    data: Iterable[Batch],
    nodes: Collection[fx.Node],
    samples: int,
    batches: int | None = None,
) -> dict[fx.Node, ChannelStatistics]:
    """Run ``data`` through a float graph, without gradients, and collect statistics of ``nodes``.

    Args:
        exported: from ``torch.export.export(...).module()``.
        data: batches as ``calibrate`` takes them.
        nodes: nodes whose value is a float tensor ``(..., C)``.
        samples: how many rows to sample of each.
        batches: use only this many batches.

    Raises:
        CalibrationError: no data, a batch that does not fit, or NaN or infinity in a value.
    """
    run = _Watch(exported, {node: ChannelStatistics(samples) for node in nodes})
    run_batches(exported, run, data, batches)
    for node, each in run.statistics.items():
        if not each.seen:
            raise CalibrationError(f"{node.name}: the data must have values for this activation, got empty batches")
    return run.statistics


class _Watch(fx.Interpreter):
    def __init__(self, exported: fx.GraphModule, statistics: dict[fx.Node, ChannelStatistics]) -> None:
        super().__init__(exported)
        self.statistics = statistics

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n in self.statistics:
            self._look(n, value)
        return value

    def _look(self, node: fx.Node, value: Tensor) -> None:
        try:
            self.statistics[node].add(value)
        except CalibrationError as error:
            raise CalibrationError(f"{node.name}: {error}") from error
