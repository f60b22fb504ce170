"""Generates ``docs/training-results.md`` from ``benchmarks/results/training/``, called by benchmarks.report.

That folder holds the files of block_operators, block_linear and training_block. The runs of training_parity are in a
subfolder for each task, those of training_gradients, training_processes, training_fsdp and training_simulation in
subfolders of their own.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import (
    parity_plot,
    training_fsdp,
    training_gradients,
    training_models,
    training_parity,
    training_processes,
    training_profile,
    training_simulation,
    training_widths,
)
from benchmarks.harness import Record
from benchmarks.labels import label
from benchmarks.pages import Page, Plot
from benchmarks.report_targets import newest
from benchmarks.tables import Run, bold_if, machine_line, number, scientific, shown, slower, table
from benchmarks.target_table import Target, rows
from benchmarks.target_table_training import TRAINING_TARGETS, linear_in_blocks, single_size
from benchmarks.training_parity import SUBJECTS, Comparison, per_block
from qframework.kernels.blocks.format import BLOCK_SIZES, BlockSize, block_size_name

FOLDER = "training"  # below the folder of results
NAME = "training-results.md"
HEAD = """# INT8 training: results

`python -m benchmarks.report` generates this page from the files in `benchmarks/results/training/`. Do not edit it.
[INT8 training](training.md) describes how to use it.

