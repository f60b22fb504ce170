"""Makes arithmetic in place arithmetic with a result of its own, where nothing else sees the write.

From::

    a -> masked_fill_(a, mask, low)     a has memory of its own, of which nothing else is read later
      -> softmax(a) -> ...

To::

    a -> masked_fill(a, mask, low) -> softmax -> ...

The search for attention recognises steps with a result: XLM writes its mask into the logits, MViTv2 replaces them. A
write also keeps a block from being compiled once for all of its repetitions: in DeBERTa, ``score += p2c_att / scale``.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qframework.compat.dispatch import FakeTensor, set_grad_enabled
from qframework.compat.dynamo import recorded_value, value_key
from qframework.compat.operators import OpOverload, schema
from qframework.graph.nodes import fake_value, operation, why_not_plain
from qframework.graph.shapes import same, same_shape, traced_size
from qframework.graph.strides import follow_strides
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
_OF_ELEMENTS |= {"clamp", "clamp_min", "clamp_max", "masked_fill", "nan_to_num", "tril", "triu", "detach"}


class _Call(NamedTuple):
    """What computes a result of its own."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def write_out_of_place(gm: GraphModule) -> None:
    """Replace arithmetic in place, in place itself and without recompiling, where the graph computes the same."""
    _read_whole_tensors(gm)
    memory = _Memory(gm)
    switches_gradients = any(node.target is set_grad_enabled for node in gm.graph.nodes)
    for node in list(gm.graph.nodes):
        if (call := _with_a_result(node)) is None:
            continue
        written = node.args[0]
        if not isinstance(written, Node) or memory.is_seen(written, node):
            continue
        moved: dict[Node, Any] | None = {}
        if not _computes_the_same(written, call):
            moved = None if memory.readers_after(written, node) else _with_other_strides(node, call)
        if moved is None:
            continue
        value = recorded_value(written)
        if switches_gradients and value.requires_grad:
            continue  # what a scope without gradients writes has one
        node.op, node.target, node.args, node.kwargs = "call_function", *call
        node.meta.setdefault(value_key(written), value)
        memory.let_read_after(written, node)
        for each, new in moved.items():
            each.meta[value_key(each)] = new


def _read_whole_tensors(gm: GraphModule) -> None:
    """Let what reads a slice of all elements, ``x[:, 0:]``, read the tensor."""
    for node in list(gm.graph.nodes):
        source = node.args[0] if operation(node) in ("slice", "getitem") else None
        if not isinstance(source, Node) or any(user.op == "output" for user in node.users):
            continue
        if _same_elements(node, source):
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)


def _same_elements(node: Node, source: Node) -> bool:
    part, whole = fake_value(node), fake_value(source)
    if part is None or whole is None or why_not_plain(part) or why_not_plain(whole):
        return False
    if not (own := storages(node)) or own != storages(source):
        return False
    alike = same_shape(part.shape, whole.shape) and all(map(same, part.stride(), whole.stride()))
    return alike and same(part.storage_offset(), whole.storage_offset())


def _with_a_result(node: Node) -> _Call | None:
    """What computes the result of an operation in place; None for any other node."""
    if node.op not in ("call_function", "call_method"):
        return None
    if (given := _replacement(node)) is not None:
        return _Call(torch.clone, (given,), {"memory_format": torch.contiguous_format})
    target = _arithmetic(node)
    return None if target is None else _Call(target, node.args, node.kwargs)


def _replacement(node: Node) -> Node | None:
    """``y`` of ``x[:] = y`` and ``x.copy_(y)`` for tensors alike; None for any other node."""
    if node.target is operator.setitem:
        x, index, y = node.args
        if not all(_is_everything(each) for each in (index if isinstance(index, tuple) else (index,))):
            return None
    elif node.target in ("copy_", aten.copy_.default):
        x, y = node.args[:2]
    else:
        return None
    if not isinstance(x, Node) or not isinstance(y, Node):
        return None
    old, new = fake_value(x), fake_value(y)
    if old is None or new is None:
        return None
    return y if old.dtype == new.dtype and old.device == new.device and same_shape(old.shape, new.shape) else None


def _is_everything(index: Any) -> bool:
    whole = isinstance(index, slice) and index.start in (None, 0) and index.stop is None and index.step in (None, 1)
    return whole or index is Ellipsis


def _arithmetic(node: Node) -> Any:
    """The operation that has a result for one in place; None for any other node."""
    if isinstance(node.target, OpOverload):
        space, _, name = schema(node.target).name.partition("::")
        known = space == "aten" and name.endswith("_") and name[:-1] in _OF_ELEMENTS
        overload = schema(node.target).overload_name or "default"
        return getattr(getattr(aten, name[:-1]), overload, None) if known else None
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name.endswith("_") and name[:-1] in _OF_ELEMENTS:
        of_torch = node.op == "call_method" or getattr(torch, name, None) is node.target
        return getattr(torch, name[:-1]) if of_torch else None
    return _OPERATORS.get(node.target)


class _Memory:
    """The nodes that share memory, and their order."""

    def __init__(self, gm: GraphModule) -> None:
        self._place: dict[Node, int] = {}
        self._sharing: dict[int, list[Node]] = defaultdict(list)
        self._anywhere: list[Node] = []  # unknown
        for place, node in enumerate(gm.graph.nodes):
            self._place[node] = place
            if node.op == "output" or node.target is operator.setitem:
                continue  # nothing that others read
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
            not node.op.startswith("call") or (node is not written and self.readers_after(node, write))
            for node in before
        )

    def let_read_after(self, written: Node, write: Node) -> None:
        """Let the readers of ``written`` behind ``write`` read the result of ``write``."""
        for user in self.readers_after(written, write):
            user.replace_input_with(written, write)

    def readers_after(self, node: Node, write: Node) -> list[Node]:
        """The nodes behind ``write`` that read ``node``."""
        return [user for user in node.users if self._place[user] > self._place[write]]


def _computes_the_same(written: Node, call: _Call) -> bool:
    """Whether the call gives a tensor like that which is written: its dtype, shape and strides."""
    wanted = recorded_value(written)
    try:
        args, kwargs = map_arg((call.args, call.kwargs), _on_meta)
        found = call.target(*args, **kwargs)
    except (TypeError, RuntimeError):  # something else than tensors and numbers
        return False
    return isinstance(wanted, Tensor) and _layout(found) == _layout(wanted)


def _with_other_strides(node: Node, call: _Call) -> dict[Node, Any] | None:
    """The new values of a write to a view with gaps, whose result has none, and of the nodes whose strides follow.

    None if the result differs in more than strides, or the graph depends on them: none of these nodes is written.
    """
    wanted = recorded_value(node)
    if not isinstance(wanted, FakeTensor):
        return None
    try:
        args, kwargs = map_arg((call.args, call.kwargs), recorded_value)
        with wanted.fake_mode:
            found = call.target(*args, **kwargs)
    except (TypeError, RuntimeError, AssertionError):  # what tracing recorded no value for
        return None
    if found.dtype != wanted.dtype or not same_shape(found.shape, wanted.shape):
        return None
    return follow_strides(node, found)


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
