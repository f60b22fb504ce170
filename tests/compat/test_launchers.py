"""Launchers of Triton 3.6 are compiled in threads, one for all signatures whose source is the same."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from qframework.compat import launchers
from qframework.compat.launchers import Launchers

POINTWISE = {"in_ptr0": "*fp16", "out_ptr0": "*fp16", "xnumel": "i32", "XBLOCK": "constexpr"}
QUANTIZING = {**POINTWISE, "out_ptr0": "*i8"}
REDUCTION = {**POINTWISE, "r0_numel": "i32"}


class Driver:
    """Triton's module as of 3.6."""

    include_dirs, libraries = ["include"], ["libcuda.so.1"]

    def __init__(self) -> None:
        self.compiled, self.threads, self.fails = [], set(), False

    def library_dirs(self):
        return ["lib"]

    def make_launcher(self, constants, signature, tensordesc_meta):
        assert not constants
        assert tensordesc_meta is None
        return " ".join("pointer" if kind.startswith("*") else kind for kind in signature.values())

    def compile_module_from_src(self, src, name, library_dirs, include_dirs, libraries):
        self.threads.add(threading.current_thread())
        if self.fails:
            raise RuntimeError("no compiler")
        self.compiled.append((src, name, library_dirs, include_dirs, libraries))


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(launchers, "_in_c", lambda: found)
    return found


def compile_all(*signatures):
    with Launchers() as ahead:
        for signature in signatures:
            ahead.compile(signature)
    ahead._pool.shutdown(wait=True)


def test_each_source_is_compiled_once_in_a_thread(driver):
    compile_all(POINTWISE, QUANTIZING, POINTWISE, REDUCTION)
    places = "__triton_launcher", ["lib"], ["include"], ["libcuda.so.1"]
    pointers = "pointer pointer i32 constexpr"
    assert sorted(driver.compiled) == [(pointers, *places), (f"{pointers} i32", *places)]
    assert threading.current_thread() not in driver.threads


def test_a_failure_is_left_to_triton(driver):
    driver.fails = True
    compile_all(POINTWISE)
    assert len(driver.threads) == 1
    assert not driver.compiled


def test_later_tritons_have_one_launcher_for_all(monkeypatch):
    nvidia = pytest.importorskip("triton.backends.nvidia")
    monkeypatch.setattr(nvidia, "driver", SimpleNamespace())
    with Launchers() as ahead:
        ahead.compile(POINTWISE)
    assert ahead._pool is None
    monkeypatch.setattr(nvidia, "driver", Driver())
    with Launchers() as ahead:
        ahead.compile(POINTWISE)
    assert ahead._pool is not None


def test_triton_s_cache_finds_what_was_compiled_ahead():
    """With Triton 3.6: the name and the source are those that its launcher asks for."""
    module = pytest.importorskip("triton.backends.nvidia.driver")
    if not hasattr(module, "make_launcher"):
        pytest.skip("this Triton has one launcher for all kernels")
    asked = []
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(module, "compile_module_from_src", lambda *args, **named: asked.append((args, named)))
        patches.setattr(module, "library_dirs", lambda: ["lib"])
        compile_all(POINTWISE)
        source = SimpleNamespace(signature=POINTWISE, constants={(3,): 64})
        with pytest.raises(AttributeError):  # the module that compilation returns
            module.CudaLauncher(source, SimpleNamespace())
    (ours, _), (_, theirs) = asked
    assert ours == (theirs["src"], theirs["name"], theirs["library_dirs"], theirs["include_dirs"], theirs["libraries"])