`benchmarks.block_operators`, `benchmarks.block_linear` and `benchmarks.training_block` measure speed and memory,
`benchmarks.training_models` steps of whole models, `benchmarks.training_parity` the accuracy of trained models,
`benchmarks.training_gradients` the error of a single step, and `benchmarks.training_processes` the speedup by several
GPUs. Results are compared with an FP64 or FP32 oracle before they are timed, and wrong results get no time. Times are
CUDA events, with the L2 cache flushed before operators and linears. Each device, model and shape is shown as the newest
run that measured it did; the folder has the older ones.
"""
TARGETS_NOTE = """Ratios of qframework over the peer: of speed, as geometric mean over operators or shapes, or of the
memory kept from forward to backward. PASS means that every run of the file meets `must`, with all cases measured. Rows
without `must` are informational. Where qframework has several block sizes, the fastest counts, often 128, with which a
GPT diverged (below); the default is 1x128.
"""
ACCURACY_NOTE = """Behind BF16 is the difference after the last step, averaged over equal seeds, in points of top-1 or
percent of the loss, with its standard deviation; negative values are better than BF16. A verdict is undecided if the
bound is within the standard error of the mean. `digits_timm` has position embeddings as timm draws them (0.02,
elsewhere 1.0), with which so few steps end at 80 percent instead of 97. The long tasks train 20 times as many steps, in
two halves with a checkpoint between them.
"""
SIZES_NOTE = """Speed and memory of each block size (B x B values, or tokens x channels) as multiples of 16 bit, and its
accuracy. The error is that of a linear's results and gradients against the FP64 products of its float operands.
"""
STEP_NOTE = """A GPT trained in FP32, evaluated with the same weights on the same batches: relative error of the mean
gradient against FP32, and increase of the loss over FP32. In the last columns, two channels of the first token are as
large as in language models, and the model has been trained in FP32 for some steps with it. `per_token` and
`per_tensor` are not affected, since they pass floats between linears.
"""
PROCESSES_NOTE = """`examples/train_gpt.py` in one process and under `torchrun`, with a GPU for each process and every
batch split over the processes. Seeds are equal, so losses differ only by rounding. Examples per second exclude the
first 20 steps, in which models are compiled.
"""
FSDP_NOTE = """A step (forward, backward, optimizer) of a Llama-shaped model of 4 blocks of 4,096 channels, called
eagerly and sharded block by block over two GPUs with FSDP2, 2 x 2,048 tokens for each process. Gathered and reduced:
MiB of whole weights and gradients in the collectives of a step. The losses of the first three steps differ by at most
the error from those of the same model with weights gathered in FP32.
"""
SIMULATION_NOTE = """The GPT of the accuracy below, trained in blocks of 128 x 128 by the kernels, and by a simulation
that rounds to the same blocks in plain PyTorch, without any operator of qframework. A distance is that of mean
gradients of the blocks' parameters, relative to those in floats, with the weights of the kernels' run at a step.
Roundings
amplify the order of a sum, as the two simulations show.
"""
GRADIENTS, PROCESSES = "gradients", "processes"  # below the folder of training results
FSDP, SIMULATION = "fsdp", "simulation"
PROFILE = training_profile.BENCHMARK
PROMISED = tuple(map(per_block, BLOCK_SIZES))
SHORT = {task: subject for task, subject in SUBJECTS.items() if not subject.long}  # trained with all block sizes
PER_TENSOR, PER_TENSOR_TASKS = "per_tensor", ("digits", "gpt")
NOTHING = "Nothing measured yet.\n"
Parity = Mapping[str, dict[str, list[dict[str, Any]]]]
"""Runs by task and configuration."""


class Results(NamedTuple):
    """The content of the page; all but runs and parity are the newest document of a benchmark."""

    runs: Sequence[Run]
    parity: Parity
    step: dict[str, Any] | None
    processes: dict[str, Any] | None
    fsdp: dict[str, Any] | None = None
    simulation: dict[str, Any] | None = None


def load(folder: Path, runs: Sequence[Run]) -> Results:
    """``runs``, which are the files in ``folder``, with the files in its subfolders."""
    documents = (_load_newest(folder / name) for name in (GRADIENTS, PROCESSES, FSDP, SIMULATION))
    return Results(runs, load_parity(folder), *documents)


def _load_newest(folder: Path) -> dict[str, Any] | None:
    """The newest document in a folder that is not a smoke run, or None."""
    documents = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    real = [document for document in documents if not document["smoke"]]
    return max(real, key=lambda document: str(document["machine"]["date"]), default=None)


def load_parity(folder: Path) -> Parity:
    """The runs of each task, without smoke runs. Raises QFrameworkError if a task has runs with different settings."""
    found = {task: training_parity.read(folder, task) for task in SUBJECTS}
    return {task: runs for task, runs in found.items() if runs and not any(_is_smoke(rows) for rows in runs.values())}


def _is_smoke(documents: Sequence[dict[str, Any]]) -> bool:
    return any(document.get("smoke") for document in documents)


def render(results: Results) -> str:
    """The whole page as Markdown."""
    every, parity, step, processes, fsdp, simulation = results
    runs = [replace(run, records=[row for row in run.records if row.benchmark != PROFILE]) for run in every]
    profiles = {run.stem: _profile(run) for run in every}
    return "\n".join(
        [HEAD, _targets(runs), _accuracy_targets(parity), _sizes(runs, parity)]
        + ([] if step is None else [_step(step)])
        + ([] if simulation is None else [_simulation(simulation)])
        + ([] if processes is None else [_processes(processes)])
        + ([] if fsdp is None else [_fsdp(fsdp)])
        + ([_widths(runs)] if any(map(_has_models, runs)) else [])
        + [_slower(shown(runs))]
        + [_task(task, parity[task]) for task in parity]
        + [_section(run, profiles[run.stem]) for run in shown(runs)]
    )


def _widths(runs: Sequence[Run]) -> str:
    return training_widths.section((str(run.machine.get("date")), run.measured) for run in runs)


def _targets(runs: Sequence[Run]) -> str:
    outcomes = [(target, *newest(target, runs)) for target in TRAINING_TARGETS]
    return f"## Targets\n\n{TARGETS_NOTE}\n{rows(outcomes)}"


# Accuracy -------------------------------------------------------------------------------------------------------------


def _accuracy_targets(parity: Parity) -> str:
    lines = [
        _promise(task, name, parity)
        for task, subject in SUBJECTS.items()
        for name in PROMISED
        if name in subject.configurations
    ]
    header = ["what", "against", "must be at most", "behind", "seeds", "verdict", "where"]
    return f"### Accuracy\n\n{ACCURACY_NOTE}\n{table(header, [*lines, _per_tensor(parity)])}"


def _promise(task: str, name: str, parity: Parity) -> list[str]:
    subject = SUBJECTS[task]
    head = [f"{task}, {subject.unit}, {name}", "BF16", f"{subject.scale * subject.bound:g} {subject.units_behind}"]
    found = _comparison(task, name, parity)
    if found is None or found.behind is None:
        return [*head, "", "", "not measured", ""]
    return [*head, found.shown_behind, str(found.pairs), found.verdict, _where(parity[task][name])]


def _comparison(task: str, name: str, parity: Parity) -> Comparison | None:
    found = training_parity.compare(task, parity.get(task, {}))
    return next((each for each in found if each.configuration == name), None)


def _per_tensor(parity: Parity) -> list[str]:
    """The row that justifies blocks: one scale per tensor exceeds the bound of blocks on at least one task."""
    found = {task: _comparison(task, PER_TENSOR, parity) for task in PER_TENSOR_TASKS}
    behind = {task: each.behind for task, each in found.items() if each is not None and each.behind is not None}
    head = ["per_tensor, worse on one of them", "BF16", "more than the bound"]
    if not behind:
        return [*head, "", "", "not measured", ""]
    shown = ", ".join(f"{task} {value:+.2f} {SUBJECTS[task].units_behind}" for task, value in behind.items())
    worse = [task for task, value in behind.items() if value > SUBJECTS[task].scale * SUBJECTS[task].bound]
    pairs = min(each.pairs for task, each in found.items() if each is not None and task in behind)
    missing = [task for task in PER_TENSOR_TASKS if task not in behind]
    if worse:
        enough = pairs >= training_parity.PROMISED_SEEDS
        verdict = "PASS" if enough else f"open: {pairs} of {training_parity.PROMISED_SEEDS} seeds"
    else:
        verdict = f"open: {', '.join(missing)} not measured" if missing else "not worse"
    return [*head, shown, str(pairs), verdict, ""]


def _where(documents: Sequence[dict[str, Any]]) -> str:
    """Dates and commits of the runs."""
    machines = [document.get("machine", {}) for document in documents]
    dates = sorted({str(machine.get("date")).partition("T")[0] for machine in machines})
    commits = sorted({str(machine.get("commit")) for machine in machines})
    return f"{', '.join(dates)}, {', '.join(f'`{commit}`' for commit in commits)}"


def plot_name(task: str) -> str:
    """Below assets/."""
    return f"training-{task}.png"


def _task(task: str, runs: dict[str, list[dict[str, Any]]]) -> str:
    """The section of a task: curves, table, and the machine of the newest run."""
    documents = [document for rows in runs.values() for document in rows]
    latest = max((document.get("machine", {}) for document in documents), key=lambda each: str(each.get("date")))
    settings = ", ".join(f"{key} {value}" for key, value in documents[0]["settings"].items() if key != "text")
    return "\n".join(
        [
            f"## Accuracy: {task}\n",
            f"![Losses of {task}](assets/{plot_name(task)})\n",
            training_parity.table(task, runs)[0],
            f"{settings}; every run: {_where(documents)}.\n",
            machine_line(latest, {}),
        ]
    )


def mark(task: str, runs: dict[str, list[dict[str, Any]]]) -> str:
    """The text stored in a plot that identifies the runs and the code it was drawn from."""
    results = json.dumps(runs, sort_keys=True)
    code = inspect.getsource(parity_plot) + inspect.getsource(training_parity.draw)
    digests = (hashlib.sha256(text.encode()).hexdigest()[:16] for text in (results, code))
    return "results {}, drawn by {}".format(*digests)


# Block sizes ----------------------------------------------------------------------------------------------------------


def _sizes(runs: Sequence[Run], parity: Parity) -> str:
    """One row for each block size."""
    header = [
        "block size",
        "GPT block, hidden 4096 / BF16 compiled",
        "linears / BF16 under Inductor",
        "operators / PyTorch FP16",
        "activation memory / BF16 eager",
        "error of linears",
        *(f"{task} behind BF16, {subject.units_behind}" for task, subject in SHORT.items()),
    ]
    lines = [
        [
            block_size_name(size),
            *(_mean(target, runs) for target in single_size(size)),
            _linear_error(size, runs),
            *(_behind(_comparison(task, per_block(size), parity)) for task in SHORT),
        ]
        for size in BLOCK_SIZES
    ]
    return f"## Block sizes\n\n{SIZES_NOTE}\n{table(header, lines)}"


def _mean(target: Target, runs: Sequence[Run]) -> str:
    outcome, _ = newest(target, runs)
    if outcome is None:
        return "not measured"
    if outcome.wrong:
        return "wrong"
    return f"{outcome.mean:.2f}" if outcome.is_complete else f"{outcome.mean:.2f} (of what is measured)"


def _linear_error(size: BlockSize, runs: Sequence[Run]) -> str:
    provider = linear_in_blocks(size)
    records = (record for run in runs for record in run.records if record.provider == provider)
    errors = [record.error for record in records if record.status == "ok" and record.error is not None]
    return scientific(statistics.fmean(errors)) if errors else "not measured"


def _behind(found: Comparison | None) -> str:
    return "not measured" if found is None or found.behind is None else f"{found.behind:+.2f}"


def _step(document: dict[str, Any]) -> str:
    settings, rows = document["settings"], [training_gradients.Row(**row) for row in document["rows"]]
    shape = f"width {settings['width']}, depth {settings['depth']}, {settings['tokens']:,} tokens"
    text = training_gradients.table(rows)
    return f"## A single step\n\n{STEP_NOTE}\n{text}\n{shape}, {_where([document])}.\n"


def _processes(document: dict[str, Any]) -> str:
    rows = [training_processes.Run(**row) for row in document["runs"]]
    settings = ", ".join(f"{key} {value}" for key, value in document["settings"].items())
    text = training_processes.table(rows)
    parts = ["## Several processes\n", PROCESSES_NOTE, text, f"{settings}, {_where([document])}.\n"]
    return "\n".join([*parts, machine_line(document["machine"], {})])


def _fsdp(document: dict[str, Any]) -> str:
    text = training_fsdp.table([Record.from_json(row) for row in document["records"]])
    parts = ["## FSDP2 on two GPUs\n", FSDP_NOTE, text, f"{_where([document])}.\n"]
    return "\n".join([*parts, machine_line(document["machine"], {})])


def _simulation(document: dict[str, Any]) -> str:
    text = training_simulation.tables(document)
    return f"## Kernels against a simulation\n\n{SIMULATION_NOTE}\n{text}\n{_where([document])}.\n"


# Speed ----------------------------------------------------------------------------------------------------------------


def _slower(runs: Sequence[Run]) -> str:
    """The cases where a peer takes less time than the best of qframework."""
    text = slower(runs, _calls_per_ms, lambda record: f"{record.op} {record.subject}")
    return f"## Where qframework is slower\n\n{text if runs else NOTHING}"


def _has_models(run: Run) -> bool:
    return any(record.benchmark == "training_models" for record in run.records)


def _calls_per_ms(record: Record) -> float:
    return 1 / record.p50_ms if record.p50_ms else 0.0


def _time(record: Record) -> float:
    return record.p50_ms or float("inf")


def _profile(run: Run) -> str:
    return training_profile.section(run.records)


def _section(run: Run, profile: str = "") -> str:
    peaks = "".join(f"Copying a gigabyte reaches {number(peak)} {unit}.\n" for unit, peak in run.peaks.items())
    parts = [f"## {run.title}\n", machine_line(run.machine, {}), *([f"{run.note}\n"] if run.note else []), peaks]
    parts.append(f"Median milliseconds, with the fastest in bold.\n\n{_pivot(run, _time)}")
    if any(record.activation_mb for record in run.records):
        once = [record for record in run.records if record.activation_mb and record.op != "gpt_block_forward"]
        text = _pivot(replace(run, records=once), lambda record: record.activation_mb or 0)
        parts.append(f"MB that a block keeps from forward to backward.\n\n{text}")
    if any(record.first_call_s for record in run.records):
        once = [record for record in run.records if record.first_call_s and record.op == training_models.OPS[0]]
        text = _pivot(replace(run, records=once), lambda record: record.first_call_s or 0)
        parts.append(f"Seconds of the first forward and backward, compilation included.\n\n{text}")
    parts.append(profile)
    if reasons := _reasons(run):
        parts.append(reasons)
    return "\n".join(part for part in parts if part)


def _pivot(run: Run, value: Callable[[Record], float]) -> str:
    """A row for each operation and shape, a column for each provider; the lowest in bold."""
    providers = sorted(
        dict.fromkeys(record.provider for record in run.records), key=lambda name: "qframework" not in name
    )
    lines = []
    for group in run.groups():
        values = {record.provider: value(record) for record in group if record.status == "ok" and record.p50_ms}
        least = min(values.values(), default=0.0)
        cells = [bold_if(values.get(name) == least, number(values.get(name))) for name in providers]
        lines.append([f"{group[0].op} {group[0].subject}", *cells])
    return table(["", *map(label, providers)], lines)


def _reasons(run: Run) -> str:
    """The reasons why providers have no time."""
    without = [record for record in run.records if record.status != "ok"]
    found = dict.fromkeys(
        f"- {label(record.provider)}, {record.op}: {record.status}, {record.reason}" for record in without
    )
    return "No time:\n\n" + "\n".join(found) + "\n" if found else ""


# Files ----------------------------------------------------------------------------------------------------------------


def training_page(results: Results, path: Path) -> Page:
    """The page of ``results`` with a plot for each task."""
    plots = {}
    for task, found in results.parity.items():
        text = mark(task, found)
        draw = functools.partial(training_parity.draw, task, found, description=text)
        plots[plot_name(task)] = Plot(text, draw)
    return Page(path, render(results), plots, plot_name("*"))
