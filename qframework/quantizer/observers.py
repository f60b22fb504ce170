"""Observers: what calibration remembers of a tensor, and the quantize and dequantize nodes written from it.

All are symmetric INT8 with ``scale = threshold / 127`` (qframework.numerics); they differ in the threshold:

===================  =================================================================================================
``minmax``           largest magnitude seen (torchao's MinMaxObserver and PerChannelMinMaxObserver)
``moving_average``   moving average of each batch's extremes (torchao's)
``percentile``       magnitude below which a given percentage of all values lie
``mse``              threshold of least mean squared quantization error
``entropy``          threshold of least Kullback-Leibler divergence between the values and their quantization
===================  =================================================================================================

The last three read one histogram of magnitudes. torchao's HistogramObserver is not used: it searches a signed range
greedily and resamples its counts when the range grows, whereas the counts here stay exact.

Every observer knows the layer it belongs to. Converting raises CalibrationError with that name when nothing was
observed, or NaN or infinity was. ``convert(model, node)`` is torchao's hook for observers that write their own nodes.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.traceback import NodeSource, NodeSourceAction
from torchao.quantization.pt2e import FROM_NODE_KEY
from torchao.quantization.pt2e.observer import (
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    ObserverBase,
    PartialWrapper,
    PerChannelMinMaxObserver,
)
from torchao.quantization.pt2e.utils import create_getattr_from_value

import qframework.kernels  # noqa: F401  registers the operators that convert() writes
from qframework.errors import CalibrationError
from qframework.numerics import (
    MIN_SCALE,
    QMAX,
    QMIN,
    ActivationGranularity,
    WeightGranularity,
    scale_from_amax,
    weight_scale,
)
from qframework.quantizer.config import ActivationConfig, WeightConfig

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
    _finish(model, node, q, dq)


def replace_by_per_channel(model: GraphModule, node: Node, scale: Tensor, name: str, dtype: torch.dtype) -> None:
    """``node`` to quantize and dequantize along dimension 0 with ``scale (N,)`` kept in buffers called ``name``."""
    zero_point = torch.zeros_like(scale, dtype=torch.int64)
    scales = create_getattr_from_value(model, model.graph, f"{name}_scale_", scale, scale.device)
    zeros = create_getattr_from_value(model, model.graph, f"{name}_zero_point_", zero_point, scale.device)
    qparams = (scales, zeros, 0, QMIN, QMAX, torch.int8)
    q = model.graph.call_function(_DECOMPOSED.quantize_per_channel.default, (node.args[0], *qparams))
    dq = model.graph.call_function(_DECOMPOSED.dequantize_per_channel.default, (q, *qparams), _out_dtype(dtype))
    _finish(model, node, q, dq)


def _out_dtype(dtype: torch.dtype) -> dict[str, Any]:
    return {} if dtype == torch.float32 else {"out_dtype": dtype}


def _finish(model: GraphModule, node: Node, q: Node, dq: Node) -> None:
    """Hand the observer's users to ``dq`` and leave the traces that torchao's tools and later observers look for."""
    source = [NodeSource(node, "replace_observer_with_quantize_dequantize_node", [NodeSourceAction.CREATE])]
    for new in (q, dq):
        new.meta[FROM_NODE_KEY] = source
    observed: Any = node.args[0]
    if "val" in observed.meta:
        dq.meta["val"] = observed.meta["val"]
    node.replace_all_uses_with(dq)
    model.graph.erase_node(node)


# ----------------------------------------------------------------------------------------------------------------------
# Extremes: torchao's observers, which know their layer


class _ExtremesObserver(StaticObserver):
    """Reads torchao's ``min_val`` and ``max_val``; NaN and infinity stick to them and need no pass over the data."""

    min_val: Tensor
    max_val: Tensor

    def _is_new(self) -> bool:
        return bool(self.min_val.numel() == 0 or (self.min_val > self.max_val).all())

    def threshold(self) -> Tensor | None:
        return None if self._is_new() else torch.maximum(-self.min_val, self.max_val).float()

    def nonfinite(self) -> Tensor:
        held = torch.isfinite(self.min_val) & torch.isfinite(self.max_val)
        return ~(held | (self.min_val > self.max_val)).all()


class PerTensorMinMax(_ExtremesObserver, MinMaxObserver):
    """Largest magnitude seen: one scale."""

    def __init__(self, layer: str, **kwargs: Any) -> None:
        super().__init__(eps=MIN_SCALE, **kwargs)
        self.layer = layer


