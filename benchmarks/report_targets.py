"""The section of the performance page on what was promised: every target beside the newest run that measured it."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.tables import Run
from benchmarks.target_table import TARGETS, Outcome, Target, evaluate, rows

NOTE = """Of speeds, ours over the peer's: the geometric mean over the shapes, the fastest of ours against the fastest
peer of the same run. Of times and memory, our cost over the peer's. PASS: every run of the file holds what must be,
with all shapes and all peers; `open`: some are still to be measured. Each row is from one file, whose name says
whether from an H100 or an H200: the same processor, with faster memory. Rows without a `must` show what a choice
costs.
"""


def targets_section(runs: Sequence[Run]) -> str:
    """The section as Markdown."""
    outcomes = [(target, *newest(target, runs)) for target in TARGETS]
    return f"## Targets\n\n{NOTE}\n{rows(outcomes)}"


def newest(target: Target, runs: Sequence[Run], any_device: bool = False) -> tuple[Outcome | None, str]:
    """The outcome of the newest file with all shapes and peers, else of the newest with some; the file and its commit.

    Of files from the device the target is promised for, unless ``any_device``.
    """
    found = []
    for run in runs:
        outcome = evaluate(target, run.measured)
        if outcome is not None and (any_device or target.is_for(str(run.machine.get("device")))):
            found.append((outcome.is_complete, str(run.machine.get("date")), run.where, outcome))
    _, _, where, outcome = max(found, key=lambda entry: entry[:3], default=(False, "", "", None))
    return outcome, where
