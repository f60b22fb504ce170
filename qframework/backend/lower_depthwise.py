"""Gives depthwise convolutions between tokens a kernel of their own, with the activation and quantization behind them.

From, on Hopper, where no gradient is needed::

    conv2d -> views -> gelu -> quantize (views and activation or quantization in any order, each optional)

To::

    permute -> qframework::depthwise or depthwise_quantize (and the taps in order) -> permute -> views

cuDNN writes the convolution and Inductor reads it again for bias and activation. With 3 taps that takes 1.2 to 2.2
times as long, and with 9 cuDNN has no fast kernel; with 5 and 7 it is faster
(``other/2026-11-28-h100-depthwise.json``). No other chip was measured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from qframework.backend.lowering import Lowering
from qframework.compat.dynamo import record_value, recorded_value
from qframework.graph.depthwise import DepthwiseCall, depthwise_call
from qframework.graph.nodes import RESHAPES, activation_name, add_call, argument, fake_value, needs_gradient, operation
from qframework.graph.strides import follow_strides
from qframework.graph.writes import written_between
from qframework.kernels.runtime.chip import capability_of

_ours = torch.ops.qframework
aten = torch.ops.aten
_VIEWS = {*RESHAPES, "transpose", "permute", "contiguous"}
_FASTER = (3, 9)  # taps
_DTYPES = (torch.float16, torch.bfloat16)


class _Chain(NamedTuple):
    """A convolution and what alone reads it, one after the other; a quantization is the last."""

    call: DepthwiseCall
    views: list[Node]
    activation: Node | None
    quantize: Node | None


def lower_depthwise(lowering: Lowering) -> None:
    """Replace every such convolution."""
    for node in list(lowering.gm.graph.nodes):
        chain = _chain(node) if has_own_kernel(node) else None
        if chain is not None and not needs_gradient(map(fake_value, chain.call.input_nodes)):
            _replace(node, chain)


def has_own_kernel(node: Node) -> bool:
    """Whether ``lower_depthwise`` replaces a convolution, where no gradient is needed."""
    chain, fake = _chain(node), fake_value(node)
    measured = fake is not None and fake.dtype in _DTYPES and capability_of(fake.device) == (9, 0)
    if chain is None or not measured or chain.call.taps not in _FASTER:
        return False
    return chain.activation is not None or chain.quantize is not None


def _chain(node: Node) -> _Chain | None:
    call = depthwise_call(node)
    if call is None:
        return None
    views: list[Node] = []
    activation: Node | None = None
    end = node
    while len(end.users) == 1:
        (reader,) = end.users
        if reader.all_input_nodes[0] is not end:
            break
        if _quantizes(reader) and written_between(node, reader, [reader.args[1]]) is None:  # type: ignore[list-item]
            return _Chain(call, views, activation, reader)
        if operation(reader) in _VIEWS:
            views.append(reader)
        elif activation is None and activation_name(reader) is not None:
            activation = reader
        else:
            break
        end = reader
    return _Chain(call, views, activation, None)


def _quantizes(node: Node) -> bool:
    """Whether a node quantizes with one scale that was given."""
    scale = node.args[1] if node.target is _ours.quantize.default else None
    if not isinstance(scale, Node) or scale.op not in ("placeholder", "get_attr"):
        return False
    fake = fake_value(scale)
    return fake is not None and fake.numel() == 1 and argument(node, 2, "zero_point") is None


def _replace(node: Node, chain: _Chain) -> None:
    result = fake_value(node)
    assert result is not None
    moved = follow_strides(node, torch.empty_like(result, memory_format=torch.channels_last))  # type: ignore[arg-type]
    if moved is None:
        return
    for reader, value in moved.items():
        record_value(reader, value)
    _add_kernel(node, chain)
    for each in (chain.activation, chain.quantize):
        if each is not None:
            each.replace_all_uses_with(each.all_input_nodes[0])
            node.graph.erase_node(each)
    node.graph.erase_node(node)


def _add_kernel(node: Node, chain: _Chain) -> None:
    """Put the kernel in the place of the convolution, and record what the nodes behind it compute.

    The taps are put in order at each call: a copy that is kept would miss writes through ``.data``.
    """
    call, result = chain.call, fake_value(node)
    assert result is not None
    activation = "none" if chain.activation is None else activation_name(chain.activation)
    operator, scale, dtype = _ours.depthwise.default, [], result.dtype
    if chain.quantize is not None:
        operator, scale, dtype = _ours.depthwise_quantize.default, [chain.quantize.args[1]], torch.int8
        for view in chain.views:
            record_value(view, torch.empty_like(recorded_value(view), dtype=dtype))

    def add(target: Any, *args: Any, value: Tensor | None = None, **kwargs: Any) -> Node:
        return add_call(node, target, args, kwargs, value)

    with node.graph.inserting_before(node):
        pixels = add(aten.permute.default, call.input, [0, 2, 3, 1])
        taps = add(aten.select.int, add(aten.permute.default, call.weight, [2, 3, 1, 0]), 2, 0)
        taps = add(aten.clone.default, taps, memory_format=torch.contiguous_format)
        empty = torch.empty_like(recorded_value(pixels), dtype=dtype, memory_format=torch.contiguous_format)
        out = add(operator, pixels, taps, call.bias, activation, *scale, value=empty)
        back = add(aten.permute.default, out, [0, 3, 1, 2])
    node.replace_all_uses_with(back)