class PerTensorMovingAverage(_ExtremesObserver, MovingAverageMinMaxObserver):
    """Moving average of the extremes of each batch: one scale."""

    def __init__(self, layer: str, **kwargs: Any) -> None:
        super().__init__(eps=MIN_SCALE, **kwargs)
        self.layer = layer


class _PositionObserver(_ExtremesObserver):
    """One scale for each position of ``(B, *positions, C)``, ``(*positions, C)`` when the activation has no batch.

    torchao's per-channel observers keep the extremes of dimension 1 of a view ``(B, number of positions, C)``.
    """

    positions: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:
        if x.numel():
            flat = x.reshape(-1, self._number_of_positions(), x.shape[-1])
            super().forward(flat)  # type: ignore[misc]
        return x

    def _number_of_positions(self) -> int:
        return torch.Size(self.positions).numel()

    def scale(self) -> Tensor:
        return super().scale().reshape(*self.positions, 1)

    def convert(self, model: GraphModule, node: Node) -> None:
        """Replace the observer by qframework.quantize and qframework.dequantize; scales ``(*positions, 1)``."""
        dtype, scale = float_dtype(node), self.scale()
        with model.graph.inserting_before(node):
            name = f"{attribute_name(self.layer)}_input_scale_"
            scales = create_getattr_from_value(model, model.graph, name, scale, scale.device)
            q = model.graph.call_function(torch.ops.qframework.quantize.default, (node.args[0], scales))
            dq = model.graph.call_function(torch.ops.qframework.dequantize.default, (q, scales, dtype))
            _finish(model, node, q, dq)


class PerTokenMinMax(_PositionObserver, PerChannelMinMaxObserver):
    """Largest magnitude seen at each position."""

    def __init__(self, layer: str, positions: tuple[int, ...], **kwargs: Any) -> None:
        super().__init__(ch_axis=1, eps=MIN_SCALE, **_per_channel(kwargs))
        self.layer, self.positions = layer, positions


class PerTokenMovingAverage(_PositionObserver, MovingAveragePerChannelMinMaxObserver):
    """Moving average of the extremes of each position."""

    def __init__(self, layer: str, positions: tuple[int, ...], **kwargs: Any) -> None:
        super().__init__(ch_axis=1, eps=MIN_SCALE, **_per_channel(kwargs))
        self.layer, self.positions = layer, positions


def _per_channel(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "qscheme": torch.per_channel_symmetric}


# ----------------------------------------------------------------------------------------------------------------------
# Histogram of magnitudes


