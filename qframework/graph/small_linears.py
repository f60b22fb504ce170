"""Linear layers that are too small for INT8: many rows of few channels, such as layers that mix heads.

For each row, a layer of K inputs and N outputs computes K N products and moves K + N values. If K N is small, memory
traffic takes most of the time and most of a tensor core's tile is padding, so that INT8 has nothing to speed up; and
its quantization prevents the compiler from fusing the layer with its neighbours. Below 1,024 products that is so on any
chip: on an H100, CaiT, whose attention mixes 8 heads in two such layers of 2.5 million rows, ran at 0.68 times the
speed of FP16 with these layers in INT8. On Hopper the limits were measured
(``other/2026-11-27-h100-small-linears.json``): behind a norm, static INT8 has 0.58 times the speed of FP16 with 32
inputs and outputs, 0.83 with 64, where a residual that the layer adds makes up for it, and 1.31 with 128. Scales per
token cost more, and so do rows of INT8 that are no multiple of 32 bytes: 40 inputs and 160 outputs have 0.58, 48 and
192 have 0.81. With few rows the launch takes most of the time in either precision, and what quantizes the input
decides (backend/linear_gain.py). But rows of INT8 that are no multiple of 16 bytes are copied, and so is the weight:
8 us for each layer of the static TNT-B at batch 1 (``other/2026-11-27-h100-batch-1.json``), more than INT8 can save.
"""

from __future__ import annotations

import math

from torch.fx import Node

from qframework.graph.nodes import fake_value
from qframework.graph.shapes import traced_size
from qframework.kernels.linear.tile import MAX_FEW_ROWS
from qframework.kernels.runtime.chip import capability_of

MANY_ROWS, FEWEST_PRODUCTS = 4096, 1024
ON_HOPPER = 4096  # the fewest products there,
ON_HOPPER_SLOWER = 10_000  # with scales per token, or rows of INT8 that are no multiple of 32 bytes
ON_HOPPER_COPIED = 2**20  # with fewer rows that are copied, since they are no multiple of 16 bytes


def why_too_small(x: Node, weight: Node, dynamic: bool) -> str | None:
    """Why the linear of ``x (..., K)`` and ``weight (N, K)`` stays in float; None if it need not or is unknown.

    ``dynamic`` says whether the input would have a scale per token, computed at run time.
    """
    given, matrix = fake_value(x), fake_value(weight)
    if given is None or matrix is None or matrix.ndim != 2:
        return None
    if 0 in matrix.shape:
        return f"its weight is empty, of shape {tuple(matrix.shape)}"
    rows = math.prod(map(traced_size, given.shape[:-1]))
    outputs, inputs = map(traced_size, matrix.shape)
    on_hopper, fewest = capability_of(given.device) == (9, 0), FEWEST_PRODUCTS
    if on_hopper and MAX_FEW_ROWS < rows < MANY_ROWS and inputs % 16 and inputs * outputs < ON_HOPPER_COPIED:
        return (
            f"its {inputs} inputs are no multiple of 16, so that INT8 would copy its {rows} rows and its weight first. "
            f"That pays from {ON_HOPPER_COPIED} inputs times outputs on"
        )
    if on_hopper:
        fewest = ON_HOPPER_SLOWER if dynamic or inputs % 32 else ON_HOPPER
    if rows < MANY_ROWS or inputs * outputs >= fewest:
        return None
    return (
        f"it has {inputs} inputs and {outputs} outputs for each of {rows} rows, which INT8 does not make faster. With "
        f"{MANY_ROWS} rows or more, a layer is quantized if its inputs times its outputs are at least {fewest}"
    )
