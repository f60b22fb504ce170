"""Generates ``docs/families.md`` from ``benchmarks/results/families/``, called by benchmarks.report."""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.families_cases import FAMILIES
from benchmarks.families_models import DECODING
from benchmarks.harness import Record
from benchmarks.pages import Page, Plot
from benchmarks.plots import COLOUR, GREY, WIDTH
from benchmarks.tables import Run, bold_if, combined, commit_of, computer, number, ratio, sentence, speed, table

FOLDER = "families"  # below the folder of results
NAME = "families.md"
HEAD = """# Architectures

`python -m benchmarks.report` generates this page from the files in `benchmarks/results/families/`, which
`python -m benchmarks.families` writes. Do not edit it.

Whole models of timm and transformers with random weights, at the sizes of the originals; parameters that timm
initialises below 1e-3 are scaled up to 0.1, since FP16 cannot hold them. Every provider is compiled in its own process
and compared with FP32 eager before it is timed. Speeds are multiples of the same model in FP16 compiled by Inductor, at
the same batch. **Float** is `backend="qframework"` with its defaults, which changes attention, and norms of long rows;
**dynamic** adds the option `linear="int8_dynamic"` with frozen weights; **static** is quantized with PT2E by
`static_int8`. FP8 is torchao's, with scales per tensor, on bfloat16. Since Inductor takes minutes for a whole model of
it, some runs compile its blocks by themselves, which costs it 1 percent for ViT-B at batch 256. At batch 1, in
decoding, and for PVT and SegFormer, whose hosts take longer than their GPUs, the fastest of each, with and without CUDA
graphs, counts; decoding has 16 layers of Llama 1B and 8 of the 32 of Llama 8B, without the head. SQNR is that of the
outputs, of random weights, and says little about trained ones. First calls are seconds of `torch.compile` and the first
call while other models compile on the same processor, relative to FP16's. Encoders take sequences of mixed lengths,
padded. Kernels are the time of all GPU kernels of a call, FP16's as a multiple of ours: where that is above 1 and the
speed below, the host was slower in launching them, which varies from machine to machine and from second to second.
Rounds say by how much those of ours and of FP16 differ. Under CUDA graphs kernels are left out, since ours begin while
those before them end. Each mode of each architecture is shown as the newest run that timed it did, as a multiple of the
FP16 of that run; the runs are listed at the end.
"""
NOTHING = "\nNothing measured yet.\n"
MODES = {
    "fp16": ("fp16_compiled", "fp16_compiled_graphs"),
    "FP8": ("torchao_fp8_tensorwise", "torchao_fp8_tensorwise_blocks"),
    "float": ("qframework_float", "qframework_float_graphs"),
    "dynamic": ("qframework_dynamic_frozen", "qframework_dynamic_frozen_graphs"),
    "static": ("qframework_static", "qframework_static_graphs"),
}
OURS = ("float", "dynamic", "static")


class Measured(NamedTuple):
    """A provider's record and that of FP16 in the same run."""

    record: Record
    base: Record

    @property
    def relative(self) -> float:
        """Speed as a multiple of FP16's; 0 without a time."""
        return _speed(self.record) / _speed(self.base)


Case = dict[str, Measured]
"""What the newest run with a time says of each mode of one model at one batch: of its fastest provider."""


def cases(runs: Sequence[Run]) -> list[Case]:
    """The models and batches whose FP16 was timed, in the order of ``FAMILIES``; ``runs`` are newest first."""
    found: dict[tuple[str | None, int | None], Case] = {}
    for run in runs:
        for group in _groups(run):
            base = _fastest(group, MODES["fp16"])
            if base is None or not _speed(base):
                continue
            case = found.setdefault((base.model, base.batch), {})
            for mode, names in MODES.items():
                record = _fastest(group, names)
                if record is not None and not (mode in case and case[mode].relative):
                    case[mode] = Measured(record, base)
    order = {name: place for place, name in enumerate(FAMILIES)}
    return sorted(found.values(), key=lambda case: order.get(str(case["fp16"].record.model), len(order)))


