"""Triton's launcher, compiled kernels and tensor descriptors."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib.util
import operator
import sys
import types
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from qframework.compat.missing import explained, note_error, note_missing


def _dependent_launch() -> tuple[Any, Any]:
    try:
        from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    except ImportError as error:
        note_error(error)
        return None, None
    return gdc_wait, gdc_launch_dependents


def _hash_of_triton() -> Any:
    try:
        from triton.runtime.cache import triton_key
    except ImportError as error:
        note_error(error)
        return None
    return triton_key


_triton_key: Any = None  # a function that hashes Triton's files, once per process
TensorDescriptor: Any = None  # of a matrix that a kernel loads with TMA
OutOfResources: type[BaseException] = MemoryError  # raised by a launch that needs too much shared memory
gdc_wait: Any = None  # in a kernel: wait for the previous one
gdc_launch_dependents: Any = None  # in a kernel: let the next one start

if importlib.util.find_spec("triton") is not None:
    with explained():
        import triton
        from triton.runtime.cache import get_cache_manager
        from triton.tools import tensor_descriptor

        TensorDescriptor = tensor_descriptor.TensorDescriptor
        OutOfResources = triton.runtime.errors.OutOfResources
        _runtime = triton.knobs.runtime
    gdc_wait, gdc_launch_dependents = _dependent_launch()
    _triton_key = _hash_of_triton()

launcher: Callable[[Any, tuple[int, ...]], Any] = operator.getitem
"""The launcher of a compiled kernel on a grid, to be called with all arguments; creating it loads the kernel."""


@explained()
def current_target() -> Any:
    """Triton's compilation target on the current device: ``backend`` and ``arch``."""
    return triton.runtime.driver.active.get_current_target()


@explained()
def compile_without_device() -> Callable[[], None]:
    """What a fork of this process calls first, so that Triton compiles for the present device and asks no driver."""
    active = triton.runtime.driver.active
    device, target = active.get_current_device(), active.get_current_target()
    stand_in = types.SimpleNamespace(
        get_current_device=lambda: device,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
        launcher_cls=active.launcher_cls,
    )
    return functools.partial(triton.runtime.driver.set_active, stand_in)


@explained()
def build_launcher(kernel: Any) -> None:
    """Make a compiled kernel's launcher, which Triton up to 3.6 compiles in C and finds in its cache later."""
    triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)


_OFTEN = 1e-4  # seconds


def prepare(driver: bool) -> None:
    """Hash Triton's own files, which the first compilation of a process waits for, and load its ``driver``.

    Runs in a thread while another one runs Python. Triton hashes hundreds of MB, one at a time, and before each of them
    the thread would wait up to 5 ms, Python's default, for the other one to release the GIL.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _OFTEN))
    try:
        if _triton_key is not None:
            _triton_key()
        if driver:
            with contextlib.suppress(Exception):  # the first compilation raises it again
                current_target()
    finally:
        sys.setswitchinterval(before)


_NOTE = "compiled"  # a file's name


def is_noted(key: str) -> bool:
    """Whether ``note(key)`` was called with Triton's present cache, in any process; ``key`` is in hexadecimal."""
    return bool(get_cache_manager(key).has_file(_NOTE))


def note(key: str) -> None:
    """Put an empty file for this key into Triton's cache."""
    get_cache_manager(key).put("", _NOTE, binary=False)


@explained()
def argument_names(kernel: Any) -> list[str]:
    """The argument names of an uncompiled kernel, in order."""
    return kernel.arg_names


