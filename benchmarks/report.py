"""Generates ``docs/performance.md``, ``docs/performance-history.md`` and plots from ``benchmarks/results/``.

The first has the plots, the cases where a peer is faster and the targets, the second all tables.
``python -m benchmarks.report`` also writes ``docs/accuracy.md``, ``docs/attention-speed.md``, ``docs/families.md``,
``docs/papers.md`` and ``docs/training-results.md`` from folders in there. ``--check`` exits with 1 if a page or plot
is stale.
Equal results give identical pages. Every table comes with machine, versions, commit and date.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import (
    report_accuracy,
    report_attention_rows,
    report_families,
    report_front,
    report_papers,
    report_pretrained,
    report_training,
)
from benchmarks.harness import BROKEN, Record, Results
from benchmarks.labels import label
from benchmarks.machine import REPOSITORY
from benchmarks.pages import Page, Plot
from benchmarks.plots import FIRST_SCREEN_BASE, draw, draw_first_screen, first_screen_mark, mark
from benchmarks.report_attention import PARTS, attention_tables
from benchmarks.report_targets import targets_section
from benchmarks.tables import (
    OURS,
    TITLES,
    Run,
    bold_if,
    combined,
    is_ours,
    machine_line,
    number,
    ratio,
    scientific,
    shown,
    slower,
    speed,
    split,
    table,
)
from qframework.errors import QFrameworkError
from qframework.outputs import output_file

RESULTS = REPOSITORY / "benchmarks" / "results"
PAGE = REPOSITORY / "docs" / "performance.md"
# The providers that every other speed is also divided by.
BASELINES = {"int8_linear": "torch_fp16", "attention": "torch_flash", "vit_cpu": "fp32_eager", "vit_gpu": "fp32"}
HEAD = """# Performance

`python -m benchmarks.report` generates this page from the files in `benchmarks/results/`. Do not edit it. The plots are
the newest measurements of each kind on each device; [all tables](performance-history.md) behind them have errors,
memory, machine, versions and commit. INT8 without the name of another library is qframework's.
"""
HISTORY_HEAD = """# Performance: all tables

`python -m benchmarks.report` generates this page from the files in `benchmarks/results/`. Do not edit it. The
[summary](performance.md) has the plots.

Results are compared with an FP64 or FP32 oracle before they are timed, and wrong results get no time. GPU times are
CUDA events with the L2 cache flushed before each call; calls of microseconds are timed many at once in a CUDA graph.
The GPU sleeps for half a millisecond before a GEMM, which excludes launch overhead. CPU times are wall clock, with the
providers taking turns. Tables show medians. For several runs in one file they show the geometric mean, and as spread
how much less time the fastest run took than the slowest. For each case and device, only the newest measurement is
shown; the files hold all of them, with percentiles, memory and errors. Ratios carry over to other machines better than
absolute figures.
"""
SHAPES_NOTE = """Median TFLOP/s, counting 2MNK operations, with the fastest of each row in bold. `torch._int_mm` applies
neither scales nor bias, FP8 adds a bias only where its name says so; "INT8 result" includes quantizing the result.
Small shapes are timed as calls replayed in one CUDA graph, for every provider.
"""
HISTORY = "performance-history.md"  # beside the page
FIRST_SCREEN = "performance-vit-b.svg"
FIRST_SCREEN_CASE = ("vit_base_patch16_224", 256)
NOISE = 0.02  # of speed, between runs of the same code
SLOWER_THAN_BEFORE = """More than 2 percent slower than in the previous run on the same device:
"""
NOTHING = """
## Nothing measured yet