def _groups(run: Run) -> list[list[Record]]:
    return replace(run, records=combined(run.records)).groups()


def _fastest(group: Sequence[Record], names: Sequence[str]) -> Record | None:
    return max((record for record in group if record.provider in names), key=speed, default=None)


def _speed(record: Record) -> float:
    """Sequences or images a second; 0 without a time."""
    return speed(record) if record.status == "ok" else 0.0


def relative(case: Mapping[str, Measured], mode: str) -> float:
    """A mode's speed as a multiple of FP16's; 0 without a time."""
    return case[mode].relative if mode in case else 0.0


@dataclass(frozen=True)
class Device:
    """One kind of GPU, and what was measured on it."""

    name: str
    runs: tuple[Run, ...]  # newest first

    @functools.cached_property
    def cases(self) -> list[Case]:
        return cases(self.runs)

    @property
    def digest(self) -> str:
        return hashlib.sha256(" ".join(run.digest for run in self.runs).encode()).hexdigest()[:16]

    @property
    def plot(self) -> str:
        return f"families-{re.sub(r'[^a-z0-9]+', '-', self.name.lower())}.svg"


def devices(runs: Sequence[Run]) -> list[Device]:
    """The devices of ``runs``."""
    newest = sorted(runs, key=lambda run: str(run.machine.get("date")), reverse=True)
    names = dict.fromkeys(str(run.machine.get("device")) for run in newest)
    return [Device(name, tuple(run for run in newest if str(run.machine.get("device")) == name)) for name in names]


def render(runs: Sequence[Run]) -> str:
    """The whole page as Markdown."""
    if not runs:
        return HEAD + NOTHING
    return "\n".join([HEAD, *map(_section, devices(runs))])


def _section(device: Device) -> str:
    found = device.cases
    parts = [f"## {device.name}\n", f"![Speed of each architecture](assets/{device.plot})\n"]
    parts += [_means(found), _losses(found)]
    parts += [_kind(kind, found) for kind in dict.fromkeys(family.kind for family in FAMILIES.values())]
    return "\n".join(filter(None, [*parts, _broken(device), _runs(device)]))


def _runs(device: Device) -> str:
    """The commits and dates of the runs that a table shows and what to know of each, below machine and versions."""
    told = [measured.record for case in device.cases for measured in case.values()]
    rows: dict[str, list[list[str]]] = {}
    for run in device.runs:
        records = [record for group in _groups(run) for record in group]
        if models := ", ".join(dict.fromkeys(str(record.model) for record in records if record in told)):
            date = str(run.machine.get("date") or "unknown")[: len("2026-01-01T00:00")].replace("T", " ")
            row = [date, commit_of(run.machine), models, run.note or ""]
            rows.setdefault(sentence(computer(run.machine)), []).append(row)
    parts = [f"{where}\n{table(['date', 'commit', 'models', 'what to know'], found)}" for where, found in rows.items()]
    return "\n".join(["### Runs\n", *parts])


def _means(found: Sequence[Case]) -> str:
    rows = []
    for title in ("throughput", "batch 1", "decoding"):
        subset = [case for case in found if _use(case) == title]
        rows.append([title, str(len(subset)), *(number(_mean(subset, mode)) for mode in ("FP8", *OURS))])
    return "Geometric means:\n\n" + table(["", "models", "FP8", *OURS], [row for row in rows if row[1] != "0"])


def _use(case: Case) -> str:
    """What a row of the table of means is of."""
    record = case["fp16"].record
    family = FAMILIES.get(str(record.model))
    if family is not None and family.kind == DECODING:
        return "decoding"
    return "throughput" if (record.batch or 0) > 1 else "batch 1"


def _mean(found: Sequence[Case], mode: str) -> float | None:
    values = [relative(case, mode) for case in found if relative(case, mode)]
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def _losses(found: Sequence[Case]) -> str:
    slower = [
        [
            str(case[mode].record.model),
            str(case[mode].record.batch),
            mode,
            number(relative(case, mode)),
            _kernels(case[mode]),
            _rounds(case[mode]),
        ]
        for case in found
        for mode in OURS
        if 0 < relative(case, mode) < 1
    ]
    if not slower:
        return "No architecture is slower than FP16 in any mode.\n"
    return "Slower than FP16:\n\n" + table(["model", "batch", "mode", "speed", "kernels", "rounds"], slower)


