"""Inlines ``with torch.no_grad():`` of an exported model, whose body is a graph of its own.

From::

    wrap_with_set_grad_enabled(False, body, x, ...)    rotary embeddings of transformers, or a decorated forward

To::

    before = is_grad_enabled()
    _set_grad_enabled(False) -> the body's operations -> _set_grad_enabled(before)

The layers in the body can then be found, and the passes see what it reads and writes. The mode before is that of each
call: a graph prepared with gradients on must not leave them on after it ran with gradients off.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.compat.dispatch import set_grad_enabled
from qframework.compat.dynamo import recorded_value
from qframework.graph.nodes import operation
from qframework.graph.writes import writes_in_place


def inline_grad_scopes(gm: GraphModule, wanted: Callable[[Node], bool] = lambda node: True) -> int:
    """Inline every body with a ``wanted`` operation, also nested ones, in place; returns their number."""
    inlined = sum(_inline(gm, node, wanted) for node in list(gm.graph.nodes) if _is_scope(node))
    return inlined + (inline_grad_scopes(gm, wanted) if inlined else 0)


def inline_scopes_of_layers(gm: GraphModule) -> None:
    """Inline the bodies of an exported graph that hold layers to quantize; others keep their gradient mode's scope.

    Those that write in place are inlined too: PT2E drops a scope whose results nobody reads. And so are those with
    sizes that vary: torch.compile breaks the graph there, and the layers behind would stay in float.
    """
    layers = ("linear", "addmm", "scaled_dot_product_attention", "softmax")
    if inline_grad_scopes(gm, lambda node: operation(node) in layers or writes_in_place(node) or _varies(node)):
        gm.recompile()


def _varies(node: Node) -> bool:
    """Whether a node's value is, or has, a size that varies."""
    value = recorded_value(node)
    sizes = value.shape if isinstance(value, Tensor) else [value]
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _is_scope(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled"


def _inline(gm: GraphModule, scope: Node, wanted: Callable[[Node], bool]) -> bool:
    """Inline one scope whose results are all read one by one; whether it was."""
    enabled, owner, *operands = scope.args
    assert isinstance(owner, Node)
    body = gm.get_submodule(str(owner.target))
    if not isinstance(body, GraphModule) or any(user.target is not operator.getitem for user in scope.users):
        return False
    if not any(map(wanted, body.graph.nodes)):
        return False
    values = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    with gm.graph.inserting_before(scope):
        before = gm.graph.call_function(torch.is_grad_enabled)
        gm.graph.call_function(set_grad_enabled, (enabled,))
        results = _copy(gm, body, str(owner.target), values)
        gm.graph.call_function(set_grad_enabled, (before,))
    for user in list(scope.users):
        user.replace_all_uses_with(results[user.args[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(scope)
    if not owner.users:
        gm.graph.erase_node(owner)
    return True


def _copy(gm: GraphModule, body: GraphModule, name: str, values: dict[Node, Any]) -> Any:
    """Copy the nodes of ``body``, an attribute ``name`` of ``gm``; returns its results."""
    for node in body.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            return torch.fx.node.map_arg(node.args[0], values.__getitem__)
        values[node] = gm.graph.node_copy(node, values.__getitem__)
        if node.op in ("get_attr", "call_module"):
            values[node].target = f"{name}.{node.target}"
    raise AssertionError(f"{name} has no output")
