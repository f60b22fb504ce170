"""Makes the two linears of a gated MLP one operator, whose kernel multiplies their results before it writes them.

From, on Hopper::

    x_int8 -> int8_linear (w_gate, silu) ─┬> mul -> [quantize] -> ...
    x_int8 -> int8_linear (w_up) ─────────┘
    x_int8 -> int8_linear (w) -> chunk ─┬> silu ─┬> mul -> [quantize] -> ...
                                        └────────┘

To::

    x_int8 -> qframework::int8_gated_linear (w_gate, w_up, silu, [int8 out]) -> ...

Any activation of ``int8_linear`` counts, in either half. Apart, both results are written to memory and read by a kernel
of Inductor's: two linears take 1.2 to 1.9 times as long where the result is INT8, and 1.0 to 1.5 times where it is
quantized per token behind them (``other/2026-11-28-h100-gated-linear.json``). No other chip was measured.
"""

from __future__ import annotations

import math
import operator
import re
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from qframework.backend.lowering import Lowering
from qframework.backend.quantized_linear import int8_linear_arguments, is_int8_linear, static_quantization
from qframework.compat.dynamo import recorded_value
from qframework.graph.nodes import activation_name, add_call, argument, fake_value, operation
from qframework.graph.selections import selection
from qframework.graph.shapes import same, same_shape, traced_size
from qframework.graph.writes import written_between
from qframework.kernels.linear.tiles import gated_tile
from qframework.kernels.runtime.chip import capability_of, chip_of
from qframework.kernels.runtime.gluon import HAS_GLUON

_ours = torch.ops.qframework
aten = torch.ops.aten
_ALIGNMENT = 16  # bytes, of rows that TMA addresses
_DTYPES = (torch.float16, torch.bfloat16)
_ROWS_OF_A_TILE = 128  # fewer were not measured, and TMA takes long for rows past the end (kernels/linear/triton.py)
_ROWS_OF_HALVES = 512  # from which both halves of one linear gain even if their product is then quantized per token


class _Factor(NamedTuple):
    """One operand of a product: all results of a linear, or those of its output channels ``start`` to ``stop``."""

    linear: Node
    start: int
    stop: int
    activation: str
    chain: list[Node]  # from the operand to the linear


class _Gated(NamedTuple):
    """A product of two linears; ``quantize`` alone reads it."""

    product: Node
    gate: _Factor
    up: _Factor
    quantize: Node | None

    @property
    def chain(self) -> set[Node]:
        """The nodes that the operator replaces."""
        return {*self.gate.chain, *self.up.chain, self.product, *([] if self.quantize is None else [self.quantize])}


def gate_linears(lowering: Lowering) -> None:
    """Replace every such product where one kernel is faster."""
    for node in list(lowering.gm.graph.nodes):
        found = _gated(node) if operation(node) == "mul" else None
        if found is not None and _pays(found) and _is_possible(found):
            _replace(found, lowering)


def _gated(product: Node) -> _Gated | None:
    """What a product multiplies, if that is two linears of one input, or halves of one, and nothing else reads them."""
    operands = [each for each in product.args if isinstance(each, Node)]
    factors = [_factor(each) for each in operands]
    if len(factors) != 2 or product.kwargs:
        return None
    up, gate = sorted(factors, key=lambda factor: factor is not None and factor.activation != "none")
    if gate is None or up is None or up.activation != "none" or not _are_alike(gate, up):
        return None
    found = _Gated(product, gate, up, _quantize_behind(product))
    return found if _are_all_results(gate, up) and _is_closed(found) else None


def _factor(operand: Node) -> _Factor | None:
    """The linear behind an operand, through an activation and the selection of a part, both optional."""
    chain, node = [operand], operand
    activation = activation_name(node) or "none"
    if activation != "none":
        (node,) = node.all_input_nodes
        chain.append(node)
    part = _part(node)
    if part is not None:
        chain += part.chain
    linear = chain[-1]
    if not is_int8_linear(linear):
        return None
    call, outputs = int8_linear_arguments(linear), _outputs(linear)
    if call.residual is not None or call.out_scale is not None:
        return None
    start, stop = (0, outputs) if part is None else (part.start, part.stop)
    if call.activation != "none":
        if activation != "none" or part is not None:
            return None
        activation = call.activation
    return _Factor(linear, start, stop, activation, chain)


