"""Quantizes the linears of experts when a model is compiled: those that pay by default, or all that can be.

From::

    x (rows sorted by expert) ─────────────────┐
    w (experts, outputs, inputs) -> transpose ─┴> grouped_mm(offs=ends) -> ...

To::

    x -> qframework::dynamic_quantize (per token) ──────────┐
    w, quantized once per expert and output channel ────────┴> qframework::int8_grouped_linear(ends) -> ...

Weights of experts are far more than a call's tokens read of them, so that they are quantized when the model is compiled
or not at all: ``"freeze_weights"`` must be True. Then ``"linear": "int8_dynamic"`` also quantizes experts where that is
faster by estimate (experts_gain.py), and ``"experts": "int8_dynamic"`` wherever it is possible.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from qframework import numerics
from qframework.backend.experts_gain import reason_against_experts
from qframework.backend.float_linear import SharedQuantize
from qframework.backend.lowering import Lowering
from qframework.backend.quantized_linear import Quantized
from qframework.backend.report import LayerReport
from qframework.compat.dynamo import guard_identity
from qframework.graph.nodes import (
    add_call,
    argument,
    fake_value,
    layer_name,
    needs_gradient,
    untransposed,
    why_not_plain,
)
from qframework.graph.rewrites.expand_products import is_grouped, why_no_linear
from qframework.graph.writes import written_between
from qframework.kernels.linear.grouped import MOST_EXPERTS
from qframework.numerics import FLOAT_DTYPES


class _Call(NamedTuple):
    """A product of each expert's rows of ``x`` with its matrix in ``parameter``, ``(E, N, K)`` if transposed."""

    x: Node
    parameter: Node
    is_transposed: bool
    experts: int
    ends: Node
    dtype: torch.dtype  # of the result


def lower_experts(lowering: Lowering) -> None:
    """Replace every product of experts with parameters, and report on those that stay in float."""
    if not lowering.options.experts_in_int8:
        return
    asked = lowering.options.experts == "int8_dynamic"
    inputs = SharedQuantize(lowering.gm)
    weights: dict[tuple[Node, bool], Quantized] = {}
    for node in list(lowering.gm.graph.nodes):
        if not is_grouped(node) or why_no_linear(node, lowering.constants.value) is None:
            continue
        found = _read(node, lowering)
        if not asked and isinstance(found, _Call):
            found = reason_against_experts(node, found.x, found.experts) or found
        if isinstance(found, str):
            lowering.reports.append(LayerReport(layer_name(node), False, "float grouped_mm", found, fallback=asked))
            continue
        key = found.parameter, found.is_transposed
        if key not in weights:
            weights[key] = _frozen(found, lowering)
        _replace(node, found, inputs.before(node, found.x), weights[key])
        operator_text = "qframework::int8_grouped_linear after dynamic_quantize, weights quantized once"
        lowering.reports.append(LayerReport(layer_name(node), True, operator_text, ""))


def _read(node: Node, lowering: Lowering) -> _Call | str:
    """The product, or why it stays in float."""
    x, matrices = argument(node, 0, "input", "self", "mat_a"), argument(node, 1, "weight", "mat2", "mat_b")
    ends, fake, out = argument(node, 2, "offs"), fake_value(x), fake_value(node)
    if not all(isinstance(each, Node) for each in (x, matrices, ends)) or fake is None or out is None:
        return "it must multiply the rows of one matrix, which offsets share among experts"
    source = untransposed(matrices)
    parameter = matrices if source is None else source
    value = lowering.constants.value(parameter)
    if not lowering.options.freeze_weights:
        return (
            "its weights would be quantized at each call. Pass options={'freeze_weights': True} to quantize them once"
        )
    if value is None or value.ndim != 3 or fake.ndim != 2:
        shapes = f"{tuple(fake.shape)} and {None if value is None else tuple(value.shape)}"
        return f"it must have an input (rows, channels) and a parameter of one matrix for each expert, got {shapes}"
    if argument(node, 3, "bias") is not None:
        return "it has a bias, which the operator has not"
    if len(value) > MOST_EXPERTS:
        return f"it must have at most {MOST_EXPERTS} experts, got {len(value)}"
    for role, each in (("input", fake), ("result", out)):
        if reason := why_not_plain(each):
            return f"its {role} {reason}"
        if each.dtype not in FLOAT_DTYPES:
            return f"its {role} must be float32, float16 or bfloat16, got {each.dtype}"
    if needs_gradient([fake, out]):
        return "its gradients are needed. Use torch.no_grad()"
    first, last = next(iter(lowering.gm.graph.nodes)), lowering.gm.graph.output_node()
    if written_between(first, last, [parameter]) is not None:
        return "the graph writes its weights"
    return _Call(x, parameter, source is not None, len(value), ends, out.dtype)


def _frozen(call: _Call, lowering: Lowering) -> Quantized:
    """Weights ``(E, N, K)`` int8 and scales ``(E, N)`` as buffers; a guard compiles again for another parameter."""
    value = lowering.constants.value(call.parameter)
    assert value is not None
    guard_identity(call.parameter)
    rows = value.detach() if call.is_transposed else value.detach().transpose(1, 2)
    q, scale = _quantized(rows)
    return Quantized(lowering.scales.buffer(q), lowering.scales.buffer(scale))


def _quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """One expert at a time, so that only one is in float32 beside its parameter."""
    each: list[Any] = [numerics.quantize_weight(weight) for weight in rows]
    return torch.stack([q for q, _ in each]).contiguous(), torch.stack([scale for _, scale in each])


def _replace(node: Node, call: _Call, x: Quantized, weight: Quantized) -> None:
    with node.graph.inserting_before(node):
        operands = (x.value, x.scale, weight.value, weight.scale, call.ends, call.dtype)
        new = add_call(node, torch.ops.qframework.int8_grouped_linear.default, operands)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
