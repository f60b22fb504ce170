"""Generates ``docs/families.md`` from ``benchmarks/results/families/``, called by benchmarks.report."""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.families_cases import DECODING, FAMILIES
from benchmarks.harness import Record
from benchmarks.pages import Page, Plot
from benchmarks.plots import COLOUR, GREY, WIDTH
from benchmarks.tables import Run, bold_if, combined, machine_line, number, ratio, shown, speed, table

FOLDER = "families"  # below the folder of results
NAME = "families.md"
HEAD = """# Architectures

`python -m benchmarks.report` generates this page from the files in `benchmarks/results/families/`, which
`python -m benchmarks.families` writes. Do not edit it.

Whole models of timm and transformers with random weights, at the sizes of the originals; parameters that timm
initialises below 1e-3 are scaled up to 0.1, since FP16 cannot hold them. Every provider is compiled in its own process
and compared with FP32 eager before it is timed. Speeds are multiples of the same model in FP16 compiled by Inductor,
at the same batch. **Float** is `backend="qframework"` with its defaults, which changes attention only; **dynamic**
adds the option `linear="int8_dynamic"` with frozen weights; **static** is quantized with PT2E by `static_int8`. FP8 is
torchao's, with scales per tensor, on bfloat16. Since Inductor takes minutes for a whole model of it, some runs compile
its blocks by themselves, which costs it 1 percent for ViT-B at batch 256. At batch 1 and in decoding, the fastest of
each, with and without CUDA graphs, counts; decoding has 16 layers of Llama 1B and 8 of the 32 of Llama 8B, without the
head. SQNR is that of the outputs, of random weights, and says little about trained ones. First calls are seconds of
`torch.compile` and the first call while other models compile on the same processor, relative to FP16's. Encoders take
sequences of mixed lengths, padded. Kernels are the time of all GPU kernels of a call, FP16's as a multiple of ours:
where that is above 1 and the speed below, the host was slower in launching them, which varies from machine to machine.
Each architecture is shown as the newest run that has it measured it, with the FP16 of that run; the runs are listed at
the end.
"""
NOTHING = "\nNothing measured yet.\n"
MODES = {
    "fp16": ("fp16_compiled", "fp16_compiled_graphs"),
    "FP8": ("torchao_fp8_tensorwise", "torchao_fp8_tensorwise_blocks"),
    "float": ("qframework_float",),
    "dynamic": ("qframework_dynamic_frozen", "qframework_dynamic_frozen_graphs"),
    "static": ("qframework_static", "qframework_static_graphs"),
}
OURS = ("float", "dynamic", "static")
Case = dict[str, Record]
"""The fastest record of each mode of one model at one batch."""


def cases(records: Sequence[Record]) -> list[Case]:
    """The models and batches whose FP16 was timed."""
    groups: dict[tuple[str | None, int | None], list[Record]] = {}
    for record in combined(records):
        groups.setdefault((record.model, record.batch), []).append(record)
    found = [{mode: _fastest(group, names) for mode, names in MODES.items()} for group in groups.values()]
    kept = [{mode: record for mode, record in case.items() if record is not None} for case in found]
    return [case for case in kept if speed_of(case, "fp16")]


def _fastest(group: Sequence[Record], names: Sequence[str]) -> Record | None:
    return max((record for record in group if record.provider in names), key=speed, default=None)


def speed_of(case: Mapping[str, Record], mode: str) -> float:
    """Sequences or images a second; 0 without a time."""
    return speed(case[mode]) if mode in case and case[mode].status == "ok" else 0.0


def relative(case: Mapping[str, Record], mode: str) -> float:
    """Speed as a multiple of FP16's; 0 without a time."""
    return speed_of(case, mode) / speed_of(case, "fp16")


@dataclass(frozen=True)
class Device:
    """One kind of GPU, and the newest measurement of each model and batch on it."""

    name: str
    runs: tuple[Run, ...]  # newest first; records that a newer run has again are left out

    @property
    def records(self) -> list[Record]:
        """Of all runs, in the order of ``FAMILIES``."""
        order = {name: place for place, name in enumerate(FAMILIES)}
        found = [record for run in self.runs for record in run.records]
        return sorted(found, key=lambda record: order.get(str(record.model), len(order)))

    @property
    def digest(self) -> str:
        return hashlib.sha256(" ".join(run.digest for run in self.runs).encode()).hexdigest()[:16]

    @property
    def plot(self) -> str:
        return f"families-{re.sub(r'[^a-z0-9]+', '-', self.name.lower())}.svg"


def devices(runs: Sequence[Run]) -> list[Device]:
    """The devices of ``runs``."""
    names = dict.fromkeys(str(run.machine.get("device")) for run in runs)
    kept = shown(runs)
    return [Device(name, tuple(run for run in kept if str(run.machine.get("device")) == name)) for name in names]


def render(runs: Sequence[Run]) -> str:
    """The whole page as Markdown."""
    if not runs:
        return HEAD + NOTHING
    return "\n".join([HEAD, *map(_section, devices(runs))])


def _section(device: Device) -> str:
    found = cases(device.records)
    parts = [f"## {device.name}\n", f"![Speed of each architecture](assets/{device.plot})\n"]
    parts += [_means(found), _losses(found)]
    parts += [_kind(kind, found) for kind in dict.fromkeys(family.kind for family in FAMILIES.values())]
    return "\n".join(filter(None, [*parts, _broken(device.records), _runs(device)]))


def _runs(device: Device) -> str:
    """The machines, versions and commits of the runs, and what to know of each."""
    parts = ["### Runs\n"]
    for run in device.runs:
        models = ", ".join(dict.fromkeys(str(record.model) for record in run.records))
        parts += [f"{models}: {run.note or ''}\n", machine_line(run.machine, run.peaks)]
    return "\n".join(parts)


