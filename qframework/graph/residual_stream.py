"""Finds residual streams: values that only linear layers, sums and parameters write, and that norms read.

Every block of a pre-norm transformer adds to one tensor ``x (..., C)``, and reads it through a norm::

    patch or token embedding, positions, class token -> x;   x <- x + linear(...);   norm(x) -> linears

Its C channels can be changed to any other orthonormal basis, ``x -> x Q``, if every writer and every reader follows
(qframework/quantizer/rotate.py). A stream is found from a norm's input: the search follows every node that computes the
same function of each channel vector (sums, views, selections of tokens, factors without channels) in both directions
until it reaches a writer, a norm, a linear that reads the stream itself, or a *crossing*: any other operation, where
the old basis is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.fx import GraphModule, Node

from qframework.graph.channels import READS_ONLY_THE_SHAPE
from qframework.graph.nodes import (
    CASTS,
    COPIES,
    argument,
    fake_value,
    is_assertion,
    is_inactive_dropout,
    linear_call,
    operation,
)
from qframework.graph.shapes import same
from qframework.graph.writes import writes_in_place

_CONVOLUTIONS = {"conv1d": 3, "conv2d": 4, "conv3d": 5, "convolution": None}
_RESHAPES = {"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze"}
_SUMS = {"add", "sub"}
_FACTORS = {"mul", "div"}
_REDUCTIONS = {"mean", "sum"}
# operations along one dimension, which must not be that of the channels: the position of its argument
_ALONG = {"select": 1, "slice": 1, "narrow": 1, "index_select": 1, "flip": 1, "roll": 2}
_SPLITS = {"unbind": 1, "chunk": 2, "split": 2, "split_with_sizes": 2}


class Writer(NamedTuple):
    """A node whose parameters determine what it adds to the stream; ``parameters`` with the axis of the channels.

    ``node`` is a linear, a convolution, an embedding, or a ``get_attr`` that is itself added.
    """

    node: Node
    parameters: tuple[tuple[Node, int], ...]


class Norm(NamedTuple):
    """A LayerNorm or RMSNorm of the stream, or the product with the gain of an RMSNorm that is spelled out.

    Attributes:
        node: the norm or the product.
        weight: its gain, a ``get_attr`` node; None without one.
        bias: likewise.
        linears: the linears that read it, possibly through views and selections of tokens.
        crossings: pairs of a value in the norm's basis and a node that reads it and is no linear.
    """

    node: Node
    weight: Node | None
    bias: Node | None
    linears: tuple[Node, ...]
    crossings: tuple[tuple[Node, Node], ...]


@dataclass
class Stream:
    """A residual stream of ``size`` channels.

    Attributes:
        size: C.
        writers: what adds to it from parameters.
        linears: linears that read it without a norm.
        norms: norms that read it.
        entries: nodes that write it and have no parameters for it.
        crossings: pairs of a value of the stream and a node that reads it in the old basis.
        refusal: why its basis cannot be changed, "" if it can.
    """

    size: int
    writers: list[Writer] = field(default_factory=list)
    linears: list[Node] = field(default_factory=list)
    norms: list[Norm] = field(default_factory=list)
    entries: list[Node] = field(default_factory=list)
    crossings: list[tuple[Node, Node]] = field(default_factory=list)
    refusal: str = ""

    def readers(self) -> list[Node]:
        """All linears that read it, through norms or not."""
        return [*self.linears, *(linear for norm in self.norms for linear in norm.linears)]


def find_residual_streams(gm: GraphModule) -> list[Stream]:
    """All streams of an exported graph, in graph order. Each norm belongs to one of them."""
    streams: list[Stream] = []
    seen: set[Node] = set()
    for node in gm.graph.nodes:
        source = _norm_input(node)
        if source is not None and source not in seen:
            walk = _Walk(source)
            seen |= set(walk.axis)
            if walk.stream.norms:
                streams.append(walk.stream)
    return streams


def _norm_input(node: Node) -> Node | None:
    """The input of a norm over the last dimension; None for any other node."""
    if operation(node) not in ("layer_norm", "rms_norm") or len(argument(node, 1, "normalized_shape")) != 1:
        return None
    return argument(node, 0, "input")


class _Walk:
    """Follows a stream from one of its values; ``axis`` holds the dimension of the channels in each value."""

    def __init__(self, start: Node) -> None:
        fake = fake_value(start)
        size = fake.shape[-1] if fake is not None else None
        self.stream = Stream(size if isinstance(size, int) else 0)
        self.axis: dict[Node, int] = {}
        self._waiting: list[Node] = []
        if not isinstance(size, int) or fake is None:
            self.stream.refusal = "its number of channels is not fixed"
            return
        self._add(start, fake.dim() - 1)
        while self._waiting:
            node = self._waiting.pop()
            self._backward(node)
            for user in list(node.users):
                self._forward(node, user)

    def _add(self, node: Node, axis: int) -> None:
        if self.axis.setdefault(node, axis) != axis:
            self.stream.refusal = f"{node.name} holds its channels in two dimensions"
        elif node not in self._waiting:
            self._waiting.append(node)

    def _meet(self, node: Node, axis: int) -> None:
        if node not in self.axis:
            self._add(node, axis)
        elif self.axis[node] != axis:
            self.stream.refusal = f"{node.name} holds its channels in two dimensions"

    # Backwards: what a value of the stream is made from

    def _backward(self, node: Node) -> None:
        axis = self.axis[node]
        writer = _writer(node, axis, self.stream.size)
        operands = None if writer is not None else _operands(node, axis, self.stream.size)
        if writer is not None:
            self.stream.writers.append(writer)
        elif operands is None:
            self.stream.entries.append(node)
            if axis != _rank(node) - 1:
                self.stream.refusal = f"{node.name} writes it with its channels in dimension {axis}"
        else:
            for operand, its_axis in operands:
                self._meet(operand, its_axis)

    # Forwards: what reads a value of the stream

    def _forward(self, value: Node, user: Node) -> None:
        axis, last = self.axis[value], self.axis[value] == _rank(value) - 1
        if user in self.axis or is_assertion(user) or operation(user) in READS_ONLY_THE_SHAPE:
            return
        if last and _is_linear_of(user, value):
            self.stream.linears.append(user)
        elif last and _norm_input(user) is value:
            self.stream.norms.append(_norm(user, argument(user, 2, "weight"), _bias(user)))
        elif last and (gain := _gain(user, value, self.stream.size)) is not None:
            self.stream.norms.append(_norm(user, gain, None))
        elif _is_square_mean(user, value, axis):
            return
        elif (after := _result_axis(user, value, axis)) is not None and self._is_known(user, value):
            for result in _results(user):
                self._meet(result, after)
        elif writes_in_place(user):
            self.stream.refusal = f"{user.name} writes in place"
        elif not last:
            self.stream.refusal = f"{user.name} reads it with its channels in dimension {axis}"
        else:
            self.stream.crossings.append((value, user))

    def _is_known(self, user: Node, value: Node) -> bool:
        """Whether every other operand of ``user`` may belong to the stream; none of them need be visited yet."""
        if operation(user) not in _SUMS | {"cat"}:
            return True
        after = _result_axis(user, value, self.axis[value])
        return after is not None and _operands(user, after, self.stream.size) is not None


def _rank(node: Node) -> int:
    fake = fake_value(node)
    return -1 if fake is None else fake.dim()


def _size(node: Node, axis: int) -> Any:
    fake = fake_value(node)
    return None if fake is None or axis >= fake.dim() else fake.shape[axis]


def _bias(node: Node) -> Any:
    return argument(node, 3, "bias") if operation(node) == "layer_norm" else None


def _is_linear_of(node: Node, value: Node) -> bool:
    call = linear_call(node)
    return call is not None and call.input is value and call.weight is not value and call.weight.op == "get_attr"


def _writer(node: Node, axis: int, size: int) -> Writer | None:
    call, last = linear_call(node), axis == _rank(node) - 1
    if call is not None:
        return _with_parameters(node, [(call.weight, 0), (call.bias, 0)]) if last else None
    if node.op == "get_attr":
        return Writer(node, ((node, axis),)) if _size(node, axis) == size else None
    if operation(node) == "embedding" and last and not argument(node, 3, "scale_grad_by_freq", default=False):
        return _with_parameters(node, [(node.args[0], 1)])
    if operation(node) in _CONVOLUTIONS and axis == 1 and argument(node, 6, "groups", default=1) == 1:
        transposed = operation(node) == "convolution"
        return None if transposed else _with_parameters(node, [(node.args[1], 0), (argument(node, 2, "bias"), 0)])
    return None


def _with_parameters(node: Node, given: list[tuple[Any, int]]) -> Writer | None:
    kept = tuple((parameter, axis) for parameter, axis in given if parameter is not None)
    return Writer(node, kept) if all(parameter.op == "get_attr" for parameter, _ in kept) else None


def _gain(user: Node, value: Node, size: int) -> Node | None:
    """The parameter ``(C,)`` that ``user`` multiplies ``value`` by; None for any other node."""
    if operation(user) != "mul" or len(user.args) != 2 or user.kwargs:
        return None
    other = user.args[1] if user.args[0] is value else user.args[0]
    fits = isinstance(other, Node) and other.op == "get_attr" and _rank(other) == 1
    return other if fits and _size(other, 0) == size and _is_normalized(value) else None  # type: ignore[arg-type, return-value]


def _is_normalized(value: Node) -> bool:
    """Whether a value is a product with the reciprocal of a root, as in an RMSNorm that is spelled out."""
    while operation(value) in CASTS | COPIES:
        value = value.all_input_nodes[0]
    factors = value.all_input_nodes if operation(value) in _FACTORS else []
    return any(operation(factor) in ("rsqrt", "sqrt", "pow", "reciprocal") for factor in factors)


def _is_square_mean(user: Node, value: Node, axis: int) -> bool:
    """Whether ``user`` is a square that only means over the channels read, which no rotation changes."""
    name, last = operation(user), axis == _rank(value) - 1
    power = name == "square" or (name == "pow" and len(user.args) == 2 and user.args[1] == 2)
    product = name == "mul" and len(user.args) == 2 and user.args[0] is value and user.args[1] is value
    return last and (power or product) and bool(user.users) and all(_is_mean_of_last(each) for each in user.users)


def _is_mean_of_last(node: Node) -> bool:
    dims = argument(node, 1, "dim")
    return operation(node) in _REDUCTIONS and dims is not None and [*_listed(dims)] == [-1]


def _listed(dims: Any) -> list[int]:
    return [dims] if isinstance(dims, int) else list(dims)


def _norm(node: Node, weight: Any, bias: Any) -> Norm:
    """A norm with its readers; a gain or a bias that is computed makes everything behind it a crossing."""
    linears: list[Node] = []
    crossings: list[tuple[Node, Node]] = []
    waiting = [(node, _rank(node) - 1)]
    while waiting:
        value, axis = waiting.pop()
        for user in value.users:
            after = _result_axis(user, value, axis) if operation(user) not in _SUMS | {"cat"} else None
            if is_assertion(user) or operation(user) in READS_ONLY_THE_SHAPE:
                continue
            if axis == _rank(value) - 1 and _is_linear_of(user, value):
                linears.append(user)
            elif after is not None and after == _rank(next(iter(_results(user)), user)) - 1 and not _loses_bias(user):
                waiting += [(result, after) for result in _results(user)]
            else:
                crossings.append((value, user))
    return Norm(node, weight, bias, tuple(sorted(linears)), tuple(crossings))


def _loses_bias(node: Node) -> bool:
    """Whether a constant in the node's input does not arrive unchanged in its result."""
    return operation(node) in {*_FACTORS, "sum", "neg"} or "pad" in (operation(node) or "")


