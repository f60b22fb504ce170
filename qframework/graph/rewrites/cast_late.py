"""Moves casts to float32 behind views, copies and scaling, right before the product that reads them.

From::

    k.float() -> permute -> * 0.5 -> matmul

To::

    k.permute -> float() -> * 0.5 -> matmul

Models that compute logits in float32 cast queries and keys anywhere before their product. Kernels compute such logits
from 16-bit operands, and the search for attention expects the casts right before the product.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qframework.compat.dispatch import enable_python_dispatcher
from qframework.compat.dynamo import recorded_value, value_key
from qframework.graph.attention.call import product_operands
from qframework.graph.nodes import CASTS, COPIES, VIEWS, fake_value, needs_gradient, operation, why_not_plain
from qframework.graph.writes import is_written, switches_gradients, written_between

_REPEATS = {"expand", "expand_as", "repeat", "repeat_interleave"}
_MOVES = {*VIEWS, *COPIES, *_REPEATS, "transpose", "permute", "mT", "t", "movedim", "flip"}
_MOVES |= {"getitem", "select", "slice", "narrow"}
_READ_SHAPES = ("expand_as", "view_as", "reshape_as")
_16_BIT = (torch.float16, torch.bfloat16)


def cast_late(gm: GraphModule) -> None:
    """Move, in place, casts of 16-bit tensors to float32 behind operations that only move elements."""
    for product in list(gm.graph.nodes):
        for operand in product_operands(product) or ():
            steps = _steps_from_cast(operand)
            if any(_moves(step) or _casts(step) for step in steps[1:]) and _computes_the_same(steps, product):
                _cast_last(steps, product)


def _steps_from_cast(operand: Node) -> list[Node]:
    """The cast of a 16-bit tensor that an operand of a product comes from, and what follows it; or nothing."""
    steps = [operand]
    while _moves(steps[0]) or _casts(steps[0]) or _scales(steps[0]):
        step, source = steps[0], steps[0].all_input_nodes[0]
        after, before = fake_value(step), fake_value(source)
        if after is None or before is None or after.dtype != torch.float32 or after.device != before.device:
            break
        if why_not_plain(before) is not None:
            break
        if before.dtype in _16_BIT:
            return steps if _casts(step) else []
        if before.dtype != torch.float32 or len(step.users) > 1:
            break
        steps.insert(0, source)
    return []


def _moves(node: Node) -> bool:
    """Whether a node moves elements by numbers or another tensor's shape: an index may be written or give new sizes."""
    if operation(node) not in _MOVES or not _reads_a_node(node):
        return False
    if any(isinstance(given, torch.dtype) for given in (*node.args, *node.kwargs.values())):  # view: reads bits anew
        return False
    others = [recorded_value(each) for each in node.all_input_nodes[1:]]
    known = (int, torch.SymInt, *((Tensor,) if operation(node) in _READ_SHAPES else ()))
    return all(isinstance(other, known) for other in others)


def _casts(node: Node) -> bool:
    return operation(node) in CASTS and _reads_a_node(node)


def _scales(node: Node) -> bool:
    """Whether a node multiplies or divides by a number, which commutes with what moves elements."""
    if len(node.args) != 2 or node.kwargs or len(node.all_input_nodes) != 1:
        return False
    first, second = (isinstance(given, (int, float)) for given in node.args)
    name = operation(node)
    return (name == "mul" and (first or second)) or (name == "div" and second)


def _reads_a_node(node: Node) -> bool:
    return bool(node.args) and isinstance(node.args[0], Node)


def _computes_the_same(steps: list[Node], product: Node) -> bool:
    """Whether the steps may run right before the product, and give the gradients that they gave."""
    cast = steps[0]
    if any(map(is_written, steps)) or written_between(cast, product, cast.all_input_nodes[:1]) is not None:
        return False
    if switches_gradients(cast, product):
        return False
    sums_gradients = len(cast.users) > 1 or any(operation(step) in _REPEATS for step in steps)  # in float32
    return not (sums_gradients and needs_gradient([fake_value(cast)]))


def _cast_last(steps: list[Node], product: Node) -> None:
    """Let ``product`` read the steps in another order: moves, the cast, scaling."""
    cast, *others = steps
    order = [*filter(_moves, others), cast, *filter(_scales, others)]
    added: list[Node] = []
    x = cast.all_input_nodes[0]
    with cast.graph.inserting_before(product):
        try:
            for step in order:
                x = _again(step, x)
                added.append(x)
        except (RuntimeError, ValueError):  # the cast made a copy of other strides, which has this view
            _erase_unread(added)
            return
    product.replace_input_with(steps[-1], x)
    _erase_unread(steps)


def _again(step: Node, x: Node) -> Node:
    """A step that reads ``x``."""
    place = step.args.index(step.all_input_nodes[0])
    args = (*step.args[:place], x, *step.args[place + 1 :])
    run = getattr(Tensor, step.target) if isinstance(step.target, str) else step.target
    with enable_python_dispatcher():  # before the node is there: it may refuse x
        value = run(*map_arg(args, recorded_value), **map_arg(step.kwargs, recorded_value))
    node = step.graph.node_copy(step)
    node.args = args
    node.meta[value_key(step)] = value
    return node


def _erase_unread(nodes: list[Node]) -> None:
    for node in reversed(nodes):
        if not node.users:
            node.graph.erase_node(node)
