"""INT8 linears in a captured graph: their quantized operands, their epilogue, and the operator that replaces them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.backend.lowering import ScaleConstants, erase_unused
from qframework.compat.dispatch import FakeTensor
from qframework.compat.dynamo import VALUE_KEYS, record_value, value_key
from qframework.errors import QFrameworkError
from qframework.graph.nodes import (
    Constants,
    LinearCall,
    activation_name,
    added_to,
    argument,
    fake_value,
    layer_name,
    linear_call,
    why_not_plain,
)
from qframework.graph.strides import follow_strides
from qframework.graph.writes import written_between
from qframework.kernels.linear.arguments import Int8LinearArguments
from qframework.numerics import FLOAT_DTYPES, MAX_INT8_PRODUCTS, QMAX

NO_PARAMETER = "its weight must be a parameter of a module, got one that is computed in the graph or passed in"

_CONTIGUOUS = "qframework_may_be_contiguous"  # in a node's meta

_decomposed = torch.ops.quantized_decomposed
_ours = torch.ops.qframework
_INT8_LINEAR = (_ours.int8_linear.default, _ours.int8_linear)  # a model may call the second


@dataclass(frozen=True)
class Quantized:
    """An int8 value in the graph: its node, its scale, a number (per tensor) or a node, and the integer for zero."""

    value: Node
    scale: float | Node
    zero_point: int | Node = 0


@dataclass
class Epilogue:
    """The steps after a linear layer that its operator computes too; ``end`` is the last node that it replaces."""

    end: Node
    activation: str = "none"
    residual: Node | None = None
    out_scale: float | Node | None = None
    out_zero_point: int | Node = 0

    def describe(self) -> str:
        """The operator's name with its epilogue."""
        parts = [self.activation] * (self.activation != "none")
        parts += ["residual"] * (self.residual is not None) + ["int8 out"] * (self.out_scale is not None)
        return "qframework::int8_linear" + (f" ({', '.join(parts)})" if parts else "")


class CannotLower(Exception):
    """A layer that no kernel supports; the message is the reason."""


def quantized_operands(call: LinearCall, constants: Constants, layer: str) -> tuple[Quantized | None, Quantized | None]:
    """The int8 values behind the input and the weight of a linear; None for one that is not dequantized.

    Raises CannotLower and QFrameworkError as ``dequantized`` does, and CannotLower if both are quantized but no kernel
    supports the layer's bias or width.
    """
    a = dequantized(call.input, constants, layer, "input")
    b = dequantized(call.weight, constants, layer, "weight", axis=0)
    if b is not None and b.zero_point != 0:
        raise CannotLower(f"its weight must have zero point 0 (symmetric quantization), got {b.zero_point}")
    if a is not None and a.zero_point != 0 and not _is_one(a.scale):
        raise CannotLower("its input must have one scale with a zero point, got one per token")
    if a is not None and b is not None and (reason := reason_against_operands(call)):
        raise CannotLower(reason)
    return a, b


def is_quantized_linear(linear: Node, constants: Constants) -> bool:
    """Whether the input and the weight of a linear are dequantized in a form that ``int8_linear`` supports."""
    call, name = linear_call(linear), layer_name(linear)
    assert call is not None
    try:
        return None not in quantized_operands(call, constants, name)
    except CannotLower:
        return False


def _is_one(scale: float | Node) -> bool:
    """Whether a scale is a single number."""
    fake = None if isinstance(scale, float) else fake_value(scale)
    return isinstance(scale, float) or (fake is not None and fake.numel() == 1)


def reason_against_operands(call: LinearCall) -> str | None:
    """Why no kernel supports the layer's bias, or sums as many products; None if one does."""
    weight, bias = fake_value(call.weight), fake_value(call.bias) if call.bias is not None else None
    if weight is not None and bias is not None:
        if reason := why_not_plain(bias):
            return f"its bias {reason}"
        if bias.shape != weight.shape[:1] or bias.dtype not in FLOAT_DTYPES:
            wanted = f"shape ({weight.shape[0]},) and be float32, float16 or bfloat16"
            return f"its bias must have {wanted}, got shape {tuple(bias.shape)} and {bias.dtype}"
    features = weight.shape[-1] if weight is not None else 0
    if isinstance(features, int) and features > MAX_INT8_PRODUCTS:
        return f"it must have at most {MAX_INT8_PRODUCTS} input features, got {features}: its INT32 sums could overflow"
    return None


