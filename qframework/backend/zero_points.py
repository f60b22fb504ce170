"""Raises an error if a zero point that was zero when a model was compiled has been written since.

INT8 operators have no zero points, so the lowering removes them from the graph if all are zero. They remain tensors of
the model, which may be written.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.compat.dispatch import writes
from qframework.errors import QFrameworkError
from qframework.graph.nodes import Constants, layer_name

_PER_CHANNEL = {
    torch.ops.quantized_decomposed.quantize_per_channel.default,
    torch.ops.quantized_decomposed.dequantize_per_channel.default,
}


def zero_points_of(gm: GraphModule) -> dict[Node, str]:
    """The zero points that a graph reads as tensors, each with the name of a layer that reads it."""
    found: dict[Node, str] = {}
    for node in gm.graph.nodes:
        zero_points = node.args[2] if node.target in _PER_CHANNEL else None
        if isinstance(zero_points, Node):
            found.setdefault(zero_points, layer_name(next(iter(node.users), node)))
    return found


def left_out(zero_points: dict[Node, str], constants: Constants) -> list[WatchedZeroPoints]:
    """The zero points without readers, which the lowering assumes to be zero."""
    inputs = (
        (layer, constants.input_index(node), constants.value(node))
        for node, layer in zero_points.items()
        if not node.users
    )
    return [
        WatchedZeroPoints(layer, index, value)
        for layer, index, value in inputs
        if index is not None and value is not None
    ]


class WatchedZeroPoints:
    """Zero points among a graph's inputs.

    On a CPU each call checks their values. On a GPU, where that synchronizes, it does so only if they were replaced by
    another tensor or written since, and misses writes through ``.data``.
    """

    def __init__(self, layer: str, index: int, value: Tensor) -> None:
        self._layer, self._index = layer, index
        self._known, self._writes = weakref.ref(value), _times_written(value)

    def check(self, args: Sequence[Any]) -> None:
        """Raise QFrameworkError if one is no longer zero."""
        value = args[self._index]
        version = _times_written(value)
        if value.device.type != "cpu" and value is self._known() and version == self._writes:
            return
        if value.any():
            worst = int(value[value != 0][0])
            raise QFrameworkError(
                f"layer {self._layer!r}: zero points must stay 0, as when the model was compiled, got {worst}. "
                "After torch.compiler.reset() the layer runs in float, with this zero point"
            )
        self._known, self._writes = weakref.ref(value), version


def _times_written(value: Tensor) -> int:
    """How often the tensor was written; -1 for inference tensors, which have no count."""
    return -1 if value.is_inference() else writes(value)
