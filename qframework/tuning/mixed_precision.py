"""Mixed precision by measurement: the fastest assignment of choices to layers within an accuracy budget."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qframework.attention.adaptive import speed_order
from qframework.conversion.exported import export_model
from qframework.errors import QFrameworkError
from qframework.evaluation.progress import progress_bar
from qframework.evaluation.speed import throughput
from qframework.files import write_json
from qframework.quantizer import Recipe, dynamic_attention
from qframework.tuning.assignment import Assignment, Key, Meanings
from qframework.tuning.candidates import Candidates, Metric, checked_metric
from qframework.tuning.journal import Journal
from qframework.tuning.layer_times import DYNAMIC, FLOAT, STATIC, kind_of, milliseconds, zero_point_milliseconds
from qframework.tuning.layers import Layer, Operands, find_layers
from qframework.tuning.observer_choice import uniform_kernels, with_best_observers
from qframework.tuning.plots import draw_front
from qframework.tuning.results import Measured, Trial
from qframework.tuning.search import Cost, Costs, climb, ladder, pareto, rungs, total_time

if TYPE_CHECKING:
    from rich.table import Table

_logger = logging.getLogger(__name__)
_ROUNDING = 1e-9  # of a difference of two percentages


@dataclass(frozen=True)
class Tuning:
    """The result of ``tune``.

    Attributes:
        baseline: metric of the float model.
        max_drop: the budget.
        met: whether a quantized assignment is within the budget, or none is faster than float.
        chosen: the fastest assignment within the budget, or the nearest one if there is none.
        float_model: the float model, measured like ``chosen``.
        trials: the assignments whose metric was measured, in order.
        measured: the assignments that were measured whole, without the float model.
        meanings: the configurations of static and dynamic.
        recipe: steps around the calibration.
    """

    baseline: float
    max_drop: float
    met: bool
    chosen: Measured
    float_model: Measured
    trials: list[Trial]
    measured: list[Measured]
    meanings: Meanings
    recipe: Recipe | None = None

    def front(self) -> list[Trial]:
        """The Pareto front of the trials in estimated speed and drop, fastest first."""
        points = [(trial.estimated_images_per_second, trial.drop) for trial in self.trials]
        return [self.trials[index] for index in pareto(points)]

    def slower_than_float(self) -> str | None:
        """A sentence if nothing that was measured runs faster in INT8 than the float model, else None."""
        quantized = [each for each in self.measured if not each.assignment.is_float]
        if not quantized:
            return None
        fastest = max(quantized, key=lambda each: each.images_per_second)
        ratio = fastest.images_per_second / self.float_model.images_per_second
        if ratio > 1:
            return None
        return (
            f"INT8 is slower than float here: the fastest of {len(quantized)} quantized assignments reaches "
            f"{ratio:.2f} times the float model's speed"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; ``Plan`` reads it. Timings, which differ between runs, are under ``"timings"``."""
        found = self.chosen.assignment
        return {
            "format": 1,
            "quantizer": found.quantizer(self.meanings).to_dict(),
            "options": found.options(),
            "recipe": self.recipe and self.recipe.to_dict(),
            "assignment": found.to_dict(),
            "metric": self.chosen.metric,
            "baseline": self.baseline,
            "drop": self.chosen.drop,
            "max_drop": self.max_drop,
            "met": self.met,
            "front": [
                {"drop": trial.drop, "metric": trial.metric, "layers": trial.assignment.count()}
                for trial in self.front()
            ],
            "timings": {
                "images_per_second": self.chosen.images_per_second,
                "float_images_per_second": self.float_model.images_per_second,
                "front_estimated_images_per_second": [each.estimated_images_per_second for each in self.front()],
            },
        }

    def save(self, path: Path) -> None:
        """Write ``to_dict()`` to ``path`` as JSON."""
        write_json(path, self.to_dict(), indent=2)

    def plot(self, path: Path) -> None:
        """Draw drop against speed to a PNG. Raises ModuleNotFoundError if matplotlib is missing."""
        measured = {
            "float": [self.float_model],
            "measured whole": self.measured,
            "chosen" if self.met else "nearest": [self.chosen],
        }
        draw_front(self.trials, self.front(), measured, self.max_drop, path)

    def table(self) -> Table:
        """The assignments that were measured whole, as a table for the terminal."""
        from rich.table import Table

        table = Table(title=f"Drop of at most {self.max_drop:g}; float: {self.baseline:.2f}")
        table.add_column("layers", overflow="fold")
        for name in ("metric", "drop", "images/s", ""):
            table.add_column(name, justify="right", no_wrap=True)
        for each in [self.float_model, *self.measured]:
            layers = ", ".join(f"{count} {name}" for name, count in each.assignment.count().items())
            mark = ("chosen" if self.met else "nearest") if each == self.chosen else ""
            table.add_row(layers, f"{each.metric:.2f}", f"{each.drop:+.2f}", f"{each.images_per_second:,.1f}", mark)
        return table


