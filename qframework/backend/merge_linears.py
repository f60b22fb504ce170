"""Computes linears that read the same input as one product: query, key and value projections.

From::

    x_int8 -> int8_linear (w_q) -> ...
    x_int8 -> int8_linear (w_k) -> ...
    x_int8 -> int8_linear (w_v) -> ...

To::

    x_int8 -> int8_linear (w_q, w_k, w_v in one buffer) -> slice -> ...
                                                        -> slice -> ...
                                                        -> slice -> ...

Every output channel has its own scale, so that the results are the same. Only weights that are frozen can lie in one
buffer, and only linears without an epilogue, whose results may have other strides.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from qframework.backend.lowering import Lowering
from qframework.backend.watched_values import Operand, WatchedValues
from qframework.compat.dispatch import FakeTensor
from qframework.compat.dynamo import record_value, recorded_value
from qframework.graph.nodes import fake_value
from qframework.graph.strides import follow_strides
from qframework.graph.writes import written_between
from qframework.kernels.linear.arguments import Int8LinearArguments

_int8_linear = torch.ops.qframework.int8_linear.default
_slice = torch.ops.aten.slice.Tensor


def _call(node: Node) -> Any:
    """The ``Int8LinearArguments`` of a node that the lowering made, with nodes for tensors."""
    args: Any = node.args
    return Int8LinearArguments(*args)


def _is_plain(call: Any) -> bool:
    """Whether a linear has no epilogue."""
    return call.activation == "none" and call.residual is call.out_scale is call.out_zero_point is None


def merge_linears(lowering: Lowering) -> None:
    """Merge plain linears with frozen weights and the same input; ``lowering.checks`` keeps their bias up to date."""
    groups: dict[Any, list[Node]] = {}
    for node in lowering.gm.graph.nodes:
        if node.target is _int8_linear and (key := _key(node, lowering)) is not None:
            groups.setdefault(key, []).append(node)
    biases = WatchedValues()
    for nodes in groups.values():
        if len(nodes) > 1 and (values := _slices(nodes)) is not None:
            _merge(nodes, values, lowering, biases)
    if biases:
        lowering.checks.append(biases.check)


def _key(node: Node, lowering: Lowering) -> Any:
    """Equal for linears that can be one product; None for one that must stay alone."""
    if node.kwargs or not all(map(lowering.scales.owns, node.args[2:4])):  # a user's own call, or weights not frozen
        return None
    call = _call(node)
    if not _is_plain(call):
        return None
    if call.bias is not None:
        nodes = node.graph.nodes
        first, last = next(iter(nodes)), node.graph.output_node()
        if lowering.constants.value(call.bias) is None or written_between(first, last, [call.bias]) is not None:
            return None
    return call.a, call.a_scale, call.out_dtype


def _slices(nodes: Sequence[Node]) -> list[FakeTensor] | None:
    """The values of the linears as slices of one result, recorded for what reads them; None if that needs copies."""
    fakes = [fake_value(node) for node in nodes]
    if not all(isinstance(fake, FakeTensor) for fake in fakes):
        return None
    widths: list[int] = [fake.shape[-1] for fake in fakes]  # type: ignore[union-attr]
    first = fakes[0]
    assert first is not None
    whole = first.new_empty((*first.shape[:-1], sum(widths)))
    before: dict[Node, Any] = {}
    values: list[Any] = []
    for node, part in zip(nodes, whole.split(widths, -1), strict=True):
        moved = follow_strides(node, part)
        if moved is None:
            for each, value in before.items():
                record_value(each, value)
            return None
        for each, value in moved.items():
            before.setdefault(each, recorded_value(each))
            record_value(each, value)
        values.append(part)
    return values


def _merge(nodes: list[Node], values: list[FakeTensor], lowering: Lowering, biases: WatchedValues) -> None:
    """Replace the linears by one at the place of the first, and its slices."""
    graph, scales, calls = nodes[0].graph, lowering.scales, [_call(node) for node in nodes]
    with torch.no_grad():
        b = scales.buffer(torch.cat([_value(call.b, lowering) for call in calls]))
        b_scale = scales.buffer(torch.cat([_value(call.b_scale, lowering) for call in calls]))
    merged = calls[0]._replace(b=b, b_scale=b_scale, bias=_merged_bias(calls, lowering, biases))
    ends = list(itertools.accumulate(value.shape[-1] for value in values))
    with graph.inserting_before(nodes[0]):
        whole = graph.call_function(_int8_linear, tuple(merged))
        parts = [graph.call_function(_slice, (whole, -1, start, end)) for start, end in itertools.pairwise([0, *ends])]
    whole.meta = dict(nodes[0].meta)
    record_value(whole, values[0].new_empty((*values[0].shape[:-1], ends[-1])))
    for node, part, value in zip(nodes, parts, values, strict=True):
        part.meta = dict(node.meta)
        record_value(part, value)
        node.replace_all_uses_with(part)
        graph.erase_node(node)
    for buffer in dict.fromkeys(buffer for call in calls for buffer in (call.b, call.b_scale)):
        scales.remove(buffer)


def _merged_bias(calls: Sequence[Any], lowering: Lowering, biases: WatchedValues) -> Node | None:
    """The buffer that holds all biases, with zeros for those that are missing."""
    operands = [Operand(call.bias, lowering.constants) for call in calls]
    if all(operand.value is None for operand in operands):
        return None
    scales = [_value(call.b_scale, lowering) for call in calls]

    def joined(*values: Tensor | None) -> Tensor:
        return torch.cat([torch.zeros_like(s) if x is None else x.float() for s, x in zip(scales, values, strict=True)])

    with torch.no_grad():
        buffer = lowering.scales.buffer(joined(*(operand.value for operand in operands)))
    biases.add(lowering.constants.value(buffer), joined, operands)
    return buffer


def _value(node: Node, lowering: Lowering) -> Tensor:
    value = lowering.constants.value(node)
    assert value is not None
    return value
