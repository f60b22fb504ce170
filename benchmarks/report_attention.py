"""The section of the performance page on attention: tables with one row for each shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.harness import Record
from benchmarks.labels import label
from benchmarks.tables import Run, bold_if, is_ours, number, ratio, speed, split, table

SHAPE = "B,H,N,D"
SPLIT_NOTE = """A whole call can take less than the sum, if it quantizes inside the kernel, or more.
"""
PARTS = ("attention_quantize", "attention_kernel")  # op of the records that time a part of a call
NOTE = """Median TOP/s of whole calls (smoothing, quantization and kernel), counting 4 B H N N D operations, or half of
them if causal. The fastest of each row is in bold. `mixed_static` has INT8 inputs and outputs, all others float16.
Relative L1 errors are against float32 attention, with normal Q and V and a bias per channel of K.
"""


def attention_tables(run: Run) -> str:
    """The fastest variant against the peers, all variants, their errors, and the parts of a call."""
    groups = [group for group in run.groups() if group[0].op == "attention"]
    parts = [NOTE, _against_peers(groups), "### Every variant, TOP/s\n", _by_provider(groups, speed, number, is_ours)]
    parts += ["### Relative L1 error\n", _by_provider(groups, _error, _four_digits, lambda record: True)]
    if refused := _refused(groups):
        parts += ["### Wrong and not timed\n", refused]
    if split_times := _split_times(run):
        parts += ["### Milliseconds of quantization and of the kernel alone\n", SPLIT_NOTE, split_times]
    return "\n".join(parts)


def _against_peers(groups: Sequence[Sequence[Record]]) -> str:
    peers = _names(groups, lambda record: not is_ours(record))
    rows = []
    for group in groups:
        ours, others = split(group)
        best = max(ours, key=speed, default=None)
        fastest = max(map(speed, [*ours, *others]), default=0.0)
        times = {record.provider: speed(record) for record in others}
        cells = [bold_if(times.get(name) == fastest, number(times.get(name))) for name in peers]
        own = bold_if(speed(best) == fastest, number(speed(best))) if best else ""
        name = _short(best.provider) if best else ""
        gain = ratio(speed(best), max(times.values(), default=0.0)) if best else ""
        rows.append([group[0].subject, *cells, own, name, gain])
    return table([SHAPE, *map(label, peers), "qframework, fastest", "which", "/ best peer"], rows)


def _refused(groups: Sequence[Sequence[Record]]) -> str:
    """Providers with wrong results, with shapes and reasons; empty if there are none."""
    wrong = [record for group in groups for record in group if record.status == "wrong"]
    wrong.sort(key=is_ours)
    rows = [[label(record.provider), record.subject, record.reason or ""] for record in wrong]
    return table(["provider", SHAPE, "failed check"], rows) if rows else ""


def _by_provider(
    groups: Sequence[Sequence[Record]],
    measure: Callable[[Record], float | None],
    text: Callable[[float | None], str],
    wanted: Callable[[Record], bool],
) -> str:
    """One row for each shape, one column for each provider; empty cells were not measured."""
    names = _names(groups, wanted)
    rows = []
    for group in groups:
        values = {record.provider: measure(record) for record in group if record.status == "ok"}
        rows.append([group[0].subject, *(text(values.get(name)) for name in names)])
    return table([SHAPE, *map(_short, names)], rows)


def _split_times(run: Run) -> str:
    """``quantization + kernel`` for each shape and variant measured in parts; empty if none was."""
    times: dict[str, dict[tuple[str, str | None], str]] = {}
    for record in run.records:
        if record.op in PARTS and record.status == "ok":
            times.setdefault(record.subject, {})[record.provider, record.op] = number(record.p50_ms)
    names = list(dict.fromkeys(name for row in times.values() for name, _ in row))
    rows = [
        [subject, *(" + ".join(row.get((name, part), "?") for part in PARTS) for name in names)]
        for subject, row in times.items()
    ]
    return table([SHAPE, *map(_short, names)], rows) if rows else ""


def _names(groups: Sequence[Sequence[Record]], wanted: Callable[[Record], bool]) -> list[str]:
    """Providers that are ``wanted`` and succeeded at some shape, in the order measured."""
    records = (record for group in groups for record in group if record.status == "ok" and wanted(record))
    return list(dict.fromkeys(record.provider for record in records))


def _short(provider: str) -> str:
    return label(provider)


def _error(record: Record) -> float | None:
    return record.relative_l1


def _four_digits(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
