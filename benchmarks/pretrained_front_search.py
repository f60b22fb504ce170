"""The step ``search`` of ``pretrained_front``: what ``tune`` finds by stored times, measured on other crops too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pretrained import EVALUATION_SEED
from benchmarks.pretrained_data import Crops, crops
from benchmarks.pretrained_front_cases import (
    FULL,
    MEANINGS,
    SMALL_BATCH,
    TRIED,
    VARIANTS,
    Settings,
    call_name,
    digest,
    uniform,
)
from benchmarks.pretrained_tasks import correspondences
from qframework.conversion.exported import export_model
from qframework.errors import FileFormatError
from qframework.tuning import tune
from qframework.tuning.assignment import Assignment, Meanings
from qframework.tuning.candidates import Candidates
from qframework.tuning.journal import Journal
from qframework.tuning.layer_times import zero_point_milliseconds
from qframework.tuning.layers import Operands, find_layers
from qframework.tuning.results import Trial
from qframework.tuning.search import pareto

_EXAMPLES = 8  # that the noise of a layer is measured on
_STEP = 1.0  # points of correspondences between configurations of the front that are timed


class StoredTimer:
    """The times of a file for ``tune``, per batch of ``images``."""

    def __init__(self, stored: Mapping[str, Any], images: int) -> None:
        self._stored, self._share = stored, images / stored["batch"]

    def layer(self, operands: Operands, choice: str) -> float:
        """Milliseconds of one call. Raises FileFormatError for a call that was not timed."""
        try:
            return self._stored["milliseconds"][call_name(operands)][choice] * self._share
        except KeyError as error:
            raise FileFormatError(f"the times must hold {call_name(operands)!r} as {choice!r}, got none") from error

    def zero_point(self, operands: Operands) -> float:
        """Milliseconds of a zero point on a GPU, by rule."""
        return zero_point_milliseconds(operands, "cuda")

    def model(self, module: Any) -> float:
        """Images per second of the float model."""
        return float(self._stored["float_images_per_second"])


def search(
    settings: Settings, stored: Mapping[str, Any], budgets: Sequence[float], journal_path: Path | None
) -> dict[str, Any]:
    """The trials of ``tune`` for each budget and of uniform configurations; which are on its front.

    ``tune`` chooses by correspondences of ``settings.crops`` crops. Those of ``settings.held_out`` others are measured
    for the front and uniform configurations.
    """
    model = settings.network(trained=settings is FULL)
    preprocessed_for: Any = model.model
    calibration = list(crops(settings.calibration, 0, preprocessed_for, settings.size).images.split(SMALL_BATCH))
    seen = _Kept(model, crops(settings.crops, EVALUATION_SEED + 1, preprocessed_for, settings.size))
    images = seen.data.images[:_EXAMPLES]
    journal = Journal(journal_path, {"crops": settings.crops, "calibration": settings.calibration})
    trials: dict[Assignment, Trial] = {}
    for budget in budgets:
        found = tune(
            model,
            images,
            seen,
            calibration,
            max_drop=budget,
            variants=VARIANTS,
            meanings=Meanings(observers=TRIED),
            compiled=False,
            timer=StoredTimer(stored, len(images)),  # type: ignore[arg-type]
            journal=journal,
        )
        trials |= {trial.assignment: trial for trial in found.trials}
    rows = _Rows(
        Candidates(export_model(model, images), images, calibration, MEANINGS),
        seen,
        _Kept(model, crops(settings.held_out, EVALUATION_SEED + 2, preprocessed_for, settings.size)),
        journal,
    )
    sizes = {"crops": settings.crops, "held_out_crops": settings.held_out, "calibration": settings.calibration}
    observers = {name: each.to_dict() for name, each in MEANINGS.observers.items()}
    return {**sizes, "max_drop": list(budgets), "observers": observers, "trials": rows.of(list(trials.values()))}


@dataclass(frozen=True)
class _Rows:
    """Describes trials and uniform configurations, and measures what is missing of them."""

    candidates: Candidates
    seen: _Kept
    held_out: _Kept
    journal: Journal

    def of(self, trials: Sequence[Trial]) -> list[dict[str, Any]]:
        """One row for each."""
        layers = find_layers(self.candidates.exported, self.candidates.images)
        named = {each: name for name, each in uniform(layers).items()}
        front = {trial.assignment for trial in [*thin_front(trials), *best_of_kernels(trials, named)]}
        kept = {trial.assignment: trial.metric for trial in trials}
        for assignment, name in named.items():
            if assignment not in kept:
                kept[assignment] = self._measured(f"metric {name}", assignment, self.seen)
        speeds = {trial.assignment: trial.estimated_images_per_second for trial in trials}
        rows = []
        for assignment, correspondences_kept in kept.items():
            row = {
                "configuration": named.get(assignment, ""),
                "correspondences": correspondences_kept,
                "estimated_images_per_second": speeds.get(assignment),
                "front": assignment in front,
                "layers": MEANINGS.kernels(assignment).count(),
                "kernels": kernels_name(assignment, named),
                "assignment": assignment.to_dict(),
            }
            if row["configuration"] or row["front"]:
                key = f"metric on {len(self.held_out.data.images)} others {digest(assignment.to_dict())}"
                row["held_out"] = self._measured(key, assignment, self.held_out)
            rows.append(row)
        return rows

    def _measured(self, key: str, assignment: Assignment, kept: _Kept) -> float:
        return self.journal(key, lambda: kept(self.candidates.quantized(assignment)))


def thin_front(trials: Sequence[Trial]) -> list[Trial]:
    """The Pareto front of the search's estimates, fastest first, each at least a point better than the one before."""
    points = [(trial.estimated_images_per_second, trial.drop) for trial in trials]
    found: list[Trial] = []
    for trial in (trials[index] for index in pareto(points)):
        if not found or trial.metric >= found[-1].metric + _STEP:
            found.append(trial)
    return found


