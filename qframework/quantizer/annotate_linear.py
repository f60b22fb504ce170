"""Annotate ``aten.linear``: which tensors of a linear get an observer of their own, and which share one.

From::

    x -> linear(x, weight, bias) -> y

to, once converted::

    x -> quantize -> dequantize -> linear(_, dequantize(int8 weight), bias) -> y

Layers that read the same tensor with the same configuration (the projections of queries, keys and values) share one
observer, hence one quantize. Counterpart: qframework/backend/lower_linear.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule, Node

from qframework.compat.torchao import (
    ANNOTATED,
    Q_ANNOTATION_KEY,
    EdgeOrNode,
    QuantizationAnnotation,
    QuantizationSpec,
    QuantizationSpecBase,
    SharedQuantizationSpec,
    says_annotated,
)
from qframework.errors import UnsupportedError
from qframework.numerics import FLOAT_DTYPES, MAX_INT8_PRODUCTS, QMAX, QMIN
from qframework.quantizer.config import ActivationConfig, LinearConfig
from qframework.quantizer.observers import activation_observer, weight_observer


@dataclass
class LinearAnnotation(QuantizationAnnotation):
    """torchao's annotation with the layer's name and configuration."""

    layer: str = ""
    config: LinearConfig = field(default_factory=LinearConfig)


A = TypeVar("A", bound=QuantizationAnnotation)


@dataclass
class SharedObservers:
    """Where the observer of a tensor was first placed, by tensor and configuration."""

    places: dict[tuple[Node, Any], EdgeOrNode] = field(default_factory=dict)

    def spec(self, tensor: Node, config: Any, place: EdgeOrNode, fresh: QuantizationSpec) -> QuantizationSpecBase:
        """``fresh`` for the first place that quantizes ``tensor`` this way, a reference to that place afterwards."""
        first = self.places.setdefault((tensor, config), place)
        return fresh if first == place else SharedQuantizationSpec(first)


def is_linear(node: Node) -> bool:
    """Whether ``node`` is a linear whose weight is a parameter or buffer."""
    if node.op != "call_function" or node.target != torch.ops.aten.linear.default or len(node.args) < 2:
        return False
    weight = node.args[1]
    return isinstance(weight, Node) and weight.op == "get_attr"


def is_annotated(node: Node) -> bool:
    """Whether this or another quantizer has annotated ``node``."""
    return says_annotated(node.meta.get(Q_ANNOTATION_KEY))


def annotate_linear(node: Node, layer: str, config: LinearConfig, shared: SharedObservers) -> None:
    """Annotate one linear; ``shared`` carries the observers placed so far.

    Raises:
        UnsupportedError: no kernel supports ``config`` for this layer; see check_linear.
    """
    check_linear(node, layer, config)
    x, weight = _input_and_weight(node)
    qspecs: dict[Node, QuantizationSpecBase] = {
        x: shared.spec(x, config.activation, (x, node), _activation_spec(x, layer, config.activation)),
        weight: shared.spec(weight, config.weight, (weight, node), _weight_spec(layer, config)),
    }
    output = None
    if config.output == "always":
        output = shared.spec(
            node, config.activation, node, _activation_spec(node, f"{layer}:output", config.activation)
        )
    write_annotation(node, LinearAnnotation, qspecs, output, layer=layer, config=config)


def write_annotation(
    node: Node, kind: type[A], inputs: dict[Node, QuantizationSpecBase], output: QuantizationSpecBase | None, **own: Any
) -> None:
    """Annotate ``node``; ``own`` are the fields that ``kind`` adds to torchao's annotation."""
    # Sharing is explicit: torchao's implicit sharing compares only the dtype and range, not the granularity.
    node.meta[Q_ANNOTATION_KEY] = kind(
        input_qspec_map=inputs, output_qspec=output, allow_implicit_sharing=False, **ANNOTATED, **own
    )


