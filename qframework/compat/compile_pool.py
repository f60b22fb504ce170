"""Inductor's processes that compile Triton kernels, until they are ready.

They import PyTorch, which takes longer than writing a graph of repeated blocks. Meanwhile Inductor compiles one kernel
after the other in its own process; here forks of this process do.

What a fork can't do is left to Inductor's processes. The job that Inductor submits must not be done in this one: it
drops the source of a kernel, which may be compiled again here, for smaller blocks say. Where forks take long, Inductor
compiles as it does without them.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from qframework.compat.missing import note_missing
from qframework.forks import ForkedCall, may_fork

LONGEST_S = 0.1  # that a fork may stop this process; it grows with the memory in use


class _Forks:
    """What Inductor needs of a pool of processes.

    Args:
        waiting: threads that wait for results.
        pool: returns Inductor's own, of which it makes one.
        ready: whether that may be used already.
    """

    def __init__(self, waiting: ThreadPoolExecutor, pool: Callable[[], Any], ready: Callable[[], bool]) -> None:
        self._waiting, self._pool, self._ready, self._slow = waiting, pool, ready, False

    def are_used(self) -> bool:
        """Whether Inductor submits kernels, and does not compile them in this process."""
        return not self._slow or self._ready()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if self._slow:
            return self._elsewhere(function, *arguments)
        began = time.perf_counter()
        try:
            call = ForkedCall(function, *arguments)
        except OSError:
            self._slow = True
            return self._elsewhere(function, *arguments)
        self._slow = time.perf_counter() - began > LONGEST_S
        return self._waiting.submit(
            call.result, otherwise=lambda *arguments: self._elsewhere(function, *arguments).result()
        )

    def _elsewhere(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        submitted: Future[Any] = self._pool().submit(function, *arguments)
        return submitted


@contextlib.contextmanager
def forks_until_ready(allowed: bool) -> Iterator[None]:
    """Let forks compile the Triton kernels of what is compiled inside, unless Inductor's processes are ready.

    ``allowed``: whether Inductor may compile in other processes.
    """
    if not allowed or not may_fork() or (pool := _pool_to_replace()) is None:
        yield
        return
    with ThreadPoolExecutor(thread_name_prefix="qframework-forks") as waiting, contextlib.ExitStack() as patches:
        forks = _Forks(waiting, pool.process_pool, pool.use_process_pool)
        itself = functools.lru_cache(1)(lambda: forks)  # cached: a fork empties the cache of what makes the pool
        for name, replacement in (("use_process_pool", forks.are_used), ("process_pool", itself)):
            patches.callback(setattr, pool, name, vars(pool)[name])
            setattr(pool, name, staticmethod(replacement))
        yield


def _pool_to_replace() -> Any:
    """Inductor's class, unless its processes are ready or it must compile in this one."""
    from torch._inductor import async_compile, config

    pool: Any = getattr(async_compile, "AsyncCompile", None)
    for name in ("process_pool", "use_process_pool"):
        if not hasattr(pool, name):
            note_missing(f"torch._inductor.async_compile.AsyncCompile.{name}")
            return None
    if getattr(config.triton, "proton_profiling", False) or pool.use_process_pool():
        return None
    return pool
