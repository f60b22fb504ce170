"""Annotate ``aten.scaled_dot_product_attention``: observers for static attention, another operator for the variants.

Static, once converted::

    q, k, v -> quantize -> dequantize -> attention -> transpose -> reshape -> quantize -> dequantize -> linear

The last pair belongs to the linear; with ``output="always"`` the attention has one of its own. A variant quantizes
inside the kernel, so that there is nothing to observe::

    q, k, v -> qframework.sage_attention (variant) -> getitem 0 -> ...

Counterpart: qframework/backend/lower_static_attention.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY, QuantizationSpecBase

import qframework.kernels  # noqa: F401  registers the operator that variants become
from qframework.errors import UnsupportedError
from qframework.numerics import FLOAT_DTYPES, QMAX, QMIN
from qframework.quantizer.annotate_linear import SharedObservers
from qframework.quantizer.attention_config import AttentionConfig
from qframework.quantizer.observers import activation_observer, per_head_observer

MAX_HEAD_DIM = 256
_SDPA = torch.ops.aten.scaled_dot_product_attention.default


@dataclass
class AttentionAnnotation(QuantizationAnnotation):
    """torchao's annotation, which also remembers the layer's name and configuration."""

    layer: str = ""
    config: AttentionConfig = field(default_factory=AttentionConfig)


class AttentionCall(NamedTuple):
    """The arguments of ``scaled_dot_product_attention``."""

    query: Node
    key: Node
    value: Node
    attn_mask: Node | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool

    def operands(self) -> dict[str, Node]:
        """Query, key and value by name."""
        return {"query": self.query, "key": self.key, "value": self.value}


def is_attention(node: Node) -> bool:
    """Whether ``node`` is a ``scaled_dot_product_attention``."""
    return node.op == "call_function" and node.target == _SDPA


def is_variant(node: Node) -> bool:
    """Whether ``node`` is the operator that a variant became."""
    return node.op == "call_function" and node.target == torch.ops.qframework.sage_attention.default


def attention_call(node: Node) -> AttentionCall:
    """The arguments of an attention's node, defaults filled in."""
    names = [argument.name for argument in _SDPA._schema.arguments]
    values: dict[str, Any] = {argument.name: argument.default_value for argument in _SDPA._schema.arguments}
    values |= dict(zip(names, node.args, strict=False)) | node.kwargs
    return AttentionCall(**{name: values[name] for name in AttentionCall._fields})


def annotate_attention(node: Node, layer: str, config: AttentionConfig, shared: SharedObservers) -> None:
    """Annotate one attention of ``mode="static"``; ``shared`` carries the observers placed so far.

    Raises:
        UnsupportedError: no kernel can do ``config`` on this attention; see check_attention.
    """
    check_attention(node, layer, config)
    qspecs: dict[Node, QuantizationSpecBase] = {}
    for role, tensor in attention_call(node).operands().items():
        # a tensor that is key and value at once has one observer
        fresh = _spec(tensor, f"{layer}:{role}", config)
        qspecs.setdefault(tensor, shared.spec(tensor, config, (tensor, node), fresh))
    output = _per_tensor_spec(f"{layer}:output", config) if config.output == "always" else None
    node.meta[Q_ANNOTATION_KEY] = AttentionAnnotation(
        input_qspec_map=qspecs,
        output_qspec=output,
        allow_implicit_sharing=False,
        _annotated=True,
        layer=layer,
        config=config,
    )


def check_attention(node: Node, layer: str, config: AttentionConfig) -> None:
    """Raise UnsupportedError, naming the layer, where no kernel can do ``config`` on the attention ``node``."""
    call = attention_call(node)
    reason = None
    if call.dropout_p != 0:
        reason = f"attention with dropout_p={call.dropout_p}; accepted: 0, as a model in eval() has"
    for role, tensor in call.operands().items():
        reason = reason or _reason_against(role, _value(tensor, layer), config)
    if reason is not None:
        raise UnsupportedError(f"layer {layer!r}: {reason}, or set_module_name({layer!r}, None) to leave it in float")


def _reason_against(role: str, value: torch.Tensor, config: AttentionConfig) -> str | None:
    shape = f"({', '.join(map(str, value.shape))})"
    if value.dtype not in FLOAT_DTYPES:
        return f"{role} of dtype {value.dtype}; accepted: {', '.join(map(str, FLOAT_DTYPES))}"
    if not 3 <= value.ndim <= 5:
        return f"{role} of shape {shape}; accepted: 3 to 5 dimensions"
    if isinstance(value.shape[-1], int) and value.shape[-1] > MAX_HEAD_DIM:
        return f"{role} has {value.shape[-1]} channels a head; accepted: up to {MAX_HEAD_DIM}"
    if config.granularity == "per_head" and (value.ndim < 4 or not isinstance(value.shape[-3], int)):
        return f"granularity='per_head' with a {role} of shape {shape}; accepted: (..., H, N, D) with a fixed H"
    return None


def replace_by_variant(model: GraphModule, node: Node, layer: str, config: AttentionConfig) -> None:
    """Put ``qframework.sage_attention`` with the variant of ``config`` in the place of the attention ``node``.

    Raises:
        UnsupportedError: no kernel can do ``config`` on this attention; see check_attention.
    """
    check_attention(node, layer, config)
    call = attention_call(node)
    operands = (call.query, call.key, call.value, call.attn_mask, call.is_causal, call.scale, call.enable_gqa)
    with model.graph.inserting_before(node):
        pair = model.graph.call_function(
            torch.ops.qframework.sage_attention.default, (*operands, config.mode, config.smooth_k)
        )
        out = model.graph.call_function(operator.getitem, (pair, 0))
    for new in (pair, out):
        new.meta = {k: v for k, v in node.meta.items() if k != Q_ANNOTATION_KEY}
    value = node.meta["val"]
    pair.meta["val"] = (value, value.new_empty((0,), dtype=torch.float32))
    node.replace_all_uses_with(out)
    model.graph.erase_node(node)


def annotated_attentions(model: GraphModule) -> list[tuple[Node, AttentionAnnotation]]:
    """The attentions that this quantizer annotated, in graph order."""
    annotations = ((node, node.meta.get(Q_ANNOTATION_KEY)) for node in model.graph.nodes)
    return [(node, annotation) for node, annotation in annotations if isinstance(annotation, AttentionAnnotation)]


def _spec(tensor: Node, layer: str, config: AttentionConfig) -> QuantizationSpec:
    if config.granularity == "per_tensor":
        return _per_tensor_spec(layer, config)
    heads_axis = _value(tensor, layer).ndim - 3
    return _quantization_spec(per_head_observer(config, layer, heads_axis), torch.per_channel_symmetric, heads_axis)


def _per_tensor_spec(layer: str, config: AttentionConfig) -> QuantizationSpec:
    return _quantization_spec(activation_observer(config.activation(), layer, ()), torch.per_tensor_symmetric)


def _quantization_spec(
    observer: Callable[..., Any], qscheme: torch.qscheme, axis: int | None = None
) -> QuantizationSpec:
    return QuantizationSpec(
        dtype=torch.int8,
        observer_or_fake_quant_ctr=observer,
        quant_min=QMIN,
        quant_max=QMAX,
        qscheme=qscheme,
        ch_axis=axis,
    )


def _value(node: Node, layer: str) -> torch.Tensor:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise UnsupportedError(
            f"layer {layer!r}: the graph does not say the shape and dtype of {node.name!r}; accepted: "
            "a module from torch.export.export(...).module()"
        )
    return value
