"""Scales of channels for inputs that no layer before them can scale, as a product with a constant in the graph.

From::

    x -> linear(W)

to the same function, with ``c = 1 / s``::

    x -> mul(c) -> linear(W * s)

Quantized with one scale S, ``round(x * c / S)`` is ``x`` quantized with a separate scale ``S / c`` for each channel. A
matrix product cannot undo scales of channels, but the weights here do. Where the input may have a zero point, as behind
GELU, scales make one range of all channels: with scales from largest magnitudes, channels whose largest value is small
would take up as much room below zero as above. The short side gets a share of the long one instead, which is the one of
least rounding error for independent errors. After a linear and its activation, the backend
computes the product before static quantization in the linear's epilogue (qframework/backend/fold_channel_scale.py);
elsewhere the compiler fuses it with the operation that it reads, or with dynamic quantization.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.graph.attributes import add_attribute, attribute
from qframework.graph.channel_groups import Parameter, find_channel_groups, multiply, only_reader
from qframework.graph.nodes import COPIES, VIEWS, fake_value, is_inactive_dropout, operation
from qframework.numerics import affine_parameters, dynamic_scale, scale_from_amax
from qframework.quantizer.annotate_linear import is_linear
from qframework.quantizer.calibration import Batch
from qframework.quantizer.channel_statistics import ChannelStatistics, channel_statistics
from qframework.quantizer.config import ActivationConfig, LinearConfig
from qframework.quantizer.observers import WeightObserver
from qframework.quantizer.output_error import (
    Parameters,
    Run,
    fake_quantized,
    first_examples,
    floats,
    held_out,
    relative_error,
    rounded_linear,
)
from qframework.quantizer.quantizer import QFrameworkQuantizer, layer_name
from qframework.quantizer.smooth import smoothing_scales

_ATTENTION = {"scaled_dot_product_attention", "matmul", "bmm", "sage_attention"}
_KEPT_META = ("val", "nn_module_stack", "stack_trace", "torch_fn", "source_fn_stack")
# A product must reduce the squared error by at least this share.
_GAIN = 0.05
_EXAMPLES = 4
_SUFFIX = "_channel_scale"
# With a zero point: how many times less the short side of the range, -0.17 behind GELU, may have than the long one.
_SHARES = (1.0, 0.5, 0.25, 0.12, 0.06, 0.03)
# Channels scaled by their reach need no room for what calibration did not see, which lower strengths give.
_OF_REACHES = 2
# With a zero point the scale must be at most this share of the symmetric one to be worth its cost.
LOPSIDED = 0.8


@torch.no_grad()
def scale_channels(
    exported: GraphModule,
    quantizer: QFrameworkQuantizer,
    data: Iterable[Batch],
    *,
    strengths: Sequence[float],
    samples: int = 1024,
    batches: int | None = None,
    zero_points: bool = False,
    rounding: float = 1.0,
    corrects_bias: bool = False,
    reach: bool = False,
    chosen: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Multiply the inputs of linears by a constant per channel where that reduces their error, in place.

    Considered are static inputs with one scale and dynamic ones with a scale per token. Excluded are inputs that a
    layer before can scale, which ``smooth`` does at no cost, and outputs of attention, which static attention writes in
    INT8. Strengths are chosen by the error of the model's output for a few examples: that of a layer consists of the
    few outlier tokens, which matter less.

    Args:
        exported: from ``torch.export.export(...).module()``. It gets new parameters; those of the original model stay.
        quantizer: the one the graph will be prepared with.
        data: calibration batches as ``calibrate`` takes them.
        strengths: candidates for the strength ``a`` of the scales, as in ``smooth``.
        samples: rows of calibration data on which the layers' errors are measured.
        batches: use only this many batches.
        zero_points: whether static inputs may get zero points afterwards.
        rounding: the share of the error of weights rounded to nearest that is left in the end.
        corrects_bias: whether biases will take the mean error that rounded weights cause.
        reach: for static scales, use how far channels of other data are likely to go instead of their extremes
            (qframework/quantizer/channel_statistics.py), and try only the two largest strengths.
        chosen: a former result for this graph; its strengths are applied to the ranges of ``data`` without a search.

    Returns:
        The strength of each linear that now reads a product, by its layer's name.

    Raises:
        CalibrationError: no data, a batch that does not fit, or NaN or infinity in an activation.
    """
    readers = _readers(exported, quantizer)
    if chosen is None:
        search = functools.partial(_outputs, rounding=rounding, corrects_bias=corrects_bias)
        judged, fitted = held_out(exported, data, batches)  # ranges of channels that fit only their own data show
        taken = _search(exported, readers, (judged or fitted, fitted), strengths, samples, zero_points, reach, search)
    else:
        names = {x: layer_name(linears[0][0]) for x, linears in readers.items()}
        taken = {x: chosen[name] for x, name in names.items() if name in chosen}
    if not taken:
        return {}
    found: dict[str, float] = {}
    seen = channel_statistics(exported, data, taken, 1, batches)
    for x, strength in taken.items():
        own = _ends(seen[x], readers[x][0][1].activation, reach)
        scale = _candidates(exported, readers[x], own, (strength,), zero_points)[strength]
        _scale(exported, x, [node for node, _ in readers[x]], scale)
        found.update((layer_name(node), strength) for node, _ in readers[x])
    exported.recompile()
    return found


