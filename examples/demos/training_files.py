"""The files of a training run: a checkpoint to resume from, the losses as CSV and PNG, and the figures as JSON."""

from __future__ import annotations

import csv
import io
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from qframework.errors import FileFormatError, QFrameworkError
from qframework.files import atomic_write

CHECKPOINT, LOSSES, PLOT, SUMMARY = "checkpoint.pt", "losses.csv", "losses.png", "summary.json"
_COLOURS = ("#44403c", "#c2410c", "#1d4ed8", "#15803d", "#7e22ce", "#a16207", "#0e7490")
_SMOOTHED_OVER = 50  # steps; the losses of single batches are too noisy


@dataclass
class Curves:
    """The training loss of every step, and the validation figures after some of them."""

    losses: list[float] = field(default_factory=list)
    validation: dict[int, dict[str, float]] = field(default_factory=dict)

    @property
    def last(self) -> dict[str, float]:
        """The latest validation figures; empty before the first."""
        return self.validation[max(self.validation)] if self.validation else {}

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for checkpoints and JSON."""
        return {"losses": self.losses, "validation": [[step, row] for step, row in sorted(self.validation.items())]}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Curves:
        """Inverse of ``as_dict``."""
        return cls(list(fields["losses"]), {int(step): dict(row) for step, row in fields["validation"]})

    def write_csv(self, path: Path) -> None:
        """A row per step: ``step, loss``, and validation figures if any. Floats are written exactly."""
        names = sorted({name for row in self.validation.values() for name in row})
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["step", "loss", *(f"validation_{name}" for name in names)])
        for step, loss in enumerate(self.losses, 1):
            row = self.validation.get(step, {})
            writer.writerow([step, repr(loss), *(repr(row[name]) if name in row else "" for name in names)])
        with atomic_write(path) as file:
            file.write(text.getvalue().encode())


def draw_curves(curves: Mapping[str, Sequence[Curves]], path: Path, title: str = "", description: str = "") -> None:
    """Training and validation loss over steps as PNG: a colour for each name, a line for each of its runs.

    Args:
        curves: by name, the runs that share it, such as those of several seeds.
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
    training, validation = figure.subplots(1, 2)
    for index, (name, runs) in enumerate(curves.items()):
        style: dict[str, Any] = {"color": _COLOURS[index % len(_COLOURS)], "linewidth": 1}
        for number, run in enumerate(runs):
            label = None if number else name
            training.plot(range(1, len(run.losses) + 1), _smooth(run.losses), label=label, **style)
            steps = [step for step, row in sorted(run.validation.items()) if "loss" in row]
            validation.plot(steps, [run.validation[step]["loss"] for step in steps], ".-", label=label, **style)
    training.set_title(f"training loss, mean of the last {_SMOOTHED_OVER} steps", loc="left", fontsize=9)
    validation.set_title("validation loss", loc="left", fontsize=9)
    for axes in (training, validation):
        axes.set_xlabel("step")
        axes.grid(linewidth=0.4)
    training.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=120, metadata={"Software": None, "Description": description or None})


def _smooth(losses: Sequence[float]) -> list[float]:
    """The trailing mean of each step, over fewer steps at the start."""
    windows = (losses[max(0, end - _SMOOTHED_OVER) : end] for end in range(1, len(losses) + 1))
    return [sum(window) / len(window) for window in windows]


# Checkpoints


@dataclass
class Checkpoint:
    """A run after ``step`` steps, without the state of random generators, which every step seeds anew.

    ``model`` and ``optimizer`` are state dicts. Only a run with equal ``settings`` can resume from it.
    """

    settings: dict[str, Any]
    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any]
    curves: Curves


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write ``path`` atomically; creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {**vars(checkpoint), "curves": checkpoint.curves.as_dict()}
    with atomic_write(path) as file:
        torch.save(fields, file)


def load_checkpoint(path: Path, settings: Mapping[str, Any], map_location: torch.device | str = "cpu") -> Checkpoint:
    """Read a file of ``save_checkpoint``.

    Raises:
        FileFormatError: the file is damaged or not a checkpoint.
        QFrameworkError: the checkpoint belongs to a run with other settings.
    """
    try:
        fields = torch.load(path, map_location=map_location, weights_only=True)
        checkpoint = Checkpoint(
            **{**fields, "settings": dict(fields["settings"]), "curves": Curves.from_dict(fields["curves"])}
        )
    except (
        RuntimeError,
        pickle.UnpicklingError,
        EOFError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
    ) as error:
        raise FileFormatError(f"{path} is not a checkpoint of a training run: {error!r}"[:300]) from error
    wanted = json.loads(json.dumps(dict(settings)))
    names = sorted({*checkpoint.settings, *wanted})
    changed = [name for name in names if checkpoint.settings.get(name) != wanted.get(name)]
    if changed:
        told = "; ".join(f"{name} was {checkpoint.settings.get(name)!r}, is {wanted.get(name)!r}" for name in changed)
        raise QFrameworkError(f"{path} is of a run with other settings ({told}). Use the same, or a new folder")
    return checkpoint
