"""Compiles our kernels in parallel with Inductor instead of at their first launch.

Shapes, strides and dtypes of the operands in the lowered graph determine an operator's kernel. Forks of this process
compile them into Triton's cache, and threads where there are few cores: half of a compilation is Python, and would take
three of the ten seconds that Dynamo and Inductor need. What is in the cache, from now or from an earlier process, is
loaded behind Inductor: loading is Python, and two threads would wait for the GIL at each file that one of them reads.
Graphs with symbolic sizes, CPUs and Triton's interpreter have nothing to compile ahead of time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.cuda import device as current_device
from torch.fx import GraphModule, Node

from qframework.backend.cache_key import hash_of_package
from qframework.compat.operators import schema
from qframework.compat.triton import (
    build_launcher,
    compile_in,
    compile_without_device,
    finished,
    is_noted,
    launcher,
    note,
    prepare,
)
from qframework.forks import PATIENCE_S, Forks, may_fork
from qframework.graph.nodes import argument, fake_value
from qframework.kernels.linear.local_tiles import local_table
from qframework.kernels.runtime.chip import chip_of
from qframework.kernels.runtime.operator import Operator, operator_of
from qframework.kernels.runtime.triton import HAS_TRITON, INTERPRET

logger = logging.getLogger(__name__)

_failures: set[str] = set()  # already logged


class _Like(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    def on_meta(self) -> Tensor:
        """A meta tensor like it; its ``data_ptr`` is its offset."""
        elements = self.offset + 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        memory = torch.empty(max(elements, 0), dtype=self.dtype, device="meta")
        return memory.as_strided(self.shape, self.stride, self.offset)


class _Call(NamedTuple):
    """A call of one of our operators; equal calls need the same kernel."""

    name: str  # of the operator
    operator: Operator[Any]
    arguments: tuple[Any, ...]

    @property
    def device(self) -> torch.device:
        first = self.arguments[0]
        device: torch.device = (first if isinstance(first, _Like) else first[0]).device
        return device

    def warm_up(self) -> Any:
        """Compile the kernels that the operator launches, for tensors on "meta"."""
        values = [[x.on_meta() for x in value] if _is_list(value) else _on_meta(value) for value in self.arguments]
        record = self.operator.arguments(*values)
        record.check()
        assert self.operator.warm_up is not None
        return self.operator.warm_up(self.device, record)


def _is_list(value: Any) -> bool:
    return type(value) is tuple and all(isinstance(x, _Like) for x in value)


def _on_meta(value: Any) -> Any:
    return value.on_meta() if isinstance(value, _Like) else value


def prepare_triton() -> None:
    """Do what Triton does once in a process in the background, while Dynamo traces the first call.

    On a CPU too, where PyTorch's caches hash Triton's files. The driver would start CUDA where nobody has yet.
    """
    if HAS_TRITON and not INTERPRET:
        _prepare_once()


@functools.cache
def _prepare_once() -> threading.Thread:
    driver = torch.cuda.is_initialized()
    thread = threading.Thread(target=prepare, args=(driver,), name="qframework-prepare")
    thread.start()
    return thread


@contextlib.contextmanager
def warm_up(gm: GraphModule) -> Iterator[None]:
    """Compile the kernels of a lowered graph's operators while the block runs; returns when both are done.

    A kernel that fails to compile here is logged, and compiled at its first launch instead.
    """
    calls = list(dict.fromkeys(call for node in gm.graph.nodes if (call := _call(node)) is not None))
    if not calls:
        yield
        return
    key = _attempt(_key, calls)
    cached = key is not None and bool(_attempt(is_noted, key))
    forks = None if cached else _in_forks(calls)
    with ThreadPoolExecutor(1, "qframework-warm-up") as background:
        beside = None if cached or forks is not None else background.submit(_compile, calls)
        try:
            yield
        finally:
            if forks is not None and not forks.wait(PATIENCE_S):
                _warn(f"kernels are compiled in threads: processes did not do it within {PATIENCE_S:g} s")
        compiled = beside or background.submit(_compile, calls)
    if error := compiled.exception():
        _log(error)
    elif compiled.result() and key is not None and not cached:
        _attempt(note, key)


def _in_forks(calls: list[_Call]) -> Forks | None:
    """Begin to compile all calls in other processes; None where that is not possible, not allowed, or slower."""
    from qframework.compat.inductor import may_have_processes

    if not may_fork() or not may_have_processes():
        return None
    try:
        _prepare_once().join()  # so that no fork hashes Triton's files, nor finds a lock of that thread closed
        return Forks([functools.partial(_compile_only, *each) for each in _with_devices(calls)])
    except Exception as error:  # noqa: BLE001 (threads do without)
        _warn(f"kernels are compiled in threads: {_described(error)}")
        return None


def _with_devices(calls: list[_Call]) -> Iterator[tuple[_Call, Callable[[], None]]]:
    """Each call, and what makes Triton compile for its device; what operators ask of it is known from then on."""
    for call in calls:
        for asked in (chip_of, local_table):
            asked(call.device)
        with current_device(call.device):
            yield call, compile_without_device()


def _compile_only(call: _Call, prepare_triton: Callable[[], None]) -> None:
    """Compile a call's kernels and their launchers, in a process that must not use CUDA."""
    prepare_triton()
    for kernel in _kernels(call):
        build_launcher(kernel)


