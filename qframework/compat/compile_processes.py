"""Compiles Triton kernels in Inductor's processes, so that Python of this process need not wait for them.

A thread that compiles a kernel runs Python for a third of the time, while the thread that traces and lowers the model
waits for the GIL. The result of a process is a file in Triton's cache, which this process then loads.
"""

from __future__ import annotations

import functools
import importlib
import io
import logging
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

from qframework.compat.missing import explained, note_error, note_missing

with explained():
    import triton
    from triton.runtime.jit import JITCallable

    _cache = triton.knobs.cache

logger = logging.getLogger(__name__)

_SETTINGS = "TRITON_"  # begin of the names of environment variables
_CLOSURE = "async_compile"  # the function of Triton's JITFunction that compiles under AsyncCompileMode


def compile_in_process(compile: Callable[[], Any]) -> None:
    """Do in a process what ``compile``, Triton's own closure, does in this one, so that it finds the result.

    Does nothing before Inductor's processes are ready, seconds after the first ``torch.compile``: a thread is done
    before they are. Nor where Inductor is configured to have none, and for kernels that are no members of a module.
    What a process fails to compile is logged, and ``compile`` meets the same error.
    """
    submit = _ready_processes()
    job = None if submit is None else _job(compile)
    if submit is None or job is None:
        return
    try:
        submit(functools.partial(compile_job, job)).result()
    except Exception as error:  # noqa: BLE001 (of the kernel, or of processes that end)
        logger.info("qframework: a process could not compile a kernel, which is compiled here: %s", error)


def _ready_processes() -> Callable[[Callable[[], None]], Any] | None:
    """What passes a function to Inductor's processes."""
    try:
        from torch._inductor.async_compile import AsyncCompile

        ready: bool = AsyncCompile.use_process_pool()
        return AsyncCompile.process_pool().submit if ready else None
    except (ImportError, AttributeError) as error:
        note_error(error)
        return None


def _job(compile: Callable[[], Any]) -> bytes | None:
    """What ``compile_job`` needs; None where it cannot be sent."""
    cells = zip(compile.__code__.co_freevars, compile.__closure__ or (), strict=True)
    known = {name: cell.cell_contents for name, cell in cells}
    if not {"src", "target", "options", "env_vars"} <= known.keys():
        note_missing(_CLOSURE)
        return None
    settings = {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)}
    job = (known["src"], known["target"], known["options"].__dict__, known["env_vars"], _cache.dir, settings)
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
    """Compile into Triton's cache what ``compile_in_process`` has sent; needs no GPU.

    Triton's settings are those of the sender: Inductor gives its processes another assembler.
    """
    source, target, options, environment, cache, settings = pickle.loads(job)
    own = {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)}
    try:
        _replace_settings(settings)
        with _cache.scope():
            _cache.dir = cache
            triton.compile(source, target=target, options=options, _env_vars=environment)
    finally:
        _replace_settings(own)


def _replace_settings(settings: Mapping[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith(_SETTINGS)]:
        del os.environ[name]
    os.environ.update(settings)
