"""Accuracy of quantized models that are trained from a seed: digits with outliers, and segmentation.

``digits``: vision transformers on scikit-learn's digits with transplanted outlier channels, for several seeds, which
determine the training, the held-out images and the outliers. ``shapes``: a SAM-type model on textured shapes with box
prompts, whose image encoder is quantized. Models are loaded from ``--build``, or trained and saved there. Nothing is
timed: converted graphs run in PyTorch, with the same integers as the kernels. Equal arguments give equal rows.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.accuracy_cases import MAIN, STEPS
from benchmarks.harness import argument_parser, comma_separated
from benchmarks.machine import describe_machine
from demos import shapes_sam
from qframework import quantize
from qframework.errors import FileFormatError
from qframework.evaluation import digits, digits_vit
from qframework.evaluation.comparison import Configuration
from qframework.evaluation.image_folder import TensorBatches
from qframework.evaluation.metric import task_counts
from qframework.evaluation.models import Classifier
from qframework.evaluation.outliers import transplant_outliers
from qframework.evaluation.tasks import Classification, Task
from qframework.files import write_text
from qframework.outputs import output_folder

SCHEMA = 1
TASKS = ("digits", "shapes")
OUTLIER_CHANNELS, OUTLIER_FACTOR = 4, 100.0
BATCH = 64


@dataclass(frozen=True)
class Row:
    """One configuration of one model: top-1 or mean IoU in percent, and the counts it is computed from."""

    task: str
    model: str
    seed: int
    configuration: str
    value: float
    counts: dict[str, int]


class Subject(NamedTuple):
    """A task with the name and the seed of its model."""

    task: str
    model: str
    seed: int
    measured: Task


class Rows:
    """The rows of one run; the file is rewritten after each row, so an interrupted run keeps its rows."""

    def __init__(self, path: Path | None, smoke: bool) -> None:
        self.path, self.smoke = path, smoke
        self.configurations: dict[str, Any] = {}  # by name
        self.machine = describe_machine("cpu")
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Append, print and write."""
        self.rows.append(row)
        print(f"{row.task:8} {row.model:8} {row.seed:2}  {row.configuration:32} {row.value:8.3f}", flush=True)
        if self.path is not None:
            write_text(self.path, json.dumps(self.to_json(), indent=1) + "\n")

    def to_json(self) -> dict[str, Any]:
        head = {"schema": SCHEMA, "benchmark": "accuracy", "smoke": self.smoke, "machine": self.machine}
        return {**head, "configurations": self.configurations, "rows": [asdict(row) for row in self.rows]}


def load_rows(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Machine and rows of a file of ``Rows``; no rows for a smoke run. Raises FileFormatError for other files."""
    try:
        document = json.loads(path.read_text())
        if (document["schema"], document["benchmark"]) != (SCHEMA, "accuracy"):
            raise FileFormatError(
                f"{path}: schema and benchmark must be {SCHEMA} and 'accuracy', got {document['schema']!r} and "
                f"{document['benchmark']!r}"
            )
        rows = [Row(**row) for row in document["rows"]]
        return document["machine"], [] if document["smoke"] else rows
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise FileFormatError(f"{path} is not a result file of benchmarks.accuracy: {error!r}") from error


# Subjects -------------------------------------------------------------------------------------------------------------


def digits_subjects(build: Path, sizes: Iterable[str], seeds: int) -> Iterator[Subject]:
    """Digits ViTs with outliers, for each size and seed."""
    for size in sizes:
        for seed in range(seeds):
            config = digits_vit.sized(size, seed)
            model = digits_vit.load_or_train(build / f"digits_vit-{size}-{seed}.safetensors", config)
            yield Subject("digits", size, seed, digits_task(model, seed))


def digits_task(model: nn.Module, seed: int) -> Task:
    """Top-1 on the images held out by ``seed``, of the model with outlier channels."""
    data = digits.load_digits(seed)
    held_out, calibration = TensorBatches(data.held_out, BATCH), TensorBatches(data.calibration, BATCH)
    images, _ = next(iter(calibration))
    hard = transplant_outliers(model, images, channels=OUTLIER_CHANNELS, factor=OUTLIER_FACTOR, seed=seed)
    return Classification(Classifier("digits", hard, {}), held_out, calibration)


def smoke_subjects(folder: Path) -> Iterator[Subject]:
    """Both tasks, with barely trained models."""
    config = digits_vit.TrainingConfig(embed_dim=24, depth=1, epochs=1)
    yield Subject("digits", "smoke", 0, digits_task(digits_vit.train(config, show_progress=False), 0))
    sam = shapes_sam.SamTrainingConfig(
        image_size=64, embed_dim=16, depth=2, global_blocks=(1,), decoder_dim=16, images=4, epochs=1
    )
    task = shapes_sam.box_segmentation(folder, sam, images=3, calibration_images=2, show_progress=False)
    yield Subject("shapes", "smoke", 0, task)


# Measuring ------------------------------------------------------------------------------------------------------------


def measure(subject: Subject, configurations: Mapping[str, Configuration], rows: Rows) -> None:
    """A row for each configuration."""
    for name, configuration in configurations.items():
        counts = task_counts(subject.measured, module(subject.measured, configuration))
        value = next(iter(subject.measured.figures(counts).values()))
        identity = subject.task, subject.model, subject.seed, name
        rows.configurations[name] = configuration.to_dict()
        rows.add(Row(*identity, value, counts))


def module(task: Task, configuration: Configuration) -> nn.Module:
    """The task's module, quantized by the configuration if it is not float."""
    if configuration.config is None:
        return task.module
    calibration = list(task.calibration() or ()) if configuration.needs_calibration else None
    return quantize(
        task.module, task.example(), configuration.config, calibration, recipe=configuration.recipe, skip=()
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on the CPU; returns the exit status."""
    parser = argument_parser("accuracy", __doc__, "document")
    parser.add_argument("--tasks", type=comma_separated(TASKS), default=list(TASKS))
    parser.add_argument("--sizes", type=comma_separated(digits_vit.SIZES), default=list(digits_vit.SIZES))
    parser.add_argument("--seeds", type=int, default=5, help="of the digits' models (default: 5)")
    parser.add_argument("--images", type=int, default=200, help="held-out images of shapes (default: 200)")
    parser.add_argument("--build", type=output_folder, default=Path("build"), help="where checkpoints are kept")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)  # float sums depend on the number of threads
    rows = Rows(arguments.output, arguments.smoke)
    if arguments.smoke:
        with tempfile.TemporaryDirectory() as folder:
            for subject in smoke_subjects(Path(folder)):
                measure(subject, MAIN, rows)
        return 0
    for subject in _subjects(arguments):
        measure(subject, {**MAIN, **STEPS}, rows)
    return 0


def _subjects(arguments: argparse.Namespace) -> Iterator[Subject]:
    if "digits" in arguments.tasks:
        yield from digits_subjects(arguments.build, arguments.sizes, arguments.seeds)
    if "shapes" in arguments.tasks:
        task = shapes_sam.box_segmentation(arguments.build / "shapes", images=arguments.images)
        yield Subject("shapes", "sam", shapes_sam.SamTrainingConfig().seed, task)


if __name__ == "__main__":
    sys.exit(main())
