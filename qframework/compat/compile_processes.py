"""Compiles Triton kernels in Inductor's processes, so that Python of this process need not wait for them.

A thread that compiles a kernel runs Python for a third of the time, while the thread that traces and lowers the model
waits for the GIL. The result of a process is a file in Triton's cache, which this process then loads.
"""

from __future__ import annotations

import functools
import importlib
import io
import logging
import pickle
import sys
from collections.abc import Callable
from typing import Any

from qframework.compat.missing import explained, note_error, note_missing

with explained():
    import triton
    from triton.runtime.jit import JITCallable

    _cache = triton.knobs.cache

logger = logging.getLogger(__name__)

_CLOSURE = "async_compile"  # the function of Triton's JITFunction that compiles under AsyncCompileMode


def compile_in_process(compile: Callable[[], Any]) -> None:
    """Do in a process what ``compile``, Triton's own closure, does in this one, so that it finds the result.

    Waits for processes that are starting. Does nothing where Inductor is configured to have none, and for kernels that
    are no members of a module. What a process fails to compile is logged, and ``compile`` meets the same error.
    """
    job = _job(compile)
    try:
        submit = _processes()
        if submit is not None and job is not None:
            submit(functools.partial(compile_job, job)).result()
    except Exception as error:  # noqa: BLE001 (of the kernel, or of processes that end or do not start)
        what = str(error) or type(error).__name__
        logger.info("qframework: a process could not compile a kernel, which is compiled here: %s", what)


_START_S = 30.0  # seconds, several times what processes take to start on a busy machine


def _processes() -> Callable[[Callable[[], None]], Any] | None:
    """What passes a function to Inductor's processes, once these are ready; None where it has none."""
    try:
        from torch._inductor.async_compile import AsyncCompile

        ready = AsyncCompile.use_process_pool()
        starting = AsyncCompile._ready_future
    except (ImportError, AttributeError) as error:
        note_error(error)
        return None
    if not ready:
        if starting is None:
            return None
        starting.result(_START_S)
    submit: Callable[[Callable[[], None]], Any] = AsyncCompile.process_pool().submit
    return submit


def _job(compile: Callable[[], Any]) -> bytes | None:
    """What ``compile_job`` needs; None where it cannot be sent."""
    cells = zip(compile.__code__.co_freevars, compile.__closure__ or (), strict=True)
    known = {name: cell.cell_contents for name, cell in cells}
    if not {"src", "target", "options", "env_vars"} <= known.keys():
        note_missing(_CLOSURE)
        return None
    job = (known["src"], known["target"], known["options"].__dict__, known["env_vars"], _cache.dir)
    written = io.BytesIO()
    try:
        _Pickler(written).dump(job)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    return written.getvalue()


class _Pickler(pickle.Pickler):
    """Kernels are pickled by name."""

    def reducer_override(self, x: Any) -> Any:
        if not isinstance(x, JITCallable):
            return NotImplemented
        module, name = x.fn.__module__, x.fn.__qualname__
        if getattr(sys.modules.get(module), name, None) is not x:
            raise pickle.PicklingError(f"{module}.{name} is another object")
        return _kernel, (module, name)


def _kernel(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def compile_job(job: bytes) -> None:
    """Compile into Triton's cache what ``compile_in_process`` has sent; needs no GPU."""
    source, target, options, environment, cache = pickle.loads(job)
    with _cache.scope():
        _cache.dir = cache
        triton.compile(source, target=target, options=options, _env_vars=environment)
