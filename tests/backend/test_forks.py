"""Kernels that forks compile are those that this process looks for; threads compile them where forks cannot."""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from pathlib import Path

import pytest
from fake_hopper import GRAPHS, as_if_on_cuda
from lowered_models import Block, example
from torch._inductor import config

from qframework.backend import forks as forks_module
from qframework.backend import warm_up as warm_up_module
from qframework.backend.forks import Forks, may_fork
from qframework.backend.warm_up import warm_up
from qframework.compat import inductor
from qframework.kernels.linear.triton import _int8_linear_kernel
from qframework.kernels.runtime.triton import HAS_TRITON, INTERPRET

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
compiles = pytest.mark.skipif(INTERPRET or not HAS_TRITON, reason="interpreted kernels cannot be compiled")


@pytest.fixture
def forking(hopper, monkeypatch):
    """A graph's kernels are compiled by forks, as with many cores; names of those that are loaded."""
    monkeypatch.setattr(warm_up_module, "may_fork", lambda: True)
    monkeypatch.setattr(inductor, "may_have_processes", lambda: True)
    return hopper


@pytest.fixture
def compiled_here(monkeypatch) -> list[bool]:
    """For each kernel that this process asks Triton for, whether it was compiled by now."""
    import triton

    compile, found = triton.compiler.compile, []

    def counted(*args, **kwargs):
        before = binaries(Path(os.environ["TRITON_CACHE_DIR"]))
        kernel = compile(*args, **kwargs)
        found.append(kernel.hash not in before and binaries(Path(os.environ["TRITON_CACHE_DIR"])) != before)
        return kernel

    monkeypatch.setattr("triton.compiler.compile", counted)
    return found


def binaries(folder: Path) -> set[str]:
    return {path.parent.name for path in folder.rglob("*.cubin")}


def dynamic_graph():
    return as_if_on_cuda(GRAPHS["dynamic"](Block().eval(), example())[0])


@compiles
def test_kernels_are_compiled_in_forks_and_loaded_here(forking, compiled_here):
    with warm_up(dynamic_graph()):
        assert compiled_here == []
    assert compiled_here == [False] * 3
    assert sorted(forking) == ["_dynamic_quantize_kernel"] + ["_int8_linear_kernel"] * 2, "loaded"


@compiles
def test_without_forks_they_are_compiled_here(forking, compiled_here, monkeypatch):
    """Which shows that the test above can fail."""
    monkeypatch.setattr(warm_up_module, "may_fork", lambda: False)
    with warm_up(dynamic_graph()):
        pass
    assert any(compiled_here)


@compiles
def test_forks_build_launchers(forking, monkeypatch, tmp_path):
    import triton

    def launcher_cls(src, metadata):
        (tmp_path / f"{os.getpid()}").write_text(src.name)
        return lambda *_: None

    monkeypatch.setattr(triton.runtime.driver.active, "launcher_cls", launcher_cls)
    with warm_up(dynamic_graph()):
        pass
    built = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    del built[str(os.getpid())]
    assert sorted(built.values()) == ["_dynamic_quantize_kernel"] + ["_int8_linear_kernel"] * 2


@compiles
def test_what_is_known_to_be_compiled_needs_no_fork(forking, monkeypatch):
    gm = dynamic_graph()
    with warm_up(gm):
        pass
    monkeypatch.setattr(warm_up_module, "Forks", lambda _: pytest.fail("a fork"))
    with warm_up(gm):
        pass


@compiles
def test_a_kernel_that_fails_in_a_fork_fails_here_and_is_told(forking, monkeypatch, caplog):
    def compile(*args, **kwargs):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr("triton.compiler.compile", compile)
    with caplog.at_level(logging.WARNING), warm_up(dynamic_graph()):
        pass
    assert [record.message for record in caplog.records] == [
        "qframework: a kernel will be compiled at its first launch instead: RuntimeError: no such instruction"
    ]


@compiles
@pytest.mark.parametrize("fault", ["refused", "silent"])
def test_threads_compile_where_forks_do_not(forking, monkeypatch, caplog, fault):
    if fault == "refused":
        monkeypatch.setattr(os, "fork", refuse)
    else:
        monkeypatch.setattr(warm_up_module, "PATIENCE_S", 0.1)
        monkeypatch.setattr(warm_up_module, "_compile_only", lambda *_: time.sleep(600))
    with caplog.at_level(logging.WARNING), warm_up(dynamic_graph()):
        pass
    assert len(caplog.records) == 1
    assert "kernels are compiled in threads" in caplog.text
    assert len(_int8_linear_kernel.device_caches[0][0]) == 2


def refuse(*_):
    raise BlockingIOError("no more processes")


@compiles
@pytest.mark.parametrize("forbidden", ["few cores", "one compile thread"])
def test_nothing_is_forked_without_cores_or_where_inductor_may_have_no_processes(hopper, monkeypatch, forbidden):
    monkeypatch.setattr(warm_up_module, "Forks", lambda _: pytest.fail("a fork"))
    monkeypatch.setattr(warm_up_module, "may_fork", may_fork)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3 if forbidden == "few cores" else 4))
    assert may_fork() == (forbidden != "few cores")
    with config.patch(compile_threads=1 if forbidden == "one compile thread" else 4):
        assert inductor.may_have_processes() == (forbidden != "one compile thread")
        with warm_up(dynamic_graph()):
            pass


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
    monkeypatch.setattr(forks_module.os, "fork", refuse)
    with pytest.raises(BlockingIOError, match="no more"):
        Forks([lambda: None])
    assert os.listdir("/proc/self/fd") == before
