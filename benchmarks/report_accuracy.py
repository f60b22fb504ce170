"""Generates ``docs/accuracy.md`` from the files in ``benchmarks/results/accuracy/``, called by benchmarks.report."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report_front, report_pretrained
from benchmarks.accuracy import OUTLIER_CHANNELS, OUTLIER_FACTOR, TASKS, Row, load_rows
from benchmarks.tables import machine_line, table
from qframework.evaluation import digits_vit

FP32 = "FP32"

FOLDER = "accuracy"  # below the folder of results
NAME = "accuracy.md"
HEAD = """# Accuracy

`python -m benchmarks.report` generates this page from the files in `benchmarks/results/accuracy/`. Do not edit it.
[Keeping accuracy](accuracy-guide.md) explains how to choose a configuration. INT8 has static scales, from min-max
calibration unless noted otherwise, INT8-D has dynamic scales. Converted graphs run in PyTorch, which simulates INT8 in
float.
"""
TRAINED_HERE = """## Models trained from a seed

`python -m benchmarks.accuracy` trains the models, unless `build/` holds them, and measures them on a CPU; equal seeds
give equal figures. Points lost are relative to the same model in FP32; negative values are gains. The best recipe of
these rows is that of their commit, with smoothing, channel scales, GPTQ and bias correction.
"""
NOTHING = """
## Nothing measured yet

There are no results. `python -m benchmarks.accuracy --output benchmarks/results/accuracy/cpu.json` creates the first.
"""
TITLES = {
    "digits": "Digits ViTs with outlier channels, top-1",
    "shapes": "Segmentation of textured shapes, mean IoU",
}
NOTES = {
    "digits": f"""timm's VisionTransformer on scikit-learn's handwritten digits, in several sizes, with the outliers of
large transformers: {OUTLIER_CHANNELS} channels behind every LayerNorm are {OUTLIER_FACTOR:g} times as large, and the
weights that read them smaller by the same factor, which does not change the function in FP32. The seed determines the
training, the held-out third of the images, and the outliers.
""",
    "shapes": """A small SamModel of transformers, trained with box prompts on shapes with textures from scikit-image's
