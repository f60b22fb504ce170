"""One plot for each run, as SVG: ours in colour, peers in grey. Equal results give an equal file."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import labels
from benchmarks.harness import Record
from benchmarks.labels import label
from benchmarks.report_attention import PARTS
from benchmarks.tables import Run, is_ours, number, ratio, speed, split

COLOUR, PALE, GREY = "#c2410c", "#fdba74", "#a8a29e"
WIDTH = 7.5
FIRST_SCREEN_BASE = "fp16_compiled"
_PEERS = ("#1c1917", "#57534e", "#a8a29e")
_MARKERS = "sD^v<>Ph"


def draw(run: Run, path: Path) -> None:
    """The plot of ``run``: dots along one line for each shape of an operator, bars for models."""
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
        figure.suptitle(run.title, fontsize=9)
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": mark(run)})
        plt.close(figure)


def mark(run: Run) -> str:
    """What a plot carries to show which results it was drawn from, and by which code."""
    code = run.title + _sources(draw, *_functions(run)) + str([each.key for each in run.records])
    return f"results {run.digest}, drawn by {hashlib.sha256(code.encode()).hexdigest()[:16]}"


def _sources(*functions: Callable[..., Any]) -> str:
    return inspect.getsource(labels) + "".join(map(inspect.getsource, functions))


def _functions(run: Run) -> tuple[Callable[..., Any], ...]:
    """What draws ``run``, and what draws a part of it."""
    return (_dots, _draw_peers, _draw_ours) if run.benchmark in ("attention", "int8_linear") else (_bars, draw_group)


def _timed_groups(run: Run) -> list[list[Record]]:
    groups = [[record for record in group if _value(record)] for group in run.groups()]
    return [group for group in groups if group]


def _value(record: Record) -> float:
    """The length of a bar: a speed, or the seconds of a first call."""
    return speed(record) or record.first_call_s or 0.0


def _bars(run: Run, plt: Any) -> Any:
    """One panel for each model or shape, one bar for each provider."""
    groups = _timed_groups(run)
    heights = [0.35 + 0.19 * len(group) for group in groups] or [1.0]
    figure, axes = plt.subplots(
        len(heights), 1, figsize=(WIDTH, 0.6 + sum(heights)), squeeze=False, layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for axis, group in zip(axes[:, 0], groups, strict=False):
        draw_group(axis, group)
    return figure


def draw_group(axis: Any, group: Sequence[Record]) -> None:
    """One bar for each record, with its value; the axis says the unit."""
    colours = [COLOUR if is_ours(record) else GREY for record in group]
    bars = axis.barh([label(record.provider) for record in group], [_value(record) for record in group], color=colours)
    axis.bar_label(bars, labels=[number(_value(record)) for record in group], padding=3)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    rates = {"images/s": group[0].images_per_second, "TFLOP/s": group[0].tflops, "GB/s": group[0].gbps}
    axis.set_xlabel(next((name for name, rate in rates.items() if rate), "seconds of the first call"))
    axis.set_title(f"{group[0].subject}; qframework in colour", loc="left", fontsize=8)


def draw_first_screen(run: Run, group: Sequence[Record], path: Path) -> None:
    """The bars of one model for the first screen, the fastest first, each as a multiple of FP16 compiled."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    base = next(speed(record) for record in group if record.provider == FIRST_SCREEN_BASE)
    chosen = sorted((record for record in group if record.status == "ok"), key=speed, reverse=True)
    style: dict[Any, Any] = {"svg.hashsalt": run.digest, "svg.fonttype": "none", "font.size": 9}
    with plt.rc_context(style):
        figure, axis = plt.subplots(figsize=(WIDTH, 0.8 + 0.26 * len(chosen)), layout="constrained")
        colours = [COLOUR if is_ours(record) else GREY for record in chosen]
        bars = axis.barh([label(record.provider) for record in chosen], list(map(speed, chosen)), color=colours)
        texts = [f"{number(speed(record))}  ({ratio(speed(record), base)} x)" for record in chosen]
        axis.bar_label(bars, labels=texts, padding=3)
        axis.invert_yaxis()
        axis.margins(x=0.2)
        axis.spines[["top", "right"]].set_visible(False)
        device = run.machine.get("device")
        axis.set_xlabel(f"images/s, and in brackets times {label(FIRST_SCREEN_BASE)}")
        axis.set_title(f"{group[0].subject}, {device}; qframework in colour", loc="left", fontsize=9)
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": first_screen_mark(run)})
        plt.close(figure)


def first_screen_mark(run: Run) -> str:
    """As ``mark``."""
    code = _sources(draw_first_screen) + str([record.key for record in run.records])
    return f"results {run.digest}, drawn by {hashlib.sha256(code.encode()).hexdigest()[:16]}"


def _dots(run: Run, plt: Any) -> Any:
    """A line for each shape: each peer has a marker, our fastest a large dot with its name at the margin."""
    groups = [group for group in _timed_groups(run) if group[0].op not in PARTS]  # a kernel alone is no call
    figure, axis = plt.subplots(figsize=(WIDTH, 1.9 + 0.24 * len(groups)), layout="constrained")
    _draw_peers(axis, groups)
    _draw_ours(axis, groups)
    axis.set_yticks(range(len(groups)), [group[0].subject for group in groups])
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.margins(y=0.02)
    axis.grid(linewidth=0.4)
    axis.set_axisbelow(True)
    if run.benchmark == "attention":
        axis.set_xlabel("TOP/s, counting 4 B H N N D operations, half if causal")
        axis.set_ylabel("B, H, N, D: batch, heads, tokens, channels of a head")
    else:
        axis.set_xlabel("TFLOP/s, counting 2 M N K operations")
        axis.set_ylabel("M, N, K: rows, outputs, inputs")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=7)
    return figure


def _draw_peers(axis: Any, groups: Sequence[Sequence[Record]]) -> None:
    peers = dict.fromkeys(record.provider for group in groups for record in split(group)[1])
    for index, provider in enumerate(peers):
        points = [
            (speed(record), row)
            for row, group in enumerate(groups)
            for record in group
            if record.provider == provider and record.status == "ok"
        ]
        shape = {"marker": _MARKERS[index % len(_MARKERS)], "color": _PEERS[index // len(_MARKERS) % len(_PEERS)]}
        style = {"linestyle": "", "markersize": 4, "fillstyle": "none", "label": label(provider), **shape}
        axis.plot(*zip(*points, strict=True), **style)


def _draw_ours(axis: Any, groups: Sequence[Sequence[Record]]) -> None:
    ours = [sorted(split(group)[0], key=speed) for group in groups]
    others = [(speed(record), row) for row, records in enumerate(ours) for record in records[:-1]]
    fastest = [(speed(records[-1]), row) for row, records in enumerate(ours) if records]
    for points, colour, size, name in (
        (others, PALE, 3, "qframework, others"),
        (fastest, COLOUR, 6, "qframework, the fastest (named at the margin)"),
    ):
        if points:
            axis.plot(*zip(*points, strict=True), "o", color=colour, markersize=size, label=name, zorder=1 + size)
    for row, records in enumerate(ours):
        if records:
            place = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": 7, "color": COLOUR}
            axis.annotate(label(records[-1].provider), (1.01, row), **place)
