"""The section of the performance page on targets: each with the newest run that measured it."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.tables import Run
from benchmarks.target_table import TARGETS, Outcome, Target, evaluate, rows

NOTE = """Ratios of qframework over the peer. For speed, they are geometric means over the shapes, of the fastest of
qframework over the fastest peer in the same run; for times and memory, lower is better. A peer that a run has no figure
of counts with its best of the file's other runs. PASS means that every run of the file meets `must` with all shapes and
all peers; `open` means that some are missing. Each row comes from one file, whose name says H100 or H200 (the same
processor with faster memory). Rows without `must` are informational.
"""


def targets_section(runs: Sequence[Run]) -> str:
    """The section as Markdown."""
    outcomes = [(target, *newest(target, runs)) for target in TARGETS]
    return f"## Targets\n\n{NOTE}\n{rows(outcomes)}"


def newest(target: Target, runs: Sequence[Run], any_device: bool = False) -> tuple[Outcome | None, str]:
    """The outcome of the newest file with all shapes and peers, or of the newest with some; the file and its commit.

    Only files from the target's devices count, unless ``any_device``.
    """
    found = []
    for run in runs:
        outcome = evaluate(target, run.measured)
        if outcome is not None and (any_device or target.is_for(str(run.machine.get("device")))):
            found.append((outcome.is_complete, str(run.machine.get("date")), run.where, outcome))
    _, _, where, outcome = max(found, key=lambda entry: entry[:3], default=(False, "", "", None))
    return outcome, where
