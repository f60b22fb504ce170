"""Buffers of a graph under the name of a layer, which a file then shows: ``blocks.0.mlp.fc1.weight_int8``."""

from __future__ import annotations

from torch import Tensor, nn
from torch.fx import GraphModule, Node


def add_buffer(gm: GraphModule, layer: str, leaf: str, value: Tensor) -> Node:
    """A ``get_attr`` node of a new buffer ``layer.leaf`` at the graph's insertion point; a taken name gets a number."""
    owner = _module(gm, layer)
    name, number = leaf, 1
    while hasattr(owner, name):
        name, number = f"{leaf}_{number}", number + 1
    owner.register_buffer(name, value)
    return gm.graph.get_attr(f"{layer}.{name}" if layer and owner is not gm else name)


def _module(gm: GraphModule, path: str) -> nn.Module:
    """The module at ``path``, made if there is none; the root where a parameter or buffer has that name."""
    module: nn.Module = gm
    for part in filter(None, path.split(".")):
        if not hasattr(module, part):
            module.add_module(part, nn.Module())
        inner = getattr(module, part)
        if not isinstance(inner, nn.Module):
            return gm
        module = inner
    return module
