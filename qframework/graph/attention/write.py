"""Writes an attention operator into a graph in place of an attention.

Logits may change shape between the products: ``(B * W, H, N, N)`` becomes ``(B, W, H, N, N)`` while a mask of W windows
is added (Swin), and ``(B * H, N, N)`` becomes ``(B, H, N, N)``. The operator then runs in the shape with the most
dimensions, and views bring the other summands to it.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qframework.compat.dynamo import recorded_value
from qframework.graph.attention.call import AttentionCall, Refused, Summand, shape_of
from qframework.graph.attention.relative_position import RelativePositions, decomposed, is_grid, is_height, is_width
from qframework.graph.nodes import VIEWS, add_call, fake_value, operation, plain_name, untransposed
from qframework.graph.shapes import same, same_shape, splits_first, traced_size
from qframework.graph.writes import written_between

aten = torch.ops.aten


class WrittenOperands(NamedTuple):
    """Operands of one attention in the operators' shapes; ``mask`` is bool or float."""

    query: Node
    key: Node
    value: Node
    mask: Node | None
    rel_h: Node | None
    rel_w: Node | None


class AttentionWriter:
    """Adds nodes before ``call.end``, each with the fake tensor that tracing would have recorded."""

    def __init__(self, gm: GraphModule, call: AttentionCall) -> None:
        self._gm, self._call = gm, call
        self._new: list[Node] = []
        self._grid_summands: list[Summand] = []
        self._fine = self._finest_shape()

    def write(self, variant: str, smooth_k: bool = True) -> Node:
        """The node of ``sage_attention``'s output, in the shape and dtype of ``call.end``.

        Raises:
            Refused: an operand cannot be brought to the operator's shape.
            QFrameworkError: the operator refuses its operands.
        """
        call, (query, key, value, mask, rel_h, rel_w) = self._call, self.operands()
        both = self.add(
            torch.ops.qframework.sage_attention.default,
            query, key, value, mask, call.is_causal, call.scale, call.enable_gqa, variant, smooth_k,
            call.sinks is not None, rel_h, rel_w, *([] if call.softcap is None else [call.softcap]),
        )  # fmt: skip
        out = self.add(operator.getitem, both, 0)
        return self._as_end(out if call.sinks is None else self._beside_sinks(out, self.add(operator.getitem, both, 1)))

    def write_sdpa(self) -> Node:
        """The node of ``aten.scaled_dot_product_attention``, in the shape and dtype of ``call.end``.

        Raises:
            Refused: an operand cannot be brought to the operator's shape.
        """
        if self._call.sinks is not None:
            raise Refused("it has sinks, which scaled_dot_product_attention does not take. Use a variant")
        if self._call.softcap is not None:
            raise Refused(
                f"its logits have a soft cap of {self._call.softcap:g}, which neither static INT8 attention nor "
                "scaled_dot_product_attention takes. Use a variant"
            )
        call, (query, key, value) = self._call, self._query_key_value()
        mask = self._mask([summand for summand in call.summands if summand not in self._grid_summands])
        if self._grid_summands:
            bias = self._grid_bias()
            mask = bias if mask is None else self._with_bias(mask, bias)
        if mask is not None and _fake(mask).dtype != torch.bool:
            mask = self._cast_mask(mask, _fake(query).dtype)
        arguments = {"scale": call.scale, "enable_gqa": call.enable_gqa}
        operands = (query, key, value, mask, 0.0, call.is_causal)
        return self._as_end(self.add(aten.scaled_dot_product_attention.default, *operands, **arguments))

    def operands(self) -> WrittenOperands:
        """Add the operands of the package's operators before ``call.end``. Raises Refused."""
        relative, masks = self._split_summands()
        query, key, value = self._query_key_value()
        rel_h, rel_w = self._factors(relative) if relative else (None, None)
        return WrittenOperands(query, key, value, self._mask(masks), rel_h, rel_w)

    def _query_key_value(self) -> tuple[Node, Node, Node]:
        call, end = self._call, _fake(self._call.end)
        query, key, value = self._query(), self._key_node(), self._leading(call.value, call.value_shape)
        dtype = self._common_dtype(end.dtype)
        return self._cast(query, dtype), self._cast(key, dtype), self._cast(value, dtype)

    def _as_end(self, out: Node) -> Node:
        if not same_shape(self._call.value_shape, self._fine):
            out = self.add(aten.flatten.using_ints, out, 0, 1)
        return self._cast(out, _fake(self._call.end).dtype)

    def _beside_sinks(self, out: Node, lse: Node) -> Node:
        """The output of a softmax over keys and a sink: with log-sum-exp L of the keys, ``out * sigmoid(L - sink)``."""
        call, dtype = self._call, _fake(out).dtype
        assert call.sinks is not None
        if not same_shape(call.shape, self._fine) or not same_shape(shape_of(call.sinks)[:-1], call.shape[:-1]):
            raise Refused(f"its sinks of shape {tuple(shape_of(call.sinks))} do not fit logits {tuple(self._fine)}")
        above = self.add(aten.sub.Tensor, self.add(aten.unsqueeze.default, lse, -1), call.sinks)
        return self._cast(self.add(aten.mul.Tensor, out, self.add(aten.sigmoid.default, above)), dtype)

    def add(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A new node with its fake value."""
        with self._gm.graph.inserting_before(self._call.end):
            self._new.append(add_call(self._call.end, target, args, kwargs))
        return self._new[-1]

    def in_memory_order_of(self, old: Node, new: Node) -> Node:
        """``new`` with the memory order of ``old``, which its views need."""
        strides = [traced_size(stride) for stride in _fake(old).stride()]
        order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
        moved = self.add(aten.contiguous.default, self.add(aten.permute.default, new, order))
        return self.add(aten.permute.default, moved, sorted(range(len(order)), key=order.__getitem__))

    def undo(self) -> None:
        """Erase all nodes that were added."""
        for node in reversed(self._new):
            self._gm.graph.erase_node(node)

    def _finest_shape(self) -> torch.Size:
        """The shape of the logits with the most dimensions; the others must be equal or have its first two merged."""
        call = self._call
        shapes = [call.shape, call.value_shape]
        for summand in call.summands:
            if is_grid(summand.shape, call.shape):
                self._grid_summands.append(summand)
            else:
                shapes.append(summand.shape)
        fine = max(shapes, key=len)
        for shape in shapes:
            if not (same_shape(shape, fine) or splits_first(fine, shape)):
                raise Refused(f"its logits have shapes that do not fit each other: {tuple(shape)} and {tuple(fine)}")
        return fine

    # Operands ---------------------------------------------------------------------------------------------------------

    def _query(self) -> Node:
        query = self._call.query
        dtype = _fake(query).dtype
        for by, divides in self._call.row_factors:
            query = self.add(aten.div.Tensor if divides else aten.mul.Tensor, query, by)
        return self._leading(self._cast(query, dtype), self._call.shape)

    def _key_node(self) -> Node:
        key = self._call.key
        if self._call.key_is_transposed:
            key = untransposed(key) or self.add(aten.transpose.int, key, -2, -1)
        return self._leading(key, self._call.shape)

    def _common_dtype(self, end: torch.dtype) -> torch.dtype:
        """The dtype of the products: that of the result, unless the model computes them in another."""
        call = self._call
        if _fake(call.between[0]).dtype == end:
            return end
        first = torch.promote_types(_fake(call.query).dtype, _fake(call.key).dtype)
        return torch.promote_types(first, _fake(call.value).dtype)

    def _cast(self, node: Node, dtype: torch.dtype) -> Node:
        return node if _fake(node).dtype == dtype else self.add(aten.to.dtype, node, dtype)

    def _leading(self, node: Node, shape: torch.Size) -> Node:
        """An operand of logits of ``shape``, viewed for logits of the finest shape."""
        lead = shape_of(node)[:-2]
        expected = shape[:-3] if self._call.enable_gqa else shape[:-2]
        if len(lead) != len(shape) - 2 or not same_shape(lead[: len(expected)], expected):
            raise Refused(f"an operand has shape {tuple(shape_of(node))}, which does not fit logits {tuple(shape)}")
        return node if same_shape(shape, self._fine) else self._split_first(node)

    def _split_first(self, node: Node) -> Node:
        first, second = self._fine[:2]
        if isinstance(second, int):
            sizes = [-1, second]
        elif isinstance(first, int):
            sizes = [first, -1]
        else:
            raise Refused(f"one of the first two sizes of its logits {tuple(self._fine)} must be constant")
        return self.add(aten.unflatten.int, node, 0, sizes)

    # Masks and relative positions -------------------------------------------------------------------------------------

    def _split_summands(self) -> tuple[RelativePositions | None, list[Summand]]:
        """Decomposed relative positions, if any, and the other summands."""
        if self._grid_summands:
            return self._grid_factors(), [s for s in self._call.summands if s not in self._grid_summands]
        for summand in self._call.summands:
            if (found := decomposed(summand)) is not None and self._fits(found):
                return found, [other for other in self._call.summands if other is not summand]
        return None, self._call.summands

    def _grid_factors(self) -> RelativePositions:
        """The factors of ``logits.view(..., qh, qw, kh, kw) + h + w``."""
        values = [(summand.value, summand.shape) for summand in self._grid_summands]
        if len({summand.factor for summand in self._grid_summands}) == 1 and len(values) == 2:
            (x, grid), (y, _) = values
            for h, w in ((x, y), (y, x)):
                found = RelativePositions(h, w, self._call.between[0], self._grid_summands[0].factor)
                if is_height(h, grid) and is_width(w, grid) and self._fits(found):
                    return found
        shapes = ", ".join(str(tuple(shape_of(value))) for value, _ in values)
        raise Refused(f"summands of its logits must be relative heights and widths, got shapes {shapes}")

    def _grid_bias(self) -> Node:
        """The summands of ``logits.view(..., qh, qw, kh, kw)`` as a bias ``(..., Nq, Nk)``."""
        total = None
        for summand in self._grid_summands:
            if summand.fill is not None:
                raise Refused("its mask must have the shape of its logits, got one in the shape of a grid")
            term = self._times(summand.value, summand.factor)
            total = term if total is None else self.add(aten.add.Tensor, total, term)
        assert total is not None
        grid = self._grid_summands[0].shape[-4:]
        if not same_shape(shape_of(total)[-4:], grid):
            total = self.add(aten.expand.default, total, [*[-1] * (len(shape_of(total)) - 4), *grid])
        for last in (-2, -3):
            total = self.add(aten.flatten.using_ints, total, last, last + 1)
        return self._as_fine(total)

    def _with_bias(self, mask: Node, bias: Node) -> Node:
        """A mask, which hides keys where it is False if it is bool, and a bias."""
        if _fake(mask).dtype != torch.bool:
            return self.add(aten.add.Tensor, mask, bias)
        return self.add(aten.masked_fill.Scalar, bias, self.add(aten.logical_not.default, mask), -math.inf)

    def _as_fine(self, node: Node) -> Node:
        """An operand of grid shape whose leading dimensions are split or merged as the logits' are."""
        lead, fine = len(shape_of(node)), len(self._fine)
        if 2 < lead < fine:
            return self._split_first(node)
        return self.add(aten.flatten.using_ints, node, 0, 1) if lead > fine else node

    def _fits(self, found: RelativePositions) -> bool:
        """Whether the factors' leading dimensions fit the logits', split or merged, and nothing overwrites them."""
        lead, fine = shape_of(found.h)[:-4], self._fine[:-2]
        if written_between(found.read_by, self._call.end, (found.h, found.w), self._call.between) is not None:
            return False
        return same_shape(lead, fine) or splits_first(fine, lead) or splits_first(lead, fine)

    def _factors(self, found: RelativePositions) -> tuple[Node, Node]:
        """``rel_h (..., N, kh)`` and ``rel_w (..., N, kw)``."""
        pair = []
        for node, constant in ((found.h, -1), (found.w, -2)):
            node = self.add(aten.squeeze.dim, node, constant)
            node = self._as_fine(self.add(aten.flatten.using_ints, node, -3, -2))
            pair.append(self._times(node, found.factor))
        return pair[0], pair[1]

    def _times(self, node: Node, factor: float) -> Node:
        return node if factor == 1.0 else self.add(aten.mul.Scalar, node, factor)

    def _mask(self, summands: list[Summand]) -> Node | None:
        """The sum of all summands; a single bool mask stays bool."""
        if len(summands) == 1 and summands[0].fill == -math.inf:
            mask = self._broadcasting(summands[0])
            return mask if summands[0].seen else self.add(aten.logical_not.default, mask)
        total = None
        for summand in summands:
            if summand.fill is not None:
                total = self._filled(total, summand, summands)
                continue
            term = self._times(self._broadcasting(summand), summand.factor)
            total = term if total is None else self.add(aten.add.Tensor, total, term)
        return total

    def _filled(self, total: Node | None, summand: Summand, summands: list[Summand]) -> Node:
        """``total`` with the fill where the mask hides keys.

        A fill replaces a logit, but the operator adds its mask. So the fill is low enough that rounding removes the
        logit, and a row that is filled everywhere has equal weights. Float16 has no number that low.
        """
        assert summand.fill is not None
        mask = self._broadcasting(summand)
        hidden = self.add(aten.logical_not.default, mask) if summand.seen else mask
        if total is None:
            dtype = _fake(self._call.between[0]).dtype
            total = self.add(aten.zeros_like.default, mask, dtype=torch.bfloat16 if dtype == torch.float16 else dtype)
        elif _fake(total).dtype == torch.float16:
            total = self._cast(total, torch.float32)
        fill, lowest = summand.fill, torch.finfo(_fake(total).dtype).min
        if fill > -math.inf:
            others = {other.fill for other in summands} - {None, -math.inf, fill}
            fill = max(fill, lowest) if others else lowest
        return self.add(aten.masked_fill.Scalar, total, hidden, fill)

    def _cast_mask(self, mask: Node, dtype: torch.dtype) -> Node:
        """A float mask in ``dtype``; finite values stay finite."""
        limits = torch.finfo(dtype)
        if limits.max < torch.finfo(_fake(mask).dtype).max:
            finite = self.add(aten.clamp.default, mask, limits.min, limits.max)
            mask = self.add(aten.where.self, self.add(aten.isinf.default, mask), mask, finite)
        return self._cast(mask, dtype)

    def _broadcasting(self, summand: Summand) -> Node:
        """A summand of the logits, viewed so that it broadcasts to the finest shape."""
        node, shape = summand.value, shape_of(summand.value)
        dtype = _fake(node).dtype
        if (summand.fill is None) == (dtype == torch.bool) or not (dtype == torch.bool or dtype.is_floating_point):
            raise Refused(f"summands of its logits must be floating point, and masks bool, got {dtype}")
        if same_shape(summand.shape, self._fine) or len(shape) < len(summand.shape):
            return node
        return self.add(aten.unsqueeze.default, node, 0) if same(shape[0], 1) else self._split_first(node)


def cannot_be_viewed(old: Node, new: Node) -> bool:
    """Whether a view of ``old`` is impossible with the strides of ``new``."""
    return any(_breaks(user, {old: _fake(new)}) for user in old.users)


def _breaks(node: Node, values: dict[Node, Tensor]) -> bool:
    """Whether a view fails when the views after a value are run again on another fake tensor."""
    if operation(node) not in VIEWS | {"transpose", "permute", "as_strided"}:
        return False
    if operation(node) == "as_strided":
        return True
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n] if n in values else recorded_value(n))
    run = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    try:
        result = run(*args, **kwargs)
    except (RuntimeError, ValueError):
        return True
    return any(_breaks(user, {node: result}) for user in node.users)


def _fake(node: Node) -> Tensor:
    fake = fake_value(node)
    if fake is None:
        raise Refused(f"tracing recorded no tensor for its {plain_name(node)}")
    return fake
