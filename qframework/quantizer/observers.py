"""Observers: what calibration records about a tensor, and the quantize and dequantize nodes that follow from it.

They are symmetric INT8 with ``scale = threshold / 127`` (qframework.numerics) and differ in the threshold. All but
``entropy`` also have a form with a zero point, for ranges that are not symmetric:

===================  =================================================================================================
``minmax``           largest magnitude seen, with a ``margin`` on request (torchao's MinMaxObserver and
                     PerChannelMinMaxObserver)
``moving_average``   moving average of each batch's extremes (torchao's)
``percentile``       magnitude below which a given percentage of the nonzero values lie
``mse``              threshold of least mean squared quantization error
``entropy``          threshold of least Kullback-Leibler divergence between the values and their quantization
===================  =================================================================================================

The last three use a histogram of magnitudes. torchao's HistogramObserver is not used: it searches a signed range
greedily and resamples its counts when the range grows, whereas the counts here stay exact. Zeros are exact with every
scale, so averages and histograms exclude them; otherwise a batch of padding would move the threshold.

Every observer has the name of its layer. Conversion raises CalibrationError with that name if NaN or infinity was
observed, or nothing in the whole model. An activation that was always zero has no scale: it stays in float, with a
warning. ``convert(model, node)`` is torchao's hook for observers that write their own nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.traceback import NodeSource, NodeSourceAction

import qframework.kernels  # noqa: F401  registers the operators that convert() writes
from qframework.compat.torchao import (
    FROM_NODE_KEY,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    ObserverBase,
    PerChannelMinMaxObserver,
    create_getattr_from_value,
)
from qframework.errors import CalibrationError
from qframework.graph.attributes import attribute
from qframework.graph.rewrites.detached import write_detaches
from qframework.numerics import (
    MIN_AMAX,
    MIN_SCALE,
    QMAX,
    QMIN,
    ActivationGranularity,
    WeightGranularity,
    dynamic_scale,
    scale_from_amax,
    weight_scale,
)
from qframework.quantizer.attention_config import AttentionConfig
from qframework.quantizer.config import ActivationConfig, WeightConfig
from qframework.quantizer.histogram_observers import (
    AffineMSEObserver,
    AffinePercentileObserver,
    EntropyObserver,
    MSEObserver,
    PercentileObserver,
)
from qframework.quantizer.static_observer import (
    AsymmetricObserver,
    StaticObserver,
    attribute_name,
    float_dtype,
    replace_by_per_channel,
    replace_by_per_tensor,
    replace_observer,
)

# ----------------------------------------------------------------------------------------------------------------------
# Extremes: torchao's observers with the name of their layer


class _ExtremesObserver(StaticObserver):
    """Reads torchao's ``min_val`` and ``max_val``, which keep NaN and infinity, so no pass over the data is needed."""

    min_val: Tensor
    max_val: Tensor

    def __init__(self, layer: str, margin: float = 0.0, **kwargs: Any) -> None:
        super().__init__(eps=MIN_SCALE, **kwargs)  # type: ignore[call-arg]  # of torchao's observer
        self.layer, self.margin = layer, margin

    def _is_new(self) -> bool:
        return bool(self.min_val.numel() == 0 or (self.min_val > self.max_val).all())

    def magnitude(self) -> Tensor | None:
        return None if self._is_new() else torch.maximum(-self.min_val, self.max_val).float()

    def threshold(self) -> Tensor | None:
        magnitude = self.magnitude()
        return magnitude if magnitude is None or not self.margin else magnitude * (1 + self.margin)

    def nonfinite(self) -> Tensor:
        held = torch.isfinite(self.min_val) & torch.isfinite(self.max_val)
        return ~(held | (self.min_val > self.max_val)).all()


class PerTensorMinMax(_ExtremesObserver, MinMaxObserver):
    """Largest magnitude seen: one scale."""