def _search(
    exported: GraphModule,
    readers: dict[Node, list[tuple[Node, LinearConfig]]],
    data: tuple[list[Batch], list[Batch]],
    strengths: Sequence[float],
    samples: int,
    zero_points: bool,
    reach: bool,
    outputs: Callable[..., dict[Node, Tensor]],
) -> dict[Node, float]:
    """The strength for each input that a product helps; ``data`` is what is judged and what ranges come from."""
    if not readers:
        return {}
    statistics = channel_statistics(exported, data[1], readers, samples)
    example = first_examples(exported, data[0], _EXAMPLES)
    expected = floats(Run(exported).start(example).finish({}))
    run = Run(exported).start(example)
    taken: dict[Node, float] = {}
    for x, linears in sorted(readers.items(), key=lambda each: each[1][0][0]):
        run.advance(linears[0][0])
        config = linears[0][1].activation
        seen = _ends(statistics[x], config, reach)
        own = sorted(strengths)[-_OF_REACHES if reach and not config.dynamic else 0 :]
        scales = _candidates(exported, linears, seen, own, zero_points)

        @functools.cache
        def error(strength: float | None) -> float:
            scale = scales[strength]  # noqa: B023
            parameters = _parameters(config, seen, scale, zero_points)  # noqa: B023
            changed = outputs(run, linears, run.value(x), scale, parameters)  # noqa: B023
            return relative_error(floats(run.finish(changed)), expected)

        best = _least(error, own)
        if error(best) < (1 - _GAIN) * error(None):
            taken[x] = best
    return taken


