"""Plots of a sensitivity analysis and of a search as PNG; equal results give identical files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qframework.files import atomic_write

if TYPE_CHECKING:
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
    """Two panels with a row for each layer: the metric's drop, and the SQNR of the model's output.

    Args:
        results: sorted, as ``Sensitivity.worst()``: the first row of a layer decides its place.
        path: the PNG to write.
    """
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
            pairs = zip(rows, places, strict=True)
            known = [(row.output_sqnr_db, place) for row, place in pairs if row.output_sqnr_db is not None]
            sqnr.scatter([value for value, _ in known], [place for _, place in known], **style)
        drops.set_yticks(range(len(layers)), layers, fontsize=7)
        drops.invert_yaxis()
        drops.axvline(0, color=_GREY, linewidth=0.8)
        drops.set_xlabel("drop of the metric, points (sorted by it, then by SQNR)")
        sqnr.set_xlabel("SQNR of the model's output, dB")
        figure.suptitle("One layer quantized, all others in float: worst first", fontsize=9)
        for axes in (drops, sqnr):
            axes.set_axisbelow(True)
            axes.grid(axis="y", linewidth=0.3)
        handles, names = drops.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=7, frameon=False)


def draw_front(
    tried: Sequence[Trial],
    front: Sequence[Trial],
    measured: Mapping[str, Sequence[Measured]],
    max_drop: float,
    path: Path,
) -> None:
    """Drop against images per second: the trials at their estimated speeds, and the whole measurements by label."""
    with _figure(path, figsize=(7, 5.5)) as figure:
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
        _draw_measured(axes, measured)
        axes.axhline(max_drop, color=_COLOURS[0], linewidth=0.8, linestyle="--", label=f"budget, {max_drop:g}")
        axes.set_xlabel("images per second (right is faster)")
        axes.set_ylabel("drop of the metric, points (down is more accurate)")
        axes.grid(linewidth=0.3)
        axes.set_axisbelow(True)
        axes.margins(x=0.15, y=0.12)
        figure.legend(loc="outside lower center", fontsize=7, frameon=False)


def _draw_measured(axes: Any, measured: Mapping[str, Sequence[Measured]]) -> None:
    """Whole measurements, numbered from the fastest: the legend names the layers, where texts cannot collide."""
    label_of = {id(each): label for label, found in measured.items() for each in found}  # the last one counts
    unique = {id(each): each for found in measured.values() for each in found}
    places = {each.assignment: identity for identity, each in unique.items()}  # chosen is also among the measured
    shown = sorted((unique[identity] for identity in places.values()), key=lambda each: -each.images_per_second)
    styles = {"float": ("black", "D", 45), "measured whole": (_COLOURS[1], "o", 30)}
    for number, each in enumerate(shown, 1):
        label = label_of[id(each)]
        colour, marker, size = styles.get(label, (_COLOURS[0], "*", 130))
        place = (each.images_per_second, each.drop)
        name = label if each.assignment.is_float else f"{label}: {_layers(each)}"
        axes.scatter(*place, color=colour, marker=marker, s=size, zorder=3, label=f"{number}  {name}")
        axes.annotate(str(number), place, xytext=(6, 5), textcoords="offset points", fontsize=8, zorder=4)


def _layers(measured: Measured) -> str:
    """How many layers run in what: ``4 linear static, 1 linear float``."""
    return ", ".join(f"{count} {name}" for name, count in measured.assignment.count().items())
