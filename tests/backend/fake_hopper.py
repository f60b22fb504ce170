"""A driver that answers Triton as a Hopper GPU would, and graphs as the backend sees them on that GPU.

So kernels are looked up, compiled and "launched" without a GPU. conftest.py offers the fixtures to all tests here.
"""

from __future__ import annotations

from collections import defaultdict
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from lowered_models import converted, lowered_graph
from torch._subclasses.fake_tensor import FakeTensorMode

from qframework.backend import warm_up as warm_up_module
from qframework.backend.group_weights import group_weights
from qframework.backend.keep_quantize import keep_dynamic_quantize
from qframework.backend.lowering import Lowering
from qframework.graph.nodes import fake_value
from qframework.kernels.linear import hopper as specialized
from qframework.kernels.linear import launch as int8_linear_launch
from qframework.kernels.linear import tiles as int8_linear_tiles
from qframework.kernels.linear.few_rows import _add_parts_kernel, _int8_linear_few_rows_kernel
from qframework.kernels.linear.quantize_weights import _quantize_weights_kernel
from qframework.kernels.linear.tiles import choose_tile
from qframework.kernels.linear.triton import _int8_linear_kernel
from qframework.kernels.quantize import _dynamic_quantize_kernel
from qframework.kernels.runtime import launch as _launch
from qframework.quantizer import dynamic_int8, static_int8

LINEAR_KERNELS = (_int8_linear_kernel, specialized.kernel, _int8_linear_few_rows_kernel, _add_parts_kernel)
KERNELS = (*LINEAR_KERNELS, _dynamic_quantize_kernel, _quantize_weights_kernel)
LAUNCHING = [
    import_module(f"qframework.kernels.{name}") for name in ("quantize", "linear.quantize_weights", "linear.launch")
]
CUDA = torch.device("cuda", 0)


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
    monkeypatch.setattr(warm_up_module, "may_fork", lambda: False)  # compile here, however many cores there are
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


def complete(operands):
    """With the defaults of a, a_scale, b, b_scale, bias, activation, residual, out_scale, out_dtype."""
    rest = (None, "none", None, None)[len(operands) - 4 :]
    operands = (*operands, *rest)
    return *operands, None if operands[7] is not None else torch.half


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


GRAPHS = {
    "static": lambda model, x: lowered_graph(converted(model, x), x),
    "static per token": lambda model, x: lowered_graph(converted(model, x, static_int8(activation="per_token")), x),
    "dynamic": lambda model, x: lowered_graph(converted(model, x, dynamic_int8()), x),
    "float": lambda model, x: lowered_graph(model, x, linear="int8_dynamic"),
}