def _least(error: Callable[[float], float], strengths: Sequence[float]) -> float:
    """The strength of least error: the best of every third, or a neighbour of it, as far as errors fall.

    Each error costs a run of the rest of the model, and errors are smooth in the strength.
    """
    at = min(range(len(strengths) // 6 and 2, len(strengths), 3), key=lambda i: error(strengths[i]))
    while True:
        near = [i for i in (at - 1, at, at + 1) if 0 <= i < len(strengths)]
        best = min(near, key=lambda i: error(strengths[i]))
        if best == at:
            return strengths[at]
        at = best


def _readers(exported: GraphModule, quantizer: QFrameworkQuantizer) -> dict[Node, list[tuple[Node, LinearConfig]]]:
    """The linears that may be scaled, by their input."""
    scaled = {consumer.linear for group in find_channel_groups(exported) for consumer in group.consumers}
    found: dict[Node, list[tuple[Node, LinearConfig]]] = {}
    for node in exported.graph.nodes:
        config = quantizer.config_for(node) if is_linear(node) and node not in scaled else None
        if not isinstance(config, LinearConfig):
            continue
        x, granularity = node.args[0], config.activation.granularity
        if (
            granularity == ("per_token" if config.activation.dynamic else "per_tensor")
            and not is_attention_output(x)
            and only_reader(exported, node)
        ):
            found.setdefault(x, []).append((node, config))
    return found


def _candidates(
    exported: GraphModule,
    linears: Sequence[tuple[Node, LinearConfig]],
    seen: ChannelStatistics,
    strengths: Sequence[float],
    zero_points: bool,
) -> dict[float | None, Tensor]:
    """Scales ``(K,)`` by strength, and ones for None."""
    weights = torch.cat([attribute(exported, node.args[1]).detach().float() for node, _ in linears])  # type: ignore[arg-type]
    amax_w, size_w = weights.abs().amax(0), weights.double().square().sum(0)
    free = torch.ones(amax_w.numel(), dtype=torch.bool, device=amax_w.device)
    config = linears[0][1].activation
    shares = _SHARES if zero_points and not config.dynamic else (1.0,)
    found: dict[float | None, Tensor] = {None: torch.ones_like(amax_w)}
    for strength in strengths:
        scales = [smoothing_scales(_reach(seen, share), amax_w, free, strength) for share in shares]
        found[strength] = min(scales, key=lambda scale: _noise(config, seen, scale, size_w, zero_points))
    return found


def _ends(seen: ChannelStatistics, config: ActivationConfig, reach: bool) -> ChannelStatistics:
    """With the extremes of other data, if wanted, for a static scale."""
    return seen.reaching() if reach and not config.dynamic else seen


def _reach(seen: ChannelStatistics, share: float) -> Tensor:
    """The larger end of each channel's range, where the lower half of the integers is ``share`` of the upper one."""
    longer_up = seen.high.max() >= -seen.low.min()
    long, short = (seen.high, -seen.low) if longer_up else (-seen.low, seen.high)
    return torch.maximum(long, short / share).clamp(min=0)


def _noise(
    config: ActivationConfig, seen: ChannelStatistics, scales: Tensor, size_w: Tensor, zero_points: bool
) -> float:
    """The variance of the output's error if rounding errors of inputs divided by ``scales`` are independent.

    The step is squared and multiplied by the squared weights of each channel, ``size_w (K,)``.
    """
    parameters = _parameters(config, seen, scales, zero_points)
    step = 1.0 if parameters is None else float(parameters.scale)
    return step**2 * float((scales.double().square() * size_w).sum())


def _parameters(
    config: ActivationConfig, seen: ChannelStatistics, scales: Tensor, zero_points: bool
) -> Parameters | None:
    """How an input divided by ``scales`` will be quantized; None for scales per token."""
    if config.dynamic:
        return None
    low, high = (seen.low / scales).min(), (seen.high / scales).max()
    symmetric = Parameters(scale_from_amax(torch.maximum(-low, high)))
    affine = Parameters(*affine_parameters(low, high))
    lopsided = zero_points and float(affine.scale) <= LOPSIDED * float(symmetric.scale)
    return affine if lopsided or not config.symmetric else symmetric


def _outputs(
    run: Run,
    linears: Sequence[tuple[Node, LinearConfig]],
    x: Tensor,
    scales: Tensor,
    parameters: Parameters | None,
    *,
    rounding: float,
    corrects_bias: bool,
) -> dict[Node, Tensor]:
    """The outputs of linears in INT8 whose input is divided by ``scales``."""
    moved = x / scales.to(x)
    rows = fake_quantized(moved, parameters or Parameters(dynamic_scale(moved, "per_token")))
    outputs = {}
    for node, config in linears:
        weight = run.value(node.args[1]) * scales.to(x)  # type: ignore[arg-type]
        steps = WeightObserver(layer_name(node), config.weight).broadcast_scale(weight)
        bias = None if len(node.args) < 3 or node.args[2] is None else run.value(node.args[2])  # type: ignore[arg-type]
        outputs[node] = rounded_linear(rows, weight, Parameters(steps), bias, rounding, corrects_bias)
    return outputs


def is_attention_output(node: Node) -> bool:
    """Whether a node is attention's result, or a view of it."""
    passes_on = COPIES | VIEWS | {"transpose", "permute", "getitem"}
    while operation(node) in passes_on or is_inactive_dropout(node):
        node = node.all_input_nodes[0]
    return operation(node) in _ATTENTION or "sage_attention" in str(node.target)


def is_channel_scale(node: Node) -> bool:
    """Whether a node is a product that ``scale_channels`` wrote."""
    factor = node.args[1] if operation(node) == "mul" and len(node.args) == 2 else None
    return isinstance(factor, Node) and factor.op == "get_attr" and str(factor.target).rstrip("_").endswith(_SUFFIX)


@torch.no_grad()
def unscale_channels(exported: GraphModule, linear: Node) -> None:
    """Let ``linear`` read what ``scale_channels`` multiplied for it, if it did: in float the product is of no use."""
    product = linear.args[0]
    if not (isinstance(product, Node) and is_channel_scale(product)):
        return
    x, factor = product.args
    multiply(exported, Parameter(str(linear.args[1].target), 1), attribute(exported, factor))  # type: ignore[union-attr, arg-type]
    linear.replace_input_with(product, x)  # type: ignore[arg-type]
    if not product.users:
        exported.graph.erase_node(product)
    exported.recompile()


def _scale(exported: GraphModule, x: Node, linears: Sequence[Node], scales: Tensor) -> None:
    """Let ``linears`` read ``x / scales``, and multiply the columns of their weights."""
    fake = fake_value(x)
    assert fake is not None
    constant = (1.0 / scales.double()).to(fake.dtype).to(attribute(exported, linears[0].args[1]).device)  # type: ignore[arg-type]
    first = min(linears)
    with exported.graph.inserting_before(first):
        factor = add_attribute(exported, layer_name(first) + _SUFFIX, constant)
        factor.meta["val"] = fake.new_empty(constant.shape)
        product = exported.graph.call_function(torch.ops.aten.mul.Tensor, (x, factor))
    product.meta = {key: x.meta[key] for key in _KEPT_META if key in x.meta}
    for linear in linears:
        linear.replace_input_with(x, product)
        weight: Node = linear.args[1]  # type: ignore[assignment]
        # the inverse of the constant as rounded to its dtype
        multiply(exported, Parameter(str(weight.target), 1), 1.0 / constant.double())
