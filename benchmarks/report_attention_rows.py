"""The page on the speed of attention on Hopper: what was aimed at, and what the newest results of each case reach.

From ``benchmarks/results/attention``: files of ``benchmarks.attention_rows``, ``benchmarks.int8_gradient`` and
``benchmarks.decode``.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import Results
from benchmarks.tables import table

FOLDER, NAME = "attention", "attention-speed.md"
HEAD = """# Speed of attention on Hopper

`python -m benchmarks.report` generates this page from the files in `benchmarks/results/attention/`. Do not edit it.
Calls are whole, with smoothing and quantization, as [attention](attention.md) chooses them with `variant="auto"` unless
another one is named, beside PyTorch's kernels (cuDNN, FlashAttention-2, memory-efficient) in float16 and in the same
process. Times are medians of CUDA graphs that take turns, the L2 cache flushed before each; each run has new data, and
results were compared with float64 attention before. Gradients, forward and backward pass together, are timed in bursts
of eager calls instead.
"""
AIMS_NOTE = """Speeds are the time of the other divided by that of the call: the least and the largest of all cases and
runs. `must` and `aim` are lower limits of speeds, and upper limits of shares and of times relative to another.
"""
RIVALS = ("cudnn", "flash", "efficient", "fp16 cache")
CASES_NOTE = """Microseconds are those of the last run, speeds those of each. Shapes are batch x heads (or query and key
heads) x tokens x channels, of decoding batch, query heads, key heads, queries, keys, channels. Errors are relative L1
errors of normal data, of decoding and of gradients L2, of these the largest of the three.
"""


@dataclass(frozen=True)
class Measured:
    """One case: a value of each run, and what the tables of cases say about it."""

    case: str
    values: tuple[float, ...]
    us: float
    rival: str
    rival_us: float
    error: float | None


class Aim(NamedTuple):
    """What a row of the table of aims says."""

    row: str
    what: str
    against: str
    must: float
    aim: float | None
    value: Callable[[dict[str, Any]], tuple[float, str, str] | None]  # (value, ours, rival) of a case; None: no such
    cost: bool = False

    def reached(self, value: float, limit: float | None) -> bool:
        return limit is not None and (value <= limit if self.cost else value >= limit)


def _against_pytorch(row: dict[str, Any], ours: str = "auto") -> tuple[float, str, str] | None:
    us = row["us"]
    rivals = [name for name in RIVALS if name in us]
    if ours not in us or not rivals:
        return None
    rival = min(rivals, key=us.__getitem__)
    return us[rival] / us[ours], ours, rival


def _masked(row: dict[str, Any]) -> tuple[float, str, str] | None:
    us = row["us"]
    return None if "auto, no mask" not in us else (us["auto"] / us["auto, no mask"], "auto", "auto, no mask")


def _variant(name: str) -> Callable[[dict[str, Any]], tuple[float, str, str] | None]:
    def value(row: dict[str, Any]) -> tuple[float, str, str] | None:
        us = row["us"]
        if name not in us:
            return None
        best = min((n for n in ("auto", "integer_exp", "unquantized") if n in us), key=us.__getitem__)
        return us[best] / us[name], name, best

    return value


def _sageattention2(row: dict[str, Any]) -> tuple[float, str, str] | None:
    us = row["us"]
    return None if "sageattention2" not in us else (us["sageattention2"] / us["auto"], "auto", "sageattention2")


def _share(row: dict[str, Any]) -> tuple[float, str, str] | None:
    us = row["us"]
    if "integer_exp, pass" not in us:
        return None
    return us["integer_exp, pass"] / us["integer_exp"], "integer_exp, pass", "integer_exp"


def _packed(row: dict[str, Any]) -> tuple[float, str, str] | None:
    us = row["us"]
    return None if "packed" not in us else (us["dense"] / us["packed"] * row["work"], "packed", "dense")


SHORT = "197, 577 and 785 tokens, 64 channels"
WITH_GRADIENT = "forward and backward"
AIMS = (
    Aim("static", f"static INT8 in and out: {SHORT}", "PyTorch", 1.25, 1.6, _against_pytorch),
    Aim("short", f"16 bit in and out: {SHORT}", "PyTorch", 1.0, 1.2, _against_pytorch),
    Aim("long", "4,096 to 32,768 tokens, 64 and 128 channels", "PyTorch", 1.2, 1.4, _against_pytorch),
    Aim("long", "4,096 to 16,384 tokens", "SageAttention2's CUDA kernels, another run", 1.0, 1.15, _sageattention2),
    Aim("causal", "causal, grouped heads, both", "PyTorch", 1.1, 1.3, _against_pytorch),
    Aim("masks", "padding, causal mask, band: time", "the call without a mask", 1.05, None, _masked, cost=True),
    Aim("masks", "padding, causal mask, band", "PyTorch with the mask", 1.0, None, _against_pytorch),
    Aim("heads", "32 to 256 channels", "PyTorch", 1.0, 1.2, _against_pytorch),
    Aim("windows", "windows with a bias or relative positions", "PyTorch with a bias", 1.5, 3.0, _against_pytorch),
    Aim("factors", "relative positions in factors", "PyTorch with a bias", 2.0, 4.0, _against_pytorch),
    Aim("long", "`sage2_int8`", "the fastest variant", 0.9, 1.0, _variant("sage2_int8")),
    Aim("long", "`sage2pp_int8`", "the fastest variant", 0.9, 1.0, _variant("sage2pp_int8")),
    Aim("long", "smoothing and quantization: share of the call", "`integer_exp`", 0.1, 0.05, _share, cost=True),
    Aim("decode", "one step of decoding, INT8 cache", "PyTorch with an FP16 cache", 1.5, 1.9, _against_pytorch),
    Aim("packed", "packed sequences of mixed lengths", "a dense call of as much work", 0.9, 1.0, _packed),
    Aim("gradient", f'gradient `"mixed"`, {WITH_GRADIENT}', "PyTorch", 1.0, 1.3, _against_pytorch),
    Aim("left", f'gradient `"mixed"` left to PyTorch, {WITH_GRADIENT}', "PyTorch", 0.99, None, _against_pytorch),
)


def load(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of all cases, of each that of the newest file that has it, and the lines of these files."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    lines: dict[str, str] = {}
    source: dict[tuple[str, str], str] = {}  # the file of each case
    peers: set[str] = set()
    rivals: dict[str, float] = {}  # TOP/s
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem):
        document = json.loads(path.read_text())
        found, about = (_of_decode(path), {}) if "records" in document else (document["rows"], document["about"])
        found = [_of_gradient(row) if "cudnn" in row else row for row in found]
        about = about or Results.load(path).machine
        rivals |= document.get("sageattention2", {})
        peers |= set() if found else {path.stem}
        keys = dict.fromkeys((row["row"], row["case"]) for row in found)
        for key in keys:
            rows[key] = [row for row in found if (row["row"], row["case"]) == key and row.get("us")]
            source[key] = path.stem
        lines[path.stem] = (
            f"`{path.stem}`: {about.get('device')}, torch {about.get('torch')}, commit {about.get('commit')}, "
            f"{str(about.get('date'))[:10]}"
        )
    every = [row for found in rows.values() for row in found]
    for row in every:
        if row["case"] in rivals:
            row["us"]["sageattention2"] = operations(row["case"]) / rivals[row["case"]] / 1e6
    return every, [line for stem, line in lines.items() if stem in {*source.values(), *peers}]


def operations(case: str) -> float:
    """Of a dense case by its name: 4 B H N N D, half of them if causal."""
    shape, _, kind = case.partition(", ")
    batch, heads, tokens, width = (int(n.split("/")[0].replace(",", "")) for n in shape.split(" x "))
    return 4.0 * batch * heads * tokens**2 * width / (2 if kind == "causal" else 1)


def _of_decode(path: Path) -> list[dict[str, Any]]:
    """Records of ``benchmarks.decode`` as rows of ``benchmarks.attention_rows``."""
    cases: dict[tuple[int, str], dict[str, Any]] = {}
    for record in Results.load(path).records:
        if record.status != "ok" or not record.p50_ms:
            continue
        key = record.run or 1, ", ".join(map(str, record.shape or []))
        row = cases.setdefault(key, {"row": "decode", "run": key[0], "case": key[1], "us": {}, "error": {}})
        name = "auto" if record.provider == "qframework_int8" else "fp16 cache"
        us = 1e3 * record.p50_ms
        row["us"][name] = min(us, row["us"].get(name, us))
        if name == "auto":
            row["error"][name] = record.quantization_error
    return list(cases.values())


def _of_gradient(row: dict[str, Any]) -> dict[str, Any]:
    """A row of ``benchmarks.int8_gradient``; where "mixed" has the error of 16 bit, the call was left to PyTorch."""
    heads = str(row["heads"]) if row["heads"] == row["key_heads"] else f"{row['heads']}/{row['key_heads']}"
    case = f"{row['batch']} x {heads} x {row['tokens']:,} x {row['channels']}"
    kinds = (
        ["causal"] * row["causal"]
        + ["heads first"] * (row["order"] == "heads")
        + ["bfloat16"] * (row["dtype"] == "bfloat16")
    )
    times = {{"mixed": "auto"}.get(name, name): x for name, x in row.items() if isinstance(x, dict)}
    left = times["auto"]["error"] < 2 * times["cudnn"]["error"]  # which adds in any order: not equal bit by bit
    return {
        "row": "left" if left else "gradient",
        "run": row["run"],
        "case": ", ".join([case, *kinds]),
        "us": {name: 1e3 * x["p50_ms"] for name, x in times.items()},
        "error": {name: x["error"] for name, x in times.items()},
    }


def measured(aim: Aim, rows: Sequence[dict[str, Any]]) -> list[Measured]:
    """The cases of an aim, in the order measured."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["row"] == aim.row:
            cases.setdefault(row["case"], []).append(row)
    found = []
    for case, runs in cases.items():
        each = [(row, value) for row in runs if (value := aim.value(row)) is not None]
        if each:
            last, (_, ours, rival) = each[-1]
            values = tuple(value[0] for _, value in each)
            error = last["error"].get(ours)
            found.append(Measured(case, values, last["us"][ours], rival, last["us"][rival], error))
    return found


