"""What every observer of a static scale has in common, and the nodes that observers write when converting."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.traceback import NodeSource, NodeSourceAction
from torchao.quantization.pt2e import FROM_NODE_KEY
from torchao.quantization.pt2e.utils import create_getattr_from_value

from qframework.errors import CalibrationError
from qframework.numerics import QMAX, QMIN, scale_from_amax

_DECOMPOSED = torch.ops.quantized_decomposed


class StaticObserver:
    """Mixin of every observer whose scale is fixed at convert; ``threshold`` is what the subclasses define."""

    layer: str

    @abstractmethod
    def threshold(self) -> Tensor | None:
        """Magnitude that maps to 127, any shape, float32; None before anything was observed."""

    @abstractmethod
    def nonfinite(self) -> Tensor:
        """0-dimensional bool: NaN or infinity was observed. On the observer's device, so that asking does not wait."""

    def scale(self) -> Tensor:
        """Float32 scale, at least MIN_SCALE. Raises CalibrationError if nothing, NaN or infinity was observed."""
        if bool(self.nonfinite()):
            raise CalibrationError(
                f"layer {self.layer!r}: its activation held NaN or infinity during calibration; "
                "finite values are accepted"
            )
        threshold = self.threshold()
        if threshold is None:
            raise CalibrationError(
                f"layer {self.layer!r}: its activation was never observed; "
                "run calibrate(prepared, data) before convert_pt2e"
            )
        return scale_from_amax(threshold)

    def broadcast_scale(self, x: Tensor) -> Tensor:
        """Its scale in the shape that broadcasts against what it observes, such as ``x``."""
        return self.scale()

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero point as torchao asks for them: ``(1,)`` or one for each position, zeros of int64."""
        scale = self.scale().reshape(-1)
        return scale, torch.zeros_like(scale, dtype=torch.int64)

    def convert(self, model: GraphModule, node: Node) -> None:
        """Replace the observer by quantize_per_tensor and dequantize_per_tensor."""
        scale = float(self.scale())
        with model.graph.inserting_before(node):
            replace_by_per_tensor(model, node, scale, float_dtype(node))


# ----------------------------------------------------------------------------------------------------------------------
# Writing nodes


def float_dtype(node: Node) -> torch.dtype:
    """Dtype of the float tensor that ``node`` observes."""
    source: Any = node
    while "val" not in source.meta:  # observers and the nodes of other quantizers carry no value
        source = source.args[0]
    return source.meta["val"].dtype


def replace_by_per_tensor(model: GraphModule, node: Node, scale: float, dtype: torch.dtype) -> None:
    """``node`` to ``dequantize_per_tensor(quantize_per_tensor(x))``; call inside ``graph.inserting_before(node)``."""
    qparams = (scale, 0, QMIN, QMAX, torch.int8)
    q = model.graph.call_function(_DECOMPOSED.quantize_per_tensor.default, (node.args[0], *qparams))
    dq = model.graph.call_function(_DECOMPOSED.dequantize_per_tensor.default, (q, *qparams), _out_dtype(dtype))
    replace_observer(model, node, q, dq)


def replace_by_per_channel(
    model: GraphModule, node: Node, scale: Tensor, name: str, dtype: torch.dtype, axis: int = 0
) -> None:
    """``node`` to quantize and dequantize along ``axis`` with ``scale (N,)`` kept in buffers called ``name``."""
    zero_point = torch.zeros_like(scale, dtype=torch.int64)
    scales = create_getattr_from_value(model, model.graph, f"{name}_scale_", scale, scale.device)
    zeros = create_getattr_from_value(model, model.graph, f"{name}_zero_point_", zero_point, scale.device)
    qparams = (scales, zeros, axis, QMIN, QMAX, torch.int8)
    q = model.graph.call_function(_DECOMPOSED.quantize_per_channel.default, (node.args[0], *qparams))
    dq = model.graph.call_function(_DECOMPOSED.dequantize_per_channel.default, (q, *qparams), _out_dtype(dtype))
    replace_observer(model, node, q, dq)


def _out_dtype(dtype: torch.dtype) -> dict[str, Any]:
    return {} if dtype == torch.float32 else {"out_dtype": dtype}


def replace_observer(model: GraphModule, node: Node, q: Node, dq: Node) -> None:
    """Hand the observer's users to ``dq`` and leave the traces that torchao's tools and later observers look for."""
    source = [NodeSource(node, "replace_observer_with_quantize_dequantize_node", [NodeSourceAction.CREATE])]
    for new in (q, dq):
        new.meta[FROM_NODE_KEY] = source
    observed: Any = node.args[0]
    if "val" in observed.meta:
        dq.meta["val"] = observed.meta["val"]
    node.replace_all_uses_with(dq)
    model.graph.erase_node(node)


def attribute_name(layer: str) -> str:
    """``blocks.0.fc1`` as a buffer's name."""
    return layer.replace(".", "_") or "model"
