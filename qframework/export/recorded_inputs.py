"""The inputs that an exported model was traced with: shapes and dtypes of examples, and the axes that vary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.export import Dim
from torch.fx import GraphModule, Node

from qframework.compat import pytree
from qframework.compat.dynamo import recorded_value, value_key
from qframework.compat.graphs import input_structure
from qframework.errors import UnsupportedError
from qframework.graph.shapes import traced_size


def recorded_inputs(gm: GraphModule) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Positional and keyword inputs of zeros, and ``dynamic_shapes``, for ``torch.export.export``.

    Raises:
        UnsupportedError: the graph does not record its inputs.
    """
    structure = input_structure(gm)
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    if structure is None or structure.in_spec is None or not all(map(_is_recorded, nodes)):
        raise UnsupportedError(
            "example_inputs must be given: the model does not record the shapes and dtypes of its inputs"
        )
    values = [recorded_value(node) for node in nodes]
    args, kwargs = pytree.tree_unflatten([_example(value) for value in values], structure.in_spec)
    args_axes, kwargs_axes = pytree.tree_unflatten([_axes(value) for value in values], structure.in_spec)
    shapes = kwargs_axes if kwargs and not args else (*args_axes, *kwargs_axes.values())
    return tuple(args), kwargs, shapes


def _is_recorded(node: Node) -> bool:
    """Whether the value of an input is known: a tensor with its axes, or a constant, which may be None."""
    return value_key(node) in node.meta and not isinstance(recorded_value(node), torch.SymInt)


def _example(value: Any) -> Any:
    """An input like a recorded one. Numbers, strings and None are constants of the graph, which takes no others."""
    if not isinstance(value, Tensor):
        return value
    return torch.zeros([traced_size(size) for size in value.shape], dtype=value.dtype, device=value.device)


def _axes(value: Any) -> dict[int, Any] | None:
    if not isinstance(value, Tensor):
        return None
    return {axis: Dim.DYNAMIC for axis, size in enumerate(value.shape) if not isinstance(size, int)} or None
