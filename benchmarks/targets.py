"""Measures all targets against every installed peer, and prints the ratios.

``python -m benchmarks.targets --output-dir DIR --name NAME`` measures part by part into ``DIR/NAME-<part>.json``,
prints every ratio of benchmarks/target_table.py with its verdict, and writes them to ``DIR/other/NAME-targets.json``
and, as a page with plots, to ``DIR/page/``. ``--parts`` selects parts, to split a long measurement; ``--parts none``
only prints the results in the files. ``--add-run`` adds a run to the files, for the spread; ``--runs 2`` makes two in
one call.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import int8_linear, models, report, vit_gpu
from benchmarks.boxed import Limits
from benchmarks.harness import Results, argument_parser, comma_separated
from benchmarks.machine import git_state
from benchmarks.report_targets import newest
from benchmarks.target_table import BASE, DYNAMIC, FAST_16_BIT, LARGE, STATIC, TARGETS, TORCHAO_FP8, rows
from qframework.files import write_text
from qframework.outputs import output_folder

THROUGHPUT = (
    "fp32", "fp16", *FAST_16_BIT, "torchao_int8_dynamic", *TORCHAO_FP8, *STATIC[:3], *DYNAMIC[:2],
)  # fmt: skip
LATENCY = (*FAST_16_BIT, "fp16_compiled_graphs", *STATIC, *DYNAMIC[2:])
SMOKE_THROUGHPUT = ("fp16", "torchao_fp8_rowwise", "qframework_static")
CHECK_LIMIT, TIME_LIMIT = 400.0, 60.0


@dataclass(frozen=True)
class Call:
    """How parts are measured: device, deadline, and the number of processes that compile in parallel."""

    device: str
    smoke: bool
    deadline: float  # of time.monotonic()
    jobs: int

    @property
    def limits(self) -> Limits:
        return Limits(CHECK_LIMIT, TIME_LIMIT, self.deadline)


Part = tuple[str, Callable[[Results, Call], None]]
"""The name of a benchmark, and the function that adds its records."""


def _int8_linear(results: Results, call: Call) -> None:
    small = call.smoke or call.device == "cpu"
    shapes = int8_linear.SMOKE_SHAPES if small else int8_linear.SHAPES
    int8_linear.run(results, int8_linear.default_providers(), shapes, call.device, call.limits, call.jobs)


def _throughput(model: str) -> Callable[[Results, Call], None]:
    def measure(results: Results, call: Call) -> None:
        providers, batch = (SMOKE_THROUGHPUT, 2) if call.smoke else (THROUGHPUT, 256)
        _models(results, model, [(name, batch) for name in providers], call)

    return measure


def _latency(results: Results, call: Call) -> None:
    _models(results, BASE, [(name, 1) for name in LATENCY], call)


def _models(results: Results, model: str, cases: Sequence[vit_gpu.Case], call: Call) -> None:
    name = models.SMOKE_MODEL if call.smoke else model
    vit_gpu.run(results, [name], cases, call.device, call.limits, call.jobs)


def _first_calls(results: Results, call: Call) -> None:
    model, batch = (models.SMOKE_MODEL, 2) if call.smoke else (BASE, 256)
    cases = [(name, batch) for name in vit_gpu.FIRST_CALL_PROVIDERS]
    vit_gpu.run_first_calls(results, model, cases, call.device, call.limits)


PARTS: dict[str, Part] = {
    "int8_linear": ("int8_linear", _int8_linear),
    "first_call": ("vit_first_call", _first_calls),
    "vit_base": ("vit_gpu", _throughput(BASE)),
    "vit_base_latency": ("vit_gpu", _latency),
    "vit_large": ("vit_gpu", _throughput(LARGE)),
}
SMOKE_PARTS = ("int8_linear", "vit_base")


def measure(parts: Sequence[str], files: Callable[[str], Path], call: Call, arguments: argparse.Namespace) -> int:
    """Measure ``parts`` in turn, ``arguments.runs`` times; returns 1 if something failed."""
    broken = 0
    for turn in range(arguments.runs):
        for part in parts:
            benchmark, add = PARTS[part]
            own = argparse.Namespace(output=files(part), smoke=call.smoke, add_run=arguments.add_run or turn > 0)
            results = Results.start(benchmark, call.device, own)
            print(f"== {part}, run {results.run or 1} ==", flush=True)
            add(results, call)
            broken |= results.exit_code
    return broken


def conclude(folder: Path, name: str) -> None:
    """Print the ratios of all results in ``folder``; write them to ``other/``, and a page with plots to ``page/``."""
    runs = report.load_runs(folder)
    outcomes = [(target, *newest(target, runs, any_device=True)) for target in TARGETS]
    print(f"\n{rows(outcomes)}")
    document = [
        {
            "what": target.what,
            "against": target.against,
            "must": target.must,
            "aim": target.aim,
            "ratios": [round(ratio, 4) for ratio in outcome.ratios] if outcome else [],
            "verdict": outcome.verdict if outcome else "not measured",
            "where": where,
        }
        for target, outcome, where in outcomes
    ]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in document)
    write_text(folder / "other" / f"{name}-targets.json", f'{{\n "targets": [\n{lines}\n ]\n}}\n')
    _write_page(runs, folder)


def _write_page(runs: Sequence[Any], folder: Path) -> None:
    """Write the page in docs/ for the tracked results, or a page of these results alone."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no page and no plots: matplotlib is not installed")
        return
    page = report.PAGE if folder.resolve() == report.RESULTS.resolve() else folder / "page" / "performance.md"
    report.performance_page(runs, page).write()
    print(f"{page}: {len(runs)} runs")


# Command line -------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argument_parser("targets", __doc__, "none")
    parser.add_argument("--output-dir", type=output_folder, help="folder of the results (default: a temporary one)")
    parser.add_argument("--name", default="targets", help="prefix of the files' names, such as 2026-11-22-h100")
    parser.add_argument(
        "--parts", type=comma_separated([*PARTS, "none"]), help=f"of {', '.join(PARTS)} (default: all; or none)"
    )
    parser.add_argument("--add-run", action="store_true", help="add a run to those in the files, of the same code")
    parser.add_argument("--runs", type=int, default=1, help="number of runs")
    parser.add_argument("--jobs", type=int, default=8, help="providers to compile and check in parallel")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds for everything")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the ratios and write them; returns 1 if a provider failed, but not if a target is missed."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if (arguments.add_run or arguments.runs > 1) and git_state()[1]:  # before the first run
        parser.error("several runs need committed code, got a tree with local changes")
    parts = [part for part in arguments.parts or (SMOKE_PARTS if arguments.smoke else PARTS) if part != "none"]
    device = vit_gpu.choose_device(arguments.smoke or not parts)
    call = Call(device, arguments.smoke, time.monotonic() + arguments.limit, arguments.jobs)
    with tempfile.TemporaryDirectory() as thrown_away:
        folder = arguments.output_dir or Path(thrown_away)
        broken = measure(parts, lambda part: folder / f"{arguments.name}-{part}.json", call, arguments)
        conclude(folder, arguments.name)
    return broken


if __name__ == "__main__":
    sys.exit(main())