def dequantized(node: Node, constants: Constants, layer: str, role: str, axis: int | None = None) -> Quantized | None:
    """The int8 value behind a dequantize node; None for any other node. Along ``axis``, scales may differ.

    A single scale may come with a zero point, which not every reader supports.

    Raises CannotLower for a form that no kernel supports, and QFrameworkError for a scale that is zero, negative or
    not finite.
    """
    value: Any
    scale: Any
    zero_point: Any
    if node.op != "call_function":
        return None
    if node.target is _ours.dequantize.default:
        value, scale = node.args[:2]
        found = argument(node, 3, "zero_point")
        zero_point = 0 if found is None else found
    elif node.target is _decomposed.dequantize_per_tensor.default:
        value, scale, zero_point, quant_min, quant_max, dtype = node.args[:6]
        _require_int8(role, quant_min, quant_max, dtype)
    elif node.target is _decomposed.dequantize_per_channel.default:
        value, scale, zero_points, along, quant_min, quant_max, dtype = node.args[:7]
        _require_symmetric(role, _zero_points(zero_points, constants), quant_min, quant_max, dtype)
        zero_point = 0
        if along != axis:
            wanted = "one scale" if axis is None else f"its scales along axis {axis}"
            raise CannotLower(f"its {role} must have {wanted}, got one for each channel of axis {along}")
    elif "dequantize" in str(node.target):
        raise CannotLower(f"its {role} is dequantized by {node.target}, which no kernel supports")
    else:
        return None
    _require_positive(scale, constants, layer, role)
    return Quantized(value, scale, zero_point)


def _zero_points(node: Any, constants: Constants) -> int | None:
    """0 if all are zero, else the largest magnitude; None if they are unknown."""
    if node is None:
        return 0
    value = constants.on_cpu(node)
    return None if value is None else int(value.abs().max()) if value.numel() else 0


def _require_symmetric(role: str, zero_point: Any, quant_min: Any, quant_max: Any, dtype: Any) -> None:
    _require_int8(role, quant_min, quant_max, dtype)
    if zero_point != 0 and not (zero_point is None and quant_min == -QMAX):
        raise CannotLower(f"its {role} must have zero point 0 (symmetric quantization), got {zero_point}")


def _require_int8(role: str, quant_min: Any, quant_max: Any, dtype: Any) -> None:
    if dtype != torch.int8 or quant_max != QMAX:
        raise CannotLower(f"its {role} must be int8 up to 127, got {dtype} in [{quant_min}, {quant_max}]")


def _require_positive(scale: Any, constants: Constants, layer: str, role: str) -> None:
    values = torch.tensor(scale) if isinstance(scale, float) else constants.on_cpu(scale)
    if values is not None and not bool(((values > 0) & values.isfinite()).all()):
        worst = float(values[~((values > 0) & values.isfinite())].flatten()[0])
        raise QFrameworkError(
            f"layer {layer!r}: the scale of its {role} must be positive and finite, got {worst}. "
            "Calibrate with data that reaches this layer"
        )


def is_int8_linear(node: Node) -> bool:
    """Whether a node is an ``int8_linear``, of the lowering or of the model itself."""
    return node.target in _INT8_LINEAR


def int8_linear_arguments(node: Node) -> Any:
    """The ``Int8LinearArguments`` of an ``int8_linear`` node, with nodes in place of tensors."""
    return Int8LinearArguments(*node.args, **node.kwargs)  # type: ignore[arg-type]


def find_epilogue(linear: Node) -> Epilogue:
    """Follow the only user of each value as long as ``int8_linear`` can compute it.

    The operator reads its operands at the end of the epilogue, so no node before that may change one of them in place.
    The epilogue's own nodes write only its result. The operator's result is contiguous; a sum may have the strides of
    its other operand, which a view behind it can depend on.
    """
    own: set[Node] = set()
    epilogue, reads = Epilogue(linear), operands_read(linear)
    while len(epilogue.end.users) == 1:
        user = next(iter(epilogue.end.users))
        if written_between(linear.next, user, reads, own) is not None:
            break
        own.add(user)
        if epilogue.activation == "none" and epilogue.residual is None and (name := activation_name(user)):
            epilogue.end, epilogue.activation = user, name
        elif epilogue.residual is None and (residual := added_to(user, epilogue.end)) is not None:
            if not may_be_contiguous(user):
                break
            epilogue.end, epilogue.residual = user, residual
            reads.append(residual)
        elif (found := static_quantization(user, epilogue.end)) is not None:
            epilogue.end, epilogue.out_scale, epilogue.out_zero_point = user, *found
            break
        else:
            break
    return epilogue


