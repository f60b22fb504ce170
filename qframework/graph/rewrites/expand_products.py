"""Turns products with a parameter into linears, and names those that are none.

From::

    addmm(bias, x, weight)      the layer Conv1D of transformers' GPT-2 and its relatives
    x @ weight                  the last projections of CLIP
    x @ weight.T

To::

    linear(x, weight.t(), bias)
    linear(x, weight.t())
    linear(x, weight)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from qframework.compat.dynamo import record_value, recorded_value
from qframework.graph.attributes import attribute, replace_attribute
from qframework.graph.nodes import argument, fake_value, operation, untransposed

aten = torch.ops.aten

ValueOf = Callable[[Node], Tensor | None]
"""The tensor behind a node that reads a parameter or buffer, None for any other node."""

_PRODUCTS = {"addmm": 2, "baddbmm": 2, "matmul": 1, "mm": 1, "bmm": 1}  # and the index of the right operand

_TAKEN = (
    "it multiplies the tokens of each expert by a matrix of its own, which is taken for each token, and there is no "
    "INT8 kernel for that. transformers' model.set_experts_implementation('grouped_mm') sorts tokens by expert instead"
)
_GROUPED = (
    "it multiplies the tokens of each expert by a matrix of its own. Pass options={'experts': 'int8_dynamic', "
    "'freeze_weights': True} to quantize it"
)


class _Product(NamedTuple):
    """``x`` times a parameter, plus a bias; ``is_transposed``: the parameter's shape is (outputs, inputs)."""

    x: Node
    weight: Node
    bias: Node | None
    is_transposed: bool


def expand_products(gm: GraphModule, value_of: ValueOf) -> int:
    """Replace the products that are linears, in place; returns their number."""
    found = 0
    for node, (x, weight, bias, is_transposed) in _products(gm, value_of):
        found += 1
        with gm.graph.inserting_before(node):
            linear_weight = weight
            if not is_transposed:
                linear_weight = gm.graph.call_function(torch.t, (weight,))
                record_value(linear_weight, recorded_value(weight).t())
            linear = gm.graph.call_function(F.linear, (x, linear_weight, bias))
        _replace(node, linear)
    return found


def expand_exported_products(gm: GraphModule) -> int:
    """The same in an exported graph, where the parameter itself becomes its transpose; returns the number."""

    def value_of(node: Node) -> Tensor | None:
        return attribute(gm, node) if node.op == "get_attr" else None

    found = 0
    for node, (x, weight, bias, is_transposed) in _products(gm, value_of):
        found += 1
        if not is_transposed:
            value, fake = attribute(gm, weight).detach().t().contiguous(), fake_value(weight)
            weight = replace_attribute(gm, weight, node, value)
            weight.meta["val"] = None if fake is None else fake.t().contiguous()
        with gm.graph.inserting_before(node):
            linear = gm.graph.call_function(aten.linear.default, (x, weight, bias))
        _replace(node, linear)
    if found:
        gm.recompile()
    return found


def _products(gm: GraphModule, value_of: ValueOf) -> Iterator[tuple[Node, _Product]]:
    """The products of a graph in which each is replaced before the next is read, as that may multiply its result."""
    for node in list(gm.graph.nodes):
        if (product := _product(node, value_of)) is not None:
            yield node, product


def why_no_linear(node: Node, value_of: ValueOf) -> str | None:
    """Why a product with a parameter on the right is no linear; None for a linear and for any other node."""
    if is_grouped(node):
        read = [_parameter(each, value_of) for each in node.all_input_nodes]
        return _GROUPED if any(weight is not None for weight in read) else None
    if _takes_matrices(node, value_of):
        return _TAKEN
    name = operation(node)
    if name == "einsum":
        operands = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], (list, tuple)) else node.args[1:]
        right = operands[-1] if operands else None
    else:
        right = _right_operand(node)
    if not isinstance(right, Node) or (weight := _parameter(right, value_of)) is None:
        return None
    if _product(node, value_of) is not None:
        return None
    if name == "einsum":
        return _why_no_einsum(str(node.args[0]))
    if weight.ndim != 2:
        return f"its weight must be a matrix that all rows share, got shape {tuple(weight.shape)}"
    return "addmm must have a bias of one value a column, and alpha and beta of 1. Write it as F.linear to quantize it"


