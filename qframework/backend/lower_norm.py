"""Makes a norm a part of the quantization that reads it; some norms of float models get a kernel of their own.

From, on a GPU, for many rows::

    int8_linear, or an input -> layer_norm or rms_norm -> quantize, or dynamic_quantize per token
    int8_linear, linear, or an input -> layer_norm, or rms_norm + residual        long rows; where no gradient is needed

To::

    qframework::norm_quantize or qframework::norm_dynamic_quantize, or qframework::norm

Inductor computes these in one kernel as well, with two to five times as many instructions for the same bytes: on an
H100 it takes 1.1 to 4.7 times as long before a quantization (``other/2026-11-27-h100-norm-quantize.json``) and 1.0 to
2.3 times elsewhere (``other/2026-11-27-h100-norms.json``); no other chip was measured. A norm whose input Inductor
computes is left to it, since one kernel then does both, except for some row lengths above 1,024.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from qframework.backend.keep_quantize import has_many_rows, is_per_token, is_written_by_int8_linear
from qframework.backend.lowering import Lowering
from qframework.graph.nodes import RESHAPES, argument, fake_value, fixed_number, linear_call, needs_gradient, operation
from qframework.graph.norms import NormCall, norm_call
from qframework.graph.shapes import same_shape
from qframework.graph.writes import written_between
from qframework.kernels.norm import MAX_CHANNELS
from qframework.numerics import FLOAT_DTYPES

_ours = torch.ops.qframework

LONG_ROWS = range(1025, 2560)
"""Row lengths at which a kernel of our own is faster even if Inductor would compute more in one kernel.

That is a norm, a sum and a second norm that is quantized. Inductor keeps shorter rows in registers; longer ones were
measured to be as fast or not at all."""
_BEFORE_A_FLOAT_NORM = range(1025, 1600)  # the same for a norm, a sum and a second norm that stays in float
_OF_A_SUM = {
    (True, True): LONG_ROWS,
    (True, False): range(1025, 1408),
    (False, True): range(1025, 1600),
    (False, False): range(0),
}
"""The same for a quantized norm of any other sum: by whether it is a LayerNorm, and has scales per token.

