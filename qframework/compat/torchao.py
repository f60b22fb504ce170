"""torchao's PT2E: base classes of quantizers and observers, and the two steps of its workflow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch.fx import GraphModule
from torch.fx import node as fx_node

from qframework.compat.missing import explained, optional

with explained():
    from torchao.quantization.pt2e import (
        FROM_NODE_KEY,
        AffineQuantizedObserverBase,
        FakeQuantizeBase,
        MinMaxObserver,
        MovingAverageMinMaxObserver,
        MovingAveragePerChannelMinMaxObserver,
        ObserverBase,
        ObserverOrFakeQuantize,
        PerChannelMinMaxObserver,
        quantize_pt2e,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import (
        EdgeOrNode,
        QuantizationAnnotation,
        QuantizationSpec,
        QuantizationSpecBase,
        Quantizer,
        SharedQuantizationSpec,
    )
    from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY
    from torchao.quantization.pt2e.utils import create_getattr_from_value

ANNOTATED: dict[str, Any] = {"_annotated": True}  # marks an annotation whose node a quantizer has handled


@explained()
def says_annotated(annotation: QuantizationAnnotation | None) -> bool:
    """Whether a quantizer, ours or another, has handled the node of this annotation."""
    return annotation is not None and annotation._annotated


_FOLD = "torchao.quantization.pt2e.quantize_pt2e._fold_conv_bn_qat"
_EFFECTS = "torch.fx.node._side_effectful_functions"
_patching = threading.RLock()


def convert_calibrated(prepared: GraphModule) -> GraphModule:
    """``convert_pt2e`` of a model from ``prepare_pt2e``, without two things that it does.

    It searches for batch norms that train, which only ``prepare_qat_pt2e`` makes: where a model has any batch norm,
    torchao exports 96 small models for that, which takes longer than all else. Other threads search meanwhile.

    And it erases calls whose result nobody reads. Some functions are called for what they do: those that enter and
    leave ``vmap``, which exports record where transformers makes a mask, and without which the others raise an error.
    """
    owner = threading.get_ident()
    with _patching, _kept(_called_for_effects(prepared)):
        fold = optional(quantize_pt2e, _FOLD, None)
        if fold is None:
            return convert_pt2e(prepared)
        quantize_pt2e._fold_conv_bn_qat = lambda model: model if threading.get_ident() == owner else fold(model)
        try:
            return convert_pt2e(prepared)
        finally:
            quantize_pt2e._fold_conv_bn_qat = fold


def _called_for_effects(exported: Any) -> set[Any]:
    """The Python functions that a graph calls without reading a result: exports hold no other unread calls of these."""
    nodes = exported.graph.nodes if isinstance(exported, GraphModule) else ()
    called = {node.target for node in nodes if node.op == "call_function" and not node.users}
    return {function for function in called if isinstance(function, FunctionType)}


@contextmanager
def _kept(functions: set[Any]) -> Iterator[None]:
    """Let torch.fx erase no call of ``functions`` inside the block."""
    kept: set[Any] = optional(fx_node, _EFFECTS, set())
    added = functions - kept
    kept |= added
    try:
        yield
    finally:
        kept -= added


# The meta key that prepare_pt2e adds to a model, and convert_pt2e keeps.
PREPARED_META = "_observed_graph_module_attrs"

__all__ = [
    "ANNOTATED",
    "FROM_NODE_KEY",
    "PREPARED_META",
    "Q_ANNOTATION_KEY",
    "AffineQuantizedObserverBase",
    "EdgeOrNode",
    "FakeQuantizeBase",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "ObserverBase",
    "ObserverOrFakeQuantize",
    "PerChannelMinMaxObserver",
    "QuantizationAnnotation",
    "QuantizationSpec",
    "QuantizationSpecBase",
    "Quantizer",
    "SharedQuantizationSpec",
    "convert_calibrated",
    "create_getattr_from_value",
    "prepare_pt2e",
    "says_annotated",
]
