"""Rewrites ``einsum`` of two tensors as ``matmul``, which the search for attention recognises.

From::

    einsum("bnhd,bmhd->bhnm", query, key)

To::

    matmul(query.permute(0, 2, 1, 3), key.permute(0, 2, 3, 1))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from qframework.compat.dynamo import value_key
from qframework.graph.nodes import add_call, fake_value, operation
from qframework.graph.shapes import same

aten = torch.ops.aten


def expand_einsum(gm: GraphModule) -> None:
    """Replace, in place, every ``einsum`` that is one matrix product for each entry of its batch dimensions."""
    for node in list(gm.graph.nodes):
        if operation(node) == "einsum" and (call := _einsum_call(node)) is not None:
            _replace(gm, node, call)


class _Einsum(NamedTuple):
    """Operands and their subscripts; rows, columns and the summed dimension are one letter each."""

    operands: Sequence[Any]  # two nodes
    subscripts: tuple[str, str, str]
    batch: str
    row: str
    column: str
    summed: str


def _einsum_call(node: Node) -> _Einsum | None:
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if node.kwargs or len(operands) != 2 or not isinstance(equation, str) or fake_value(node) is None:
        return None
    inputs, arrow, out = "".join(equation.split()).partition("->")
    if not arrow or inputs.count(",") != 1:
        return None
    a, b = inputs.split(",")
    batch = "".join(letter for letter in out if letter in a and letter in b)
    row, column, summed = (_only(x) for x in (_in(a, out, b), _in(b, out, a), _in(a, b, out)))
    known = set(batch) | {row, column, summed}
    each_once = all(len(set(part)) == len(part) and set(part) <= known and part.isalpha() for part in (a, b, out))
    if not (row and column and summed and each_once) or not _fit(operands, (a, b)):
        return None
    return _Einsum(operands, (a, b, out), batch, row, column, summed)


def _in(one: str, other: str, not_in: str) -> str:
    return "".join(letter for letter in one if letter in other and letter not in not_in)


def _only(letters: str) -> str:
    return letters if len(letters) == 1 else ""


def _fit(operands: Sequence[Any], subscripts: Sequence[str]) -> bool:
    """Whether each letter has one size; einsum itself broadcasts."""
    sizes: dict[str, int | torch.SymInt] = {}
    for operand, letters in zip(operands, subscripts, strict=True):
        fake = fake_value(operand) if isinstance(operand, Node) else None
        if fake is None or fake.ndim != len(letters):
            return False
        if not all(
            same(sizes.setdefault(letter, size), size) for letter, size in zip(letters, fake.shape, strict=True)
        ):
            return False
    return True


def _replace(gm: GraphModule, node: Node, call: _Einsum) -> None:
    new: list[Node] = []

    def add(target: Any, *args: Any) -> Node:
        new.append(add_call(node, target, args))
        return new[-1]

    def permuted(x: Node, now: str, wanted: str) -> Node:
        return x if now == wanted else add(aten.permute.default, x, [now.index(letter) for letter in wanted])

    key = value_key(node)
    (x, y), (a, b, out) = call.operands, call.subscripts
    with gm.graph.inserting_before(node):
        rows = permuted(x, a, call.batch + call.row + call.summed)
        columns = permuted(y, b, call.batch + call.summed + call.column)
        product = add(aten.matmul.default, rows, columns)
        result = permuted(product, call.batch + call.row + call.column, out)
    if new[-1].meta[key].dtype != node.meta[key].dtype:  # under autocast
        for added in reversed(new):
            gm.graph.erase_node(added)
        return
    node.replace_all_uses_with(result)
    gm.graph.erase_node(node)