def is_grouped(node: Node) -> bool:
    """Whether a node multiplies the tokens of each expert by the expert's matrix: PyTorch's operator or a library's."""
    target = node.target
    return node.op == "call_function" and "grouped_mm" in f"{getattr(target, '__name__', '')} {target}"


def _takes_matrices(node: Node, value_of: ValueOf) -> bool:
    """Whether a node multiplies by matrices that are taken from a parameter of several, as ``weights[experts]``."""
    if operation(node) not in ("bmm", "matmul", "baddbmm"):
        return False
    for operand in node.all_input_nodes:
        taken = untransposed(operand) or operand
        source, *index = taken.args or (None,)
        by_tensor = operation(taken) in ("index", "index_select") or (
            operation(taken) == "getitem" and any(isinstance(each, Node) for each in index)
        )
        if by_tensor and isinstance(source, Node):
            weight = _parameter(source, value_of)
            if weight is not None and weight.ndim > 2:
                return True
    return False


def _why_no_einsum(equation: str) -> str:
    inputs, _, output = equation.replace(" ", "").partition("->")
    left, _, right = inputs.partition(",")
    shared = "".join(label for label in right if label.isalpha() and label in left and label in output)
    if shared:
        return f"einsum({equation!r}) is no linear layer: it multiplies by another matrix for each index {shared!r}"
    return f"einsum({equation!r}) of a parameter is not rewritten. Write it as F.linear to quantize it"


def _product(node: Node, value_of: ValueOf) -> _Product | None:
    """A product with a matrix, plus, from ``addmm``, a bias of one value for each column."""
    name, right = operation(node), _right_operand(node)
    if name not in ("addmm", "matmul", "mm") or not isinstance(right, Node):
        return None
    if name == "addmm":
        return _conv1d(node, value_of)
    x, weight = argument(node, 0, "input"), _parameter(right, value_of)
    if weight is None or weight.ndim != 2 or not isinstance(x, Node) or fake_value(x) is None:
        return None
    source = untransposed(right)
    return _Product(x, source or right, None, source is not None)


def _conv1d(node: Node, value_of: ValueOf) -> _Product | None:
    if len(node.args) != 3 or set(node.kwargs) - {"alpha", "beta"}:
        return None
    if any(factor != 1 for factor in node.kwargs.values()) or not all(isinstance(x, Node) for x in node.args):
        return None
    bias, x, weight = (each for each in node.args if isinstance(each, Node))
    shapes = [None if fake is None else fake.shape for fake in map(fake_value, (bias, weight))]
    if shapes[0] is None or shapes[1] is None or fake_value(x) is None or value_of(weight) is None:
        return None
    return _Product(x, weight, bias, False) if len(shapes[0]) == 1 and shapes[0][0] == shapes[1][1] else None


def _right_operand(node: Node) -> object:
    index = _PRODUCTS.get(operation(node) or "")
    return None if index is None else argument(node, index, "other", "mat2", "batch2")


def _parameter(node: Node, value_of: ValueOf) -> Tensor | None:
    """The parameter that a node reads or transposes. Not a buffer: that may be a transform, such as a filter bank."""
    value = value_of(untransposed(node) or node)
    return value if isinstance(value, nn.Parameter) and value.ndim >= 2 and value.is_floating_point() else None


def _replace(node: Node, linear: Node) -> None:
    linear.meta = dict(node.meta)
    inputs = node.all_input_nodes
    node.replace_all_uses_with(linear)
    node.graph.erase_node(node)
    for each in inputs:
        if not each.users and each.op.startswith("call"):  # the transpose of a weight
            each.graph.erase_node(each)
