"""Linear layers that are too small for INT8 on any chip: many rows of few channels, such as layers that mix heads.

For each row, a layer of K inputs and N outputs computes K N products and moves K + N values. If K N is below 1,024,
memory traffic takes most of the time and most of a tensor core's tile is padding, so that INT8 has nothing to speed up;
and its quantization prevents the compiler from fusing the layer with its neighbours. On an H100, CaiT, whose attention
mixes 8 heads in two such layers of 2.5 million rows, ran at 0.68 times the speed of FP16 with these layers in INT8.
With few rows the launch takes most of the time in either precision.
"""

from __future__ import annotations

import math

from torch.fx import Node

from qframework.graph.nodes import fake_value
from qframework.graph.shapes import traced_size

MANY_ROWS, FEWEST_PRODUCTS = 4096, 1024


def why_too_small(x: Node, weight: Node) -> str | None:
    """Why the linear of ``x (..., K)`` and ``weight (N, K)`` stays in float; None if it need not or is unknown."""
    given, matrix = fake_value(x), fake_value(weight)
    if given is None or matrix is None or matrix.ndim != 2:
        return None
    rows = math.prod(map(traced_size, given.shape[:-1]))
    outputs, inputs = map(traced_size, matrix.shape)
    if rows < MANY_ROWS or inputs * outputs >= FEWEST_PRODUCTS:
        return None
    return (
        f"it has {inputs} inputs and {outputs} outputs for each of {rows} rows, which INT8 does not make faster. With "
        f"{MANY_ROWS} rows or more, a layer is quantized if its inputs times its outputs are at least {FEWEST_PRODUCTS}"
    )
