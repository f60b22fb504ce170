"""``docs/performance.md`` and its plots from the files in ``benchmarks/results/``; never edited by hand.

``python -m benchmarks.report`` writes the page and beside it ``docs/accuracy.md`` from ``benchmarks/results/accuracy/``
and ``docs/training-results.md`` from ``benchmarks/results/training/``; ``--check`` exits with 1 when a page or plot is
stale. Equal results give an equal page. Beside every table stand machine, versions, commit and date; every ratio is
computed here; what is slower than a peer is listed first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import report_accuracy, report_training
from benchmarks.harness import BROKEN, Record, Results
from benchmarks.machine import REPOSITORY
from benchmarks.plots import draw, mark
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
    speed,
    split,
    table,
)
from qframework.errors import QFrameworkError
from qframework.outputs import output_file

RESULTS = REPOSITORY / "benchmarks" / "results"
PAGE = REPOSITORY / "docs" / "performance.md"
# What every other provider's speed is also given as a multiple of.
BASELINES = {"int8_linear": "torch_fp16", "attention": "torch_flash", "vit_cpu": "fp32_eager", "vit_gpu": "fp32"}
HEAD = """# Performance

Written by `python -m benchmarks.report` from the files in `benchmarks/results/`: change those, not this page.

A result is compared with an FP64 or FP32 oracle before it is timed, and a wrong one gets no time. On a GPU, CUDA events
with the L2 cache flushed before every call, or, for calls of microseconds, many of them in one CUDA graph; before a
GEMM the GPU rests for half a millisecond, so that the host does not count. On a CPU, wall clock with the providers
taking turns. Tables hold medians; of several runs in one file their geometric mean, and as the spread what the fastest
took less than the slowest. Of what was measured more than once on a machine, the newest is shown; every measurement,
with its percentiles, memory and errors, is in the files. Absolute figures belong to one machine; ratios travel better.
"""
SHAPES_NOTE = """TFLOP/s of 2MNK at the median, the fastest of a row in bold. `torch_int_mm` leaves out scales and bias,
`scaled_mm_fp8` and `scaled_mm_fp8_precise` the bias; `qframework_int8_out` and `qframework_gelu_int8_out` also quantize
their result. Small shapes are timed as calls replayed in one CUDA graph, whoever is called.
"""
NOISE = 0.02  # of speed, between runs of the same code
SLOWER_THAN_BEFORE = """Slower than in the run before it on the same device, by more than 2 percent:
"""
NOTHING = """
## Nothing measured yet

There are no results. `python -m benchmarks.vit_cpu --output benchmarks/results/vit_cpu.json` makes the first.
"""


def load_run(path: Path) -> Run | None:
    """Read a result file; None for a smoke run's, whose times mean nothing. Raises FileFormatError on any other."""
    results = Results.load(path)
    if results.smoke:
        return None
    canonical = json.dumps(json.loads(path.read_text()), sort_keys=True).encode()
    digest = hashlib.sha256(canonical).hexdigest()[:16]
    head = path.stem, results.benchmark, results.machine, results.peaks
    return Run(*head, combined(results.records), digest, results.note, tuple(results.records))


def load_runs(folder: Path) -> list[Run]:
    """All runs in ``folder``: by benchmark, the newest first."""
    runs = [run for path in sorted(folder.glob("*.json")) if (run := load_run(path)) is not None]
    runs.sort(key=lambda run: str(run.machine.get("date")), reverse=True)
    order = list(TITLES)
    return sorted(runs, key=lambda run: order.index(run.benchmark) if run.benchmark in order else len(order))


# The page -------------------------------------------------------------------------------------------------------------


def render(runs: Sequence[Run]) -> str:
    """The whole page as Markdown."""
    if not runs:
        return HEAD + NOTHING
    return "\n".join([HEAD, targets_section(runs), _losses(runs), *(_section(run) for run in shown(runs))])


def _losses(runs: Sequence[Run]) -> str:
    """Every place where the best of qframework is slower than a peer, and every provider that was faster before."""
    rows = [row for run in shown(runs) for group in run.groups() if (row := _lost(run, group))]
    text = "## Where qframework is slower\n\n"
    text += (
        table(["run", "what", "best of qframework", "its speed as a multiple of the faster peers'"], rows)
        if rows
        else ("Nowhere in these runs.\n")
    )
    if regressions := _regressions(runs):
        header = [
            "what",
            "provider",
            "run",
            "speed",
            "the run before",
            "speed",
            "ratio",
            "what the note of the newer run says first",
        ]
        text += f"\n{SLOWER_THAN_BEFORE}\n{table(header, regressions)}"
    return text


def _regressions(runs: Sequence[Run]) -> list[list[str]]:
    """Providers of qframework whose newest run is slower than the one before it, by more than ``NOISE``."""
    newest_first = sorted(runs, key=lambda run: str(run.machine.get("date")), reverse=True)
    speeds: dict[tuple[object, ...], list[tuple[Run, float]]] = {}
    for run in newest_first:
        for record in run.records:
            if is_ours(record) and speed(record) and record.op not in PARTS:
                key = (run.benchmark, run.machine.get("device"), record.subject, record.provider)
                speeds.setdefault(key, []).append((run, speed(record)))
    return [
        [
            *(str(key[2]), str(key[3]), now.where, number(new), before.where, number(old), ratio(new, old)),
            (now.note or "").partition(". ")[0],
        ]
        for key, ((now, new), (before, old), *_) in ((key, pairs) for key, pairs in speeds.items() if len(pairs) > 1)
        if new < (1 - NOISE) * old
    ]


