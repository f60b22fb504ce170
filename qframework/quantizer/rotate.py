"""Rotation: residual streams in a basis in which no channel stands out, at no cost at run time.

With an orthogonal matrix Q ``(C, C)`` whose columns sum to one, ``Q^T 1 = 1``, a pre-norm block::

    x <- x + W_out h + b_out                n = (x - mean(x)) / std(x) * g + b      y = W n + c

computes the same function as::

    x' <- x' + (Q^T W_out) h + Q^T b_out    n' = (x' - mean(x')) / std(x')          y = (W diag(g) Q) n' + c + W b

with ``x' = x Q`` in rows: Q keeps the mean and the norm of every token, so that LayerNorm and RMSNorm stay as they are,
except that their gain and bias move into the linears that read them. Outlier channels are spread over all channels, in
the inputs of the linears behind every norm and in the rows of the linears before. QuaRot (Ashkboos et al.,
arXiv:2404.00456) and SliceGPT (arXiv:2401.15024) turn LayerNorm into RMSNorm first; keeping the vector of ones makes
that unnecessary. LayerScale, a product with a parameter per channel behind a linear, becomes part of its weight.

Where something other than a linear reads the stream or a norm of it, such as the output of a model of features, it is
turned back there by a product with Q^T in float. A stream with many such places, as in post-norm models, whose norms
write the residual stream, is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from qframework.graph.attributes import attribute, readers, replace_attribute
from qframework.graph.nodes import COPIES, add_call, argument, fake_value, is_inactive_dropout, linear_call, operation
from qframework.graph.residual_stream import Norm, Stream, Writer, find_residual_streams
from qframework.quantizer.calibration import Batch
from qframework.quantizer.channel_statistics import ChannelStatistics, channel_statistics
from qframework.quantizer.config import LinearConfig
from qframework.quantizer.linear_bias import add_to_bias, constant
from qframework.quantizer.quantizer import QFrameworkQuantizer, layer_name
from qframework.quantizer.smooth import CalibratedLinear, search_smoothing

# Products with Q in float may have this share of the weights of the linears around the stream.
_MAX_CONVERSIONS = 0.02
# Rotation must reduce the error of the readers to this share.
_GAIN = 0.95
_SEED = 0
_SAMPLES = 1024  # rows of calibration data on which errors are measured


class RotatedStream(NamedTuple):
    """What became of one residual stream.

    Attributes:
        stream: name of the node of its first norm.
        channels: its size.
        error: geometric mean, over the linears behind its norms, of the error with rotation relative to that without.
        reason: why it was left as it is; "" if it was rotated.
    """

    stream: str
    channels: int
    error: float
    reason: str


def rotate(
    exported: GraphModule,
    quantizer: QFrameworkQuantizer,
    data: Iterable[Batch],
    *,
    strengths: Sequence[float] = (),
    batches: int | None = None,
) -> list[RotatedStream]:
    """Rotate every residual stream where that reduces the quantization error of its readers, in place.

    The function of the graph stays the same, up to rounding in its dtype.

    Args:
        exported: from ``torch.export.export(...).module()``. It gets new parameters; those of the original model stay.
        quantizer: the one the graph will be prepared with.
        data: calibration batches as ``calibrate`` takes them.
        strengths: of the smoothing that follows, with the best of which both bases are compared; none without one.
        batches: use only this many batches.

    Returns:
        What became of each stream, in graph order.

    Raises:
        CalibrationError: no data, a batch that does not fit, or NaN or infinity in an activation.
    """
    fold_layer_scales(exported)
    streams = find_residual_streams(exported)
    reasons = {id(stream): _reason_against(stream, quantizer) for stream in streams}
    inputs = {_input(norm) for stream in streams if not reasons[id(stream)] for norm in stream.norms if norm.linears}
    statistics = channel_statistics(exported, data, inputs, _SAMPLES, batches) if inputs else {}
    done = []
    for stream in streams:
        reason, error = reasons[id(stream)], 1.0
        if not reason:
            q = orthogonal(stream.size)
            error = _relative_error(exported, quantizer, stream, statistics, q, strengths)
            reason = "" if error < _GAIN else f"it would multiply the error of its readers by {error:.2f}"
        if not reason:
            rotate_stream(exported, stream, q)
        done.append(RotatedStream(stream.norms[0].node.name, stream.size, error, reason))
    exported.recompile()
    return done


def orthogonal(size: int) -> Tensor:
    """A random orthogonal matrix ``(size, size)`` float64 that maps the vector of ones to itself."""
    generator = torch.Generator().manual_seed(_SEED)
    inside = torch.linalg.qr(torch.randn(size - 1, size - 1, generator=generator, dtype=torch.float64))[0]
    with_ones = torch.eye(size, dtype=torch.float64)
    with_ones[:, 0] = 1.0
    basis = torch.linalg.qr(with_ones)[0]  # its first column is parallel to the vector of ones
    whole = torch.block_diag(torch.ones(1, 1, dtype=torch.float64), inside)
    return basis @ whole @ basis.T


def _reason_against(stream: Stream, quantizer: QFrameworkQuantizer) -> str:
    if stream.refusal:
        return stream.refusal
    if any(node is not None and node.op != "get_attr" for norm in stream.norms for node in (norm.weight, norm.bias)):
        return "the gain of a norm is computed"
    quantized = [node for node in stream.readers() if isinstance(quantizer.config_for(node), LinearConfig)]
    if not quantized:
        return "no linear that reads it is quantized"
    linears = [*stream.readers(), *(writer.node for writer in stream.writers if linear_call(writer.node) is not None)]
    weights = sum(_numel(node.args[1]) for node in dict.fromkeys(linears))
    conversions = _number_of_conversions(stream)
    if conversions * stream.size**2 > _MAX_CONVERSIONS * weights:
        share = 100 * conversions * stream.size**2 / weights
        return (
            f"{conversions} values would have to be turned between bases at run time, {share:.0f} percent of the "
            f"multiplications of its linears; at most {100 * _MAX_CONVERSIONS:.0f} percent are accepted. In post-norm "
            "models, norms write the residual stream"
        )
    return ""


def _number_of_conversions(stream: Stream) -> int:
    entries = set(stream.entries)
    out = {value for value, _ in stream.crossings} - entries
    return len(entries) + len(out) + len({value for norm in stream.norms for value, _ in norm.crossings})


def _numel(node: Any) -> int:
    fake = fake_value(node)
    return 0 if fake is None else fake.numel()


# ----------------------------------------------------------------------------------------------------------------------
# Whether it helps


def _relative_error(
    exported: GraphModule,
    quantizer: QFrameworkQuantizer,
    stream: Stream,
    statistics: dict[Node, ChannelStatistics],
    q: Tensor,
    strengths: Sequence[float],
) -> float:
    """Geometric mean over norms of the quantization error with rotation over that without, each after smoothing."""
    logs = []
    for norm in stream.norms:
        linears = [(node, quantizer.config_for(node)) for node in norm.linears]
        quantized = [(node, config) for node, config in linears if isinstance(config, LinearConfig)]
        if quantized:
            before, after = _errors(exported, norm, quantized, statistics[_input(norm)].rows, q, strengths)
            logs.append(torch.log(torch.tensor(max(after, 1e-30) / max(before, 1e-30))))
    return float(torch.stack(logs).mean().exp()) if logs else 1.0


def _errors(
    exported: GraphModule,
    norm: Norm,
    linears: Sequence[tuple[Node, LinearConfig]],
    rows: Tensor,
    q: Tensor,
    strengths: Sequence[float],
) -> tuple[float, float]:
    """The error of linears behind a norm, without and with rotation; ``rows (n, C)`` are inputs of the norm."""
    gain, bias = (_value(exported, node, rows) for node in (norm.weight, norm.bias))
    plain = _normalized(norm, rows)
    kept = plain * (1.0 if gain is None else gain) + (0.0 if bias is None else bias)
    turned = plain @ q.to(plain)
    kept_layers, turned_layers = [], []
    for node, config in linears:
        weight = attribute(exported, node.args[1]).detach().float()  # type: ignore[arg-type]
        kept_layers.append(_calibrated(node, config, weight, kept))
        turned_layers.append(_calibrated(node, config, _read_in_basis(weight, gain, q).float(), turned))
    return _best_error(kept_layers, strengths), _best_error(turned_layers, strengths)


def _calibrated(node: Node, config: LinearConfig, weight: Tensor, rows: Tensor) -> CalibratedLinear:
    channels = torch.arange(weight.shape[1], device=weight.device)
    return CalibratedLinear(layer_name(node), weight, channels, config, rows, rows.abs().amax(0))


def _best_error(layers: list[CalibratedLinear], strengths: Sequence[float]) -> float:
    """The sum of relative errors with the best smoothing."""
    size = layers[0].weight.shape[1]
    plain = sum(layer.error(torch.ones(size, device=layers[0].weight.device)) for layer in layers)
    free = torch.ones(size, dtype=torch.bool, device=layers[0].weight.device)
    best = search_smoothing(layers, free, strengths)
    return plain * (1.0 if best is None else best.error)


def _input(norm: Norm) -> Node:
    """The value that a norm reads, or that a spelled-out norm multiplies by its gain."""
    if operation(norm.node) == "mul":
        return next(node for node in norm.node.all_input_nodes if node is not norm.weight)
    return argument(norm.node, 0, "input")


def _normalized(norm: Norm, rows: Tensor) -> Tensor:
    """What the norm computes from rows, without gain and bias."""
    name, size = operation(norm.node), [rows.shape[-1]]
    if name == "layer_norm":
        return nn.functional.layer_norm(rows, size, eps=argument(norm.node, 4, "eps", default=1e-5))
    if name == "rms_norm":
        return nn.functional.rms_norm(rows, size, eps=argument(norm.node, 3, "eps", default=None))
    return rows  # normalized already


def _value(exported: GraphModule, node: Node | None, rows: Tensor) -> Tensor | None:
    return None if node is None else attribute(exported, node).detach().to(rows)


# ----------------------------------------------------------------------------------------------------------------------
# The rewriting


def fold_layer_scales(gm: GraphModule) -> int:
    """Fold products of a linear's output with a parameter for each channel (LayerScale) into the linear, in place.

    Returns:
        How many products are gone. Those that the dtype of the weight could not hold stay.
    """
    folded = 0
    for node in list(gm.graph.nodes):
        found = _layer_scale(node)
        if found is None:
            continue
        linear, scaled, factor = found
        scale = attribute(gm, factor).detach().double().reshape(-1)
        call = linear_call(linear)
        assert call is not None
        weight = attribute(gm, call.weight).detach()
        product = weight.double() * scale.unsqueeze(1)
        smallest = product.abs().amax(1)[scale != 0]
        if weight.dtype == torch.float16 and bool((smallest < 2.0**-10).any()):
            continue  # rounding would no longer be relative to most of the row
        replace_attribute(gm, call.weight, linear, product)
        if call.bias is not None:
            replace_attribute(gm, call.bias, linear, attribute(gm, call.bias).detach().double() * scale)
        node.replace_all_uses_with(scaled)
        gm.graph.erase_node(node)
        folded += 1
    gm.recompile()
    return folded


def _layer_scale(node: Node) -> tuple[Node, Node, Node] | None:
    """The linear, its value and the parameter ``(..., C)`` that ``node`` multiplies; None for any other node."""
    if operation(node) != "mul" or len(node.args) != 2 or node.kwargs:
        return None
    for value, factor in (node.args, node.args[::-1]):
        if not isinstance(value, Node) or not isinstance(factor, Node) or factor.op != "get_attr":
            continue
        fake, own, whole = fake_value(factor), fake_value(value), fake_value(node)
        if fake is None or own is None or whole is None or fake.dim() == 0 or own.dtype != whole.dtype:
            return None
        linear = value
        while (operation(linear) in COPIES or is_inactive_dropout(linear)) and len(linear.users) == 1:
            linear = linear.all_input_nodes[0]
        call = linear_call(linear)
        parameters = [] if call is None else [each for each in (call.weight, call.bias) if each is not None]
        fits = fake.numel() == fake.shape[-1] == own.shape[-1] and own.dim() == whole.dim()
        plain = bool(parameters) and all(each.op == "get_attr" for each in parameters)
        return (linear, value, factor) if fits and plain and len(linear.users) == len(value.users) == 1 else None
    return None


def rotate_stream(gm: GraphModule, stream: Stream, q: Tensor) -> None:
    """Change the basis of a stream to ``x Q``, in place; ``q (C, C)`` is orthogonal and maps ones to ones."""
    crossings = [(value, user) for value, user in stream.crossings if value not in stream.entries]
    _turn_back(gm, crossings, q.T, None)
    own = {user for _, user in stream.crossings}
    for norm in stream.norms:
        _fold_norm(gm, norm, q)
    for linear in stream.linears:
        _read(gm, linear, None, None, q)
    for writer in stream.writers:
        for parameter, axis in _parameters(writer):
            _write(gm, writer.node, parameter, axis, q, own)
    for entry in stream.entries:
        _enter(gm, entry, q, own)
    gm.recompile()


def _parameters(writer: Writer) -> list[tuple[Node, int]]:
    """The parameters of a writer as they are now: a linear that reads a norm too may have new ones."""
    call = linear_call(writer.node)
    if call is None:
        return list(writer.parameters)
    return [(parameter, 0) for parameter in (call.weight, call.bias) if parameter is not None]


def _fold_norm(gm: GraphModule, norm: Norm, q: Tensor) -> None:
    gain, bias = (None if node is None else attribute(gm, node).detach() for node in (norm.weight, norm.bias))
    for linear in norm.linears:
        _read(gm, linear, gain, bias, q)
    back = q.T if gain is None else q.T * gain.to(q)
    _turn_back(gm, norm.crossings, back, bias)
    if norm.weight is not None and gain is not None:  # kept as ones, which smoothing may scale
        replace_attribute(gm, norm.weight, norm.node, torch.ones_like(gain))
    if norm.bias is not None and bias is not None:
        replace_attribute(gm, norm.bias, norm.node, torch.zeros_like(bias))


def _read_in_basis(weight: Tensor, gain: Tensor | None, q: Tensor) -> Tensor:
    """``W diag(g) Q`` in float64."""
    wide = weight.double() if gain is None else weight.double() * gain.double()
    return wide @ q.to(wide)


def _read(gm: GraphModule, linear: Node, gain: Tensor | None, bias: Tensor | None, q: Tensor) -> None:
    """Let a linear read the new basis without the norm's gain and bias."""
    call = linear_call(linear)
    assert call is not None
    weight = attribute(gm, call.weight).detach()
    if bias is not None and bool((bias != 0).any()):
        add_to_bias(gm, linear, weight.double() @ bias.double())
    replace_attribute(gm, call.weight, linear, _read_in_basis(weight, gain, q))


