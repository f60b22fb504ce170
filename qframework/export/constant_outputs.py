"""Outputs of a model that are constants of its code: numbers become tensors without dimensions for a file."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from qframework.errors import UnsupportedError

_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


def make_constant_outputs_tensors(gm: GraphModule, what: str) -> None:
    """Return tensors for numbers: bool, int64 or float64. None stays, which is no output of a file.

    Raises:
        UnsupportedError: another output is no tensor, such as a text; the message begins with ``what``.
    """
    output = gm.graph.output_node()
    places = itertools.count()

    def as_tensor(value: Any) -> Any:
        place = next(places)
        if value is None or isinstance(value, Node):
            return value
        if type(value) not in _DTYPES:
            raise UnsupportedError(
                f"{what}: output {place} of model must be a tensor, a number or None, got {value!r:.60} of type "
                f"{type(value).__name__}. Leave it out of what forward returns"
            )
        name = f"constant_output_{place}"
        gm.register_buffer(name, torch.tensor(value, dtype=_DTYPES[type(value)]))
        with gm.graph.inserting_before(output):
            return gm.graph.call_function(torch.ops.aten.clone.default, (gm.graph.get_attr(name),))

    output.args = map_aggregate(output.args, as_tensor)
    gm.recompile()
