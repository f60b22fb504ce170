"""Quantizes the linear layers of a float model when it is compiled: ``options={"linear": "int8_dynamic"}``.

From::

    x ───────────┐
    w (float) ───┴> linear (+ bias) -> [activation] -> [+ residual] -> ...

To::

    x -> qframework::dynamic_quantize (per token) ───┐
    w -> qframework::dynamic_quantize (per channel) ─┴> qframework::int8_linear -> ...

Each call of the compiled model reads the float weight, so that it sees every write: by an optimizer, through ``.data``,
inside ``forward``, or as a new parameter. With ``"freeze_weights": True`` each weight is quantized when the model is
compiled, and writes to it have no effect until the model is compiled again.

Quantizing a weight at each call takes as long as its float product with some rows. On CPUs without INT8 instructions,
where INT8 products are 1.4 times as fast, layers of fewer rows than ``FEWEST_ROWS`` stay in float. The number of rows
is that of the inputs that the graph was captured with. On CPUs where no INT8 product is faster than the float one, all
layers stay in float. On Hopper, so do layers of many rows and few outputs whose input a kernel of its own would
quantize (keep_quantize.py), which takes longer than INT8 saves, layers over tokens, whose rows are columns in memory,
and layers for which INT8 takes longer by estimate (linear_gain.py). On every chip, so do layers of many rows that are
too small for INT8 (small_linears.py).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework import numerics
from qframework.backend.align_rows import TURNED
from qframework.backend.keep_quantize import has_many_rows, is_computed_twice, is_written_by_int8_linear
from qframework.backend.linear_gain import reads_columns, reason_of_estimate
from qframework.backend.lowering import Lowering, ScaleConstants
from qframework.backend.quantized_linear import (
    NO_PARAMETER,
    Quantized,
    find_epilogue,
    insert_int8_linear,
    reason_against_operands,
)
from qframework.backend.report import LayerReport
from qframework.compat.dynamo import guard_identity, record_value
from qframework.graph.nodes import (
    Constants,
    LinearCall,
    argument,
    fake_value,
    layer_name,
    linear_call,
    operation,
    why_not_plain,
)
from qframework.graph.routers import WHY, chooses
from qframework.graph.shapes import traced_size
from qframework.graph.small_linears import why_too_small
from qframework.graph.weight_rows import rows_of
from qframework.graph.writes import written_between
from qframework.kernels.linear.cpu import HAVE_INT8_INSTRUCTIONS, cpu_implementation
from qframework.kernels.runtime.chip import capability_of
from qframework.numerics import FLOAT_DTYPES

_dynamic_quantize = torch.ops.qframework.dynamic_quantize.default

FEWEST_ROWS = 128
"""Measured with AVX2: if each call quantizes the weight, layers of 192 to 3,072 channels have 0.13 to 0.42 of FP32's
speed with 1 to 4 rows, 0.74 to 0.82 with 34, 0.86 to 1.08 with 64 and 1.04 to 1.18 with 128."""

TRANSPOSED = 3
"""A weight that is stored transposed, as in GPT-2, takes 1.7 to 3.9 times as long to quantize and needs as many times
the rows: GPT-2 has 0.81 and 0.83 of FP32's speed with 256 rows, 1.09 with 512 and 1.16 with 1,024."""

NO_FAST_PRODUCT = "this CPU has no INT8 product that is faster than its float product; `qframework doctor` says why"

FEWEST_OUTPUTS = 700
"""A quantization moves 3 bytes an input; INT8 saves half of the product's time, some 1e-15 s an input and output."""


def lower_float_linear(lowering: Lowering) -> None:
    """Replace every linear layer whose weight is a float parameter, and report anew on those left in float."""
    if lowering.options.linear != "int8_dynamic":
        return
    gm, constants, scales = lowering.gm, lowering.constants, lowering.scales
    anew = {layer_name(node) for node in gm.graph.nodes if linear_call(node) is not None}
    reports = [each for each in lowering.reports if each.lowered or each.kind != "linear" or each.name not in anew]
    inputs = SharedQuantize(gm)
    weights = _FrozenWeights(gm, constants, scales) if lowering.options.freeze_weights else None
    for node in list(gm.graph.nodes):
        call = linear_call(node)
        if call is None:
            continue
        name = layer_name(node)
        if (why := why_float(lowering, node)) is not None:
            reports.append(LayerReport(name, False, "float linear", why.reason, fallback=why.fallback))
            continue
        frozen = weights.quantized(call.weight) if weights else None
        b = frozen or _flat_scale(gm, inputs.before(node, call.weight), node)
        a = inputs.before(node, call.input)
        epilogue = find_epilogue(node)
        lowering.layers[insert_int8_linear(gm, call, a, b, epilogue, scales)] = name
        when = "once" if frozen else "at each call"
        operator_text = f"{epilogue.describe()} after dynamic_quantize, weight quantized {when}"
        reports.append(LayerReport(name, True, operator_text, ""))
    lowering.reports = reports


