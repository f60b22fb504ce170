"""The parameters and buffers that a captured model changes itself, such as counters and caches of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.fx import GraphModule

from qframework.graph.attributes import attribute
from qframework.graph.writes import written_attributes


def changing_state(gm: GraphModule) -> dict[str, Tensor]:
    """Copies of the tensors that a call of the graph writes, by name. Modules in the graph are not looked into."""
    return {str(node.target): attribute(gm, node).detach().clone() for node in written_attributes(gm)}


@torch.no_grad()
def put_back(gm: GraphModule, state: Mapping[str, Tensor]) -> None:
    """Write ``changing_state`` back into the tensors of the graph that still have these names."""
    for node in gm.graph.find_nodes(op="get_attr"):
        if str(node.target) in state:
            attribute(gm, node).copy_(state[str(node.target)])


@contextmanager
def kept_state(gm: GraphModule) -> Iterator[None]:
    """Undo what calls of the graph inside the block change."""
    state = changing_state(gm)
    try:
        yield
    finally:
        put_back(gm, state)