class Timer:
    """Times single layers and whole models on the device of ``images``."""

    def __init__(self, images: Tensor) -> None:
        self._images = images

    def layer(self, operands: Operands, choice: str) -> float:
        """Milliseconds of one call."""
        return milliseconds(operands, choice, self._images.device)

    def zero_point(self, operands: Operands) -> float:
        """Milliseconds of a zero point of a linear's input, by rule: the layer before adds it."""
        return zero_point_milliseconds(operands, self._images.device.type)

    def model(self, module: Callable[[Tensor], Any]) -> float:
        """Images per second."""
        return throughput(module, self._images)


def tune(
    model: nn.Module,
    images: Tensor,
    metric: Metric,
    calibration: Iterable[Any],
    *,
    max_drop: float,
    variants: Sequence[str] | None = None,
    meanings: Meanings | None = None,
    recipe: Recipe | None = None,
    batches: int | None = None,
    refinements: int = 12,
    finalists: int = 3,
    compiled: bool = True,
    timer: Timer | None = None,
    journal: Journal | None = None,
    show_progress: bool = False,
) -> Tuning:
    """Find the fastest assignment of float, static, dynamic and attention variants to the layers within a budget.

    For each layer and choice, ``tune`` measures the time of the operators on the device of ``images``, and the noise of
    the model's output with this layer alone quantized; search.py describes the search. A static layer takes the
    observer of ``meanings`` with the least noise (observer_choice.py). ``tune`` then compiles and measures
    the fastest assignments found, all linears static, the same with static attention, also with zero points if they are
    among the observers, and all linears dynamic, and chooses the fastest one within the budget. Equal measurements in a
    journal give equal results.

    Args:
        model: in eval mode, on the device of ``images``.
        images: a batch ``(B, C, H, W)`` of at least 2; speeds are measured at its size.
        metric: function of a model, higher is better: ``lambda model: top1(model, loader)``.
        calibration: a list or DataLoader of batches.
        max_drop: the budget, in points of the metric below the float model's.
        variants: attention variants to try; default: those that are fast on the device (``speed_order``).
        meanings: the configurations of static and dynamic, and the observers to try, ``Meanings(observers=OBSERVERS)``
            for all; default: min-max alone.
        recipe: steps around the calibration.
        batches: maximum number of calibration batches.
        refinements: number of steps to try beyond the best prefix of the ladder.
        finalists: number of the fastest assignments that are measured whole.
        compiled: False compiles nothing and estimates speeds from the eager float model and the layers' times.
        timer: measures times; default: on the device of ``images``.
        journal: records the measurements, to resume an interrupted run.
        show_progress: draw progress bars.

    Raises:
        QFrameworkError: there is nothing to quantize, the metric is not finite, the budget is negative, or
            ``calibration`` is an iterator.
        UnsupportedError: a variant is unknown.
    """
    if not max_drop >= 0:
        raise QFrameworkError(f"tune: max_drop must be 0 or more points of the metric, got {max_drop}")
    variants = tuple(speed_order(images.device) if variants is None else variants)
    for variant in variants:
        dynamic_attention(variant)  # refuses unknown variants early
    exported = export_model(model, images)
    work = _Work(
        Candidates(exported, images, calibration, meanings or Meanings(), recipe, batches),
        metric,
        timer or Timer(images),
        Journal() if journal is None else journal,
        compiled,
        show_progress,
    )
    layers = find_layers(exported, images)
    costs = work.costs(layers, variants)
    start = Assignment.uniform(layers)
    search = _Search(work, costs, work.whole(start), max_drop)
    best = with_best_observers(layers, costs, work.candidates.meanings)
    steps = ladder(best)
    alike = [*_uniform(layers), *uniform_kernels(layers, best, work.candidates.meanings)]
    climb(start, steps, search.fits, refinements)
    observers = _uniform_observers(layers, work.candidates.meanings)
    for assignment in (*_spread(rungs(start, steps)), *alike, *observers):
        search.fits(assignment)
    met, chosen, measured = search.finish(finalists, alike, can_be_faster=bool(steps))
    trials = list(search.trials.values())
    return Tuning(
        work.baseline(),
        max_drop,
        met,
        chosen,
        search.float_model,
        trials,
        measured,
        work.candidates.meanings,
        work.candidates.recipe,
    )


