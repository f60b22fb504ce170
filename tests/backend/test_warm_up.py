"""Kernels compiled in parallel with Inductor are those that are launched later, by Triton's own key.

A driver that stands for a Hopper GPU answers Triton, so that kernels are looked up, compiled and "launched" here.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from lowered_models import Block, converted, example
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Interpreter

from qframework.backend import compile as backend
from qframework.backend import warm_up as warm_up_module
from qframework.backend.compile import lower
from qframework.backend.group_weights import group_weights
from qframework.backend.keep_quantize import keep_dynamic_quantize
from qframework.backend.lowering import Lowering
from qframework.backend.options import BackendOptions
from qframework.backend.warm_up import warm_up
from qframework.compat.triton import is_noted
from qframework.graph.nodes import fake_value
from qframework.kernels.attention import hopper as attention_hopper
from qframework.kernels.attention import hopper_dense
from qframework.kernels.attention.pipeline import SAGE_ATTENTION
from qframework.kernels.attention.prepare import _prepare_kernel, _statistics_kernel
from qframework.kernels.attention.quantize_qk import _attention_quantize_kernel
from qframework.kernels.attention.quantize_v import _value_quantize_kernel
from qframework.kernels.attention.quantized_attention import _quantized_attention_kernel
from qframework.kernels.attention.token_statistics import _block_statistics_kernel
from qframework.kernels.linear import hopper as specialized
from qframework.kernels.linear import launch as int8_linear_launch
from qframework.kernels.linear import tiles as int8_linear_tiles
from qframework.kernels.linear.arguments import Int8LinearArguments
from qframework.kernels.linear.few_rows import _add_parts_kernel, _int8_linear_few_rows_kernel
from qframework.kernels.linear.int8_linear import INT8_LINEAR
from qframework.kernels.linear.quantize_weights import QUANTIZE_WEIGHTS, _quantize_weights_kernel
from qframework.kernels.linear.tiles import choose_tile
from qframework.kernels.linear.triton import _int8_linear_kernel
from qframework.kernels.quantize import DYNAMIC_QUANTIZE, DYNAMIC_QUANTIZE_ALONE, _dynamic_quantize_kernel
from qframework.kernels.runtime import chip
from qframework.kernels.runtime import launch as _launch
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.operator import OPERATORS
from qframework.kernels.runtime.triton import HAS_TRITON, INTERPRET
from qframework.quantizer import dynamic_int8, static_int8

pytestmark = pytest.mark.skipif(INTERPRET or not HAS_TRITON, reason="interpreted kernels cannot be compiled")
LINEAR_KERNELS = (_int8_linear_kernel, specialized.kernel, _int8_linear_few_rows_kernel, _add_parts_kernel)
KERNELS = (*LINEAR_KERNELS, _dynamic_quantize_kernel, _quantize_weights_kernel)
ATTENTION_KERNELS = (
    _prepare_kernel, _statistics_kernel, _attention_quantize_kernel, _value_quantize_kernel,
    _quantized_attention_kernel, _block_statistics_kernel,
)  # fmt: skip
LAUNCHING = [
    import_module(f"qframework.kernels.{name}") for name in ("quantize", "linear.quantize_weights", "linear.launch")
]
CUDA = torch.device("cuda", 0)
_ours = torch.ops.qframework


class Compiled:
    """Stands for a compiled kernel."""

    function = packed_metadata = None

    def launch_metadata(self, *_):
        return None

    def run(self, *_):
        return None

    def __getitem__(self, grid):
        return lambda *_: None


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """A GPU for Triton to look at, and empty caches of kernels."""
    import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    from triton.backends.compiler import GPUTarget

    utils = SimpleNamespace(
        get_device_properties=lambda _: {"max_shared_mem": 227 * 1024},
        load_binary=lambda name, *_: (loaded.append(name), 0, 0, 0, 1024),
    )
    loaded: list[str] = []
    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=lambda *_: lambda *_: None,
        utils=utils,
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(warm_up_module, "current_device", Guard)
    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
        monkeypatch.setattr(kernel, "compile", None, raising=False)  # set by create_binder; put back afterwards
    monkeypatch.setattr(warm_up_module, "chip_of", lambda _: ((9, 0), 132))
    monkeypatch.setattr(int8_linear_launch, "chip_of", lambda _: ((9, 0), 132))
    monkeypatch.setattr(
        int8_linear_launch, "tile_for", lambda _, m, n, k, *rest: choose_tile(m, n, k, (9, 0), 132, *rest)
    )
    monkeypatch.setattr(int8_linear_tiles, "MAX_FEW_ROWS", 0)  # the same kernels for models of any size
    monkeypatch.setattr(warm_up_module, "_failures", set())
    Guard.entered = []
    return loaded


class Guard:
    """Stands for torch.cuda.device, which needs a GPU."""

    entered: list[torch.device]

    def __init__(self, device):
        self.device = device

    def __enter__(self):
        Guard.entered.append(self.device)

    def __exit__(self, *_):
        return None


@pytest.fixture
def compiled(hopper, monkeypatch) -> list[str]:
    """Names of the kernels that were compiled; none really is."""
    names: list[str] = []

    def compile(src, target, options, _env_vars=None):
        names.append(src.name)
        return Compiled()

    def launch(kernel, grid):
        """As on a GPU; tensors of the CPU are taken for the interpreter's."""

        def run(*arguments, **constants):
            with monkeypatch.context() as here:
                here.setattr(torch.Tensor, "is_cuda", True, raising=False)
                here.setattr(torch.cuda, "current_device", lambda: 0)
                here.setattr(_launch, "_compiled", {})
                _launch.launch(kernel, grid)(*arguments, **constants)

        return run

    monkeypatch.setattr("triton.compiler.compile", compile)
    for module in LAUNCHING:
        monkeypatch.setattr(module, "launch", launch)
    return names


