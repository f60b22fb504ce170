"""Determines from operator schemas which tensors a node of a captured graph changes in place.

A node that calls an operator has its own schema. Any other node (``F.relu(x, True)``, ``x += y``, ``x.add_(y)``,
``torch.add(x, y, out=z)``) is run once on fake tensors, and the schemas of all operators that it calls are read. A node
that cannot run on fake tensors is assumed to change all of its inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from qframework.compat import pytree
from qframework.compat.dispatch import (
    AUTOCAST_SCOPES,
    FakeTensorMode,
    TorchDispatchMode,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    is_traceable_wrapper_subclass,
    memory_of,
    set_grad_enabled,
    static_layout,
)
from qframework.compat.dynamo import recorded_value
from qframework.compat.operators import OpOverload, schema
from qframework.graph.autocast import autocast_of, scopes_before
from qframework.graph.nodes import fake_value, is_inactive_dropout, operation, why_not_plain

_WRITTEN = "qframework_written"  # in a node's meta, so that it goes with the node
_MEMORY = "qframework_memory"
MOST_KINDS = 10_000
_places_of_kinds: dict[Any, frozenset[int]] = {}  # of inputs that a call writes, by what kind_of returns
_HARMLESS = (operator.getitem, set_grad_enabled, *AUTOCAST_SCOPES)
KNOWN_LIBRARIES = ("aten", "prims", "quantized_decomposed", "qframework")
GUARDS = "_guards_fn"  # the module of an exported model that checks its inputs, also those that are None


def written_attributes(gm: GraphModule) -> list[Node]:
    """The parameters and buffers of an exported graph that its operators write, as far as memory is recorded."""
    operators = [node for node in gm.graph.nodes if node.op in ("call_function", "call_method")]
    written = {x for node in operators for x in written_inputs(node)}
    memory = {storage for x in written for storage in storages(x) or ()}
    return [
        node for node in gm.graph.find_nodes(op="get_attr") if node in written or memory & (storages(node) or set())
    ]


def writes_in_place(node: Node) -> bool:
    """Whether the node may change one of its inputs."""
    return bool(written_inputs(node))


def written_between(first: Node, last: Node, operands: Iterable[Node], own: Collection[Node] = ()) -> Node | None:
    """A node from ``first`` up to ``last``, not one of ``own``, that may write into the memory of an operand.

    An operand without a recorded value may alias any memory. An operator of another library may write whatever it
    reads, whatever its schema declares.
    """
    operands = list(operands)
    if not operands:
        return None
    memory = _union(map(storages, operands))
    node = first
    while node is not last:
        touched = [] if node in own else [x for x in node.all_input_nodes if _overlap(storages(x), memory)]
        # What a node writes takes long to find out: only for those that read such memory.
        if touched and (_is_of_another_library(node) or not written_inputs(node).isdisjoint(touched)):
            return node
        node = node.next
    return None


def switches_gradients(first: Node, last: Node) -> bool:
    """Whether a node between these two switches gradients on or off, as ``torch.no_grad`` does."""
    node = first
    while node is not last and node.target is not set_grad_enabled:
        node = node.next
    return node is not last


def allocates(node: Node) -> bool:
    """Whether the memory of a node's value is certainly not that of an input."""
    own = storages(node)
    return bool(own) and not any(_overlap(storages(x), own) for x in node.all_input_nodes)


def is_view(node: Node) -> bool:
    """Whether one of PyTorch's functions or methods, as Dynamo records them, only gives a tensor in an input's memory.

    A method in place, ``x.requires_grad_()`` say, may change more than memory.
    """
    if isinstance(node.target, OpOverload) or operation(node) is None or fake_value(node) is None:
        return False
    if getattr(node.target, "__name__", str(node.target)).endswith("_"):
        return False
    own = storages(node) or set()
    shares = any(own & (storages(x) or set()) for x in node.all_input_nodes)
    return shares and not writes_in_place(node)


def is_written(node: Node, own: Collection[Node] = ()) -> bool:
    """Whether a reader of a value, or of a view of it at any depth, may write it, other than the nodes ``own``."""
    if any(node in written_inputs(user) for user in node.users if user not in own):
        return True
    return any(is_written(user, own) for user in node.users if _overlap(storages(user), storages(node)))