def best_of_kernels(trials: Sequence[Trial], configurations: Iterable[Assignment]) -> list[Trial]:
    """The most accurate trial on the kernels of each configuration, which ``tune`` measures whole in any case."""
    wanted = set(map(MEANINGS.kernels, configurations))
    found: dict[Assignment, Trial] = {}
    for trial in sorted(trials, key=lambda trial: trial.drop):
        found.setdefault(MEANINGS.kernels(trial.assignment), trial)
    return [trial for kernels, trial in found.items() if kernels in wanted]


class _Kept:
    """Correspondences kept by a graph, in percent of those of the float model."""

    def __init__(self, model: nn.Module, data: Crops) -> None:
        self.data = data
        self._expected = self._patches(model)

    def __call__(self, graph: Callable[[Tensor], Tensor]) -> float:
        return 100 * correspondences(self._expected, self._patches(graph), self.data.photograph)

    @torch.no_grad()
    def _patches(self, graph: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.cat([graph(batch) for batch in self.data.images.split(SMALL_BATCH)])[:, 1:]


def kernels_name(assignment: Assignment, named: Mapping[Assignment, str]) -> str:
    """Names the kernels of an assignment: as the first uniform configuration that runs them, or by a digest."""
    kernels = MEANINGS.kernels(assignment)
    same = (name for each, name in named.items() if MEANINGS.kernels(each) == kernels)
    return next(same, digest(kernels.to_dict()))


def wanted_whole(document: Mapping[str, Any]) -> dict[str, Assignment]:
    """The uniform configurations and the front of a file of ``search``, by the name of their kernels."""
    trials = [trial for trial in document["trials"] if trial["configuration"] or trial["front"]]
    trials = [trial for trial in trials if set(trial["layers"]) - {"linear float", "attention float"}]
    trials.sort(key=lambda trial: not trial["configuration"])
    found: dict[str, Assignment] = {}
    for trial in trials:
        found.setdefault(trial["kernels"], Assignment.from_dict(trial["assignment"]))
    return found
