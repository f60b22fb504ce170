"""Depthwise convolutions of hybrid transformers: Inductor's kernels, and qframework::depthwise in several tiles.

Each shape runs with the activation of its model, in float and with one scale for its result. Every form is compared
with float64 first. Inputs are outside of the L2 cache, calls in CUDA graphs; microseconds are medians.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import kernel_command
from qframework import numerics
from qframework.kernels import depthwise as ours
from qframework.kernels.runtime.activation import apply_activation
from qframework.tuning.kernel_tiles import graph_microseconds

_CACHE = 200e6  # bytes of inputs beyond which none is in the L2 cache
_SCALE = 0.03  # of INT8 results; values beyond 3.8 saturate
_TOLERANCE = {False: 2e-3, True: 0.05}  # relative, of float16 results and of INT8 ones


class Shape(NamedTuple):
    """Images, and the convolution that reads them."""

    n: int
    size: int
    channels: int
    taps: int
    activation: str


SHAPES = (
    *(Shape(64, size, channels, 3, "gelu") for size, channels in ((56, 512), (28, 1024), (14, 1280), (7, 2048))),
    *(Shape(16, size, channels, 3, "gelu") for size, channels in ((128, 256), (64, 512), (32, 1280))),
    *(Shape(128, size, channels, 7, "none") for size, channels in ((56, 128), (28, 256), (14, 512), (7, 1024))),
    *(Shape(32, size, channels, 7, "none") for size, channels in ((56, 256), (28, 512))),
    *(Shape(64, 28, 192, taps, "gelu") for taps in (3, 5, 7, 9)),
    Shape(64, 14, 384, 3, "none"),
    *(Shape(1, size, channels, 3, "gelu") for size, channels in ((56, 512), (14, 1280))),
    *(Shape(1, size, channels, 7, "none") for size, channels in ((56, 128), (14, 512))),
)
SMOKE = (Shape(1, 6, 40, 3, "gelu"),)


class Case(NamedTuple):
    """Inputs of different values, and the parameters."""

    shape: Shape
    inputs: list[Tensor]  # (N, H, W, C)
    weight: Tensor  # (C, 1, K, K)
    bias: Tensor

    @property
    def taps(self) -> Tensor:
        """``(K, K, C)``."""
        return self.weight[:, 0].permute(1, 2, 0).contiguous()


def draw(shape: Shape, device: torch.device) -> Case:
    """Normal values in float16."""
    generator = torch.Generator(device).manual_seed(0)
    normal = functools.partial(torch.randn, generator=generator, device=device, dtype=torch.float16)
    sizes = (shape.n, shape.size, shape.size, shape.channels)
    copies = min(int(_CACHE / (2 * shape.n * shape.size**2 * shape.channels)) + 1, 20)
    weight = normal(shape.channels, 1, shape.taps, shape.taps) / shape.taps
    return Case(shape, [normal(*sizes) for _ in range(copies)], weight, normal(shape.channels))


def by_torch(case: Case, x: Tensor, quantizes: bool, dtype: torch.dtype | None = None) -> Any:
    """The same in torch, in the dtype of x unless another is given."""
    weight, bias = (each if dtype is None else each.to(dtype) for each in (case.weight, case.bias))
    x = x if dtype is None else x.to(dtype)
    y = F.conv2d(x.permute(0, 3, 1, 2), weight, bias, padding=case.shape.taps // 2, groups=case.shape.channels)
    y = apply_activation(y, case.shape.activation).permute(0, 2, 3, 1)
    if not quantizes:
        return y
    return numerics.quantize(y.float(), torch.tensor(_SCALE))


def error(case: Case, result: Any, quantizes: bool) -> float:
    """The relative error of the first input's result."""
    exact = by_torch(case, case.inputs[0][:2], False, torch.float64)
    found = result[:2].double()
    if quantizes:
        exact, found = exact.clamp(-127 * _SCALE, 127 * _SCALE), found * _SCALE
    return float((found - exact).norm() / exact.norm())


def forms(case: Case, quantizes: bool, compiles: bool) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
    """Inductor's kernels, ours, and ours with other tiles."""
    if compiles:
        yield "inductor", torch.compile(lambda x: by_torch(case, x, quantizes), dynamic=False)
    taps, scale = case.taps, torch.full((1,), _SCALE, device=case.weight.device)

    def call(x: Tensor) -> Any:
        operands = (x, taps, case.bias, case.shape.activation)
        operator = ours.DEPTHWISE_QUANTIZE if quantizes else ours.DEPTHWISE
        run = operator.cuda if x.is_cuda else operator.cpu
        return run(*operands, scale) if quantizes else run(*operands)

    yield "ours", call
    default = ours.tile
    for name, factor in (("half as many rows", 0.5), ("twice as many rows", 2)):
        ours.tile = functools.partial(_longer, default, factor)
        try:
            yield name, call
        finally:
            ours.tile = default


def _longer(tile: Callable[..., tuple[int, int, int]], factor: float, *arguments: int) -> tuple[int, int, int]:
    """A tile with strips so many times as long."""
    rows, *others = tile(*arguments)
    return max(round(factor * rows), 1), others[0], others[1]


@torch.no_grad()
def measure(shape: Shape, quantizes: bool, device: torch.device, compiles: bool = True) -> dict[str, Any]:
    """Microseconds and errors of all forms of a shape."""
    case = draw(shape, device)
    times, errors = {}, {}
    for name, run in forms(case, quantizes, compiles):
        errors[name] = round(error(case, run(case.inputs[0]), quantizes), 5)
        if not errors[name] <= _TOLERANCE[quantizes]:
            continue
        times[name] = round(graph_microseconds([functools.partial(run, x) for x in case.inputs]), 2) if compiles else 0
    torch._dynamo.reset()
    return {**shape._asdict(), "quantizes": quantizes, "us": times, "errors": errors}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on the GPU; returns the exit status."""
    kernel_command.run("benchmarks.depthwise", str(__doc__), _cases, measure, argv)
    return 0


def _cases(smoke: bool) -> Iterator[kernel_command.Case]:
    """Shapes, in float and quantized."""
    return ((shape, quantizes) for quantizes in (False, True) for shape in (SMOKE if smoke else SHAPES))


if __name__ == "__main__":
    sys.exit(main())
