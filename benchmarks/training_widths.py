"""From which width blocks train faster in INT8 than in BF16, of the stored steps of whole models (training_models.py).

Of each model the newest file counts, with all its runs, since older ones measured other code.
``qframework.training.plan`` holds the two limits, one for blocks with many linears, and a test compares them with
these.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.harness import Record
from benchmarks.tables import table
from benchmarks.training_models import OPS
from benchmarks.training_subjects import MODELS
from qframework.training.plan import blocks_of, has_many_linears, width_of

OURS, BASELINE = "qframework", "bf16"
LEAST_GAIN = 1.03  # smaller ones are within the difference of two runs, and another model of this width may lose


@dataclass(frozen=True)
class Speed:
    """How much faster a model trains in INT8 than in BF16 under one of training_models' OPS, in one run."""

    model: str
    channels: int
    many: bool  # linears, or a gated MLP
    op: str
    ratio: float
    date: str = ""  # of the file


@functools.cache
def shape_of(model: str) -> tuple[int, bool]:
    """Channels of a model's blocks, and whether these have many linears."""
    with torch.device("meta"):
        block = blocks_of(MODELS[model].build(1))[0]
    return width_of(block), has_many_linears(block)


def speeds(files: Iterable[tuple[str, Sequence[Record]]]) -> list[Speed]:
    """Of all models timed in both precisions in one run, the widest first; of dates of files and their records."""
    found = []
    for date, records in files:
        rows = [row for row in records if row.benchmark == "training_models"]
        times = {(row.model, row.op, row.run, row.provider): row.p50_ms for row in rows}
        for (model, op, run, provider), ours in times.items():
            baseline, name = times.get((model, op, run, BASELINE)), (model or "").partition(",")[0]
            if provider == OURS and ours and baseline and op and name in MODELS:
                found.append(Speed(name, *shape_of(name), op, baseline / ours, date))
    return sorted(found, key=lambda speed: (speed.many, speed.channels, speed.date), reverse=True)


def newest(found: Iterable[Speed]) -> list[Speed]:
    """Those of the newest file with the same model and operation."""
    found = list(found)
    dates: dict[tuple[str, str], str] = {}
    for speed in found:
        dates[speed.model, speed.op] = max(speed.date, dates.get((speed.model, speed.op), ""))
    return [speed for speed in found if speed.date == dates[speed.model, speed.op]]


def limit(found: Iterable[Speed], many: bool) -> int | None:
    """The least width such that all models of it or wider gained, without CUDA graphs; None if no width is.

    Only the newest file of each model counts.
    """
    alike = [speed for speed in newest(found) if speed.many == many and speed.op == OPS[0]]
    slower = max((speed.channels for speed in alike if speed.ratio < LEAST_GAIN), default=0)
    return min((speed.channels for speed in alike if speed.channels > slower), default=None)


def section(files: Iterable[tuple[str, Sequence[Record]]]) -> str:
    """The limits and what they rest on as Markdown."""
    found = speeds(files)
    header = ["model", "channels", "more than four linears, or gated", "INT8 over BF16", "under CUDA graphs"]
    lines = [
        [model, f"{channels:,}", "yes" if many else "", *(_ratios(found, model, op) for op in OPS)]
        for model, channels, many in dict.fromkeys((each.model, each.channels, each.many) for each in found)
    ]
    limits = {many: limit(found, many) for many in (False, True)}
    told = [f"{'not measured' if value is None else f'{value:,}'}" for value in limits.values()]
    note = (
        "Speed of whole training steps, a figure for each run, the newest first. In the newest file of each, all "
        f"models of at least {told[0]} channels were at least {LEAST_GAIN} times as fast in INT8, or with more than "
        f"four linears in a block or gated MLPs {told[1]}: from there on a conversion changes blocks without being "
        "asked to.\n"
    )
    return f"## Widths\n\n{note}\n{table(header, lines)}"


def _ratios(found: Iterable[Speed], model: str, op: str) -> str:
    return ", ".join(f"{speed.ratio:.2f}" for speed in found if (speed.model, speed.op) == (model, op))
