"""Generates ``docs/papers.md``: the papers' tables on accuracy beside ours, from ``benchmarks/results/papers/``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper_tables import SCHEMA, Figures, average, worst
from benchmarks.report_adaptive import adaptive_section, speed_section
from benchmarks.tables import machine_line, table
from qframework.errors import FileFormatError

FOLDER = "papers"  # below the folder of results
NAME = "papers.md"
GRANULARITY = "*-granularity_error.json"  # below the folder of other results
BENCHMARKS = ("paper_tables", "paper_adaptive", "paper_speeds")
HEAD = """# The papers' tables

`python -m benchmarks.report` generates this page from the files in `benchmarks/results/papers/`, which
`python -m benchmarks.paper_tables --models` writes, and `benchmarks.paper_adaptive` and `benchmarks.paper_speeds` for
SageAttention's tables 10 and 11. Do not edit it.

The papers measure Llama 2, Unidiffuser, CogVideoX and vision transformers trained on ImageNet. What is measured here
are the attention layers of two models with trained weights that come in packages: the 12 of DINOv2 ViT-S/14 (257
tokens) and the 6 of all-MiniLM-L6-v2 (128 tokens). So the order of the rows can be compared, sizes of errors only
roughly. Errors are those of a layer's output against float64 attention on the same float16 operands: cosine similarity,
relative L1 error and RMSE as SageAttention defines them. Columns named after a paper hold its printed figures.
"""
NOTHING = "\nNothing measured yet.\n"
ELSEWHERE = """## Tables that need other data

- SageAttention, tables 1 and 8 (perplexity, FID, ImageNet), the metrics of table 11 in CogVideoX and Llama 2, and
  SageAttention2++, table 3: these models and data sets were not here. `sage_attention`, `use_sage_attention` and
  `calibrate_attention` run them; [Evaluation](evaluation.md) scores ImageNet folders.
- QAttn, table 3 (ImageNet): `qframework evaluate` on a folder of validation images; the images were not here. Digits
  and shapes stand in for it on the page on [accuracy](accuracy.md).
- QAttn, table 4 (COCO): `examples/coco_sam.py`; the images were not here.
- SageAttention, table 7, and QAttn, tables 2 and 5, are speeds: see [Performance](performance.md).
"""
# Cosine, relative L1 and RMSE as printed. SageAttention, arXiv:2410.02367; SageAttention2++, arXiv:2505.21136.
Printed = Mapping[str, tuple[float, ...]]
TABLE_2: Printed = {
    "INT8, E4M3": (0.9994, 0.0345, 3.53e-3),
    "INT8, E5M2": (0.9981, 0.0572, 6.11e-3),
    "INT8, INT8": (0.9970, 0.1035, 6.82e-3),
    "E4M3, E4M3": (0.9981, 0.0607, 5.93e-3),
    "E4M3, E5M2": (0.9968, 0.0769, 7.72e-3),
    "E4M3, INT8": (0.9958, 0.1199, 8.31e-3),
    "E5M2, E4M3": (0.9937, 0.1107, 1.09e-2),
    "E5M2, E5M2": (0.9922, 0.1213, 1.20e-2),
    "E5M2, INT8": (0.9913, 0.1583, 1.24e-2),
}
TABLE_3: Printed = {
    "INT8, E4M3": (0.7636, 0.5899, 0.4311),
    "INT8, E5M2": (0.7898, 0.4233, 0.4371),
    "INT8, INT8": (0.5640, 0.7921, 0.5405),
    "INT8, FP16": (0.9999, 0.0116, 0.0091),
}
TABLE_4: Printed = dict.fromkeys(("FP32", "FP16"), (0.9998, 0.0156, 2.94e-3))
TABLE_5: Printed = dict.fromkeys(("FP32", "FP16"), (0.9984, 0.0511, 4.229e-3))
TABLE_9: Printed = {
    "sage_t": (1.0, 0.019, 6.8e-4),
    "sage_b": (1.0, 0.021, 7.3e-4),
    "sage_vt": (0.999, 0.064, 0.065),
    "sage_vb": (0.989, 0.138, 0.067),
}
TABLE_2_PLUS: Printed = {
    "448, 448, FP32 sums": (0.9997, 0.01862),
    "112, 4.5": (0.9997, 0.01862),
    "56, 9": (0.9997, 0.01863),
}
_FIGURES = ("cosine", "relative_l1", "rmse")
_NAMES = ("cosine", "L1", "RMSE")
Layers = Mapping[str, Mapping[str, Figures]]


def load(folder: Path) -> dict[str, Any]:
    """The newest document in ``folder`` of each of ``BENCHMARKS`` that has one; none of a smoke run.

    Raises FileFormatError for other files.
    """
    newest: dict[str, Any] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            document = json.loads(path.read_text())
            name, smoke, date = document["benchmark"], document["smoke"], str(document["machine"].get("date"))
            if document["schema"] != SCHEMA or name not in BENCHMARKS:
                raise FileFormatError(
                    f"{path}: schema must be {SCHEMA} and benchmark one of {', '.join(BENCHMARKS)}, got "
                    f"{document['schema']!r} and {name!r}"
                )
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise FileFormatError(f"{path} is not a result file of the papers' tables: {error!r}") from error
        if not smoke and (name not in newest or date > str(newest[name]["machine"].get("date"))):
            newest[name] = document
    return newest


def load_granularity(folder: Path) -> dict[str, Any] | None:
    """The newest result of benchmarks.granularity_error in ``folder``."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob(GRANULARITY))]
    return max(found, key=lambda each: str(each["machine"].get("date")), default=None)


