"""Inlines ``with torch.no_grad():`` of an exported model, whose body is a graph of its own.

From::

    wrap_with_set_grad_enabled(False, body, x, ...)    rotary embeddings of transformers, or a decorated forward

To what Dynamo records for the same block::

    _set_grad_enabled(False) -> the body's operations -> _set_grad_enabled(the mode before)

The layers in the body can then be found, and the passes see what it reads and writes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from qframework.compat.dispatch import set_grad_enabled


def inline_grad_scopes(gm: GraphModule) -> int:
    """Inline every such body, also nested ones, in place; returns their number."""
    inlined = 0
    enabled = torch.is_grad_enabled()
    for node in list(gm.graph.nodes):
        if node.target is set_grad_enabled:
            enabled = bool(node.args[0])
        elif _is_scope(node) and _inline(gm, node, enabled):
            inlined += 1
    return inlined + (inline_grad_scopes(gm) if inlined else 0)


def _is_scope(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled"


def _inline(gm: GraphModule, scope: Node, before: bool) -> bool:
    """Inline one scope whose results are all read one by one; whether it was."""
    enabled, owner, *operands = scope.args
    assert isinstance(owner, Node)
    body = gm.get_submodule(str(owner.target))
    if not isinstance(body, GraphModule) or any(user.target is not operator.getitem for user in scope.users):
        return False
    values = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    with gm.graph.inserting_before(scope):
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
