"""Whether the consumers of a value in a captured graph depend on its memory layout."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from qframework.compat.dispatch import FakeTensor, memory_of
from qframework.compat.dynamo import recorded_value
from qframework.compat.graphs import free_unbacked_symbols
from qframework.compat.operators import OpOverload
from qframework.graph.autocast import autocast_of, follow_scope, scopes_before
from qframework.graph.nodes import fake_value, operation
from qframework.graph.shapes import same_shape
from qframework.graph.writes import writes_in_place, written_inputs

_STORES = {"copy", "index_copy", "index_put", "setitem"}


def follow_strides(node: Node, value: FakeTensor) -> dict[Node, Any] | None:
    """The new values of nodes whose strides change when ``value``, with other strides, replaces ``node``.

    None if the graph depends on the recorded strides: if a view becomes impossible, if an output would get other
    strides, or, to be safe, if memory is written, unless values are only stored in other memory, as in a cache of keys.
    Most operations propagate strides, so the readers of ``value`` are run again on fake tensors until their results
    have the recorded strides.
    """
    if not _moved(node, value):
        return {}
    replay, reader, scopes = _Replay(node, value), node.next, scopes_before(node)
    while reader.op != "root":
        follow_scope(scopes, reader)
        if replay.reaches(reader) and not _only_stores(reader, replay.moved):
            if _is_opaque(reader):
                return None
            try:
                with autocast_of(scopes):
                    replay.run(reader)
            except (RuntimeError, ValueError, TypeError, AssertionError):  # no view, or fake tensors do not support it
                return None
        reader = reader.next
    return replay.moved


def _only_stores(node: Node, moved: Collection[Node]) -> bool:
    """Whether a node copies values that have moved to memory of others; its result is that memory, as it was."""
    return operation(node) in _STORES and writes_in_place(node) and written_inputs(node).isdisjoint(moved)


def _is_opaque(node: Node) -> bool:
    """Whether a node that reads a value may depend on its strides."""
    if node.op not in ("call_function", "call_method") or writes_in_place(node):
        return True
    if operation(node) is None and not _is_quantization(node):  # of another library
        return True
    fake = fake_value(node)
    return operation(node) in ("as_strided", "stride") or (fake is not None and bool(free_unbacked_symbols(fake)))


def _is_quantization(node: Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and target.namespace in ("qframework", "quantized_decomposed")


class _Replay:
    """Runs a graph again from one value on and keeps the results whose strides differ from the recorded ones."""

    def __init__(self, node: Node, value: FakeTensor) -> None:
        self._mode = value.fake_mode
        self.moved: dict[Node, Any] = {node: value}
        self._unrecorded: dict[Node, Any] = {}

    def reaches(self, node: Node) -> bool:
        """Whether the node reads a value that has moved."""
        return any(each in self.moved for each in node.all_input_nodes)

    def run(self, node: Node) -> None:
        """Keep the node's result if it has moved, or shares the memory of a value that has."""
        result = self._result(node)
        if isinstance(result, (tuple, list)) and not isinstance(result, torch.Size):
            moved = True  # its items are checked
        else:
            moved = isinstance(result, Tensor) and (_moved(node, result) or self._shares_memory(node, result))
        if moved:
            self.moved[node] = result

    def _result(self, node: Node) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), self._operand)
        run: Any = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
        with self._mode:  # in which operators make constants of their own
            return run(*args, **kwargs)

    def _operand(self, node: Node) -> Any:
        if node in self.moved:
            return self.moved[node]
        value = recorded_value(node)
        if value is None:
            return self._of_unrecorded(node)
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            return self._mode.from_tensor(value, static_shapes=True)
        return value

    def _of_unrecorded(self, node: Node) -> Any:
        if node.op != "call_function":
            raise TypeError(f"tracing recorded no value for {node.name}")
        if node not in self._unrecorded:  # added by a lowering
            self._unrecorded[node] = self._result(node)
        return self._unrecorded[node]

    def _shares_memory(self, node: Node, result: Tensor) -> bool:
        old = {_memory(fake_value(each)) for each in self.moved}
        new = {_memory(each) for each in self.moved.values()}
        return _memory(fake_value(node)) in old or _memory(result) in new


def _moved(node: Node, value: Tensor) -> bool:
    recorded = fake_value(node)
    return recorded is None or not same_shape(value.stride(), recorded.stride())  # type: ignore[arg-type]


def _memory(value: Any) -> int | None:
    return memory_of(value) if isinstance(value, Tensor) else None
