"""Rewrites a converted graph to products that QuantizeLinear and DequantizeLinear (QDQ) of ONNX express; else to float.

From::

    x -> quantize -> dequantize ──┐
    w_int8 (N, K) -> dequantize ──┴> linear (+ bias)

To, in float32 whatever the model's dtype, as in the epilogue of INT8 kernels::

    x -> quantize_per_tensor -> dequantize_per_tensor ───────────┐
    w_int8 (K, N) -> dequantize_per_channel along the columns ───┴> matmul -> + bias

Runtimes fuse a product whose two operands are dequantized directly before it; a transposition in between would keep
some of them from that. ONNX Runtime merges a product and a bias ``(N,)`` into Gemm if it knows all sizes or if ``x`` is
a matrix, and has INT8 kernels for Gemm only if the bias is quantized too; so the bias is ``(1, 1, N)``, and a matrix
gets a dimension more. Linears of one input (query, key and value) become one product with all their columns: ONNX
Runtime for x86 converts activations to uint8, but only those that a single product reads, and leaves the others in
float.

An input with a zero point z is shifted by z scale before it is quantized, symmetrically with the same integers as the
result, and the bias takes the shift back: TensorRT knows no zero points.

Scales per token and scales that are computed at run time have no such form: those layers read their float input and
the dequantized weight, which is stored as float.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qframework.backend.quantized_linear import CannotLower, quantized_operands
from qframework.errors import UnsupportedError
from qframework.export.named_buffers import add_buffer
from qframework.graph.nodes import Constants, LinearCall, fake_value, layer_name, linear_call
from qframework.numerics import QMAX, QMIN

_aten = torch.ops.aten
_decomposed = torch.ops.quantized_decomposed
_ours = torch.ops.qframework

_QUANTIZE = {
    _decomposed.quantize_per_tensor.default,
    _decomposed.quantize_per_channel.default,
    _ours.quantize.default,
    _ours.dynamic_quantize.default,
}
_DEQUANTIZE = {
    _decomposed.dequantize_per_tensor.default,
    _decomposed.dequantize_per_channel.default,
    _ours.dequantize.default,
}
_RANGES = {torch.int8: {(-128, 127), (QMIN, QMAX)}, torch.uint8: {(0, 255)}}
DYNAMIC = (
    "its input is quantized with scales that are computed at run time; QDQ with INT8 kernels has fixed scales only"
)
PER_TOKEN = "its input has one scale for each token; INT8 products of QDQ have one scale for the whole input"


@dataclass
class Rewritten:
    """The names of the layers in INT8, how many products compute them, and the layers left in float with the reason."""

    int8: list[str] = field(default_factory=list)
    products: int = 0
    left_in_float: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Layer:
    """A linear with a static input per tensor and an int8 weight ``(N, K)`` with one scale, or one for each row."""

    node: Node
    name: str
    quantize: Node
    x_scale: float
    zero_point: int
    weight: Tensor
    weight_scale: Tensor
    bias: Node | None

    @property
    def x(self) -> Node:
        """The float input: where that is the result of another linear, what has replaced it."""
        x: Any = self.quantize.args[0]
        return x


def write_qdq(gm: GraphModule) -> Rewritten:
    """Rewrite the quantized linears of a converted graph in place, and remove other quantization that QDQ lacks.

    Raises:
        UnsupportedError: a quantized value outside of linears has a range that ONNX cannot express.
    """
    found, constants = Rewritten(), Constants(gm, ())
    groups: dict[Any, list[_Layer]] = {}
    stored: dict[Node, Node] = {}
    before = list(gm.graph.nodes)
    for node in before:
        call = linear_call(node)
        if call is None or not _is_dequantized(call.weight):
            continue
        name = layer_name(node)
        try:
            layer = _static_layer(node, call, name, constants)
        except CannotLower as reason:
            _write_float(gm, node, call, name, constants, stored)
            found.left_in_float[name] = str(reason)
        else:
            quantization = (layer.x, layer.x_scale, layer.zero_point, _dtype_of(node))
            groups.setdefault(quantization, []).append(layer)
            found.int8.append(name)
    for layers in groups.values():
        _write_product(gm, layers, constants)
    found.products = len(groups)
    gm.graph.eliminate_dead_code()
    _remove_what_qdq_lacks(gm, set(before))
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return found


def float_before(dequantize: Node) -> Node | None:
    """The float tensor whose quantized values a node dequantizes; None for weights and all other nodes."""
    if not _is_dequantized(dequantize):
        return None
    quantize: Any = dequantize.args[0]
    if quantize.target is operator.getitem:
        quantize = quantize.args[0]
    return quantize.args[0] if quantize.target in _QUANTIZE else None


# Reading a linear -----------------------------------------------------------------------------------------------------


def _static_layer(node: Node, call: LinearCall, name: str, constants: Constants) -> _Layer:
    """The operands of a linear that QDQ expresses. Raises CannotLower for others."""
    a, b = quantized_operands(call, constants, name)
    if a is None or b is None:
        raise CannotLower("its weight is quantized and its input is not")
    if a.value.target is operator.getitem:
        raise CannotLower(DYNAMIC)
    weight, bias = constants.value(b.value), constants.value(call.bias)
    x_scale, weight_scale = _constant(a.scale, constants), _constant(b.scale, constants)
    zero_point = _constant(a.zero_point, constants)
    if a.value.target not in _QUANTIZE or x_scale is None or zero_point is None:
        raise CannotLower("its input must be quantized with a constant scale right before it")
    if x_scale.numel() != 1:
        raise CannotLower(PER_TOKEN)
    if weight is None or weight.dtype != torch.int8 or weight_scale is None or (call.bias and bias is None):
        raise CannotLower("its int8 weight, the weight's scales and its bias must be constants")
    scales = (float(x_scale), int(zero_point))
    return _Layer(node, name, a.value, *scales, weight.detach(), weight_scale.detach().reshape(-1), call.bias)


def _constant(value: float | Node, constants: Constants) -> Tensor | None:
    return constants.value(value) if isinstance(value, Node) else torch.tensor(value)


# Writing --------------------------------------------------------------------------------------------------------------


def _write_product(gm: GraphModule, layers: list[_Layer], constants: Constants) -> None:
    """Replace linears of one quantized input by one product of dequantized operands, and split its columns."""
    first, graph = layers[0], gm.graph
    dtype, sizes = _dtype_of(first.node), [layer.weight.shape[0] for layer in layers]
    with graph.inserting_before(first.node):
        new = graph.call_function(_aten.matmul.default, (_input(gm, first), _weight(gm, layers)))
        if first.zero_point or any(layer.bias is not None for layer in layers):
            bias = add_buffer(gm, _common_name(layers), "bias", _joined_bias(layers, constants).reshape(1, 1, -1))
            new = graph.call_function(_aten.add.Tensor, (new, bias))
        if _is_matrix(first.x):
            new = graph.call_function(_aten.squeeze.dim, (new, 0))
        if dtype != torch.float32:
            new = graph.call_function(_aten.to.dtype, (new, dtype))
        parts = [new]
        if len(layers) > 1:
            split = graph.call_function(_aten.split_with_sizes.default, (new, sizes, -1))
            parts = [graph.call_function(operator.getitem, (split, place)) for place in range(len(layers))]
    for layer, part in zip(layers, parts, strict=True):
        part.meta = {key: layer.node.meta[key] for key in ("val", "nn_module_stack") if key in layer.node.meta}
        layer.node.replace_all_uses_with(part)
        graph.erase_node(layer.node)


def _input(gm: GraphModule, layer: _Layer) -> Node:
    x, call = layer.x, gm.graph.call_function
    floats = x if _dtype_of(x) == torch.float32 else call(_aten.to.dtype, (x, torch.float32))
    if _is_matrix(x):
        floats = call(_aten.unsqueeze.default, (floats, 0))
    if layer.zero_point:
        floats = call(_aten.add.Tensor, (floats, layer.zero_point * layer.x_scale))
    qparams = (layer.x_scale, 0, QMIN, QMAX, torch.int8)
    q = call(_decomposed.quantize_per_tensor.default, (floats, *qparams))
    return call(_decomposed.dequantize_per_tensor.default, (q, *qparams))


def _weight(gm: GraphModule, layers: list[_Layer]) -> Node:
    name, call = _common_name(layers), gm.graph.call_function
    stored = add_buffer(gm, name, "weight_int8", torch.cat([layer.weight for layer in layers]).t().contiguous())
    if len(layers) == 1 and layers[0].weight_scale.numel() == 1:
        scale = float(layers[0].weight_scale)
        return call(_decomposed.dequantize_per_tensor.default, (stored, scale, 0, QMIN, QMAX, torch.int8))
    scales = torch.cat([layer.weight_scale.expand(layer.weight.shape[0]) for layer in layers]).float()
    zeros = add_buffer(gm, name, "weight_zero_point", torch.zeros_like(scales, dtype=torch.int64))
    arguments = (stored, add_buffer(gm, name, "weight_scale", scales), zeros, 1, QMIN, QMAX, torch.int8)
    return call(_decomposed.dequantize_per_channel.default, arguments)


def _joined_bias(layers: list[_Layer], constants: Constants) -> Tensor:
    """The biases ``(N,)`` of a product's columns, less what the shift of its input by the zero point adds to them."""
    biases = []
    for layer in layers:
        shift = layer.zero_point * layer.x_scale * layer.weight.sum(1) * layer.weight_scale.double()
        bias = constants.value(layer.bias)
        biases.append((-shift if bias is None else bias.detach().double() - shift).float())
    return torch.cat(biases)


