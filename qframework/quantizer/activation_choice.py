"""How the input of each static linear is quantized, chosen by the error of the model's output.

No observer is the best for every layer: clipping helps one whose outliers carry nothing, and ruins one whose outliers
are the tokens in which a vision transformer keeps global information. Mean squared errors of the layers themselves do
not tell which is which. What counts is the error of the model's output if a group of linears that read one tensor, and
nothing else, has its input quantized with a candidate::

    e(group, candidate) = |output - float output|^2 / |float output|^2

Gradients estimate it for all groups and candidates at once (output_gradients.py), for up to 32 examples, since errors
differ a lot between examples. Where there are none, the float model is run to the end from each group, for 4 examples.

The candidates are the configured observer, min-max, the 99.99th percentile, the least mean squared error and, where the
range is lopsided, a zero point: behind GELU, which never goes below -0.17, symmetric scales waste nearly a bit. Scales
come from all batches but the first, errors from all if ranges have margins, else from the first: a range that fits only
the data it was found on shows. Errors of different groups nearly add up. The few groups that contribute most, the input
of ``fc2`` in the first blocks of DINOv2 for example, may compute their scales per token at run time instead, within a
budget, or their layers stay in float, which removes all of their error (layer_costs.py says at what cost).

Where channels were scaled to equal ranges, each of them ends where calibration data did, and other data exceeds many:
clipping then makes more error than rounding. A margin for ranges from extremes is found by the error of the layer's own
output on the examples that ranges do not come from. Channels that channel_scales.py scaled by how far other data is
likely to go need little more than that.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.graph.nodes import fake_value, linear_call
from qframework.numerics import MIN_AMAX, affine_parameters, dynamic_scale, scale_from_amax
from qframework.quantizer.annotate_linear import is_linear
from qframework.quantizer.calibration import Batch
from qframework.quantizer.channel_scales import LOPSIDED, is_channel_scale, unscale_channels
from qframework.quantizer.channel_statistics import channel_statistics
from qframework.quantizer.config import ActivationConfig, LinearConfig
from qframework.quantizer.hadamard_inputs import Transform, behind_norms, can_turn, is_norm
from qframework.quantizer.histogram_observers import AffineMSEObserver, MSEObserver, PercentileObserver
from qframework.quantizer.layer_costs import Costs, costs_for
from qframework.quantizer.observers import activation_observer
from qframework.quantizer.output_error import (
    Errors,
    Parameters,
    Run,
    fake_quantized,
    first_examples,
    floats,
    held_out,
    observe,
    relative_error,
    typical_error,
)
from qframework.quantizer.output_gradients import errors_by_gradients
from qframework.quantizer.quantizer import QFrameworkQuantizer, keep_in_float, layer_name, override_config

_PERCENTILE = 99.99
# A zero point must reduce the error at the output by this share, clipping by another, since the errors come from few
# examples, which do not show what clipping costs in rare tokens.
_GAIN = 0.2
_CLIPPING_GAIN = 0.5
_EXAMPLES = 4
# A dynamic scale must reduce the sum of all groups' errors by this share.
_DYNAMIC_GAIN = 0.005
_OBSERVERS: dict[str, ActivationConfig] = {
    "minmax": ActivationConfig(),
    "percentile": ActivationConfig(observer="percentile", observer_args={"percentile": _PERCENTILE}),
    "mse": ActivationConfig(observer="mse"),
}
_CLIPPING = _OBSERVERS.keys() - {"minmax"}
_ZERO_POINT = "zero_point"
# Shares by which a range may be wider than the calibration data: at least the first, since rare tokens that go far
# beyond it harm a model more than they count in the error of a few examples.
MARGINS = (0.2, 0.3, 0.5)
# The same for channels that were scaled by how far other data is likely to go.
_MARGINS_OF_REACHES = (0.0, 0.1, 0.2, 0.3, 0.5)
# By how much the range of a channel may seem to grow with new data; it was nearly zero before if by more.
_LARGEST_GROWTH = 4.0
_DYNAMIC = ActivationConfig("per_token", dynamic=True)
_CANDIDATES = {**_OBSERVERS, _ZERO_POINT: ActivationConfig(symmetric=False), "dynamic": _DYNAMIC}
_FLOAT = "float"


@dataclass
class _Group:
    """Linears that read one tensor with one static configuration, and what was measured of it."""

    input: Node
    linears: list[Node]
    config: ActivationConfig
    parameters: dict[str, Parameters]
    errors: dict[str, float]
    turns: bool = False  # transformed if dynamic (hadamard_inputs.py)
    behind_norm: bool = False
    rows: int = 1  # of the examples, so that costs of layers with different numbers of tokens compare
    costs: Costs = field(init=False, repr=False)  # where it runs; set when it is measured, as rows are
    margins: dict[str, float] = field(default_factory=dict)  # by candidate, those that are not 0

    @property
    def names(self) -> list[str]:
        return [layer_name(node) for node in self.linears]

    def best(self, allowed: set[str]) -> str:
        """The static candidate to use: the configured observer, named ``""``, unless another is clearly better."""
        gains = {name: _CLIPPING_GAIN if name in _OBSERVERS else _GAIN for name in self.errors if name in allowed}
        names = [name for name, gain in gains.items() if self.errors[name] < (1 - gain) * self.errors[""]]
        return min(names, key=self.errors.__getitem__, default="")

    def activation(self, name: str) -> tuple[ActivationConfig, str]:
        """The configuration of a candidate with its margin, and what it is called."""
        config, margin = _CANDIDATES.get(name, self.config), self.margins.get(name, 0.0)
        if not margin:
            return config, name
        return replace(config, observer_args={"margin": margin}), f"{name} + {margin}".lstrip()

    @property
    def width(self) -> int:
        fake = fake_value(self.input)
        return int(fake.shape[-1]) if fake is not None else 0

    @property
    def outputs(self) -> int:
        """Channels of all linears."""
        fakes = [fake_value(node) for node in self.linears]
        return sum(int(fake.shape[-1]) for fake in fakes if fake is not None)

    def cost(self, name: str) -> float:
        """Seconds that a candidate takes at run time, more than a scale per tensor."""
        if name == "dynamic":
            return self.costs.per_token(self.rows, self.width, behind_norm=self.behind_norm)
        if name == _FLOAT:
            return self.costs.in_float(self.rows, self.width, self.outputs)
        return self.costs.zero_point(self.rows, self.width) if name == _ZERO_POINT else 0.0


def choose_activations(
    exported: GraphModule,
    quantizer: QFrameworkQuantizer,
    data: Iterable[Batch],
    *,
    observers: bool = True,
    zero_points: bool = False,
    margins: bool = False,
    reach: bool = False,
    dynamic_share: float = 0.0,
    float_layers: bool = False,
    device: str | None = None,
    hadamard: bool = False,
    batches: int | None = None,
    judge: Callable[[], Errors] | None = None,
) -> dict[str, str]:
    """Choose an observer for each static input per tensor, and the inputs with zero points or dynamic scales, in place.

    The choice is recorded at the nodes of ``exported``, where ``quantizer`` and every other quantizer of this package
    find it; the rules of ``quantizer`` do not change.

    Args:
        exported: from ``torch.export.export(...).module()``.
        quantizer: the one the graph will be prepared with.
        data: calibration batches as ``calibrate`` takes them.
        observers: whether to choose observers; needs at least two batches, or one that can be divided.
        zero_points: whether a lopsided input may have a zero point, an addition in the layer before; needs the same.
        margins: whether ranges from extremes may be wider than calibration data; needs the same.
        reach: whether ``scale_channels`` scaled channels by how far other data is likely to go, so that margins start
            from there.
        dynamic_share: dynamic inputs may take at most this share of the time that dynamic scales would take if all
            groups had them (layer_costs.py), besides that of zero points.
        float_layers: whether layers that are not behind a norm may stay in float within this budget.
        device: whose prices count (layer_costs.py), ``"cpu"`` or ``"cuda"``; None for that and the dtype of the model.
        hadamard: whether dynamic inputs will be transformed as in qframework/quantizer/hadamard_inputs.py.
        batches: use only this many batches.
        judge: measures the errors of the output with everything quantized. The observers, or the whole choice, are
            dropped if the typical error is smaller without them: errors of clipping, which have a direction, do not
            just add up. The observers are also dropped if they more than double the error of the worst tokens.

    Returns:
        ``"minmax"``, ``"percentile"``, ``"mse"``, ``"zero_point"`` (min-max with one), ``"dynamic"`` or ``"float"`` for
        each layer that does not keep its configuration; with a margin such as ``"zero_point + 0.2"``, or ``"+ 0.2"``.

    Raises:
        CalibrationError: no data, a batch that does not fit, or NaN or infinity in an activation.
    """
    groups = _groups(exported, quantizer)
    if not groups:
        return {}
    behind = behind_norms(exported)
    for group in groups:
        group.turns = hadamard and can_turn(group.input, group.linears, behind)
        group.behind_norm = is_norm(group.input) or behind.issuperset(group.linears)
    judged, fitted = held_out(exported, data, batches)
    harmless = {_ZERO_POINT} if zero_points and judged else set()  # clips nothing that calibration saw
    allowed = harmless | ({*_OBSERVERS} if observers and judged else set())
    _observe(exported, groups, fitted, {"", *allowed})
    groups = [group for group in groups if group.parameters]
    if margins and judged:
        _widen(exported, groups, fitted, first_examples(exported, judged, 2 * _EXAMPLES), reach)
    example = first_examples(exported, judged or fitted, _EXAMPLES)
    # ranges with margins hardly clip the data that they come from, so that it may judge them as well
    examples = [*judged, *fitted] if margins and judged else judged or fitted
    _measure(exported, groups, example, examples, device, dynamic=dynamic_share > 0)
    propose = functools.partial(_proposal, groups, dynamic_share, float_layers)
    proposals = [propose(allowed)]
    if judge is None:
        return _chosen(exported, groups, quantizer, proposals[0])
    proposals += [propose(fewer) for fewer in (harmless, set()) if fewer < allowed]
    errors = {-1: judge()}
    for i, proposal in enumerate(proposals):
        if proposal:
            _apply(groups, quantizer, proposal)
            errors[i] = judge()
            _apply(groups, quantizer, {})
    best = _least(errors, {i for i, proposal in enumerate(proposals) if _CLIPPING & set(proposal.values())})
    return _chosen(exported, groups, quantizer, proposals[best]) if best >= 0 else {}


def _least(errors: dict[int, Errors], clipping: set[int]) -> int:
    """The proposal of least typical error, or another one if that is one of ``clipping`` and ruins the worst tokens.

    The others may be equal for typical tokens and differ for the worst, so that both errors decide among them.
    """
    best = min(errors, key=lambda i: errors[i].typical)
    if best not in clipping:
        return best
    careful = min(errors.keys() - clipping, key=lambda i: errors[i].typical * errors[i].worst)
    return careful if errors[best].ruins_few(errors[careful]) else best


def _proposal(groups: list[_Group], dynamic_share: float, float_layers: bool, allowed: set[str]) -> dict[int, str]:
    """The choice for each group that does not keep its configuration, by its place, among ``allowed`` candidates."""
    best = [group.best(allowed) for group in groups]
    chosen = {i: name for i, name in enumerate(best) if name or groups[i].margins.get(name)}
    return chosen | _most_harmful(groups, dynamic_share, float_layers, best)


def _chosen(
    exported: GraphModule, groups: list[_Group], quantizer: QFrameworkQuantizer, proposal: dict[int, str]
) -> dict[str, str]:
    """Record the final choice; layers in float no longer read products with scales of channels."""
    chosen = _apply(groups, quantizer, proposal)
    for node in (node for i, name in proposal.items() if name == _FLOAT for node in groups[i].linears):
        unscale_channels(exported, node)
    return chosen


def _apply(groups: list[_Group], quantizer: QFrameworkQuantizer, proposal: dict[int, str]) -> dict[str, str]:
    """Record a proposal at the nodes, and nothing at the others. Returns it by layer."""
    chosen: dict[str, str] = {}
    for i, group in enumerate(groups):
        for node in group.linears:
            override_config(node, None)
            if proposal.get(i) == _FLOAT:
                keep_in_float(node)
                chosen[layer_name(node)] = _FLOAT
            elif i in proposal:
                activation, name = group.activation(proposal[i])
                config = quantizer.config_for(node)
                assert isinstance(config, LinearConfig)
                override_config(node, replace(config, activation=activation))
                chosen[layer_name(node)] = name
    return chosen


def _groups(exported: GraphModule, quantizer: QFrameworkQuantizer) -> list[_Group]:
    """Groups of linears that share an observer, in graph order."""
    found: dict[tuple[Node, ActivationConfig], _Group] = {}
    for node in exported.graph.nodes:
        config = quantizer.config_for(node) if is_linear(node) and node.users else None
        if not isinstance(config, LinearConfig) or config.activation.dynamic or config.output == "always":
            continue
        if config.activation.granularity == "per_tensor":
            x: Any = node.args[0]
            group = found.setdefault((x, config.activation), _Group(x, [], config.activation, {}, {}))
            group.linears.append(node)
    return list(found.values())


def _most_harmful(groups: list[_Group], share: float, float_layers: bool, best: list[str]) -> dict[int, str]:
    """The groups that scales per token, or staying in float, help most for their cost within the budget, by place.

    A group that is dynamic may become float later, if that still gains more for what it costs more than others do.
    """
    errors = [
        {name: group.errors[name], **_exact(group, float_layers)} for group, name in zip(groups, best, strict=True)
    ]
    least = _DYNAMIC_GAIN * sum(each[name] for each, name in zip(errors, best, strict=True))
    budget = share * sum(group.cost("dynamic") for group in groups)
    chosen = list(best)

    def cost(i: int, name: str) -> float:
        return groups[i].cost(name) - groups[i].cost(chosen[i])

    def gain(i: int, name: str) -> float:
        return errors[i][chosen[i]] - errors[i][name]

    every = [(i, name) for i, names in enumerate(errors) for name in names]
    while steps := [step for step in every if 0 < cost(*step) <= budget and gain(*step) > least]:
        i, name = max(steps, key=lambda step: gain(*step) / cost(*step))
        budget -= cost(i, name)
        chosen[i] = name
    return {i: name for i, name in enumerate(chosen) if name != best[i]}


def _exact(group: _Group, float_layers: bool) -> dict[str, float]:
    """The errors of what costs time. Those of weights do not count, though float removes them too.

    Behind a norm a scale per token costs little and leaves little.
    """
    found = {"dynamic": group.errors["dynamic"]} if "dynamic" in group.errors else {}
    return found | ({_FLOAT: 0.0} if float_layers and not group.behind_norm else {})


# ----------------------------------------------------------------------------------------------------------------------
# Measuring


def _observe(exported: GraphModule, groups: list[_Group], data: list[Batch], wanted: set[str]) -> None:
    """Sets the parameters of each ``wanted`` candidate from data; a group that saw nothing but zeros has none."""
    histograms = {group.input: AffineMSEObserver(group.names[0]) for group in groups}
    own = [_observer(group) for group in groups]
    watched: dict[Node, list[Any]] = {node: [histogram] for node, histogram in histograms.items()}
    for group, observer in zip(groups, own, strict=True):
        watched[group.input].append(observer)
    observe(exported, watched, data)
    for group, observer in zip(groups, own, strict=True):
        if not observer.has_scale():
            continue
        found = {"": Parameters.of(observer), **_parameters(histograms[group.input])}
        for name, parameters in found.items():  # equal ones are measured once
            if name in wanted and not _is_among(parameters, list(group.parameters.values())):
                group.parameters[name] = parameters


def _observer(group: _Group) -> Any:
    scheme = torch.per_tensor_symmetric if group.config.symmetric else torch.per_tensor_affine
    return activation_observer(group.config, group.names[0], ())(qscheme=scheme)


def _is_among(parameters: Parameters, others: list[Parameters]) -> bool:
    """Whether a scale is within a percent of one of the others, both with a zero point or both without."""
    return any(
        abs(float(parameters.scale) / float(other.scale) - 1) < 0.01
        and (parameters.zero_point is None) == (other.zero_point is None)
        for other in others
    )


def _parameters(both_ends: AffineMSEObserver) -> dict[str, Parameters]:
    """Those of each candidate; with a zero point only where the range is lopsided."""
    counts, width, amax = both_ends.counts.cpu().double(), float(both_ends.limit) / both_ends.bins, both_ends.amax
    percentile = PercentileObserver("", _PERCENTILE, both_ends.bins).search(counts, width)
    symmetric = MSEObserver("", both_ends.bins)
    symmetric.amax = amax
    thresholds = {"minmax": float(amax), "percentile": percentile, "mse": symmetric.search(counts, width)}
    found = {
        name: Parameters(scale_from_amax(amax.new_tensor(value).minimum(amax))) for name, value in thresholds.items()
    }
    scale, zero_point = affine_parameters(both_ends.low, both_ends.high)
    if float(scale) <= LOPSIDED * float(found["minmax"].scale):
        found[_ZERO_POINT] = Parameters(scale, zero_point)
    return found


@torch.no_grad()
def _widen(exported: GraphModule, groups: list[_Group], fitted: list[Batch], example: list[Any], reach: bool) -> None:
    """Set the margins of least error of the layers' outputs for an ``example`` that ranges do not come from.

    With ``reach`` they come on top of how far the widest channel is likely to go. Scales of channels may come from all
    data, the example included. Values are therefore multiplied by what scales from ``fitted`` alone would have
    multiplied them by, were all channels scaled to equal ranges.
    """
    seen = channel_statistics(exported, fitted, [group.input for group in groups], 1)
    run = Run(exported).start(example)
    for group in sorted(groups, key=lambda group: group.linears[0]):
        run.advance(group.linears[0])
        rows = run.value(group.input).reshape(-1, group.width)
        weights = [run.value(node.args[1]) for node in group.linears]  # type: ignore[arg-type]
        known = seen[group.input]
        whole = copy.copy(known)
        whole.add(run.value(group.input))
        reaches = reach and is_channel_scale(group.input)
        own, ends = (
            (each.reaching() if reaches else each).amax.clamp(min=MIN_AMAX)  # what channels are scaled by
            for each in (known, whole)
        )
        growth = (ends / own).clamp(max=_LARGEST_GROWTH)
        for name, narrow in group.parameters.items():
            config = _CANDIDATES.get(name, group.config)
            if config.observer == "minmax" and not config.observer_args:
                fits = narrow._replace(scale=narrow.scale * float(ends.amax() / known.amax.amax()))
                more = _MARGINS_OF_REACHES if reaches else MARGINS
                margin = _best_margin(rows * growth, [weight / growth for weight in weights], fits, more)
                margin = round((1 + margin) * float(ends.amax() / whole.amax.amax()) - 1, 2)
                group.margins[name] = margin
                group.parameters[name] = narrow._replace(scale=narrow.scale * (1 + margin))


def _best_margin(rows: Tensor, weights: list[Tensor], narrow: Parameters, margins: Sequence[float]) -> float:
    """The margin of least error of the outputs for ``rows (n, K)``."""
    errors = {}
    for margin in margins:
        wrong = fake_quantized(rows, narrow._replace(scale=narrow.scale * (1 + margin))) - rows
        errors[margin] = sum(float((wrong @ weight.T).double().square().sum()) for weight in weights)
    return min(errors, key=errors.__getitem__)


@torch.no_grad()
def _measure(
    exported: GraphModule,
    groups: list[_Group],
    example: list[Any],
    data: Iterable[Batch],
    device: str | None,
    *,
    dynamic: bool,
) -> None:
    """Sets prices, and the errors at the output of each group with each of its candidates, and dynamic on request.

    Candidates come from ``example``; errors from ``data``, or where there are no gradients from ``example`` as well.
    """
    run = Run(exported).start(example)
    for group in sorted(groups, key=lambda group: group.linears[0]):
        run.advance(group.linears[0])
        x = run.value(group.input)
        group.rows, group.costs = x.numel() // max(group.width, 1), costs_for(device, x)
        group.parameters = _promising(x, group.parameters)
    turns = dynamic and any(group.turns for group in groups)  # fitted to an example, which takes too long for each
    changes = [(group.linears, _changes(group, dynamic)) for group in groups]
    found = None if turns else errors_by_gradients(exported, data, changes)
    if found is None:
        _measure_by_runs(exported, groups, example, dynamic=dynamic)
        return
    for group, errors in zip(groups, found, strict=True):
        group.errors = errors


def _changes(group: _Group, dynamic: bool) -> Callable[[Tensor], dict[str, Tensor]]:
    def changed(x: Tensor) -> dict[str, Tensor]:
        found = {name: fake_quantized(x, each) for name, each in group.parameters.items()}
        return found | ({"dynamic": _per_token(x)} if dynamic else {})

    return changed


def _measure_by_runs(exported: GraphModule, groups: list[_Group], example: list[Any], *, dynamic: bool) -> None:
    """The rest of the model runs for each candidate."""
    expected = floats(Run(exported).start(example).finish({}))
    run = Run(exported).start(example)
    for group in sorted(groups, key=lambda group: group.linears[0]):
        run.advance(group.linears[0])
        x = run.value(group.input)
        candidates = {name: fake_quantized(x, each) for name, each in group.parameters.items()}
        if dynamic:
            candidates["dynamic"] = _dynamic(run, group, x)
        for name, value in candidates.items():
            outputs = {node: _linear(run, node, value) for node in group.linears}
            group.errors[name] = relative_error(floats(run.finish(outputs)), expected)


def _per_token(x: Tensor) -> Tensor:
    return fake_quantized(x, Parameters(dynamic_scale(x, "per_token")))


def _dynamic(run: Run, group: _Group, x: Tensor) -> Tensor:
    """``x`` with scales per token, transformed before if it will be."""
    if not group.turns:
        return _per_token(x)
    weights = [run.value(node.args[1]) for node in group.linears]  # type: ignore[arg-type]
    return Transform.fit(x.reshape(-1, group.width), weights).fake_quantized(x)


def _promising(x: Tensor, parameters: dict[str, Parameters]) -> dict[str, Parameters]:
    """The candidates without clipping that typical tokens of ``x`` do not gain from."""
    errors = {name: typical_error([fake_quantized(x, each)], [x]) for name, each in parameters.items()}
    enough = (1 - _GAIN / 2) * errors[""]
    return {name: each for name, each in parameters.items() if name not in _OBSERVERS or errors[name] < enough}


def _linear(run: Run, node: Node, x: Tensor) -> Tensor:
    call = linear_call(node)
    assert call is not None
    bias = None if call.bias is None else run.value(call.bias)
    return torch.nn.functional.linear(x, run.value(call.weight), bias)
