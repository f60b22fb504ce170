"""Quantizes each layer alone, and measures the error of its output, of the model's output and of the metric."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from qframework.conversion.exported import export_model
from qframework.evaluation.progress import progress_bar
from qframework.files import write_json
from qframework.quantizer import Recipe
from qframework.tuning.assignment import Assignment, Meanings
from qframework.tuning.candidates import Candidates, Metric, checked_metric, noise_db
from qframework.tuning.journal import Journal
from qframework.tuning.layer_times import STATIC, kind_of
from qframework.tuning.layers import Layer, find_layers
from qframework.tuning.plots import draw_sensitivity
from qframework.tuning.results import LayerSensitivity

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Sensitivity:
    """The result of ``sensitivity``: the float model's metric, and a row for each layer in the order of the model."""

    baseline: float
    rows: list[LayerSensitivity]

    def worst(self) -> list[LayerSensitivity]:
        """The rows sorted by drop, largest first, then by the SQNR of the model's output, lowest first."""
        return sorted(self.rows, key=lambda row: (-row.drop, _decibels(row.output_sqnr_db)))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able values."""
        return {"baseline": self.baseline, "layers": [asdict(row) for row in self.rows]}

    def save(self, path: Path) -> None:
        """Write ``to_dict()`` to ``path`` as JSON."""
        write_json(path, self.to_dict(), indent=2)

    def table(self) -> Table:
        """The rows as a table for the terminal, the worst first."""
        from rich.table import Table

        table = Table(
            title=f"Each layer quantized alone; float: {self.baseline:.2f}",
            caption="SQNR in dB, of the layer's output and of the model's output. Drop in points of the metric.",
        )
        table.add_column("layer", overflow="fold")
        table.add_column("quantized")
        for name in ("SQNR", "of output", "metric", "drop"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.worst():
            sqnr = [_cell(value) for value in (row.sqnr_db, row.output_sqnr_db)]
            table.add_row(row.label, row.choice, *sqnr, f"{row.metric:.2f}", f"{row.drop:+.2f}")
        return table

    def plot(self, path: Path) -> None:
        """Draw drop and SQNR of the output for every layer to a PNG, the worst first.

        Raises:
            ModuleNotFoundError: matplotlib is missing.
        """
        draw_sensitivity(self.worst(), path)


def sensitivity(
    model: nn.Module,
    images: Tensor,
    metric: Metric,
    calibration: Iterable[Any] | None,
    *,
    linear: Iterable[str] = (STATIC,),
    attention: Iterable[str] = (STATIC,),
    meanings: Meanings | None = None,
    recipe: Recipe | None = None,
    batches: int | None = None,
    journal: Journal | None = None,
    show_progress: bool = False,
) -> Sensitivity:
    """Quantize each layer alone, and measure its SQNR and the drop of the task's metric.

    Args:
        model: in eval mode, on the device of ``images``.
        images: a batch ``(B, C, H, W)`` of at least 2 that SQNR is measured on.
        metric: function of a model (an exported graph), higher is better: ``lambda model: top1(model, loader)``.
        calibration: a list or DataLoader of batches; None if no choice is ``"static"``.
        linear: choices to try on each linear, of ``"static"`` and ``"dynamic"``, also ``"static mse"`` with an observer
            of ``meanings``.
        attention: choices to try on each attention: ``"static"`` or variants.
        meanings: the configurations of static and dynamic.
        recipe: steps around the calibration.
        batches: maximum number of calibration batches.
        journal: records the measurements, to resume an interrupted run.
        show_progress: draw a progress bar.

    Raises:
        QFrameworkError: there is nothing to quantize, the metric is not finite, or ``calibration`` is an iterator.
        UnsupportedError: a choice is unknown.
    """
    exported = export_model(model, images)
    candidates = Candidates(exported, images, calibration, meanings or Meanings(), recipe, batches)
    kept = Journal() if journal is None else journal
    layers = find_layers(exported, images)
    trials = [(layer, choice) for layer in layers for choice in _choices(layer, linear, attention)]
    for layer, choice in trials:
        _alone(layers, layer, choice).quantizer(candidates.meanings)  # refuses unknown choices early
    rows = []
    with progress_bar("Measuring each layer alone", len(trials) + 1, show_progress) as advance:
        baseline = kept("metric float", lambda: checked_metric(metric, exported))
        advance()
        for layer, choice in trials:
            key = f"{layer.kind} {layer.name} {choice}"
            alone = _alone(layers, layer, choice)
            measured = kept(key, lambda layer=layer, alone=alone: _measure(candidates, layer, alone, metric))  # type: ignore[misc]
            drop = baseline - measured["metric"]
            rows.append(LayerSensitivity(layer.kind, layer.name, choice, **measured, drop=drop))
            advance()
    return Sensitivity(baseline, rows)


def _choices(layer: Layer, linear: Iterable[str], attention: Iterable[str]) -> list[str]:
    wanted = linear if layer.kind == "linear" else attention
    return [choice for choice in wanted if kind_of(choice) != STATIC or layer.static]


def _alone(layers: list[Layer], layer: Layer, choice: str) -> Assignment:
    return Assignment.uniform(layers).changed(layer.key, choice)


def _measure(candidates: Candidates, layer: Layer, alone: Assignment, metric: Metric) -> dict[str, Any]:
    converted = candidates.quantized(alone)
    return {
        "sqnr_db": _finite(candidates.layer_sqnr(layer, converted)),
        "output_sqnr_db": _finite(noise_db(candidates.output_noise(converted))),
        "metric": checked_metric(metric, converted),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _decibels(value: float | None) -> float:
    return math.inf if value is None else value


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