def _key(calls: Sequence[_Call]) -> str:
    """Equal in processes that compile the same kernels of this package for the same chips."""
    kernels = (f"{call.name} {call.arguments} {chip_of(call.device)}" for call in calls)
    return hashlib.sha256("\0".join([hash_of_package(), *kernels]).encode()).hexdigest()


def _call(node: Node) -> _Call | None:
    """The node's call of one of our operators on a GPU; None for other nodes and unknown operands."""
    operator = operator_of(node.target)
    if operator is None or operator.warm_up is None or INTERPRET or not HAS_TRITON:
        return None
    names = schema(node.target).arguments
    given = [argument(node, place, each.name, default=each.default_value) for place, each in enumerate(names)]
    likes = {each: _like(each) for each in node.all_input_nodes}
    if None in likes.values():
        return None
    known = (tuple(map(likes.get, value)) if isinstance(value, list) else likes.get(value, value) for value in given)
    call = _Call(str(node.target), operator, tuple(known))
    return call if call.device.type == "cuda" else None


def _like(node: Node) -> _Like | None:
    """The layout of a node's value; None if sizes are symbols."""
    fake = fake_value(node)
    if fake is None:
        return None
    sizes = (*fake.shape, *fake.stride(), fake.storage_offset())
    if not all(isinstance(size, int) for size in sizes):
        return None
    return _Like(tuple(fake.shape), fake.stride(), int(fake.storage_offset()), fake.dtype, fake.device)


def _compile(calls: list[_Call]) -> bool:
    """Compile all calls in parallel; returns whether all could be.

    Runs in a separate thread, because Triton's mode is local to the thread.
    """
    workers = min(len(calls), os.cpu_count() or 1)
    with ThreadPoolExecutor(workers, "qframework-compile") as pool, compile_in(pool):
        started = [(_attempt(_start, call), call.device) for call in calls]
        different = {id(kernel): (kernel, device) for kernels, device in started for kernel in kernels or ()}
        loaded = [_attempt(_load, kernel, device) for kernel, device in different.values()]
    return all(loaded) and all(kernels is not None for kernels, _ in started)


def _start(call: _Call) -> tuple[Any, ...]:
    """The call's kernels, or promises of them, for its device."""
    with current_device(call.device):
        return _kernels(call)


def _kernels(call: _Call) -> tuple[Any, ...]:
    kernels = call.warm_up()
    return tuple(kernels) if isinstance(kernels, list) else () if kernels is None else (kernels,)


def _load(kernel: Any, device: torch.device) -> bool:
    """Wait for a kernel, and load it onto the GPU."""
    compiled = finished(kernel)
    with current_device(device):
        launcher(compiled, (1, 1, 1))  # creating the launcher loads the kernel
    return True


def _attempt(step: Callable[..., Any], *arguments: Any) -> Any:
    """The step's result; None if it failed, which is logged."""
    try:
        return step(*arguments)
    except Exception as error:  # noqa: BLE001 (the launch itself raises the error again)
        _log(error)
        return None


def _log(error: BaseException) -> None:
    _warn(f"a kernel will be compiled at its first launch instead: {_described(error)}")


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _warn(message: str) -> None:
    if message not in _failures:
        _failures.add(message)
        logger.warning("qframework: %s", message)
