"""Which layers quantization hurts: each is quantized alone, and its output and the metric are compared with float."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from qframework.evaluation.progress import progress_bar
from qframework.evaluation.pt2e import export_model
from qframework.files import write_json
from qframework.quantizer import Recipe
from qframework.tuning.assignment import Assignment, Meanings
from qframework.tuning.candidates import Candidates, Metric, checked_metric, noise_db
from qframework.tuning.journal import Journal
from qframework.tuning.layer_times import STATIC
from qframework.tuning.layers import Layer, find_layers
from qframework.tuning.plots import draw_sensitivity
from qframework.tuning.results import LayerSensitivity

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Sensitivity:
    """What ``sensitivity`` measured: the metric of the float model, and each layer in the order of the model."""

    baseline: float
    rows: list[LayerSensitivity]

    def worst(self) -> list[LayerSensitivity]:
        """The rows from the largest drop to the smallest; of equal ones that with the noisiest output first."""
        return sorted(self.rows, key=lambda row: (-row.drop, _decibels(row.output_sqnr_db)))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able values."""
        return {"baseline": self.baseline, "layers": [asdict(row) for row in self.rows]}

    def save(self, path: Path) -> None:
        """Write ``to_dict()`` to ``path`` as JSON."""
        write_json(path, self.to_dict(), indent=2)

    def table(self) -> Table:
        """The rows for people, the worst first."""
        from rich.table import Table

        table = Table(
            title=f"Each layer quantized alone; float: {self.baseline:.2f}",
            caption="SQNR in dB: of the layer's output, of the model's output. Drop: of the metric, in its own points.",
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
        """Draw drop and SQNR of every layer to a PNG. Raises ModuleNotFoundError where matplotlib is missing."""
        draw_sensitivity(self.rows, path)


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
    """Quantize one layer after the other, alone, and measure its SQNR and the drop of the task's metric.

    Args:
        model: in eval mode, on the device of ``images``.
        images: a batch ``(B, C, H, W)`` of at least 2 that SQNR is measured on.
        metric: of a model, higher is better: ``lambda model: top1(model, loader)``. It gets exported graphs.
        calibration: a list or DataLoader of batches; None where no choice is ``"static"``.
        linear: what to try on each linear: ``"static"``, ``"dynamic"``; empty for none.
        attention: what to try on each attention: ``"static"`` or a variant; empty for none.
        meanings: configurations of static and dynamic.
        recipe: steps around the calibration.
        batches: use only so many calibration batches.
        journal: keeps what was measured.
        show_progress: draw a progress bar.

    Raises:
        QFrameworkError: nothing to quantize, a metric that is no finite number, calibration data that is an iterator.
        UnsupportedError: an unknown choice.
    """
    exported = export_model(model, images)
    candidates = Candidates(exported, images, calibration, meanings or Meanings(), recipe, batches)
    kept = Journal() if journal is None else journal
    layers = find_layers(exported, images)
    trials = [(layer, choice) for layer in layers for choice in _choices(layer, linear, attention)]
    for layer, choice in trials:
        _alone(layers, layer, choice).quantizer(candidates.meanings)  # refuses unknown choices before anything runs
    rows = []
    with progress_bar("Measuring each layer alone", len(trials) + 1, show_progress) as advance:
        baseline = kept("metric float", lambda: checked_metric(metric, exported))
        advance()
        for layer, choice in trials:
            measured = kept(
                f"{layer.kind} {layer.name} {choice}", _measurement(candidates, layers, layer, choice, metric)
            )
            drop = baseline - measured["metric"]
            rows.append(LayerSensitivity(layer.kind, layer.name, choice, **measured, drop=drop))
            advance()
    return Sensitivity(baseline, rows)


def _choices(layer: Layer, linear: Iterable[str], attention: Iterable[str]) -> list[str]:
    wanted = linear if layer.kind == "linear" else attention
    return [choice for choice in wanted if choice != STATIC or layer.static]


def _alone(layers: list[Layer], layer: Layer, choice: str) -> Assignment:
    return Assignment.uniform(layers).changed(layer.key, choice)


def _measurement(
    candidates: Candidates, layers: list[Layer], layer: Layer, choice: str, metric: Metric
) -> Callable[[], dict[str, Any]]:
    def measure() -> dict[str, Any]:
        converted = candidates.quantized(_alone(layers, layer, choice))
        sqnr = candidates.layer_sqnr(layer, converted)
        return {
            "sqnr_db": sqnr if sqnr is not None and math.isfinite(sqnr) else None,
            "output_sqnr_db": _finite(noise_db(candidates.output_noise(converted))),
            "metric": checked_metric(metric, converted),
        }

    return measure


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _decibels(value: float | None) -> float:
    return math.inf if value is None else value


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
