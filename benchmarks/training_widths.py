"""From which width blocks train faster in INT8 than in BF16, of the stored steps of whole models (training_models.py).

``qframework.training.plan`` holds the two limits, one for blocks with a gated MLP, and a test compares them with these.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.harness import Record
from benchmarks.tables import table
from benchmarks.training_models import MODELS, OPS
from qframework.training.plan import blocks_of, is_gated, width_of

OURS, BASELINE = "qframework", "bf16"


@dataclass(frozen=True)
class Speed:
    """How much faster a model trains in INT8 than in BF16 under one of training_models' OPS, in one run."""

    model: str
    channels: int
    gated: bool
    op: str
    ratio: float


@functools.cache
def shape_of(model: str) -> tuple[int, bool]:
    """Channels of a model's blocks, and whether their MLPs are gated."""
    with torch.device("meta"):
        block = blocks_of(MODELS[model].build(1))[0]
    return width_of(block), is_gated(block)


def speeds(runs: Iterable[Sequence[Record]]) -> list[Speed]:
    """Of all models timed in both precisions, the widest first."""
    found = []
    for records in runs:
        times = {(row.model, row.op, row.provider): row.p50_ms for row in records if row.benchmark == "training_models"}
        for (model, op, provider), ours in times.items():
            baseline, name = times.get((model, op, BASELINE)), (model or "").partition(",")[0]
            if provider == OURS and ours and baseline and op and name in MODELS:
                found.append(Speed(name, *shape_of(name), op, baseline / ours))
    return sorted(found, key=lambda speed: (speed.gated, speed.channels), reverse=True)


def limit(found: Iterable[Speed], gated: bool) -> int | None:
    """The least width such that no model of it or wider was slower, without CUDA graphs; None if all were."""
    alike = [speed for speed in found if speed.gated == gated and speed.op == OPS[0]]
    slower = max((speed.channels for speed in alike if speed.ratio < 1), default=0)
    return min((speed.channels for speed in alike if speed.channels > slower), default=None)


def section(runs: Iterable[Sequence[Record]]) -> str:
    """The limits and what they rest on as Markdown."""
    found = speeds(runs)
    header = ["model", "channels", "gated MLP", "INT8 over BF16", "under CUDA graphs"]
    lines = [
        [model, f"{channels:,}", "yes" if gated else "", *(_ratios(found, model, op) for op in OPS)]
        for model, channels, gated in dict.fromkeys((each.model, each.channels, each.gated) for each in found)
    ]
    limits = {gated: limit(found, gated) for gated in (False, True)}
    told = [f"{'not measured' if value is None else f'{value:,}'}" for value in limits.values()]
    note = (
        f"Speed of whole training steps, a figure for each run. No model of at least {told[0]} channels was slower in "
        f"INT8, or with gated MLPs {told[1]}: from there on a conversion changes blocks without being asked to.\n"
    )
    return f"## Widths\n\n{note}\n{table(header, lines)}"


def _ratios(found: Iterable[Speed], model: str, op: str) -> str:
    return ", ".join(f"{speed.ratio:.2f}" for speed in found if (speed.model, speed.op) == (model, op))