def _means(found: Sequence[Case]) -> str:
    rows = []
    for title in ("throughput", "batch 1", "decoding"):
        subset = [case for case in found if _use(case) == title]
        rows.append([title, str(len(subset)), *(number(_mean(subset, mode)) for mode in ("FP8", *OURS))])
    return "Geometric means:\n\n" + table(["", "models", "FP8", *OURS], [row for row in rows if row[1] != "0"])


def _use(case: Case) -> str:
    """What a row of the table of means is of."""
    family = FAMILIES.get(str(case["fp16"].model))
    if family is not None and family.kind == DECODING:
        return "decoding"
    return "throughput" if (case["fp16"].batch or 0) > 1 else "batch 1"


def _mean(found: Sequence[Case], mode: str) -> float | None:
    values = [relative(case, mode) for case in found if relative(case, mode)]
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def _losses(found: Sequence[Case]) -> str:
    slower = [
        [
            str(case["fp16"].model),
            str(case["fp16"].batch),
            mode,
            number(relative(case, mode)),
            _kernels(case[mode], case["fp16"]),
        ]
        for case in found
        for mode in OURS
        if 0 < relative(case, mode) < 1
    ]
    if not slower:
        return "No architecture is slower than FP16 in any mode.\n"
    return "Slower than FP16:\n\n" + table(["model", "batch", "mode", "speed", "kernels"], slower)


def _kind(kind: str, found: Sequence[Case]) -> str:
    """The table of one kind of architecture; empty if none was measured."""
    columns: dict[str, Callable[[Case], str]] = {
        "model": lambda case: str(case["fp16"].model),
        "batch": lambda case: str(case["fp16"].batch),
        "FP16, ms": lambda case: number(case["fp16"].p50_ms),
        **{mode: functools.partial(_cell, mode=mode) for mode in ("FP8", *OURS)},
        "kernels": lambda case: _pair(case, lambda record: _kernels(record, case["fp16"])),
        "SQNR, dB": lambda case: _pair(case, lambda record: number(record.sqnr_db)),
        "first call": lambda case: _pair(case, lambda record: _first_call(record, case["fp16"])),
        "memory": lambda case: _pair(case, lambda record: ratio(record.peak_mb or 0, case["fp16"].peak_mb or 0)),
    }
    rows = [
        [column(case) for column in columns.values()]
        for case in found
        if case["fp16"].model in FAMILIES and FAMILIES[str(case["fp16"].model)].kind == kind
    ]
    return f"### {kind[0].upper()}{kind[1:]}\n\n{table(list(columns), rows)}" if rows else ""


def _cell(case: Case, mode: str) -> str:
    if not relative(case, mode):
        return case[mode].status if mode in case else ""
    best = max(relative(case, each) for each in MODES)
    return bold_if(relative(case, mode) == best, number(relative(case, mode)))


def _pair(case: Case, text: Callable[[Record], str]) -> str:
    """Dynamic and static."""
    return ", ".join(text(case[mode]) if speed_of(case, mode) else "" for mode in ("dynamic", "static"))


def _kernels(record: Record, base: Record) -> str:
    """FP16's time of kernels as a multiple of the record's; empty where one is unknown."""
    return ratio(base.kernels_ms or 0, record.kernels_ms or 0)


def _first_call(record: Record, base: Record) -> str:
    return ratio(record.first_call_s or 0, base.first_call_s or 0)


def _broken(records: Sequence[Record]) -> str:
    rows = [
        [str(record.model), str(record.batch), record.provider, f"{record.status}: {record.reason}"]
        for record in records
        if record.status != "ok"
    ]
    return "### Without a time\n\n" + table(["model", "batch", "provider", "reason"], rows) if rows else ""


# The plot -------------------------------------------------------------------------------------------------------------


def _mark(device: Device) -> str:
    code = inspect.getsource(_draw)
    return f"results {device.digest}, drawn by {hashlib.sha256(code.encode()).hexdigest()[:16]}"


def _draw(device: Device, path: Path) -> None:
    """One line for each model at its batch for throughput: FP8 grey, ours coloured, FP16 at 1."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    found = [case for case in cases(device.records) if (case["fp16"].batch or 0) > 1]
    style: dict[Any, Any] = {"svg.hashsalt": device.digest, "svg.fonttype": "none", "font.size": 8}
    markers = {"FP8": ("s", GREY), "float": ("d", "#57534e"), "dynamic": ("o", "#fb923c"), "static": ("o", COLOUR)}
    with plt.rc_context(style):
        figure, axis = plt.subplots(figsize=(WIDTH, 1.2 + 0.22 * len(found)), layout="constrained")
        for mode, (marker, colour) in markers.items():
            points = [(relative(case, mode), row) for row, case in enumerate(found) if relative(case, mode)]
            axis.plot(*zip(*points, strict=True), marker, color=colour, label=mode) if points else None
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_yticks(range(len(found)), [f"{case['fp16'].model}, batch {case['fp16'].batch}" for case in found])
        axis.invert_yaxis()
        axis.grid(axis="x", linewidth=0.4)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("speed as a multiple of FP16 compiled by Inductor")
        axis.legend(loc="lower right", frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": _mark(device)})
        plt.close(figure)


def families_page(runs: Sequence[Run], path: Path) -> Page:
    """The page of ``runs``, with a plot for each device."""
    plots = {each.plot: Plot(_mark(each), functools.partial(_draw, each)) for each in devices(runs)}
    return Page(path, render(runs), plots, "families-*.svg")
