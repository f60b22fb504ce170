"""Forks stand for Inductor's processes until these are ready, and Inductor is as it was afterwards."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile

from qframework.compat import compile_pool
from qframework.compat.compile_pool import forks_until_ready
from qframework.compat.missing import replaced

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
READY: list[bool] = []
NAMES = ("process_pool", "use_process_pool")


class Own:
    """Stands for Inductor's pool: what is submitted to it is done in a thread, and noted."""

    def __init__(self) -> None:
        self.submitted: list[Any] = []
        self._thread = ThreadPoolExecutor(1)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        self.submitted.append((function, *arguments))
        return self._thread.submit(lambda: ("elsewhere", *arguments))


@pytest.fixture
def own(unready: None) -> Iterator[Own]:
    pool = Own()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncCompile, "process_pool", staticmethod(lambda: pool))
        yield pool


@pytest.fixture(autouse=True)
def unready(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Many cores, and processes that are not ready."""
    monkeypatch.setattr(compile_pool, "may_fork", lambda: True)
    monkeypatch.setattr(AsyncCompile, "use_process_pool", classmethod(lambda cls: bool(READY)))
    before = [vars(AsyncCompile)[name] for name in NAMES]
    yield
    assert [vars(AsyncCompile)[name] for name in NAMES] == before


def test_kernels_are_compiled_in_forks_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "LONGEST_S", float("inf"))  # a fork takes long beside other processes
    with forks_until_ready(allowed=True):
        assert AsyncCompile().use_process_pool()
        pool = AsyncCompile.process_pool()
        assert AsyncCompile().process_pool() is pool
        tasks = [pool.submit(os.getpid) for _ in range(3)]
        assert len({task.result() for task in tasks} | {os.getpid()}) == 4
    assert not AsyncCompile.use_process_pool()


def test_a_fork_empties_inductors_caches_without_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Inductor does so in every fork, where Python reports errors to a hook and goes on."""
    monkeypatch.setattr(sys, "unraisablehook", lambda error: (tmp_path / "error").write_text(str(error.exc_value)))
    with forks_until_ready(allowed=True):
        if (process := os.fork()) == 0:
            os._exit(0)
        os.waitpid(process, 0)
    assert list(tmp_path.iterdir()) == []


def test_where_no_process_can_be_forked_inductors_are_waited_for(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", refuse)
    with forks_until_ready(allowed=True):
        assert [AsyncCompile.process_pool().submit(abs, n).result() for n in (1, 2)] == [
            ("elsewhere", n) for n in (1, 2)
        ]
    assert own.submitted == [(abs, 1), (abs, 2)]


def test_where_forks_take_long_inductor_compiles_as_without(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process until its own are ready."""
    monkeypatch.setattr(compile_pool, "LONGEST_S", 0.0)
    with forks_until_ready(allowed=True):
        assert AsyncCompile.use_process_pool()
        assert AsyncCompile.process_pool().submit(abs, -1).result() == 1
        assert not AsyncCompile.use_process_pool()
        monkeypatch.setattr(sys.modules[__name__], "READY", [True])
        assert AsyncCompile().use_process_pool()
        assert AsyncCompile.process_pool().submit(abs, -2).result() == ("elsewhere", -2)
    assert own.submitted == [(abs, -2)]


def test_what_a_fork_cannot_do_is_never_done_here(own: Own, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Inductor's job leaves a kernel without source, which this process may need."""
    monkeypatch.setattr(compile_pool, "LONGEST_S", float("inf"))

    def fail(name: str) -> None:
        (tmp_path / str(os.getpid())).touch()
        raise RuntimeError(name)

    with forks_until_ready(allowed=True):
        assert AsyncCompile.process_pool().submit(fail, "there").result() == ("elsewhere", "there")
    assert own.submitted == [(fail, "there")]
    assert (tmp_path / str(os.getpid())).exists() is False
    assert len(list(tmp_path.iterdir())) == 1


def test_an_error_inside_restores_inductor() -> None:
    with pytest.raises(ValueError, match="inside"), forks_until_ready(allowed=True):
        raise ValueError("inside")


@pytest.mark.parametrize("reason", ["not allowed", "few cores", "processes are ready", "Triton's profiler"])
def test_inductor_is_left_alone(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    if reason == "few cores":
        monkeypatch.setattr(compile_pool, "may_fork", lambda: False)
    if reason == "processes are ready":
        monkeypatch.setattr(sys.modules[__name__], "READY", [True])
    before = [vars(AsyncCompile)[name] for name in NAMES]
    profiled = config.patch({"triton.proton_profiling": reason == "Triton's profiler"})
    with profiled, forks_until_ready(allowed=reason != "not allowed"):
        assert [vars(AsyncCompile)[name] for name in NAMES] == before


def test_a_pool_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch._inductor.async_compile.AsyncCompile.process_pool"
    with monkeypatch.context() as patch:
        patch.delattr(AsyncCompile, "process_pool")
        counted = replaced[name]
        with forks_until_ready(allowed=True):
            pass
        assert replaced[name] == counted + 1
