"""Runs each provider in its own process with a deadline, so that a hang or a crash loses only its own rows.

A worker calls ``make(*arguments)``, which returns a function from requests to records. The parent sends a request and
reads records until the worker is done or the time is up; then it kills the process with all its children.
``check_then_time`` checks several workers in parallel, then times them one after the other, each alone on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from benchmarks.harness import Record, Results

Phase = Literal["check", "time"]
Serve = Callable[[Any], Iterator[Record]]
Plan = TypeVar("Plan")
DONE = "done"
_SAY_WHERE, _FRAMES = signal.SIGUSR1, 6
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (\S+)$', re.MULTILINE)  # of faulthandler
_STARTING = threading.Lock()  # guards os.environ, which all threads share


class Worker:
    """A process that answers requests with records; ``environment`` is added to its inherited environment."""

    def __init__(
        self, make: Callable[..., Serve], *arguments: Any, environment: Mapping[str, str] | None = None
    ) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process cannot use a GPU its parent has touched
        self._connection, theirs = context.Pipe()
        self._folder = tempfile.TemporaryDirectory()
        self._stderr = Path(self._folder.name, "stderr")
        served = (theirs, str(self._stderr), make, arguments)
        self._process = context.Process(target=_serve, args=served, daemon=True)
        with _STARTING, _added(environment or {}):
            self._process.start()
        theirs.close()
        self.status: tuple[str, str] | None = None  # (status, reason) if it failed or was killed

    def request(self, request: Any, seconds: float) -> Iterator[Record]:
        """The records of ``request``, as they arrive. A worker that fails or is late is killed; see ``status``."""
        deadline = time.monotonic() + seconds
        if self.status is None:
            self._send(request)
        while self.status is None:
            if not self._connection.poll(max(deadline - time.monotonic(), 0)):
                return self._end("timeout", f"not done after {seconds:.3g} s{self._where()}")
            try:
                answer = self._connection.recv()
            except (EOFError, ConnectionResetError):
                return self._end("failed", self._how_it_ended())
            if answer == DONE:
                return None
            yield answer

    def close(self) -> None:
        """Kill the process and its children."""
        self._connection.close()
        self._kill()
        self._process.join()
        self._folder.cleanup()

    def _send(self, request: Any) -> None:
        try:
            self._connection.send(request)
        except OSError:
            self._end("failed", self._how_it_ended())

    def _how_it_ended(self) -> str:
        """Exit status and the last line of standard error."""
        self._process.join(30)
        text = self._stderr.read_text(errors="replace") if self._stderr.exists() else ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        last = lines[-1] if lines else "no message"
        return f"the process ended with exit status {self._process.exitcode}: {last}"[:300]

    def _where(self) -> str:
        """The functions that a late process is in, innermost first; empty if it does not say."""
        if self._process.pid is None or not self._stderr.exists():
            return ""
        written = self._stderr.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, _SAY_WHERE)
            time.sleep(0.2)  # a signal handler in C answers whatever the process waits for
        frames = _FRAME.findall(self._stderr.read_text(errors="replace")[written:])
        own = itertools.takewhile(lambda frame: frame[2] != _serve.__name__, frames[:_FRAMES])
        named = [f"{function} ({Path(file).name}:{line})" for file, line, function in own]
        return f", in {' < '.join(named)}" if named else ""

    def _end(self, status: str, reason: str) -> None:
        self.status = status, reason
        self._kill()

    def _kill(self) -> None:
        if self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # not yet a group leader, or gone
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()


@contextlib.contextmanager
def _added(environment: Mapping[str, str]) -> Iterator[None]:
    """Add ``environment`` to ``os.environ`` while a process starts."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _end_after(parent: int) -> None:
    """Kill this process and its group when ``parent`` has ended, to release the GPU."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _serve(connection: Connection, stderr: str, make: Callable[..., Serve], arguments: tuple[Any, ...]) -> None:
    """The worker's main loop: answer requests until the parent closes the connection."""
    os.setsid()  # a group of its own, so that children such as Inductor's compile workers end with it
    threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()
    os.dup2(os.open(stderr, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    faulthandler.register(_SAY_WHERE, file=2, all_threads=False)
    serve = make(*arguments)
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        for record in serve(request):
            connection.send(record)
        connection.send(DONE)


# Two phases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds: of one worker's check, of its timing, and of the whole run."""

    check: float
    time: float
    deadline: float  # of time.monotonic()
    reserve: float = 6.0  # kept for timing each plan, so that a late check does not use up the time of others

    def to_check(self, plans: int) -> float:
        """Seconds left to check one of ``plans`` plans, all of which still have to be timed."""
        return max(min(self.check, self.deadline - time.monotonic() - plans * self.reserve), 0.0)

    def to_time(self) -> float:
        return max(min(self.time, self.deadline - time.monotonic()), 0.0)


@dataclass
class Answers(Generic[Plan]):
    """The records of a worker in each phase, and why it was killed, if it was."""

    plan: Plan
    checked: list[Record]
    timed: list[Record] = field(default_factory=list)
    ended: tuple[str, str] | None = None

    def complete(self, identities: Sequence[Record]) -> Iterator[Record]:
        """One record for each identity: timed, refused, or with the reason its process was killed; then all others."""
        best: dict[tuple[Any, ...], Record] = {}
        for record in [*self.checked, *self.timed]:
            best[record.key] = _faster(best.get(record.key), record)
        status, reason = self.ended or ("failed", "no record")
        for identity in identities:
            record = best.pop(identity.key, identity)
            untimed = record.status == "ok" and record.p50_ms is None
            yield replace(record, status=status, reason=reason) if untimed else record
        yield from best.values()


def _faster(old: Record | None, new: Record) -> Record:
    """The faster of two timings, with the spread of all rounds so far; ``new`` unless both hold a time."""
    if old is None or old.p50_ms is None or new.p50_ms is None:
        return new
    slowest = max(new.p50_ms, old.p50_ms / (1 - (old.spread or 0.0)))
    fastest = old if old.p50_ms <= new.p50_ms else new
    return replace(fastest, spread=1 - (fastest.p50_ms or 0.0) / slowest)


def check_then_time(
    make: Callable[[Plan], Serve],
    plans: Sequence[Plan],
    limits: Limits,
    jobs: int,
    alone: Callable[[Plan], bool] = lambda plan: False,
    rounds: int = 1,
) -> Iterator[Answers[Plan]]:
    """Check all plans, ``jobs`` at a time, then time them one after the other; yields in the order of ``plans``.

    All are timed ``rounds`` times, so that a moment in which the machine is busy does not decide between two of them.
    An ``alone`` plan, which times kernels to choose between them, is checked after the others, alone on the machine.
    The others share the cores.
    """

    def check(plan: Plan, environment: Mapping[str, str] | None = None) -> tuple[Worker, Answers[Plan]]:
        worker = Worker(make, plan, environment=shared_cores(jobs) if environment is None else environment)
        answers = Answers(plan, list(worker.request("check", limits.to_check(len(plans)))))
        for name in {record.provider for record in answers.checked}:
            print(f"checked after {time.monotonic() - start:.0f} s: {name}", file=sys.stderr, flush=True)
        return worker, answers

    start = time.monotonic()
    others = [index for index, plan in enumerate(plans) if not alone(plan)]
    with ThreadPoolExecutor(max(jobs, 1)) as pool:
        checked = dict(zip(others, pool.map(check, [plans[index] for index in others]), strict=True))
    checked |= {index: check(plan, {}) for index, plan in enumerate(plans) if alone(plan)}
    for worker, answers in [checked[index] for index in range(len(plans))] * (rounds - 1):
        answers.timed += worker.request("time", limits.to_time())
    for index in range(len(plans)):
        worker, answers = checked[index]
        answers.timed += worker.request("time", limits.to_time())
        answers.ended = worker.status
        worker.close()
        yield answers


def run_plans(
    results: Results,
    make: Callable[[Plan], Serve],
    plans: Sequence[Plan],
    identities: Callable[[Plan], Sequence[Record]],
    limits: Limits,
    jobs: int,
    alone: Callable[[Plan], bool] = lambda plan: False,
    rounds: int = 1,
) -> None:
    """``check_then_time``, adding the records of each plan to ``results``: one for each of its ``identities``."""
    for answers in check_then_time(make, plans, limits, jobs, alone, rounds):
        results.add(*answers.complete(identities(answers.plan)))


def one_provider_each(plan: Any, together: bool) -> list[Any]:
    """The plan split into one for each of its ``providers``; whole where they share a process, as in smoke runs."""
    return [plan] if together else [replace(plan, providers=(name,)) for name in plan.providers]


def add_limits(
    parser: argparse.ArgumentParser,
    *,
    jobs: int,
    check: float,
    time: float,
    total: float,
    unit: str = "one provider, all shapes",
) -> None:
    """The options ``--jobs``, ``--check-limit``, ``--time-limit`` and ``--limit`` with these defaults."""
    parser.add_argument("--jobs", type=int, default=jobs, help="providers to compile and check in parallel")
    parser.add_argument("--check-limit", type=float, default=check, help=f"seconds to compile and check {unit}")
    parser.add_argument("--time-limit", type=float, default=time, help=f"seconds to time {unit}")
    parser.add_argument("--limit", type=float, default=total, help="seconds for everything")
    parser.add_argument(
        "--reserve", type=float, default=Limits.reserve, help="seconds of --limit kept for timing each, not for checks"
    )


def limits_of(arguments: argparse.Namespace) -> Limits:
    """The limits that the options of ``add_limits`` set, counted from now."""
    deadline = time.monotonic() + arguments.limit
    return Limits(arguments.check_limit, arguments.time_limit, deadline, arguments.reserve)


def shared_cores(jobs: int) -> dict[str, str]:
    """The environment that gives each of ``jobs`` workers twice its share of the cores for Inductor's processes."""
    threads = max(2 * (os.cpu_count() or 1) // max(jobs, 1), 1)
    return {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
