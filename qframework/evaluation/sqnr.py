"""What quantization does to the output of every linear layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from qframework.errors import QFrameworkError
from qframework.graph.nodes import layer_name, linear_call
from qframework.numerics import sqnr_db


def layer_sqnr(float_exported: fx.GraphModule, converted: fx.GraphModule, inputs: Tensor) -> dict[str, float]:
    """SQNR in dB of each linear's output in ``converted`` against the same linear's in ``float_exported``.

    Both graphs run on ``inputs`` from the start, so a layer's figure holds its own error and what reached it from the
    layers before. A layer called more than once is listed as ``name``, ``name#2``, ...

    Args:
        float_exported: ``torch.export.export(...).module()``, before ``prepare_pt2e``.
        converted: what ``convert_pt2e`` made of it.
        inputs: the model's input, a batch of real images.

    Raises:
        QFrameworkError: the two graphs do not hold the same linears.
    """
    _check_same_layers(float_exported, converted)
    expected: dict[str, Tensor] = {}
    result: dict[str, float] = {}

    def compare(name: str, value: Tensor) -> None:
        result[name] = sqnr_db(
            expected.pop(name), value
        )  # popped: only the outputs still to be compared stay in memory

    with torch.no_grad():
        _LinearOutputs(float_exported, expected.__setitem__).run(inputs)
        _LinearOutputs(converted, compare).run(inputs)
    return result


def linear_names(module: fx.GraphModule) -> dict[fx.Node, str]:
    """Every linear's node with the dotted name of its layer; the second call of a layer is ``name#2``."""
    seen: Counter[str] = Counter()
    names = {}
    for node in module.graph.nodes:
        if linear_call(node) is not None:
            name = layer_name(node)
            seen[name] += 1
            names[node] = name if seen[name] == 1 else f"{name}#{seen[name]}"
    return names


class _LinearOutputs(fx.Interpreter):
    """Runs a graph and hands every linear's name and output to ``keep``."""

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
            f"the graphs hold different linears: only in float_exported {sorted(expected - found)}, "
            f"only in converted {sorted(found - expected)}; pass the module that was prepared and converted"
        )