def render(documents: Mapping[str, Any], granularity: Mapping[str, Any] | None = None) -> str:
    """The whole page as Markdown, from what ``load`` returns."""
    document = documents.get("paper_tables")
    if document is None:
        return HEAD + NOTHING
    found = document["tables"]
    parts = [HEAD, machine_line(document["machine"], {})]
    parts += [section(found[name]) for name, section in SECTIONS.items() if name in found]
    parts += speed_section(documents.get("paper_speeds"))
    parts += adaptive_section(documents.get("paper_adaptive"))
    parts += [_models(document["models"], document["crops"])] if document.get("models") else []
    parts += [_granularity(granularity)] if granularity else []
    return "\n".join([*parts, ELSEWHERE])


def _formats(layers: Layers) -> str:
    return _section(
        "SageAttention, tables 2 and 3: formats of Q, K and of P, V",
        "Q and K in blocks with one scale each, K smoothed; P with a static scale, V with one for each channel.",
        _beside(layers, TABLE_2, "table 2", average),
        _beside(layers, TABLE_3, "table 3", lambda found: worst(found)[1], only=tuple(TABLE_3)),
    )


def _accumulators(layers: Layers) -> str:
    return _section(
        "SageAttention, tables 4 and 5: accumulators of P V",
        "Q and K in INT8 per block, P and V in FP16.",
        _beside(layers, TABLE_4, "table 4", average),
        _beside(layers, TABLE_5, "table 5", lambda found: worst(found)[1]),
    )


def _smooth_k(layers: Layers) -> str:
    return _section(
        "SageAttention, table 1: what smoothing K brings, by granularity",
        "Q and K in INT8, P and V in FP16. The paper's figures are those of whole models.",
        _beside(layers, {}, "", average),
    )


def _kernels(layers: Layers) -> str:
    return _section(
        "SageAttention, table 9: the four kernels, normal operands",
        "Q, K and V of 4 heads of 1,776 tokens and 64 channels; the paper prints no shape. The RMSE that it\n"
        "prints for the last two does not fit their relative L1 error, if its operands are normal too.",
        _beside(layers, TABLE_9, "table 9", average),
    )


def _kernels_layers(layers: Layers) -> str:
    return _section("The four kernels, layers of the models", "", _mean_and_worst(layers))


def _int4_granularity(layers: Layers) -> str:
    return _section(
        "SageAttention2: granularity of INT4 Q and K",
        "Q and K smoothed, P and V in E4M3. Scales per thread cost what those per warp cost.",
        _mean_and_worst(layers),
    )


def _int4_smoothing(layers: Layers) -> str:
    return _section(
        "SageAttention2: what is smoothed before INT4",
        "Q and K in INT4 per thread, P and V in E4M3.",
        _mean_and_worst(layers),
    )