class MagnitudeHistogram(StaticObserver, ObserverBase):
    """Counts of ``|x|`` in equal bins over ``[0, limit]``, in int64.

    ``limit`` starts at the first batch's maximum and doubles when a value exceeds it: pairs of bins then merge, so that
    earlier counts stay exact and at least half of the bins stay in use.
    """

    counts: Tensor  # (bins,) int64
    limit: Tensor  # () float64, 0 before the first batch
    amax: Tensor  # () float32, largest magnitude seen
    held_nonfinite: Tensor  # () bool

    def __init__(self, layer: str, bins: int, **_: Any) -> None:
        super().__init__(dtype=torch.int8)
        self.layer, self.bins = layer, bins
        self.register_buffer("counts", torch.zeros(bins, dtype=torch.int64))
        self.register_buffer("limit", torch.tensor(0.0, dtype=torch.float64))
        self.register_buffer("amax", torch.tensor(0.0))
        self.register_buffer("held_nonfinite", torch.tensor(False))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Count the magnitudes of ``x`` (any shape and float dtype) and return ``x``."""
        if x.numel() == 0:
            return x
        magnitude = x.detach().abs().float()
        amax = magnitude.amax()
        if not bool(torch.isfinite(amax)):
            self.held_nonfinite.fill_(True)
            return x
        self._grow(amax)
        width = float(self.limit) / self.bins
        index = (magnitude / width).to(torch.int64).clamp_(max=self.bins - 1)
        self.counts += torch.bincount(index.flatten(), minlength=self.bins)
        return x

    def _grow(self, amax: Tensor) -> None:
        self.amax.copy_(torch.maximum(self.amax, amax))
        if float(self.limit) == 0:
            self.limit.copy_(amax.clamp(min=MIN_SCALE * QMAX))
        while float(self.limit) < float(amax):
            pairs = self.counts.reshape(-1, 2).sum(1)
            self.counts.zero_()[: pairs.numel()] = pairs
            self.limit.mul_(2)

    def nonfinite(self) -> Tensor:
        return self.held_nonfinite

    def threshold(self) -> Tensor | None:
        if not bool(self.counts.any()):
            return None
        counts = self.counts.cpu().double()
        threshold = self.search(counts, float(self.limit) / self.bins)
        return self.amax.new_tensor(threshold).minimum(self.amax)

    @abstractmethod
    def search(self, counts: Tensor, width: float) -> float:
        """Threshold from ``counts (bins,)`` float64 on the CPU of bins ``width`` wide."""


class PercentileObserver(MagnitudeHistogram):
    """Magnitude below which ``percentile`` percent of all observed values lie, interpolated within a bin."""

    def __init__(self, layer: str, percentile: float = 99.99, bins: int = 16384, **kwargs: Any) -> None:
        super().__init__(layer, bins, **kwargs)
        self.percentile = percentile

    def search(self, counts: Tensor, width: float) -> float:
        below = counts.cumsum(0)
        wanted = self.percentile / 100 * float(below[-1])
        bin_ = int(torch.searchsorted(below, wanted).clamp(max=self.bins - 1))
        inside = float(counts[bin_])
        missing = wanted - (float(below[bin_]) - inside)
        return (bin_ + (missing / inside if inside else 1.0)) * width


class MSEObserver(MagnitudeHistogram):
    """Threshold of least mean squared error of quantize then dequantize, clipping included.

    Candidates are 16 to an octave below the largest magnitude, down to a quantization step one bin wide: steps narrower
    than that cannot be told apart by the histogram. The error curve is flat at its minimum, so a finer search gains
    less than a percent of error.
    """

    def __init__(self, layer: str, bins: int = 8192, **kwargs: Any) -> None:
        super().__init__(layer, bins, **kwargs)

    def search(self, counts: Tensor, width: float) -> float:
        used = counts.nonzero().flatten()
        # four points stand for the values of a bin: its middle alone resonates with steps of a few bins
        points = ((used.unsqueeze(1) + (torch.arange(4, dtype=torch.float64) + 0.5) / 4) * width).flatten()
        weights = counts[used].repeat_interleave(4)
        amax = float(self.amax)
        candidates = [amax * 2 ** (-k / 16) for k in range(16 * 20)]
        candidates = [c for c in candidates if c >= QMAX * width] or [amax]
        errors = torch.stack([_squared_error(points, weights, c) for c in candidates])
        return candidates[int(errors.argmin())]


def _squared_error(points: Tensor, weights: Tensor, threshold: float) -> Tensor:
    scale = max(threshold / QMAX, MIN_SCALE)
    rounded = torch.round(points / scale).clamp(max=QMAX) * scale
    return torch.dot((points - rounded).square(), weights)


class EntropyObserver(MagnitudeHistogram):
    """Threshold of least Kullback-Leibler divergence KL(P || Q).

    P is the histogram up to the threshold with everything above added to its last bin. Q is the histogram up to the
    threshold on the 128 levels of ``|q|``: the mass of a level spreads evenly over the level's bins that P uses.
    """

    def __init__(self, layer: str, bins: int = 2048, **kwargs: Any) -> None:
        super().__init__(layer, bins, **kwargs)

    def search(self, counts: Tensor, width: float) -> float:
        top = int(counts.nonzero().max()) + 1
        candidates = [*range(QMAX + 1, top, max(1, top // 256)), top]
        divergences = torch.stack([_divergence(counts, n) for n in candidates])
        return candidates[int(divergences.argmin())] * width


def _divergence(counts: Tensor, n: int) -> Tensor:
    """KL(P || Q) for a threshold at the upper end of bin ``n - 1``; infinite where Q misses a value of P."""
    inside = counts[:n]
    p = inside.clone()
    p[-1] += counts[n:].sum()
    level = torch.round((torch.arange(n, dtype=torch.float64) + 0.5) * (QMAX / n)).long()
    used = (p > 0).double()
    mass = torch.zeros(QMAX + 1, dtype=torch.float64).scatter_add_(0, level, inside)
    members = torch.zeros(QMAX + 1, dtype=torch.float64).scatter_add_(0, level, used)
    q = used * (mass / members.clamp(min=1))[level]
    if not bool(inside.any()):
        return torch.tensor(float("inf"), dtype=torch.float64)
    p, q = p / p.sum(), q / q.sum()
    keep = p > 0
    return (p[keep] * (p[keep] / q[keep]).log()).sum()


# ----------------------------------------------------------------------------------------------------------------------
# Dynamic activations and weights


class DynamicObserver(ObserverBase):
    """Marks an activation whose scale comes from the data: nothing is observed, only nodes are written."""

    def __init__(self, layer: str, granularity: ActivationGranularity, **_: Any) -> None:
        super().__init__(dtype=torch.int8, is_dynamic=True)
        self.layer, self.granularity = layer, granularity

    def forward(self, x: Tensor) -> Tensor:
        return x

    def calculate_qparams(self, **_: Any) -> tuple[Tensor, Tensor]:
        raise CalibrationError(f"layer {self.layer!r}: a dynamic activation has no scale before it runs")

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
            _finish(model, node, q, dq)


class WeightObserver(ObserverBase):
    """Scale of a weight ``(N, K)``, computed from the weight itself when converting: weights need no calibration."""

    def __init__(self, layer: str, config: WeightConfig, **_: Any) -> None:
        super().__init__(dtype=torch.int8)
        self.layer, self.config = layer, config
        self.weight_scale: Tensor
        # seen only where another quantizer stands between the weight and its observer
        self.register_buffer("weight_scale", torch.empty(0), persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        if self.weight_scale.numel() == 0:
            self.weight_scale = self._scale_of(weight.detach())
        return weight

    def _scale_of(self, weight: Tensor) -> Tensor:
        """``(N,)`` or ``(1,)`` float32."""
        if not bool(torch.isfinite(weight).all()):
            raise CalibrationError(
                f"layer {self.layer!r}: its weight holds NaN or infinity; finite values are accepted"
            )
        search = mse_weight_scale if self.config.observer == "mse" else weight_scale
        return search(weight, self.config.granularity)

    def calculate_qparams(self, **_: Any) -> tuple[Tensor, Tensor]:
        if self.weight_scale.numel() == 0:
            raise CalibrationError(f"layer {self.layer!r}: its weight was never observed; run the prepared model once")
        return self.weight_scale, torch.zeros_like(self.weight_scale, dtype=torch.int64)

    def convert(self, model: GraphModule, node: Node) -> None:
        """Replace the observer by quantize and dequantize, which torchao then folds into an int8 parameter."""
        observed: Any = node.args[0]
        if observed.op == "get_attr":
            self.weight_scale = self._scale_of(_attribute(model, observed.target).detach())
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

    Squared errors are taken of the weight over its largest magnitude, so that tiny weights do not underflow.
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


def _attribute(model: GraphModule, target: str) -> Tensor:
    value: Any = model
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _move_to_top_level(model: GraphModule, node: Node) -> None:
    """Rename ``blocks.0.fc1.weight`` to ``_float_blocks_0_fc1_weight``, so that torchao frees it once it is folded.

    torchao's constant folding deletes attributes of the top module only; others would stay, in float, unused.
    """
    owner, _, leaf = node.target.rpartition(".")  # type: ignore[union-attr]
    sharing = [other for other in model.graph.find_nodes(op="get_attr") if other.target == node.target]
    if not owner or len(sharing) > 1:
        return
    name = f"_float_{attribute_name(str(node.target))}"
    setattr(model, name, _attribute(model, str(node.target)))
    delattr(model.get_submodule(owner), leaf)
    node.target = name


def attribute_name(layer: str) -> str:
    """``blocks.0.fc1`` as a buffer's name."""
    return layer.replace(".", "_") or "model"


