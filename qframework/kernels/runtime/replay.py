"""Replays recorded operator calls: from the third identical call on, skips checks and planning.

What an implementation does on a GPU (allocations, kernel launches, torch operations) is determined by the shapes,
strides, dtypes, devices and alignment of its operands and by its other arguments. A recording is the list of these
steps; a replay repeats them with the tensors of another call, in a fraction of the host time of checks, planning and
views.

During the second call, a dispatch mode records torch operations, and ``launch`` reports kernels. A call that cannot be
recorded, because it uses a tensor that is not an operand or reads a value back to the host, runs as written every time.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from qframework.compat.dispatch import TorchDispatchMode, empty_strided_cuda
from qframework.compat.operators import schema
from qframework.compat.triton import descriptor_maker, is_descriptor, launch_hooks_are_set
from qframework.kernels.runtime.recognition import Shortcut, kind_of

P = ParamSpec("P")
R = TypeVar("R")
State = list[Any]
"""What a replay works on: tensors by their places, then constants. A template has None for the tensors."""
Replay = Callable[[Sequence[Tensor]], Any]

_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_MAX_KINDS = 8192  # per operator; with more, shapes hardly repeat, so the table is cleared
_MAX_ADDRESSES = 1024  # per launch, likewise; a model's layers of one kind share it
_active = threading.local()


class NotReplayableError(Exception):
    """A call does something that a recording cannot repeat."""


class _Place(NamedTuple):
    """Stands for a tensor: operands first, then results in order of creation."""

    at: int


class _Descriptor(NamedTuple):
    """Stands for a tensor descriptor: a function that makes it from a tensor, and the place of that tensor."""

    make: Callable[[Tensor], Any]
    at: int


class _Group(NamedTuple):
    """Stands for a tuple of kernel arguments: its type, and what stands for its members."""

    kind: type[tuple[Any, ...]]
    members: list[Any]


class _Step(NamedTuple):
    """A kernel launch or torch operation that reads the tensors in ``needs`` and creates those in ``makes``."""

    build: Callable[[State], Callable[[State], None]]
    needs: frozenset[int]
    makes: frozenset[int]
    lasting: bool  # writes memory that was there before


class Recording(TorchDispatchMode):
    """What one call does, while it runs inside: ``with Recording(operands) as recording``."""

    def __init__(self, operands: list[Tensor]) -> None:
        super().__init__()
        self._tensors = list(operands)
        self._kept: list[Tensor] = []  # until the end, so that no id is reused
        self._index = {id(x): i for i, x in reversed(list(enumerate(operands)))}
        self._roots = list(range(len(operands)))  # the base of a view; of other tensors, themselves
        self._steps: list[_Step] = []
        self._refused: str | None = None

    def __enter__(self) -> Recording:
        _active.recording = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _active.recording = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _active.recording = None  # our operators that the call uses make recordings of their own
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            _active.recording = self
        self._attempt(self._operation, func, args, kwargs or {}, result)
        return result

    def launch(self, run: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Record a kernel launch, which ``run(*arguments)`` repeats."""
        self._attempt(self._launch, run, arguments)

    def refuse(self, reason: str) -> None:
        """Let calls of this kind run as written every time: what they do depends on more than their arguments."""
        if self._refused is None:
            self._refused = reason

    def finish(self, result: Any) -> Replay:
        """The function that repeats the call with other operands; raises NotReplayableError if that is impossible."""
        if self._refused is None:
            result = self._places(result)
        if self._refused is not None:
            raise NotReplayableError(self._refused)
        wanted = set(_indices(result))
        steps = []
        for step in reversed(self._steps):
            if step.lasting or step.makes & wanted:
                steps.append(step)
                wanted |= step.needs
        template: State = [None] * len(self._tensors)
        return _replay(template, [step.build(template) for step in reversed(steps)], _picked(result))

    def _attempt(self, record: Callable[..., None], *arguments: Any) -> None:
        if self._refused is None:
            try:
                record(*arguments)
            except NotReplayableError as error:
                self._refused = str(error)

    def _operation(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            raise NotReplayableError(f"{func} reads values")
        results = result if isinstance(result, tuple | list) else (result,)
        if not all(isinstance(x, Tensor) for x in results):
            raise NotReplayableError(f"{func} gives more than tensors")
        if func is torch.ops.aten.detach.default:  # the last call of Python's factory functions: the same tensor
            self._index[id(result)] = self._place(args[0]).at
            self._kept.append(result)
            return
        if func in _ALLOCATIONS:
            place = self._add(result)
            self._steps.append(_Step(_allocation(result, place), frozenset(), frozenset([place]), False))
            return
        given, named = self._places(args), self._places(kwargs)
        root = self._roots[given[0].at] if _views(func) and isinstance(given[0], _Place) else None
        if root is not None and self._view(result, root):
            return
        shares = root is not None and _same_memory(results[0], self._tensors[root])
        places = [self._add(x, root if shares else None) for x in results]
        run = _operation(func, given, named, places, isinstance(result, tuple | list))
        needs = frozenset(_indices((given, named)))
        self._steps.append(_Step(run, needs, frozenset(places), schema(func).is_mutable))

    def _view(self, x: Any, root: int) -> bool:
        """Record ``x`` as a view of a tensor; False if it is none, or has another dtype."""
        whole = self._tensors[root]
        if not isinstance(x, Tensor) or x.dtype != whole.dtype or not _same_memory(x, whole):
            return False
        place = self._add(x, root)
        offset = x.storage_offset() - whole.storage_offset()
        run = _strided(root, place, x.shape, x.stride(), offset)
        self._steps.append(_Step(run, frozenset([root]), frozenset([place]), False))
        return True

    def _launch(self, run: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        by_address = hasattr(run, "bind")
        given = [self._argument(x, by_address) for x in arguments]
        self._steps.append(_Step(_launching(run, given), frozenset(_read(given)), frozenset(), True))

    def _argument(self, x: Any, by_address: bool) -> Any:
        """A kernel argument. For a view that starts where its tensor does, the tensor: kernels take addresses.

        A view of another dtype is only replaced for a launch ``by_address``, of a kernel that is compiled.
        """
        if isinstance(x, Tensor):
            index = self._place(x).at
            root = self._tensors[self._roots[index]]
            same = root.data_ptr() == x.data_ptr() and (by_address or root.dtype == x.dtype)
            return _Place(self._roots[index] if same else index)
        if isinstance(x, tuple):
            members = [self._argument(member, by_address) for member in x]
            return _Group(type(x), members) if list(_read(members)) else x
        return _Descriptor(descriptor_maker(x), self._argument(x.base, False).at) if is_descriptor(x) else x

    def _add(self, x: Tensor, root: int | None = None) -> int:
        place = len(self._tensors)
        self._tensors.append(x)
        self._index[id(x)] = place
        self._roots.append(place if root is None else root)
        return place

    def _place(self, x: Tensor) -> _Place:
        index = self._index.get(id(x))
        if index is None:
            raise NotReplayableError(f"a tensor of shape {tuple(x.shape)} comes from elsewhere")
        return _Place(index)

    def _places(self, value: Any) -> Any:
        """``value`` with places instead of tensors."""
        if isinstance(value, Tensor):
            return self._place(value)
        if isinstance(value, list | tuple):
            return tuple(self._places(x) for x in value)
        if isinstance(value, dict):
            return {name: self._places(x) for name, x in value.items()}
        return value


def _views(func: Any) -> bool:
    """Whether an operation's result may alias its first argument."""
    first = schema(func).arguments[:1]
    return bool(first) and first[0].alias_info is not None and not first[0].alias_info.is_write


def _same_memory(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def _indices(value: Any) -> list[int]:
    """The indices of all places in ``value``."""
    if isinstance(value, _Place):
        return [value.at]
    if isinstance(value, dict):
        value = list(value.values())
    return [index for x in value for index in _indices(x)] if isinstance(value, list | tuple) else []


def _filled(value: Any, state: State) -> Any:
    """``value`` with the tensors of ``state`` instead of places."""
    if type(value) is _Place:
        return state[value.at]
    if type(value) is tuple:
        return tuple([_filled(x, state) for x in value])
    if type(value) is dict:
        return {name: _filled(x, state) for name, x in value.items()}
    return value


def _allocation(x: Tensor, place: int) -> Callable[[State], Callable[[State], None]]:
    make = functools.partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device)
    if x.is_cuda and x.device.index == torch.cuda.current_device():  # a replay runs where the recording did
        fast = empty_strided_cuda
        make = make if fast is None else functools.partial(fast, tuple(x.shape), x.stride(), x.dtype)

    def run(state: State) -> None:
        state[place] = make()

    return lambda template: run


def _strided(
    root: int, place: int, size: torch.Size, stride: tuple[int, ...], offset: Any
) -> Callable[[State], Callable[[State], None]]:
    def run(state: State) -> None:
        whole = state[root]
        state[place] = whole.as_strided(size, stride, whole.storage_offset() + offset)

    return lambda template: run


def _operation(
    func: Any, args: Any, kwargs: dict[str, Any], places: list[int], several: bool
) -> Callable[[State], Callable[[State], None]]:
    def run(state: State) -> None:
        result = func(*_filled(args, state), **_filled(kwargs, state))
        for place, x in zip(places, result if several else (result,), strict=True):
            state[place] = x

    return lambda template: run


def _read(arguments: list[Any]) -> Iterator[int]:
    """The places of the tensors in a kernel's arguments."""
    for x in arguments:
        if isinstance(x, _Group):
            yield from _read(x.members)
        elif isinstance(x, _Place | _Descriptor):
            yield x.at


def _launching(launch: Callable[..., None], arguments: list[Any]) -> Callable[[State], Callable[[State], Any]]:
    def build(template: State) -> Callable[[State], Any]:
        made: list[tuple[int, Callable[[State], Any]]] = []  # what each launch makes anew, and its place

        def place_of(x: Any) -> int:
            if isinstance(x, _Place):
                return x.at
            make: Callable[[State], Any] | None = None
            if isinstance(x, _Descriptor):
                make = functools.partial(_make_descriptor, x)
            elif isinstance(x, _Group):
                make = functools.partial(_make_group, x.kind, _picker([place_of(member) for member in x.members]))
            at = len(template)
            template.append(x if make is None else None)
            if make is not None:
                made.append((at, make))
            return at

        pick = _picker([place_of(x) for x in arguments])

        def run(state: State) -> tuple[Any, ...]:
            for place, make in made:
                state[place] = make(state)
            given = tuple(pick(state))
            launch(*given)
            return given

        bind = getattr(launch, "bind", None)
        return run if bind is None else _at_addresses(run, bind, sorted(set(_read(arguments))))

    return build


def _at_addresses(
    launch: Callable[[State], tuple[Any, ...]],
    bind: Callable[[tuple[Any, ...]], Callable[[], None] | None],
    places: list[int],
) -> Callable[[State], None]:
    """``launch``, bound to the addresses of the tensors in ``places`` once it was called with them twice.

    The allocator gives a compiled model the same addresses at every call.
    """
    bound: dict[tuple[int, ...], Callable[[], None] | None] = {}
    possible = True

    def run(state: State) -> None:
        nonlocal possible
        addresses = tuple([state[place].data_ptr() for place in places])
        again = bound.get(addresses)
        if again is not None and not launch_hooks_are_set():
            again()
            return
        given = launch(state)
        if again is not None or not possible:
            return
        if addresses in bound:
            bound[addresses] = again = bind(given)
            possible = again is not None
        else:
            if len(bound) >= _MAX_ADDRESSES:
                bound.clear()
            bound[addresses] = None

    return run


def _make_descriptor(descriptor: _Descriptor, state: State) -> Any:
    return descriptor.make(state[descriptor.at])


def _make_group(kind: type[tuple[Any, ...]], pick: Callable[[State], Iterable[Any]], state: State) -> tuple[Any, ...]:
    return tuple.__new__(kind, pick(state))  # also of a NamedTuple, past its slower constructor


def _picker(places: list[int]) -> Callable[[State], Iterable[Any]]:
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda state: [state[i] for i in places]


def _picked(result: Any) -> Callable[[State], Any]:
    """``_filled`` for one value, faster for a tuple of tensors."""
    if type(result) is tuple and len(result) > 1 and all(type(x) is _Place for x in result):
        return operator.itemgetter(*[x.at for x in result])
    return functools.partial(_filled, result)


def _replay(template: State, steps: list[Callable[[State], None]], result: Callable[[State], Any]) -> Replay:
    def run(operands: Sequence[Tensor]) -> Any:
        state = template.copy()
        state[: len(operands)] = operands
        for step in steps:
            step(state)
        return result(state)

    return run


def recording() -> Recording | None:
    """The recording of this thread's current call, if it is being recorded."""
    return getattr(_active, "recording", None)


def replayed(implementation: Callable[P, R]) -> Callable[P, R]:
    """``implementation``, recorded in the second call of a kind and replayed from the third on."""
    replays: dict[Any, Replay | str] = {}  # or the reason why there is none; "": seen once
    shortcut: Shortcut[Replay] = Shortcut()

    @functools.wraps(implementation)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if recording() is not None:  # part of a call that is being recorded
            return implementation(*args, **kwargs)
        seen = None if kwargs else shortcut.find(args)
        if seen is not None:
            return seen[0](seen[1])
        key, operands = kind_of((*args, *kwargs.values()), tuple(kwargs))
        found = replays.get(key)
        if callable(found):
            if not kwargs:
                shortcut.remember(args, found)
            return found(operands)
        if found != "":
            if len(replays) >= _MAX_KINDS:
                replays.clear()
                shortcut.clear()
            replays.setdefault(key, "")
            return implementation(*args, **kwargs)
        with Recording(operands) as recorded:
            result = implementation(*args, **kwargs)
        try:
            replays[key] = recorded.finish(result)
        except NotReplayableError as error:
            replays[key] = str(error)
        return result

    run.replays = replays  # type: ignore[attr-defined]
    return run