def _fp8_ranges(layers: Layers) -> str:
    return _section(
        "SageAttention2++, table 2: ranges of P and V in E4M3",
        "Q and K in INT8 per thread. Narrow ranges are summed in FP16, 64 keys at a time. This package "
        "uses 224 and 4.5.",
        _beside(layers, TABLE_2_PLUS, "table 2", average),
    )


SECTIONS: dict[str, Callable[[Layers], str]] = {
    "formats": _formats,
    "accumulators": _accumulators,
    "smooth_k": _smooth_k,
    "kernels": _kernels,
    "kernels_layers": _kernels_layers,
    "int4_granularity": _int4_granularity,
    "int4_smoothing": _int4_smoothing,
    "fp8_ranges": _fp8_ranges,
}


def _section(title: str, note: str, *tables: str) -> str:
    return "\n".join([f"## {title}\n", *([f"{note}\n"] if note else []), *tables])


def _beside(
    layers: Layers,
    printed: Printed,
    name: str,
    summary: Callable[[Mapping[str, Figures]], Figures],
    only: Sequence[str] = (),
) -> str:
    """One row for each configuration: our figures, and the paper's where it has some."""
    which = "mean of the layers" if summary is average else "worst layer"
    header = [which, *_NAMES, *(f"{each}, {name}" for each in _NAMES if printed)]
    rows = []
    for row, found in layers.items():
        if only and row not in only:
            continue
        ours = [_shown(figure, summary(found)[figure]) for figure in _FIGURES]
        theirs = [_printed(figure, value) for figure, value in zip(_FIGURES, printed.get(row, ()), strict=False)]
        rows.append([row, *ours, *theirs, *[""] * (len(header) - 1 - len(ours) - len(theirs))])
    return table(header, rows)


def _mean_and_worst(layers: Layers) -> str:
    header = ["configuration", *(f"{name}, mean" for name in _NAMES), *(f"{name}, worst" for name in _NAMES), "layer"]
    rows = []
    for row, found in layers.items():
        mean, (layer, least) = average(found), worst(found)
        rows.append([row, *(_shown(name, of[name]) for of in (mean, least) for name in _FIGURES), layer])
    return table(header, rows)


def _shown(figure: str, value: float) -> str:
    return {"cosine": f"{100 * value:.3f} %", "relative_l1": f"{value:.4f}"}.get(figure, f"{value:.3g}")


def _printed(figure: str, value: float) -> str:
    """As many digits as papers print."""
    return f"{100 * value:.2f} %" if figure == "cosine" else f"{value:.4g}"


def _models(models: Mapping[str, Figures], crops: int) -> str:
    note = (
        f"All linears of DINOv2 ViT-S/14 without a recipe, against FP32, on {crops} crops of photographs; weights per\n"
        "channel unless noted. QAttn prints top-1 on ImageNet: for ViT-S/16 81.38 in FP32, 70.96 static and 78.94\n"
        "dynamic, 69.60 and 76.68 with attention."
    )
    rows = [
        [
            name,
            *(f"{found[figure]:.1f}" for figure in ("sqnr_db", "correspondences")),
            *(f"{found[figure]:.4f}" for figure in ("cosine", "worst_cosine")),
        ]
        for name, found in models.items()
    ]
    header = ["scales of activations", "SQNR, dB", "correspondences, %", "cosine", "worst"]
    return _section("QAttn: static and dynamic scales by granularity", note, table(header, rows))


def _granularity(document: Mapping[str, Any]) -> str:
    note = (
        "What the linears of a GPT trained here multiply, after {steps} steps in FP32: relative errors in percent\n"
        "(`python -m benchmarks.granularity_error`). The paper shows a plot."
    ).format(**document["settings"])
    errors = document["errors"]
    kinds = list(next(iter(errors.values())))
    rows = [[name, *(f"{100 * row[kind]:.2f}" for kind in kinds)] for name, row in errors.items()]
    body = table(["one scale", *kinds], rows)
    return _section("Jetfire, figure 5: errors by granularity", note, body, machine_line(document["machine"], {}))
