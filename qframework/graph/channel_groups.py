"""Finds where scales of channels can move from one layer to the next without changing the model's function.

From, with any s > 0 for each channel::

    producer -> [views, zero padding, ReLU, gates, attention as its values, ...] -> linear(W), linear(V), ...

To::

    producer / s -> [the same] -> linear(W * s), linear(V * s), ...

A producer has parameters for each output channel: LayerNorm, RMSNorm, either of them written as a product with a
parameter, and a linear, by its rows. The steps in between must preserve positive factors channel by channel; a channel
with any other reader is not scaled. SmoothQuant (arXiv:2211.10438) moves scales this way, from norms to linears.

Constants move the same way, from the bias of a producer to those of the linears, through steps that preserve sums with
a constant: views, and attention as its values, since rows of weights sum to one. A constant that is added to all keys
has no effect at all, because the softmax does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from qframework.compat.dispatch import memory_of
from qframework.errors import QFrameworkError
from qframework.graph.channels import READS_ONLY_THE_SHAPE, ChannelView, Dim, parts, through
from qframework.graph.nodes import CASTS, argument, fake_value, is_assertion, linear_call, operation
from qframework.graph.shapes import same
from qframework.graph.writes import writes_in_place

_NORMS = {"layer_norm", "rms_norm"}


class Parameter(NamedTuple):
    """A parameter by its qualified name, and the dimension that runs over the channels."""

    name: str
    axis: int


class Consumer(NamedTuple):
    """A linear that reads the channels of a group; ``channels`` ``(K,)`` int64 is the channel of each input feature."""

    linear: Node
    weight: Parameter
    channels: Tensor


@dataclass(frozen=True)
class ChannelGroup:
    """A producer and the linears that read its channels.

    Attributes:
        producer: the node whose output has ``size`` channels.
        parameters: the producer's parameters, which a scale divides; of a group of constants, its bias alone.
        free: ``(size,)`` bool, the channels that may change: those that nothing else reads.
        consumers: the linears, in graph order.
        keys: of a group of constants, the attention that reads channels as keys, and these channels, int64.
    """

    producer: Node
    parameters: tuple[Parameter, ...]
    free: Tensor
    consumers: tuple[Consumer, ...]
    keys: tuple[tuple[Node, Tensor], ...] = ()

    @property
    def size(self) -> int:
        """How many channels the producer has."""
        return self.free.numel()

    @property
    def is_norm(self) -> bool:
        """Whether the producer is anything but a linear."""
        return linear_call(self.producer) is None


def find_channel_groups(gm: GraphModule) -> list[ChannelGroup]:
    """All groups of an exported graph, in graph order. Parameters that several layers use are in no group."""
    users = _users_of_parameters(gm)
    groups = []
    for node in gm.graph.nodes:
        parameters = _producer(node)
        if parameters is None or not all(users(gm, each.name) <= {node, node.args[0]} for each in parameters):
            continue
        group = _Walk(node, _STEPS).group(parameters, lambda linear, name: users(gm, name) == {linear})
        if group is not None:
            groups.append(group)
    return groups


def find_shift_groups(gm: GraphModule) -> list[ChannelGroup]:
    """The groups through which constants can move, from a bias to other biases, in graph order."""
    users = _users_of_parameters(gm)
    groups = []
    for node in gm.graph.nodes:
        parameters = _producer(node)
        if parameters is None or len(parameters) < 2 or not users(gm, parameters[1].name) <= {node, node.args[0]}:
            continue
        group = _Walk(node, _SHIFT_STEPS, through_keys=True).group(parameters[1:], lambda linear, name: True)
        if group is not None:
            groups.append(group)
    return groups


def fold(module: nn.Module, group: ChannelGroup, scales: Tensor) -> None:
    """Divide the producer's output by ``scales``, and multiply the columns of its consumers' weights by them.

    Args:
        module: the graph module, or the model it was exported from. Changed parameters are replaced by new ones of the
            same names, so that modules that share the old ones keep them.
        group: one of ``find_channel_groups``.
        scales: ``(group.size,)`` float, positive, 1 where the channel is not free.

    Raises:
        QFrameworkError: ``scales`` has other values.
    """
    allowed = (scales > 0) & scales.isfinite() & (group.free.to(scales.device) | (scales == 1))
    if not bool(allowed.all()):
        raise QFrameworkError(f"fold: scales must be positive and finite, and 1 for fixed channels, got {scales}")
    for parameter in group.parameters:
        multiply(module, parameter, 1.0 / scales.double())
    for consumer in group.consumers:
        multiply(module, consumer.weight, scales[consumer.channels.to(scales.device)])


def multiply(module: nn.Module, parameter: Parameter, factors: Tensor) -> None:
    """Replace a parameter by itself times ``factors`` ``(channels,)`` along its axis, computed in float64."""
    path, _, leaf = parameter.name.rpartition(".")
    owner = module.get_submodule(path)
    old: Tensor = getattr(owner, leaf)
    shape = [1] * old.dim()
    shape[parameter.axis] = -1
    new = (old.detach().double() * factors.to(old.device).double().reshape(shape)).to(old.dtype)
    setattr(owner, leaf, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)


def only_reader(gm: GraphModule, linear: Node) -> bool:
    """Whether ``linear`` is the only reader of its weight, under any name."""
    weight: Any = linear.args[1]
    return _users_of_parameters(gm)(gm, str(weight.target)) == {linear}


# ----------------------------------------------------------------------------------------------------------------------
# Producers


def _producer(node: Node) -> tuple[Parameter, ...] | None:
    """The parameters that scale a node's output channels; None if it has none."""
    if linear_call(node) is not None:
        return _named([(node.args[1], 0), (argument(node, 2, "bias"), 0)])
    if operation(node) in _NORMS:
        one = len(argument(node, 1, "normalized_shape", default=())) == 1
        bias = argument(node, 3, "bias") if operation(node) == "layer_norm" else None
        return _named([(argument(node, 2, "weight"), 0), (bias, 0)]) if one else None
    if (factor := _with_channels(node, "mul")) is not None:
        return _named([(factor, -1)])
    shift, product = _with_channels(node, "add"), node.args[0] if node.args else None
    if shift is None or not isinstance(product, Node) or len(product.users) != 1:
        return None
    factor = _with_channels(product, "mul")
    return _named([(factor, -1), (shift, -1)]) if factor is not None else None


