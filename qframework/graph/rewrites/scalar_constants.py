"""Numbers that a model keeps as tensors without dimensions: ``torch.tensor(0.0)`` inside a forward pass.

``write_out_scalars``: those that export kept become ``full``. From::

    get_attr -> lift_fresh_copy -> ...

To::

    full([], 0.0) -> lift_fresh_copy -> ...

Export reads its constants by ``lift_fresh_copy``, so that nothing writes them; it reads a model's own buffers directly.
As a tensor a number is unknown to index_values.py, so that a mask built of it is not recognized as causal. It also
stays on the CPU, and ``prepare_pt2e`` refuses a model whose tensors are on two devices.

``use_numbers``: arithmetic reads the number. From::

    tensor(64.0) -> mul(3) -> sqrt -> to(float16) -> truediv(x, ...) -> ...

To::

    truediv(x, 13.859375) -> ...

Each of these tensors is a kernel on the CPU otherwise, and where x is on a GPU, keeps a block from being compiled once.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qframework.compat.dynamo import recorded_value
from qframework.graph.nodes import operation
from qframework.graph.writes import is_written

aten = torch.ops.aten
_LIFT = aten.lift_fresh_copy.default
# Operations whose result is a number if their operands are.
_OF_NUMBERS = {
    "tensor",
    "full",
    "scalar_tensor",
    "lift_fresh_copy",
    "clone",
    "detach",
    "to",
    "add",
    "sub",
    "mul",
    "div",
}
_OF_NUMBERS |= {"neg", "reciprocal", "sqrt", "rsqrt", "pow", "exp", "log", "float", "half", "bfloat16"}
_OPERATORS: set[Any] = {operator.add, operator.sub, operator.mul, operator.truediv}
_ARITHMETIC = _OPERATORS | {torch.add, torch.sub, torch.mul, torch.div}
_ARITHMETIC |= {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}


def write_out_scalars(gm: GraphModule) -> None:
    """Replace every constant tensor without dimensions of an exported graph."""
    for node in list(gm.graph.find_nodes(op="get_attr")):
        if not node.users or any(user.target is not _LIFT for user in node.users):
            continue
        owner, _, name = str(node.target).rpartition(".")
        module = gm.get_submodule(owner)
        value = getattr(module, name)
        if not isinstance(value, Tensor) or value.ndim > 0:
            continue
        with gm.graph.inserting_before(node):
            options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
            number = gm.graph.call_function(torch.ops.aten.full.default, ([], value.item()), options)
        number.meta = dict(node.meta)
        node.replace_all_uses_with(number)
        gm.graph.erase_node(node)
        if not any(other.target == node.target for other in gm.graph.find_nodes(op="get_attr")):
            delattr(module, name)


def use_numbers(gm: GraphModule) -> None:
    """Let arithmetic of floating-point tensors read numbers instead of tensors without dimensions on the CPU."""
    numbers: dict[Node, Tensor] = {}
    for node in list(gm.graph.nodes):
        if (value := _number(node, numbers)) is not None:
            numbers[node] = value
        elif node.op == "call_function" and node.target in _ARITHMETIC and _has_dimensions(node):
            first = node.args[:1] if node.target not in _OPERATORS else ()  # functions take no number there
            rest = node.args[len(first) :]
            node.args = (*first, *map_arg(rest, lambda x: numbers[x].item() if _is_float(numbers.get(x)) else x))
    for node in reversed(numbers):
        if not node.users:
            gm.graph.erase_node(node)


def _number(node: Node, numbers: dict[Node, Tensor]) -> Tensor | None:
    """The value of a node, computed, if it is a tensor without dimensions on the CPU that depends on numbers alone."""
    fake = recorded_value(node)
    if not isinstance(fake, Tensor) or fake.ndim or fake.device.type != "cpu" or operation(node) not in _OF_NUMBERS:
        return None
    if any(x not in numbers for x in node.all_input_nodes) or is_written(node):
        return None
    args, kwargs = map_arg((node.args, node.kwargs), numbers.__getitem__)
    function: Any = getattr(Tensor, str(node.target)) if node.op == "call_method" else node.target
    value = function(*args, **kwargs)
    return value if isinstance(value, Tensor) and value.dtype == fake.dtype else None


def _has_dimensions(node: Node) -> bool:
    """Whether the result is as a tensor with dimensions says, which is floating point as numbers are."""
    fakes = [recorded_value(x) for x in node.all_input_nodes]
    found = recorded_value(node)
    return isinstance(found, Tensor) and any(
        isinstance(x, Tensor) and x.ndim > 0 and x.is_floating_point() and x.dtype == found.dtype for x in fakes
    )


def _is_float(value: Tensor | None) -> bool:
    return value is not None and value.is_floating_point()
