"""What starts when the backend is looked up: Triton's preparation, and Inductor's processes."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from torch._inductor import async_compile
from torch._subclasses.fake_tensor import FakeTensorMode

import qframework.backend
from qframework.backend import compile as backend
from qframework.backend import warm_up as warm_up_module
from qframework.compat import inductor
from qframework.compat.triton import prepare


@pytest.mark.parametrize("initialized", [True, False])
def test_looking_up_the_backend_prepares_triton_once_and_its_driver_where_cuda_runs(monkeypatch, initialized):
    done = []
    warm_up_module._prepare_once.cache_clear()
    monkeypatch.setattr(warm_up_module, "INTERPRET", False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(
        warm_up_module, "prepare", lambda driver: done.append((threading.current_thread().name, driver))
    )
    for _ in range(2):
        assert callable(qframework.backend.qframework_backend)
    for thread in threading.enumerate():
        if thread.name == "qframework-prepare":
            thread.join()
    assert done == [("qframework-prepare", initialized)]
    warm_up_module._prepare_once.cache_clear()


@pytest.mark.parametrize("initialized", [True, False])
def test_inductor_s_processes_start_with_the_look_up_where_cuda_runs(monkeypatch, initialized):
    started = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: started.append(True))
    monkeypatch.setattr(warm_up_module, "prepare_triton", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    assert callable(qframework.backend.qframework_backend)
    assert started == [True] * initialized


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_inductor_s_processes_start_before_a_graph_on_a_gpu_is_lowered(monkeypatch, device):
    done = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: done.append("processes"))
    monkeypatch.setattr(backend, "run_passes", lambda lowering: done.append("passes"))
    monkeypatch.setattr(inductor, "compile_graph", lambda gm, *_: gm.forward)
    with FakeTensorMode():
        x = torch.empty(2, 3, device=device)
    gm = torch.fx.symbolic_trace(torch.nn.ReLU())
    backend.qframework_backend(gm, [x])
    assert done == ["processes"] * (device == "cuda") + ["passes"]


def test_prepare_without_a_driver_hashes_triton_and_puts_the_switch_interval_back():
    key, before = pytest.importorskip("triton.runtime.cache").triton_key, sys.getswitchinterval()
    key.cache_clear()
    prepare(driver=True)
    assert key.cache_info().currsize == 1
    assert sys.getswitchinterval() == before
