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

MANY_ROWS = 4096
"""With few rows, the second launch takes longer than that saves."""

PAYS = {"gelu": (1024, math.inf), "gelu_tanh": (1024, math.inf), "silu": (1024, 4096)}
"""Values in a row above and up to which two kernels are faster, by activation, also of gated ones.

Inductor keeps a row of 1,024 values. Measured on an H100 (``other/2026-11-27-h100-long-rows.json``): of 12,544 rows of
1,280 values, GELU takes 105 us in one kernel and 62 in two, SiLU 80 and 46; of 8,192 rows of 8,192 values 232 and 192,
150 and 174. ReLU and norms are faster in one kernel, or as fast."""

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
    """Whether ``x`` has many rows, and is an activation that is faster computed once, viewed and gated in any way."""
    fake = fake_value(x)
    if fake is None or fake.ndim == 0 or not has_many_rows(fake.shape):
        return False
    row, node = traced_size(fake.shape[-1]), _behind_views(x)
    factors = [y for y in node.args if isinstance(y, Node)] if operation(node) == "mul" else [node]
    return any(least < row <= most for least, most in map(_pays, factors))


def _pays(x: Node) -> tuple[float, float]:
    """The lengths of rows between which ``x`` is faster computed once; none for what a norm's kernel computes."""
    node = _behind_views(x)
    operand = argument(node, 0, "input")
    if not isinstance(operand, Node) or operation(_behind_views(operand)) in _NORMS:
        return math.inf, 0.0
    return PAYS.get(activation_name(node) or "", (math.inf, 0.0))


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