def _common_name(layers: list[_Layer]) -> str:
    """``attn.q_proj_k_proj`` for ``attn.q_proj`` and ``attn.k_proj``."""
    first, *others = (layer.name for layer in layers)
    owner = first.rpartition(".")[0]
    if all(name.rpartition(".")[0] == owner for name in others):
        others = [name.rpartition(".")[2] for name in others]
    return "_".join([first, *(name.replace(".", "_") for name in others)])


def _write_float(
    gm: GraphModule, node: Node, call: LinearCall, name: str, constants: Constants, stored: dict[Node, Node]
) -> None:
    """Let a linear read its float input and its dequantized weight, stored as float."""
    x = float_before(call.input)
    if call.weight not in stored:
        args, kwargs = map_arg((call.weight.args, call.weight.kwargs), constants.value)
        weight = call.weight.target(*args, **kwargs).detach()  # type: ignore[operator]
        with gm.graph.inserting_before(node):
            stored[call.weight] = add_buffer(gm, name, "weight_dequantized", weight)
    node.replace_input_with(call.weight, stored[call.weight])
    if x is not None:
        node.replace_input_with(call.input, x)


def _is_dequantized(node: object) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in _DEQUANTIZE


def _is_matrix(x: Node) -> bool:
    value = fake_value(x)
    return value is not None and value.ndim == 2


