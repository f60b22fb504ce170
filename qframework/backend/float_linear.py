"""Quantize the linear layers of a float model while it is compiled: ``options={"linear": "int8_dynamic"}``.

From::

    x ───────────┐
    w (float) ───┴> linear (+ bias) -> [activation] -> [+ residual] -> ...

To::

    x -> qframework::dynamic_quantize (per token) ─┐
    w_int8, w_scale (buffers of the graph) ────────┴> qframework::int8_linear -> ...

The weight is quantized once, per channel. Each call compares it with what was quantized and repeats the work when the
weight has changed, so that a compiled model follows ``load_state_dict``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework import numerics
from qframework.backend.lower_linear import (
    Quantized,
    ScaleConstants,
    attach_buffer,
    find_epilogue,
    insert_int8_linear,
    reason_against_width,
)
from qframework.backend.report import LayerReport
from qframework.graph.nodes import Constants, LinearCall, fake_value, layer_name, linear_call, writes_in_place
from qframework.numerics import FLOAT_DTYPES


class QuantizedWeight:
    """The int8 copy of a float weight and the state of the float weight it was made from."""

    def __init__(self, index: int | None, weight: Tensor) -> None:
        self.index = index
        self._seen = _state(weight)
        self.value, self.scale = numerics.quantize_weight(weight.detach())

    def refresh(self, weight: Tensor) -> None:
        """Quantize again, into the same memory, if ``weight`` is not what was quantized before."""
        state = _state(weight)
        if state != self._seen:
            value, scale = numerics.quantize_weight(weight.detach())
            self.value.copy_(value)
            self.scale.copy_(scale)
            self._seen = state


def _state(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


class FloatWeights:
    """All int8 copies of one graph; ``follow`` wraps its compiled function so that they stay up to date."""

    def __init__(self) -> None:
        self._weights: dict[Node, tuple[QuantizedWeight, Node, Node]] = {}

    def nodes(self, gm: GraphModule, node: Node, weight: Tensor, constants: Constants) -> tuple[Node, Node]:
        """The graph's nodes of a weight's int8 value and scale; a weight shared by layers is quantized once."""
        if node not in self._weights:
            quantized = QuantizedWeight(constants.input_index(node), weight)
            first, n = next(iter(gm.graph.nodes)), len(self._weights)
            value = attach_buffer(gm, f"_qframework_weight_{n}", quantized.value, first)
            scale = attach_buffer(gm, f"_qframework_weight_scale_{n}", quantized.scale, first)
            self._weights[node] = (quantized, value, scale)
        return self._weights[node][1:]

    def follow(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """``compiled`` with a look at every float weight before each call."""
        watched = [(w.index, w) for w, _, _ in self._weights.values() if w.index is not None]
        if not watched:
            return compiled

        def run(*args: Any) -> Any:
            for index, weight in watched:
                weight.refresh(args[index])
            return compiled(*args)

        return run


def lower_float_linear(
    gm: GraphModule, constants: Constants, scales: ScaleConstants, weights: FloatWeights
) -> list[LayerReport]:
    """Replace every linear layer whose weight is a float parameter, in place; report on every linear layer."""
    reports = []
    shared: dict[Node, Quantized] = {}
    for node in list(gm.graph.nodes):
        call = linear_call(node)
        if call is None:
            continue
        name = layer_name(node)
        weight = constants.value(call.weight)
        if reason := _reason_against(call, weight):
            reports.append(LayerReport(name, False, "float linear", reason, fallback=True))
            continue
        assert weight is not None
        b = Quantized(*weights.nodes(gm, call.weight, weight, constants))
        a = _insert_dynamic_quantize(gm, node, call, shared)
        epilogue = find_epilogue(node)
        insert_int8_linear(gm, call, a, b, epilogue, scales)
        reports.append(LayerReport(name, True, f"{epilogue.describe()} after dynamic_quantize", ""))
    return reports


def _reason_against(call: LinearCall, weight: Tensor | None) -> str | None:
    if weight is None:
        return "its weight is computed in the graph or passed in, not a parameter of a module"
    if weight.dtype not in FLOAT_DTYPES:
        return f"its weight has dtype {weight.dtype}; accepted: float32, float16, bfloat16"
    if reason := reason_against_width(call):
        return reason
    x = fake_value(call.input)
    if x is not None and (x.dtype not in FLOAT_DTYPES or x.ndim == 0):
        return f"its input has dtype {x.dtype} and shape {tuple(x.shape)}; accepted: float32, float16, bfloat16"
    return None


def _insert_dynamic_quantize(gm: GraphModule, node: Node, call: LinearCall, shared: dict[Node, Quantized]) -> Quantized:
    """``dynamic_quantize`` of the layer's input, shared by layers that read the same tensor (q, k and v)."""
    if call.input in shared and not _written_between(shared[call.input].value, node):
        return shared[call.input]
    with gm.graph.inserting_before(node):
        target = torch.ops.qframework.dynamic_quantize.default
        quantized = gm.graph.call_function(target, (call.input, "per_token"))
        value = gm.graph.call_function(operator.getitem, (quantized, 0))
        scale = gm.graph.call_function(operator.getitem, (quantized, 1))
    if (fake := fake_value(call.input)) is not None:
        value.meta["example_value"], scale.meta["example_value"] = target(fake, "per_token")
    shared[call.input] = Quantized(value, scale)
    return shared[call.input]


def _written_between(first: Node, last: Node) -> bool:
    """Whether an operation between two nodes changes a tensor in place, which may be another name of the input."""
    node = first.next
    while node is not last:
        if writes_in_place(node):
            return True
        node = node.next
    return False