def returned(graph: Graph, node: Node) -> bool:
    """Whether a result of the graph may share memory with ``node``."""
    return any(_overlap(storages(result), storages(node)) for result in graph.output_node().all_input_nodes)


def _union(several: Iterable[set[int] | None]) -> set[int] | None:
    found: set[int] = set()
    for one in several:
        if one is None:
            return None
        found |= one
    return found


def _is_of_another_library(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace not in KNOWN_LIBRARIES


def written_inputs(node: Node) -> set[Node]:
    """The inputs of a node whose memory it may change; found once for its target and arguments.

    Passes ask for each weight and each node behind it: running the nodes every time took minutes for a BERT-large.
    """
    known = node.meta.get(_WRITTEN)
    if known is None or not (known.target is node.target and known.args is node.args and known.kwargs is node.kwargs):
        known = node.meta[_WRITTEN] = _Written(node.target, node.args, node.kwargs, _written_inputs(node))
    return known.inputs


class _Written(NamedTuple):
    """What a node writes while its target and arguments are these objects, which fx replaces to change them."""

    target: Any
    args: Any
    kwargs: Any
    inputs: set[Node]


def _written_inputs(node: Node) -> set[Node]:
    harmless = node.target in _HARMLESS or _checks_inputs(node) or is_inactive_dropout(node)
    if not node.op.startswith("call") or not node.all_input_nodes or harmless:
        return set()
    if isinstance(node.target, OpOverload):
        return {x for value in written_arguments(node.target, node.args, node.kwargs) for x in _nodes(value)}
    if not any(map(_may_hold_a_tensor, node.all_input_nodes)):
        return set()
    kind = kind_of(node)
    places = None if kind is None else _places_of_kinds.get(kind)
    if places is None:
        places = _observed_places(node)
        if kind is not None and len(_places_of_kinds) < MOST_KINDS:
            _places_of_kinds[kind] = places
    return {x for place, x in enumerate(node.all_input_nodes) if place in places}


def _checks_inputs(node: Node) -> bool:
    return node.op == "call_module" and node.target == GUARDS


def _observed_places(node: Node) -> frozenset[int]:
    """The places among a node's inputs of those that it writes when it is run."""
    try:
        written = _observed(node)
    except Exception:  # noqa: BLE001 (any failure on fake tensors: assume that it writes everything)
        written = set(node.all_input_nodes)
    return frozenset(place for place, x in enumerate(node.all_input_nodes) if x in written)


def kind_of(node: Node) -> Any:
    """Equal for calls that write the same of their inputs, such as those of repeated blocks; None if unknown."""
    if node.op == "call_module" or _scope_body(node) is not None:
        return None
    place = {x: number for number, x in enumerate(node.all_input_nodes)}
    layouts = tuple(_layout(recorded_value(x)) for x in place)
    wiring = repr(map_arg((node.args, node.kwargs), lambda x: _Place(place[x])))
    if None in layouts or " at 0x" in wiring:  # an object whose text is its address, which another may have later
        return None
    return node.op, node.target, wiring, layouts


class _Place(NamedTuple):
    """Stands for a node's input in the text of its arguments."""

    number: int


def _layout(value: Any) -> Any:
    """Equal for values that a call treats alike; None if unknown, as of tuples and of symbolic sizes."""
    if type(value) in (int, float, bool):
        return type(value), value
    if not isinstance(value, Tensor) or why_not_plain(value) is not None:
        return None
    return static_layout(value)


def written_arguments(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments of a call that the operator's schema marks as written, but for ``detach_``: it keeps all values."""
    if not schema(target).is_mutable or target is torch.ops.aten.detach_.default:
        return
    for place, argument in enumerate(schema(target).arguments):
        if argument.is_write:
            yield args[place] if place < len(args) else kwargs.get(argument.name)


def _nodes(value: Any) -> list[Node]:
    found: list[Node] = []
    map_arg(value, found.append)
    return found


class _WrittenMemory(TorchDispatchMode):
    """Records the memory that operators write while the mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written = pytree.tree_leaves(list(written_arguments(func, args, kwargs)))
        self.memory |= {memory_of(x) for x in written if isinstance(x, Tensor)}
        return func(*args, **kwargs)


def _observed(node: Node) -> set[Node]:
    """The inputs that a node writes when it is run on fake tensors like those that tracing recorded."""
    written = _WrittenMemory()
    owners = run_on_fakes(node, written)
    return {owners[memory] for memory in written.memory if memory in owners}


def run_on_fakes(node: Node, mode: TorchDispatchMode) -> dict[int, Node]:
    """Run a node within ``mode`` on fake tensors like those that tracing recorded; the node of each input's memory.

    Raises any exception where that is impossible.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), autocast_of(scopes_before(node)):
        body = _scope_body(node)
        inputs = [x for x in node.all_input_nodes if body is None or x is not node.args[body.place]]
        values = {x: pytree.tree_map(_copy, _recorded(x)) for x in inputs}
        tensors = [(x, t) for x, value in values.items() for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
        owners = {memory_of(t): x for x, t in tensors}  # before the call, which may replace a tensor's memory
        args = node.args if body is None else node.args[body.place + 1 :]
        args, kwargs = map_arg((args, node.kwargs), values.__getitem__)
        with mode:
            (callable_of(node) if body is None else body.graph)(*args, **kwargs)
    return owners


class _Body(NamedTuple):
    """The graph that a node runs in another context, autocast say, and its place among the arguments."""

    graph: GraphModule
    place: int


def _scope_body(node: Node) -> _Body | None:
    """The body of a ``with`` block of an exported model; the arguments behind it are the graph's inputs."""
    if node.op != "call_function" or not getattr(node.target, "__name__", "").startswith("wrap_with_"):
        return None
    for place, value in enumerate(node.args):
        if isinstance(value, Node) and value.op == "get_attr":
            graph = node.graph.owning_module.get_submodule(str(value.target))  # type: ignore[union-attr]
            return _Body(graph, place) if isinstance(graph, GraphModule) else None
    return None


def callable_of(node: Node) -> Callable[..., Any]:
    """What a node calls; a module only if it has no state that the call could change."""
    if node.op == "call_function":
        return node.target  # type: ignore[return-value]
    if node.op == "call_method":
        return getattr(Tensor, str(node.target))
    module = node.graph.owning_module.get_submodule(str(node.target))  # type: ignore[union-attr]
    if module.state_dict():
        raise NotImplementedError(f"{node.target} is a module with parameters or buffers")
    return module


def _copy(value: Any) -> Any:
    """A copy that the call may change: a new fake tensor like this one, a number for a symbol."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        if value.node.hint is None:
            raise NotImplementedError(f"{value} depends on data")
        return value.node.hint
    if not isinstance(value, Tensor):
        return value
    if (reason := why_not_plain(value)) is not None:
        raise NotImplementedError(f"it {reason}")
    size, stride = (tuple(map(_copy, sizes)) for sizes in (value.shape, value.stride()))
    return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)


def _recorded(node: Node) -> Any:
    value = recorded_value(node)
    if value is None:
        raise NotImplementedError(f"tracing recorded no value of {node.name}")
    return value


def _may_hold_a_tensor(node: Node) -> bool:
    value = recorded_value(node)
    return value is None or any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def storages(node: Node) -> set[int] | None:
    """Identifies the storages of a node's tensors, which views share; None if unknown. Found once for its value."""
    value = recorded_value(node)
    known = node.meta.get(_MEMORY)
    if known is None or known.value is not value:
        known = node.meta[_MEMORY] = _Memory(value, _memory_of(value))
    return known.storages


class _Memory(NamedTuple):
    """The storages of a node's value while it is this object."""

    value: Any
    storages: set[int] | None


def _memory_of(value: Any) -> set[int] | None:
    held = [x for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) for x in _held(leaf)]
    if value is None or any(not isinstance(x, Tensor) or why_not_plain(x) for x in held):  # may hide other tensors
        return None
    return {memory_of(tensor) for tensor in held}


def _held(x: Any) -> Iterator[Any]:
    """``x``, or what it wraps: of a subclass that names what it wraps, such as a BlockTensor, or of ``torch.vmap``."""
    if is_traceable_wrapper_subclass(x):
        for name in x.__tensor_flatten__()[0]:
            yield from _held(getattr(x, name))
    elif isinstance(x, Tensor) and is_functorch_wrapped_tensor(x):
        yield from _held(get_unwrapped(x))
    else:
        yield x


def _overlap(one: set[int] | None, other: set[int] | None) -> bool:
    return one is None or other is None or bool(one & other)
