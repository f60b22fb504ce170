"""Plots of a sensitivity analysis and of a search as PNG; equal results give identical files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qframework.files import atomic_write
from qframework.tuning.results import LayerSensitivity, Measured, Trial

_COLOURS = ("#c2410c", "#1d4ed8", "#15803d", "#7e22ce", "#a16207", "#0e7490")
_GREY = "#a8a29e"


def require_matplotlib() -> None:
    """Raise ModuleNotFoundError if matplotlib is missing, before any long computation."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plots need matplotlib: pip install matplotlib, or pass --no-plot") from error


@contextmanager
def _figure(path: Path, **size: Any) -> Iterator[Any]:
    """A figure that is written to ``path`` at the end of the block, without pyplot's global state."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained", **size)
    FigureCanvasAgg(figure)
    yield figure
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=120, metadata={"Software": None})


def draw_sensitivity(results: Sequence[LayerSensitivity], path: Path) -> None:
    """Two panels with a row for each layer in the order of the model: the metric's drop, and the layer's SQNR."""
    layers = list(dict.fromkeys(row.label for row in results))
    choices = list(dict.fromkeys(row.choice for row in results))
    with _figure(path, figsize=(9, 1.5 + 0.22 * len(layers))) as figure:
        drops, sqnr = figure.subplots(1, 2, sharey=True)
        for index, choice in enumerate(choices):
            rows = [row for row in results if row.choice == choice]
            style = {"color": _COLOURS[index % len(_COLOURS)], "label": choice, "s": 18}
            shift = 0.5 * (index + 0.5) / len(choices) - 0.25  # keeps equal values visible
            places = [layers.index(row.label) + shift for row in rows]
            drops.scatter([row.drop for row in rows], places, **style)
            known = [(row.sqnr_db, place) for row, place in zip(rows, places, strict=True) if row.sqnr_db is not None]
            sqnr.scatter([value for value, _ in known], [place for _, place in known], **style)
        drops.set_yticks(range(len(layers)), layers, fontsize=7)
        drops.invert_yaxis()
        drops.axvline(0, color=_GREY, linewidth=0.8)
        drops.set_xlabel("drop of the metric, one layer quantized")
        sqnr.set_xlabel("SQNR of the layer's output, dB")
        for axes in (drops, sqnr):
            axes.set_axisbelow(True)
            axes.grid(axis="y", linewidth=0.3)
        sqnr.legend(fontsize=7)


def draw_front(
    tried: Sequence[Trial],
    front: Sequence[Trial],
    measured: Mapping[str, Sequence[Measured]],
    max_drop: float,
    path: Path,
) -> None:
    """Drop against images per second: the trials at their estimated speeds, and the whole measurements by label."""
    with _figure(path, figsize=(7, 4.5)) as figure:
        axes = figure.subplots()
        axes.scatter(
            [trial.estimated_images_per_second for trial in tried],
            [trial.drop for trial in tried],
            color=_GREY, s=18, label="tried, speed estimated from its layers",
        )  # fmt: skip
        front = sorted(front, key=lambda trial: trial.estimated_images_per_second)
        axes.plot(
            [trial.estimated_images_per_second for trial in front],
            [trial.drop for trial in front],
            color=_GREY, linewidth=1, label="front",
        )  # fmt: skip
        for colour, (label, found) in zip(("black", _COLOURS[1], _COLOURS[0]), measured.items(), strict=True):
            speeds, drops = [each.images_per_second for each in found], [each.drop for each in found]
            axes.scatter(speeds, drops, color=colour, marker="*", s=90, zorder=3, label=label)
        axes.axhline(max_drop, color=_COLOURS[0], linewidth=0.8, linestyle="--", label="budget")
        axes.set_xlabel("images per second")
        axes.set_ylabel("drop of the metric")
        axes.grid(linewidth=0.3)
        axes.legend(fontsize=7)
