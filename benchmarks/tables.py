"""What the performance page is made of: one run's records in groups that may be compared, and Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Record

OURS = "qframework"
TITLES = {
    "int8_linear": "INT8 linear",
    "attention": "Attention",
    "vit_cpu": "Vision transformers on the CPU",
    "vit_gpu": "Vision transformers on a GPU",
}


@dataclass(frozen=True)
class Run:
    """One result file."""

    stem: str
    benchmark: str
    machine: dict[str, Any]
    peaks: dict[str, float]
    records: list[Record]
    digest: str  # of the file's content; the plot carries it
    note: str | None = None

    @property
    def plot(self) -> str:
        return f"performance-{self.stem}.svg"

    @property
    def title(self) -> str:
        date = str(self.machine.get("date") or "date unknown").partition("T")[0]
        return f"{TITLES.get(self.benchmark, self.benchmark)}: {self.machine.get('device') or 'device unknown'}, {date}"

    def groups(self) -> list[list[Record]]:
        """Records that may be compared: of one shape, or of one model and batch, in the order measured."""
        groups: dict[tuple[str | None, str], list[Record]] = {}
        for record in self.records:
            groups.setdefault((record.op, record.subject), []).append(record)
        return list(groups.values())


def is_ours(record: Record) -> bool:
    return record.provider.startswith(OURS)


def split(group: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Timed records of qframework, and of its peers."""
    timed = [record for record in group if record.status == "ok"]
    return [record for record in timed if is_ours(record)], [record for record in timed if not is_ours(record)]


def speed(record: Record) -> float:
    """Larger is faster; 0 for a record without a time."""
    return record.images_per_second or record.tflops or record.gbps or 0.0


def ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}" if value and base else ""


def number(value: float | None) -> str:
    """Three significant digits, thousands in full."""
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
