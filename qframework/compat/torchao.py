"""torchao's PT2E: base classes of quantizers and observers, and the two steps of its workflow."""

from __future__ import annotations

from typing import Any

from qframework.compat.missing import explained

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
    "convert_pt2e",
    "create_getattr_from_value",
    "prepare_pt2e",
    "says_annotated",
]