There are no results. `python -m benchmarks.vit_cpu --output benchmarks/results/vit_cpu.json` creates the first.
"""


def load_run(path: Path) -> Run | None:
    """Read a result file; None for one of a smoke run. Raises FileFormatError for other files."""
    results = Results.load(path)
    if results.smoke:
        return None
    canonical = json.dumps(json.loads(path.read_text()), sort_keys=True).encode()
    digest = hashlib.sha256(canonical).hexdigest()[:16]
    head = path.stem, results.benchmark, results.machine, results.peaks
    return Run(*head, combined(results.records), digest, results.note, tuple(results.records))


def load_runs(folder: Path) -> list[Run]:
    """All runs in ``folder``, sorted by benchmark, then newest first."""
    runs = [run for path in sorted(folder.glob("*.json")) if (run := load_run(path)) is not None]
    runs.sort(key=lambda run: str(run.machine.get("date")), reverse=True)
    order = list(TITLES)
    return sorted(runs, key=lambda run: order.index(run.benchmark) if run.benchmark in order else len(order))


# The page -------------------------------------------------------------------------------------------------------------


def render(runs: Sequence[Run]) -> str:
    """The whole page as Markdown."""
    if not runs:
        return HEAD + NOTHING
    models_first = sorted(shown(runs), key=lambda run: run.records[0].model is None)
    return "\n".join([HEAD, *map(_summary, models_first), _losses(runs), targets_section(runs)])


def render_history(runs: Sequence[Run]) -> str:
    """The page of all tables as Markdown."""
    return "\n".join([HISTORY_HEAD, *(_section(run) for run in shown(runs)), _changes(runs)])


def _summary(run: Run) -> str:
    """The plot of a run, and the best of ours over the best peer for each shape or model."""
    gains = {group[0].subject: _best_ratio([record for record in group if speed(record)]) for group in run.groups()}
    found = {subject: float(gain) for subject, gain in gains.items() if gain}
    parts = [f"## {run.title}\n", f"![{run.title}](assets/{run.plot})\n"]
    if len(found) == 1:
        parts.append(f"The fastest of qframework is {next(iter(found.values())):.2f} times as fast as the best peer.\n")
    elif found:
        least, most = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
        mean = statistics.geometric_mean(found.values())
        parts.append(
            f"The fastest of qframework is {mean:.2f} times as fast as the best peer as geometric mean of {len(found)} "
            f"cases, between {found[least]:.2f} ({least}) and {found[most]:.2f} ({most}).\n"
        )
    parts.append(f"[Tables, machine and versions](performance-history.md#{anchor(run.title)})\n")
    return "\n".join(parts)


def anchor(title: str) -> str:
    """The anchor that MkDocs gives a heading."""
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return re.sub(r"[-\s]+", "-", kept.strip())


def _losses(runs: Sequence[Run]) -> str:
    """The cases where a peer is faster than the best of qframework."""
    return f"## Where qframework is slower\n\n{slower(shown(runs), speed, lambda record: record.subject)}"


def _changes(runs: Sequence[Run]) -> str:
    """Regressions from the previous to the newest run; empty if there are none."""
    regressions = _regressions(runs)
    if not regressions:
        return ""
    header = ["what", "provider", "run", "speed", "previous run", "speed", "ratio", "note of the newer run"]
    return f"## Slower than before\n\n{SLOWER_THAN_BEFORE}\n{table(header, regressions)}"


def _regressions(runs: Sequence[Run]) -> list[list[str]]:
    """Providers of qframework whose newest run is slower than the previous one by more than ``NOISE``."""
    newest_first = sorted(runs, key=lambda run: str(run.machine.get("date")), reverse=True)
    speeds: dict[tuple[object, ...], list[tuple[Run, float]]] = {}
    for run in newest_first:
        for record in run.records:
            if is_ours(record) and speed(record) and record.op not in PARTS:
                key = (run.benchmark, run.machine.get("device"), record.subject, record.provider)
                speeds.setdefault(key, []).append((run, speed(record)))
    return [
        [
            *(str(key[2]), label(str(key[3])), now.where, number(new), before.where, number(old), ratio(new, old)),
            (now.note or "").partition(". ")[0],
        ]
        for key, ((now, new), (before, old), *_) in ((key, pairs) for key, pairs in speeds.items() if len(pairs) > 1)
        if new < (1 - NOISE) * old
    ]


def _section(run: Run) -> str:
    parts = [f"## {run.title}\n", machine_line(run.machine, run.peaks), *([f"{run.note}\n"] if run.note else [])]
    if run.benchmark == "int8_linear":
        parts.append(SHAPES_NOTE)
        parts.append(_shapes_table(run))
        parts += [_broken(run)] * any(record.status in BROKEN for record in run.records)
    elif run.benchmark == "attention":
        parts.append(attention_tables(run))
    else:
        parts += [_group_table(run, group) for group in run.groups()]
    return "\n".join(parts)


def _shapes_table(run: Run) -> str:
    """One row for each shape, one column for each provider."""
    providers = list(dict.fromkeys(record.provider for record in run.records))
    rows = []
    for group in run.groups():
        speeds = {record.provider: speed(record) for record in group}
        fastest = max(speeds.values())
        cells = [bold_if(speeds.get(name) == fastest, number(speeds.get(name))) for name in providers]
        rows.append([group[0].subject, *cells, _best_ratio(group)])
    return table(["M,N,K", *map(label, providers), "qframework / best peer"], rows)


def _broken(run: Run) -> str:
    """The records without a time, and why."""
    broken = [record for record in run.records if record.status in BROKEN]
    rows = [[record.subject, label(record.provider), f"{record.status}: {record.reason}"] for record in broken]
    return table(["M,N,K", "provider", "reason for no time"], rows)


def _best_ratio(group: Sequence[Record]) -> str:
    ours, peers = split(group)
    return ratio(max(map(speed, ours)), max(map(speed, peers))) if ours and peers else ""


def _group_table(run: Run, group: Sequence[Record]) -> str:
    """All measurements of one shape, or of one model and batch; empty columns are left out."""
    baseline = next((speed(record) for record in group if record.provider == BASELINES.get(run.benchmark)), 0.0)
    best_peer = max((speed(record) for record in split(group)[1]), default=0.0)
    columns: dict[str, Callable[[Record], str]] = {
        "provider": lambda record: label(record.provider),
        "dtype": lambda record: record.dtype or "",
        "images/s": lambda record: number(record.images_per_second),
        "TOP/s" if run.benchmark == "attention" else "TFLOP/s": lambda record: number(record.tflops),
        "GB/s": lambda record: number(record.gbps),
        f"/ {label(BASELINES.get(run.benchmark, ''))}": lambda record: ratio(speed(record), baseline),
        "/ best peer": lambda record: ratio(speed(record), best_peer) if is_ours(record) else "",
        "p20 ms": lambda record: number(record.p20_ms),
        "p50 ms": lambda record: number(record.p50_ms),
        "p80 ms": lambda record: number(record.p80_ms),
        "runs": lambda record: str(record.runs or ""),
        "spread %": lambda record: number(None if record.spread is None else 100 * record.spread),
        "% of peak": lambda record: number(record.percent_of_peak),
        "peak MB": lambda record: number(record.peak_mb),
        "error": lambda record: scientific(record.error),
        "quantization error": lambda record: scientific(record.quantization_error),
        "relative L1": lambda record: scientific(record.relative_l1),
        "SQNR dB": lambda record: number(record.sqnr_db),
        "worst image dB": lambda record: number(record.worst_sqnr_db),
        "prepare s": lambda record: number(record.prepare_s),
        "first call s": lambda record: number(record.first_call_s),
        "reason for no time": lambda record: "" if record.status == "ok" else f"{record.status}: {record.reason}",
    }
    filled = {name: [column(record) for record in group] for name, column in columns.items()}
    used = {name: cells for name, cells in filled.items() if any(cells)}
    rows = [list(row) for row in zip(*used.values(), strict=True)]
    return f"**{group[0].subject}**\n\n{table(list(used), rows)}"


# Command line ---------------------------------------------------------------------------------------------------------


def performance_page(runs: Sequence[Run], path: Path) -> Page:
    """The performance page of ``runs`` with a plot for each run shown."""
    plots = {run.plot: Plot(mark(run), functools.partial(draw, run)) for run in shown(runs)}
    if (first := first_screen(runs)) is not None:
        plots[FIRST_SCREEN] = Plot(first_screen_mark(first[0]), functools.partial(draw_first_screen, *first))
    return Page(path, render(runs), plots, "performance-*.svg")


def first_screen(runs: Sequence[Run]) -> tuple[Run, list[Record]] | None:
    """The newest run of ViT-B at batch 256 with its records, for the first screen of README and site."""
    found = [
        (run, group)
        for run in shown(runs)
        for group in run.groups()
        if run.benchmark == "vit_gpu" and (group[0].model, group[0].batch) == FIRST_SCREEN_CASE
        if any(record.provider == FIRST_SCREEN_BASE and record.status == "ok" for record in group)
    ]
    return max(found, key=lambda each: str(each[0].machine.get("date")), default=None)


def _smoke() -> int:
    """Write and check a page with one made-up run in a temporary folder."""
    record = Record(benchmark="int8_linear", op="int8_linear", shape=[1, 2, 3], provider=OURS, p50_ms=1.0, tflops=1.0)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results")
        Results("int8_linear", {"device": "made up"}, results / "made_up.json").add(record)
        arguments = ["--results", str(results), "--page", str(Path(folder, "performance.md"))]
        return main(arguments) or main([*arguments, "--check"])


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the page; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files")
    parser.add_argument("--page", type=output_file, default=PAGE, help="the page; plots go to assets/ beside it")
    parser.add_argument("--smoke", action="store_true", help="write a page of made-up results to a temporary folder")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is stale")
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        return _smoke()
    try:
        runs = load_runs(arguments.results)
        accuracy = arguments.results / report_accuracy.FOLDER
        pretrained = report_pretrained.load(accuracy / report_pretrained.FOLDER)
        front = report_front.load(accuracy / report_front.FOLDER)
        accuracy_text = report_accuracy.render(report_accuracy.load(accuracy), pretrained, front)
        training = arguments.results / report_training.FOLDER
        trained = report_training.load(training, load_runs(training))
        families = load_runs(arguments.results / report_families.FOLDER)
        papers = report_papers.load(arguments.results / report_papers.FOLDER)
        rows, files = report_attention_rows.load(arguments.results / report_attention_rows.FOLDER)
    except QFrameworkError as error:
        print(error, file=sys.stderr)
        return 2
    folder = arguments.page.parent
    granularity = report_papers.load_granularity(arguments.results / "other")
    pages = [
        performance_page(runs, arguments.page),
        Page(folder / HISTORY, render_history(runs)),
        Page(
            folder / report_accuracy.NAME,
            accuracy_text,
            {**report_pretrained.plots(pretrained), **report_front.plots(front)},
            "accuracy-*.svg",
        ),
        report_training.training_page(trained, folder / report_training.NAME),
        report_families.families_page(families, folder / report_families.NAME),
        Page(folder / report_papers.NAME, report_papers.render(papers, granularity)),
    ]
    if rows:
        pages.append(Page(folder / report_attention_rows.NAME, report_attention_rows.render(rows, files)))
    if not arguments.check:
        for page in pages:
            page.write()
            print(page.path)
        return 0
    stale = [path for page in pages for path in page.stale()]
    for path in stale:
        print(f"{path} is stale: run python -m benchmarks.report", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
