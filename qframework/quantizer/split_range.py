"""Two ranges for the output of GELU (PTQ4ViT, Yuan et al. 2022: twin uniform quantization).

GELU's negative values lie in [-0.17, 0], its positive values can be large. One scale for both then rounds nearly all
negative values to zero. The paper uses one of the 8 bits to choose between two scales; here each range has its own INT8
product, which existing kernels compute. From::

    gelu -> x -> linear(x, W, b)

to the same function::

    gelu -> x ─┬> relu(x)   -> linear(_, W, b) ─┐
               └> min(x, 0) -> linear(_, W) ────┴> add

When quantized, each linear has its own scale: 127 steps for the positive values, as before, and 127 for the negative
ones, as many as in the paper, without its constraint that the scales differ by a power of two. Both linears read the
same INT8 weight.

A split layer takes about twice its time: it has a second matrix product, and the layer before it no longer writes INT8,
since its result is quantized with two scales. Use this where one scale costs accuracy.
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
    """Split the input range of each static linear that reads a GELU, in place, and return how many linears were split.

    Applies to exact and tanh GELU, also with an inactive dropout after it. Dynamic and float linears do not change.
    Both products have the linear's name afterwards.

    Args:
        exported: ``torch.export.export(...).module()``, before ``prepare_pt2e``.
        quantizer: the quantizer for ``prepare_pt2e``, which determines the static linears.
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
    """A call node whose result has the shape and the layer of ``like``."""
    new = exported.graph.call_function(target, args)
    new.meta = {key: like.meta[key] for key in _KEPT_META if key in like.meta}
    return new