class _Part(NamedTuple):
    """A part of the last dimension of a node, and the nodes between: the node itself is the last."""

    start: int
    stop: int
    chain: list[Node]


def _part(node: Node) -> _Part | None:
    """What a node selects of the last dimension; None for any other node."""
    split = node.args[0] if node.target is operator.getitem else None
    if isinstance(split, Node) and operation(split) in ("chunk", "split", "split_with_sizes"):
        return _part_of_split(split, node.args[1])
    selected = selection(node)
    size = None if selected is None else _last_dimension(selected.source, selected.dim)
    return None if selected is None or size is None else _Part(*selected.bounds(size), [selected.source])


def _part_of_split(split: Node, index: object) -> _Part | None:
    source, dim = split.args[0], argument(split, 2, "dim", default=0)
    how = argument(split, 1, "split_size_or_sections", "split_size", "split_sizes", "chunks")
    size = _last_dimension(source, dim) if isinstance(source, Node) and isinstance(dim, int) else None
    if size is None or not isinstance(index, int) or not isinstance(how, (int, list, tuple)):
        return None
    parts = (torch.chunk if operation(split) == "chunk" else torch.split)(torch.empty(size, device="meta"), how)  # type: ignore[arg-type]
    start = sum(len(part) for part in parts[:index])
    return _Part(start, start + len(parts[index]), [split, source])  # type: ignore[list-item]


def _last_dimension(node: Node, dim: int) -> int | None:
    """The size of the last dimension, if that is ``dim`` and known."""
    fake = fake_value(node)
    if fake is None or not fake.ndim or dim % fake.ndim != fake.ndim - 1:
        return None
    return fake.shape[-1] if isinstance(fake.shape[-1], int) else None


def _are_alike(gate: _Factor, up: _Factor) -> bool:
    """Whether both linears have one input, and parameters of one kind."""
    left, right = int8_linear_arguments(gate.linear), int8_linear_arguments(up.linear)
    if left.a is not right.a or left.a_scale is not right.a_scale or (left.bias is None) != (right.bias is None):
        return False
    scales = [fake_value(each) for each in (left.b_scale, right.b_scale)]
    return scales[0] is not None and scales[1] is not None and scales[0].shape == scales[1].shape


def _are_all_results(gate: _Factor, up: _Factor) -> bool:
    """Whether the product has all results of two linears, or both halves of one."""
    if gate.linear is not up.linear:
        return all((each.start, each.stop) == (0, _outputs(each.linear)) for each in (gate, up))
    (first, middle), (second, last) = sorted([(gate.start, gate.stop), (up.start, up.stop)])
    return first == 0 and middle == second and last == _outputs(gate.linear)


def _is_closed(found: _Gated) -> bool:
    """Whether nothing but the product, at its end, reads a node that the operator replaces."""
    inside = {*found.gate.chain, *found.up.chain}
    return all(user in inside or user is found.product for node in inside for user in node.users)


def _outputs(linear: Node) -> int:
    fake = fake_value(int8_linear_arguments(linear).b)
    return -1 if fake is None else traced_size(fake.shape[0])


def _quantize_behind(product: Node) -> Node | None:
    """The quantization with one given scale that alone reads the product."""
    (reader,) = product.users if len(product.users) == 1 else (None,)
    found = None if reader is None else static_quantization(reader, product)
    if found is None or not isinstance(found[0], Node):
        return None
    scale = fake_value(found[0])
    return reader if scale is not None and scale.numel() == 1 else None


