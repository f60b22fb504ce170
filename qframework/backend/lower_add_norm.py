"""Makes a sum and the norm that reads it, or a quantization behind the norm, one operator: pre-norm blocks in float.

From, on a GPU, for many rows, where no gradient is needed::

    x, y -> h = x + y ─┬> layer_norm or rms_norm -> [quantize, or dynamic_quantize per token] -> linears
                       └> the next sum

To::

    x, y -> qframework::add_norm ─┬> n -> linears        or add_norm_quantize, add_norm_dynamic_quantize
                                  └> h -> the next sum

``y`` is the result of a matrix product, which no kernel of Inductor computes; ``x`` is in memory as well, since the
product depends on it. Where Inductor computes a summand, or what reads the norm, its kernel does more than ours would.
Measured on an H100 (``other/2026-11-27-h100-add-norm.json``): 1.0 to 1.4 times as fast as Inductor's
kernel in float, 1.0 to 1.7 with static and 1.0 to 2.1 with dynamic quantization, most at row lengths that are no powers
of two.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from qframework.backend.lower_norm import (
    behind_views,
    channels,
    comes_from_memory,
    is_possible,
    is_written,
    keeps_dtype,
    norm_arguments,
    norm_before,
    replace_norms,
)
from qframework.backend.lowering import Lowering
from qframework.compat.dynamo import recorded_value
from qframework.graph.nodes import RESHAPES, add_call, argument, fake_value, needs_gradient, operation
from qframework.graph.norms import NormCall, norm_call
from qframework.graph.shapes import same_shape

_ours = torch.ops.qframework

FLOAT_ROWS = range(1025, 8193)
"""Row lengths at which the operator replaces a sum and its norm in float."""
INT8_ROWS = range(768, 8193)
"""Row lengths at which it replaces a sum, its norm and the quantization of that."""

_OPERATORS = (_ours.add_norm.default, _ours.add_norm_quantize.default, _ours.add_norm_dynamic_quantize.default)
_PRODUCTS = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm"}


class _Match(NamedTuple):
    """A norm and the operator that is to compute it; ``extra`` follows the norm's arguments."""

    norm: NormCall
    operator: Any
    extra: tuple[Node, ...]
    rows: range


def lower_add_norm(lowering: Lowering) -> None:
    """Replace every such sum and norm."""
    replace_norms(lowering, _replace)


def _replace(gm: GraphModule, node: Node) -> set[Node]:
    """Replace a quantization or norm with all before it down to the sum; returns what it replaces."""
    match = _match(node)
    if match is None:
        return set()
    norm, total = match.norm, match.norm.input
    pays = channels(norm) in match.rows and is_possible(norm)
    summands = _summands(total) if pays else None
    if summands is None or not _are_in_memory(*summands) or not _is_stored_anyway(node, total):
        return set()
    parameters = [*norm.input_nodes[1:], *match.extra]
    if any(total < each for each in parameters) or is_written(norm, node, *match.extra):  # by an in-place sum, say
        return set()
    if needs_gradient(map(fake_value, [*summands, *parameters])):
        return set()
    return _insert(gm, node, match, summands)


def _match(node: Node) -> _Match | None:
    norm = norm_before(node)
    if norm is not None and node.target is _ours.quantize.default:
        return _Match(norm, _ours.add_norm_quantize.default, (node.args[1],), INT8_ROWS)  # type: ignore[arg-type]
    if norm is not None and all(user.target is operator.getitem for user in node.users):
        return _Match(norm, _ours.add_norm_dynamic_quantize.default, (), INT8_ROWS)
    norm = norm_call(node)
    if norm is not None and keeps_dtype(norm, node) and all(map(_is_kernel, _readers(node))):
        return _Match(norm, _ours.add_norm.default, (), FLOAT_ROWS)
    return None


def _readers(node: Node) -> list[Node]:
    """What reads a node, or a view of it that copies nothing."""
    found: list[Node] = []
    for user in node.users:
        found += _readers(user) if operation(user) in RESHAPES else [user]
    return found


def _is_kernel(reader: Node) -> bool:
    """Whether no kernel of Inductor reads the operand of ``reader``, which could compute a norm as well."""
    return operation(reader) in _PRODUCTS or reader.op == "output"


def _summands(total: Node) -> tuple[Node, Node] | None:
    """Both operands of a sum of contiguous tensors that are alike; None for any other node."""
    if operation(total) != "add" or argument(total, 2, "alpha", default=1) != 1:
        return None
    x, y = argument(total, 0, "input"), argument(total, 1, "other")
    if not isinstance(x, Node) or not isinstance(y, Node):
        return None
    h, *values = map(fake_value, (total, x, y))
    for value in values:
        if h is None or value is None or (value.dtype, value.device) != (h.dtype, h.device):
            return None
        if not same_shape(value.shape, h.shape) or not value.is_contiguous():
            return None
    return x, y


def _are_in_memory(x: Node, y: Node) -> bool:
    """Whether Inductor's kernel would read both: a product's result, and what was in memory before or is its origin."""
    for one, other in ((x, y), (y, x)):
        source = behind_views(other)
        if _is_stored(one) and (_is_stored(source) or _depends(one, source)):
            return True
    return False


def _is_stored(x: Node) -> bool:
    return comes_from_memory(x) or operation(behind_views(x)) in _PRODUCTS


def _depends(node: Node, source: Node) -> bool:
    """Whether ``node`` is computed from ``source``."""
    waiting, seen = [node], {node}
    while waiting:
        for each in waiting.pop().all_input_nodes:
            if each is source:
                return True
            if each not in seen and source < each:
                seen.add(each)
                waiting.append(each)
    return False


def _is_stored_anyway(node: Node, total: Node) -> bool:
    """Whether sums or products read the sum besides the norm.

    A sum that only the norm reads need not be written; a second norm would be computed in Inductor's kernel too.
    """
    own = _with_what_only_it_reads(node)
    others = [reader for reader in _readers(total) if reader not in own]
    return bool(others) and all(_is_sum(reader) or _is_kernel(reader) for reader in others)


def _is_sum(reader: Node) -> bool:
    return operation(reader) == "add" or reader.target in _OPERATORS


def _with_what_only_it_reads(node: Node) -> set[Node]:
    own, waiting = {node}, [node]
    while waiting:
        for each in waiting.pop().all_input_nodes:
            if each not in own and own.issuperset(each.users):
                own.add(each)
                waiting.append(each)
    return own


def _insert(gm: GraphModule, node: Node, match: _Match, summands: tuple[Node, Node]) -> set[Node]:
    """Put the operator where the sum was, and let its results be read instead."""
    total = match.norm.input
    arguments = (*summands, *norm_arguments(match.norm)[1:], *match.extra)
    with gm.graph.inserting_before(total):
        new = add_call(total, match.operator, arguments)
        results = [add_call(total, operator.getitem, (new, place)) for place in range(len(recorded_value(new)))]
    total.replace_all_uses_with(results[0])
    if len(results) == 2:
        node.replace_all_uses_with(results[1])
        return {node, total}
    items = list(node.users)
    for item in items:
        place: Any = item.args[1]
        item.replace_all_uses_with(results[1 + place])
    return {*items, node, total}
