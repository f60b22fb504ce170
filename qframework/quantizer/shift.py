"""Shifting: channels that are not centred around zero are, so that symmetric quantization wastes no range.

A linear computes the same from an input without a constant c for each channel, with another bias::

    y = x W^T + b = (x - c) W^T + (b + W c)

``x - c`` costs nothing where c can be subtracted from a bias before: that of a norm, or of the values of attention,
whose weights sum to one in each row (qframework/graph/channel_groups.py). Keys may be shifted too, since the softmax
does not see it: static attention then quantizes what SageAttention calls smooth keys, with constants from calibration.
Shifts of channels are from Outlier Suppression+ (Wei et al., arXiv:2304.09145), which uses the middle of their range.
Here the mean and the median are candidates too: scales per token follow most values, not the extremes.

Behind a GELU no bias can take the shift. Nearly all values lie just below zero there and few are large, so that
symmetric scales per token waste up to a bit. A number is subtracted in the graph, with which the compiler begins the
quantization. It is chosen by the error of the model's output, for dynamic inputs alone: static ones have zero points.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.graph.attributes import attribute
from qframework.graph.channel_groups import ChannelGroup, Parameter, find_shift_groups
from qframework.graph.nodes import fake_value, linear_call
from qframework.numerics import dynamic_scale
from qframework.quantizer.annotate_attention import is_attention
from qframework.quantizer.annotate_linear import is_linear
from qframework.quantizer.attention_config import AttentionConfig
from qframework.quantizer.calibration import Batch
from qframework.quantizer.channel_statistics import ChannelStatistics, channel_statistics
from qframework.quantizer.config import LinearConfig
from qframework.quantizer.linear_bias import add_to_bias
from qframework.quantizer.observers import WeightObserver
from qframework.quantizer.output_error import (
    Parameters,
    Run,
    fake_quantized,
    first_examples,
    floats,
    relative_error,
)
from qframework.quantizer.quantizer import QFrameworkQuantizer, layer_name
from qframework.quantizer.smooth import CalibratedLinear

# A shift must reduce the squared error of the layers that read it, or of the model's output, by this share.
_GAIN = 0.05
# Shares of the middle of a token's range that are candidates for the shift of a dynamic input.
_SHARES = (0.25, 0.5, 0.75, 1.0)
# The middle of a token's range must be this share of its largest magnitude.
_LOPSIDED = 0.2
_EXAMPLES = 4
_KEPT_META = ("nn_module_stack", "stack_trace", "torch_fn", "source_fn_stack")


def shift_channels(
    exported: GraphModule,
    quantizer: QFrameworkQuantizer,
    data: Iterable[Batch],
    *,
    samples: int = 1024,
    batches: int | None = None,
) -> dict[str, str]:
    """Subtract a constant from each channel where a bias can take it and that reduces the error, in place.

    Args:
        exported: from ``torch.export.export(...).module()``. It gets new parameters; those of the original model stay.
        quantizer: the one the graph will be prepared with.
        data: calibration batches as ``calibrate`` takes them.
        samples: rows of calibration data on which errors are measured; ranges are those of all data.
        batches: use only this many batches.

    Returns:
        ``"mean"``, ``"median"`` or ``"middle"`` for each linear whose input was shifted, by its layer's name, and
        ``"keys"`` for each static attention whose keys were.

    Raises:
        CalibrationError: no data, a batch that does not fit, or NaN or infinity in an activation.
    """
    groups = [
        (group, _quantized(group, quantizer), _static_keys(group, quantizer)) for group in find_shift_groups(exported)
    ]
    groups = [(group, linears, keys) for group, linears, keys in groups if linears or keys]
    nodes: dict[Node, None] = {}
    for group, linears, keys in groups:
        nodes |= {linear.args[0]: None for linear, _, _ in linears}  # type: ignore[misc]
        nodes |= {group.producer: None} if keys else {}
    statistics = channel_statistics(exported, data, nodes, samples, batches) if nodes else {}
    done: dict[str, str] = {}
    for group, linears, keys in groups:
        shift = torch.zeros(group.size, dtype=torch.float64, device=next(iter(statistics.values())).low.device)
        if linears:
            name, shift = _best_shift(exported, group, linears, statistics)
            done.update((layer_name(node), name) for node, _, _ in linears if name)
        for attention, channels in keys:
            shift[channels] = _middle(statistics[group.producer])[channels].double()
            done[layer_name(attention)] = "keys"
        _fold(exported, group, shift * group.free.to(shift.device))
    exported.recompile()
    return done


def _quantized(group: ChannelGroup, quantizer: QFrameworkQuantizer) -> list[tuple[Node, LinearConfig, Tensor]]:
    found = [(each.linear, quantizer.config_for(each.linear), each.channels) for each in group.consumers]
    return [(node, config, channels) for node, config, channels in found if isinstance(config, LinearConfig)]


def _static_keys(group: ChannelGroup, quantizer: QFrameworkQuantizer) -> list[tuple[Node, Tensor]]:
    """The static attention that reads keys from a group, with the channels that are keys."""
    found = []
    for node, channels in group.keys:
        config = quantizer.config_for(node) if is_attention(node) else None
        if isinstance(config, AttentionConfig) and config.is_static:
            found.append((node, channels))
    return found


def _middle(statistics: ChannelStatistics) -> Tensor:
    return (statistics.low + statistics.high) / 2


def _best_shift(
    exported: GraphModule,
    group: ChannelGroup,
    linears: list[tuple[Node, LinearConfig, Tensor]],
    statistics: dict[Node, ChannelStatistics],
) -> tuple[str, Tensor]:
    """What the shift of least error of the quantized outputs is, "" for none, and it: ``(group.size,)`` float64."""
    inputs = [statistics[node.args[0]] for node, _, _ in linears]  # type: ignore[index]

    def error(shift: Tensor) -> float:
        total = 0.0
        for seen, (node, config, channels) in zip(inputs, linears, strict=True):
            own = shift[channels.to(shift.device)].float()
            weight = attribute(exported, node.args[1]).detach().float()  # type: ignore[arg-type]
            amax = torch.maximum(seen.high - own, own - seen.low)
            layer = CalibratedLinear(layer_name(node), weight, channels.to(own.device), config, seen.rows - own, amax)
            exact = (seen.rows @ weight.T).double().square().sum().clamp(min=1e-30)
            total += layer.squared_error(torch.ones(group.size, device=own.device)) / float(exact)
        return total

    best_name, best = "", torch.zeros(group.size, dtype=torch.float64, device=inputs[0].low.device)
    least = (1 - _GAIN) * error(best)
    for name in ("mean", "median", "middle"):
        shift = torch.zeros_like(best)
        for seen, (_, _, channels) in zip(inputs, linears, strict=True):
            shift[channels.to(shift.device)] = _center(seen, name).double()
        shift *= group.free.to(shift.device)
        if (found := error(shift)) < least:
            least, best_name, best = found, name, shift
    return best_name, best


def _center(statistics: ChannelStatistics, name: str) -> Tensor:
    if name == "middle":
        return _middle(statistics)
    return statistics.rows.mean(0) if name == "mean" else statistics.rows.median(0).values


def _fold(exported: GraphModule, group: ChannelGroup, shift: Tensor) -> None:
    """Subtract ``shift (group.size,)`` from the producer's bias and add its product with the weights to theirs."""
    if not bool(shift.any()):
        return
    moved = _subtract(exported, group.parameters[0], shift)
    for consumer in group.consumers:
        weight = attribute(exported, consumer.linear.args[1]).detach().double()  # type: ignore[arg-type]
        add_to_bias(exported, consumer.linear, weight @ moved[consumer.channels.to(moved.device)])


