"""Statistics of calibration data at chosen nodes of a float graph: extremes of each channel, and a sample of rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx

from qframework.errors import CalibrationError
from qframework.quantizer.calibration import Batch, flat_inputs


class ChannelStatistics:
    """Statistics of one tensor ``(..., C)``.

    ``low`` and ``high`` ``(C,)`` float32 are the extremes of each channel in all data, and ``amax`` its largest
    magnitude. ``rows`` ``(n, C)`` float32 with
    n <= ``samples`` is a uniform sample of all rows, from a generator with a fixed seed: the same data gives the same
    rows.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.low: Tensor
        self.high: Tensor
        self.rows: Tensor
        self._keys: Tensor
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
        chosen = keys.argsort(stable=True)[: self.samples]
        rows, keys = rows[chosen.to(rows.device)], keys[chosen]
        if self.seen:
            rows, keys = torch.cat([self.rows, rows]), torch.cat([self._keys, keys])
            low, high = torch.minimum(self.low, low), torch.maximum(self.high, high)
            chosen = keys.argsort(stable=True)[: self.samples]
            rows, keys = rows[chosen.to(rows.device)], keys[chosen]
        self.rows, self._keys, self.seen = rows, keys, True
        self.low, self.high = low, high

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
    seen = 0
    with torch.no_grad():
        for index, batch in enumerate(islice(iter(data), batches)):
            run.run(*flat_inputs(exported, batch, index), enable_io_processing=False)
            seen += 1
    if seen == 0:
        raise CalibrationError("Recipe: data must have at least one batch, got none")
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
