"""The section of ``docs/accuracy.md`` on what ``tune`` finds, from ``results/accuracy/front/``, with its plot."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pages import Plot
from benchmarks.plots import COLOUR, GREY, WIDTH
from benchmarks.pretrained_front_cases import read
from benchmarks.tables import machine_line, table

FOLDER = "front"  # below the folder of accuracy's results
NAME_WIDTH, NAME_HEIGHT = 5000, 3.0  # images/s and percent that a name takes in the plot; it gives way to other names
PLOT = "accuracy-front-dinov2.svg"
HEAD = """### What `tune` finds for DINOv2

`python -m benchmarks.pretrained_front`: `tune` without a recipe chooses float, static or dynamic INT8 for each linear
and float, static INT8 or a kernel of SageAttention for each attention, by how much each alone changes the output and
by the times of the layers on a GPU; and for static layers an observer, or a zero point. It chooses by correspondences
of {seen} crops; those of the table are of {held_out} others. Observers change nothing but the values of scales, so that
configurations that differ in them alone run the same kernels and have one measured speed. Speed is that of whole models
in FP16 with random weights under CUDA graphs, {batch} images at once; the search itself estimates speeds from the times
of layers.
"""


@dataclass(frozen=True)
class Front:
    """The newest file of each step."""

    search: Mapping[str, Any]
    whole: Mapping[str, Any]
    batch: int

    def rows(self) -> list[tuple[str, bool, float, float]]:
        """Name, whether it is uniform, images per second and correspondences in percent, fastest first."""
        speeds = self.whole["images_per_second"]
        found = [
            (_label(trial), bool(trial["configuration"]), speeds[trial["kernels"]], trial["held_out"])
            for trial in self._shown()
            if trial["kernels"] in speeds
        ]
        found += [("float", True, speeds["float"], 100.0)]
        return sorted(found, key=lambda row: (-row[2], -row[3]))

    def not_timed(self) -> int:
        """How many configurations have no measured speed."""
        return sum(trial["kernels"] not in self.whole["images_per_second"] for trial in self._shown())

    def _shown(self) -> list[Mapping[str, Any]]:
        """Uniform configurations and the front."""
        return [trial for trial in self.search["trials"] if trial["configuration"] or trial["front"]]


def _label(trial: Mapping[str, Any]) -> str:
    """The name of a uniform configuration, or how many layers run in what."""
    return trial["configuration"] or ", ".join(f"{count} {name}" for name, count in trial["layers"].items())


def load(folder: Path) -> Front | None:
    """The newest results; None without files of both steps."""
    steps = ("times", "search", "whole")
    found: dict[str, list[dict[str, Any]]] = {step: [] for step in steps}
    for path in sorted(folder.glob("*.json")):
        step = json.loads(path.read_text()).get("step")
        if step in ("choices", "recipes"):
            continue
        document = read(path, step if step in steps else "search")
        if not document["smoke"]:
            found[document["step"]].append(document)
    if not all(found.values()):
        return None
    newest = {step: max(each, key=lambda one: str(one["machine"]["date"])) for step, each in found.items()}
    return Front(newest["search"], newest["whole"], newest["times"]["batch"])


def render(front: Front | None) -> str:
    """The section as Markdown; empty without results."""
    if front is None:
        return ""
    rows = [
        [name, "uniform" if is_uniform else "found", f"{speed:.0f}", f"{kept:.1f}"]
        for name, is_uniform, speed, kept in front.rows()
    ]
    head = HEAD.format(batch=front.batch, seen=front.search["crops"], held_out=front.search["held_out_crops"])
    parts = [head, table(["layers", "", "images/s", "correspondences, %"], rows)]
    parts += [_comparison(front), f"![What tune finds for DINOv2](assets/{PLOT})\n"]
    return "\n".join([*parts, machine_line(front.search["machine"], {}), machine_line(front.whole["machine"], {})])


def _comparison(front: Front) -> str:
    """Which uniform configurations are beaten in both respects by one that was found."""
    rows = front.rows()
    beaten: list[str] = []
    others: list[str] = []
    for name, is_uniform, speed, kept in rows:
        if is_uniform and name != "float":
            better = any(not other and s >= speed and k >= kept for _, other, s, k in rows)
            (beaten if better else others).append(name)
    sentences = []
    if beaten:
        sentences.append(
            f"For each of these, one that was found is at least as fast and as accurate: {_names(beaten)}."
        )
    if others:
        sentences.append(f"For none of these: {_names(others)}.")
    if front.not_timed():
        sentences.append(f"{front.not_timed()} more were not timed.")
    return " ".join(sentences) + "\n"


def _best(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other exceeds in speed without losing accuracy, slowest first."""
    return sorted(p for p in points if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points))


def _names(names: list[str]) -> str:
    return "; ".join(f"uniform {name}" for name in names)


def plots(front: Front | None) -> dict[str, Plot]:
    """The plot, by file name."""
    return {} if front is None else {PLOT: Plot(_mark(front), functools.partial(_draw, front))}


def _mark(front: Front) -> str:
    """What the plot carries to show which results it was drawn from, and by which code."""
    digests = [
        hashlib.sha256(text.encode()).hexdigest()[:16] for text in (repr(front.rows()), inspect.getsource(_draw))
    ]
    return "results {}, drawn by {}".format(*digests)


def _draw(front: Front, path: Path) -> None:
    """Correspondences against speed: uniform configurations, what was found, and a line through the best of it.

    Of uniform configurations of equal speed the most accurate has its name.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    style: dict[Any, Any] = {
        "svg.hashsalt": "front",
        "svg.fonttype": "none",
        "font.size": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    rows = front.rows()
    with plt.rc_context(style):
        figure, axis = plt.subplots(figsize=(WIDTH, 4), layout="constrained")
        found = [(speed, kept) for _, uniform, speed, kept in rows if not uniform]
        axis.plot(*zip(*found, strict=True), "o", color=COLOUR, label="found by tune")
        axis.plot(*zip(*_best(found), strict=True), "-", color=COLOUR)
        named: set[float] = set()
        for name, _, speed, kept in (row for row in rows if row[1]):  # of equal speed the most accurate first
            axis.plot(speed, kept, "s", color=GREY)
            if speed in named:
                continue
            named.add(speed)
            left = any(
                0 < speed - x < NAME_WIDTH and abs(kept - y) < NAME_HEIGHT for _, uniform, x, y in rows if uniform
            )
            place: Any = {"xytext": (-7, -9 if left else 0), "textcoords": "offset points"}
            axis.annotate(name, (speed, kept), **place, ha="right", va="center")
        axis.set_xlabel("images per second")
        axis.set_ylabel("correspondences kept, %")
        axis.legend()
        axis.margins(x=0.12, y=0.1)
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": _mark(front)})
        plt.close(figure)
