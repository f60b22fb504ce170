"""Computes what parameters alone determine once, when a model with frozen weights is compiled.

A bias that each attention reads from a table, or that an MLP computes from coordinates, takes several kernels in each
call; here they become buffers. Only what takes a kernel is worth a buffer, and only small results are: what operators
on elements compute from them in more bytes, Inductor computes where it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.nn import Parameter

from qframework.backend.lowering import Lowering
from qframework.backend.report import LayerReport
from qframework.compat.dispatch import AUTOCAST_SCOPES, static_layout
from qframework.compat.dynamo import VALUE_KEYS, guard_identity, reads_buffer
from qframework.compat.operators import OpOverload
from qframework.graph.constant_parts import Constant, constant_nodes
from qframework.graph.nodes import fake_value, layer_name, linear_call, needs_gradient, why_not_plain
from qframework.graph.writes import callable_of, is_written, written_between

_LARGEST = 8 * 2**20  # bytes of a result, unless the parameters that it is computed from have more
_REASON = "computed once, when the model is compiled: parameters alone determine it"


def fold_constants(lowering: Lowering) -> None:
    """Replace what parameters determine by buffers; another parameter makes Dynamo compile the model again."""
    graph = lowering.gm.graph
    if not lowering.options.freeze_weights or any(node.target in AUTOCAST_SCOPES for node in graph.nodes):
        return
    constants = constant_nodes(lowering.gm, lambda node: _is_source(lowering, node))
    folding = _Folding(lowering, constants)
    for node in constants:
        if any(user not in constants for user in node.users):
            folding.fold(node)


def _is_source(lowering: Lowering, node: Node) -> bool:
    """Whether a node reads a parameter or a buffer of a module, and not a cache, whose address is fixed as well."""
    value = lowering.constants.value(node)
    if value is None or value.is_meta or why_not_plain(value) is not None:
        return False
    return node.op == "get_attr" or isinstance(value, Parameter) or reads_buffer(node)


class _Folding:
    """Constants become buffers one by one, the last of each chain first."""

    def __init__(self, lowering: Lowering, constants: Mapping[Node, Constant]) -> None:
        self._lowering, self._constants = lowering, constants
        self._values: dict[Node, Any] = {}

    def fold(self, node: Node) -> None:
        """Replace a node, or else what it is computed from, where that takes a kernel."""
        if not self._constants[node].kernel or _is_quantized_operand(node):
            return
        value = self._value(node) if self._is_worth_a_buffer(node) else None
        if value is None:
            for each in node.all_input_nodes:
                self.fold(each)
            return
        self._report(node)
        buffer = self._lowering.scales.buffer(value)
        buffer.meta.update({key: node.meta[key] for key in VALUE_KEYS if key in node.meta})  # fake, as for its readers
        node.replace_all_uses_with(buffer)
        for each in reversed(_computed_from(node)):
            if each.op.startswith("call") and not each.users:
                node.graph.erase_node(each)

    def _is_worth_a_buffer(self, node: Node) -> bool:
        fake = fake_value(node)
        if fake is None or why_not_plain(fake) is not None:
            return False
        spreads = not self._constants[node].own_kernel and fake.nbytes > _bytes(node.all_input_nodes)
        return not spreads and fake.nbytes <= max(_LARGEST, _bytes(_sources(node)))

    def _value(self, node: Node) -> Tensor | None:
        """The value, in memory of its own; None if it may change, needs a gradient or is not what was traced."""
        chain, sources = _computed_from(node), _sources(node)
        first, last = next(iter(node.graph.nodes)), node.graph.output_node()
        if needs_gradient(map(self._lowering.constants.value, sources)) or is_written(node):
            return None
        if written_between(first, last, sources) is not None:
            return None
        with torch.no_grad():
            for each in chain:
                if each not in self._values:
                    self._values[each] = self._run(each)
        value, fake = self._values[node], fake_value(node)
        if not isinstance(value, Tensor) or fake is None or static_layout(value) != static_layout(fake):
            return None
        for each in sources:
            guard_identity(each)
        return value.detach().clone()

    def _run(self, node: Node) -> Any:
        if node.op in ("placeholder", "get_attr"):
            return self._lowering.constants.value(node)
        args, kwargs = map_arg((node.args, node.kwargs), self._values.__getitem__)
        return callable_of(node)(*args, **kwargs)

    def _report(self, node: Node) -> None:
        for each in _computed_from(node):
            if linear_call(each) is not None and all(user in self._constants for user in each.users):
                self._lowering.reports.append(LayerReport(layer_name(each), False, "float linear", _REASON))


def _is_quantized_operand(node: Node) -> bool:
    """Whether PT2E's conversion wrote the node, which a pass expects before a layer."""
    return isinstance(node.target, OpOverload) and node.target.namespace == "quantized_decomposed"


def _bytes(nodes: Iterable[Node]) -> int:
    return sum(fake.nbytes for fake in map(fake_value, nodes) if fake is not None)


def _sources(node: Node) -> list[Node]:
    """The parameters and buffers that a node is computed from."""
    return [each for each in _computed_from(node) if not each.op.startswith("call")]


def _computed_from(node: Node) -> list[Node]:
    """A node and all that it is computed from, in the order of the graph."""
    found, left = {node}, [node]
    while left:
        new = set(left.pop().all_input_nodes) - found
        found |= new
        left += new
    return [each for each in node.graph.nodes if each in found]
