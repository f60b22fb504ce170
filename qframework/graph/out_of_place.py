"""Makes arithmetic in place arithmetic with a result of its own, where nothing else sees the write.

From::

    a -> iadd(a, b) -> ...     nothing but the sum reads a, which has memory of its own

To::

    a -> add(a, b) -> ...

A write keeps a block from being compiled once for all of its repetitions: in DeBERTa, ``score += p2c_att / scale``.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qframework.compat.dynamo import recorded_value
from qframework.graph.nodes import why_not_plain
from qframework.graph.writes import allocates

aten = torch.ops.aten
_OUT_OF_PLACE: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.div_.Tensor: aten.div.Tensor,
}


def write_out_of_place(gm: GraphModule) -> None:
    """Replace arithmetic in place, in place itself and without recompiling, where the graph computes the same."""
    own: set[Node] = set()  # results that have memory of their own by now, whatever tracing recorded
    for node in gm.graph.nodes:
        target = _OUT_OF_PLACE.get(node.target) if node.op == "call_function" else None
        if target is None:
            continue
        written = node.args[0]
        is_private = isinstance(written, Node) and set(written.users) == {node} and written.op.startswith("call")
        if is_private and (written in own or allocates(written)) and _computes_the_same(node, target):
            node.target = target
            own.add(node)


def _computes_the_same(node: Node, target: Any) -> bool:
    """Whether ``target`` gives a tensor like that which the node wrote: its dtype, shape and strides."""
    wanted = recorded_value(node)
    try:
        args, kwargs = map_arg((node.args, node.kwargs), _on_meta)
        found = target(*args, **kwargs)
    except (TypeError, RuntimeError):  # something else than tensors and numbers, or symbolic sizes
        return False
    return isinstance(wanted, Tensor) and _layout(found) == _layout(wanted)


def _on_meta(node: Node) -> Tensor:
    value = recorded_value(node)
    if not isinstance(value, Tensor) or why_not_plain(value) is not None:
        raise TypeError(f"{node.name} is no plain tensor")
    return torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device="meta")


def _layout(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.dtype
