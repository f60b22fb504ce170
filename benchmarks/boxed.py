"""One process for each provider, with a deadline: a hang or a crash costs its own rows and no one else's.

A worker is started with ``make(*arguments)``, which returns a function from request to records. The parent sends a
request and reads records until the worker says it is done or the time is up; then the process is ended.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.harness import Record

Serve = Callable[[Any], Iterator[Record]]
DONE = "done"


class Worker:
    """A process that answers requests with records."""

    def __init__(self, make: Callable[..., Serve], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process cannot use a GPU its parent has touched
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.status: tuple[str, str] | None = None  # why it was ended before its time: (status, reason)

    def request(self, request: Any, seconds: float) -> Iterator[Record]:
        """The records of ``request``, as they arrive. A worker that fails or is late is ended; see ``status``."""
        deadline = time.monotonic() + seconds
        if self.status is None:
            self._send(request)
        while self.status is None:
            if not self._connection.poll(max(deadline - time.monotonic(), 0)):
                return self._end("timeout", f"not done after {seconds:.3g} s")
            try:
                answer = self._connection.recv()
            except EOFError:
                self._process.join(5)
                return self._end("failed", f"the process ended with exit status {self._process.exitcode}")
            if answer == DONE:
                return None
            yield answer

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.kill()
        self._process.join()

    def _send(self, request: Any) -> None:
        try:
            self._connection.send(request)
        except OSError:
            self._end("failed", f"the process ended with exit status {self._process.exitcode}")

    def _end(self, status: str, reason: str) -> None:
        self.status = status, reason
        self._process.kill()


def _serve(connection: Connection, make: Callable[..., Serve], arguments: tuple[Any, ...]) -> None:
    """The worker: answer until the parent closes its end."""
    serve = make(*arguments)
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        for record in serve(request):
            connection.send(record)
        connection.send(DONE)