def _write(gm: GraphModule, node: Node, parameter: Node, axis: int, q: Tensor, crossing: set[Node]) -> None:
    """Let a parameter write the new basis along one of its dimensions; nodes in ``crossing`` keep the old one."""
    value = attribute(gm, parameter).detach()
    wide = value.double().movedim(axis, -1)
    turned = (wide @ q.to(wide)).movedim(-1, axis)
    if node is not parameter:
        replace_attribute(gm, parameter, node, turned)
    elif readers(gm, parameter) == set(parameter.users) and not crossing & set(parameter.users):
        _replace_everywhere(gm, parameter, turned)
    else:
        for user in [each for each in parameter.users if each not in crossing]:
            replace_attribute(gm, parameter, user, turned)


def _replace_everywhere(gm: GraphModule, parameter: Node, value: Tensor) -> None:
    old = attribute(gm, parameter)
    owner, _, leaf = str(parameter.target).rpartition(".")
    new = value.to(old.dtype)
    setattr(
        gm.get_submodule(owner), leaf, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
    )


def _turn_back(gm: GraphModule, crossings: Iterable[tuple[Node, Node]], back: Tensor, bias: Tensor | None) -> None:
    """Give each reader of a crossing the value in the old basis: ``value @ back + bias``."""
    by_value: dict[Node, list[Node]] = {}
    for value, user in crossings:
        by_value.setdefault(value, []).append(user)
    for value, users in by_value.items():
        with gm.graph.inserting_before(value.next):
            turned = _product(gm, value, back)
            if bias is not None and bool((bias != 0).any()):
                shift = constant(gm, f"{value.name}_shift", bias, value, fake_value(value))
                turned = add_call(value, torch.ops.aten.add.Tensor, (turned, shift))
        for user in users:
            user.replace_input_with(value, turned)


def _enter(gm: GraphModule, entry: Node, q: Tensor, crossing: set[Node]) -> None:
    """Turn a value that has no parameters into the new basis, for all readers but those in ``crossing``."""
    users = [user for user in entry.users if user not in crossing]
    with gm.graph.inserting_before(entry.next):
        turned = _product(gm, entry, q)
    for user in users:
        user.replace_input_with(entry, turned)


def _product(gm: GraphModule, value: Node, matrix: Tensor) -> Node:
    """``value @ matrix``, which the quantizer leaves in float, since it is no linear."""
    basis = constant(gm, f"{value.name}_basis", matrix, value, fake_value(value))
    return add_call(value, torch.ops.aten.matmul.default, (value, basis))