def int8(*shape):
    return torch.zeros(shape, dtype=torch.int8)


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


def half(*shape):
    return ones(*shape, dtype=torch.half)


CASES = {
    "tma": (int8(300, 256), ones(1), int8(384, 256), ones(384)),
    "large": (int8(4096, 768), ones(1), int8(3072, 768), ones(3072), half(3072), "gelu", None, ones(1)),
    "tokens": (int8(2, 150, 256), ones(2, 150, 1), int8(384, 256), ones(384), half(384), "none", half(2, 150, 384)),
    "positions": (int8(2, 150, 256), ones(150, 1), int8(384, 256), ones(1), ones(384), "relu", None, ones(150, 1)),
    "channels": (int8(300, 256), ones(), int8(384, 256), ones(384), half(384), "none", None, ones(384)),
    "by pointers": (int8(300, 100), ones(1), int8(72, 100), ones(72), half(72), "silu"),
    "K is 1": (int8(300, 1), ones(1), int8(64, 1), ones(64)),
    "N is 1": (int8(300, 64), ones(1), int8(1, 64), ones(1)),
    "one row": (int8(1, 64), ones(1), int8(16, 64), ones(16), half(16), "none", half(1, 16)),
    "rows apart": (int8(300, 512)[:, :256], ones(1), int8(384, 256), ones(384)),
    "transposed": (int8(256, 300).t(), ones(1), int8(384, 256), ones(384)),
    "transposed residual": (int8(300, 256), ones(1), int8(384, 256), ones(384), None, "none", half(384, 300).t()),
    "begins at 3": (int8(300 * 256 + 3)[3:].view(300, 256), ones(1), int8(384, 256), ones(384)),
    "bias begins at 1": (int8(300, 256), ones(1), int8(384, 256), ones(384), half(385)[1:]),
    "empty": (int8(0, 256), ones(1), int8(384, 256), ones(384)),
}


def complete(operands):
    """With the defaults of a, a_scale, b, b_scale, bias, activation, residual, out_scale, out_dtype."""
    rest = (None, "none", None, None)[len(operands) - 4 :]
    operands = (*operands, *rest)
    return *operands, None if operands[7] is not None else torch.half


