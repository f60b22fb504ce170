"""The inputs that an exported model was traced with: shapes and dtypes of examples, and the axes that vary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.export import Dim
from torch.fx import GraphModule

from qframework.compat import pytree
from qframework.compat.graphs import input_structure
from qframework.errors import UnsupportedError
from qframework.graph.nodes import fake_value
from qframework.graph.shapes import traced_size


def recorded_inputs(gm: GraphModule) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Positional and keyword inputs of zeros, and ``dynamic_shapes``, for ``torch.export.export``.

    Raises:
        UnsupportedError: the graph does not record its inputs.
    """
    structure = input_structure(gm)
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    values = [value for node in nodes if (value := fake_value(node)) is not None]
    if structure is None or structure.in_spec is None or len(values) != len(nodes):
        raise UnsupportedError(
            "example_inputs must be given: the model does not record the shapes and dtypes of its inputs"
        )
    args, kwargs = pytree.tree_unflatten([_example(value) for value in values], structure.in_spec)
    args_axes, kwargs_axes = pytree.tree_unflatten([_axes(value) for value in values], structure.in_spec)
    shapes = kwargs_axes if kwargs and not args else (*args_axes, *kwargs_axes.values())
    return tuple(args), kwargs, shapes


def _example(value: Tensor) -> Tensor:
    return torch.zeros([traced_size(size) for size in value.shape], dtype=value.dtype, device=value.device)


def _axes(value: Tensor) -> dict[int, Any] | None:
    return {axis: Dim.DYNAMIC for axis, size in enumerate(value.shape) if not isinstance(size, int)} or None