class _MovingAverageObserver(_ExtremesObserver):
    """torchao's moving average of each batch's extremes, except that groups of zeros do not change it.

    If a first batch of zeros counted, the range would be a hundredth of the second batch's.
    """

    averaging_constant: float

    def forward(self, x: Tensor) -> Tensor:
        if x.numel():
            self._average(*self._extremes(x.detach().to(self.min_val.dtype)))
        return x

    def _extremes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Smallest and largest value of each group."""
        raise NotImplementedError

    def _average(self, low: Tensor, high: Tensor) -> None:
        if self.min_val.numel() == 0:  # torchao's per-channel observers start without a size
            self.min_val.resize_(low.shape).fill_(float("inf"))
            self.max_val.resize_(high.shape).fill_(float("-inf"))
        unknown = torch.maximum(-self.min_val, self.max_val) < MIN_AMAX
        silent = torch.maximum(-low, high) < MIN_AMAX
        for kept, seen in ((self.min_val, low), (self.max_val, high)):
            averaged = kept + self.averaging_constant * (seen - kept)
            kept.copy_(torch.where(unknown, seen, torch.where(silent, kept, averaged)))


class PerTensorMovingAverage(_MovingAverageObserver, MovingAverageMinMaxObserver):
    """Moving average of the extremes of each batch: one scale."""

    def _extremes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.aminmax(x)


class _AffineObserver(AsymmetricObserver, _ExtremesObserver):
    """One scale and a zero point, from both ends of the range."""

    def ends(self) -> tuple[Tensor, Tensor]:
        return self.min_val * (1 + self.margin), self.max_val * (1 + self.margin)


class PerTensorAffineMinMax(_AffineObserver, MinMaxObserver):
    """Smallest and largest value seen."""


class PerTensorAffineMovingAverage(_AffineObserver, PerTensorMovingAverage):
    """Moving averages of the smallest and the largest value of each batch."""


class _PositionObserver(_ExtremesObserver):
    """One scale for each position of ``(B, *positions, C)``, or of ``(*positions, C)`` without a batch dimension.

    torchao's per-channel observers record the extremes along dimension 1 of a view ``(B, number of positions, C)``.
    """

    def __init__(self, layer: str, positions: tuple[int, ...], **kwargs: Any) -> None:
        super().__init__(layer, ch_axis=1, **_per_channel(kwargs))
        self.positions = positions

    def forward(self, x: Tensor) -> Tensor:
        if x.numel():
            flat = x.reshape(-1, self._number_of_positions(), x.shape[-1])
            super().forward(flat)  # type: ignore[misc]
        return x

    def _number_of_positions(self) -> int:
        return torch.Size(self.positions).numel()

    def scale(self) -> Tensor:
        return super().scale().reshape(*self.positions, 1)

    def write(self, model: GraphModule, node: Node) -> None:
        """Replace the observer by qframework.quantize and qframework.dequantize; scales ``(*positions, 1)``."""
        dtype, scale = float_dtype(node), self.scale()
        with model.graph.inserting_before(node):
            name = f"{attribute_name(self.layer)}_input_scale_"
            scales = create_getattr_from_value(model, model.graph, name, scale, scale.device)
            q = model.graph.call_function(torch.ops.qframework.quantize.default, (node.args[0], scales))
            dq = model.graph.call_function(torch.ops.qframework.dequantize.default, (q, scales, dtype))
            replace_observer(model, node, q, dq)


class PerTokenMinMax(_PositionObserver, PerChannelMinMaxObserver):
    """Largest magnitude seen at each position."""


class _PerChannelMovingAverage(_MovingAverageObserver, MovingAveragePerChannelMinMaxObserver):
    ch_axis: int

    def _extremes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.aminmax(x.movedim(self.ch_axis, 0).flatten(1), dim=1)


class PerTokenMovingAverage(_PositionObserver, _PerChannelMovingAverage):
    """Moving average of the extremes of each position."""


class _HeadObserver(_ExtremesObserver):
    """One scale for each head of queries, keys or values ``(..., H, N, D)``."""

    ch_axis: int

    def __init__(self, layer: str, heads_axis: int, **kwargs: Any) -> None:
        super().__init__(layer, **_per_channel(kwargs) | {"ch_axis": heads_axis})

    def broadcast_scale(self, x: Tensor) -> Tensor:
        return self.scale().reshape(-1, *[1] * (x.ndim - self.ch_axis - 1))

    def write(self, model: GraphModule, node: Node) -> None:
        """Replace the observer by quantize_per_channel and dequantize_per_channel along the heads; scales ``(H,)``."""
        name = attribute_name(self.layer.replace(":", "_"))
        with model.graph.inserting_before(node):
            replace_by_per_channel(model, node, self.scale(), name, float_dtype(node), self.ch_axis)


class PerHeadMinMax(_HeadObserver, PerChannelMinMaxObserver):
    """Largest magnitude seen in each head."""


class PerHeadMovingAverage(_HeadObserver, _PerChannelMovingAverage):
    """Moving average of the extremes of each head."""


def _per_channel(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "qscheme": torch.per_channel_symmetric}


# ----------------------------------------------------------------------------------------------------------------------
# Dynamic activations and weights


class DynamicObserver(ObserverBase):
    """Marks an activation whose scale is computed at run time; it observes nothing and only writes nodes."""

    def __init__(self, layer: str, granularity: ActivationGranularity, **_: Any) -> None:
        super().__init__(dtype=torch.int8, is_dynamic=True)
        self.layer, self.granularity = layer, granularity

    def forward(self, x: Tensor) -> Tensor:
        return x

    def broadcast_scale(self, x: Tensor) -> Tensor:
        """Scale from the data: ``()`` per tensor, ``(*x.shape[:-1], 1)`` per token."""
        return dynamic_scale(x.detach(), self.granularity)

    def calculate_qparams(self, **_: Any) -> tuple[Tensor, Tensor]:
        raise CalibrationError(f"layer {self.layer!r}: a dynamic activation has no scale before the model runs")

    def convert(self, model: GraphModule, node: Node) -> None:
        """Replace the observer by qframework.dynamic_quantize and qframework.dequantize."""
        dtype, graph = float_dtype(node), model.graph
        with graph.inserting_before(node):
            arguments = (node.args[0], self.granularity)
            pair = graph.call_function(torch.ops.qframework.dynamic_quantize.default, arguments)
            q = graph.call_function(operator.getitem, (pair, 0))
            scale = graph.call_function(operator.getitem, (pair, 1))
            dq = graph.call_function(torch.ops.qframework.dequantize.default, (q, scale, dtype))
            pair.meta[FROM_NODE_KEY] = [NodeSource(node, "convert", [NodeSourceAction.CREATE])]
            replace_observer(model, node, q, dq)
        write_detaches(model)


class WeightObserver(ObserverBase):
    """Scale of a weight ``(N, K)``, computed from the weight at conversion; weights need no calibration.

    After ``keep_rounding`` the scale is fixed, and the weight holds multiples of it.
    """

    def __init__(self, layer: str, config: WeightConfig, **_: Any) -> None:
        super().__init__(dtype=torch.int8)
        self.layer, self.config = layer, config
        self.weight_scale: Tensor
        # used only if another quantizer's nodes are between the weight and its observer
        self.register_buffer("weight_scale", torch.empty(0), persistent=False)
        self.float_weight: Tensor | None
        self.register_buffer("float_weight", None, persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        if self.weight_scale.numel() == 0:
            self.check(weight)
            self.weight_scale = self.current_scale(weight)
        return weight

    def keep_rounding(self, scale: Tensor, float_weight: Tensor) -> None:
        """Fix the scale ``(N,)`` or ``(1,)`` after the weight was replaced by multiples of it.

        ``float_weight (N, K)`` is the original weight, for later comparisons with the float model.
        """
        self.weight_scale, self.float_weight = scale, float_weight

    def current_scale(self, weight: Tensor) -> Tensor:
        """The scale ``(N,)`` or ``(1,)`` float32 of ``weight``, or the one that ``keep_rounding`` fixed."""
        if self.float_weight is not None:
            return self.weight_scale
        search = mse_weight_scale if self.config.observer == "mse" else weight_scale
        return search(weight.detach(), self.config.granularity)

    def broadcast_scale(self, weight: Tensor) -> Tensor:
        """``current_scale`` as ``(N, 1)`` or ``(1, 1)``."""
        return self.current_scale(weight).unsqueeze(-1)

    def check(self, weight: Tensor) -> None:
        """Raise CalibrationError if the weight holds NaN or infinity."""
        if not bool(torch.isfinite(weight).all()):
            raise CalibrationError(f"layer {self.layer!r}: the weight must be finite, got NaN or infinity")

    def calculate_qparams(self, **_: Any) -> tuple[Tensor, Tensor]:
        if self.weight_scale.numel() == 0:
            raise CalibrationError(f"layer {self.layer!r}: the weight was never observed. Run the prepared model once")
        return self.weight_scale, torch.zeros_like(self.weight_scale, dtype=torch.int64)

    def convert(self, model: GraphModule, node: Node) -> None:
        """Replace the observer by quantize and dequantize, which torchao then folds into an int8 parameter."""
        observed: Any = node.args[0]
        if observed.op == "get_attr":
            self.check(attribute(model, observed))
            self.weight_scale = self.current_scale(attribute(model, observed))
            _move_to_top_level(model, observed)
        scale, _ = self.calculate_qparams()
        with model.graph.inserting_before(node):
            if self.config.granularity == "per_tensor":
                replace_by_per_tensor(model, node, float(scale), float_dtype(node))
            else:
                name = f"{attribute_name(self.layer)}_weight"
                replace_by_per_channel(model, node, scale, name, float_dtype(node))


def mse_weight_scale(weight: Tensor, granularity: WeightGranularity) -> Tensor:
    """Scale of least squared error of a weight ``(N, K)``: ``(N,)`` or ``(1,)``; 16 candidates to an octave, 3 octaves.

    Errors are computed for the weight divided by its largest magnitude, so that tiny weights do not underflow.
    """
    rows = weight.detach().float()
    rows = rows if granularity == "per_channel" else rows.reshape(1, -1)
    if rows.numel() == 0:
        return weight_scale(weight, granularity)
    amax = rows.abs().amax(1, keepdim=True)
    relative = rows / amax.clamp(min=MIN_SCALE)
    best = torch.ones_like(amax)
    best_error = torch.full_like(amax, float("inf"))
    for k in range(3 * 16):
        step = 2 ** (-k / 16) / QMAX
        error = (relative - torch.round(relative / step).clamp(QMIN, QMAX) * step).square().sum(1, keepdim=True)
        best = torch.where(error < best_error, step * QMAX, best)
        best_error = torch.minimum(error, best_error)
    return scale_from_amax(amax * best).squeeze(1)


def _move_to_top_level(model: GraphModule, node: Node) -> None:
    """Rename ``blocks.0.fc1.weight`` to ``_float_blocks_0_fc1_weight``, so that torchao frees it after folding.

    torchao's constant folding deletes attributes of the top module only; others would stay in memory unused.
    """
    owner, _, leaf = node.target.rpartition(".")  # type: ignore[union-attr]
    sharing = [other for other in model.graph.find_nodes(op="get_attr") if other.target == node.target]
    if not owner or len(sharing) > 1:
        return
    name = f"_float_{attribute_name(str(node.target))}"
    setattr(model, name, attribute(model, node))
    delattr(model.get_submodule(owner), leaf)
    node.target = name


# ----------------------------------------------------------------------------------------------------------------------
# By name

_PER_TENSOR: dict[str, Any] = {
    "minmax": PerTensorMinMax,
    "moving_average": PerTensorMovingAverage,
    "percentile": PercentileObserver,
    "mse": MSEObserver,
    "entropy": EntropyObserver,
}
_AFFINE: dict[str, Any] = {
    "minmax": PerTensorAffineMinMax,
    "moving_average": PerTensorAffineMovingAverage,
    "percentile": AffinePercentileObserver,
    "mse": AffineMSEObserver,
}
_PER_TOKEN: dict[str, Any] = {"minmax": PerTokenMinMax, "moving_average": PerTokenMovingAverage}
_PER_HEAD: dict[str, Any] = {"minmax": PerHeadMinMax, "moving_average": PerHeadMovingAverage}


def activation_observer(config: ActivationConfig, layer: str, positions: tuple[int, ...]) -> Callable[..., Any]:
    """Constructor of the observer of ``config`` for the activation of ``layer``, as QuantizationSpec takes it.

    ``positions`` are the dimensions between batch and channels; only static per-token observers use them.
    """
    if config.dynamic:
        return DynamicObserver.with_args(layer=layer, granularity=config.granularity)
    arguments = dict(config.observer_args)
    if config.granularity == "per_token":
        return _PER_TOKEN[config.observer].with_args(layer=layer, positions=positions, **arguments)
    per_tensor = _PER_TENSOR if config.symmetric else _AFFINE
    return per_tensor[config.observer].with_args(layer=layer, **arguments)


def per_head_observer(config: AttentionConfig, layer: str, heads_axis: int) -> Callable[..., Any]:
    """Constructor of the observer of queries, keys or values whose dimension ``heads_axis`` are the heads."""
    return _PER_HEAD[config.observer].with_args(layer=layer, heads_axis=heads_axis, **dict(config.observer_args))


def weight_observer(config: WeightConfig, layer: str) -> Callable[..., Any]:
    """Constructor of the observer of a weight."""
    return WeightObserver.with_args(layer=layer, config=config)