def _dtype_of(node: Node) -> torch.dtype:
    value = fake_value(node)
    if value is None:
        raise UnsupportedError(
            f"layer {layer_name(node)!r}: the graph must record the dtype of {node.name!r}, got none"
        )
    return value.dtype


def _remove_what_qdq_lacks(gm: GraphModule, before: set[Node]) -> None:
    """Let readers of values with scales per token or from the data read the float tensor; rewrite and check others.

    Of the nodes ``before`` that are left, none of which a linear reads.
    """
    for node in [node for node in gm.graph.nodes if node in before]:
        if node.target is _ours.dequantize.default and (x := float_before(node)) is not None:
            node.replace_all_uses_with(x)
        elif node.target in (_decomposed.quantize_per_tensor.default, _decomposed.quantize_per_channel.default):
            *_, low, high, dtype = node.args
            if (low, high) not in _RANGES.get(dtype, ()):
                raise UnsupportedError(
                    f"to_onnx: {node.name} must quantize to all values of int8 or uint8, got [{low}, {high}] of {dtype}"
                )
            if node.target is _decomposed.quantize_per_tensor.default and low == QMIN:
                _write_pairs(gm, node)


def _write_pairs(gm: GraphModule, quantize: Node) -> None:
    """Write an INT8 value that float operations read in float32 and without zero point, as the input of a linear is."""
    x, scale, zero_point = quantize.args[:3]
    pairs = [user for user in quantize.users if user.target is _decomposed.dequantize_per_tensor.default]
    if (zero_point == 0 and _dtype_of(x) == torch.float32) or len(pairs) < len(quantize.users):  # type: ignore[arg-type]
        return
    call, qparams = gm.graph.call_function, (scale, 0, QMIN, QMAX, torch.int8)
    shift: Any = zero_point * scale  # type: ignore[operator]
    with gm.graph.inserting_before(quantize):
        shifted = call(_aten.add.Tensor, (call(_aten.to.dtype, (x, torch.float32)), shift))
        q = call(_decomposed.quantize_per_tensor.default, (shifted, *qparams))
    for old in pairs:
        with gm.graph.inserting_before(old):
            moved = call(_aten.sub.Tensor, (call(_decomposed.dequantize_per_tensor.default, (q, *qparams)), shift))
            new = call(_aten.to.dtype, (moved, old.kwargs.get("out_dtype", torch.float32)))
        old.replace_all_uses_with(new)
