"""The plot of training_parity: how far each configuration's loss is from BF16's, over the steps of training."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from demos.training_files import Curves
from qframework.files import atomic_write

_COLOURS = ("#c2410c", "#1d4ed8", "#15803d", "#7e22ce", "#a16207", "#0e7490", "#44403c")
_SMOOTHED_OVER = 50  # steps; the losses of single batches are too noisy
Points = Mapping[int, list[float]]
"""By step, the difference of each seed."""


def draw_differences(
    curves: Mapping[str, Mapping[int, Curves]], baseline: str, path: Path, title: str = "", description: str = ""
) -> None:
    """Loss minus the baseline's at the same seed and step as PNG: the mean of the seeds, and their range as a band.

    Args:
        curves: by configuration, the runs by seed.
        baseline: the configuration to subtract, a line at zero.
        path: the file; its folder must exist.
        title: above the plot.
        description: kept in the file, not shown.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = dict(zip(("training", "validation"), figure.subplots(1, 2), strict=True))
    base = curves.get(baseline, {})
    for index, (name, runs) in enumerate((name, runs) for name, runs in curves.items() if name != baseline):
        pairs = [(run, base[seed]) for seed, run in runs.items() if seed in base]
        for kind, points in (("training", _training(pairs)), ("validation", _validation(pairs))):
            _draw(panels[kind], points, _name(name), _COLOURS[index % 7])
    for kind, axes in panels.items():
        axes.axhline(0, color="black", linewidth=1, label=baseline.upper())
        axes.set_title(f"{kind} loss" + (f", mean of the last {_SMOOTHED_OVER} steps" if kind == "training" else ""))
        axes.set_ylabel(f"loss minus {baseline.upper()}'s at the same seed")
        axes.set_xlabel("step of training")
        axes.grid(linewidth=0.4)
    handles, names = panels["training"].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(f"{title}: mean of the seeds, and their range", fontsize=10)
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=120, metadata={"Software": None, "Description": description or None})


def _draw(axes: Any, points: Points, name: str, colour: str) -> None:
    steps = sorted(points)
    if not steps:
        return
    axes.plot(steps, [statistics.fmean(points[step]) for step in steps], color=colour, linewidth=1.2, label=name)
    low, high = ([pick(points[step]) for step in steps] for pick in (min, max))
    axes.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)


def _name(configuration: str) -> str:
    """``INT8 blocks of 32`` for ``per_block_32``."""
    blocks = configuration.removeprefix("per_block_")
    return f"INT8 blocks of {blocks}" if blocks != configuration else configuration.replace("per_", "INT8 per ")


def _training(pairs: Sequence[tuple[Curves, Curves]]) -> Points:
    """Differences of smoothed losses, from the first step on that a whole mean precedes."""
    found: dict[int, list[float]] = {}
    for run, base in pairs:
        both = (_smooth(run.losses), _smooth(base.losses))
        for step, (mine, other) in enumerate(zip(*both, strict=False), 1):
            if step >= min(_SMOOTHED_OVER, len(run.losses)):
                found.setdefault(step, []).append(mine - other)
    return found


def _validation(pairs: Sequence[tuple[Curves, Curves]]) -> Points:
    found: dict[int, list[float]] = {}
    for run, base in pairs:
        for step, row in run.validation.items():
            if "loss" in row and "loss" in base.validation.get(step, {}):
                found.setdefault(step, []).append(row["loss"] - base.validation[step]["loss"])
    return found


def _smooth(losses: Sequence[float]) -> list[float]:
    """The trailing mean of each step, over fewer steps at the start."""
    windows = (losses[max(0, end - _SMOOTHED_OVER) : end] for end in range(1, len(losses) + 1))
    return [statistics.fmean(window) for window in windows]