# ----------------------------------------------------------------------------------------------------------------------
# Nodes that compute the same function of every channel vector


def _results(node: Node) -> list[Node]:
    """The tensors that a node computes: those of its ``getitem`` nodes if it splits a tensor."""
    return list(node.users) if operation(node) in _SPLITS else [node]


def _result_axis(node: Node, value: Node, axis: int) -> int | None:
    """The dimension of the channels in the result of ``node``, which reads ``value``; None for a crossing."""
    name, rank = operation(node), _rank(value)
    if name in _SPLITS:
        along = argument(node, _SPLITS[name], "dim", default=0) % rank
        tensors = node.users and all(operation(user) == "getitem" for user in node.users)
        return None if along == axis or not tensors else axis - (name == "unbind" and along < axis)
    found = _moved(node, value, axis)
    return found if found is not None and same_size(node, found, value, axis) else None


def same_size(node: Node, axis: int, other: Node, other_axis: int) -> bool:
    """Whether two dimensions are known to have the same size."""
    a, b = _size(node, axis), _size(other, other_axis)
    return a is not None and b is not None and same(a, b)


def _moved(node: Node, value: Node, axis: int) -> int | None:
    name, rank, after = operation(node), _rank(value), _rank(node)
    if name in CASTS | COPIES | {"detach", "neg"} or is_inactive_dropout(node):
        return axis
    if name in _SUMS:
        return axis - rank + after
    if name in _FACTORS:
        return axis - rank + after if _is_factor_without_channels(node, value, axis) else None
    if name == "cat":
        return axis if argument(node, 1, "dim", default=0) % rank != axis else None
    if name == "transpose":
        a, b = (argument(node, 1, "dim0") % rank, argument(node, 2, "dim1") % rank)
        return {a: b, b: a}.get(axis, axis)
    if name == "permute":
        order = argument(node, 1, "dims")
        return [each % rank for each in order].index(axis) if isinstance(order, list | tuple) else None
    if name in _RESHAPES:
        return _reshaped(value, axis, node)
    if name == "expand":
        return axis - rank + after
    if name in _ALONG:
        return _along(node, axis, rank)
    if name in _REDUCTIONS:
        return _reduced(node, axis, rank)
    return axis if name in ("pad", "constant_pad_nd") and _pads_zeros(node, axis, rank) else None