def _spread(parts: Sequence[Assignment], count: int = 6) -> list[Assignment]:
    """Evenly spaced prefixes of a ladder, for the front in the plot."""
    last = len(parts) - 1
    return [parts[index] for index in dict.fromkeys([min(1, last), *(last * k // count for k in range(1, count + 1))])]


def _uniform(layers: Sequence[Layer]) -> list[Assignment]:
    """All linears static, alone and with attention, and all dynamic: fusion can make them faster than their times."""
    together = [(STATIC, FLOAT), (DYNAMIC, FLOAT)]
    if any(layer.kind == "attention" and layer.static for layer in layers):
        together.append((STATIC, STATIC))
    return [
        Assignment(
            {layer.key: linear if layer.kind == "linear" else attention if layer.static else FLOAT for layer in layers}
        )
        for linear, attention in together
    ]


def _uniform_observers(layers: Sequence[Layer], meanings: Meanings) -> list[Assignment]:
    """All layers static with one observer, for each observer; attention without zero points."""
    found = []
    for choice in meanings.statics("linear")[1:]:
        attention = choice if choice in meanings.statics("attention") else STATIC
        choices = {"linear": choice, "attention": attention}
        found.append(Assignment({each.key: choices[each.kind] if each.static else FLOAT for each in layers}))
    return found


@dataclass
class _Work:
    """Makes the measurements through the journal."""

    candidates: Candidates
    metric: Metric
    timer: Timer
    journal: Journal
    compiled: bool
    show_progress: bool

    def baseline(self) -> float:
        return self.journal("metric float", lambda: checked_metric(self.metric, self.candidates.exported))

    @property
    def batch_size(self) -> int:
        return len(self.candidates.images)

    def costs(self, layers: Sequence[Layer], variants: Sequence[str]) -> Costs:
        """The time of every choice, and the noise of those that are faster than float; the search ignores the rest."""
        start = Assignment.uniform(layers)
        pairs = [(layer, choice) for layer in layers for choice in _choices(layer, variants, self.candidates.meanings)]
        costs: dict[Key, dict[str, Cost]] = {layer.key: {} for layer in layers}
        with progress_bar("Measuring the time of each layer", len(pairs), self.show_progress) as advance:
            for layer, choice in pairs:
                time = sum(self._time(call, choice) for call in layer.calls)
                costs[layer.key][choice] = Cost(time, math.inf)
                advance()
        faster = [(key, c) for key, each in costs.items() for c in each if each[c].time < each[FLOAT].time]
        with progress_bar("Measuring the noise of each layer", len(faster), self.show_progress) as advance:
            for key, choice in faster:
                costs[key][choice] = Cost(costs[key][choice].time, self._noise(start.changed(key, choice), key, choice))
                advance()
        for each in costs.values():
            each[FLOAT] = Cost(each[FLOAT].time, 0.0)
        return costs

    def _time(self, call: Operands, choice: str) -> float:
        kind = kind_of(choice)
        added = self.timer.zero_point(call) if self.candidates.meanings.adds_zero_point(choice) else 0.0
        return added + self.journal(f"time {kind}, {call}", lambda: self.timer.layer(call, kind))

    def _noise(self, alone: Assignment, key: Key, choice: str) -> float:
        kind, name = key
        return self.journal(
            f"noise {kind} {name} {choice}", lambda: self.candidates.output_noise(self.candidates.quantized(alone))
        )

    def metric_of(self, assignment: Assignment) -> float:
        """The metric of the converted graph, without compiling it."""
        if assignment.is_float:
            return self.baseline()
        return self.journal(
            f"metric {_digest(assignment)}",
            lambda: checked_metric(self.metric, self.candidates.quantized(assignment)),
        )

    def whole(self, assignment: Assignment, estimated: float | None = None) -> Measured:
        """Measure an assignment as it will run; uncompiled, nothing runs in INT8 and the speed is the estimate."""
        if not self.compiled and estimated is not None:
            metric = self.metric_of(assignment)
            return Measured(assignment, metric, self.baseline() - metric, estimated)

        def measure() -> dict[str, float]:
            module = self.candidates.quantized(assignment)
            if self.compiled:
                options = assignment.options()
                module = torch.compile(module, backend="qframework", dynamic=True, options=options)  # type: ignore[assignment]
            return {"images_per_second": self.timer.model(module), "metric": checked_metric(self.metric, module)}

        values = self.journal(f"whole {_digest(assignment)}", measure)
        return Measured(assignment, values["metric"], self.baseline() - values["metric"], values["images_per_second"])


class _Search:
    """The trials, and whether they are within the budget."""

    def __init__(self, work: _Work, costs: Costs, float_model: Measured, max_drop: float) -> None:
        self._work = work
        self._costs = costs
        self._max_drop = max_drop
        self.float_model = float_model
        self.trials: dict[Assignment, Trial] = {}

    def fits(self, assignment: Assignment) -> bool:
        """Whether the measured drop is within the budget."""
        if assignment not in self.trials:
            metric = self._work.metric_of(assignment)
            drop = self._work.baseline() - metric
            self.trials[assignment] = Trial(assignment, metric, drop, self._estimate(assignment))
            _logger.info("%s: drop %.3f", assignment.count(), drop)
        return self._is_inside(self.trials[assignment])

    def _is_inside(self, found: Trial | Measured) -> bool:
        return found.drop <= self._max_drop + _ROUNDING

    def _estimate(self, assignment: Assignment) -> float:
        """Estimated images per second: the float model's time with the times of its layers replaced."""
        images = self._work.batch_size
        whole = images / self.float_model.images_per_second * 1e3
        before = total_time(Assignment(dict.fromkeys(assignment, FLOAT)), self._costs)
        after = total_time(assignment, self._costs)
        # If the layers' times add up to more than the model's, scale the model's time instead.
        return images / (whole - before + after if before < whole else whole * after / before) * 1e3

    def finish(
        self, finalists: int, always: Sequence[Assignment], can_be_faster: bool
    ) -> tuple[bool, Measured, list[Measured]]:
        """Measure the trials that fit; returns whether the budget is met, the choice, and all measured."""
        quantized = [trial for trial in self.trials.values() if not trial.assignment.is_float]
        kernels = self._work.candidates.meanings.kernels
        fitting: dict[Assignment, Trial] = {}  # of those that run the same kernels, the most accurate
        for trial in sorted(quantized, key=lambda trial: (-trial.estimated_images_per_second, trial.drop)):
            if self._is_inside(trial):
                fitting.setdefault(kernels(trial.assignment), trial)
        always_run = set(map(kernels, always))
        measured: list[Measured] = []
        for rank, (run, trial) in enumerate(fitting.items()):
            # A trial within the budget may miss it once compiled, so go on until one fits.
            if rank < finalists or run in always_run or not any(map(self._is_inside, measured)):
                measured.append(self._work.whole(trial.assignment, trial.estimated_images_per_second))
        inside = [each for each in measured if self._is_inside(each)]
        if inside or not can_be_faster or not quantized:
            return True, max([self.float_model, *inside], key=lambda each: each.images_per_second), measured
        nearest = min(quantized, key=lambda trial: (trial.drop, -trial.estimated_images_per_second))
        found = self._work.whole(nearest.assignment, nearest.estimated_images_per_second)
        measured = measured if found in measured else [*measured, found]
        return self._is_inside(found), found, measured


def _choices(layer: Layer, variants: Sequence[str], meanings: Meanings) -> list[str]:
    static = meanings.statics(layer.kind) if layer.static else []
    return [FLOAT, *static, *([DYNAMIC] if layer.kind == "linear" else variants)]


def _digest(assignment: Assignment) -> str:
    return hashlib.sha256(json.dumps(assignment.to_dict(), sort_keys=True).encode()).hexdigest()[:16]