class WhyFloat(NamedTuple):
    """Why a linear layer stays in float, and whether that is not what the options ask for."""

    reason: str
    fallback: bool


def why_float(lowering: Lowering, linear: Node) -> WhyFloat | None:
    """Why the options or the layer prevent that a float layer is quantized when it is compiled; None if it will be."""
    call, options = linear_call(linear), lowering.options
    assert call is not None
    if options.linear != "int8_dynamic":
        return WhyFloat("the options leave float layers in float", False)
    x, (parameter, read) = fake_value(call.input), _parameter(call.weight)
    value = lowering.constants.value(parameter)
    if reason := _reason_against(linear, call, None if value is None else read(value)) or _reason_of_product(x):
        return WhyFloat(reason, True)
    if not options.freeze_weights and (reason := _reason_of_rows(call)):
        return WhyFloat(reason, False)
    if chooses(linear):
        return WhyFloat(WHY, False)
    reason = why_too_small(call.input, call.weight, True) or _reason_of_quantization(call, fake_value(linear))
    reason = reason or reason_of_estimate(linear, options.freeze_weights)
    return WhyFloat(reason, False) if reason else None


def _parameter(weight: Node) -> tuple[Node, Callable[[Tensor], Tensor]]:
    """What a weight is read from, and how: the parameter itself, its transpose (expand_products.py), some of its rows
    or the parameter as a matrix (einsum_linears.py).
    """
    name = operation(weight)
    if name in ("t", "reshape"):
        parameter, read = _parameter(argument(weight, 0, "input", "self"))
        if name == "t":
            return parameter, lambda value: read(value).t()
        shape: Any = weight.args[1:] or (weight.kwargs["shape"],)  # a method takes sizes one by one as well
        return parameter, lambda value: read(value).reshape(*shape)
    rows = rows_of(weight)
    return (weight, lambda value: value) if rows is None else (rows.source, lambda value: value[rows.start : rows.stop])


def _reason_against(node: Node, call: LinearCall, weight: Tensor | None) -> str | None:
    if weight is None:
        return NO_PARAMETER
    if weight.ndim != 2:
        return f"its weight must have shape (output features, input features), got {tuple(weight.shape)}"
    for role, operand in (("weight", call.weight), ("input", call.input), ("output", node)):
        if reason := _not_computable(fake_value(operand)):
            return f"its {role} {reason}"
    return reason_against_operands(call)


def _reason_of_product(x: Tensor | None) -> str | None:
    """Why INT8 would be slower than float on a CPU without a fast product; None where there is one."""
    on_a_cpu = x is not None and x.device.type == "cpu"
    return NO_FAST_PRODUCT if on_a_cpu and cpu_implementation() == "float32" else None


def _reason_of_rows(call: LinearCall) -> str | None:
    """Why INT8 with a weight that is quantized at each call would be slower than float; None if it is not."""
    x = fake_value(call.input)
    if x is None or x.device.type != "cpu" or cpu_implementation() in HAVE_INT8_INSTRUCTIONS:
        return None
    rows = math.prod(map(traced_size, x.shape[:-1]))
    fewest = FEWEST_ROWS * (TRANSPOSED if operation(call.weight) == "t" else 1)
    if not 0 < rows < fewest:  # unknown sizes count as 0
        return None
    return (
        f"its input has {rows} rows, and on this CPU quantizing the weight at each call pays from {fewest} rows "
        "on. Pass options={'freeze_weights': True} to quantize it once"
    )


