"""Replaces a whole attention in a captured graph: its products, its softmax and the nodes between them."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch.fx import GraphModule, Node

from qframework.compat.graphs import is_erased
from qframework.errors import QFrameworkError
from qframework.graph.attention.call import AttentionCall, Refused
from qframework.graph.attention.write import AttentionWriter, cannot_be_viewed
from qframework.graph.nodes import (
    argument,
    fake_value,
    fix_numbers,
    is_assertion,
    needs_gradient,
    operation,
    plain_name,
    untransposed,
    users,
    why_not_plain,
)
from qframework.graph.writes import allocates, switches_gradients, writes_in_place, written_between, written_inputs
from qframework.numerics import FLOAT_DTYPES


def _require_computable(call: AttentionCall) -> None:
    end = fake_value(call.end)
    for operand in (call.query, call.key, call.value, call.end):
        if (reason := why_not_plain(fake_value(operand))) is not None:
            raise Refused(f"{plain_name(operand)} {reason}")
    if end is None or end.dtype not in FLOAT_DTYPES:
        dtype = None if end is None else end.dtype
        raise Refused(f"its result must be float32, float16 or bfloat16, got {dtype}")
    if end.device.type not in ("cpu", "cuda"):
        raise Refused(f"it must run on cuda or cpu, got {end.device.type}")
    operands = [call.query, call.key, call.value, *(s.value for s in call.summands), *(t for t, _ in call.row_factors)]
    operands += [call.sinks] if call.sinks is not None else []
    if (writer := written_between(call.first or call.end, call.end, operands, set(call.between))) is not None:
        raise Refused(f"{plain_name(writer)} changes one of its operands in place between its products")
    if _is_partly_without_gradients(call):
        raise Refused("its products, or what is between them, are partly within torch.no_grad, and gradients are on")
    for node in call.between:
        if written_inputs(node).issuperset(node.all_input_nodes):
            continue  # unknown, as of sizes that depend on data: each node reads the one before it, which is replaced
        for written in sorted(written_inputs(node) - set(call.between)):
            if not (written.op.startswith("call") and allocates(written) and users(written) == [node]):
                raise Refused(f"its {plain_name(node)} writes into {plain_name(written)}, which others may read")


def _is_partly_without_gradients(call: AttentionCall) -> bool:
    """Whether a scope cuts a gradient that the operator would compute. Dynamo records that views in it have one."""
    own = sorted({*call.scaling, *call.between})
    if switches_gradients(own[0], call.end) and any(map(_cuts_gradient, own)):
        return True
    is_view = call.key_is_transposed and untransposed(call.key) is not None
    return is_view and needs_gradient([fake_value(call.key)]) and switches_gradients(call.key, call.between[0])


def _cuts_gradient(node: Node) -> bool:
    """Whether a value has no gradient while one of its inputs has one."""
    value = fake_value(node)
    return value is not None and not value.requires_grad and needs_gradient(map(fake_value, node.all_input_nodes))


def replace_attention(gm: GraphModule, call: AttentionCall, write: Callable[[AttentionWriter], Node]) -> Node:
    """Replace ``call.end`` by the node that ``write`` adds, which is returned, and erase nodes without readers.

    Raises:
        Refused: the attention cannot be replaced; the graph is unchanged.
        QFrameworkError: the operator refuses its operands; the graph is unchanged.
    """
    _require_computable(call)
    writer = AttentionWriter(gm, call)
    try:
        new = write(writer)
    except (Refused, QFrameworkError):
        writer.undo()
        raise
    fix_numbers([*call.scaling, *call.between])
    if cannot_be_viewed(call.end, new):
        new = writer.in_memory_order_of(call.end, new)
    call.end.replace_all_uses_with(new)
    erase_unread(gm, call.end, call.between)
    return new


def erase_unread(gm: GraphModule, node: Node, own: Collection[Node] = ()) -> None:
    """Erase a node without readers, then the nodes that only it read; placeholders and attributes stay.

    So do writes in place, except those of ``own``.
    """
    for part in [user for user in node.users if _is_unread_part(user)]:
        gm.graph.erase_node(part)
    if node.op not in ("call_function", "call_method") or any(not is_assertion(user) for user in node.users):
        return
    if writes_in_place(node) and node not in own:
        return
    for assertion in list(node.users):
        gm.graph.erase_node(assertion)
    inputs = node.all_input_nodes
    gm.graph.erase_node(node)
    for each in inputs:
        if not is_erased(each):
            erase_unread(gm, each, own)


def _is_unread_part(node: Node) -> bool:
    """Whether a node takes one result of several, such as the indices of maxima, for nobody."""
    return operation(node) == "getitem" and isinstance(node.args[1], int) and not node.users


def name_shapes(gm: GraphModule) -> None:
    """Rewrite ``x.view_as(y)``, ``x.reshape_as(y)`` and ``x.type_as(y)`` so that they do not read y."""
    for node in list(gm.graph.nodes):
        name = operation(node)
        if name not in ("view_as", "reshape_as", "type_as"):
            continue
        fake, x = fake_value(node), argument(node, 0, "input", "self")
        if fake is None:
            continue
        sizes = [size if isinstance(size, int) else -1 for size in fake.shape]
        if name != "type_as" and sizes.count(-1) > 1:
            continue
        with gm.graph.inserting_before(node):
            if name == "type_as":
                new = gm.graph.call_function(torch.ops.aten.to.dtype, (x, fake.dtype))
            else:
                new = gm.graph.call_function(torch.ops.aten.reshape.default, (x, sizes))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