photographs. It has windows, global attention and relative positions as in SAM. The image encoder is quantized; prompts
and masks stay in FP32. Held-out pictures share no photograph with training or calibration. After
`python examples/train_sam_shapes.py`, which makes the model and the pictures, `examples/coco_sam.py build/shapes/model
--images build/shapes/held_out/images --annotations build/shapes/held_out/instances.json` evaluates the model as on
COCO.
""",
}


@dataclass(frozen=True)
class Promise:
    """A promise that a configuration loses at most ``drop`` points, or with ``at_least`` no fewer."""

    task: str
    configuration: str
    drop: float
    at_least: bool = False

    def holds(self, drop: float) -> bool:
        """Whether a mean drop over the seeds meets the promise."""
        return drop >= self.drop if self.at_least else drop <= self.drop

    @property
    def must(self) -> str:
        return f"{'at least' if self.at_least else 'at most'} {self.drop:g}"


PROMISES = (
    Promise("digits", "INT8", 5.0, at_least=True),
    Promise("digits", "INT8 (best recipe)", 0.5),
    Promise("digits", "INT8 + attention (best recipe)", 0.7),
    Promise("digits", "INT8-D (best recipe)", 0.2),
    Promise("digits", "INT8-D + attention (best recipe)", 0.7),
    Promise("shapes", "INT8 (best recipe)", 0.5),
    Promise("shapes", "INT8 + attention (best recipe)", 0.5),
    Promise("shapes", "INT8-D (best recipe)", 0.5),
    Promise("shapes", "INT8-D + attention (best recipe)", 0.5),
)


@dataclass(frozen=True)
class Measured:
    """The newest rows of one model of a task, and their machine."""

    task: str
    model: str
    machine: dict[str, Any]
    rows: list[Row]

    def configurations(self) -> list[str]:
        """In the order measured."""
        return list(dict.fromkeys(row.configuration for row in self.rows))

    def values(self, configuration: str) -> dict[int, float]:
        """Percent by seed."""
        return {row.seed: row.value for row in self.rows if row.configuration == configuration}

    def drops(self, configuration: str) -> list[float]:
        """Points below FP32, for each seed measured in both."""
        fp32 = self.values(FP32)
        return [fp32[seed] - value for seed, value in self.values(configuration).items() if seed in fp32]

    @property
    def count(self) -> int:
        """Images or masks counted, over all seeds."""
        counts = (row.counts for row in self.rows if row.configuration == FP32)
        return sum(each.get("masks", each["images"]) for each in counts)


def load(folder: Path) -> list[Measured]:
    """The newest rows of each model, by task, without smoke runs. Raises FileFormatError for other files."""
    found: dict[tuple[str, str], Measured] = {}
    files = [load_rows(path) for path in sorted(folder.glob("*.json"))]
    for machine, rows in sorted(files, key=lambda file: str(file[0].get("date"))):
        for task, model in dict.fromkeys((row.task, row.model) for row in rows):
            own = [row for row in rows if (row.task, row.model) == (task, model)]
            found[task, model] = Measured(task, model, machine, own)
    order = {model: place for place, model in enumerate(digits_vit.SIZES)}
    return sorted(found.values(), key=lambda each: (TASKS.index(each.task), order.get(each.model, len(order))))


def render(
    measured: Sequence[Measured],
    pretrained: Sequence[report_pretrained.Measured] = (),
    front: report_front.Front | None = None,
) -> str:
    """The whole page as Markdown."""
    others = "\n".join(filter(None, [report_pretrained.render(pretrained), report_front.render(front)]))
    if not measured:
        return "\n".join(filter(None, [HEAD, others])) + NOTHING
    sections = (_section(task, [each for each in measured if each.task == task]) for task in TASKS)
    return "\n".join(filter(None, [HEAD, others, TRAINED_HERE, _promises(measured), *sections]))


def _promises(measured: Sequence[Measured]) -> str:
    rows = [
        [TITLES[each.task], each.model, promise.configuration, promise.must, *_outcome(promise, each)]
        for promise in PROMISES
        for each in measured
        if each.task == promise.task
    ]
    header = ["what", "model", "configuration", "points lost must be", "mean", "worst seed", ""]
    return f"### Targets\n\n{table(header, rows)}"


def _outcome(promise: Promise, measured: Measured) -> list[str]:
    drops = measured.drops(promise.configuration)
    if not drops:
        return ["", "", "not measured"]
    mean = statistics.fmean(drops)
    return [points(mean), points(max(drops)), "PASS" if promise.holds(mean) else "FAIL"]


def _section(task: str, measured: Sequence[Measured]) -> str:
    """The section of a task; empty without models."""
    return "\n".join([f"### {TITLES[task]}\n", NOTES[task], *map(_model, measured)]) if measured else ""


def _model(measured: Measured) -> str:
    """The table of a model, and its machine."""
    rows = []
    for name in measured.configurations():
        values, drops = list(measured.values(name).values()), measured.drops(name)
        lost = ["", ""] if name == FP32 or not drops else [points(statistics.fmean(drops)), points(max(drops))]
        rows.append([name, points(statistics.fmean(values)), *lost])
    seeds = len(measured.values(FP32))
    title = f"#### {measured.model}: {seeds} seed{'' if seeds == 1 else 's'}, {measured.count} counted\n"
    header = ["configuration", "mean %", "points lost", "worst seed"]
    return f"{title}\n{table(header, rows)}\n{machine_line(measured.machine, {})}"


def points(value: float) -> str:
    """Two decimals, without negative zero."""
    return f"{round(value, 2) + 0.0:.2f}"
