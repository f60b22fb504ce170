"""The signal-to-quantization-noise ratio of every linear layer's output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from qframework.errors import QFrameworkError
from qframework.graph.nodes import layer_name, linear_call
from qframework.numerics import sqnr_db
from qframework.quantizer.calibration import flat_inputs


def layer_sqnr(float_exported: fx.GraphModule, converted: fx.GraphModule, inputs: Any) -> dict[str, float]:
    """SQNR in dB of each linear's output in ``converted`` against ``float_exported``.

    Both graphs run from the start, so a layer's SQNR includes the errors of the layers before it. Further calls of a
    layer are listed as ``name#2``, ``name#3``, ...

    Args:
        float_exported: ``torch.export.export(...).module()``, before ``prepare_pt2e``.
        converted: the result of ``convert_pt2e``.
        inputs: a batch of real data as ``calibrate`` takes it.

    Raises:
        QFrameworkError: the graphs have different linears.
    """
    _check_same_layers(float_exported, converted)
    expected: dict[str, Tensor] = {}
    result: dict[str, float] = {}

    def compare(name: str, value: Tensor) -> None:
        result[name] = sqnr_db(expected.pop(name), value)  # pop frees the output

    with torch.no_grad():
        flat = flat_inputs(float_exported, inputs, 0)
        _LinearOutputs(float_exported, expected.__setitem__).run(*flat, enable_io_processing=False)
        _LinearOutputs(converted, compare).run(*flat, enable_io_processing=False)
    return result


def linear_names(module: fx.GraphModule) -> dict[fx.Node, str]:
    """The node of every linear with its layer's dotted name; the second call of a layer is ``name#2``."""
    seen: Counter[str] = Counter()
    names = {}
    for node in module.graph.nodes:
        if linear_call(node) is not None:
            name = layer_name(node)
            seen[name] += 1
            names[node] = name if seen[name] == 1 else f"{name}#{seen[name]}"
    return names


class _LinearOutputs(fx.Interpreter):
    """Runs a graph and passes every linear's name and output to ``keep``."""

    def __init__(self, module: fx.GraphModule, keep: Callable[[str, Tensor], None]) -> None:
        super().__init__(module)
        self._names = linear_names(module)
        self._keep = keep

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if node in self._names:
            self._keep(self._names[node], value)
        return value


def _check_same_layers(float_exported: fx.GraphModule, converted: fx.GraphModule) -> None:
    expected, found = set(linear_names(float_exported).values()), set(linear_names(converted).values())
    if expected != found:
        raise QFrameworkError(
            f"layer_sqnr: graphs must have the same linears, got only in float_exported {sorted(expected - found)}, "
            f"only in converted {sorted(found - expected)}. Pass the module that was prepared and converted"
        )
