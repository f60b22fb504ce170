"""Annotate ``aten.scaled_dot_product_attention``: observers for static attention, another operator for the variants.

Static, once converted::

    q, k, v -> quantize -> dequantize -> attention -> transpose -> reshape -> quantize -> dequantize -> linear

The last pair belongs to the linear; with ``output="always"`` the attention has one of its own. A variant quantizes
inside the kernel, so that there is nothing to observe::

    q, k, v -> qframework.sage_attention (variant) -> getitem 0 -> ...

Attention spelled out as matmul, softmax, matmul is written as one of the two first.
Counterpart: qframework/backend/lower_static_attention.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

import qframework.kernels  # noqa: F401  registers the operator that variants become
from qframework.compat.operators import schema
from qframework.compat.torchao import (
    ANNOTATED,
    Q_ANNOTATION_KEY,
    QuantizationAnnotation,
    QuantizationSpec,
    QuantizationSpecBase,
)
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.graph.attention_patterns import Refused, sdpa_call, spelled_out_call
from qframework.graph.nodes import operation
from qframework.graph.replace_attention import replace_attention
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


class SdpaArguments(NamedTuple):
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


def is_softmax(node: Node) -> bool:
    """Whether ``node`` may belong to attention spelled out as matmul, softmax, matmul."""
    return operation(node) == "softmax"


def is_variant(node: Node) -> bool:
    """Whether ``node`` is the operator that a variant became."""
    return node.op == "call_function" and node.target == torch.ops.qframework.sage_attention.default


def attention_call(node: Node) -> SdpaArguments:
    """The arguments of an attention's node, defaults filled in."""
    names = [argument.name for argument in schema(_SDPA).arguments]
    values: dict[str, Any] = {argument.name: argument.default_value for argument in schema(_SDPA).arguments}
    values |= dict(zip(names, node.args, strict=False)) | node.kwargs
    return SdpaArguments(**{name: values[name] for name in SdpaArguments._fields})


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
        **ANNOTATED,
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


def transform_attention(model: GraphModule, node: Node, layer: str, config: AttentionConfig) -> None:
    """Put the operator that ``config`` needs in the place of an attention, or of the one around the softmax ``node``.

    A variant becomes ``qframework.sage_attention``, attention spelled out that is to be static becomes
    ``scaled_dot_product_attention``; a softmax of something else is left alone.

    Raises:
        UnsupportedError: no kernel can do ``config`` on this attention.
    """
    if is_attention(node):
        check_attention(node, layer, config)
    try:
        call = sdpa_call(node) if is_attention(node) else spelled_out_call(node)
        if call is None:
            return
        if not config.is_static:
            replace_attention(model, call, lambda writer: writer.write(config.mode, config.smooth_k))
        elif not is_attention(node):
            replace_attention(model, call, lambda writer: writer.write_sdpa())
    except (Refused, QFrameworkError) as refusal:
        raise UnsupportedError(
            f"layer {layer!r}: attention that no kernel computes: {refusal}, or set_module_name({layer!r}, None) to "
            "leave it in float"
        ) from refusal


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
