"""Calls of subgraphs (``invoke_subgraph``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from qframework.compat.dispatch import static_layout
from qframework.compat.missing import note_missing


@contextlib.contextmanager
def one_schema_for_equal_calls() -> Iterator[None]:
    """Inside the block, calls of one subgraph on operands of equal layout share the schema that says what it writes.

    PyTorch traces the subgraph for the schema of each call, twice, which took a tenth of the first call of a BERT.
    """
    operator: Any = torch.ops.higher_order.invoke_subgraph
    if not hasattr(operator, "gen_schema"):
        note_missing("gen_schema")
        yield
        return
    generate, known = operator.gen_schema, dict[Any, Any]()

    def gen_schema(subgraph: Any, identifier: Any, *operands: Any) -> Any:
        layouts = tuple(map(_layout, operands))
        if not isinstance(subgraph, GraphModule) or None in layouts:
            return generate(subgraph, identifier, *operands)
        key = subgraph, identifier, layouts
        if key not in known:
            known[key] = generate(subgraph, identifier, *operands)
        return known[key]

    operator.gen_schema = gen_schema
    try:
        yield
    finally:
        vars(operator).pop("gen_schema", None)


def _layout(operand: Any) -> tuple[Any, ...] | None:
    """Equal for operands that a graph treats alike; None if sizes are symbols or it is unknown."""
    if type(operand) is int:
        return int, operand
    layout = static_layout(operand) if isinstance(operand, Tensor) else None
    return None if layout is None else (type(operand), *layout)