``"today"`` in ``other/2026-11-27-h100-add-norm.json``, 1.0 to 1.5 times as fast here, 0.7 to 0.99 times elsewhere."""


def lower_norm(lowering: Lowering) -> None:
    """Replace every such norm."""
    replace_norms(lowering, _lower)


def replace_norms(lowering: Lowering, replace: Callable[[GraphModule, Node], set[Node]]) -> None:
    """Call ``replace`` for each node, the last one first, and erase what it returns and the nodes that only these read.

    A norm that is written out is many nodes.
    """
    gm = lowering.gm
    replaced: set[Node] = set()
    for node in reversed(list(gm.graph.nodes)):
        if node.users and replaced.issuperset(node.users):
            replaced.add(node)
        elif node not in replaced:
            replaced |= replace(gm, node)
    for node in reversed(list(gm.graph.nodes)):
        if node in replaced and node.op.startswith("call"):
            gm.graph.erase_node(node)


def _lower(gm: GraphModule, node: Node) -> set[Node]:
    """Replace a norm, or a quantization and the norm before it, where that pays; returns what it replaces."""
    if (norm := norm_before(node)) is not None and _pays(norm, node) and not is_written(norm, node):
        return _fuse_quantize(gm, node, norm)
    if (norm := norm_call(node)) is None or not is_possible(norm) or not keeps_dtype(norm, node):
        return set()
    return set() if needs_gradient(map(fake_value, norm.input_nodes)) else _lower_alone(gm, node, norm)


def norm_before(node: Node) -> NormCall | None:
    """The norm that only this quantization, per token or with one given scale, reads."""
    if node.target is _ours.quantize.default:
        scale = fake_value(node.args[1]) if isinstance(node.args[1], Node) else None
        fits = scale is not None and scale.numel() == 1 and argument(node, 2, "zero_point") is None
    else:
        fits = node.target is _ours.dynamic_quantize.default and is_per_token(node)
    source = node.args[0] if fits else None
    return norm_call(source) if isinstance(source, Node) and len(source.users) == 1 else None


def _fuse_quantize(gm: GraphModule, node: Node, norm: NormCall) -> set[Node]:
    """Make a quantization and the norm before it one operator; returns what it replaces."""
    operator, arguments = _ours.norm_dynamic_quantize.default, norm_arguments(norm)
    if node.target is _ours.quantize.default:
        operator, arguments = _ours.norm_quantize.default, (*arguments, node.args[1])
    _replace(gm, node, operator, arguments)
    return {node}


def _lower_alone(gm: GraphModule, node: Node, norm: NormCall) -> set[Node]:
    """Make a norm ``qframework::norm`` where that pays; returns what it replaces."""
    residual = _residual_behind(node)
    end = node if residual is None else next(iter(node.users))
    others = [] if residual is None else [residual]
    if residual is None:
        pays = norm.center and channels(norm) >= LONG_ROWS.start
    else:
        pays = channels(norm) in (LONG_ROWS if _is_quantized(end) else _BEFORE_A_FLOAT_NORM)
    if not pays or not comes_from_memory(norm.input) or is_written(norm, end.next, *others):
        return set()
    _replace(gm, end, _ours.norm.default, (*norm_arguments(norm), residual))
    return {node, end}


def _is_quantized(total: Node) -> bool:
    """Whether the norm of ``total`` and its quantization are one operator already: the last nodes are visited first."""
    operators = (_ours.norm_quantize.default, _ours.norm_dynamic_quantize.default)
    return any(user.target in operators for user in total.users)


def _residual_behind(norm: Node) -> Node | None:
    """What the only reader of a norm adds to it: another contiguous tensor of its shape and dtype."""
    (add,) = norm.users if len(norm.users) == 1 else (None,)
    if add is None or operation(add) != "add" or argument(add, 2, "alpha", default=1) != 1:
        return None
    operands = [argument(add, 0, "input"), argument(add, 1, "other")]
    other = operands[operands[0] is norm]
    fake, total, normed = (fake_value(x) if isinstance(x, Node) else None for x in (other, add, norm))
    if fake is None or total is None or normed is None or other is norm or not fake.is_contiguous():
        return None
    alike = all(each.dtype == normed.dtype and same_shape(each.shape, normed.shape) for each in (fake, total))
    return other if alike and fake.device == normed.device else None


def _replace(gm: GraphModule, node: Node, operator: Any, arguments: tuple[Any, ...]) -> None:
    with gm.graph.inserting_before(node):
        new = gm.graph.call_function(operator, arguments)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)


def norm_arguments(norm: NormCall) -> tuple[Any, ...]:
    """The first arguments of ``norm``, ``norm_quantize`` and ``norm_dynamic_quantize``."""
    return (norm.input, norm.weight, norm.bias, fixed_number(norm.eps), norm.center, norm.offset)


def is_written(norm: NormCall, end: Node, *others: Node) -> bool:
    """Whether something before ``end`` writes to what the operator would read there.

    A weight with an offset is read where the operator is, not where the graph computes their sum.
    """
    first = min(norm.input_nodes) if norm.offset else norm.input
    return written_between(first, end, [*norm.input_nodes, *others]) is not None


def _pays(norm: NormCall, quantize: Node) -> bool:
    """Whether one kernel for the norm and the quantization behind it is faster than Inductor's."""
    if not is_possible(norm):
        return False
    dynamic = quantize.target is not _ours.quantize.default
    lengths = LONG_ROWS if _adds_to_a_norm(norm.input) else _OF_A_SUM[norm.center, dynamic]
    return comes_from_memory(norm.input) or channels(norm) in lengths


def _adds_to_a_norm(total: Node) -> bool:
    """Whether a node is the sum of a norm and a residual, as sandwich norms have it."""
    return any(norm_call(each) is not None and _residual_behind(each) is not None for each in total.all_input_nodes)


def is_possible(norm: NormCall) -> bool:
    """Whether the operators take the norm, of many rows on a GPU."""
    x = fake_value(norm.input)
    if x is None or x.device.type != "cuda" or not has_many_rows(x.shape):
        return False
    fits = x.dtype in FLOAT_DTYPES and x.is_contiguous() and 0 < channels(norm) <= MAX_CHANNELS
    return fits and all(map(_is_parameter, (norm.weight, norm.bias)))


def channels(norm: NormCall) -> int:
    """0 if unknown."""
    x = fake_value(norm.input)
    return x.shape[-1] if x is not None and isinstance(x.shape[-1], int) else 0


def comes_from_memory(x: Node) -> bool:
    """Whether no kernel of Inductor computes ``x``."""
    x = behind_views(x)
    written = is_written_by_int8_linear(x) or linear_call(x) is not None
    return written or x.op in ("placeholder", "get_attr") or x.target is _ours.norm.default


def behind_views(x: Node) -> Node:
    """What ``x`` is a reshape of, such as windows or an image of the same tokens, as long as that copies nothing."""
    while operation(x) in RESHAPES:
        source: Any = x.args[0]
        fake = fake_value(source)
        if fake is None or not fake.is_contiguous():
            break
        x = source
    return x


def keeps_dtype(norm: NormCall, node: Node) -> bool:
    """Whether the result has the dtype of the norm's input."""
    x, result = fake_value(norm.input), fake_value(node)
    return x is not None and result is not None and x.dtype == result.dtype


def _is_parameter(node: Node | None) -> bool:
    """Whether the operator takes it as weight or bias."""
    fake = None if node is None else fake_value(node)
    return node is None or (fake is not None and fake.ndim == 1 and fake.dtype in FLOAT_DTYPES)
