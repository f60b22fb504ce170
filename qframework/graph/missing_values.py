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
from qframework.compat.dispatch import FakeTensor, FakeTensorMode
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
