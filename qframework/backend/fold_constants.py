"""Computes once what parameters alone determine, when a converted model or one with frozen weights is compiled.

A bias that each attention reads from a table, or that an MLP computes from coordinates, takes several kernels in each
call; here they become buffers. Only what takes a kernel is worth a buffer, and only small results are: what operators
on elements compute from them in more bytes, Inductor computes where it is read.

In a model that PT2E converted, a buffer is computed again after each write to what it depends on. In a float model with
``freeze_weights``, writes have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Interpreter, Node
from torch.nn import Parameter

from qframework.backend.lowering import Lowering
from qframework.backend.report import LayerReport
from qframework.backend.watched_values import Operand, WatchedValues, is_followed
from qframework.compat.dispatch import AUTOCAST_SCOPES, static_layout
from qframework.compat.dynamo import VALUE_KEYS, guard_identity, reads_buffer
from qframework.compat.operators import OpOverload
from qframework.graph.constant_parts import Constant, constant_nodes
from qframework.graph.nodes import fake_value, layer_name, linear_call, needs_gradient, why_not_plain
from qframework.graph.writes import is_written, written_between

_LARGEST = 8 * 2**20  # bytes of a result, unless the parameters that it is computed from have more
_REASON = "computed once, when the model is compiled: parameters alone determine it"


def fold_constants(lowering: Lowering) -> None:
    """Replace what parameters determine by buffers, which ``lowering.checks`` keeps up to date in converted models.

    Where weights are frozen, another parameter makes Dynamo compile the model again.
    """
    graph = lowering.gm.graph
    # before and after the linears are lowered
    follow = any(map(_is_quantized_operand, graph.nodes)) or bool(lowering.converted)
    if not (follow or lowering.options.freeze_weights) or any(node.target in AUTOCAST_SCOPES for node in graph.nodes):
        return
    constants = constant_nodes(lowering.gm, lambda node: _is_source(lowering, node))
    folding = _Folding(lowering, constants, follow)
    for node in constants:
        if any(user not in constants for user in node.users):
            folding.fold(node)
    if folding.watched:
        lowering.checks.append(folding.watched.check)


def _is_source(lowering: Lowering, node: Node) -> bool:
    """Whether a node reads a parameter or a buffer of a module, and not a cache, whose address is fixed as well."""
    value = lowering.constants.value(node)
    if value is None or value.is_meta or why_not_plain(value) is not None:
        return False
    return node.op == "get_attr" or isinstance(value, Parameter) or reads_buffer(node)


class _Folding:
    """Constants become buffers one by one, the last of each chain first."""

    def __init__(self, lowering: Lowering, constants: Mapping[Node, Constant], follow: bool) -> None:
        self._lowering, self._constants, self._follow = lowering, constants, follow
        self.watched = WatchedValues()

    def fold(self, node: Node) -> None:
        """Replace a node, or else what it is computed from, where that takes a kernel."""
        known = self._constants.get(node)  # None for a buffer that replaced one
        if known is None or not known.kernel or _is_quantized_operand(node):
            return
        buffer = self._buffer(node) if self._is_worth_a_buffer(node) else None
        if buffer is None:
            for each in node.all_input_nodes:
                self.fold(each)
            return
        self._report(node)
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

    def _buffer(self, node: Node) -> Node | None:
        """A buffer of a node's value; None if that may change unseen, needs a gradient or is not what was traced."""
        sources = _sources(node)
        followed = self._follow and all(is_followed(each, self._lowering) for each in sources)
        first, last = next(iter(node.graph.nodes)), node.graph.output_node()
        if not (followed or self._lowering.options.freeze_weights) or is_written(node):
            return None
        own = set(_computed_from(node))
        if any(is_written(each, own) for each in own if each.op.startswith("call")):
            return None
        operands = [Operand(each, self._lowering.constants) for each in sources]
        if needs_gradient(each.value for each in operands) or written_between(first, last, sources) is not None:
            return None
        compute = _computation(node, sources)
        with torch.no_grad():
            value = compute(*(each.value for each in operands))
        fake = fake_value(node)
        if not isinstance(value, Tensor) or fake is None or static_layout(value) != static_layout(fake):
            return None
        buffer = self._lowering.scales.buffer(value.detach().clone())
        if followed:
            self.watched.add(self._lowering.constants.value(buffer), compute, operands)
        else:
            for each in sources:
                guard_identity(each)
        return buffer

    def _report(self, node: Node) -> None:
        for each in _computed_from(node):
            if linear_call(each) is not None and all(user in self._constants for user in each.users):
                self._lowering.reports.append(LayerReport(layer_name(each), False, "float linear", _REASON))


def _computation(node: Node, sources: Sequence[Node]) -> Callable[..., Any]:
    """A function of the sources' values that computes a node as the graph does now."""
    graph, copies = Graph(), dict[Node, Node]()
    for each in (*sources, *_computed_from(node)):
        if each not in copies:
            given = each in sources
            copies[each] = graph.placeholder(each.name) if given else graph.node_copy(each, copies.__getitem__)
            copies[each].meta = {}
    graph.output(copies[node])
    return Interpreter(nn.Module(), graph=graph).run


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
