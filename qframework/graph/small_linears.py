"""Linear layers that are too small for INT8, whatever the chip: many rows of few channels, as heads that are mixed.

A layer of K inputs and N outputs reads and writes K + N values of each row for K N products. Where K N is less than
1,024, a tile of tensor cores is mostly padding and memory is what takes time, so that INT8 has nothing to make faster,
while its scales and roundings break the kernels that the compiler would fuse around the layer. On an H100 a CaiT, whose
attention mixes 8 heads by two such layers of 2.5 million rows, was 0.68 times as fast as FP16 with them in INT8. Calls
of few rows take a launch either way.
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
        f"it has {inputs} inputs and {outputs} outputs for each of {rows} rows, which INT8 does not make faster; "
        f"layers of so many rows are quantized from {FEWEST_PRODUCTS} inputs times outputs on"
    )
