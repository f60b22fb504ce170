"""Parameters and buffers that a graph reads by name, and their replacement for one reader alone.

Nothing is ever written into a tensor: the module of an exported program shares its tensors with the model that was
exported, and with every other module made from the same program.
"""

from __future__ import annotations

import operator

from torch import Tensor, nn
from torch.fx import GraphModule, Node


def attribute(model: GraphModule, node: Node) -> Tensor:
    """The tensor behind the ``get_attr`` node."""
    return operator.attrgetter(str(node.target))(model)


def replace_attribute(model: GraphModule, node: Node, reader: Node, value: Tensor) -> Node:
    """Let ``reader`` read ``value`` where it reads the ``get_attr`` node ``node``; the node it reads from now on.

    The attribute keeps its name where ``reader`` is all that reads it, so that the old tensor can go; others that read
    it keep the old tensor, and ``value`` becomes a new attribute of ``model``.
    """
    old = attribute(model, node)
    new = _like(old, value)
    if readers(model, node) == {reader}:
        owner, _, leaf = str(node.target).rpartition(".")
        setattr(model.get_submodule(owner), leaf, new)
        return node
    with model.graph.inserting_before(reader):
        again = add_attribute(model, f"{node.target}_{reader.name}", new)
    again.meta = dict(node.meta)
    reader.replace_input_with(node, again)
    return again


def add_attribute(model: GraphModule, name: str, value: Tensor) -> Node:
    """A ``get_attr`` node of a new attribute at the graph's insertion point; dots in ``name`` become underscores."""
    name = "_" + name.replace(".", "_")
    while hasattr(model, name):
        name += "_"
    if isinstance(value, nn.Parameter):
        model.register_parameter(name, value)
    else:
        model.register_buffer(name, value)
    return model.graph.get_attr(name)


def readers(model: GraphModule, node: Node) -> set[Node]:
    """Everything that reads the attribute of ``node``, through any ``get_attr`` node."""
    same = (other for other in model.graph.find_nodes(op="get_attr") if other.target == node.target)
    return {user for other in same for user in other.users}


def _like(old: Tensor, value: Tensor) -> Tensor:
    value = value.detach().to(old.dtype)
    return nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
