"""Computes linears that read the same input as one product: query, key and value projections.

From::

    x_int8 -> int8_linear (w_q) -> ...
    x_int8 -> int8_linear (w_k) -> ...
    x_int8 -> int8_linear (w_v) -> ...

To::

    x_int8 -> int8_linear (w_q, w_k, w_v in one buffer) -> slice -> ...
                                                        -> slice -> ...
                                                        -> slice -> ...

Every output channel has its own scale, so that the results are the same. Linears with an activation or a residual stay
alone, and those whose results may not have other strides.

Weights that were frozen move into the buffer. Those of a model that PT2E converted remain tensors of the model, which
may be written: they are copied where that pays (linear_gain.py), and again after each write. Weights of ``quantize_``'s
modules are not copied: ``torch.compile`` may run the same code for all blocks of a model, each with its own weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from qframework.backend.linear_gain import pays_to_join
from qframework.backend.lowering import Lowering
from qframework.backend.quantized_linear import int8_linear_arguments
from qframework.backend.watched_values import Operand, WatchedValues, is_followed, is_written
from qframework.compat.dispatch import FakeTensor
from qframework.compat.dynamo import record_value, recorded_value
from qframework.graph.nodes import fake_value
from qframework.graph.strides import follow_strides
from qframework.graph.writes import written_between
from qframework.kernels.linear.arguments import is_per_channel

_int8_linear = torch.ops.qframework.int8_linear.default
_slice = torch.ops.aten.slice.Tensor
_ALIGNMENT = 16  # bytes, of the slices of a copy: what kernels load at once


def merge_linears(lowering: Lowering) -> None:
    """Merge linears with the same input; ``lowering.checks`` keeps copies of the model's tensors up to date."""
    watched = WatchedValues()
    for nodes in _groups(lowering):
        values = _slices(nodes) if _pays(nodes, lowering) else None
        if values is not None:
            _merge(nodes, values, lowering, watched)
    if watched:
        lowering.checks.append(watched.check)


def _groups(lowering: Lowering) -> list[list[Node]]:
    """Linears that can be one product. Those that need a copy follow one another, without another linear in between.

    A decoder's layers all read the encoder's result. One product of all their keys and values would keep these in
    memory, and a block that reads parts of it is not compiled once for all layers (outline_blocks.py).
    """
    linears = [node for node in lowering.gm.graph.nodes if node.target is _int8_linear and not node.kwargs]
    candidates = [node for node in linears if _can_join(node, lowering)]
    if _is_written(candidates, lowering):
        candidates = [node for node in candidates if not _is_written([node], lowering)]
    runs = [list(run) for _, run in itertools.groupby(linears, lambda node: node.args[0])]
    run_of = {node: number for number, run in enumerate(runs) for node in run}
    groups: dict[Any, list[Node]] = {}
    for node in candidates:
        call = int8_linear_arguments(node)
        run = -1 if _is_frozen(node, lowering) else run_of[node]
        key = call.a, call.a_scale, call.result_dtype, run
        groups.setdefault(key, []).append(node)
    return [nodes for nodes in groups.values() if len(nodes) > 1 and _read_the_same(nodes)]


def _is_frozen(node: Node, lowering: Lowering) -> bool:
    call = int8_linear_arguments(node)
    return lowering.scales.owns(call.b) and lowering.scales.owns(call.b_scale)


def _can_join(node: Node, lowering: Lowering) -> bool:
    """Whether the values of a linear's parameters are known, and the kernel can take its epilogue beside others."""
    call = int8_linear_arguments(node)
    if call.activation != "none" or call.residual is not None or call.out_zero_point is not None:
        return False
    if _is_frozen(node, lowering):
        known = call.bias is None or lowering.constants.value(call.bias) is not None
        return known and call.out_scale is None
    return (
        node in lowering.converted
        and all(is_followed(each, lowering) for each in _parameters(call))
        and (call.out_scale is None or _is_scale_of_channels(call, lowering))
    )


def _parameters(call: Any) -> list[Node]:
    """What each output channel has a part of."""
    return [each for each in (call.b, call.b_scale, call.bias, call.out_scale) if each is not None]


