"""Runs functions in copies of this process.

Python code in a thread would make this process wait for the GIL. A copy that is forked has all modules at once, where a
new process imports PyTorch for seconds. It must not use CUDA, nor take locks that other threads may hold, which are
never released in it: forks that hang are ended. What they print and log is lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

LEAST_CORES = 4  # with fewer, they take time from this process
PATIENCE_S = 60.0  # that they may take
_LOOK_S = 0.25  # after which we look whether a process is there that says nothing


def may_fork() -> bool:
    """Whether this machine forks processes, and has cores for them."""
    return hasattr(os, "fork") and hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) >= LEAST_CORES


class _Fork:
    """A process that calls ``run`` with the end of a pipe, which those that it forks keep open as well."""

    def __init__(self, run: Callable[[int], Any]) -> None:
        self._start, end = os.pipe()
        try:
            self._process = _fork()
        except OSError:
            os.close(self._start)
            os.close(end)
            raise
        if self._process == 0:
            _call_and_exit(lambda: run(end), leader=True)
        os.close(end)

    def read(self, timeout: float) -> bytes | None:
        """What is written to the pipe until all have ended; None if they did not in time, and were ended."""
        deadline, ended = time.monotonic() + timeout, False
        parts: list[bytes] = []
        poll = select.poll()
        poll.register(self._start, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            if not poll.poll(0 if ended else 1e3 * min(left, _LOOK_S)):
                if ended:
                    break
                ended = self._has_ended()  # whoever else was forked meanwhile keeps the pipe open as well
            elif part := os.read(self._start, 2**20):
                parts.append(part)
            else:
                ended = True
                break
        os.close(self._start)
        self._end(at_once=not ended)
        return b"".join(parts) if ended else None

    def _has_ended(self) -> bool:
        try:
            return os.waitid(os.P_PID, self._process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # where children are reaped by themselves
            return True

    def _end(self, at_once: bool) -> None:
        for kill in (os.killpg, os.kill) if at_once else ():  # it may hang before it has a group of its own
            with contextlib.suppress(ProcessLookupError):
                kill(self._process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._process, 0)


class Forks:
    """Calls each of ``steps`` in a process of its own, one for each core at a time, for what they leave on disk.

    Raises:
        OSError: the system refuses another process.
    """

    def __init__(self, steps: Sequence[Callable[[], Any]]) -> None:
        self._fork = _Fork(lambda _: _fork_each(steps))

    def wait(self, timeout: float = PATIENCE_S) -> bool:
        """Whether all have ended within some seconds; those that have not are ended."""
        return self._fork.read(timeout) is not None


class ForkedCall:
    """``function(*arguments)`` in a process of its own; the result comes back by pickle.

    Raises:
        OSError: the system refuses another process.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments
        self._fork = _Fork(self._write)

    def _write(self, end: int) -> None:
        left = memoryview(pickle.dumps(self._function(*self._arguments)))
        while left:
            left = left[os.write(end, left) :]

    def result(self, timeout: float = PATIENCE_S, otherwise: Callable[..., Any] | None = None) -> Any:
        """The result. If the other process failed or took too long, it is computed again, which raises its error.

        ``otherwise`` computes it then: it is called as the function would be, by default the function itself is, here.
        """
        try:
            return pickle.loads(self._fork.read(timeout) or b"")
        except Exception:  # noqa: BLE001 (nothing, or half of a result)
            return (otherwise or self._function)(*self._arguments)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, about other threads
        return os.fork()


def _fork_each(steps: Sequence[Callable[[], Any]]) -> None:
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


def _call_and_exit(step: Callable[[], Any], leader: bool = False) -> None:
    """Without what this process does at its end, nor what its callers do behind an error."""
    try:
        if leader:
            os.setsid()  # a group of its own, which the keyboard does not interrupt
            logging.disable()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for output in (1, 2):
                os.dup2(nowhere, output)
        step()
    finally:
        os._exit(0)
