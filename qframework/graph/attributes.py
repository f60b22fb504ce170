"""Parameters and buffers that a graph reads by name, and their replacement for one reader alone.

The tensors themselves are never written: the module of an exported program shares them with the exported model and
with every other module made from the same program.
"""

from __future__ import annotations

import operator

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from qframework.graph.nodes import CASTS, COPIES, VIEWS, behind
from qframework.graph.writes import is_written

_PARTS = CASTS | COPIES | VIEWS | {"slice", "select", "getitem", "expand"}


def attribute(model: GraphModule, node: Node) -> Tensor:
    """The tensor that a ``get_attr`` node reads."""
    return operator.attrgetter(str(node.target))(model)


def is_zeros_and_ones(node: Node) -> bool:
    """Whether a node reads a buffer that holds nothing but zeros and ones and is never written, or a part of one.

    Each of its rows must hold a one: where all keys of a row are hidden, they have equal weights.
    """
    node, model = behind(node, _PARTS), node.graph.owning_module
    if node.op != "get_attr" or model is None or is_written(node):
        return False
    tensor = attribute(model, node)
    if isinstance(tensor, nn.Parameter) or not tensor.ndim:
        return False
    return bool(((tensor == 0) | (tensor == 1)).all()) and bool((tensor == 1).any(-1).all())


def replace_attribute(model: GraphModule, node: Node, reader: Node, value: Tensor) -> Node:
    """Make ``reader`` read ``value`` instead of the ``get_attr`` node ``node``; returns the node that it then reads.

    The attribute keeps its name if ``reader`` is its only reader, so that the old tensor is freed. Otherwise the other
    readers keep the old tensor, and ``value`` becomes a new attribute of ``model``.
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
    """All readers of the attribute of ``node``, through any ``get_attr`` node."""
    same = (other for other in model.graph.find_nodes(op="get_attr") if other.target == node.target)
    return {user for other in same for user in other.users}


def _like(old: Tensor, value: Tensor) -> Tensor:
    value = value.detach().to(old.dtype)
    return nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