def _pays(found: _Gated) -> bool:
    """Whether one kernel can compute the product, and is faster: on Hopper, where rows fill its tiles.

    With the quantization behind it, it always is. A result in 16 bit is written and read again: that is no faster than
    two linears whose product the quantization reads, where the linears take long, nor than one linear of few rows.
    """
    call = int8_linear_arguments(found.gate.linear)
    x, weight, result = (fake_value(node) for node in (call.a, call.b, found.product))
    if x is None or weight is None or result is None or not HAS_GLUON or capability_of(x.device) != (9, 0):
        return False
    inputs, size = traced_size(weight.shape[1]), 1 if found.quantize is not None else result.dtype.itemsize
    row = (found.gate.stop - found.gate.start) * size
    if result.dtype not in _DTYPES or not inputs or inputs % _ALIGNMENT or row % _ALIGNMENT:
        return False
    rows = math.prod(map(traced_size, x.shape[:-1]))
    if rows < _ROWS_OF_A_TILE or found.quantize is not None:
        return rows >= _ROWS_OF_A_TILE
    if found.gate.linear is found.up.linear:
        return rows >= _ROWS_OF_HALVES
    tile = gated_tile(rows, row // size, inputs, chip_of(x.device)[1])
    return tile.specialized != "cooperative"


def _is_possible(found: _Gated) -> bool:
    """Whether the product has the shape of both operands, and the graph writes none of what they are computed from."""
    values = [fake_value(node) for node in (*found.product.all_input_nodes, found.product)]
    if not all(x is not None and same_shape(x.shape, values[-1].shape) for x in values):  # type: ignore[union-attr]
        return False
    chain = found.chain
    first = min(chain)
    end = found.product if found.quantize is None else found.quantize
    read = [x for factor in (found.gate, found.up) for x in factor.linear.all_input_nodes]
    if found.quantize is not None:
        read += found.quantize.all_input_nodes[1:]
    return written_between(first, end, read, chain) is None


def _replace(found: _Gated, lowering: Lowering) -> None:
    end = found.product if found.quantize is None else found.quantize
    calls = [int8_linear_arguments(factor.linear) for factor in (found.gate, found.up)]
    requantization: tuple[Any, ...]
    requantization = None, recorded_value(found.product).dtype, None
    if found.quantize is not None:
        requantization = found.quantize.args[1], None, argument(found.quantize, 2, "zero_point")
    with end.graph.inserting_before(end):
        parameters = [
            each for call, factor in zip(calls, (found.gate, found.up), strict=True) for each in _rows(call, factor)
        ]
        arguments = (calls[0].a, calls[0].a_scale, *parameters, found.gate.activation, *requantization)
        new = end.graph.call_function(_ours.int8_gated_linear.default, arguments)
    new.meta = dict(end.meta)
    end.replace_all_uses_with(new)
    _report(found, lowering)
    for node in sorted(found.chain, reverse=True):
        end.graph.erase_node(node)


def _rows(call: Any, factor: _Factor) -> list[Node | None]:
    """Weight, scale and bias of a part of a linear's output channels."""
    if same(factor.stop - factor.start, _outputs(factor.linear)):
        return [call.b, call.b_scale, call.bias]

    def part(node: Node | None) -> Node | None:
        fake = None if node is None else fake_value(node)
        if node is None or fake is None or fake.numel() == 1:
            return node
        return add_call(factor.linear, aten.slice.Tensor, (node, 0, factor.start, factor.stop))

    return [part(call.b), part(call.b_scale), part(call.bias)]


def _report(found: _Gated, lowering: Lowering) -> None:
    """Name the operator in the reports of its layers."""
    parts = [found.gate.activation] * (found.gate.activation != "none") + ["int8 out"] * (found.quantize is not None)
    name = "qframework::int8_gated_linear" + (f" ({', '.join(parts)})" if parts else "")
    layers = {lowering.layers.get(factor.linear) for factor in (found.gate, found.up)}
    for place, report in enumerate(lowering.reports):
        if report.name in layers:
            text = re.sub(r"qframework::int8_linear( \(.*?\))?", name, report.operator)
            lowering.reports[place] = replace(report, operator=text)