def _named(parameters: list[tuple[Any, int]]) -> tuple[Parameter, ...] | None:
    """Parameters by name, without those that are None; None if the first is None or any is computed."""
    given = [(node, axis) for node, axis in parameters if node is not None]
    if not given or parameters[0][0] is None or any(node.op != "get_attr" for node, _ in given):
        return None
    return tuple(Parameter(str(node.target), axis) for node, axis in given)


def _with_channels(node: Node, name: str) -> Node | None:
    """The parameter with one element for each channel that ``node`` multiplies or adds to its other operand."""
    if operation(node) != name or len(node.args) != 2 or node.kwargs:
        return None
    fake = fake_value(node)
    for constant, other in (node.args, node.args[::-1]):
        if not (isinstance(constant, Node) and isinstance(other, Node)) or constant.op != "get_attr":
            continue
        factor, value = fake_value(constant), fake_value(other)
        if fake is None or factor is None or value is None or factor.dim() == 0 or value.shape != fake.shape:
            continue
        return constant if factor.numel() == factor.shape[-1] == fake.shape[-1] else None
    return None


def _users_of_parameters(gm: GraphModule) -> Callable[[GraphModule, str], set[Node]]:
    """A function from a parameter's name to the nodes that read its memory, under any name."""
    readers: dict[int, set[Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr" and isinstance(value := attrgetter(str(node.target))(gm), Tensor):
            readers.setdefault(memory_of(value), set()).update(node.users)
    return lambda gm, name: readers[memory_of(attrgetter(name)(gm))]


# ----------------------------------------------------------------------------------------------------------------------
# From a producer to its readers


@dataclass
class _Walk:
    """Follows the channels of a producer to everything that reads them."""

    producer: Node
    steps: dict[str, _Step]
    through_keys: bool = False
    kept: Tensor = field(init=False)  # (channels,) bool: those that may not change
    keys: list[tuple[Node, Tensor]] = field(default_factory=list)
    readers: list[tuple[Node, ChannelView]] = field(default_factory=list)
    reached: dict[Node, ChannelView] = field(default_factory=dict)  # nodes that preserve factors

    def group(self, parameters: tuple[Parameter, ...], owns: Callable[[Node, str], bool]) -> ChannelGroup | None:
        """The group; None if no channel is free. ``owns(linear, weight)``: whether no other node uses the weight."""
        fake = fake_value(self.producer)
        if fake is None or not isinstance(fake.shape[-1], int):
            return None
        self.kept = torch.zeros(fake.shape[-1], dtype=torch.bool)
        self._follow(ChannelView.of(fake.shape))
        consumers, read = [], torch.zeros_like(self.kept)
        for linear, view in self.readers:
            name, channels = str(linear.args[1].target), _last_dimension(view)  # type: ignore[union-attr]
            if channels is None or not owns(linear, name):
                self._keep(view)
            else:
                consumers.append(Consumer(linear, Parameter(name, 1), channels))
                read[channels] = True
        for _, channels in self.keys:
            read[channels] = True
        free = read & ~self.kept
        used = sorted((c for c in consumers if bool(free[c.channels].any())), key=lambda c: c.linear)
        keys = tuple((attention, channels) for attention, channels in self.keys if bool(free[channels].any()))
        return ChannelGroup(self.producer, parameters, free, tuple(used), keys) if used or keys else None

    def _follow(self, view: ChannelView) -> None:
        waiting = [(self.producer, view)]
        while waiting:
            value, seen = waiting.pop()
            for user in value.users:
                waiting += self._step(user, value, seen)

    def _step(self, user: Node, value: Node, view: ChannelView) -> list[tuple[Node, ChannelView]]:
        """The next values that hold the channels of ``value``, through ``user``."""
        if is_assertion(user) or operation(user) in READS_ONLY_THE_SHAPE:
            return []
        once = _occurrences(user, value) == 1
        onward = list(_onward(user, value, view, self.steps)) if once else []
        if self.through_keys and once and _is_key_of(user, value, view):
            self.keys.append((user, view.channels().flatten().unique()))
            return []
        if _is_linear_of(user, value):
            self.readers.append((user, view))
        elif onward and user not in self.reached:
            self.reached[user] = view
            return onward
        else:
            self._keep(view)
            if onward:  # the product of two values that both change
                self._keep(self.reached[user])
            elif writes_in_place(user):  # visible through other views of the memory too
                self.kept[:] = True
        return []

    def _keep(self, view: ChannelView) -> None:
        self.kept[view.channels().flatten()] = True


def _occurrences(node: Node, value: Node) -> int:
    found = 0

    def count(argument: Node) -> Node:
        nonlocal found
        found += argument is value
        return argument

    torch.fx.node.map_arg((node.args, node.kwargs), count)
    return found


def _is_linear_of(node: Node, value: Node) -> bool:
    call = linear_call(node)
    return call is not None and call.input is value and isinstance(call.weight, Node) and call.weight.op == "get_attr"


def _last_dimension(view: ChannelView) -> Tensor | None:
    """``(K,)``: the channel of each element of the last dimension; None if other dimensions run over channels too."""
    *others, last = view.dims
    if any(dim.has_channels for dim in others) or any(factor.stride is None for factor in last.split()):
        return None
    return view.channels(len(others)).flatten()


def _is_key_of(node: Node, value: Node, view: ChannelView) -> bool:
    """Whether ``value`` holds the keys of attention, in which no channel differs between tokens."""
    is_key = operation(node) == "scaled_dot_product_attention" and argument(node, 1, "key") is value
    return is_key and len(view.dims) > 1 and not view.dims[-2].has_channels


def _onward(node: Node, value: Node, view: ChannelView, steps: dict[str, _Step]) -> Iterator[tuple[Node, ChannelView]]:
    """The results of a node that preserves what ``steps`` do to ``value``'s channels; nothing for any other node."""
    after = through(view, node)
    if after is None and (step := steps.get(operation(node) or "")) is not None:
        after = step(view, node, value)
    if after is not None:
        yield node, after
    else:
        yield from parts(view, node) or ()


# ----------------------------------------------------------------------------------------------------------------------
# Steps with f(x * s) = f(x) * s: the view of the result from the view of one operand; None where the rule fails

_Step = Callable[[ChannelView, Node, Node], ChannelView | None]


def _elementwise(view: ChannelView, node: Node, value: Node) -> ChannelView | None:
    fake, before = fake_value(node), fake_value(value)
    unchanged = fake is not None and before is not None and fake.shape == before.shape
    return view if unchanged and fake is not None and fake.dtype.is_floating_point else None


def _of_first(view: ChannelView, node: Node, value: Node) -> ChannelView | None:
    plain = node.args[0] is value and "rounding_mode" not in node.kwargs
    return _elementwise(view, node, value) if plain else None


def _weighted_sum(view: ChannelView, node: Node, value: Node) -> ChannelView | None:
    """``weights @ value``: sums over the last dimension but one."""
    position, fake = 2 if operation(node) == "scaled_dot_product_attention" else 1, fake_value(node)
    if fake is None or len(node.args) <= position or node.args[position] is not value:
        return None
    *lead, summed, last = view.dims
    if summed.has_channels or fake.dim() != len(view.dims):
        return None
    if not all(same(dim.size, size) for dim, size in zip(lead, fake.shape, strict=False) if dim.has_channels):
        return None
    dims = [dim if dim.has_channels else Dim(size) for dim, size in zip(lead, fake.shape, strict=False)]
    return ChannelView((*dims, Dim(fake.shape[-2]), last), view.offset)


def _attended(view: ChannelView, node: Node, value: Node) -> ChannelView | None:
    """Attention whose weights sum to one in every row: without a mask, which may exclude all keys, and dropout."""
    masked = argument(node, 3, "attn_mask") is not None or argument(node, 4, "dropout_p", default=0.0) != 0.0
    return None if masked else _weighted_sum(view, node, value)


def _pad(view: ChannelView, node: Node, _: Node) -> ChannelView | None:
    """Zero padding of dimensions without channels."""
    sizes, mode, fake = argument(node, 1, "pad"), argument(node, 2, "mode", default="constant"), fake_value(node)
    number = mode if isinstance(mode, int | float) else argument(node, 3, "value")  # constant_pad_nd has no mode
    if fake is None or mode not in ("constant", 0) or number not in (None, 0):
        return None
    padded = {len(view.dims) - 1 - i // 2 for i, size in enumerate(sizes) if not same(size, 0)}
    return _resized(view, padded, fake)


def _resized(view: ChannelView, changed: set[int], fake: Tensor) -> ChannelView | None:
    """The view with other sizes in the ``changed`` dimensions; None if they run over channels."""
    if any(view.dims[i].has_channels for i in changed):
        return None
    dims = [dim if dim.has_channels else Dim(size) for dim, size in zip(view.dims, fake.shape, strict=True)]
    return ChannelView(tuple(dims), view.offset)


def _roll(view: ChannelView, node: Node, _: Node) -> ChannelView | None:
    dims = argument(node, 2, "dims", default=())
    dims = dims if isinstance(dims, list | tuple) else (dims,)
    return view if dims and not any(view.dims[i].has_channels for i in dims) else None


def _reduce(view: ChannelView, node: Node, _: Node) -> ChannelView | None:
    """Mean, sum or maximum over dimensions without channels."""
    dims, keep = argument(node, 1, "dim"), argument(node, 2, "keepdim", default=False)
    if dims is None or dims == []:
        return None
    gone = {i % len(view.dims) for i in (dims if isinstance(dims, list | tuple) else (dims,))}
    if any(view.dims[i].has_channels for i in gone):
        return None
    kept = [Dim(1) if i in gone else dim for i, dim in enumerate(view.dims) if keep or i not in gone]
    return ChannelView(tuple(kept), view.offset)


def _expand(view: ChannelView, node: Node, _: Node) -> ChannelView | None:
    fake = fake_value(node)
    if fake is None or fake.dim() < len(view.dims):
        return None
    longer = ChannelView((*(Dim(1) for _ in range(fake.dim() - len(view.dims))), *view.dims), view.offset)
    changed = {i for i, (dim, size) in enumerate(zip(longer.dims, fake.shape, strict=True)) if not same(dim.size, size)}
    return _resized(longer, changed, fake)


_STEPS: dict[str, _Step] = {
    "mul": _elementwise,
    **dict.fromkeys(("relu", "leaky_relu", "div", *CASTS), _of_first),
    **dict.fromkeys(("scaled_dot_product_attention", "matmul", "bmm"), _weighted_sum),
    **dict.fromkeys(("pad", "constant_pad_nd"), _pad),
    "roll": _roll,
    **dict.fromkeys(("mean", "sum", "amax"), _reduce),
    "expand": _expand,
}
# Steps with f(x + c) = f(x) + c
_SHIFT_STEPS: dict[str, _Step] = {
    **dict.fromkeys(CASTS, _of_first),
    "scaled_dot_product_attention": _attended,
    "roll": _roll,
    **dict.fromkeys(("mean", "amax"), _reduce),
    "expand": _expand,
}