# ----------------------------------------------------------------------------------------------------------------------
# By name

_PER_TENSOR: dict[str, Any] = {
    "minmax": PerTensorMinMax,
    "moving_average": PerTensorMovingAverage,
    "percentile": PercentileObserver,
    "mse": MSEObserver,
    "entropy": EntropyObserver,
}
_PER_TOKEN: dict[str, Any] = {"minmax": PerTokenMinMax, "moving_average": PerTokenMovingAverage}


def activation_observer(config: ActivationConfig, layer: str, positions: tuple[int, ...]) -> PartialWrapper:
    """Constructor of the observer of ``config`` for the activation of ``layer``, as QuantizationSpec takes it.

    ``positions`` are the dimensions between batch and channels; only static per-token observers use them.
    """
    if config.dynamic:
        return DynamicObserver.with_args(layer=layer, granularity=config.granularity)
    arguments = dict(config.observer_args)
    if config.granularity == "per_token":
        return _PER_TOKEN[config.observer].with_args(layer=layer, positions=positions, **arguments)
    return _PER_TENSOR[config.observer].with_args(layer=layer, **arguments)


def weight_observer(config: WeightConfig, layer: str) -> PartialWrapper:
    """Constructor of the observer of a weight."""
    return WeightObserver.with_args(layer=layer, config=config)
