"""Annotate ``aten.scaled_dot_product_attention``: observers for static attention, another operator for the variants.

Static, once converted::

    q, k, v -> quantize -> dequantize -> attention -> transpose -> reshape -> quantize -> dequantize -> linear

The last pair belongs to the linear; with ``output="always"`` the attention has one of its own. A variant quantizes
inside the kernel and needs no observers::

    q, k, v -> qframework.sage_attention (variant) -> getitem 0 -> ...

Attention spelled out as matmul, softmax, matmul is first rewritten as one of the two.
Counterpart: qframework/backend/lower_static_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

import qframework.kernels  # noqa: F401  registers the operator that variants become
from qframework.compat.operators import schema
from qframework.compat.torchao import QuantizationAnnotation, QuantizationSpec, QuantizationSpecBase
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.graph.attention.call import Refused, Unrecognized
from qframework.graph.attention.patterns import sdpa_call, spelled_out_call
from qframework.graph.attention.replace import replace_attention
from qframework.graph.nodes import operation
from qframework.graph.shapes import short_shapes
from qframework.numerics import FLOAT_DTYPES
from qframework.quantizer.annotate_linear import (
    SharedObservers,
    quantization_spec,
    traced_value,
    unsupported,
    write_annotation,
)
from qframework.quantizer.attention_config import AttentionConfig
from qframework.quantizer.observers import activation_observer, per_head_observer

MAX_HEAD_DIM = 256
_SDPA = torch.ops.aten.scaled_dot_product_attention.default


@dataclass
class AttentionAnnotation(QuantizationAnnotation):
    """torchao's annotation with the layer's name and configuration."""

    layer: str = ""
    config: AttentionConfig = field(default_factory=AttentionConfig)


class NoAttentionKernel(UnsupportedError):
    """No kernel computes an attention, whatever its configuration; ``reason`` says why."""

    def __init__(self, layer: str, reason: str) -> None:
        self.reason = short_shapes(reason)
        super().__init__(str(unsupported(layer, self.reason)))


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
    """Whether ``node`` is the operator of a variant."""
    return node.op == "call_function" and node.target == torch.ops.qframework.sage_attention.default


def attention_call(node: Node) -> SdpaArguments:
    """The arguments of an attention node, including defaults."""
    names = [argument.name for argument in schema(_SDPA).arguments]
    values: dict[str, Any] = {argument.name: argument.default_value for argument in schema(_SDPA).arguments}
    values |= dict(zip(names, node.args, strict=False)) | node.kwargs
    return SdpaArguments(**{name: values[name] for name in SdpaArguments._fields})


def annotate_attention(node: Node, layer: str, config: AttentionConfig, shared: SharedObservers) -> None:
    """Annotate one attention of ``mode="static"``; ``shared`` carries the observers placed so far.

    Raises:
        UnsupportedError: no kernel supports ``config`` for this attention; see check_attention.
    """
    check_attention(node, layer, config)
    qspecs: dict[Node, QuantizationSpecBase] = {}
    for role, tensor in attention_call(node).operands().items():
        # a tensor that is both key and value has one observer
        fresh = _spec(tensor, f"{layer}:{role}", config)
        qspecs.setdefault(tensor, shared.spec(tensor, config, (tensor, node), fresh))
    output = _per_tensor_spec(f"{layer}:output", config) if config.output == "always" else None
    write_annotation(node, AttentionAnnotation, qspecs, output, layer=layer, config=config)


def check_attention(node: Node, layer: str, config: AttentionConfig) -> None:
    """Raise UnsupportedError where no kernel supports ``config`` for the attention ``node``."""
    call = attention_call(node)
    if call.dropout_p != 0:
        raise unsupported(layer, f"dropout_p must be 0, as in a model in eval(), got {call.dropout_p}")
    for role, tensor in call.operands().items():
        value = traced_value(tensor, layer)
        shape = f"({', '.join(map(str, value.shape))})"
        if value.dtype not in FLOAT_DTYPES:
            raise unsupported(layer, f"{role} must have dtype float32, float16 or bfloat16, got {value.dtype}")
        if not 3 <= value.ndim <= 5:
            raise NoAttentionKernel(layer, f"{role} must have 3 to 5 dimensions, got shape {shape}")
        if isinstance(value.shape[-1], int) and value.shape[-1] > MAX_HEAD_DIM:
            reason = f"{role} must have at most {MAX_HEAD_DIM} channels per head, got {value.shape[-1]}"
            raise NoAttentionKernel(layer, reason)
        if config.granularity == "per_head" and (value.ndim < 4 or not isinstance(value.shape[-3], int)):
            reason = f"{role} must have shape (..., H, N, D) with a fixed H for granularity='per_head', got {shape}"
            raise unsupported(layer, reason)


def transform_attention(model: GraphModule, node: Node, layer: str, config: AttentionConfig) -> None:
    """Replace the attention ``node``, or the spelled-out attention around a softmax ``node``, by what ``config`` needs.

    For a variant this is ``qframework.sage_attention``. For static attention, spelled-out attention becomes
    ``scaled_dot_product_attention``. A softmax stays that is not part of attention, or whose weights are changed.

    Raises:
        UnsupportedError: no kernel supports ``config`` for this attention.
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
    except Unrecognized:
        return
    except (Refused, QFrameworkError) as refusal:
        raise NoAttentionKernel(layer, f"no kernel computes this attention: {refusal}") from refusal


def _spec(tensor: Node, layer: str, config: AttentionConfig) -> QuantizationSpec:
    if config.granularity == "per_tensor":
        return _per_tensor_spec(layer, config)
    heads_axis = traced_value(tensor, layer).ndim - 3
    return quantization_spec(per_head_observer(config, layer, heads_axis), torch.per_channel_symmetric, heads_axis)


def _per_tensor_spec(layer: str, config: AttentionConfig) -> QuantizationSpec:
    return quantization_spec(activation_observer(config.activation(), layer, ()), torch.per_tensor_symmetric)