def _kind(kind: str, found: Sequence[Case]) -> str:
    """The table of one kind of architecture; empty if none was measured."""
    columns: dict[str, Callable[[Case], str]] = {
        "model": lambda case: str(case["fp16"].record.model),
        "batch": lambda case: str(case["fp16"].record.batch),
        "FP16, ms": lambda case: number(case["fp16"].record.p50_ms),
        **{mode: functools.partial(_cell, mode=mode) for mode in ("FP8", *OURS)},
        "kernels": lambda case: _pair(case, _kernels),
        "SQNR, dB": lambda case: _pair(case, lambda measured: number(measured.record.sqnr_db)),
        "first call": lambda case: _pair(case, lambda measured: _multiple(measured, "first_call_s")),
        "memory": lambda case: _pair(case, lambda measured: _multiple(measured, "peak_mb")),
    }
    rows = [
        [column(case) for column in columns.values()]
        for case in found
        if (family := FAMILIES.get(str(case["fp16"].record.model))) is not None and family.kind == kind
    ]
    return f"### {kind[0].upper()}{kind[1:]}\n\n{table(list(columns), rows)}" if rows else ""


def _cell(case: Case, mode: str) -> str:
    if not relative(case, mode):
        return case[mode].record.status if mode in case else ""
    best = max(relative(case, each) for each in MODES)
    return bold_if(relative(case, mode) == best, number(relative(case, mode)))


def _pair(case: Case, text: Callable[[Measured], str]) -> str:
    """Dynamic and static."""
    return ", ".join(text(case[mode]) if relative(case, mode) else "" for mode in ("dynamic", "static"))


def _kernels(measured: Measured) -> str:
    """FP16's time of kernels as a multiple of the record's; empty where one is unknown, or where kernels overlap."""
    if measured.record.provider.endswith("_graphs"):
        return ""
    return ratio(measured.base.kernels_ms or 0, measured.record.kernels_ms or 0)


def _rounds(measured: Measured) -> str:
    """By how many percent the fastest round of ours and of FP16 took less time than the slowest."""
    spreads = (measured.record.spread, measured.base.spread)
    return "" if None in spreads else ", ".join(f"{100 * (spread or 0.0):.0f} %" for spread in spreads)


def _multiple(measured: Measured, field: str) -> str:
    """A field of the record as a multiple of FP16's."""
    return ratio(getattr(measured.record, field) or 0, getattr(measured.base, field) or 0)


def _broken(device: Device) -> str:
    """What no run timed, as the newest one reports it."""
    timed = {record.key for run in device.runs for record in combined(run.records) if _speed(record)}
    reported: dict[tuple[Any, ...], Record] = {}
    for record in (record for run in device.runs for record in combined(run.records)):
        if record.key not in timed:
            reported.setdefault(record.key, record)
    rows = [
        [str(record.model), str(record.batch), record.provider, f"{record.status}: {record.reason}"]
        for record in reported.values()
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

    found = [case for case in device.cases if (case["fp16"].record.batch or 0) > 1]
    style: dict[Any, Any] = {"svg.hashsalt": device.digest, "svg.fonttype": "none", "font.size": 8}
    markers = {"FP8": ("s", GREY), "float": ("d", "#57534e"), "dynamic": ("o", "#fb923c"), "static": ("o", COLOUR)}
    with plt.rc_context(style):
        figure, axis = plt.subplots(figsize=(WIDTH, 1.2 + 0.22 * len(found)), layout="constrained")
        for mode, (marker, colour) in markers.items():
            points = [(relative(case, mode), row) for row, case in enumerate(found) if relative(case, mode)]
            axis.plot(*zip(*points, strict=True), marker, color=colour, label=mode) if points else None
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_yticks(range(len(found)), [case["fp16"].record.subject for case in found])
        axis.invert_yaxis()
        axis.margins(y=0.01)
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