def _is_factor_without_channels(node: Node, value: Node, axis: int) -> bool:
    if len(node.args) != 2 or (operation(node) == "div" and (node.args[0] is not value or node.kwargs)):
        return False
    other = node.args[1] if node.args[0] is value else node.args[0]
    if not isinstance(other, Node):
        return isinstance(other, int | float)
    at = axis - _rank(value) + _rank(other)
    return other is not value and fake_value(other) is not None and (at < 0 or _size(other, at) == 1)


def _reshaped(value: Node, axis: int, node: Node) -> int | None:
    """The new dimension of the channels: the elements behind it are as many as before."""
    before, after = fake_value(value), fake_value(node)
    if before is None or after is None:
        return None
    behind = math.prod(before.shape[axis + 1 :])
    for new in range(after.dim()):
        if same(after.shape[new], before.shape[axis]) and same(math.prod(after.shape[new + 1 :]), behind):
            return new
    return None


def _along(node: Node, axis: int, rank: int) -> int | None:
    name = operation(node) or ""
    dims = argument(node, _ALONG[name], "dim", "dims", default=0)
    changed = {each % rank for each in _listed(dims)} if dims != [] else set(range(rank))
    if axis in changed or (name == "roll" and not changed):
        return None
    return axis - (name == "select" and min(changed) < axis)


