"""The accuracy of INT8 training against BF16 over several seeds: a ViT on digits and a GPT on bytes of Python.

    python -m benchmarks.training_parity --device cuda --jobs 6 --compile --limit 480

Every finished run (task, configuration, seed) is a file under ``--output``. The same command skips finished runs and
resumes the others from their last checkpoints, made every 100 steps. After ``--limit`` seconds, running workers are
killed. One process trains all seeds of a configuration and compiles once. ``--report`` only compares existing runs,
with a table and a plot for each task, and exit status 1 if a configuration misses its bound.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.boxed import Worker, shared_cores
from benchmarks.harness import argument_parser, comma_separated
from benchmarks.machine import REPOSITORY, describe_machine
from benchmarks.parity_plot import draw_differences
from benchmarks.tables import table as markdown
from demos.training_files import Curves
from demos.training_loop import Place, RunConfig, TrainingTask, train
from demos.training_tasks import DigitsTask, TextTask
from qframework.devices import device_name
from qframework.errors import QFrameworkError
from qframework.evaluation import digits_vit
from qframework.files import write_text
from qframework.kernels.blocks.format import BLOCK_SIZES, BlockSize, block_size_name
from qframework.outputs import output_folder

RESULTS = REPOSITORY / "benchmarks" / "results" / "training"
BUILD = REPOSITORY / "build" / "training_parity"
BASELINE = "bf16"


def per_block(block_size: BlockSize) -> str:
    """The configuration of INT8 in blocks of a size."""
    return f"per_block_{block_size_name(block_size)}"


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    **{per_block(size): {"precision": "int8", "block_size": size} for size in BLOCK_SIZES},
    "per_token": {"precision": "int8", "mode": "per_token"},
    "per_tensor": {"precision": "int8", "mode": "per_tensor"},
}
# The most important first, in case the time runs out.
DEFAULT = (
    BASELINE,
    per_block((1, 128)),
    per_block(32),
    per_block(128),
    "per_token",
    "per_tensor",
    per_block(64),
    per_block((32, 128)),
)
PROMISED_SEEDS = 3
NO_LIMIT = 1e6  # seconds
KEPT_EVERY = 10  # steps per mean in a tracked file


@dataclass(frozen=True)
class Subject:
    """A task, its training settings, and its metric."""

    task: TrainingTask
    config: RunConfig
    metric: str
    unit: str
    evaluate_every: int
    bound: float  # of INT8 per block behind BF16: points if more is better, else a share
    more_is_better: bool

    def behind(self, value: float, baseline: float) -> float:
        """How far ``value`` is behind ``baseline``, in the unit of ``bound``; negative if it is better."""
        return baseline - value if self.more_is_better else value / baseline - 1

    @property
    def scale(self) -> float:
        """The factor from the unit of ``bound`` to the displayed unit."""
        return 1.0 if self.more_is_better else 100.0

    @property
    def units_behind(self) -> str:
        return "points" if self.more_is_better else "percent"


SUBJECTS = {
    "digits": Subject(DigitsTask(), RunConfig(1500, 32, 7e-4, warmup=0.07), "top1", "top-1 in percent", 100, 0.3, True),
    "gpt": Subject(TextTask(), RunConfig(1500, 64, 1e-3), "loss", "loss in nats a byte", 100, 0.01, False),
}
SMOKE = {
    "digits": replace(
        SUBJECTS["digits"],
        task=DigitsTask(digits_vit.TrainingConfig(embed_dim=32, depth=1, num_heads=2)),
        config=RunConfig(2, 4, 1e-3),
    ),
    "gpt": replace(
        SUBJECTS["gpt"],
        task=TextTask(width=32, depth=1, heads=2, context=16, windows=4, limit=300_000),
        config=RunConfig(2, 4, 1e-3),
    ),
}


@dataclass(frozen=True)
class Case:
    """One run."""

    task: str
    configuration: str
    seed: int

    def __str__(self) -> str:
        return f"{self.task},{self.configuration},{self.seed}"

    def path(self, folder: Path) -> Path:
        return folder / self.task / f"{self.configuration}-{self.seed}.json"


# One run


def run(case: Case, options: argparse.Namespace) -> None:
    """Train and write the file, unless it exists."""
    subject = (SMOKE if options.smoke else SUBJECTS)[case.task]
    config = replace(subject.config, seed=case.seed, **CONFIGURATIONS[case.configuration])
    path = case.path(options.output)
    if path.exists():
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats its results only with this
    place = Place(
        device=torch.device(options.device),
        folder=options.build / case.task / f"{case.configuration}-{case.seed}",
        evaluate_every=subject.evaluate_every,
        checkpoint_every=subject.evaluate_every,
        compiled=options.compile,
        show_progress=options.jobs == 1,
    )
    outcome = train(subject.task, config, place)
    document = {
        "task": case.task,
        "configuration": case.configuration,
        "seed": case.seed,
        "smoke": options.smoke,
        "settings": {**subject.task.settings, "steps": config.steps, "batch_size": config.batch_size},
        "machine": describe_machine(place.device.type),
        "compiled": options.compile,
        "examples_per_second": round(outcome.examples_per_second, 1),
        "validation": [[step, row] for step, row in sorted(outcome.curves.validation.items())],
        "losses_every": KEPT_EVERY,
        "losses": _thinned(outcome.curves.losses),
    }
    write_text(path, json.dumps(document, indent=1) + "\n")
    figures = ", ".join(f"{name} {value:.4f}" for name, value in outcome.curves.last.items())
    print(f"{case}: {figures}, {outcome.examples_per_second:.0f} examples/s", flush=True)


def _thinned(losses: Sequence[float]) -> list[float]:
    parts = (losses[start : start + KEPT_EVERY] for start in range(0, len(losses), KEPT_EVERY))
    return [float(f"{statistics.fmean(part):.5g}") for part in parts]


def run_all(groups: Sequence[Sequence[Case]], options: argparse.Namespace) -> int:
    """Run every group in its own process, ``--jobs`` at a time; returns the number of failed runs."""
    if options.jobs == 1 and options.limit is None:
        for group in groups:
            for case in group:
                run(case, options)
            torch._dynamo.reset()  # frees the compiled code of this configuration
        return 0
    deadline = time.monotonic() + (NO_LIMIT if options.limit is None else options.limit)
    with ThreadPoolExecutor(options.jobs) as pool:
        return sum(pool.map(lambda group: _run_apart(group, options, deadline), groups))


def _run_apart(group: Sequence[Case], options: argparse.Namespace, deadline: float) -> int:
    """Make one run after the other until the deadline; returns the number of failed runs."""
    missing = [case for case in group if not case.path(options.output).exists()]
    worker, failed = None, 0
    for case in missing:
        worker = worker or Worker(_runner, options, environment=_share(options.jobs))
        for _ in worker.request(case, max(deadline - time.monotonic(), 0)):
            pass
        if worker.status is not None:
            print(f"{case} {': '.join(worker.status)}", flush=True)
            failed += worker.status[0] == "failed"
            worker.close()
            worker = None
        if time.monotonic() >= deadline:
            break
    if worker is not None:
        worker.close()
    return failed


def _runner(options: argparse.Namespace) -> Callable[[Any], Iterator[Any]]:
    """The function of a worker that trains a case and writes its file."""

    def train_one(case: Case) -> Iterator[Any]:
        run(case, options)
        yield from ()

    return train_one


def _share(jobs: int) -> dict[str, str]:
    """The environment that gives each process its share of the cores."""
    return {**shared_cores(jobs), "OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // jobs, 1))}


# All runs together


def read(folder: Path, task: str) -> dict[str, list[dict[str, Any]]]:
    """The runs of a task by configuration, in the order of CONFIGURATIONS and of the seeds."""
    documents = [json.loads(path.read_text()) for path in sorted((folder / task).glob("*.json"))]
    settings = {json.dumps(document["settings"], sort_keys=True) for document in documents}
    if len(settings) > 1:
        raise QFrameworkError(f"{folder / task}: all runs must have the same settings, got {len(settings)} kinds")
    documents.sort(key=lambda document: document["seed"])
    found = {name: [row for row in documents if row["configuration"] == name] for name in CONFIGURATIONS}
    return {name: rows for name, rows in found.items() if rows}


def final(document: dict[str, Any], metric: str) -> float:
    """The figure after the last step."""
    return float(document["validation"][-1][1][metric])


@dataclass(frozen=True)
class Comparison:
    """A configuration compared with BF16 on equal seeds; ``behind`` in points or percent, None without a pair."""

    configuration: str
    seeds: int
    mean: float
    pairs: int
    behind: float | None
    bound: float | None

    @property
    def keeps(self) -> bool:
        """Whether the bound is met, if there is one."""
        return self.bound is None or self.behind is None or self.behind <= self.bound

    @property
    def verdict(self) -> str:
        """PASS or what is missing; empty without a bound."""
        if self.bound is None:
            return ""
        if self.behind is None:
            return "not measured"
        if not self.keeps:
            return f"short of {self.bound:g} by {100 * (self.behind / self.bound - 1):.2g} percent"
        return "PASS" if self.pairs >= PROMISED_SEEDS else f"open: {self.pairs} of {PROMISED_SEEDS} seeds"


def compare(task: str, runs: dict[str, list[dict[str, Any]]]) -> list[Comparison]:
    """The mean differences of the runs' last figures from BF16's, by configuration."""
    subject = SUBJECTS[task]
    baseline = {row["seed"]: final(row, subject.metric) for row in runs.get(BASELINE, [])}
    found = []
    for name, rows in runs.items():
        values = {row["seed"]: final(row, subject.metric) for row in rows}
        behind = [subject.behind(value, baseline[seed]) for seed, value in values.items() if seed in baseline]
        mean = subject.scale * statistics.fmean(behind) if behind else None
        bound = subject.scale * subject.bound if name.startswith("per_block") else None
        found.append(Comparison(name, len(rows), statistics.fmean(values.values()), len(behind), mean, bound))
    return found


def table(task: str, runs: dict[str, list[dict[str, Any]]]) -> tuple[str, bool]:
    """A Markdown table of the means and the differences from BF16 on equal seeds, and whether all bounds are met."""
    subject, found = SUBJECTS[task], compare(task, runs)
    header = [f"{task}, {subject.unit}", "seeds", "mean", f"behind BF16, {subject.units_behind}", "must be at most", ""]
    lines = []
    for each in found:
        shown = "" if each.configuration == BASELINE or each.behind is None else f"{each.behind:+.2f}"
        bound = "" if each.bound is None else f"{each.bound:g}"
        lines.append([each.configuration, str(each.seeds), f"{each.mean:.4g}", shown, bound, each.verdict])
    return markdown(header, lines), all(each.keeps for each in found)


def report(folder: Path, tasks: Sequence[str]) -> bool:
    """Write ``<task>.md`` and ``<task>.png`` for the existing runs; returns whether all bounds are met."""
    kept = True
    for task in tasks:
        runs = read(folder, task)
        if not runs:
            continue
        text, fine = table(task, runs)
        print(text)
        kept &= fine
        write_text(folder / f"{task}.md", text)
        draw(task, runs, folder / f"{task}.png")
    return kept


def draw(task: str, runs: dict[str, list[dict[str, Any]]], path: Path, description: str = "") -> None:
    """The losses of all runs as PNG, as differences from BF16's."""
    curves = {name: {row["seed"]: _curves(row) for row in rows} for name, rows in runs.items()}
    draw_differences(curves, BASELINE, path, task, description)


