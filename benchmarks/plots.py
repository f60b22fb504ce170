"""One plot for each run, as SVG: ours in colour, peers in grey. Equal results give an equal file."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Record
from benchmarks.report_attention import PARTS
from benchmarks.tables import Run, is_ours, number, speed, split

COLOUR, GREY = "#c2410c", "#a8a29e"
WIDTH = 7.5


def draw(run: Run, path: Path) -> None:
    """The plot of ``run``: dots along one line for each shape of attention, bars otherwise."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    style: dict[Any, Any] = {
        "svg.hashsalt": run.digest,
        "svg.fonttype": "none",  # text stays text: a quarter of the size
        "font.size": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with plt.rc_context(style):
        figure = _functions(run)[0](run, plt)
        figure.suptitle(run.title)
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": mark(run)})
        plt.close(figure)


def mark(run: Run) -> str:
    """What a plot carries to show which results it was drawn from, and by which code."""
    code = "".join(map(inspect.getsource, (draw, *_functions(run)))) + str([record.key for record in run.records])
    return f"results {run.digest}, drawn by {hashlib.sha256(code.encode()).hexdigest()[:16]}"


def _functions(run: Run) -> tuple[Callable[..., Any], Callable[..., None]]:
    """What draws ``run``, and what draws a part of it."""
    return (_dots, _draw_dots) if run.benchmark == "attention" else (_bars, _draw_group)


def _timed_groups(run: Run) -> list[list[Record]]:
    groups = [[record for record in group if _value(record)] for group in run.groups()]
    return [group for group in groups if group]


def _value(record: Record) -> float:
    """The length of a bar: a speed, or the seconds of a first call."""
    return speed(record) or record.first_call_s or 0.0


def _bars(run: Run, plt: Any) -> Any:
    """One panel for each model or shape, one bar for each provider."""
    groups = _timed_groups(run)
    rows = sum(len(group) for group in groups)
    figure, axes = plt.subplots(
        max(len(groups), 1),
        figsize=(WIDTH, 0.8 + 0.5 * len(groups) + 0.2 * rows),
        squeeze=False,
        height_ratios=[len(group) + 1 for group in groups] or None,
        layout="constrained",
    )
    for axis, group in zip(axes[:, 0], groups, strict=False):
        _draw_group(axis, group)
    return figure


def _draw_group(axis: Any, group: Sequence[Record]) -> None:
    colours = [COLOUR if is_ours(record) else GREY for record in group]
    bars = axis.barh([record.provider for record in group], [_value(record) for record in group], color=colours)
    axis.bar_label(bars, labels=[number(_value(record)) for record in group], padding=3)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    rates = {"images/s": group[0].images_per_second, "TFLOP/s": group[0].tflops, "GB/s": group[0].gbps}
    unit = next((name for name, rate in rates.items() if rate), "seconds of the first call")
    axis.set_title(f"{group[0].subject} ({unit})", loc="left", fontsize=8)


def _dots(run: Run, plt: Any) -> Any:
    """One line for each shape: every peer named, every variant a dot, the fastest variant named."""
    groups = [group for group in _timed_groups(run) if group[0].op not in PARTS]  # a kernel alone is no call
    figure, axis = plt.subplots(figsize=(WIDTH, 1.2 + 0.45 * len(groups)), layout="constrained")
    for row, group in enumerate(groups):
        _draw_dots(axis, row, group)
    axis.set_yticks(range(len(groups)), [group[0].subject for group in groups])
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.margins(x=0.12)
    axis.grid(axis="x", linewidth=0.4)
    axis.set_xlabel("TOP/s of 4 B H N N D (half if causal); a line is a shape B,H,N,D")
    return figure


def _draw_dots(axis: Any, row: int, group: Sequence[Record]) -> None:
    ours, peers = split(group)
    for records, colour, above in ((peers, GREY, 5), (ours, COLOUR, -10)):
        axis.plot([speed(record) for record in records], [row] * len(records), "o", color=colour, markersize=4)
        named = records if colour == GREY else sorted(records, key=speed)[-1:]
        for record in named:
            name = record.provider.removeprefix("torch_").removeprefix("qframework_")
            place = {"xytext": (0, above), "textcoords": "offset points", "ha": "center", "fontsize": 6}
            axis.annotate(name, (speed(record), row), color=colour, **place)