def _reduced(node: Node, axis: int, rank: int) -> int | None:
    dims = argument(node, 1, "dim")
    if dims is None or not _listed(dims):
        return None
    changed = {each % rank for each in _listed(dims)}
    if axis in changed:
        return None
    return axis if argument(node, 2, "keepdim", default=False) else axis - sum(each < axis for each in changed)


def _pads_zeros(node: Node, axis: int, rank: int) -> bool:
    sizes, mode = argument(node, 1, "pad"), argument(node, 2, "mode", default="constant")
    number = mode if isinstance(mode, int | float) else argument(node, 3, "value")
    untouched = all(same(size, 0) for i, size in enumerate(sizes) if rank - 1 - i // 2 == axis)
    return untouched and number in (None, 0) and (mode == "constant" or isinstance(mode, int | float))


def _operands(node: Node, axis: int, size: int) -> list[tuple[Node, int]] | None:
    """The operands of a value of the stream that are of the stream too, with their axes; None if there is another."""
    name = operation(node)
    if name in _SUMS:
        return _terms(node, axis, size)
    if name == "cat":
        parts: Any = node.args[0]
        return [(part, axis) for part in parts] if argument(node, 1, "dim", default=0) % _rank(node) != axis else None
    if name == "getitem":
        return _of_split(node, axis)
    value = _followed(node)
    if value is None:
        return None
    rank = _rank(value)
    candidates = [
        each for each in range(rank) if _result_axis(node, value, each) == axis and _size(value, each) == size
    ]
    return [(value, candidates[0])] if len(candidates) == 1 else None


def _followed(node: Node) -> Node | None:
    """The one operand that a node passes on."""
    tensors = list(_tensors(node))
    if operation(node) in _FACTORS and len(tensors) == 2:
        full = [each for each in tensors if _rank(each) == _rank(node) and _size(each, _rank(each) - 1) != 1]
        return full[0] if len(full) == 1 else None
    return tensors[0] if tensors else None


def _tensors(node: Node) -> Iterator[Node]:
    return (each for each in node.all_input_nodes if fake_value(each) is not None)


def _terms(node: Node, axis: int, size: int) -> list[tuple[Node, int]] | None:
    terms: list[tuple[Node, int]] = []
    for term in node.args:
        if not isinstance(term, Node) or fake_value(term) is None:
            return None  # a number, which has no basis
        at = axis - _rank(node) + _rank(term)
        if at < 0 or _size(term, at) != size:
            return None
        terms.append((term, at))
    return terms


def _of_split(node: Node, axis: int) -> list[tuple[Node, int]] | None:
    split = node.all_input_nodes[0]
    if operation(split) not in _SPLITS or not split.all_input_nodes:
        return None
    value = split.all_input_nodes[0]
    candidates = [each for each in range(_rank(value)) if _result_axis(split, value, each) == axis]
    fitting = [each for each in candidates if same_size(value, each, node, axis)]
    return [(value, fitting[0])] if len(fitting) == 1 else None
