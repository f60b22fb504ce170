"""Makes arithmetic in place arithmetic with a result of its own, where nothing else sees the write.

From::

    a -> masked_fill_(a, mask, low)     a has memory of its own, of which nothing else is read later
      -> softmax(a) -> ...

To::

    a -> masked_fill(a, mask, low) -> softmax -> ...

The search for attention recognises steps with a result: XLM writes its mask into the logits. A write also keeps a block
from being compiled once for all of its repetitions: in DeBERTa, ``score += p2c_att / scale``.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qframework.compat.dispatch import set_grad_enabled
from qframework.compat.dynamo import recorded_value
from qframework.compat.operators import OpOverload, schema
from qframework.graph.nodes import why_not_plain
from qframework.graph.shapes import traced_size
from qframework.graph.writes import storages

aten = torch.ops.aten
_OPERATORS: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
}
# Operations of each element by itself, whose form in place has the same arguments.
_OF_ELEMENTS = {"add", "sub", "mul", "div", "neg", "exp", "pow", "sqrt", "rsqrt", "relu", "sigmoid", "tanh"}
_OF_ELEMENTS |= {"clamp", "clamp_min", "clamp_max", "masked_fill", "nan_to_num", "tril", "triu"}


def write_out_of_place(gm: GraphModule) -> None:
    """Replace arithmetic in place, in place itself and without recompiling, where the graph computes the same."""
    memory = _Memory(gm)
    switches_gradients = any(node.target is set_grad_enabled for node in gm.graph.nodes)
    for node in list(gm.graph.nodes):
        if (target := _with_a_result(node)) is None:
            continue
        written = node.args[0]
        if not isinstance(written, Node) or memory.is_seen(written, node) or not _computes_the_same(node, target):
            continue
        if switches_gradients and recorded_value(written).requires_grad:
            continue  # what a scope without gradients writes has one
        node.op, node.target = "call_function", target
        memory.let_read_after(written, node)


def _with_a_result(node: Node) -> Any:
    """What computes a result of its own from the arguments of an operation in place; None for any other node."""
    if node.op not in ("call_function", "call_method"):
        return None
    if isinstance(node.target, OpOverload):
        space, _, name = schema(node.target).name.partition("::")
        known = space == "aten" and name.endswith("_") and name[:-1] in _OF_ELEMENTS
        overload = schema(node.target).overload_name or "default"
        return getattr(getattr(aten, name[:-1]), overload, None) if known else None
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name.endswith("_") and name[:-1] in _OF_ELEMENTS:
        return getattr(torch, name[:-1]) if node.op == "call_method" or getattr(torch, name) is node.target else None
    return _OPERATORS.get(node.target)


class _Memory:
    """The nodes that share memory, and their order."""

    def __init__(self, gm: GraphModule) -> None:
        self._place: dict[Node, int] = {}
        self._sharing: dict[int, list[Node]] = defaultdict(list)
        self._anywhere: list[Node] = []  # unknown
        for place, node in enumerate(gm.graph.nodes):
            self._place[node] = place
            if node.op == "output":
                continue
            for each in storages(node) or ():
                self._sharing[each].append(node)
            if storages(node) is None:
                self._anywhere.append(node)

    def is_seen(self, written: Node, write: Node) -> bool:
        """Whether something else than readers of ``written`` may see that ``write`` changes it."""
        if not (own := storages(written)):
            return True
        nodes = [*self._anywhere, *(node for each in own for node in self._sharing[each])]
        before = [node for node in nodes if self._place[node] < self._place[write]]
        return any(
            not node.op.startswith("call") or (node is not written and self._readers_after(node, write))
            for node in before
        )

    def let_read_after(self, written: Node, write: Node) -> None:
        """Let the readers of ``written`` behind ``write`` read the result of ``write``."""
        for user in self._readers_after(written, write):
            user.replace_input_with(written, write)

    def _readers_after(self, node: Node, write: Node) -> list[Node]:
        return [user for user in node.users if self._place[user] > self._place[write]]


def _computes_the_same(node: Node, target: Any) -> bool:
    """Whether ``target`` gives a tensor like that which the node wrote: its dtype, shape and strides."""
    wanted = recorded_value(node)
    try:
        args, kwargs = map_arg((node.args, node.kwargs), _on_meta)
        found = target(*args, **kwargs)
    except (TypeError, RuntimeError):  # something else than tensors and numbers
        return False
    return isinstance(wanted, Tensor) and _layout(found) == _layout(wanted)


def _on_meta(node: Node) -> Tensor | float:
    value = recorded_value(node)
    if isinstance(value, torch.SymInt | torch.SymFloat) and isinstance(value.node.hint, (int, float)):
        return value.node.hint
    if not isinstance(value, Tensor) or why_not_plain(value) is not None:
        raise TypeError(f"{node.name} is no plain tensor")
    shape, strides, dtype = _layout(value)
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _layout(x: Tensor) -> tuple[Any, ...]:
    return tuple(map(traced_size, x.shape)), tuple(map(traced_size, x.stride())), x.dtype
