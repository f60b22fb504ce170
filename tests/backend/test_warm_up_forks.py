"""Kernels that forks compile are those that this process looks for; threads compile them where forks cannot."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest
from fake_hopper import GRAPHS, as_if_on_cuda
from lowered_models import Block, example
from torch._inductor import config

from qframework.backend import warm_up as warm_up_module
from qframework.backend.warm_up import warm_up
from qframework.compat import inductor
from qframework.forks import Forks, may_fork
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


@compiles
def test_an_error_inside_leaves_no_process(forking, monkeypatch):
    before, made = os.listdir("/proc/self/fd"), []
    monkeypatch.setattr(warm_up_module, "Forks", lambda steps: made.append(Forks(steps)) or made[0])
    with pytest.raises(ValueError, match="Inductor's"), warm_up(dynamic_graph()):
        raise ValueError("Inductor's")
    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(ProcessLookupError):
        os.kill(made[0]._fork._process, 0)