def render(rows: Sequence[dict[str, Any]], lines: Sequence[str]) -> str:
    """The whole page as Markdown."""
    found = [(aim, measured(aim, rows)) for aim in AIMS]
    aims = table(
        ["what", "against", "must", "aim", "runs", "measured", "verdict"],
        [_aim_cells(aim, cases) for aim, cases in found if cases],
    )
    parts = [HEAD, "Files: " + "; ".join(lines) + ".\n", "## Aims\n", AIMS_NOTE, aims, "## All cases\n", CASES_NOTE]
    for aim, cases in found:
        if cases:
            parts += [f"### {aim.what[0].upper() + aim.what[1:]}, against {aim.against}\n", _case_table(aim, cases)]
    return "\n".join(parts)


def _aim_cells(aim: Aim, cases: Sequence[Measured]) -> list[str]:
    values = [value for case in cases for value in case.values]
    short = [case for case in cases if not all(aim.reached(value, aim.must) for value in case.values)]
    verdict = "aim reached" if all(aim.reached(value, aim.aim) for value in values) else "must reached"
    if short:
        verdict = f"short of must in {len(short)} of {len(cases)} cases"
    limit = "at most " if aim.cost else ""
    return [
        aim.what, aim.against, f"{limit}{aim.must:g}", "" if aim.aim is None else f"{limit}{aim.aim:g}",
        str(min(len(case.values) for case in cases)), f"{min(values):.2f} to {max(values):.2f}, "
        f"geometric mean {statistics.geometric_mean(values):.2f}", verdict,
    ]  # fmt: skip


def _case_table(aim: Aim, cases: Sequence[Measured]) -> str:
    rows = []
    for case in cases:
        values = ", ".join(f"{value:.2f}" for value in case.values)
        if not all(aim.reached(value, aim.must) for value in case.values):
            values = f"{values} (short)"
        error = "" if case.error is None else f"{case.error:.4f}"
        rows.append([case.case, f"{case.us:.1f}", f"{case.rival_us:.1f}", case.rival, values, error])
    return table(["case", "us", "other, us", "other", "ratio" if aim.cost else "speed", "error"], rows)
