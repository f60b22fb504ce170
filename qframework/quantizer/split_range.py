"""Two ranges for what GELU gives (PTQ4ViT, Yuan et al. 2022: twin uniform quantization).

GELU's negative values lie in [-0.17, 0], its positive ones reach as far as the data. One scale for both rounds nearly
all negative values to zero where the positive ones are large. The paper spends one of the 8 bits on a choice between
two scales; here each range has an INT8 product of its own, which existing kernels compute. From::

    gelu -> x -> linear(x, W, b)

to the same function::

    gelu -> x ─┬> relu(x)   -> linear(_, W, b) ─┐
               └> min(x, 0) -> linear(_, W) ────┴> add

Quantized, each linear gets a scale of its own: 127 steps for the positive values, as before, and 127 for the negative
ones, as many as in the paper; its constraint that one scale be a power of two times the other is not needed. Both read
one INT8 weight.

The price is a second matrix product for every layer split, and the layer before it no longer writes INT8 itself, since
two scales read its result: the layer takes about twice its time. Use it where one scale costs accuracy.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from qframework.compat.operators import OpOverload
from qframework.graph.nodes import activation_name, is_inactive_dropout
from qframework.quantizer.annotate_linear import is_linear
from qframework.quantizer.arguments import check_exported
from qframework.quantizer.config import LinearConfig
from qframework.quantizer.quantizer import QFrameworkQuantizer, check_quantizer

_aten = torch.ops.aten
_KEPT_META = ("val", "nn_module_stack", "stack_trace", "torch_fn", "source_fn_stack")


def split_gelu_ranges(exported: GraphModule, quantizer: QFrameworkQuantizer) -> int:
    """Give each linear that reads a GELU, and that ``quantizer`` makes static, two ranges, in place; how many it split.

    Exact and tanh GELU count, with a dropout that does nothing after it; dynamic and float linears are left alone. The
    linear's name belongs to both products afterwards.

    Args:
        exported: ``torch.export.export(...).module()``, before ``prepare_pt2e``.
        quantizer: the quantizer that ``prepare_pt2e`` will get.
    """
    check_exported(exported, "split_gelu_ranges: exported")
    check_quantizer(quantizer, "split_gelu_ranges")
    parts: dict[Node, tuple[Node, Node]] = {}
    split = [node for node in exported.graph.nodes if _reads_gelu(node) and _is_static(node, quantizer)]
    for node in split:
        x = node.args[0]
        if x not in parts:
            parts[x] = _parts(exported, x)
        _split(exported, node, *parts[x])
    exported.recompile()
    return len(split)


def _reads_gelu(node: Node) -> bool:
    if not is_linear(node):
        return False
    x = node.args[0]
    while isinstance(x, Node) and is_inactive_dropout(x):
        x = x.args[0]
    return isinstance(x, Node) and activation_name(x) in ("gelu", "gelu_tanh")


def _is_static(node: Node, quantizer: QFrameworkQuantizer) -> bool:
    config = quantizer.config_for(node)
    return isinstance(config, LinearConfig) and not config.activation.dynamic


def _parts(exported: GraphModule, x: Node) -> tuple[Node, Node]:
    """``relu(x)`` and ``min(x, 0)``."""
    with exported.graph.inserting_after(x):
        negative = _call(exported, _aten.clamp_max.default, (x, 0), x)
        positive = _call(exported, _aten.relu.default, (x,), x)
    return positive, negative


def _split(exported: GraphModule, node: Node, positive: Node, negative: Node) -> None:
    with exported.graph.inserting_after(node):
        total = _call(exported, _aten.add.Tensor, (node, node), node)
    with exported.graph.inserting_after(node):
        second = _call(exported, _aten.linear.default, (negative, node.args[1]), node)
    node.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)
    node.replace_input_with(node.args[0], positive)  # type: ignore[arg-type]
    total.args = (node, second)


def _call(exported: GraphModule, target: OpOverload, args: tuple, like: Node) -> Node:
    """A call whose result has the shape and the layer of ``like``."""
    new = exported.graph.call_function(target, args)
    new.meta = {key: like.meta[key] for key in _KEPT_META if key in like.meta}
    return new
