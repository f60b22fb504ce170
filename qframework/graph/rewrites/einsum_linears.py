"""Turns an ``einsum`` of an activation and a parameter into a linear, as XLNet writes its projections.

From::

    einsum("ibh,hnd->ibnd", x, weight)
    einsum("ibnd,hnd->ibh", x, weight)

To::

    x -> linear(weight.reshape(h, n * d).t()) -> unflatten (n, d)
    x -> flatten (n, d) -> linear(weight.reshape(h, n * d))

That is so where no subscript of the result is both the activation's and the parameter's, and the parameter's dimensions
that are summed come before or behind all others, so that no copy of it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from qframework.graph.attributes import attribute, replace_attribute
from qframework.graph.nodes import add_call, fake_value, operation
from qframework.graph.shapes import same

aten = torch.ops.aten

ValueOf = Callable[[Node], Tensor | None]
"""The tensor behind a node that reads a parameter or buffer, None for any other node."""


class EinsumLinear(NamedTuple):
    """``x``, permuted and its last ``summed`` dimensions flattened, times a parameter as a matrix.

    ``outputs`` are the sizes of the parameter's other dimensions, into which the result's last one is split before it
    is permuted by ``result``.
    """

    x: Node
    weight: Node
    permuted: list[int]
    summed: int
    matrix: tuple[int, int]
    is_transposed: bool  # the matrix has shape (inputs, outputs)
    outputs: list[int]
    result: list[int]


def einsum_linear(node: Node, value_of: ValueOf) -> EinsumLinear | None:
    """The linear that an ``einsum`` is, None for any other node."""
    equation, *operands = node.args if operation(node) == "einsum" else (None,)
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if node.kwargs or len(operands) != 2 or not isinstance(equation, str) or fake_value(node) is None:
        return None
    inputs, arrow, out = "".join(equation.split()).partition("->")
    if not arrow or inputs.count(",") != 1 or not (inputs.replace(",", "") + out).isalpha():
        return None
    pairs = list(zip(operands, inputs.split(","), strict=True))
    found = (_linear(*x, *weight, out, value_of) for x, weight in (pairs, reversed(pairs)))
    return next(filter(None, found), None)


def _linear(x: object, a: str, weight: object, b: str, out: str, value_of: ValueOf) -> EinsumLinear | None:
    if not isinstance(x, Node) or not isinstance(weight, Node):
        return None
    value, fake = value_of(weight), fake_value(x)
    if not isinstance(value, nn.Parameter) or not value.is_floating_point() or fake is None:
        return None
    rows = [letter for letter in a if letter not in b]
    summed = [letter for letter in b if letter in a]
    columns = [letter for letter in b if letter not in a]
    each_once = all(len(set(letters)) == len(letters) for letters in (a, b, out))
    if not (summed and columns and each_once and set(out) == {*rows, *columns}):
        return None
    if fake.ndim != len(a) or value.ndim != len(b):
        return None
    size = dict(zip(b, value.shape, strict=True))
    if not all(same(fake.shape[a.index(letter)], size[letter]) for letter in summed):  # einsum itself broadcasts
        return None
    is_transposed = list(b) == summed + columns
    if not is_transposed and list(b) != columns + summed:
        return None
    first = len(summed if is_transposed else columns)
    return EinsumLinear(
        x, weight,
        permuted=[a.index(letter) for letter in rows + summed], summed=len(summed),
        matrix=(value.shape[:first].numel(), value.shape[first:].numel()), is_transposed=is_transposed,
        outputs=[size[letter] for letter in columns], result=[(rows + columns).index(letter) for letter in out],
    )  # fmt: skip


def expand_einsum_linears(gm: GraphModule, value_of: ValueOf) -> None:
    """Replace, in place, every ``einsum`` that is a linear."""

    def written(node: Node, linear: EinsumLinear, x: Node) -> Node:
        weight = add_call(node, aten.reshape.default, (linear.weight, list(linear.matrix)))
        if linear.is_transposed:
            weight = add_call(node, torch.t, (weight,))
        return add_call(node, F.linear, (x, weight))

    _expand(gm, value_of, written)


def expand_exported_einsum_linears(gm: GraphModule) -> None:
    """The same in an exported graph, where the matrix becomes the parameter itself."""

    def value_of(node: Node) -> Tensor | None:
        return attribute(gm, node) if node.op == "get_attr" else None

    def written(node: Node, linear: EinsumLinear, x: Node) -> Node:
        def matrix(value: Tensor) -> Tensor:
            value = value.reshape(linear.matrix)
            return value.t().contiguous() if linear.is_transposed else value

        fake = fake_value(linear.weight)
        weight = replace_attribute(gm, linear.weight, node, matrix(attribute(gm, linear.weight).detach()))
        weight.meta["val"] = None if fake is None else matrix(fake)
        return add_call(node, aten.linear.default, (x, weight))

    _expand(gm, value_of, written)
    gm.recompile()


def _expand(gm: GraphModule, value_of: ValueOf, written: Callable[[Node, EinsumLinear, Node], Node]) -> None:
    for node, linear in _einsums(gm, value_of):
        x, wanted = linear.x, fake_value(node)
        assert wanted is not None
        with gm.graph.inserting_before(node):
            if linear.permuted != sorted(linear.permuted):
                x = add_call(node, aten.permute.default, (x, linear.permuted))
            if linear.summed > 1:
                x = add_call(node, aten.flatten.using_ints, (x, -linear.summed, -1))
            result = written(node, linear, x)
            if len(linear.outputs) > 1:
                result = add_call(node, aten.unflatten.int, (result, -1, linear.outputs))
            if linear.result != sorted(linear.result):
                result = add_call(node, aten.permute.default, (result, linear.result))
        node.replace_all_uses_with(result)
        gm.graph.erase_node(node)


def _einsums(gm: GraphModule, value_of: ValueOf) -> Iterator[tuple[Node, EinsumLinear]]:
    for node in list(gm.graph.nodes):
        if (linear := einsum_linear(node, value_of)) is None:
            continue
        fakes = [fake_value(each) for each in (linear.x, linear.weight, node)]
        if None not in fakes and len({fake.dtype for fake in fakes if fake is not None}) == 1:  # not under autocast
            yield node, linear