def may_be_contiguous(node: Node) -> bool:
    """Whether nothing depends on the strides of a sum; found once for all sums of a residual stream behind it."""
    if _CONTIGUOUS not in node.meta:
        moved = _made_contiguous(node)
        node.meta[_CONTIGUOUS] = moved is not None
        for reader, value in (moved or {}).items():
            if isinstance(value, Tensor) and value.is_contiguous():
                reader.meta[_CONTIGUOUS] = True
    return bool(node.meta[_CONTIGUOUS])


def _made_contiguous(node: Node) -> dict[Node, Any] | None:
    """What ``follow_strides`` says of a contiguous tensor in place of ``node``: new values, or None if it cannot be."""
    fake = fake_value(node)
    contiguous = fake.new_empty(fake.shape) if fake is not None else None
    return follow_strides(node, contiguous) if isinstance(contiguous, FakeTensor) else {}


def operands_read(linear: Node) -> list[Node]:
    """The operands of ``linear``, and the int8 values behind those that are dequantized."""
    operands = linear.all_input_nodes
    return operands + [x for node in operands if "dequantize" in str(node.target) for x in node.all_input_nodes]


def static_quantize_scale(node: Node, value: Node) -> float | Node | None:
    """The scale of a static symmetric quantize node of ``value``; None for any other node."""
    found = static_quantization(node, value)
    return found[0] if found is not None and found[1] == 0 else None


def static_quantization(node: Node, value: Node) -> tuple[float | Node, int | Node] | None:
    """Scale and zero point of a static quantize node of ``value`` to -127..127; None for any other node."""
    scale: Any
    zero_point: Any
    if node.target is _ours.quantize.default and node.args[0] is value:
        zero_point = argument(node, 2, "zero_point")
        return node.args[1], 0 if zero_point is None else zero_point  # type: ignore[return-value]
    if node.target is _decomposed.quantize_per_tensor.default and node.args[0] is value:
        _, scale, zero_point, quant_min, quant_max, dtype = node.args
        if (quant_min, quant_max, dtype) == (-QMAX, QMAX, torch.int8):
            return scale, zero_point
    return None


def insert_int8_linear(
    gm: GraphModule, call: LinearCall, a: Quantized, b: Quantized, epilogue: Epilogue, scales: ScaleConstants
) -> Node:
    """Replace ``epilogue.end`` by ``int8_linear``, which is returned, and erase nodes without readers."""
    end = epilogue.end
    device = _device_of(call.weight, end)
    out_dtype = None if epilogue.out_scale is not None else _float_dtype(end)
    with gm.graph.inserting_before(end):
        bias = call.bias if a.zero_point == 0 else _bias_of_zero_point(gm, call, a, b, device, scales)
        new = gm.graph.call_function(
            _ours.int8_linear.default,
            (
                a.value,
                scales.node(a.scale, device),
                b.value,
                scales.node(b.scale, device),
                bias,
                epilogue.activation,
                epilogue.residual,
                scales.node(epilogue.out_scale, device) if epilogue.out_scale is not None else None,
                out_dtype,
                scales.zero_point(epilogue.out_zero_point, device),
            ),
        )
    for node, value in (_made_contiguous(end) or {}).items():
        node.meta[value_key(node)] = value
    new.meta = {k: v for k, v in end.meta.items() if k in (*VALUE_KEYS, "nn_module_stack", "stack_trace")}
    end.replace_all_uses_with(new)
    erase_unused(gm, end)
    return new


def _bias_of_zero_point(
    gm: GraphModule, call: LinearCall, a: Quantized, b: Quantized, device: torch.device, scales: ScaleConstants
) -> Node:
    """The bias that also takes the input's zero point, which ``int8_linear`` does not know."""
    zero_point, a_scale = scales.zero_point(a.zero_point, device), scales.node(a.scale, device)
    arguments = (call.bias, a_scale, zero_point, b.value, scales.node(b.scale, device))
    bias = gm.graph.call_function(_ours.zero_point_bias.default, arguments)
    weight = fake_value(b.value)
    if weight is not None:
        value = bias.meta["val"] = weight.new_empty(weight.shape[0], dtype=torch.float32)
        record_value(bias, value)
    return bias


def _float_dtype(node: Node) -> torch.dtype:
    fake = fake_value(node)
    dtype = fake.dtype if fake is not None else torch.float32
    if dtype not in FLOAT_DTYPES:
        raise QFrameworkError(f"layer {layer_name(node)!r}: output must be float32, float16 or bfloat16, got {dtype}")
    return dtype


def _device_of(*nodes: Node) -> torch.device:
    return next((fake.device for node in nodes if (fake := fake_value(node)) is not None), torch.device("cpu"))
