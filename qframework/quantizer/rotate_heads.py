"""Rotation of heads: queries and keys of static attention in a basis in which no channel of a head stands out.

With an orthogonal matrix R ``(D, D)``, logits stay the same::

    q k^T = (q R) (k R)^T

Where linears compute queries and keys and only views are between them and attention, R becomes part of their rows, at
no cost at run time. Rotary embeddings are in the way of it. One scale for a head then wastes less range: its channels
have similar ranges. QuaRot (Ashkboos et al., arXiv:2404.00456) turns queries and keys behind rotary embeddings, at run
time. Each attention is turned where that reduces the error of its logits on calibration data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.graph.attributes import attribute, replace_attribute
from qframework.graph.channels import ChannelView, quantized_everywhere
from qframework.graph.nodes import fake_value, linear_call
from qframework.numerics import scale_from_amax
from qframework.quantizer.annotate_attention import attention_call, is_attention
from qframework.quantizer.attention_config import AttentionConfig
from qframework.quantizer.calibration import Batch
from qframework.quantizer.channel_statistics import channel_statistics
from qframework.quantizer.output_error import Parameters, fake_quantized
from qframework.quantizer.quantizer import QFrameworkQuantizer, layer_name

# Rotation must reduce the squared error of the logits by this share.
_GAIN = 0.05
_SEED = 0


class _Operand(NamedTuple):
    """Queries or keys: the linear that computes them, and the channel of each head and element, ``(H, D)`` int64."""

    linear: Node
    channels: Tensor

    def rows(self, outputs: Tensor) -> Tensor:
        """Rows of the linear's output as ``(H, n, D)``."""
        return outputs[:, self.channels.to(outputs.device)].movedim(0, 1)


@torch.no_grad()
def rotate_heads(
    exported: GraphModule,
    quantizer: QFrameworkQuantizer,
    data: Iterable[Batch],
    *,
    samples: int = 512,
    batches: int | None = None,
) -> dict[str, float]:
    """Rotate queries and keys of static attention where that reduces the error of the logits, in place.

    Args:
        exported: from ``torch.export.export(...).module()``. It gets new parameters; those of the original model stay.
        quantizer: the one the graph will be prepared with.
        data: calibration batches as ``calibrate`` takes them.
        samples: tokens of calibration data on which errors are measured.
        batches: use only this many batches.

    Returns:
        The squared error of the logits relative to that without rotation, for each attention that was rotated.

    Raises:
        CalibrationError: no data, a batch that does not fit, or NaN or infinity in an activation.
    """
    found = list(_pairs(exported, quantizer))
    linears = {operand.linear: None for _, *pair in found for operand in pair}
    statistics = channel_statistics(exported, data, linears, samples, batches) if linears else {}
    done: dict[str, float] = {}
    for attention, query, key in found:
        q, k = (each.rows(statistics[each.linear].rows) for each in (query, key))
        basis = orthogonal_basis(q.shape[-1]).to(q)
        plain, turned = _logit_error(q, k), _logit_error(q @ basis, k @ basis)
        if turned < (1 - _GAIN) * plain:
            for operand in (query, key):
                _turn_rows(exported, operand, basis)
            done[layer_name(attention)] = turned / plain
    exported.recompile()
    return done


def orthogonal_basis(size: int) -> Tensor:
    """A random orthogonal matrix ``(size, size)`` float64, always the same."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]


def _pairs(exported: GraphModule, quantizer: QFrameworkQuantizer) -> Iterator[tuple[Node, _Operand, _Operand]]:
    """Static attention whose queries and keys nothing else reads."""
    operands: dict[Node, _Operand] = {}
    for node in exported.graph.nodes:
        operands |= _read_by_attention(node)
    for node in exported.graph.nodes:
        config = quantizer.config_for(node) if is_attention(node) else None
        if isinstance(config, AttentionConfig) and config.is_static:
            call = attention_call(node)
            query, key = operands.get(call.query), operands.get(call.key)
            if query is None or key is None or not _are_apart(call.query, call.key, call.value):
                continue
            if query.channels.shape[1] == key.channels.shape[1]:
                yield node, query, key


def _are_apart(*operands: Node) -> bool:
    """Whether each operand has one reader, and no two are one tensor."""
    return len(set(operands)) == len(operands) and all(len(each.users) == 1 for each in operands)


def _read_by_attention(linear: Node) -> dict[Node, _Operand]:
    """The operands of attention that a linear computes, if its output has no other reader."""
    call, fake = linear_call(linear), fake_value(linear)
    parameters = [] if call is None else [each for each in (call.weight, call.bias) if each is not None]
    if fake is None or not parameters or any(each.op != "get_attr" for each in parameters):
        return {}
    values: list[Node] = []

    def is_operand(user: Node, value: Node) -> bool:
        if is_attention(user):
            values.append(value)
        return is_attention(user)

    found = quantized_everywhere(linear, ChannelView.of(fake.shape), is_operand)
    if found is None or len(set(values)) < len(values):
        return {}
    views = {value: leaf.view for value, leaf in zip(values, found[0], strict=True)}
    return {
        value: _Operand(linear, channels) for value, view in views.items() if (channels := _heads(view)) is not None
    }


def _heads(view: ChannelView) -> Tensor | None:
    """The channels ``(H, D)`` of a view ``(..., H, N, D)``; None where channels run differently."""
    if len(view.dims) < 4 or [dim.has_channels for dim in view.dims[-2:]] != [False, True]:
        return None
    if any(dim.has_channels for dim in view.dims[:-3]) or not isinstance(view.dims[-3].size, int):
        return None
    return view.channels(len(view.dims) - 3)


def _logit_error(query: Tensor, key: Tensor) -> float:
    """The squared error of the logits of ``(H, n, D)`` queries and keys with one scale per head, relative."""
    groups = query.shape[0] // key.shape[0]
    repeated = key.repeat_interleave(max(groups, 1), 0)[: query.shape[0]]
    exact = query @ repeated.mT
    rounded = [
        fake_quantized(x, Parameters(scale_from_amax(x.abs().amax((1, 2), keepdim=True)))) for x in (query, repeated)
    ]
    wrong = (rounded[0] @ rounded[1].mT - exact).double().square().sum((1, 2))
    return float((wrong / exact.double().square().sum((1, 2)).clamp(min=1e-30)).mean())


def _turn_rows(exported: GraphModule, operand: _Operand, basis: Tensor) -> None:
    """Let a linear write each head of an operand in the new basis."""
    call = linear_call(operand.linear)
    assert call is not None
    for parameter in (call.weight, call.bias):
        if parameter is not None:
            value = attribute(exported, parameter).detach().double()
            turned, channels = value.clone(), operand.channels.to(value.device)
            rows = value[channels]  # (H, D, K), or (H, D) of a bias
            wide = rows if rows.dim() == 3 else rows.unsqueeze(-1)
            turned[channels] = (basis.double().to(value.device).T @ wide).reshape(rows.shape)
            replace_attribute(exported, parameter, operand.linear, turned)