def _reason_of_quantization(call: LinearCall, out: Tensor | None) -> str | None:
    """Why quantizing the input would take longer than INT8 saves; None if it does not."""
    x = fake_value(call.input)
    if x is None or out is None or capability_of(x.device) != (9, 0):
        return None
    if math.prod(map(traced_size, x.shape)) >= TURNED and reads_columns(call.input):
        return (
            "its rows are columns of a tensor in memory, whose scales a kernel would read value by value. Static INT8 "
            "has one scale, and transposes integers"
        )
    outputs = traced_size(out.shape[-1])
    if not has_many_rows(x.shape) or not 0 < outputs < FEWEST_OUTPUTS or len(call.input.users) > 1:
        return None
    if is_written_by_int8_linear(call.input):
        writer = "another INT8 layer writes its input"
    elif is_computed_twice(call.input):
        writer = f"its input has long rows of {traced_size(x.shape[-1])} values"
    else:
        return None
    pays = f"that pays from {FEWEST_OUTPUTS} outputs on, and this layer has {outputs}"
    return f"{writer}, which a kernel of its own would quantize; {pays}. Static INT8 has no such cost"


def _not_computable(fake: Tensor | None) -> str | None:
    """Why the operators do not support a tensor; None if they do, or if it is unknown."""
    if (reason := why_not_plain(fake)) is not None or fake is None:
        return reason
    if fake.dtype not in FLOAT_DTYPES:
        return f"must be float32, float16 or bfloat16, got {fake.dtype}"
    return "must have at least one dimension, got a scalar" if fake.ndim == 0 else None


class SharedQuantize:
    """``dynamic_quantize`` nodes, shared by layers that read the same tensor: q, k and v, or tied weights."""

    def __init__(self, gm: GraphModule) -> None:
        self._gm = gm
        self._shared: dict[Node, Quantized] = {}

    def before(self, linear: Node, x: Node) -> Quantized:
        """``x`` as ``linear`` reads it, quantized with one scale for each row."""
        known = self._shared.get(x)
        if known is None or written_between(known.value, linear, [x]) is not None:
            known = self._shared[x] = self._insert(linear, x)
        return known

    def _insert(self, linear: Node, x: Node) -> Quantized:
        with self._gm.graph.inserting_before(linear):
            quantized = self._gm.graph.call_function(_dynamic_quantize, (x, "per_token"))
            value = self._gm.graph.call_function(operator.getitem, (quantized, 0))
            scale = self._gm.graph.call_function(operator.getitem, (quantized, 1))
        if (fake := fake_value(x)) is not None:
            fakes = _dynamic_quantize(fake, "per_token")
            for new, recorded in zip((quantized, value, scale), (fakes, *fakes), strict=True):
                record_value(new, recorded)
        return Quantized(value, scale)


def _flat_scale(gm: GraphModule, weight: Quantized, linear: Node) -> Quantized:
    """Reshape a weight's scales for the operator: ``(N, 1)`` to ``(N,)``."""
    with gm.graph.inserting_before(linear):
        flat = gm.graph.call_function(torch.ops.aten.squeeze.dim, (weight.scale, -1))
    assert isinstance(weight.scale, Node)
    if (fake := fake_value(weight.scale)) is not None:
        record_value(flat, fake.squeeze(-1))
    return Quantized(weight.value, flat)


class _FrozenWeights:
    """Weights quantized when the model is compiled, as buffers of the graph; shared weights are quantized once.

    Dynamo would run the same code for another model of the same class, with its parameters as inputs. So a guard makes
    it recompile for any other parameter.
    """

    def __init__(self, gm: GraphModule, constants: Constants, scales: ScaleConstants) -> None:
        self._gm, self._constants, self._scales = gm, constants, scales
        self._frozen: dict[Node, Quantized] = {}

    def quantized(self, weight: Node) -> Quantized | None:
        """The buffers of a weight; None if the graph itself writes it, so that it cannot be frozen."""
        if weight not in self._frozen:
            first, last = next(iter(self._gm.graph.nodes)), self._gm.graph.output_node()
            parameter, read = _parameter(weight)
            value = self._constants.value(parameter)
            if value is None or written_between(first, last, [weight]) is not None:
                return None
            guard_identity(parameter)
            q, scale = numerics.quantize_weight(read(value.detach()))
            self._frozen[weight] = Quantized(self._scales.buffer(q.contiguous()), self._scales.buffer(scale))
        return self._frozen[weight]
