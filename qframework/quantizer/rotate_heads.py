"""Bases of heads: queries and keys of static attention in a basis in which no channel of a head stands out.

With an invertible matrix A ``(D, D)``, logits stay the same::

    q k^T = (q A) (k A^-T)^T

Where linears compute queries and keys and only views are between them and attention, A and its inverse become part of
their rows, at no cost at run time. Rotary embeddings are in the way of it. One scale for a head then wastes less range:
its channels have similar ranges, of queries and of keys (qframework/quantizer/head_basis.py). QuaRot (Ashkboos et al.,
arXiv:2404.00456) turns queries and keys behind rotary embeddings by a Hadamard matrix, at run time. Each attention gets
its bases where that reduces the error of its logits on data that they were not fitted to.
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
from qframework.quantizer.head_basis import head_bases
from qframework.quantizer.output_error import Parameters, fake_quantized, held_out
from qframework.quantizer.quantizer import QFrameworkQuantizer, layer_name

# The squared error of the logits must become smaller by this share.
_GAIN = 0.05
_SAMPLES = 2048  # tokens of calibration data that bases are fitted to and judged on


class _Operand(NamedTuple):
    """Queries or keys: the linear that computes them, and the channel of each head and element, ``(H, D)`` int64."""

    linear: Node
    channels: Tensor

    def rows(self, outputs: Tensor) -> Tensor:
        """Rows of the linear's output as ``(H, n, D)``."""
        return outputs[:, self.channels.to(outputs.device)].movedim(0, 1)


class _Rows(NamedTuple):
    """Rows of queries ``(H, n, D)`` and keys ``(H of keys, n, D)``."""

    query: Tensor
    key: Tensor

    def bases(self) -> tuple[Tensor, Tensor]:
        """What queries and keys are multiplied by, ``(H, D, D)`` each; one basis where queries share a key head."""
        key_heads, _, width = self.key.shape
        bases = head_bases(self.query.reshape(key_heads, -1, width), self.key)
        return bases.repeat_interleave(len(self.query) // key_heads, 0), torch.linalg.inv(bases).mT

    def turned(self, of_queries: Tensor, of_keys: Tensor) -> _Rows:
        """The rows in other bases."""
        return _Rows(self.query.double() @ of_queries, self.key.double() @ of_keys)


@torch.no_grad()
def rotate_heads(
    exported: GraphModule,
    quantizer: QFrameworkQuantizer,
    data: Iterable[Batch],
    *,
    batches: int | None = None,
) -> dict[str, float]:
    """Change the bases of queries and keys of static attention where that reduces the error of the logits, in place.

    Args:
        exported: from ``torch.export.export(...).module()``. It gets new parameters; those of the original model stay.
        quantizer: the one the graph will be prepared with.
        data: calibration batches as ``calibrate`` takes them. Bases are fitted to all but the first, or to half of a
            single one, and judged on the rest.
        batches: use only this many batches.

    Returns:
        The squared error of the logits relative to that before, for each attention that was changed.

    Raises:
        CalibrationError: no data, a batch that does not fit, or NaN or infinity in an activation.
    """
    found = list(_pairs(exported, quantizer))
    if not found:
        return {}
    judged, fitted = held_out(exported, data, batches)
    linears = {operand.linear: None for _, *pair in found for operand in pair}
    seen = [channel_statistics(exported, part, linears, _SAMPLES) for part in (fitted, judged or fitted)]
    done: dict[str, float] = {}
    for attention, query, key in found:
        plain = [_Rows(*(each.rows(part[each.linear].rows) for each in (query, key))) for part in seen]
        bases = plain[0].bases()
        error = _logit_error(*(rows.turned(*bases) for rows in plain)) / max(_logit_error(*plain), 1e-30)
        if error < 1 - _GAIN:
            for operand, basis in zip((query, key), bases, strict=True):
                _turn_rows(exported, operand, basis)
            done[layer_name(attention)] = error
    exported.recompile()
    return done


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
            (heads, width), (key_heads, key_width) = query.channels.shape, key.channels.shape
            if width == key_width and heads % key_heads == 0:
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


def _logit_error(fitted: _Rows, judged: _Rows) -> float:
    """The squared error of the logits of ``judged`` with one scale per head, relative; softmax ignores their mean.

    Scales come from both, as those of calibration will.
    """
    rounded = []
    for known, rows in zip(fitted, judged, strict=True):
        largest = torch.maximum(*(each.abs().amax((1, 2), keepdim=True) for each in (known, rows)))
        rounded.append(fake_quantized(rows, Parameters(scale_from_amax(largest))))
    exact = _logits(*judged)
    wrong = (_logits(*rounded) - exact).double().square().sum((1, 2))
    return float((wrong / exact.double().square().sum((1, 2)).clamp(min=1e-30)).mean())


def _logits(query: Tensor, key: Tensor) -> Tensor:
    """Logits ``(H, n, n)`` without their mean over keys."""
    logits = query @ key.repeat_interleave(len(query) // len(key), 0).mT
    return logits - logits.mean(-1, keepdim=True)


def _turn_rows(exported: GraphModule, operand: _Operand, bases: Tensor) -> None:
    """Let a linear write each head of an operand, a row, times its matrix of ``bases (H, D, D)``."""
    call = linear_call(operand.linear)
    assert call is not None
    for parameter in (call.weight, call.bias):
        if parameter is not None:
            value = attribute(exported, parameter).detach().double()
            turned, channels = value.clone(), operand.channels.to(value.device)
            rows = value[channels]  # (H, D, K), or (H, D) of a bias
            wide = rows if rows.dim() == 3 else rows.unsqueeze(-1)
            turned[channels] = (bases.to(value).mT @ wide).reshape(rows.shape)
            replace_attribute(exported, parameter, operand.linear, turned)
