"""What the adaptive choice of kernels keeps (SageAttention, table 11), on models with trained weights: docs/papers.md.

    python -m benchmarks.paper_adaptive --output benchmarks/results/papers/DATE-cpu-adaptive.json

``calibrate_attention`` chooses one of the paper's four kernels for each layer, in the paper's order of speed, where its
cosine similarity exceeds 99.8 percent. The models are those of benchmarks/pretrained.py in FP32 but for attention, the
figures those of benchmarks/pretrained_tasks.py. The paper measures CogVideoX and Llama 2, which are not here. Speeds:
benchmarks/paper_speeds.py.
"""

from __future__ import annotations

import copy
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import argument_parser
from benchmarks.machine import describe_machine
from benchmarks.pretrained import Subject, dinov2_subject, minilm_subject, smoke_subjects
from qframework.attention import AttentionChoice, calibrate_attention
from qframework.attention.adaptive import PAPER_ORDER
from qframework.errors import QFrameworkError
from qframework.files import write_json

SCHEMA = 1
ADAPTIVE = "adaptive"
_ROWS = ("sage_t", ADAPTIVE, "sage_b", "sage_vt", "sage_vb")
Figures = dict[str, float]


def measure(subject: Subject) -> dict[str, Any]:
    """The choice for a model, and the figures of full precision, of the choice and of each kernel in all layers."""
    chosen = calibrate_attention(
        subject.exported, subject.calibration(0), variants=PAPER_ORDER, timed=False, progress=False, verbose=False
    )
    figures = {"FP32": _finite(subject.figures(subject.exported))}
    for name in _ROWS:
        choice = chosen if name == ADAPTIVE else AttentionChoice(dict.fromkeys(chosen, name))
        graph = copy.deepcopy(subject.exported)
        choice.apply(graph)
        figures[name] = _finite(subject.figures(graph))
        print(f"{subject.name:8} {name:10} {figures[name]['sqnr_db']:6.1f} dB", flush=True)
    return {"layers": dict(chosen), "kernels": dict(Counter(chosen.values())), "figures": figures}


def _finite(figures: Mapping[str, float]) -> Figures:
    """Without what JSON cannot hold: the SQNR of a model compared with itself."""
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def document(subjects: Iterable[Subject], sizes: Mapping[str, int], smoke: bool) -> dict[str, Any]:
    """All models as JSON."""
    head = {"schema": SCHEMA, "benchmark": "paper_adaptive", "smoke": smoke, "machine": describe_machine("cpu")}
    return {**head, "sizes": dict(sizes), "models": {subject.name: measure(subject) for subject in subjects}}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on the CPU, print, and write ``--output`` if given; returns the exit status."""
    parser = argument_parser("paper_adaptive", __doc__, "document")
    parser.add_argument("--crops", type=int, default=256, help="evaluated crops (default: 256)")
    parser.add_argument("--texts", type=int, default=256, help="evaluated docstrings (default: 256)")
    parser.add_argument("--calibration", type=int, default=16, help="calibration crops and docstrings (default: 16)")
    parser.add_argument("--threads", type=int, default=1, help="float sums depend on it (default: 1)")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    sizes = {name: getattr(options, name) for name in ("crops", "texts", "calibration")}
    try:
        subjects = smoke_subjects() if options.smoke else _subjects(**sizes)
        found = document(subjects, sizes, options.smoke)
    except QFrameworkError as error:
        print(error, file=sys.stderr)
        return 2
    if options.output:
        write_json(Path(options.output), found)
    return 0


def _subjects(crops: int, texts: int, calibration: int) -> Iterable[Subject]:
    yield dinov2_subject(crops, calibration)
    yield minilm_subject(texts, calibration)


if __name__ == "__main__":
    sys.exit(main())