def _subtract(exported: GraphModule, parameter: Parameter, shift: Tensor) -> Tensor:
    """Replace a bias by itself minus ``shift``; returns what was subtracted after rounding to its dtype, float64."""
    path, _, leaf = parameter.name.rpartition(".")
    owner = exported.get_submodule(path)
    old: Tensor = getattr(owner, leaf)
    new = (old.detach().double() - shift.to(old.device).reshape(old.shape)).to(old.dtype)
    setattr(owner, leaf, torch.nn.Parameter(new, old.requires_grad) if isinstance(old, torch.nn.Parameter) else new)
    return (old.detach().double() - new.double()).reshape(-1)


# ----------------------------------------------------------------------------------------------------------------------
# Dynamic inputs that no bias can shift


@torch.no_grad()
def shift_dynamic_inputs(
    exported: GraphModule,
    quantizer: QFrameworkQuantizer,
    data: Iterable[Batch],
    *,
    samples: int = 1024,
    batches: int | None = None,
    corrects_bias: bool = False,
    chosen: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Subtract a number from lopsided inputs with scales per token where the model's output gains, in place.

    Arguments and errors are those of ``shift_channels``. The model's output is that for the first examples. Products of
    rounded weights with the number are a constant error, which counts unless ``corrects_bias``. Numbers of a former
    result for this graph, ``chosen``, are subtracted without a search.

    Returns:
        The number for each linear whose input was shifted, by its layer's name.
    """
    readers = _dynamic_readers(exported, quantizer)
    if chosen is None:
        statistics = channel_statistics(exported, data, readers, samples, batches) if readers else {}
        candidates = {x: numbers for x in readers if (numbers := _numbers(statistics[x].rows))}
        taken = _search(exported, quantizer, data, readers, candidates, corrects_bias) if candidates else {}
    else:
        names = {x: layer_name(linears[0]) for x, linears in readers.items()}
        taken = {x: chosen[name] for x, name in names.items() if name in chosen}
    done: dict[str, float] = {}
    for x, number in taken.items():
        _insert(exported, x, readers[x], number)
        done.update((layer_name(node), number) for node in readers[x])
    exported.recompile()
    return done


def _search(
    exported: GraphModule,
    quantizer: QFrameworkQuantizer,
    data: Iterable[Batch],
    readers: dict[Node, list[Node]],
    candidates: dict[Node, list[float]],
    corrects_bias: bool,
) -> dict[Node, float]:
    """The number for each input where one helps the model's output."""
    example = first_examples(exported, data, _EXAMPLES)
    expected = floats(Run(exported).start(example).finish({}))
    run, taken = Run(exported).start(example), {}
    for x in sorted(candidates, key=lambda x: readers[x][0]):
        run.advance(readers[x][0])
        weights = [_weight(run, node, quantizer, exact=corrects_bias) for node in readers[x]]
        errors = {
            c: relative_error(floats(run.finish(_outputs(run, readers[x], weights, run.value(x), c))), expected)
            for c in (0.0, *candidates[x])
        }
        best = min(errors, key=errors.__getitem__)
        if errors[best] < (1 - _GAIN) * errors[0.0]:
            taken[x] = best
    return taken


def _dynamic_readers(exported: GraphModule, quantizer: QFrameworkQuantizer) -> dict[Node, list[Node]]:
    """The linears with a scale for each token, by their input, without inputs that a bias can shift."""
    free = {consumer.linear for group in find_shift_groups(exported) for consumer in group.consumers}
    found: dict[Node, list[Node]] = {}
    for node in exported.graph.nodes:
        config = quantizer.config_for(node) if is_linear(node) and node not in free and node.users else None
        activation = config.activation if isinstance(config, LinearConfig) else None
        if activation is not None and activation.dynamic and activation.granularity == "per_token":
            found.setdefault(node.args[0], []).append(node)
    return found


def _numbers(rows: Tensor) -> list[float]:
    """Candidates for the shift of inputs like ``rows (n, K)``; none if tokens are not lopsided."""
    middle, amax = float((rows.amax(1) + rows.amin(1)).median()) / 2, float(rows.abs().amax(1).median())
    return [share * middle for share in _SHARES] if abs(middle) > _LOPSIDED * amax else []


def _weight(run: Run, node: Node, quantizer: QFrameworkQuantizer, *, exact: bool) -> Tensor:
    """A weight, rounded to nearest unless ``exact``."""
    weight, config = run.value(node.args[1]), quantizer.config_for(node)  # type: ignore[arg-type]
    assert isinstance(config, LinearConfig)
    steps = Parameters(WeightObserver(layer_name(node), config.weight).broadcast_scale(weight))
    return weight if exact else fake_quantized(weight, steps)


def _outputs(run: Run, linears: list[Node], weights: list[Tensor], x: Tensor, number: float) -> dict[Node, Any]:
    """The outputs of linears that read ``x - number`` in INT8."""
    moved = x - number
    seen = fake_quantized(moved, Parameters(dynamic_scale(moved, "per_token")))
    outputs = {}
    for node, weight in zip(linears, weights, strict=True):
        call = linear_call(node)
        assert call is not None
        output = torch.nn.functional.linear(seen, weight) + run.value(call.weight).sum(1) * number
        outputs[node] = output if call.bias is None else output + run.value(call.bias)
    return outputs


def _insert(exported: GraphModule, x: Node, linears: list[Node], number: float) -> None:
    """Let ``linears`` read ``x - number``."""
    fake = fake_value(x)
    assert fake is not None
    number = float(torch.tensor(number, dtype=fake.dtype))
    with exported.graph.inserting_before(min(linears)):
        difference = exported.graph.call_function(torch.ops.aten.sub.Tensor, (x, number))
    difference.meta = {key: x.meta[key] for key in _KEPT_META if key in x.meta} | {"val": fake}
    for linear in linears:
        linear.replace_input_with(x, difference)
        weight = attribute(exported, linear.args[1]).detach().double()  # type: ignore[arg-type]
        add_to_bias(exported, linear, weight.sum(1) * number)
