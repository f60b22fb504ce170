"""Functions that run in forks of the process: what comes back, and what is left behind."""

from __future__ import annotations

import logging
import os
import pickle
import resource
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest

from qframework.forks import ForkedCall, Forks

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


def refuse(*_: object) -> None:
    raise BlockingIOError("no more processes")


def test_every_step_runs_in_a_process_of_its_own(tmp_path):
    def step(name):
        return lambda: (tmp_path / name).write_text(f"{os.getpid()} {os.getsid(0)}")

    assert Forks([step(str(n)) for n in range(20)]).wait(60)
    found = [(tmp_path / str(n)).read_text().split() for n in range(20)]
    assert len({process for process, _ in found} | {str(os.getpid())}) == 21
    assert len({session for _, session in found}) == 1
    assert found[0][1] != str(os.getsid(0)), "not the terminal's"


def test_at_most_one_process_for_each_core(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))

    def step():
        began = time.monotonic()
        time.sleep(0.2)
        (tmp_path / str(os.getpid())).write_text(f"{began} {time.monotonic()}")

    assert Forks([step] * 6).wait(60)
    times = [tuple(map(float, path.read_text().split())) for path in tmp_path.iterdir()]
    assert len(times) == 6
    assert max(sum(a <= began < b for a, b in times) for began, _ in times) == 2


def test_a_step_that_fails_leaves_the_others_alone(tmp_path, capfd):
    assert Forks([lambda: 1 / 0, (tmp_path / "done").touch]).wait(60)
    assert (tmp_path / "done").exists()


def test_forks_that_hang_are_ended_with_all_they_started(tmp_path):
    def hang():
        (tmp_path / str(os.getpid())).touch()
        time.sleep(600)

    forks = Forks([hang, hang])
    while len(started := list(tmp_path.iterdir())) < 2:
        time.sleep(0.01)
    assert not forks.wait(0.1)
    for _ in range(200):
        if not any(runs(int(path.name)) for path in started):
            return
        time.sleep(0.01)
    pytest.fail("still running")


def runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_no_warning_of_other_threads(tmp_path):
    """Of Python 3.12 and newer."""
    go_on = threading.Event()
    other = threading.Thread(target=go_on.wait)
    other.start()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert Forks([lambda: None]).wait(60)
    go_on.set()
    other.join()
    assert found == []


def test_nothing_is_left_open():
    before = os.listdir("/proc/self/fd")
    assert Forks([lambda: None]).wait(60)
    assert os.listdir("/proc/self/fd") == before


def test_a_refused_fork_leaves_nothing_open(monkeypatch):
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(BlockingIOError, match="no more"):
        Forks([lambda: None])
    assert os.listdir("/proc/self/fd") == before


def test_a_result_comes_back() -> None:
    other, numbers = ForkedCall(lambda n: (os.getpid(), list(range(n))), 10**6).result()
    assert other != os.getpid()
    assert numbers == list(range(10**6)), "more than a pipe holds"


def test_what_a_fork_cannot_do_is_done_here() -> None:
    """An error is that of this process."""
    here = os.getpid()

    def step() -> int:
        if os.getpid() != here:
            raise RuntimeError("not there")
        return 7

    assert ForkedCall(step).result() == 7
    with pytest.raises(ZeroDivisionError):
        ForkedCall(lambda: 1 // 0).result()


def test_a_result_that_cannot_be_pickled_is_computed_here() -> None:
    assert ForkedCall(threading.Lock).result().acquire()


def test_half_a_result_is_computed_here(monkeypatch) -> None:
    """As of a process that the system kills while it writes."""
    here, dumps = os.getpid(), pickle.dumps
    monkeypatch.setattr(pickle, "dumps", lambda x: dumps(x)[:-1000])
    assert ForkedCall(lambda: [os.getpid()] * 10000).result() == [here] * 10000


def test_a_fork_that_hangs_is_ended_and_its_call_done_here() -> None:
    here, began = os.getpid(), time.monotonic()
    call = ForkedCall(lambda: time.sleep(600) if os.getpid() != here else "here")
    assert call.result(timeout=0.2) == "here"
    assert time.monotonic() - began < 60


def test_nothing_is_printed_or_logged(capfd, caplog) -> None:
    def step() -> str:
        os.write(1, b"out")
        os.write(2, b"err")
        logging.getLogger("qframework").error("logged")
        return "done"

    assert ForkedCall(step).result() == "done"
    assert capfd.readouterr() == ("", "")
    logging.getLogger("qframework").error("here")
    assert "here" in caplog.text


def test_another_process_that_keeps_the_pipe_open_is_not_waited_for(monkeypatch) -> None:
    """As if another thread forked one between the pipe and its closing here."""
    fork, others = os.fork, []

    def twice() -> int:
        process = fork()
        if process and not others:
            others.append(fork())
            if others == [0]:
                time.sleep(600)
        return process

    monkeypatch.setattr(os, "fork", twice)
    began = time.monotonic()
    try:
        assert ForkedCall(lambda: list(range(10**5))).result(timeout=60) == list(range(10**5))
        assert time.monotonic() - began < 30
    finally:
        os.kill(others[0], signal.SIGKILL)
        os.waitpid(others[0], 0)


def test_a_fork_that_hangs_before_it_begins_is_ended(monkeypatch) -> None:
    """As in a handler that another library registered, which waits for a lock; it has no group of its own yet."""
    here = os.getpid()
    monkeypatch.setattr(os, "setsid", lambda: time.sleep(600))
    began = time.monotonic()
    assert ForkedCall(os.getpid).result(timeout=0.2) == here
    assert time.monotonic() - began < 60


def test_many_open_files() -> None:
    """Numbers of files above 1,023, which ``select`` refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip("this system allows fewer open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        other = ForkedCall(os.getpid).result()
        assert other != os.getpid()
    finally:
        for file in opened:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
