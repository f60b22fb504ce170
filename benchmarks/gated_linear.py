"""Gated INT8 linears of transformers: two products and Inductor's kernel behind them, and one kernel in several tiles.

Each shape runs with the activation of its model, with one scale for an INT8 result ("static"), and with a result in
float16 that is then quantized per token ("dynamic"). "apart" is what the backend compiles without a gated linear, for
two weights; "packed" for one weight of both. Every form is compared with float64 first. Inputs are outside of the L2
cache, calls in CUDA graphs; microseconds are medians.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import kernel_command
from qframework import numerics
from qframework.kernels.linear import gated
from qframework.kernels.linear.tile import COOPERATIVE, PINGPONG, Tile
from qframework.kernels.runtime.activation import apply_activation
from qframework.tuning.kernel_tiles import graph_microseconds

_CACHE = 200e6  # bytes of inputs beyond which none is in the L2 cache
_MOST_COPIES = 8
_CHECKED_ROWS = 300
_LARGEST = 6.0  # of INT8 results with one scale; values beyond saturate
_TOLERANCE = 1.02  # times the error of the exact result that is rounded to INT8


class Shape(NamedTuple):
    """Rows, columns of the result and inner size."""

    m: int
    n: int
    k: int
    activation: str


SHAPES = (
    Shape(8192, 8192, 2048, "silu"),  # Llama 1B
    Shape(4096, 14336, 4096, "silu"),  # Mistral 7B
    Shape(8192, 3072, 1024, "silu"),  # Qwen3 0.6B
    Shape(4096, 16384, 2048, "gelu_tanh"),  # Gemma 2B
    Shape(8192, 1152, 768, "gelu"),  # ModernBERT
    Shape(32896, 2048, 768, "silu"),  # EVA-02
    *(Shape(m, 8192, 2048, "silu") for m in (2048, 1024, 512, 256, 128)),
    *(
        Shape(m, n, k, "silu")
        for n, k in ((1152, 768), (3072, 1024), (4096, 1536))
        for m in (2048, 1024, 512, 257, 128)
    ),
    Shape(197, 2048, 768, "silu"),
    Shape(5000, 1008, 320, "gelu"),
)
SMOKE = (Shape(70, 48, 64, "silu"),)
TILES = {
    "pingpong": PINGPONG,
    "pingpong, groups of 8": PINGPONG._replace(group_m=8),
    "cooperative": COOPERATIVE,
    "pingpong, 64 columns": PINGPONG._replace(block_n=64, num_stages=7),
}


class Case(NamedTuple):
    """Inputs of different values, and both weights in one."""

    shape: Shape
    inputs: list[tuple[Tensor, Tensor]]  # (M, K) int8, (M, 1)
    weights: list[Tensor]  # (2 N, K) int8
    weight_scale: Tensor  # (2 N,)
    out_scale: Tensor  # (1,)

    def operands(self, i: int) -> tuple[Tensor, ...]:
        """Input, its scale, both weights in one, and their scale."""
        return *self.inputs[i], self.weights[i], self.weight_scale


def draw(shape: Shape, device: torch.device) -> Case:
    """Integers whose products have a deviation near 1, and a scale for results up to 6."""
    generator = torch.Generator(device).manual_seed(0)
    integers = functools.partial(torch.randint, -127, 128, dtype=torch.int8, generator=generator, device=device)
    uniform = functools.partial(torch.rand, generator=generator, device=device)
    copies = min(int(_CACHE / ((shape.m + 2 * shape.n) * shape.k)) + 1, _MOST_COPIES)
    a = [(integers((shape.m, shape.k)), (uniform((shape.m, 1)) + 0.5) / 73) for _ in range(copies)]
    weights = [integers((2 * shape.n, shape.k)) for _ in range(copies)]
    scale = (uniform(2 * shape.n) + 0.5) / 73 / shape.k**0.5
    return Case(shape, a, weights, scale, torch.full((1,), _LARGEST / 127, device=device))


def exact(case: Case) -> Tensor:
    """The first rows of the first input's result, in float64."""
    a, a_scale, weight, weight_scale = case.operands(0)
    a, a_scale = a[:_CHECKED_ROWS].double(), a_scale[:_CHECKED_ROWS].double()
    gate, up = (a @ weight.double().T * a_scale * weight_scale.double()).chunk(2, -1)
    return apply_activation(gate, case.shape.activation) * up


