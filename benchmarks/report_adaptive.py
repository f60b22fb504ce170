"""The sections of docs/papers.md on SageAttention's tables 10 and 11: smoothing's cost, the adaptive choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.paper_speeds import NOT_SMOOTHED
from benchmarks.tables import machine_line, table

MODELS = {"dinov2": "DINOv2 ViT-S/14", "minilm": "all-MiniLM-L6-v2"}
# As printed: TOPS on an RTX 4090, arXiv:2410.02367.
TABLE_10 = {"CogVideoX": (327.57, 327.52), "UltraPixel": (325.18, 324.56)}  # not smoothed, smoothed
TABLE_11 = {"CogVideoX": (292.17, 327.57), "Llama 2": (208.59, 231.74)}  # sage_t, adaptive
_ADAPTIVE_NOTE = """`python -m benchmarks.paper_adaptive` takes, for each layer, the first of vB, vT, B and T whose
cosine similarity exceeds 99.8 percent on {calibration} calibration examples, and evaluates {crops} crops and {texts}
docstrings; all but attention is FP32. The paper prints CLIPSIM 0.1827 with T and 0.1835 with the adaptive choice for
CogVideoX, and MMLU 0.46 with both for Llama 2. The figures are explained on the page on [accuracy](accuracy.md)."""
_SPEED_NOTE = """`python -m benchmarks.paper_speeds` on a GPU times whole calls, float16 to float16, at the shapes of
table 7."""
_NO_SPEEDS = "It was not run on a GPU yet, so that there are no speeds of ours beside those of the paper."


def adaptive_section(document: Mapping[str, Any] | None) -> list[str]:
    """The accuracy of table 11 for our models; nothing without a document of benchmarks.paper_adaptive."""
    if document is None:
        return []
    rows = [_row(model, name, found) for model, found in document["models"].items() for name in found["figures"]]
    header = ["model", "attention", "kernels of the layers", "SQNR, dB", "cosine", "worst", "top-1, %", "Spearman"]
    header += ["correspondences, %"]
    title = "## SageAttention, table 11: what the adaptive choice keeps\n"
    body = table(header, rows)
    return [title, _ADAPTIVE_NOTE.format(**document["sizes"]) + "\n", body, machine_line(document["machine"], {})]


def _row(model: str, name: str, found: Mapping[str, Any]) -> list[str]:
    figures, layers = found["figures"][name], len(found["layers"])
    kernels = found["kernels"] if name == "adaptive" else {name: layers}
    of_layers = "" if name == "FP32" else ", ".join(f"{count} {kernel}" for kernel, count in kernels.items())
    shown = [
        _shown(figures, "sqnr_db", ".1f"),
        *(_shown(figures, each, ".5f") for each in ("cosine", "worst_cosine")),
        _shown(figures, "top_1", ".1f"),
        _shown(figures, "spearman", ".5f"),
        _shown(figures, "correspondences", ".1f"),
    ]
    return [MODELS.get(model, model), name, of_layers, *(["", "", "", shown[3], "", ""] if name == "FP32" else shown)]


def _shown(figures: Mapping[str, float], name: str, digits: str) -> str:
    return format(figures[name], digits) if name in figures else ""


def speed_section(document: Mapping[str, Any] | None) -> list[str]:
    """Tables 10 and 11 on speed: the paper's figures, and ours of benchmarks.paper_speeds if there are any."""
    title = "## SageAttention, tables 10 and 11: speed\n"
    records = [] if document is None else document["records"]
    ours = {(each["model"], each["provider"]): each["tflops"] for each in records if "tflops" in each}
    parts = [title, _SPEED_NOTE + "\n" if ours else f"{_SPEED_NOTE} {_NO_SPEEDS}\n"]
    columns = ("sage_b" + NOT_SMOOTHED, "sage_b")
    parts += [_beside("TOPS", ("K not smoothed", "smooth K"), "table 10", TABLE_10, columns, ours)]
    parts += [_beside("TOPS", ("sage_t", "adaptive"), "table 11", TABLE_11, ("sage_t", "sage_b", "sage_vb"), ours)]
    return parts + ([machine_line(document["machine"], {})] if document is not None and ours else [])


def _beside(
    unit: str,
    printed_columns: Sequence[str],
    name: str,
    printed: Mapping[str, tuple[float, ...]],
    providers: Sequence[str],
    ours: Mapping[tuple[str, str], float],
) -> str:
    """A row for each of the paper's shapes: the printed figures, and ours if there are any."""
    measured = providers if ours else ()
    header = [unit, *(f"{each}, {name}" for each in printed_columns), *measured]
    rows = []
    for model, figures in printed.items():
        own = [ours.get((model, provider)) for provider in measured]
        rows.append([model, *(f"{value:.2f}" for value in figures), *("" if v is None else f"{v:.1f}" for v in own)])
    return table(header, rows)
