"""Bias correction (Nagel et al. 2019, section 4.2): outputs keep their mean when they are quantized.

Clipped activations and rounded weights shift the mean of a linear's output. With ``y`` the output of the float model
and ``y'`` that of the quantized one, the bias of each output channel absorbs the difference over calibration data::

    b <- b + E[y] - E[y']

The means are measured over all positions of all batches, layer after layer: ``y'`` is a layer's output after the layers
before it have been quantized and corrected, which the paper calls empirical bias correction. On the same data this
can only reduce the mean squared error of the layer's output, by ``(E[y] - E[y'])^2`` in each channel. It costs nothing
at run time; a linear without a bias gets one, which INT8 linears add in their epilogue. Layers that a recipe left in
float are corrected too: their inputs have mean errors of the layers before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from qframework.errors import CalibrationError
from qframework.graph.attributes import add_attribute, attribute, replace_attribute
from qframework.graph.nodes import linear_call
from qframework.quantizer.annotate_linear import is_linear
from qframework.quantizer.layerwise import LayerwiseRun, quantized_linears, take_batches
from qframework.quantizer.quantizer import is_kept_in_float, layer_name


def correct_bias(prepared: GraphModule, data: Iterable[Any], *, batches: int | None = None) -> None:
    """Correct the biases of a calibrated model's linears, in place, also after ``round_weights``.

    The float model is the prepared one without quantization; attention by a variant is quantized in both.

    Args:
        prepared: from ``prepare_pt2e``, after ``calibrate`` and optionally ``round_weights``.
        data: batches as ``calibrate`` takes them; all of them stay in memory until the end.
        batches: use only this many of them.

    Raises:
        CalibrationError: no data, a batch that does not fit the model's inputs, an activation that was never
            calibrated, or a layer's outputs that hold NaN or infinity.
    """
    inputs = take_batches(prepared, data, batches, "correct_bias")
    expected = LayerwiseRun(prepared, inputs, quantized=False)
    actual = LayerwiseRun(prepared, inputs, quantized=True)
    for node, layer in corrected_linears(prepared).items():
        for run in (expected, actual):
            run.advance(node.next)
        difference = _mean(expected.values(node)) - _mean(actual.values(node))
        if not bool(torch.isfinite(difference).all()):
            raise CalibrationError(f"layer {layer!r}: the outputs must be finite, got NaN or infinity")
        actual.shift(node, _add_to_bias(prepared, node, layer, difference))
    prepared.recompile()


def corrected_linears(prepared: GraphModule) -> dict[Node, str]:
    """The linears that are quantized or that a recipe left in float, in graph order, with the layers' names."""
    quantized = {linear.node: linear.observer.layer for linear in quantized_linears(prepared)}
    left = {node: layer_name(node) for node in prepared.graph.nodes if is_kept_in_float(node) and is_linear(node)}
    return {node: (quantized | left)[node] for node in prepared.graph.nodes if node in quantized or node in left}


def _mean(outputs: Iterable[Tensor]) -> Tensor:
    """Mean of each channel over batches and positions, ``(N,)`` float64."""
    total: Any = 0.0
    count = 0
    for y in outputs:
        rows = y.reshape(-1, y.shape[-1])
        total = total + rows.sum(0, dtype=torch.float64)
        count += len(rows)
    return total / max(count, 1)


def _add_to_bias(prepared: GraphModule, node: Node, layer: str, difference: Tensor) -> Tensor:
    """Returns the change of the bias ``(N,)``, rounded to its dtype."""
    call = linear_call(node)
    assert call is not None
    if call.bias is not None and call.bias.op == "get_attr":
        old = attribute(prepared, call.bias).detach()
        new = (old.double() + difference).to(old.dtype)
        replace_attribute(prepared, call.bias, node, new)
        return new - old
    observed = call.weight.op == "call_module"
    weight = attribute(prepared, call.weight.all_input_nodes[0] if observed else call.weight)
    moved = difference.to(weight.dtype)
    with prepared.graph.inserting_before(node):
        bias = add_attribute(prepared, f"{layer}_bias", nn.Parameter(moved, weight.requires_grad))
        if call.bias is not None:  # computed in the graph
            bias = prepared.graph.call_function(torch.ops.aten.add.Tensor, (call.bias, bias))
    node.args = (call.input, call.weight, bias)
    node.kwargs = {}
    return moved