def check_linear(node: Node, layer: str, config: LinearConfig) -> None:
    """Raise UnsupportedError where no kernel supports ``config`` for the linear ``node``."""
    check_dtypes(node, layer)
    x, weight = _input_and_weight(node)
    features = traced_value(weight, layer).shape[-1]
    if features > MAX_INT8_PRODUCTS:
        reason = f"in_features must be at most {MAX_INT8_PRODUCTS}, above which INT32 sums can overflow, got {features}"
        raise unsupported(layer, reason)
    if config.activation.granularity == "per_token" and not config.activation.dynamic:
        _check_positions(x, layer)


def check_dtypes(node: Node, layer: str) -> None:
    """Raise UnsupportedError where no kernel supports the dtypes of the linear ``node``, whatever its configuration."""
    for name, tensor in zip(("activation", "weight"), _input_and_weight(node), strict=True):
        dtype = traced_value(tensor, layer).dtype
        if dtype not in FLOAT_DTYPES:
            raise unsupported(layer, f"{name} must have dtype float32, float16 or bfloat16, got {dtype}")


def unsupported(layer: str, reason: str) -> UnsupportedError:
    """The error for a layer that no kernel supports, which says how to leave the layer in float."""
    return UnsupportedError(
        f"layer {layer!r}: {reason}. To leave the layer in float, call set_module_name({layer!r}, None)"
    )


def _check_positions(x: Node, layer: str) -> None:
    shape = tuple(traced_value(x, layer).shape)
    for dim, size in enumerate(shape[:-1]):
        is_batch = dim == 0 and len(shape) > 2
        if not is_batch and not isinstance(size, int):
            what = "batch" if dim == 0 else "position"
            raise unsupported(
                layer,
                f"with static per-token scales dimension {dim} ({what}) of the activation must have a fixed size, got "
                f"shape ({', '.join(map(str, shape))}). A dynamic or a per-tensor activation needs no fixed size",
            )


def _input_and_weight(node: Node) -> tuple[Node, Node]:
    x, weight = node.args[:2]
    assert isinstance(x, Node)
    assert isinstance(weight, Node)
    return x, weight


def traced_value(node: Node, layer: str) -> torch.Tensor:
    """The fake tensor that export recorded for ``node``. Raises UnsupportedError where there is none."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise UnsupportedError(
            f"layer {layer!r}: the graph must record the shape and dtype of {node.name!r}, got neither. Use a module "
            "from torch.export.export(...).module()"
        )
    return value


def _positions(x: Node, layer: str) -> tuple[int, ...]:
    """The dimensions with static per-token scales: all but the channels and, of 3 or more dimensions, the batch."""
    shape = traced_value(x, layer).shape[:-1]
    return tuple(shape[1:] if len(shape) > 1 else shape)


def quantization_spec(
    observer: Callable[..., Any], qscheme: torch.qscheme | None, axis: int | None = None
) -> QuantizationSpec:
    """INT8 as torchao describes it; ``axis`` is the dimension with one scale per index."""
    return QuantizationSpec(
        dtype=torch.int8,
        observer_or_fake_quant_ctr=observer,
        quant_min=QMIN,
        quant_max=QMAX,
        qscheme=qscheme,
        ch_axis=axis,
    )


def _activation_spec(x: Node, layer: str, config: ActivationConfig) -> QuantizationSpec:
    per_position = config.granularity == "per_token" and not config.dynamic
    positions = _positions(x, layer) if per_position else ()
    # is_dynamic stays False, even for a dynamic activation: with True, torchao looks for its own choose_qparams nodes.
    scheme = torch.per_tensor_symmetric if config.symmetric else torch.per_tensor_affine
    qscheme = scheme if not (per_position or config.dynamic) else None
    return quantization_spec(activation_observer(config, layer, positions), qscheme)


def _weight_spec(layer: str, config: LinearConfig) -> QuantizationSpec:
    observer = weight_observer(config.weight, layer)
    if config.weight.granularity == "per_channel":
        return quantization_spec(observer, torch.per_channel_symmetric, 0)
    return quantization_spec(observer, torch.per_tensor_symmetric)


def annotated(model: GraphModule, kind: type[A]) -> list[tuple[Node, A]]:
    """The nodes with an annotation of this ``kind``, in graph order."""
    annotations = ((node, node.meta.get(Q_ANNOTATION_KEY)) for node in model.graph.nodes)
    return [(node, annotation) for node, annotation in annotations if isinstance(annotation, kind)]
