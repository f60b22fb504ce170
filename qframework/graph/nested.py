"""Linears in the subgraphs of higher-order operators, which no pass enters."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from qframework.graph.nodes import linear_call

HIGHER_ORDER = (
    "a higher-order operator holds it: torch.cond, a loop, activation checkpointing, or torch.autocast within an "
    "exported model"
)


def nested_linears(gm: GraphModule) -> list[Node]:
    """The linears in the graphs of all modules in ``gm``."""
    graphs = [module for module in gm.modules() if isinstance(module, GraphModule) and module is not gm]
    return [node for module in graphs for node in module.graph.nodes if linear_call(node) is not None]
