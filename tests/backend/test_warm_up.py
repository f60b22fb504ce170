"""When kernels are compiled in parallel with Inductor, which are left to their launch, and what becomes of failures."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from fake_hopper import CUDA, GRAPHS, KERNELS, as_if_on_cuda, complete, int8, ones
from lowered_models import Block, converted, example, lowered_graph
from torch._subclasses.fake_tensor import FakeTensorMode

from qframework.backend import compile as backend
from qframework.backend import warm_up as warm_up_module
from qframework.backend.warm_up import warm_up
from qframework.compat.triton import is_noted
from qframework.graph.nodes import fake_value
from qframework.kernels.linear.int8_linear import INT8_LINEAR
from qframework.kernels.linear.triton import _int8_linear_kernel
from qframework.kernels.quantize import _dynamic_quantize_kernel
from qframework.kernels.runtime.triton import HAS_TRITON, INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET or not HAS_TRITON, reason="interpreted kernels cannot be compiled")
_ours = torch.ops.qframework


def quantized_graph():
    return as_if_on_cuda(GRAPHS["static"](Block().eval(), example())[0])


def calls_of(gm):
    return [call for node in gm.graph.nodes if (call := warm_up_module._call(node)) is not None]


def refuse(*_, **__):
    raise AssertionError("there is nothing to compile")


def test_nothing_happens_on_the_cpu(monkeypatch):
    gm, _ = GRAPHS["static"](Block().eval(), example())
    monkeypatch.setattr(warm_up_module, "ThreadPoolExecutor", refuse)
    with warm_up(gm):
        pass
    with pytest.raises(AssertionError, match="nothing to compile"), warm_up(as_if_on_cuda(gm)):
        pass


def test_nothing_happens_where_kernels_are_interpreted(monkeypatch):
    monkeypatch.setattr(warm_up_module, "ThreadPoolExecutor", refuse)
    monkeypatch.setattr(warm_up_module, "INTERPRET", True)
    with warm_up(quantized_graph()):
        pass


def test_symbolic_sizes_are_left_to_the_launch(monkeypatch):
    x = example()
    gm, _ = lowered_graph(converted(Block().eval(), x), x, dynamic=True)
    nodes = [node for node in gm.graph.nodes if node.target is _ours.int8_linear.default]
    assert len(nodes) == 2
    assert all(isinstance(fake_value(node).shape[0], torch.SymInt) for node in nodes)
    monkeypatch.setattr(warm_up_module, "ThreadPoolExecutor", refuse)
    monkeypatch.setattr(warm_up_module._Call, "device", CUDA)
    with warm_up(gm):
        pass


def test_compiles_while_the_block_runs_and_waits(compiled, monkeypatch):
    started, go_on = threading.Event(), threading.Event()
    compile_at_once = __import__("triton").compiler.compile

    def compile(*args, **kwargs):
        started.set()
        assert go_on.wait(60)
        return compile_at_once(*args, **kwargs)

    monkeypatch.setattr("triton.compiler.compile", compile)
    with warm_up(quantized_graph()):
        assert started.wait(60)
        assert compiled == []
        go_on.set()
    assert compiled == ["_int8_linear_kernel"] * 2


def test_kernels_of_an_earlier_process_are_loaded_behind_the_block(compiled, monkeypatch):
    started, compile_calls = threading.Event(), warm_up_module._compile

    def compile(calls):
        started.set()
        return compile_calls(calls)

    monkeypatch.setattr(warm_up_module, "_compile", compile)
    with warm_up(quantized_graph()):
        assert started.wait(60)
    started.clear()
    del compiled[:]
    for kernel in KERNELS:  # as in a new process
        kernel.device_caches.clear()
    with warm_up(quantized_graph()):
        assert not started.wait(0.1)
    assert started.is_set()
    assert compiled == ["_int8_linear_kernel"] * 2


def test_other_kernels_and_other_chips_are_not_taken_for_compiled(compiled, monkeypatch):
    gm = quantized_graph()
    keys = {warm_up_module._key(calls_of(gm)), warm_up_module._key(calls_of(gm)[:1])}
    monkeypatch.setattr(warm_up_module, "chip_of", lambda _: ((8, 0), 108))
    keys.add(warm_up_module._key(calls_of(gm)))
    monkeypatch.setattr(warm_up_module, "hash_of_package", lambda: "another")
    keys.add(warm_up_module._key(calls_of(gm)))
    assert len(keys) == 4
    assert warm_up_module._key(calls_of(gm)) == warm_up_module._key(calls_of(quantized_graph()))
    first = calls_of(gm)[0]
    assert first.name == "qframework.int8_linear.default"
    assert warm_up_module._key([first._replace(name="another")]) != warm_up_module._key([first])
    assert "0x" not in repr([(call.name, call.arguments) for call in calls_of(gm)]), (
        "an address differs in each process"
    )


def test_kernels_that_failed_are_not_taken_for_compiled(compiled, monkeypatch):
    def compile(src, target, options, _env_vars=None):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr("triton.compiler.compile", compile)
    with warm_up(quantized_graph()):
        pass
    assert not is_noted(warm_up_module._key(calls_of(quantized_graph())))


def test_a_failure_is_logged_once_and_left_to_the_launch(compiled, monkeypatch, caplog):
    compile_well = __import__("triton").compiler.compile

    def compile(src, target, options, _env_vars=None):
        if any(getattr(value, "activation", None) == "gelu" for value in src.constants.values()):
            raise RuntimeError("no such instruction")
        return compile_well(src, target, options)

    monkeypatch.setattr("triton.compiler.compile", compile)
    gm = quantized_graph()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with warm_up(gm):
                pass
    assert [record.message for record in caplog.records] == [
        "qframework: a kernel will be compiled at its first launch instead: RuntimeError: no such instruction"
    ]
    assert compiled == ["_int8_linear_kernel"], "the other one"
    monkeypatch.setattr(_int8_linear_kernel, "compile", compile_well)
    INT8_LINEAR.cuda(*complete((int8(14, 32), ones(1), int8(64, 32), ones(64), ones(64), "gelu", None, ones(1))))
    assert len(compiled) == 2


def test_calls_of_other_shapes_share_a_kernel_and_its_failure(compiled, monkeypatch, caplog):
    gm = quantized_graph()
    linear = next(node for node in gm.graph.nodes if node.target is _ours.int8_linear.default)
    with FakeTensorMode(), gm.graph.inserting_after(linear):
        again = gm.graph.node_copy(linear)
        again.args = (gm.graph.placeholder("more"), *linear.args[1:])
        again.args[0].meta["example_value"] = torch.empty(3, 5, 32, dtype=torch.int8, device=CUDA)
    with warm_up(gm):
        pass
    assert len(compiled) == 2
    monkeypatch.setattr("triton.compiler.compile", refuse)
    for kernel in KERNELS:
        kernel.device_caches.clear()
    with caplog.at_level(logging.WARNING), warm_up(gm):
        pass
    assert len(caplog.records) == 1


def test_no_driver_is_a_warning(hopper, monkeypatch, caplog):
    def absent(device):
        raise RuntimeError("Found no NVIDIA driver")

    monkeypatch.setattr(warm_up_module, "current_device", absent)
    with caplog.at_level(logging.WARNING), warm_up(quantized_graph()):
        pass
    assert len(caplog.records) == 1
    assert "Found no NVIDIA driver" in caplog.text


def test_errors_of_the_block_propagate(compiled):
    with pytest.raises(ValueError, match="Inductor's"), warm_up(quantized_graph()):
        raise ValueError("Inductor's")
    assert len(compiled) == 2


def test_threads_compile_for_hopper_and_load(hopper, monkeypatch, tmp_path):
    """Triton's own compiler in several threads, on an empty cache."""
    import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with warm_up(as_if_on_cuda(GRAPHS["dynamic"](Block().eval(), example())[0])):
        pass
    linears = _int8_linear_kernel.device_caches[0][0].values()
    rows = _dynamic_quantize_kernel.device_caches[0][0].values()
    assert len(linears) == 2
    assert len(rows) == 1
    assert not any(isinstance(kernel, triton.FutureKernel) for kernel in (*linears, *rows))
    assert all("wgmma" in kernel.asm["ptx"] for kernel in linears)
    assert sorted(hopper) == ["_dynamic_quantize_kernel"] + ["_int8_linear_kernel"] * 2


def test_inductor_runs_inside(monkeypatch):
    """The backend passes the lowered graph to warm_up, and Inductor compiles inside its block."""
    open_, graphs = [], []

    class Recorded:
        def __init__(self, gm):
            graphs.append(gm)

        def __enter__(self):
            open_.append(True)

        def __exit__(self, *_):
            open_.append(False)

    def compile_fx(gm, inputs, **_):
        assert open_ == [True]
        return gm.forward

    monkeypatch.setattr(backend, "warm_up", Recorded)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    x = example()
    with torch.no_grad():
        torch.compile(converted(Block(), x), backend="qframework")(x)
    assert open_ == [True, False]
    assert sum(node.target is _ours.int8_linear.default for node in graphs[0].graph.nodes) == 2
