"""The parts of the generated pages: records in comparable groups, and Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness import BROKEN, Record
from benchmarks.labels import label

OURS = "qframework"
TITLES = {
    "int8_linear": "INT8 linear",
    "attention": "Attention",
    "vit_cpu": "Vision transformers on the CPU",
    "vit_gpu": "Vision transformers on a GPU",
    "vit_first_call": "First calls of vision transformers on a GPU",
    "families": "Architectures on a GPU",
    "host_calls": "Host time of a call",
    "training_block": "GPT blocks, INT8 training",
    "training_fsdp": "Training steps under FSDP2",
    "training_models": "Training steps of whole models",
    "block_linear": "Linears of INT8 training",
    "block_operators": "Operators between INT8 blocks",
}


@dataclass(frozen=True)
class Run:
    """One result file."""

    stem: str
    benchmark: str
    machine: dict[str, Any]
    peaks: dict[str, float]
    records: list[Record]
    digest: str  # of the file's content; stored in the plot
    note: str | None = None
    measured: tuple[Record, ...] = ()  # the records of each run, which ``records`` combines

    @property
    def plot(self) -> str:
        return f"performance-{self.stem}.svg"

    @property
    def where(self) -> str:
        """File and commit."""
        return f"{self.stem}, `{self.machine.get('commit')}`"

    @property
    def title(self) -> str:
        date = str(self.machine.get("date") or "date unknown").partition("T")[0]
        subjects = {record.subject for record in self.records if record.model}
        what = ", ".join([TITLES.get(self.benchmark, self.benchmark), *(subjects if len(subjects) == 1 else ())])
        return f"{what}: {self.machine.get('device') or 'device unknown'}, {date}"

    def groups(self) -> list[list[Record]]:
        """Comparable records, those of one shape or of one model and batch, in the order measured."""
        groups: dict[tuple[str | None, str], list[Record]] = {}
        for record in self.records:
            groups.setdefault((record.op, record.subject), []).append(record)
        return list(groups.values())


AVERAGED = (
    "p20_ms", "p50_ms", "p80_ms", "tflops", "gbps", "images_per_second", "percent_of_peak", "prepare_s", "first_call_s",
)  # fmt: skip


def shown(runs: Sequence[Run]) -> list[Run]:
    """The parts of ``runs`` that a page shows: for each device and shape or model, the newest run that measured it.

    A run with less than half of the providers does not count, so that it cannot hide a full comparison.
    """
    groups: dict[tuple[object, ...], list[tuple[Run, set[str]]]] = {}
    for run in runs:
        for group in run.groups():
            providers = {record.provider for record in group}
            groups.setdefault(_place(run, group[0]), []).append((run, providers))
    chosen = {}
    for place, found in groups.items():
        most = len(set().union(*(providers for _, providers in found)))
        full = [(run, providers) for run, providers in found if 2 * len(providers) >= most] or found
        chosen[place] = max(full, key=lambda each: str(each[0].machine.get("date")))[0]
    kept = []
    for run in runs:
        records = [record for record in run.records if chosen[_place(run, record)] is run]
        if records:
            kept.append(replace(run, records=records))
    return kept


def _place(run: Run, record: Record) -> tuple[object, ...]:
    return run.benchmark, run.machine.get("device"), record.op, record.subject


def combined(records: Sequence[Record]) -> list[Record]:
    """One record per measured case, with the geometric means and the spread of several runs.

    A wrong or failed run is shown even if another one passed; a timeout is not.
    """
    runs: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        runs.setdefault(record.key, []).append(record)
    return [_combine(same) for same in runs.values()]


def _combine(same: Sequence[Record]) -> Record:
    broken = [record for record in same if record.status in BROKEN]
    good = [record for record in same if record.status == "ok"]
    if broken or len(good) < 2:
        return replace((broken or good or list(same))[0], run=None)
    values = {name: [getattr(record, name) for record in good] for name in AVERAGED}
    means: dict[str, Any] = {name: statistics.geometric_mean(found) for name, found in values.items() if all(found)}
    took = [record.p50_ms or record.first_call_s or 0.0 for record in good]
    spread = 1 - min(took) / max(took) if all(took) else None
    return replace(good[0], run=None, spread=spread, **means)


def is_ours(record: Record) -> bool:
    return record.provider.startswith(OURS)


def split(group: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """The successful records of qframework and of its peers."""
    timed = [record for record in group if record.status == "ok"]
    return [record for record in timed if is_ours(record)], [record for record in timed if not is_ours(record)]


def speed(record: Record) -> float:
    """The rate of a record, higher is faster; 0 without a time."""
    return record.images_per_second or record.tflops or record.gbps or 0.0


def slower(runs: Sequence[Run], value: Callable[[Record], float], what: Callable[[Record], str]) -> str:
    """A Markdown table of the cases where a peer is faster than the best of qframework, by ``value``."""
    rows = []
    for run, group in [(each, group) for each in runs for group in each.groups()]:
        ours, peers = split([record for record in group if value(record)])
        best = max(ours, key=value, default=None)
        faster = sorted((peer for peer in peers if best and value(peer) > value(best)), key=value, reverse=True)
        if best and faster:
            multiples = "; ".join(f"{ratio(value(best), value(peer))} {label(peer.provider)}" for peer in faster)
            rows.append([run.title, what(best), label(best.provider), multiples])
    header = ["run", "what", "best of qframework", "its speed as a multiple of the faster peers'"]
    return table(header, rows) if rows else "Nowhere in these runs.\n"


def ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}" if value and base else ""


def number(value: float | None) -> str:
    """Three significant digits, and all digits before the decimal point."""
    if value is None or value == 0:
        return "" if value is None else "0"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def scientific(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.1e}"


def bold_if(condition: bool, text: str) -> str:
    return f"**{text}**" if condition and text else text


def labelled(name: str, value: object) -> str:
    return f"{name} {value}" if value is not None else ""


def joined(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines) + "\n"


def computer(machine: Mapping[str, Any]) -> dict[str, str]:
    """Device, CPU and versions."""
    names = ("qframework", "torch", "triton", "torchao", "timm", "python")
    return {
        "device": joined(machine.get("device"), machine.get("capability"), labelled("driver", machine.get("driver"))),
        "CPU": joined(
            machine.get("cpu"),
            labelled("cores", machine.get("cores")),
            labelled("threads", machine.get("threads")),
            " ".join(machine.get("cpu_flags") or ()),
        ),
        "versions": joined(*(labelled(name, machine.get(name)) for name in names)),
    }


def commit_of(machine: Mapping[str, Any]) -> str:
    commit = f"`{machine['commit']}`" if machine.get("commit") else "unknown"
    return commit + (" with local changes" if machine.get("dirty") else "")


def machine_line(machine: Mapping[str, Any], peaks: Mapping[str, float]) -> str:
    """Machine, versions, commit and date in one paragraph."""
    rows = {**computer(machine), "commit": commit_of(machine), "date": machine.get("date") or "unknown"}
    if peaks:
        rows["best torch GEMM at 8192"] = joined(*(f"{width} {number(peak)} TFLOP/s" for width, peak in peaks.items()))
    return sentence(rows)


def sentence(rows: Mapping[str, object]) -> str:
    return "; ".join(f"{key}: {value}" for key, value in rows.items()) + ".\n"
