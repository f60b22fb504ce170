"""Lowers the linear layers of a converted PT2E graph.

From::

    x_int8 -> dequantize ─┐
    w_int8 -> dequantize ─┴> linear (+ bias) -> [activation] -> [+ residual] -> [quantize] -> ...

To::

    x_int8, w_int8, bias, [residual] ─> qframework::int8_linear -> ...

The operator's epilogue takes in the steps in brackets if nothing else reads the values in between. If the epilogue ends
in a quantize, the operator writes int8, which the next layer reads.
"""

from __future__ import annotations

from torch.fx import Node

from qframework.backend.lowering import Lowering
from qframework.backend.quantized_linear import (
    NO_PARAMETER,
    CannotLower,
    Quantized,
    find_epilogue,
    insert_int8_linear,
    quantized_operands,
)
from qframework.backend.report import LayerReport
from qframework.graph.nodes import LinearCall, layer_name, linear_call, notes_of, plain_name
from qframework.graph.routers import WHY, chooses
from qframework.graph.small_linears import why_too_small
from qframework.graph.writes import written_between


def lower_linear(lowering: Lowering) -> None:
    """Replace every linear layer whose operands are dequantized; report on every linear layer."""
    reports = lowering.reports
    quantized_elsewhere = any("quantize" in str(node.target) for node in lowering.gm.graph.nodes)
    for node in list(lowering.gm.graph.nodes):
        call = linear_call(node)
        if call is None:
            continue
        name = layer_name(node)
        try:
            a, b = quantized_operands(call, lowering.constants, name)
            _require_unchanged(node, call)
        except CannotLower as refusal:
            reports.append(LayerReport(name, False, "float linear", str(refusal), fallback=True))
            continue
        if a is None or b is None:
            computed = quantized_elsewhere and a is b and lowering.constants.value(call.weight) is None
            why_float = NO_PARAMETER if computed else why_too_small(call.input, call.weight, False)
            rule = WHY if chooses(node) else why_float
            reason = notes_of(node) or rule or _reason_for_float(a, b, quantized_elsewhere)
            reports.append(LayerReport(name, False, "float linear", reason, fallback=a is not b))
            continue
        epilogue = find_epilogue(node)
        new = insert_int8_linear(lowering.gm, call, a, b, epilogue, lowering.scales)
        lowering.converted.add(new)
        lowering.layers[new] = name
        reports.append(LayerReport(name, True, epilogue.describe(), notes_of(node)))


def _reason_for_float(a: Quantized | None, b: Quantized | None, quantized_elsewhere: bool) -> str:
    """Why a layer is not quantized, and what would change that."""
    if a is None and b is None and quantized_elsewhere:
        return "not quantized: a rule, skip=, filter_fn or a recipe left it in float. Change that to quantize it"
    if a is None and b is None:
        remedy = (
            "Compile it with options={'linear': 'int8_dynamic'}, or pass it to quantize_, or to qframework.quantize "
            "with a skip= that does not name the layer"
        )
        return f"not quantized: the model is a float model. {remedy}"
    if a is None:
        return (
            "only its weight is quantized, not its input. Perhaps calibration saw only zeros in the input: calibrate "
            "with data that reaches the layer"
        )
    return "only its input is quantized, not its weight. Quantize both, as QFrameworkQuantizer does"


def _require_unchanged(linear: Node, call: LinearCall) -> None:
    """Refuse a linear if one of its operands is written between its dequantization and the product."""
    for operand in (call.input, call.weight):
        if "dequantize" in str(operand.target):
            writer = written_between(operand.next, linear, [operand, *operand.all_input_nodes])
            if writer is not None:
                raise CannotLower(f"{plain_name(writer)} changes one of its operands in place before the product")