def _is_scale_of_channels(call: Any, lowering: Lowering) -> bool:
    """Whether the scale of a result is one number, or one for each channel, and none for each row."""
    scale = _value(call.out_scale, lowering)
    return scale.numel() == 1 or is_per_channel(scale, len(_value(call.b, lowering)))


def _is_written(nodes: Sequence[Node], lowering: Lowering) -> bool:
    """Whether the graph itself may write what would be copied."""
    return is_written([each for node in nodes for each in _parameters(int8_linear_arguments(node))], lowering)


def _read_the_same(nodes: Sequence[Node]) -> bool:
    """Whether nothing writes their input between the first and the last."""
    return written_between(nodes[0], nodes[-1], nodes[0].args[:2]) is None  # type: ignore[arg-type]


def _pays(nodes: Sequence[Node], lowering: Lowering) -> bool:
    """Whether one product is worth its memory: the weights once more, unless they are moved."""
    if _is_frozen(nodes[0], lowering):
        return True
    calls = [int8_linear_arguments(node) for node in nodes]
    outputs, size = [len(_value(call.b, lowering)) for call in calls], calls[0].result_dtype.itemsize
    x = fake_value(calls[0].a)
    return x is not None and all(n * size % _ALIGNMENT == 0 for n in outputs) and pays_to_join(x, outputs)


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


def _merge(nodes: list[Node], values: list[FakeTensor], lowering: Lowering, watched: WatchedValues) -> None:
    """Replace the linears by one at the place of the first, and its slices."""
    graph, scales, calls = nodes[0].graph, lowering.scales, [int8_linear_arguments(node) for node in nodes]
    joined = _joined_parameters(calls, lowering, watched)
    ends = list(itertools.accumulate(value.shape[-1] for value in values))
    with graph.inserting_before(nodes[0]):
        whole = graph.call_function(_int8_linear, tuple(calls[0]._replace(**joined)))
        parts = [graph.call_function(_slice, (whole, -1, start, end)) for start, end in itertools.pairwise([0, *ends])]
    whole.meta = dict(nodes[0].meta)
    if nodes[0] in lowering.converted:
        lowering.converted.add(whole)
    record_value(whole, values[0].new_empty((*values[0].shape[:-1], ends[-1])))
    for node, part, value in zip(nodes, parts, values, strict=True):
        part.meta = dict(node.meta)
        record_value(part, value)
        node.replace_all_uses_with(part)
        graph.erase_node(node)
    for parameter in dict.fromkeys(each for call in calls for each in _parameters(call)):
        if scales.owns(parameter):
            scales.remove(parameter)


def _joined_parameters(calls: Sequence[Any], lowering: Lowering, watched: WatchedValues) -> dict[str, Node | None]:
    """The buffers of a product that computes the channels of all calls."""
    sizes = [len(_value(call.b, lowering)) for call in calls]

    def join(role: str, compute: Callable[..., Tensor], changes: bool = False) -> Node | None:
        operands = [Operand(getattr(call, role), lowering.constants) for call in calls]
        if all(operand.node is None for operand in operands):
            return None
        with torch.no_grad():
            buffer = lowering.scales.buffer(compute(*(operand.value for operand in operands)))
        if changes or any(operand.index is not None for operand in operands):
            watched.add(lowering.constants.value(buffer), compute, operands)
        return buffer

    def by_channel(*values: Tensor) -> Tensor:
        return torch.cat([x.reshape(-1).expand(size) for x, size in zip(values, sizes, strict=True)])

    def with_zeros(*values: Tensor | None) -> Tensor:
        like = next(x for x in values if x is not None)
        missing = [like.new_zeros(size, dtype=torch.float32) for size in sizes]
        return torch.cat([zeros if x is None else x.float() for x, zeros in zip(values, missing, strict=True)])

    return {
        "b": join("b", lambda *values: torch.cat(values)),
        "b_scale": join("b_scale", by_channel),
        "bias": join("bias", with_zeros, changes=True),  # a buffer where it takes a zero point (zero_point_bias.py)
        "out_scale": join("out_scale", by_channel, changes=True),  # one with scales per head (hoist_quantize.py)
    }


def _value(node: Node, lowering: Lowering) -> Tensor:
    value = lowering.constants.value(node)
    assert value is not None
    return value
