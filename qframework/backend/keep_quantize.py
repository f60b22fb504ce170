"""Keeps our own kernel for a quantization per token that Inductor should not fuse with what computes its input.

From::

    int8_linear, or a parameter -> dynamic_quantize          decomposed; Inductor reads long rows twice
    activation of long rows -> dynamic_quantize              and computes the activation twice

To, on a GPU::

    int8_linear, or a parameter -> dynamic_quantize.alone    a row of up to 8,192 values is read once
    activation -> dynamic_quantize.alone                     and the activation is written in between

The result of an opaque operator, or what comes from memory, has nothing to fuse with. A long row of an activation does,
but is not kept between the maximum for its scale and its integers.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from qframework.backend.lowering import Lowering
from qframework.graph.nodes import activation_name, argument, fake_value, operation
from qframework.graph.shapes import traced_size

_ours = torch.ops.qframework

MANY_ROWS, LONG_ROW = 4096, 1024
"""An H100 takes 67 us to quantize GELU of 12,544 rows of 1,024 values with Inductor's kernel, 52 with two kernels; 135
and 70 of 1,280 values; 173 and 124 of 16,384 rows of 2,048; 310 and 253 of 8,192 rows of 8,192. With few rows the
second launch takes longer than that saves."""

_VIEWS = {"view", "reshape", "flatten", "unflatten", "transpose", "permute", "contiguous", "clone", "to"}
_NORMS = {"layer_norm", "rms_norm", "group_norm", "instance_norm"}


def keep_dynamic_quantize(lowering: Lowering) -> None:
    """Replace every such ``dynamic_quantize`` by its ``alone`` overload, which is not decomposed."""
    for node in lowering.gm.graph.nodes:
        if node.target is _ours.dynamic_quantize.default and is_per_token(node) and _not_fused(node.args[0]):
            node.target = _ours.dynamic_quantize.alone


def is_per_token(node: Node) -> bool:
    """Whether a ``dynamic_quantize`` node has a scale for each token."""
    return argument(node, 1, "granularity") == "per_token"


def is_written_by_int8_linear(x: Node) -> bool:
    """Whether an INT8 layer computes ``x``, so that no kernel of Inductor can quantize it."""
    return x.target is _ours.int8_linear.default


def is_long_activation(x: Node) -> bool:
    """Whether ``x`` has many long rows, and is an activation, viewed in any way, of something else than a norm."""
    fake, node = fake_value(x), _behind_views(x)
    if fake is None or fake.ndim == 0 or activation_name(node) is None:
        return False
    operand = argument(node, 0, "input")
    of_norm = not isinstance(operand, Node) or operation(_behind_views(operand)) in _NORMS
    return not of_norm and has_many_rows(fake.shape) and traced_size(fake.shape[-1]) >= LONG_ROW


def has_many_rows(shape: torch.Size) -> bool:
    """Whether a tensor is known to have so many rows that kernels, not launches, decide."""
    return math.prod(map(traced_size, shape[:-1])) >= MANY_ROWS  # unknown sizes count as 0


def _not_fused(x: object) -> bool:
    fake = fake_value(x) if isinstance(x, Node) else None
    if not isinstance(x, Node) or fake is None or fake.device.type != "cuda":
        return False
    return x.op in ("placeholder", "get_attr") or is_written_by_int8_linear(x) or is_long_activation(x)


def _behind_views(node: Node) -> Node:
    while operation(node) in _VIEWS and isinstance(node.args[0], Node):
        node = node.args[0]
    return node
