"""Base of all observers of static scales, and the nodes that observers write when a model is converted."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.traceback import NodeSource, NodeSourceAction

from qframework.compat.torchao import FROM_NODE_KEY, create_getattr_from_value
from qframework.errors import CalibrationError
from qframework.graph.nodes import add_note
from qframework.graph.rewrites.detached import write_detaches
from qframework.numerics import MIN_AMAX, QMAX, QMIN, affine_parameters, scale_from_amax

logger = logging.getLogger(__name__)

# How often convert_pt2e found no scale for an activation, or for a part of it, by the activation's name.
uncalibrated: Counter[str] = Counter()
# Key of a prepared model's meta for the one value that all calibration data consists of, None if values vary.
CONSTANT_DATA = "qframework_constant_data"

_DECOMPOSED = torch.ops.quantized_decomposed


class StaticObserver:
    """Mixin of all observers whose scale is fixed when the model is converted; subclasses define ``threshold``.

    Zeros carry no information about a range. An activation that was all zeros during calibration has no scale: it stays
    in float, and conversion logs a warning with its name. Positions and heads that were always zero take the largest
    scale of the others.
    """

    layer: str
    reported = False

    @abstractmethod
    def magnitude(self) -> Tensor | None:
        """Largest magnitude seen, in the shape of ``threshold``; None before anything was observed."""

    @abstractmethod
    def threshold(self) -> Tensor | None:
        """Magnitude that maps to 127, any shape, float32; None before anything was observed."""

    @abstractmethod
    def nonfinite(self) -> Tensor:
        """0-dimensional bool: NaN or infinity was observed. On the observer's device, to avoid a synchronization."""

    def observed(self) -> bool:
        """Whether anything was observed, zeros included."""
        return self.magnitude() is not None

    def has_scale(self) -> bool:
        """Whether anything but zeros was observed. Raises CalibrationError for NaN and infinity."""
        if bool(self.nonfinite()):
            raise CalibrationError(
                f"layer {self.layer!r}: the activation must be finite during calibration, got NaN or infinity"
            )
        magnitude = self.magnitude()
        return magnitude is not None and bool((magnitude >= MIN_AMAX).any())

    def scale(self) -> Tensor:
        """Float32 scale, at least MIN_SCALE.

        Raises:
            CalibrationError: nothing was observed, nothing but zeros, or NaN or infinity.
        """
        if not self.has_scale():
            raise CalibrationError(
                f"layer {self.layer!r}: the activation was always zero during calibration. "
                "Calibrate with data that reaches this layer"
                if self.observed()
                else f"layer {self.layer!r}: the activation was never observed. "
                "Run calibrate(prepared, data) before convert_pt2e"
            )
        magnitude, threshold = self.magnitude(), self.threshold()
        assert magnitude is not None
        assert threshold is not None
        scale = scale_from_amax(threshold)
        return torch.where(magnitude >= MIN_AMAX, scale, scale.max())

    def zero_point(self) -> Tensor | None:
        """The int32 integer that stands for zero, in the shape of ``scale``; None where quantization is symmetric."""
        return None

    def broadcast_scale(self, x: Tensor) -> Tensor:
        """The scale in a shape that broadcasts against the observed tensor ``x``."""
        return self.scale()

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero point for torchao: ``(1,)`` or one per position, int64."""
        scale, zero_point = self.scale().reshape(-1), self.zero_point()
        zeros = torch.zeros_like(scale, dtype=torch.int64)
        return scale, zeros if zero_point is None else zeros + zero_point

    def convert(self, model: GraphModule, node: Node) -> None:
        """Replace the observer by quantize and dequantize, or remove it if calibration gave no scale.

        Raises:
            CalibrationError: as ``check_calibrated``; or NaN or infinity was observed.
        """
        if self.has_scale():
            warn_of_constant_data(model)
            self._report_gaps(node)
            self.write(model, node)
            write_detaches(model)
            return
        check_calibrated(model)
        seen = "saw nothing but zeros in" if self.observed() else "never reached"
        self._report(node, f"calibration {seen} {{}}, which stays in float")
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        model.graph.erase_node(node)

    def _report_gaps(self, node: Node) -> None:
        magnitude = self.magnitude()
        assert magnitude is not None
        empty = int((magnitude < MIN_AMAX).sum())
        if empty:
            self._report(
                node,
                f"calibration saw nothing but zeros in {empty} of the {magnitude.numel()} positions or heads of {{}}, "
                "which take the largest scale of the others",
            )

    def _report(self, node: Node, what: str) -> None:
        """Log ``what`` once, with a name in its braces, count it, and note it at the layers for ``explain``."""
        layer, _, role = self.layer.partition(":")
        for reader in node.users:
            add_note(reader, what.format("its input" if role in ("", "output") else f"its {role}"))
        if role == "output":
            add_note(node.all_input_nodes[0], what.format("its output"))
        if not self.reported:  # layers may share an observer
            self.reported = True
            uncalibrated[self.layer] += 1
            logger.warning("qframework: %s", what.format(f"the {role or 'input'} of layer {layer!r}"))

    def write(self, model: GraphModule, node: Node) -> None:
        """Replace the observer by quantize_per_tensor and dequantize_per_tensor."""
        scale, zero_point = float(self.scale()), self.zero_point()
        with model.graph.inserting_before(node):
            replace_by_per_tensor(model, node, scale, float_dtype(node), 0 if zero_point is None else int(zero_point))


class AsymmetricObserver(StaticObserver):
    """Mixin of observers of one scale and a zero point, found from both ends of the range."""

    @abstractmethod
    def ends(self) -> tuple[Tensor, Tensor]:
        """The smallest and the largest value to represent, float32; called only if something was observed."""

    def scale(self) -> Tensor:
        super().scale()  # raises if there is none
        return affine_parameters(*self.ends())[0]

    def zero_point(self) -> Tensor | None:
        super().scale()
        return affine_parameters(*self.ends())[1]


# ----------------------------------------------------------------------------------------------------------------------
# A whole model


def check_calibrated(model: GraphModule) -> None:
    """Raise CalibrationError if a prepared model was not calibrated at all, or only with zeros."""
    observers = [module for module in model.modules() if isinstance(module, StaticObserver)]
    if observers and not any(observer.observed() for observer in observers):
        observers[0].scale()  # raises
    if observers and model.meta.get(CONSTANT_DATA) == 0 and not any(observer.has_scale() for observer in observers):
        names = list(dict.fromkeys(observer.layer for observer in observers))
        raise CalibrationError(
            f"layer {names[0]!r}: the calibration data was all zeros, and so were all {len(names)} static activations "
            "of the model. Calibrate with real inputs, or use dynamic_int8(), which needs no calibration"
        )


def warn_of_constant_data(model: GraphModule) -> None:
    """Log once that the calibration data consisted of a single value."""
    value = model.meta.pop(CONSTANT_DATA, None)
    if value is not None:
        logger.warning(
            "qframework: the calibration data held nothing but the value %g; static scales fit other inputs only if "
            "calibrate(prepared, data) sees inputs like those the model will get",
            value,
        )


# ----------------------------------------------------------------------------------------------------------------------
# Writing nodes


def float_dtype(node: Node) -> torch.dtype:
    """Dtype of the float tensor that ``node`` observes."""
    source: Any = node
    while "val" not in source.meta:  # observers and nodes of other quantizers have no value
        source = source.args[0]
    return source.meta["val"].dtype


def replace_by_per_tensor(
    model: GraphModule, node: Node, scale: float, dtype: torch.dtype, zero_point: int = 0
) -> None:
    """Replace ``node`` by ``dequantize_per_tensor(quantize_per_tensor(x))``; inside ``inserting_before(node)``."""
    qparams = (scale, zero_point, QMIN, QMAX, torch.int8)
    q = model.graph.call_function(_DECOMPOSED.quantize_per_tensor.default, (node.args[0], *qparams))
    dq = model.graph.call_function(_DECOMPOSED.dequantize_per_tensor.default, (q, *qparams), _out_dtype(dtype))
    replace_observer(model, node, q, dq)


def replace_by_per_channel(
    model: GraphModule, node: Node, scale: Tensor, name: str, dtype: torch.dtype, axis: int = 0
) -> None:
    """Replace ``node`` by quantize and dequantize along ``axis``; buffers named after ``name`` hold ``scale (N,)``."""
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
    """Let the observer's users read ``dq``, and set the metadata that torchao's tools and later observers need."""
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
