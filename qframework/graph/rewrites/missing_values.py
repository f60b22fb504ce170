"""Records the values of nodes that PT2E added to an exported graph: scales, quantized weights and activations.

Passes take a tensor without a recorded value for one that may share memory with any other: an in-place operator
anywhere before a layer then keeps the layer in float. A graph of Dynamo has all values.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qframework.compat import pytree
from qframework.compat.dispatch import FakeTensor, FakeTensorMode, memory_of
from qframework.compat.dynamo import recorded_value
from qframework.compat.operators import OpOverload, schema
from qframework.graph.attributes import attribute


def record_missing_values(gm: GraphModule) -> None:
    """Run nodes without a value on fake tensors, in the mode of the recorded ones; those that cannot run get none."""
    mode = _mode(gm)
    if mode is None:
        return
    for node in gm.graph.nodes:
        if recorded_value(node) is None:
            try:
                value = _value(gm, node, mode)
            except Exception:  # noqa: BLE001 (any failure on fake tensors: the value stays unknown)
                continue
            if value is not None:
                node.meta["val"] = value


def share_memory_again(gm: GraphModule) -> None:
    """Let the values of views and of writes share memory again, as they do when the graph runs.

    ``torch.export.load`` restores each node's value by itself: passes would take a write to a view for one that nothing
    else sees.
    """
    mode = _mode(gm)
    if mode is None or not any(map(_has_lost_its_memory, gm.graph.nodes)):
        return
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        try:
            value = _written_value(node, mode) if _is_mutable(node) else _value(gm, node, mode)
        except Exception:  # noqa: BLE001 (any failure on fake tensors: the value stays unknown)
            value = None
        if value is not None:
            node.meta["val"] = value
        elif isinstance(recorded_value(node), Tensor):
            node.meta.pop("val", None)  # may share any memory


def _is_mutable(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and schema(node.target).is_mutable


def _has_lost_its_memory(node: Node) -> bool:
    """Whether the value of a write does not share memory with that of its input."""
    value = recorded_value(node)
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or not isinstance(value, Tensor):
        return False
    x = node.args[0] if node.args else None
    given = recorded_value(x) if isinstance(x, Node) else None
    aliases = [each.alias_info for each in schema(node.target).returns]
    writes = _is_mutable(node) and bool(aliases) and aliases[0] is not None
    return writes and isinstance(given, Tensor) and memory_of(given) != memory_of(value)


def _written_value(node: Node, mode: FakeTensorMode) -> Any:
    """The value of what a write returns: the memory that it writes, with the recorded layout."""
    x, value = node.args[0] if node.args else None, recorded_value(node)
    given = recorded_value(x) if isinstance(x, Node) else None
    if not isinstance(given, Tensor) or not isinstance(value, Tensor):
        return None
    if given.shape == value.shape and given.stride() == value.stride():
        return given
    with mode, torch.no_grad():
        return given.as_strided(value.shape, value.stride(), value.storage_offset())


def _mode(gm: GraphModule) -> FakeTensorMode | None:
    """The mode of the inputs' values in an exported graph."""
    values = (node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder")
    return next((x.fake_mode for value in values for x in pytree.tree_leaves(value) if isinstance(x, FakeTensor)), None)


def _value(gm: GraphModule, node: Node, mode: FakeTensorMode) -> Any:
    if node.op == "get_attr":
        value = attribute(gm, node)
        return mode.from_tensor(value, static_shapes=True) if isinstance(value, Tensor) else None
    target: Any = node.target
    known: Any = map_arg((node.args, node.kwargs), _known)
    if target is operator.getitem:
        return operator.getitem(*known[0])
    if not isinstance(target, OpOverload) or schema(target).is_mutable:
        return None
    with mode, torch.no_grad():
        return target(*known[0], **known[1])


def _known(node: Node) -> Any:
    value = recorded_value(node)
    if value is None:
        raise LookupError(node.name)
    return value
