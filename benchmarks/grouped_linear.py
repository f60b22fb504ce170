"""Linears of experts: PyTorch's grouped_mm in bfloat16, and int8_grouped_linear with and without quantizing its input.

Rows are tokens times the experts of each, sorted by expert: all experts alike ("even"), or most rows with few of them
("uneven"). Every form is compared with the product in float32 of the rows of one expert first. Calls run in CUDA
graphs; microseconds are medians. The default tile has no suffix; the others say which of them a table would take.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import kernel_command
from qframework.kernels.linear.grouped import (
    GroupedTile,
    Int8GroupedLinearArguments,
    choose_tile,
    int8_grouped_linear_triton,
)
from qframework.numerics import quantize_weight
from qframework.tuning.kernel_tiles import graph_microseconds

_TOLERANCE = 0.02  # relative; of bfloat16 about 0.002, of INT8 0.01


class Shape(NamedTuple):
    """Sizes of one product."""

    tokens: int
    per_token: int  # experts of each token
    experts: int
    outputs: int
    inputs: int


SHAPES = (
    *(Shape(tokens, 8, 64, n, k) for tokens in (2048, 16) for n, k in ((2048, 2048), (2048, 1024))),  # OLMoE
    *(Shape(tokens, 2, 8, n, k) for tokens in (4096, 16) for n, k in ((28672, 4096), (4096, 14336))),  # Mixtral
    *(Shape(tokens, 8, 128, n, k) for tokens in (4096, 64) for n, k in ((1536, 2048), (2048, 768))),  # Qwen3 30B
    *(Shape(tokens, 4, 32, n, k) for tokens in (4096, 64) for n, k in ((5760, 2880), (2880, 2880))),  # GPT-OSS 20B
    Shape(300, 3, 10, 500, 260),  # no model's
)
SMOKE = (Shape(20, 2, 4, 48, 32),)
TILES = (
    GroupedTile(128, 128, 128, 8, 4),
    GroupedTile(128, 256, 128, 8, 3),
    GroupedTile(128, 128, 64, 8, 5),
    GroupedTile(64, 128, 128, 4, 4),
    GroupedTile(64, 256, 128, 8, 3),
    GroupedTile(32, 128, 256, 4, 4),
    GroupedTile(16, 128, 256, 4, 4),
    GroupedTile(16, 64, 512, 4, 4),
)


class Case(NamedTuple):
    """Operands, float and quantized."""

    x: Tensor  # (T, K) bfloat16
    weight: Tensor  # (E, N, K) bfloat16
    ends: Tensor  # (E,) int32
    q: Tensor
    scale: Tensor


def draw(shape: Shape, what: str, device: torch.device) -> Case:
    """Normal values, and the rows of each expert."""
    generator = torch.Generator(device).manual_seed(0)
    normal = functools.partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)
    rows = shape.tokens * shape.per_token
    chance = torch.ones(shape.experts) if what == "even" else 1.0 / torch.arange(1, shape.experts + 1)
    chosen = torch.multinomial(chance, rows, replacement=True, generator=torch.Generator().manual_seed(0))
    ends = torch.bincount(chosen, minlength=shape.experts).cumsum(0).int().to(device)
    weight = normal(shape.experts, shape.outputs, shape.inputs) / shape.inputs**0.5
    each = [quantize_weight(matrix) for matrix in weight]
    q, scale = torch.stack([q for q, _ in each]), torch.stack([scale for _, scale in each])
    return Case(normal(rows, shape.inputs), weight, ends, q, scale)


def forms(case: Case, tiles: Sequence[GroupedTile]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """What is timed, by name."""
    x, scale = torch.ops.qframework.dynamic_quantize(case.x, "per_token")
    operands = (case.q, case.scale, case.ends, torch.bfloat16)

    def whole() -> Tensor:
        return torch.ops.qframework.int8_grouped_linear(
            *torch.ops.qframework.dynamic_quantize(case.x, "per_token"), *operands
        )

    yield "grouped_mm", lambda: F.grouped_mm(case.x, case.weight.transpose(1, 2), offs=case.ends)
    yield "int8 and quantize", whole
    yield "int8", functools.partial(torch.ops.qframework.int8_grouped_linear, x, scale, *operands)
    for tile in tiles:
        call = Int8GroupedLinearArguments(x, scale, *operands)
        yield f"int8 {tuple(tile)}", functools.partial(int8_grouped_linear_triton, call, tile)


def error(case: Case, result: Tensor) -> float:
    """The relative error of the rows of the expert that has most."""
    ends = [0, *case.ends.tolist()]
    expert = max(range(len(ends) - 1), key=lambda e: ends[e + 1] - ends[e])
    rows = slice(ends[expert], ends[expert + 1])
    exact = case.x[rows].float() @ case.weight[expert].float().t()
    return float((result[rows].float() - exact).norm() / exact.norm())


@torch.no_grad()
def measure(shape: Shape, what: str, device: torch.device, compiles: bool = True) -> dict[str, Any]:
    """Microseconds and errors of all forms of a shape; wrong results are not timed."""
    case = draw(shape, what, device)
    times, errors, failed = {}, {}, {}
    for name, run in forms(case, TILES if device.type == "cuda" else ()):
        try:
            errors[name] = round(error(case, run()), 5)
        except (RuntimeError, ValueError) as failure:  # a tile may not fit
            failed[name] = str(failure).strip().split("\n")[0][:200]
            continue
        if errors[name] <= _TOLERANCE:
            times[name] = round(graph_microseconds([run]), 2) if compiles else 0
    tile = choose_tile(len(case.x), shape.experts, shape.outputs, shape.inputs, (9, 0))
    return {**shape._asdict(), "groups": what, "tile": tuple(tile), "us": times, "errors": errors, "failed": failed}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on the GPU; returns the exit status."""
    kernel_command.run("benchmarks.grouped_linear", str(__doc__), _cases, measure, argv)
    return 0


def _cases(smoke: bool) -> Iterator[kernel_command.Case]:
    for shape in SMOKE if smoke else SHAPES:
        for what in ("even", "uneven"):
            yield shape, what


if __name__ == "__main__":
    sys.exit(main())
