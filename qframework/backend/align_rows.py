"""Makes rows of INT8 tensors begin where Hopper reads them fastest, at multiples of 64 bytes.

From::

    x -> int8_linear (w1, int8 out) -> int8_linear (w2)    K outputs, no multiple of 64, as those of SigLIP's MLP
    x -> quantize -> int8_linear (w)                       K inputs, no multiple of 16
    x -> transpose -> quantize -> int8_linear (w)          a layer over tokens, as MLP-Mixer's
    x -> int8_linear (w)                                   N results, no multiple of 16 bytes

To, with zeros behind each row and in the weights, which leave all sums as they are::

    x -> int8_linear (w1 with more rows) -> int8_linear (w2 with more columns)
    x -> quantize -> pad -> int8_linear (w with more columns)
    x -> quantize -> qframework::transpose_rows -> int8_linear (w with more columns)
    x -> int8_linear (w with more rows) -> slice

Rows that begin elsewhere straddle the lines of the cache: a layer of 4,304 inputs takes 1.3 to 1.6 times as long. Rows
that are no multiple of 16 bytes would be copied before each product, and so would the weight (launch.py): one of 3,420
takes 2.4 to 3.8 times as long (``other/2026-11-29-h200-aligned-rows.json``), and TMA cannot store such rows. A
transposition is a kernel of its own for any K: fused with the quantization of a norm, it would write each byte into
another line. Weights of converted models are padded again after each write.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from qframework.backend.lowering import Lowering, erase_unused
from qframework.backend.quantized_linear import int8_linear_arguments
from qframework.backend.watched_values import Operand, WatchedValues, is_followed, is_written
from qframework.compat.dispatch import FakeTensor
from qframework.compat.dynamo import record_value
from qframework.graph.nodes import argument, fake_value, operation
from qframework.graph.shapes import traced_size
from qframework.graph.strides import follow_strides
from qframework.kernels.linear.arguments import is_per_channel
from qframework.kernels.linear.tile import MAX_FEW_ROWS
from qframework.kernels.runtime.chip import capability_of
from qframework.numerics import MAX_INT8_PRODUCTS

_ours = torch.ops.qframework
_int8_linear, _quantize = _ours.int8_linear.default, _ours.quantize.default
_pad, _slice = torch.ops.aten.constant_pad_nd.default, torch.ops.aten.slice.Tensor
ALIGNMENT = 64  # bytes
_COPIED = 16  # bytes: rows of other widths would be copied
MOST_LONGER = 9 / 8  # rows that would be longer than this times K are made multiples of 16 bytes only
_STORED = 16  # bytes: rows of other widths are not stored by TMA
FEWEST_ROWS = MAX_FEW_ROWS + 1  # below, a kernel of its own reads rows of any width
TURNED = 2**20  # values of a transposed input, from which on a kernel of its own pays


def align_rows(lowering: Lowering) -> None:
    """Align the inputs of every ``int8_linear`` where that is known to pay, and results whose rows TMA cannot store."""
    aligning = _Aligning(lowering)
    for node in aligning.layers:
        aligning.plan(node)
    aligning.apply()
    if aligning.watched:
        lowering.checks.append(aligning.watched.check)


class _Aligning:
    """New inputs and widths by layer; weights are padded once, when all is known."""

    def __init__(self, lowering: Lowering) -> None:
        self._lowering = lowering
        self.watched = WatchedValues()
        self._inputs: dict[Node, Node] = {}  # aligned, by what layers read
        self._widths: dict[Node, int] = {}  # of those rows
        self._columns: dict[Node, int] = {}  # of a layer's weight, as many as it will have
        self._rows: dict[Node, int] = {}
        self._shared: dict[Any, Node] = {}  # padded parameters, for layers that share one
        layers = [node for node in lowering.gm.graph.nodes if self._is_known(node)]
        if is_written([each for node in layers for each in _parameters(node)], lowering):
            layers = [node for node in layers if not is_written(_parameters(node), lowering)]
        self.layers = dict.fromkeys(layers)

    def _is_known(self, node: Node) -> bool:
        """Whether a node is an ``int8_linear`` of many rows on Hopper, whose parameters are known or followed."""
        if node.target is not _int8_linear or node.kwargs:
            return False
        call, lowering = int8_linear_arguments(node), self._lowering
        x, result = fake_value(call.a), fake_value(node)
        if x is None or result is None or capability_of(x.device) != (9, 0) or _rows(x) < FEWEST_ROWS:
            return False
        kept = node in lowering.converted or all(map(lowering.scales.owns, (call.b, call.b_scale)))
        return kept and all(is_followed(each, lowering) for each in _parameters(node))

    def plan(self, node: Node) -> None:
        """Decide on a layer's input, and on the widths of its weight."""
        call = int8_linear_arguments(node)
        outputs, inputs = self._value(call.b).shape
        if call.a not in self._inputs:
            self._inputs[call.a], self._widths[call.a] = self._aligned(call.a, inputs)
        if self._inputs[call.a] is not call.a or self._widths[call.a] != inputs:
            self._columns[node] = self._widths[call.a]
        result = fake_value(node)
        stored = None if result is None or call.residual is not None else result.dtype.itemsize
        if stored is not None and stored > 1 and outputs * stored % _STORED:
            self._cut(node, _round_up(outputs, _STORED // stored))

    def _aligned(self, a: Node, inputs: int) -> tuple[Node, int]:
        """``a (..., K)`` with longer rows and zeros behind K, or as it is, and the width of its rows."""
        x, fake = argument(a, 0, "x") if a.target is _quantize else None, fake_value(a)
        assert fake is not None
        scale = self._lowering.constants.value(argument(a, 1, "scale")) if a.target is _quantize else None
        width = _round_up(inputs, ALIGNMENT)
        if width > MAX_INT8_PRODUCTS:  # which the operator refuses
            return a, inputs
        one = scale is not None and scale.numel() == 1
        if one and isinstance(x, Node) and swaps_last(x) and _rows(fake) * width >= TURNED:
            return self._transposed(a, x, width), width
        width = width if width <= MOST_LONGER * inputs else _round_up(inputs, _COPIED)
        if width != inputs and self._is_written_for_layers(a):
            self._rows[a] = width
            return a, width
        if inputs % _COPIED:
            return self._padded(a, width), width
        return a, inputs

    def _is_written_for_layers(self, a: Node) -> bool:
        """Whether a layer writes ``a`` for layers alone, all of which can read more columns."""
        if a not in self.layers or not all(user in self.layers for user in a.users):
            return False
        call = int8_linear_arguments(a)
        return (
            call.residual is None
            and call.out_scale is not None
            and all(int8_linear_arguments(user).a is a for user in a.users)
        )

    def _cut(self, node: Node, width: int) -> None:
        """Let a layer compute ``width`` results, of which its readers get the first."""
        fake = fake_value(node)
        if not isinstance(fake, FakeTensor):
            return
        part: Any = fake.new_empty((*fake.shape[:-1], width))[..., : fake.shape[-1]]
        moved = follow_strides(node, part)
        if moved is None:
            return
        for each, value in moved.items():
            record_value(each, value)
        with node.graph.inserting_after(node):
            cut = node.graph.call_function(_slice, (node, -1, 0, fake.shape[-1]))
        node.replace_all_uses_with(cut, delete_user_cb=lambda user: user is not cut)
        cut.meta = dict(node.meta)
        record_value(cut, part)
        self._rows[node] = width

    def _transposed(self, a: Node, x: Node, width: int) -> Node:
        source = argument(x, 0, "input", "self")
        with a.graph.inserting_before(a):
            q = a.graph.call_function(_quantize, (source, *a.args[1:]), a.kwargs)
            turned = a.graph.call_function(_ours.transpose_rows.default, (q, width))
        self._record(q, source, lambda fake: fake.new_empty(fake.shape, dtype=torch.int8))
        self._record(turned, q, lambda fake: _ours.transpose_rows(fake, width))
        return turned

    def _padded(self, a: Node, width: int) -> Node:
        fake = fake_value(a)
        assert fake is not None
        more = [0, width - int(fake.shape[-1])]
        with a.graph.inserting_after(a):
            padded = a.graph.call_function(_pad, (a, more, 0))
        self._record(padded, a, lambda fake: _pad(fake, more, 0))
        return padded

    def _record(self, node: Node, like: Node, compute: Callable[[Tensor], Tensor]) -> None:
        node.meta = {key: value for key, value in like.meta.items() if key == "nn_module_stack"}
        fake = fake_value(like)
        assert fake is not None
        record_value(node, compute(fake))

    def apply(self) -> None:
        """Change the layers of the plan."""
        for node in dict.fromkeys((*self._rows, *self._columns)):
            call = int8_linear_arguments(node)
            outputs, inputs = self._value(call.b).shape
            more = self._rows.get(node, outputs) - outputs
            frozen = node not in self._lowering.converted  # what passes join and add to it is not: biases
            columns = self._columns.get(node, inputs) - inputs
            padded = {"b": self._pad(call.b, (0, columns, 0, more), watch=not frozen)}
            for name, fill in (("b_scale", 1), ("bias", 0), ("out_scale", 1)):
                each = getattr(call, name)
                if each is not None and (name == "bias" or is_per_channel(self._value(each), outputs)):
                    padded[name] = self._pad(each, (0, more), fill, watch=not frozen or name != "b_scale")
            a = self._inputs[call.a] if node in self._columns else call.a
            node.args = tuple(call._replace(a=a, **padded))
            erase_unused(self._lowering.gm, call.a)
            fake = fake_value(node)
            if more and fake is not None:
                record_value(node, fake.new_empty((*fake.shape[:-1], outputs + more)))
            for each in _parameters_of(call):
                if self._lowering.scales.owns(each):
                    self._lowering.scales.remove(each)

    def _pad(self, parameter: Node, more: tuple[int, ...], fill: int = 0, *, watch: bool) -> Node:
        """A buffer with a layer's parameter and ``fill`` around it, computed again after writes if ``watch`` is set."""
        if not any(more):
            return parameter
        kind = parameter, more, fill, watch
        if kind in self._shared:
            return self._shared[kind]
        lowering, operand = self._lowering, Operand(parameter, self._lowering.constants)

        def compute(value: Tensor) -> Tensor:
            return torch.nn.functional.pad(value, more, value=fill)

        with torch.no_grad():
            buffer = lowering.scales.buffer(compute(self._value(parameter)))
        if watch:
            self.watched.add(lowering.constants.value(buffer), compute, [operand])
        self._shared[kind] = buffer
        return buffer

    def _value(self, node: Node) -> Tensor:
        value = self._lowering.constants.value(node)
        assert value is not None
        return value


def _parameters(layer: Node) -> list[Node]:
    return _parameters_of(int8_linear_arguments(layer))


def _parameters_of(call: Any) -> list[Node]:
    """What each output channel of a layer has a part of."""
    return [each for each in (call.b, call.b_scale, call.bias, call.out_scale) if each is not None]


def _rows(x: Tensor) -> int:
    """When the graph was captured."""
    return math.prod(map(traced_size, x.shape[:-1]))


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def swaps_last(x: Node) -> bool:
    """Whether a node swaps the last two dimensions of its input, and moves no other."""
    source = argument(x, 0, "input", "self")
    fake = fake_value(source) if isinstance(source, Node) else None
    if fake is None or fake.ndim < 2 or fake.stride(-1) != 1:
        return False
    *others, before, last = range(fake.ndim)
    if operation(x) == "transpose":
        given: Any = argument(x, 1, "dim0"), argument(x, 2, "dim1")
        return all(isinstance(dim, int) for dim in given) and {dim % fake.ndim for dim in given} == {before, last}
    if operation(x) == "permute":
        given = x.args[1:] if isinstance(argument(x, 1, "dims"), int) else argument(x, 1, "dims")
        known = all(isinstance(dim, int) for dim in given)
        return known and [dim % fake.ndim for dim in given] == [*others, last, before]
    return False