def on_meta(value):
    if not isinstance(value, torch.Tensor):
        return value
    return warm_up_module._Like(
        value.shape, value.stride(), value.storage_offset(), value.dtype, value.device
    ).on_meta()


def linear_kernels() -> set:
    return {key for kernel in LINEAR_KERNELS for key in kernel.device_caches[0][0]}


@pytest.mark.parametrize("name", CASES)
def test_a_launch_finds_what_was_compiled_ahead(compiled, name):
    operands = complete(CASES[name])
    INT8_LINEAR.warm_up(CUDA, Int8LinearArguments(*map(on_meta, operands)))
    ahead = linear_kernels()
    assert len(ahead) == len(compiled) == (name != "empty")
    INT8_LINEAR.cuda(*operands)
    assert linear_kernels() == ahead
    assert len(compiled) == len(ahead), "compiled again"


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 64, 256), (7, 48, 100), (64, 512, 8192), (64, 512, 8190)])
def test_few_rows_find_what_was_compiled_ahead(compiled, monkeypatch, rows, n, k):
    """Both kernels where the inner size is in parts."""
    monkeypatch.setattr(int8_linear_tiles, "MAX_FEW_ROWS", 64)
    operands = complete((int8(rows, k), ones(rows, 1), int8(n, k), ones(n), half(n), "silu", half(rows, n)))
    INT8_LINEAR.warm_up(CUDA, Int8LinearArguments(*map(on_meta, operands)))
    expected = ["_int8_linear_few_rows_kernel", "_add_parts_kernel"][: 1 + (k > 8000)]
    assert compiled == expected
    ahead = linear_kernels()
    INT8_LINEAR.cuda(*operands)
    assert linear_kernels() == ahead
    assert compiled == expected, "compiled again"


def test_cases_have_different_kernel_keys(compiled):
    """If all cases had one key, the test above would prove nothing."""
    for operands in CASES.values():
        INT8_LINEAR.cuda(*complete(operands))
    assert len(compiled) >= 10


@pytest.mark.parametrize("shape", [(300, 768), (300, 3072), (2, 150, 100), (7, 1)])
@pytest.mark.parametrize("dtype", [torch.half, torch.float32])
def test_dynamic_quantize_finds_what_was_compiled_ahead(compiled, shape, dtype):
    x = ones(*shape, dtype=dtype)
    DYNAMIC_QUANTIZE_ALONE.warm_up(CUDA, DYNAMIC_QUANTIZE_ALONE.arguments(on_meta(x), "per_token"))
    assert compiled == ["_dynamic_quantize_kernel"]
    DYNAMIC_QUANTIZE.cuda(x, "per_token")
    assert compiled == ["_dynamic_quantize_kernel"], "compiled again"


ATTENTION = {
    "integer_exp": ["_statistics_kernel", "_prepare_kernel", "_specialized_attention_kernel"],
    "unquantized": ["_streaming_attention_kernel"],
    "sage_vb": ["_attention_quantize_kernel", "_value_quantize_kernel", "_quantized_attention_kernel"],
}


@pytest.mark.skipif(not HAS_GLUON, reason="Hopper's kernels need Gluon")
@pytest.mark.parametrize("variant", ATTENTION)
def test_attention_is_compiled_ahead(compiled, monkeypatch, variant):
    """That a launch needs these kernels: tests/kernels/runtime/test_ahead.py."""
    monkeypatch.setattr(chip, "_chip_of", lambda _: ((9, 0), 132))
    monkeypatch.setattr(_launch, "overlap", lambda kernel: ({"OVERLAP": True}, {"launch_pdl": True}))
    for kernel in (attention_hopper.kernel, hopper_dense.streaming, *ATTENTION_KERNELS):
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
        monkeypatch.setattr(kernel, "compile", None, raising=False)
    x = on_meta(half(2, 32, 1024, 64))
    kernels = SAGE_ATTENTION.warm_up(CUDA, SAGE_ATTENTION.arguments(x, x, x, variant=variant))
    assert len(kernels) >= len(ATTENTION[variant])
    assert set(compiled) >= set(ATTENTION[variant])


