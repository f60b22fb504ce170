"""The accuracy of INT8 training against BF16 over several seeds: a ViT on digits and a GPT on bytes of Python.

    python -m benchmarks.training_parity --device cuda --jobs 6 --compile --limit 480
    python -m benchmarks.training_parity --device cuda --jobs 8 --graphs --tasks digits_timm,digits_long,gpt,gpt_long

Every finished run (task, configuration, seed) is a file under ``--output``. The same command skips finished runs and
resumes the others from their last checkpoints. After ``--limit`` seconds, running workers are killed. One process
trains all seeds of a configuration and compiles once; with ``--graphs`` every step is a CUDA graph, and those of the
seeds overlap. The long tasks have one seed unless ``--seeds`` says otherwise, and resume once, from a checkpoint.
``--report`` only compares existing runs, with a table and a plot for each task, and exit status 1 if a configuration
misses its bound.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from demos.training_loop import Outcome, Place, RunConfig, TrainingTask, train_together
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
    per_block((1, 256)),
)
PROMISED_SEEDS = 3
LONG = (BASELINE, per_block((1, 128)))
LONGER = 20  # times as many steps
NO_LIMIT = 1e6  # seconds
KEPT_EVERY = 10  # steps per mean in a tracked file, more in a long run:
KEPT_MEANS = 150


@dataclass(frozen=True)
class Subject:
    """A task, its training settings, and its metric.

    A ``long`` subject has one seed and two configurations, and resumes from its checkpoint after half of its steps.
    """

    task: TrainingTask
    config: RunConfig
    metric: str
    unit: str
    evaluate_every: int
    bound: float  # of INT8 per block behind BF16: points if more is better, else a share
    more_is_better: bool
    long: bool = False

    @property
    def seeds(self) -> int:
        """How many a verdict needs."""
        return 1 if self.long else PROMISED_SEEDS

    @property
    def configurations(self) -> tuple[str, ...]:
        """Those to compare, besides what else was run."""
        return LONG if self.long else DEFAULT

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


_DIGITS = Subject(DigitsTask(), RunConfig(1500, 32, 7e-4, warmup=0.07), "top1", "top-1 in percent", 100, 0.3, True)
_GPT = Subject(TextTask(), RunConfig(1500, 64, 1e-3), "loss", "loss in nats a byte", 100, 0.01, False)
_TIMM_TASK = DigitsTask(digits_vit.TrainingConfig(position_std=0.02))


def _longer(subject: Subject, task: TrainingTask, batch_size: int) -> Subject:
    config = replace(subject.config, steps=LONGER * subject.config.steps, batch_size=batch_size)
    return replace(subject, task=task, config=config, evaluate_every=LONGER * subject.evaluate_every, long=True)


SUBJECTS = {
    "digits": _DIGITS,
    "digits_timm": replace(_DIGITS, task=_TIMM_TASK),  # position embeddings as timm draws them
    "gpt": _GPT,
    "digits_long": _longer(_DIGITS, _TIMM_TASK, 32),
    "gpt_long": _longer(_GPT, TextTask(depth=4), 16),
}
_SMOKE_DIGITS = DigitsTask(digits_vit.TrainingConfig(embed_dim=32, depth=1, num_heads=2))
_SMOKE_TEXT = TextTask(width=32, depth=1, heads=2, context=16, windows=4, limit=300_000)
SMOKE = {
    name: replace(
        subject, task=_SMOKE_TEXT if subject.metric == "loss" else _SMOKE_DIGITS, config=RunConfig(2, 4, 1e-3)
    )
    for name, subject in SUBJECTS.items()
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


def run(cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Train runs of one task together and write their files, except those that exist."""
    cases = [case for case in cases if not case.path(options.output).exists()]
    if not cases:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats its results only with this
    subject = (SMOKE if options.smoke else SUBJECTS)[cases[0].task]
    runs = [(_config(case, subject), _place(case, subject, options)) for case in cases]
    stops = [subject.config.steps // 2] if subject.long else []
    for stop in stops:
        train_together(subject.task, [(config, replace(place, stop_after=stop)) for config, place in runs])
    outcomes = train_together(subject.task, runs)
    for case, (config, place), outcome in zip(cases, runs, outcomes, strict=True):
        document = _document(case, subject, config, place, outcome) | {"smoke": options.smoke, "resumed_at": stops}
        write_text(case.path(options.output), json.dumps(document, indent=1) + "\n")
        figures = ", ".join(f"{name} {value:.4f}" for name, value in outcome.curves.last.items())
        print(f"{case}: {figures}, {outcome.examples_per_second:.0f} examples/s", flush=True)


def _config(case: Case, subject: Subject) -> RunConfig:
    return replace(subject.config, seed=case.seed, **CONFIGURATIONS[case.configuration])


def _place(case: Case, subject: Subject, options: argparse.Namespace) -> Place:
    return Place(
        device=torch.device(options.device),
        folder=options.build / case.task / f"{case.configuration}-{case.seed}",
        evaluate_every=subject.evaluate_every,
        checkpoint_every=subject.evaluate_every if subject.long or not options.graphs else 0,  # slower than a graph
        compiled=options.compile,
        graphs=options.graphs,
        show_progress=options.jobs == 1,
    )


def _document(case: Case, subject: Subject, config: RunConfig, place: Place, outcome: Outcome) -> dict[str, Any]:
    """The tracked file."""
    losses = outcome.curves.losses
    every = max(KEPT_EVERY, len(losses) // KEPT_MEANS)
    return {
        "task": case.task,
        "configuration": case.configuration,
        "seed": case.seed,
        "settings": {**subject.task.settings, "steps": config.steps, "batch_size": config.batch_size},
        "machine": describe_machine(place.device.type),
        "compiled": place.compiled,
        "graphs": place.graphs,
        "examples_per_second": round(outcome.examples_per_second, 1),
        "validation": [[step, row] for step, row in sorted(outcome.curves.validation.items())],
        "losses_every": every,
        "losses": _thinned(losses, every),
    }


def _thinned(losses: Sequence[float], every: int) -> list[float]:
    parts = (losses[start : start + every] for start in range(0, len(losses), every))
    return [float(f"{statistics.fmean(part):.5g}") for part in parts]


def run_all(groups: Sequence[Sequence[Case]], options: argparse.Namespace) -> int:
    """Run every group in its own process, ``--jobs`` at a time; returns the number of failed runs."""
    if options.jobs == 1 and options.limit is None:
        for group in groups:
            for cases in _together(group, options):
                run(cases, options)
            torch._dynamo.reset()  # frees the compiled code of this configuration
        return 0
    deadline = time.monotonic() + (NO_LIMIT if options.limit is None else options.limit)
    with ThreadPoolExecutor(options.jobs) as pool:
        return sum(pool.map(lambda group: _run_apart(group, options, deadline), groups))


def _together(group: Sequence[Case], options: argparse.Namespace) -> list[list[Case]]:
    """The missing runs of a group, as they are trained: those in graphs all at once."""
    missing = [case for case in group if not case.path(options.output).exists()]
    return [missing] if options.graphs and missing else [[case] for case in missing]


def _run_apart(group: Sequence[Case], options: argparse.Namespace, deadline: float) -> int:
    """Make one run after the other until the deadline; returns the number of failed runs."""
    worker, failed = None, 0
    for cases in _together(group, options):
        worker = worker or Worker(_runner, options, environment=_share(options.jobs))
        for _ in worker.request(cases, max(deadline - time.monotonic(), 0)):
            pass
        if worker.status is not None:
            print(f"{cases[0]} {': '.join(worker.status)}", flush=True)
            failed += len(cases) if worker.status[0] == "failed" else 0
            worker.close()
            worker = None
        if time.monotonic() >= deadline:
            break
    if worker is not None:
        worker.close()
    return failed


def _runner(options: argparse.Namespace) -> Callable[[Any], Iterator[Any]]:
    """The function of a worker that trains cases and writes their files."""

    def train_some(cases: Sequence[Case]) -> Iterator[Any]:
        run(cases, options)
        yield from ()

    return train_some


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
    """A configuration compared with BF16 on equal seeds; ``behind`` in points or percent, None without a pair.

    ``deviation``: sample standard deviation of the seeds' figures, ``behind_deviation`` of their differences from BF16;
    None for a single seed. ``wanted`` seeds make a verdict.
    """

    configuration: str
    seeds: int
    mean: float
    pairs: int
    behind: float | None
    bound: float | None
    deviation: float | None = None
    behind_deviation: float | None = None
    wanted: int = PROMISED_SEEDS

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
        if self.pairs < self.wanted and self.keeps:
            return f"open: {self.pairs} of {self.wanted} seeds"
        verdict = (
            "PASS" if self.keeps else f"short of {self.bound:g} by {100 * (self.behind / self.bound - 1):.2g} percent"
        )
        if self.error is None or abs(self.behind - self.bound) >= self.error:
            return verdict
        return f"undecided: standard error {self.error:.2g}, {verdict} by the mean"

    @property
    def error(self) -> float | None:
        """The standard error of ``behind``; None for a single seed."""
        return None if self.behind_deviation is None else self.behind_deviation / math.sqrt(self.pairs)

    @property
    def shown_mean(self) -> str:
        """The mean and the deviation of the figures."""
        return f"{self.mean:.4g}" + ("" if self.deviation is None else f" ± {self.deviation:.2g}")

    @property
    def shown_behind(self) -> str:
        """The mean and the deviation of the differences; empty without a pair."""
        if self.behind is None:
            return ""
        return f"{self.behind:+.2f}" + ("" if self.behind_deviation is None else f" ± {self.behind_deviation:.2f}")


def compare(task: str, runs: dict[str, list[dict[str, Any]]]) -> list[Comparison]:
    """The mean differences of the runs' last figures from BF16's, by configuration."""
    subject = SUBJECTS[task]
    baseline = {row["seed"]: final(row, subject.metric) for row in runs.get(BASELINE, [])}
    found = []
    for name, rows in runs.items():
        values = {row["seed"]: final(row, subject.metric) for row in rows}
        behind = [
            subject.scale * subject.behind(value, baseline[seed]) for seed, value in values.items() if seed in baseline
        ]
        mean = statistics.fmean(behind) if behind else None
        bound = subject.scale * subject.bound if name.startswith("per_block") else None
        figures = (name, len(rows), statistics.fmean(values.values()), len(behind), mean, bound)
        found.append(Comparison(*figures, _deviation(values.values()), _deviation(behind), subject.seeds))
    return found


def _deviation(values: Iterable[float]) -> float | None:
    values = list(values)
    return statistics.stdev(values) if len(values) > 1 else None


def table(task: str, runs: dict[str, list[dict[str, Any]]]) -> tuple[str, bool]:
    """A Markdown table of the means and the differences from BF16 on equal seeds, and whether all bounds are met."""
    subject, found = SUBJECTS[task], compare(task, runs)
    header = [f"{task}, {subject.unit}", "seeds", "mean", f"behind BF16, {subject.units_behind}", "must be at most", ""]
    lines = []
    for each in found:
        shown = "" if each.configuration == BASELINE else each.shown_behind
        bound = "" if each.bound is None else f"{each.bound:g}"
        lines.append([each.configuration, str(each.seeds), each.shown_mean, shown, bound, each.verdict])
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
    parser.add_argument(
        "--tasks",
        type=comma_separated(SUBJECTS),
        default=[name for name, subject in SUBJECTS.items() if not subject.long],
    )
    parser.add_argument("--configurations", type=comma_separated(CONFIGURATIONS), default=list(DEFAULT))
    parser.add_argument(
        "--seeds",
        type=lambda text: [int(seed) for seed in text.split(",")],
        help="default: 0, 1 and 2, of long tasks 0",
    )
    parser.add_argument("--device", type=device_name, default="cpu", help="cpu or cuda")
    parser.add_argument("--compile", action="store_true", help="torch.compile the models")
    parser.add_argument("--graphs", action="store_true", help="replay each step as a CUDA graph")
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
            [Case(task, name, seed) for seed in options.seeds or range(SUBJECTS[task].seeds)]
            for task in options.tasks
            for name in options.configurations
            if name in SUBJECTS[task].configurations or not SUBJECTS[task].long
        ]
        failed = run_all(groups, options)
    kept = report(options.output, options.tasks)
    return int(failed > 0 or not (kept or options.smoke))


if __name__ == "__main__":
    sys.exit(main())