def _lost(run: Run, group: Sequence[Record]) -> list[str]:
    """The row of one shape or model, empty where nothing is faster than the best of qframework."""
    ours, peers = split(group)
    best = max(ours, key=speed, default=None)
    faster = [peer for peer in peers if best and speed(peer) > speed(best)]
    if best is None or not faster:
        return []
    faster.sort(key=speed, reverse=True)
    multiples = ", ".join(f"{ratio(speed(best), speed(peer))} {peer.provider}" for peer in faster)
    return [run.title, best.subject, best.provider, multiples]


def _section(run: Run) -> str:
    parts = [f"## {run.title}\n", machine_line(run.machine, run.peaks), *([f"{run.note}\n"] if run.note else [])]
    parts.append(f"![{run.title}](assets/{run.plot})\n")
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
    return table(["M,N,K", *providers, "qframework / best peer"], rows)


def _broken(run: Run) -> str:
    """What has no time, and why."""
    broken = [record for record in run.records if record.status in BROKEN]
    rows = [[record.subject, record.provider, f"{record.status}: {record.reason}"] for record in broken]
    return table(["M,N,K", "provider", "no time because"], rows)


def _best_ratio(group: Sequence[Record]) -> str:
    ours, peers = split(group)
    return ratio(max(map(speed, ours)), max(map(speed, peers))) if ours and peers else ""


def _group_table(run: Run, group: Sequence[Record]) -> str:
    """Everything measured for one shape, or for one model and batch; columns nobody filled are left out."""
    baseline = next((speed(record) for record in group if record.provider == BASELINES.get(run.benchmark)), 0.0)
    best_peer = max((speed(record) for record in split(group)[1]), default=0.0)
    columns: dict[str, Callable[[Record], str]] = {
        "provider": lambda record: record.provider,
        "dtype": lambda record: record.dtype or "",
        "images/s": lambda record: number(record.images_per_second),
        "TOP/s" if run.benchmark == "attention" else "TFLOP/s": lambda record: number(record.tflops),
        "GB/s": lambda record: number(record.gbps),
        f"/ {BASELINES.get(run.benchmark)}": lambda record: ratio(speed(record), baseline),
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
        "no time because": lambda record: "" if record.status == "ok" else f"{record.status}: {record.reason}",
    }
    filled = {name: [column(record) for record in group] for name, column in columns.items()}
    used = {name: cells for name, cells in filled.items() if any(cells)}
    rows = [list(row) for row in zip(*used.values(), strict=True)]
    return f"**{group[0].subject}**\n\n{table(list(used), rows)}"


# Command line ---------------------------------------------------------------------------------------------------------


def stale_files(runs: Sequence[Run], page: Path) -> list[Path]:
    """The page and plots that are missing, differ from what ``runs`` give, or belong to no run."""
    assets = page.parent / "assets"
    stale = [] if page.exists() and page.read_text() == render(runs) else [page]
    plots = {assets / run.plot: run for run in shown(runs)}
    stale += [path for path, run in plots.items() if not (path.exists() and mark(run) in path.read_text())]
    return stale + _orphans(runs, assets)


def _orphans(runs: Sequence[Run], assets: Path) -> list[Path]:
    return sorted(set(assets.glob("performance-*.svg")) - {assets / run.plot for run in shown(runs)})


def write(runs: Sequence[Run], page: Path) -> None:
    """Write the page, draw the plots that are not up to date, remove those of runs that are gone."""
    assets = page.parent / "assets"
    assets.mkdir(parents=True, exist_ok=True)
    stale = stale_files(runs, page)
    for run in shown(runs):
        if assets / run.plot in stale:
            draw(run, assets / run.plot)
    for orphan in _orphans(runs, assets):
        orphan.unlink()
    page.write_text(render(runs))


def _smoke() -> int:
    """A page with one made-up run, written and checked in a temporary folder."""
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
    parser.add_argument("--smoke", action="store_true", help="draw a page of made-up results and throw it away")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when something is stale")
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        return _smoke()
    try:
        runs = load_runs(arguments.results)
        accuracy = report_accuracy.render(report_accuracy.load(arguments.results / report_accuracy.FOLDER))
        training = arguments.results / report_training.FOLDER
        trained = report_training.load(training, load_runs(training))
    except QFrameworkError as error:
        print(error, file=sys.stderr)
        return 2
    folder = arguments.page.parent
    accuracy_page, training_page = folder / report_accuracy.NAME, folder / report_training.NAME
    if not arguments.check:
        write(runs, arguments.page)
        accuracy_page.write_text(accuracy)
        report_training.write(trained, training_page)
        print(f"{arguments.page}: {len(runs)} runs; {accuracy_page}; {training_page}: {len(trained.runs)} runs")
        return 0
    stale = stale_files(runs, arguments.page)
    stale += [accuracy_page] * (not accuracy_page.exists() or accuracy_page.read_text() != accuracy)
    stale += report_training.stale_files(trained, training_page)
    for path in stale:
        print(f"{path} is stale: run python -m benchmarks.report", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
