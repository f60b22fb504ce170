"""Runs functions in copies of this process, for what they leave on disk.

Python code in a thread would make this process wait for the GIL. A copy that is forked has all modules at once, where a
new process imports PyTorch for seconds. It must not use CUDA, nor take locks that other threads may hold, which are
never released in it: forks that hang are ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import warnings
from collections.abc import Callable, Sequence
from typing import Any

LEAST_CORES = 4  # with fewer, they take time from this process


def may_fork() -> bool:
    """Whether this machine forks processes, and has cores for them."""
    return hasattr(os, "fork") and hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) >= LEAST_CORES


class Forks:
    """Calls each of ``steps`` in a process of its own, at most one for each core at a time; errors are lost.

    Raises:
        OSError: the system refuses another process.
    """

    def __init__(self, steps: Sequence[Callable[[], Any]]) -> None:
        self._ended, end = os.pipe()  # which all of them keep open
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, about other threads
            try:
                self._first = os.fork()
            except OSError:
                os.close(self._ended)
                os.close(end)
                raise
        if self._first == 0:
            _call_and_exit(lambda: _fork_each(steps))
        os.close(end)

    def wait(self, timeout: float) -> bool:
        """Whether all have ended within some seconds; those that have not are ended."""
        ready, _, _ = select.select([self._ended], [], [], timeout)
        os.close(self._ended)
        if not ready:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._first, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # where children are reaped by themselves
            os.waitpid(self._first, 0)
        return bool(ready)


def _fork_each(steps: Sequence[Callable[[], Any]]) -> None:
    os.setsid()  # a group of its own, which the keyboard does not interrupt
    room = len(os.sched_getaffinity(0))
    for step in steps:
        if room == 0:
            os.wait()
        else:
            room -= 1
        if os.fork() == 0:
            _call_and_exit(step)
    with contextlib.suppress(ChildProcessError):  # there are no more
        while True:
            os.wait()


def _call_and_exit(step: Callable[[], Any]) -> None:
    """Without what this process does at its end, nor what its callers do behind an error."""
    try:
        step()
    finally:
        os._exit(0)