def _curves(document: dict[str, Any]) -> Curves:
    """The curves of a run, with each stored mean repeated for its steps."""
    losses = [loss for loss in document["losses"] for _ in range(document["losses_every"])]
    return Curves.from_dict({"losses": losses, "validation": document["validation"]})


# Command line


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argument_parser("training_parity", __doc__, "none")
    parser.add_argument("--tasks", type=comma_separated(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--configurations", type=comma_separated(CONFIGURATIONS), default=list(DEFAULT))
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--device", type=device_name, default="cpu", help="cpu or cuda")
    parser.add_argument("--compile", action="store_true", help="torch.compile the models")
    parser.add_argument(
        "--jobs", type=int, default=1, help="configurations to train in parallel on one device (default: 1)"
    )
    parser.add_argument("--limit", type=float, help="seconds; the same command resumes later (default: none)")
    parser.add_argument(
        "--output", type=output_folder, default=RESULTS, metavar="FOLDER", help="default: the tracked one"
    )
    parser.add_argument("--build", type=output_folder, default=BUILD, metavar="FOLDER", help="checkpoints")
    parser.add_argument("--report", action="store_true", help="only compare existing runs")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the missing runs, then compare."""
    options = parse_arguments(argv)
    if options.smoke and options.output == RESULTS:
        with tempfile.TemporaryDirectory() as folder:
            options.output, options.build, options.seeds = Path(folder) / "results", Path(folder), [0]
            return _measure(options)
    return _measure(options)


def _measure(options: argparse.Namespace) -> int:
    failed = 0
    if not options.report:
        groups = [
            [Case(task, name, seed) for seed in options.seeds]
            for task in options.tasks
            for name in options.configurations
        ]
        failed = run_all(groups, options)
    kept = report(options.output, options.tasks)
    return int(failed > 0 or not (kept or options.smoke))


if __name__ == "__main__":
    sys.exit(main())