def quantized(y: Tensor, out_scale: Tensor | None, alone: bool) -> tuple[Tensor, Tensor]:
    """INT8 values and scale; Inductor fuses it unless it is ``alone``."""
    if alone:
        return torch.ops.qframework.dynamic_quantize.alone(y, "per_token")
    scale = numerics.dynamic_scale(y, "per_token") if out_scale is None else out_scale
    return numerics.quantize(y, scale if out_scale is None else scale.reshape(())), scale


def apart(
    a: Tensor, a_scale: Tensor, weight: Tensor, scale: Tensor, activation: str, out_scale: Tensor | None, alone: bool
) -> tuple[Tensor, Tensor]:
    """Two linears, the first with the activation in its epilogue."""
    n, linear = len(scale) // 2, torch.ops.qframework.int8_linear.default
    left = linear(a, a_scale, weight[:n], scale[:n], None, activation, None, None, torch.float16)
    right = linear(a, a_scale, weight[n:], scale[n:], None, "none", None, None, torch.float16)
    return quantized(left * right, out_scale, alone)


def packed(
    a: Tensor, a_scale: Tensor, weight: Tensor, scale: Tensor, activation: str, out_scale: Tensor | None, alone: bool
) -> tuple[Tensor, Tensor]:
    """One linear of both weights."""
    linear = torch.ops.qframework.int8_linear.default
    left, right = linear(a, a_scale, weight, scale, None, "none", None, None, torch.float16).chunk(2, -1)
    return quantized(apply_activation(left, activation) * right, out_scale, alone)


def one_kernel(
    a: Tensor,
    a_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    activation: str,
    out_scale: Tensor | None,
    tile: Tile | None,
) -> tuple[Tensor, Tensor]:
    """One gated linear, and for a scale per token our kernel behind it."""
    n, dtype = len(scale) // 2, torch.float16 if out_scale is None else None
    arguments = (a, a_scale, weight[:n], scale[:n], None, weight[n:], scale[n:], None, activation, out_scale, dtype)
    if tile is None:
        y = (gated.INT8_GATED_LINEAR.cuda if a.is_cuda else gated.INT8_GATED_LINEAR.cpu)(*arguments)
    else:
        record = gated.Int8GatedLinearArguments(*arguments)
        y = record.empty_result()
        gated.write_result(record, y, tile)
    return quantized(y, None, True) if out_scale is None else (y, out_scale)


Form = Callable[..., tuple[Tensor, Tensor]]


def forms(mode: str, compiles: bool) -> Iterator[tuple[str, Form]]:
    """By name, what computes the result of operands, activation and scale."""
    for name, form in (("apart", apart), ("packed", packed)):
        for alone in (False, True) if mode == "dynamic" else (False,):
            run = functools.partial(form, alone=alone)
            yield name + ", alone" * alone, torch.compile(run, dynamic=False) if compiles else run
    yield "gated", functools.partial(one_kernel, tile=None)
    for name, tile in TILES.items() if compiles else ():
        yield name, functools.partial(one_kernel, tile=tile)


def error(found: tuple[Tensor, Tensor], expected: Tensor) -> float:
    """The relative error of the first rows."""
    q, scale = found
    y = (q.double() * scale.double())[:_CHECKED_ROWS]
    return float((y - expected).norm() / expected.norm())


@torch.no_grad()
def measure(shape: Shape, mode: str, device: torch.device, compiles: bool = True) -> dict[str, Any]:
    """Microseconds of all forms of a shape, and their errors as multiples of the exact result's once it is INT8."""
    case = draw(shape, device)
    out_scale = case.out_scale if mode == "static" else None
    expected = exact(case)
    least = error(quantized(expected, out_scale, False), expected)
    times: dict[str, float] = {}
    errors: dict[str, float] = {}
    for name, run in forms(mode, compiles):
        errors[name] = round(error(run(*case.operands(0), shape.activation, out_scale), expected) / least, 4)
        if errors[name] <= _TOLERANCE:
            inputs = [case.operands(i) for i in range(len(case.inputs))]
            calls = [functools.partial(run, *each, shape.activation, out_scale) for each in inputs]
            times[name] = round(graph_microseconds(calls), 2) if compiles else 0
    torch._dynamo.reset()
    return {**shape._asdict(), "mode": mode, "us": times, "errors": errors}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on the GPU; returns the exit status, 1 if a form computes something else."""
    records = kernel_command.run("benchmarks.gated_linear", str(__doc__), _cases, measure, argv)
    return int(any(not error <= _TOLERANCE for record in records for error in record["errors"].values()))


def _cases(smoke: bool) -> Iterator[kernel_command.Case]:
    """Shapes, each with both kinds of scales."""
    return itertools.product(SMOKE if smoke else SHAPES, ("static", "dynamic"))


if __name__ == "__main__":
    sys.exit(main())