@explained()
def compile_ahead(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """Compile the kernel for arguments like these; under ``compile_in``, returns Triton's future of it."""
    return kernel.warmup(*arguments, grid=grid, **constants)


@explained()
def compile_in(pool: Any) -> Any:
    """A scope of this thread in which ``pool`` compiles kernels; a failed one is compiled again at its launch."""
    return triton.AsyncCompileMode(_RetryingPool(pool), ignore_errors=True)


class _Compilation(Future[Any]):
    """A compilation that is tried again where its result is asked for after it failed.

    Up to 3.8 Triton keeps the failed future in the place of the kernel, and every launch would raise its error.
    """

    def __init__(self, compile: Callable[[], Any]) -> None:
        super().__init__()
        self._compile, self._failed = compile, False

    def run(self) -> None:
        try:
            self.set_result(self._compile())
        except BaseException as error:  # noqa: BLE001 (raised where the result is asked for)
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        if self._failed:
            return self._compile()
        try:
            return super().result(timeout)
        except Exception:
            self._failed = True
            raise


class _RetryingPool:
    """``pool`` with compilations that are tried again."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def submit(self, compile: Callable[[], Any]) -> _Compilation:
        compilation = _Compilation(compile)
        self._pool.submit(compilation.run)
        return compilation


def finished(kernel: Any) -> Any:
    """The compiled kernel, after waiting for it if it is Triton's future."""
    return kernel.result() if hasattr(type(kernel), "result") else kernel


_STREAM = -1  # stands for the stream while a launch is caught


def launch_of_addresses(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> Callable[..., None] | None:
    """A function that launches a compiled kernel with the addresses that ``arguments`` have now, on the current stream.

    It may be given that stream, as an integer. Triton builds every tensor map again at each launch, in Python; this
    does it once. Keeps no tensor alive. None where the kernel needs scratch memory, the chip is not NVIDIA's, or this
    Triton launches in another way.
    """
    run = kernel.run
    if current_target().backend != "cuda" or any(
        getattr(run, name, False) for name in ("global_scratch_size", "profile_scratch_size", "gsan_enabled")
    ):
        return None
    caught: list[tuple[Any, ...]] = []
    catcher, target = _catching(getattr(run, "launch", None), lambda *values: caught.append(values))
    if target is not None:
        imitation = copy.copy(run)
        imitation.launch = catcher
        with contextlib.suppress(TypeError):  # a launcher with other parameters
            imitation(*grid, _STREAM, kernel.function, kernel.packed_metadata, None, None, None, *arguments)
    if not caught or caught[0][3] != _STREAM:
        note_missing("triton.backends.nvidia.driver.CudaLauncher")
        return None
    values = tuple(map(_addresses, caught[0]))
    head, tail = values[:3], values[4:]
    active = triton.runtime.driver.active
    current_stream, device = active.get_current_stream, active.get_current_device()

    def launch(stream: int | None = None) -> None:
        target(*head, current_stream(device) if stream is None else stream, *tail)

    return launch


def _catching(through: Any, catch: Callable[..., None]) -> tuple[Any, Any]:
    """``through``, which may expand arguments, with ``catch`` for the function it calls; and that function, or None."""
    if not isinstance(through, types.FunctionType):
        return catch, through
    cells = dict(zip(through.__code__.co_freevars, through.__closure__ or (), strict=True))
    if "launcher" not in cells:
        return catch, None
    closure = tuple(types.CellType(catch) if name == "launcher" else cell for name, cell in cells.items())
    catcher = types.FunctionType(through.__code__, through.__globals__, through.__name__, None, closure)
    return catcher, cells["launcher"].cell_contents


def _addresses(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return tuple(map(_addresses, value)) if isinstance(value, list | tuple) else value


def launch_hooks_are_set() -> bool:
    """Whether a profiler asked Triton to be told of every launch."""
    return bool(_runtime.launch_enter_hook.calls or _runtime.launch_exit_hook.calls)


def is_descriptor(x: Any) -> bool:
    """Whether ``x`` is a tensor descriptor, Triton's or Gluon's."""
    return isinstance(getattr(x, "base", None), Tensor)


def descriptor_maker(descriptor: Any) -> Callable[[Tensor], Any]:
    """A function that makes descriptors like this one for other tensors, without checks. Keeps no tensor alive."""
    kind = type(descriptor)
    if not hasattr(descriptor, "__dict__"):
        note_missing("triton.tools.tensor_descriptor.TensorDescriptor.__dict__")
        names = [field.name for field in dataclasses.fields(kind)]
        arguments = {name: getattr(descriptor, name) for name in names if name != "base"}
        return lambda x: kind(base=x, **arguments)
    fields, new = {name: value for name, value in vars(descriptor).items() if name != "base"}, object.__new__

    def make(x: Tensor) -> Any:
        made: Any = new(kind)
        made.__dict__.update(fields)
        made.base = x
        return made

    return make


__all__ = [
    "TensorDescriptor",
    "argument_names",
    "build_launcher",
    "compile_ahead",
    "compile_in",
    "compile_without_device",
    "current_target",
    "descriptor_maker",
    "finished",
    "gdc_launch_dependents",
    "gdc_wait",
    "is_descriptor",
    "is_noted",
    "launch_hooks_are_set",
    "launch_of_addresses",
    "launcher",
    "note",
    "prepare",
]
