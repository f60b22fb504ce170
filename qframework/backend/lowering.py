"""A captured graph that passes through the lowering, and what every pass needs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from qframework.backend.options import BackendOptions
from qframework.backend.report import LayerReport
from qframework.compat.dynamo import add_source, record_value
from qframework.graph.nodes import Constants
from qframework.graph.rewrites.missing_values import record_missing_values

_PREFIX = "_qframework_scale_"  # of the names of buffers


class ScaleConstants:
    """The buffers that the lowering adds to a graph: scales and zero points that were numbers, and computed tensors.

    A number becomes a buffer of one element on the layer's device, which all its readers share.
    """

    def __init__(self, gm: GraphModule) -> None:
        self._gm = gm
        self._first = next(iter(gm.graph.nodes))
        self._nodes: dict[tuple[float | int, torch.dtype, torch.device], Node] = {}
        self._numbers = itertools.count()

    def node(self, scale: float | Node, device: torch.device) -> Node:
        """The node that holds ``scale``."""
        if isinstance(scale, Node):
            return scale
        return self._number(scale, torch.float32, device)

    def zero_point(self, zero_point: int | Node, device: torch.device) -> Node | None:
        """The node that holds ``zero_point``, None for 0. An int32 buffer, so that repeated blocks stay alike."""
        if isinstance(zero_point, Node):
            return zero_point
        return self._number(zero_point, torch.int32, device) if zero_point else None

    def _number(self, number: float, dtype: torch.dtype, device: torch.device) -> Node:
        key = (number, dtype, device)
        if key not in self._nodes:
            self._nodes[key] = self.buffer(torch.tensor([number], dtype=dtype, device=device))
        return self._nodes[key]

    def buffer(self, value: torch.Tensor) -> Node:
        """A node that reads ``value`` from a new buffer."""
        gm, name = self._gm, f"{_PREFIX}{next(self._numbers)}"
        gm.register_buffer(name, value)
        add_source(gm, name)
        with gm.graph.inserting_before(self._first):
            node = gm.graph.get_attr(name)
        record_value(node, value)
        node.meta["val"] = value
        return node

    def owns(self, node: object) -> bool:
        """Whether ``node`` reads a buffer that was made here."""
        return isinstance(node, Node) and node.op == "get_attr" and str(node.target).startswith(_PREFIX)

    def remove(self, node: Node) -> None:
        """Free a buffer that was made here, unless something reads it."""
        if not node.users:
            self._nodes = {key: known for key, known in self._nodes.items() if known is not node}
            self._gm.graph.erase_node(node)
            delattr(self._gm, str(node.target))


def erase_unused(gm: GraphModule, node: Node) -> None:
    """Erase a node without users, then the nodes that only it read; placeholders and attributes stay."""
    if node.users or node.op != "call_function":
        return
    inputs = node.all_input_nodes
    gm.graph.erase_node(node)
    for each in inputs:
        erase_unused(gm, each)


@dataclass
class Lowering:
    """The argument of a pass, which changes the graph in place and adds to ``reports`` what it did to each layer.

    Attributes:
        gm: the graph.
        options: of the backend.
        constants: the real tensors behind parameters and buffers.
        scales: the buffers that passes add, shared by all of them.
        reports: on the layers that the passes so far have handled.
        order: the position of each layer's first node.
        converted: the ``int8_linear`` nodes of layers that PT2E quantized. Their weights are tensors of one model: no
            other part of it runs the same code, as the blocks do that ``torch.compile`` compiles one by one.
        layers: the name of the layer that each ``int8_linear`` computes.
        checks: called with the inputs of each call before the compiled graph runs.
    """

    gm: GraphModule
    options: BackendOptions
    constants: Constants
    scales: ScaleConstants
    reports: list[LayerReport] = field(default_factory=list)
    order: dict[str, int] = field(default_factory=dict)
    converted: set[Node] = field(default_factory=set)
    layers: dict[Node, str] = field(default_factory=dict)
    checks: list[Callable[[Sequence[Any]], None]] = field(default_factory=list)

    @classmethod
    def of(cls, gm: GraphModule, example_inputs: Sequence[Any] = (), options: BackendOptions | None = None) -> Lowering:
        """The state before the first pass; nodes of an exported graph without a value get one."""
        record_missing_values(gm)
        return cls(gm, options or BackendOptions(), Constants(gm, example_inputs), ScaleConstants(gm))


Pass = Callable[[Lowering], None]
