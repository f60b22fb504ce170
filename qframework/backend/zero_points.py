"""Raises an error if a zero point that was zero when a model was compiled has been written since.

INT8 operators have no zero points, so the lowering removes them from the graph if all are zero. They remain tensors of
the model, which may be written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.backend.watched_values import WatchedTensors
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


def left_out(zero_points: dict[Node, str], constants: Constants) -> WatchedZeroPoints | None:
    """The zero points without readers, which the lowering assumes to be zero; None if there are none."""
    watched: dict[int, tuple[str, Tensor]] = {}
    for node, layer in zero_points.items():
        index, value = constants.input_index(node), constants.value(node)
        if not node.users and index is not None and value is not None:
            watched[index] = layer, value
    return WatchedZeroPoints(watched) if watched else None


class WatchedZeroPoints(WatchedTensors):
    """Zero points among a graph's inputs.

    On a CPU each call checks their values. On a GPU, where that would synchronize, a call checks them only after one
    was replaced or written.

    ``watched`` maps the index of an input to the layer and the zero points.
    """

    def __init__(self, watched: Mapping[int, tuple[str, Tensor]]) -> None:
        self._indices = list(watched)
        self._layers = [layer for layer, _ in watched.values()]
        self._accept([value for _, value in watched.values()])

    def check(self, args: Sequence[Any]) -> None:
        """Raise QFrameworkError if a value is no longer zero."""
        values = [args[index] for index in self._indices]
        if not self._is_unchanged(values) or any(map(np.count_nonzero, self._on_cpu)):
            for layer, value in zip(self._layers, values, strict=True):
                _require_zero(layer, value)
            self._accept(values)

    def _accept(self, values: list[Tensor]) -> None:
        super()._accept(values)
        # NumPy reads small arrays several times as fast as PyTorch, and a model has one for each layer.
        self._on_cpu = [value.detach().numpy() for value in values if value.device.type == "cpu"]


def _require_zero(layer: str, value: Tensor) -> None:
    if value.any():
        raise QFrameworkError(
            f"layer {layer!r}: zero points must stay 0, as when the model was compiled, got "
            f"{int(value[value != 0][0])}. After torch.compiler.reset() the layer runs in float, with this zero point"
        )