def captured(model, x, dynamic=False, **options):
    """The lowered graph of a model as the backend sees it, and its inputs."""
    found = []

    def keep(gm, inputs):
        found.append((gm, inputs))
        lower(gm, inputs, BackendOptions(**options))
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=keep, dynamic=dynamic)(x)
    return found[0]


def as_if_on_cuda(gm, inputs=()):
    """Fakes of the graph's values on a GPU, and the passes that are for one."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        for node in gm.graph.nodes:
            if (fake := fake_value(node)) is not None:
                like = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=CUDA)
                node.meta["example_value"] = like
    lowering = Lowering.of(gm, inputs)
    group_weights(lowering)
    keep_dynamic_quantize(lowering)
    return gm


class Launched(Interpreter):
    """Runs a graph with the CUDA implementations of our operators."""

    def call_function(self, target, args, kwargs):
        if target is _ours.int8_linear.default:
            return INT8_LINEAR.cuda(*args, **kwargs)
        if target is _ours.dynamic_quantize.alone:
            return DYNAMIC_QUANTIZE.cuda(*args, **kwargs)
        if target is _ours.quantize_weights.default:
            return QUANTIZE_WEIGHTS.cuda(*args, **kwargs)
        return super().call_function(target, args, kwargs)


GRAPHS = {
    "static": lambda model, x: captured(converted(model, x), x),
    "static per token": lambda model, x: captured(converted(model, x, static_int8(activation="per_token")), x),
    "dynamic": lambda model, x: captured(converted(model, x, dynamic_int8()), x),
    "float": lambda model, x: captured(model, x, linear="int8_dynamic"),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_all_of_a_graph_is_compiled_ahead_and_once(compiled, name):
    gm, inputs = GRAPHS[name](nn.Sequential(Block(), Block()).eval(), example())
    with warm_up(as_if_on_cuda(gm, inputs)):
        pass
    ahead = list(compiled)
    assert ahead.count("_int8_linear_kernel") == 2, "two layers, in two equal blocks"
    assert ahead.count("_dynamic_quantize_kernel") == (name in ("dynamic", "float"))
    assert ahead.count("_quantize_weights_kernel") == (name == "float")
    assert set(Guard.entered) == {CUDA}
    Launched(gm).run(*inputs)
    assert compiled == ahead, "compiled again"


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
    gm, _ = captured(converted(Block().eval(), x), x, dynamic=True)
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


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["static", "static per token", "dynamic", "float", "static, many rows"])
def test_the_first_call_compiles_nothing_again(monkeypatch, name):
    """On a GPU, every kernel of ours is compiled ahead for the operands that Inductor passes to it."""
    import triton

    monkeypatch.setattr(_launch, "_compiled", {})
    for operator in OPERATORS.values():  # of earlier tests' calls, which would launch unseen
        if operator.replayed is not None:
            operator.replayed.replays.clear()
    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    ahead: dict[str, list[bool]] = defaultdict(list)

    def hook(*, fn, is_manual_warmup, **_):
        ahead[fn.jit_function.__name__].append(is_manual_warmup)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", hook)
    dim = 256 if name == "static, many rows" else 64
    x = torch.randn(64 if dim == 256 else 2, 197, dim, device="cuda", dtype=torch.half)
    model = nn.Sequential(Block(dim=dim), Block(dim=dim)).eval().cuda().half()
    if name != "float":
        per_token = static_int8(activation="per_token")
        model = converted(model, x, {"dynamic": dynamic_int8(), "static per token": per_token}.get(name))
    options = {"linear": "int8_dynamic"} if name == "float" else None
    with torch.no_grad():
        torch.compile(model, backend="qframework", options=options)(x)
    linears = ahead["_int8_linear_kernel"] + ahead["_int8_linear_specialized_kernel"]
    assert linears == [True] * 2, "False: compiled at its launch"
    assert ahead["_dynamic_quantize_kernel"] == [True] * (name in ("dynamic", "float"))
