"""An attention that was found in a captured graph: its operands, and the exceptions that say why something is none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from qframework.graph.nodes import CASTS, COPIES, VIEWS, argument, fake_value, operation
from qframework.numerics import FLOAT_DTYPES

_FLOATS = {*FLOAT_DTYPES, torch.float64}


# A logit this low gets no weight beside any other, so that filling with it and adding it are equivalent.
NO_WEIGHT = -1e4


class NotAttention(Exception):
    """A softmax that is not between the two products of attention."""


class Refused(Exception):
    """Attention that the operator cannot compute; the message is the reason."""


class Unrecognized(Refused):
    """Products around a softmax that may be attention, with unknown operations behind the softmax."""


@dataclass(frozen=True)
class Summand:
    """``factor * value`` added to the logits when they have the shape ``shape``.

    With ``fill``, ``value`` is a bool mask, and ``fill`` is added where it is True, or where it is False if ``seen``.
    """

    value: Node
    shape: torch.Size
    factor: float = 1.0
    fill: float | None = None
    seen: bool = False


@dataclass
class AttentionCall:
    """One attention: its operands, and ``end``, the node that computes its output.

    ``shape`` is that of ``query @ key.T``; the value's leading dimensions may be a view of it (``value_shape``).
    """

    end: Node
    query: Node
    key: Node
    value: Node
    shape: torch.Size
    value_shape: torch.Size
    key_is_transposed: bool = False
    summands: list[Summand] = field(default_factory=list)
    row_factors: list[tuple[Node, bool]] = field(
        default_factory=list
    )  # tensors that scale rows, and whether they divide
    scale: float | None = None
    is_causal: bool = False
    enable_gqa: bool = False
    between: list[Node] = field(default_factory=list)  # the nodes that are replaced, from the first product to ``end``
    sinks: Node | None = None  # logits of shape (..., Nq, 1) that take weight from the keys
    first: Node | None = None  # the first node that reads an operand, ``end`` where None
    softcap: float | None = None  # scaled logits s become softcap * tanh(s / softcap) before summands are added
    scaling: list[Node] = field(default_factory=list)  # the nodes before ``between`` that only scale query or key


def shape_of(node: Any) -> torch.Size:
    """The shape that tracing recorded. Raises NotAttention for anything but a tensor."""
    fake = fake_value(node) if isinstance(node, Node) else None
    if fake is None:
        raise NotAttention
    return fake.shape


def product_operands(node: Node) -> tuple[Node, Node] | None:
    """``a`` and ``b`` of ``a @ b``."""
    if operation(node) not in ("matmul", "bmm"):
        return None
    a, b = argument(node, 0, "input", "self"), argument(node, 1, "other", "mat2")
    return (a, b) if isinstance(a, Node) and isinstance(b, Node) else None


def keeps_numbers(node: Node) -> bool:
    """Whether a node gives the numbers of its input in another float dtype, copy or shape."""
    fake = fake_value(node)
    return operation(node) in CASTS | COPIES | VIEWS and fake is not None and fake.dtype in _FLOATS
