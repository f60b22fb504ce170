"""Kernels compiled in parallel with Inductor are those that are launched later, by Triton's own key."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from fake_hopper import CUDA, GRAPHS, KERNELS, LINEAR_KERNELS, Guard, as_if_on_cuda, complete, half, int8, ones
from lowered_models import Block, converted, example
from torch import nn
from torch.fx import Interpreter

from qframework.backend import warm_up as warm_up_module
from qframework.backend.warm_up import warm_up
from qframework.kernels.attention.hopper import dense as hopper_dense
from qframework.kernels.attention.hopper import specialized as attention_hopper
from qframework.kernels.attention.hopper.prepare import _prepare_kernel, _statistics_kernel
from qframework.kernels.attention.pipeline import SAGE_ATTENTION
from qframework.kernels.attention.quantize_qk import _attention_quantize_kernel
from qframework.kernels.attention.quantize_v import _value_quantize_kernel
from qframework.kernels.attention.quantized_attention import _quantized_attention_kernel
from qframework.kernels.attention.token_statistics import _block_statistics_kernel
from qframework.kernels.linear import tiles as int8_linear_tiles
from qframework.kernels.linear.arguments import Int8LinearArguments
from qframework.kernels.linear.int8_linear import INT8_LINEAR
from qframework.kernels.linear.quantize_weights import QUANTIZE_WEIGHTS
from qframework.kernels.quantize import DYNAMIC_QUANTIZE, DYNAMIC_QUANTIZE_ALONE
from qframework.kernels.runtime import chip
from qframework.kernels.runtime import launch as _launch
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.operator import OPERATORS
from qframework.kernels.runtime.triton import HAS_TRITON, INTERPRET
from qframework.quantizer import dynamic_int8, static_int8

pytestmark = pytest.mark.skipif(INTERPRET or not HAS_TRITON, reason="interpreted kernels cannot be compiled")
ATTENTION_KERNELS = (
    _prepare_kernel, _statistics_kernel, _attention_quantize_kernel, _value_quantize_kernel,
    _quantized_attention_kernel, _block_statistics_kernel,
)  # fmt: skip
_ours = torch.ops.qframework

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
