"""A captured graph on its way through the passes, and what every pass needs beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from qframework.backend.options import BackendOptions
from qframework.backend.report import LayerReport
from qframework.compat.dynamo import add_source, record_value
from qframework.graph.nodes import Constants


class ScaleConstants:
    """Scales that the graph holds as numbers, turned into one-element buffers on the layer's device."""

    def __init__(self, gm: GraphModule) -> None:
        self._gm = gm
        self._first = next(iter(gm.graph.nodes))
        self._nodes: dict[tuple[float, torch.device], Node] = {}
        self._count = 0

    def node(self, scale: float | Node, device: torch.device) -> Node:
        """The node that holds ``scale``."""
        if isinstance(scale, Node):
            return scale
        key = (scale, device)
        if key not in self._nodes:
            self._nodes[key] = self.buffer(torch.tensor([scale], device=device))
        return self._nodes[key]

    def buffer(self, value: torch.Tensor) -> Node:
        """A node that reads a new buffer."""
        self._count += 1
        return attach_buffer(self._gm, f"_qframework_scale_{self._count - 1}", value, self._first)


def attach_buffer(gm: GraphModule, name: str, value: torch.Tensor, before: Node) -> Node:
    """Register a buffer on the graph module and return a node that reads it."""
    gm.register_buffer(name, value)
    add_source(gm, name)
    with gm.graph.inserting_before(before):
        node = gm.graph.get_attr(name)
    record_value(node, value)
    node.meta["val"] = value
    return node


def erase_unused(gm: GraphModule, node: Node) -> None:
    """Erase a node without users, then whatever fed only it; placeholders and attributes stay."""
    if node.users or node.op != "call_function":
        return
    inputs = node.all_input_nodes
    gm.graph.erase_node(node)
    for each in inputs:
        erase_unused(gm, each)


@dataclass
class Lowering:
    """What a pass gets: it changes the graph in place and writes what became of each layer to ``reports``.

    Attributes:
        gm: the graph.
        options: of the backend.
        constants: the real tensors behind parameters and buffers.
        scales: buffers for scales, shared by all passes.
        reports: on the layers that the passes so far looked at.
        order: where each layer begins.
    """

    gm: GraphModule
    options: BackendOptions
    constants: Constants
    scales: ScaleConstants
    reports: list[LayerReport] = field(default_factory=list)
    order: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, gm: GraphModule, example_inputs: Sequence[Any] = (), options: BackendOptions | None = None) -> Lowering:
        """A graph that no pass has seen."""
        return cls(gm, options or BackendOptions(), Constants(gm, example_inputs), ScaleConstants(gm))


Pass = Callable[[Lowering], None]
