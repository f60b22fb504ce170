"""int8_linear in C++: exact for every shape and instruction set, right epilogues, and chosen where it is faster."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest
import torch
from instruction_sets import reason_against
from oracle import assert_float_close, assert_int8_close, linear, numpy64
from torch.nn import functional as F

from qframework.errors import QFrameworkError
from qframework.kernels.linear import cpu, native
from qframework.kernels.linear.arguments import Int8LinearArguments
from qframework.kernels.runtime.activation import ACTIVATIONS

# Rows: few, one tile, more than one block. Columns: less than a panel, several. Inner: odd, around a step and a panel.
SHAPES = [
    (1, 1, 1), (1, 40, 33), (6, 17, 65), (7, 15, 16), (8, 16, 15), (9, 33, 32), (13, 511, 31), (16, 512, 64),
    (5, 513, 7), (21, 1025, 47), (769, 3, 17), (1543, 35, 5), (40, 4, 70), (50, 2080, 96), (193, 1088, 33),
]  # fmt: skip


@pytest.fixture(params=["amx", "vnni", "avx512", "avx2"])
def instructions(request, monkeypatch):
    """Let every implementation use one instruction set."""
    if reason := reason_against(request.param, native._library):
        pytest.skip(f"{request.param}: {reason}")
    monkeypatch.setattr(native, "instructions_of", lambda _: request.param)
    return request.param


def product(a, b):
    return native.native_product(a, b, "multiply_add")


def int8_linear(*arguments, **named):
    return native.native_linear(Int8LinearArguments(*arguments, **named), "multiply_add")


def integers(*shape, low=-128, high=128):
    return torch.randint(low, high, shape, dtype=torch.int8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_exact(instructions, shape):
    m, k, n = shape
    for low, high in ((-128, 128), (-128, -127), (127, 128)):
        a, b = integers(m, k, low=low, high=high), integers(n, k, low=low, high=high)
        assert torch.equal(product(a, b), (a.double() @ b.double().t()).int())


@pytest.mark.parametrize("rows", [2, 9])
def test_the_longest_sum_is_exact(instructions, rows):
    a, b = torch.full((rows, 131_071), -128, dtype=torch.int8), torch.full((3, 131_071), -128, dtype=torch.int8)
    b[1] = 127
    assert torch.equal(product(a, b), (a.double() @ b.double().t()).int())


def test_strided_operands_and_several_threads(instructions):
    a, b = integers(140, 300)[::2, 1::3], integers(100, 90).t()
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(product(a, b), (a.double() @ b.double().t()).int())
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", [4, 37])
def test_every_epilogue(instructions, activation, rows):
    """Scales per tensor, token, position and channel; residuals and results of every dtype; a bias or none."""
    shape, k, n = (2, rows, 50), 50, 70
    a, b = integers(*shape, low=-127), integers(n, k, low=-127)
    b_scale = torch.rand(n) * 0.02 + 0.001
    for a_shape, bias in (((1,), torch.randn(n).half()), ((rows, 1), torch.randn(n)), ((2, rows, 1), None)):
        a_scale = torch.rand(a_shape) * 0.02 + 0.001
        for residual in (None, torch.randn(2, rows, n), torch.randn(2, rows, n).bfloat16()):
            exact, error = linear(a, a_scale, b, b_scale, bias, activation, residual)
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                got = int8_linear(a, a_scale, b, b_scale, bias, activation, residual, out_dtype=dtype)
                assert got.dtype == dtype
                assert_float_close(got, exact, error)
            for out_shape in ((1,), (rows, 1), (2, rows, 1), (n,)):
                out_scale = torch.rand(out_shape) * 0.3 + 0.02
                got = int8_linear(a, a_scale, b, b_scale, bias, activation, residual, out_scale)
                assert_int8_close(got, exact, error, numpy64(out_scale))
                assert got.min() >= -127


def test_one_weight_scale_negative_channel_scales_and_a_zero_point(instructions):
    a, b, bias = integers(20, 64), integers(40, 64), torch.randn(40)
    scale, factors = torch.tensor([0.01]), torch.linspace(-0.3, 0.2, 40)
    for zero_point in (None, -100, 90):
        point = None if zero_point is None else torch.tensor([zero_point], dtype=torch.int32)
        y = (a.double() @ b.double().t()) * 1e-4 + bias
        expected = (y / factors).round().add(zero_point or 0).clamp(-127, 127)
        got = int8_linear(a, scale, b, scale, bias, out_scale=factors, out_zero_point=point)
        assert (got - expected).abs().max() <= 1
        assert (got != expected).double().mean() < 0.01


def test_float16_residuals_and_infinite_results(instructions):
    a, b, residual = integers(9, 32), integers(33, 32), torch.randn(9, 33).half()
    got = int8_linear(a, torch.ones(1), b, torch.ones(1), None, "none", residual)
    assert torch.equal(got, (a.double() @ b.double().t()).float() + residual)
    bias = torch.full((33,), float("inf"))
    assert int8_linear(a, torch.ones(1), b, torch.ones(1), bias, "gelu").isinf().all()
    assert int8_linear(a, torch.ones(1), b, torch.ones(1), bias, out_dtype=torch.bfloat16).isinf().all()
    bias[:] = float("nan")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert int8_linear(a, torch.ones(1), b, torch.ones(1), bias, "gelu_tanh", out_dtype=dtype).isnan().all()


@pytest.mark.parametrize(
    ("activation", "exact", "error"),
    [
        ("gelu", F.gelu, 4e-7),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), 4e-7),
        ("silu", F.silu, 2e-6),
    ],
)
def test_activations_are_as_exact_as_float32(instructions, activation, exact, error):
    x = torch.cat([torch.linspace(-12, 12, 30_000), torch.linspace(-1e-3, 1e-3, 100)])
    nothing = torch.zeros(x.numel(), 1, dtype=torch.int8)
    got = int8_linear(nothing[:1], torch.ones(1), nothing, torch.ones(1), x, activation)[0]
    expected = exact(x.double())
    assert (got - expected).abs().max() < error
    near_zero = x.abs() < 1
    assert ((got - expected).abs() <= 1e-5 * expected.abs() + 1e-12)[near_zero].all()


def test_nothing_beside_the_result_is_written(instructions, monkeypatch):
    """Tiles at the edges of the result, between guards."""
    for m, n in ((5, 3), (9, 17), (33, 33)):
        memory = torch.full((m * n + 128,), -1.0)
        result = memory[64:-64].view(m, n)
        monkeypatch.setattr(torch, "empty", lambda *_, result=result, **__: result)
        a, b = torch.ones(m, 40, dtype=torch.int8), torch.ones(n, 40, dtype=torch.int8)
        int8_linear(a, torch.ones(1), b, torch.ones(1))
        assert memory[64:-64].unique().tolist() == [40]
        assert memory[:64].unique().tolist() == memory[-64:].unique().tolist() == [-1]


@pytest.mark.parametrize("scale", ["b_scale", "out_scale"])
def test_scales_must_be_positive(instructions, scale):
    scales = {"a_scale": torch.ones(1), "b_scale": torch.ones(7), "out_scale": torch.ones(1)}
    scales[scale][-1] = -0.5
    with pytest.raises(QFrameworkError, match=rf"{scale} must be positive .*, got -0.5"):
        int8_linear(a=integers(3, 8), b=integers(7, 8), **scales)


def test_other_processors_have_none(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NEON")
    assert cpu._reason_against(cpu._PRODUCTS["multiply_add"]) == (
        "it is not available: the processor has neither AVX2 nor AVX-512: its capability is NEON"
    )
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bw": True})
    assert cpu._reason_against(cpu._PRODUCTS["amx"]) == (
        "it is not available: the processor has no amx_int8, or PyTorch may not use it"
    )


def choice_in_a_process(relative_time: float, **environment: str) -> cpu.CpuChoice:
    """What a new process without INT8 instructions chooses if that is the time of an exact product."""
    code = f"from qframework.kernels.linear import cpu; cpu._relative_time = lambda *_: {relative_time}"
    code += "; print(tuple(cpu.cpu_choice()))"
    variables = os.environ | {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"} | environment
    out = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    return cpu.CpuChoice(*ast.literal_eval(out.stdout.splitlines()[-1]))


needs_avx2 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="the processor has no AVX2"
)


@needs_avx2
@pytest.mark.parametrize(
    ("relative_time", "chosen", "rejected"),
    [(0.9, "multiply_add", ["amx", "vnni", "int_mm"]), (1.1, "float32", ["amx", "vnni", "int_mm", "multiply_add"])],
)
def test_it_is_chosen_without_vnni_where_it_is_faster(relative_time, chosen, rejected):
    """Not by the clock: on a processor with AVX-512 float products use it, and other work decides which is faster."""
    choice = choice_in_a_process(relative_time)
    assert choice.name == chosen
    assert list(choice.rejected) == rejected


@needs_avx2
def test_without_a_compiler_the_float_product_is_chosen(tmp_path):
    choice = choice_in_a_process(0.9, CXX="/no/such/compiler", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert choice.name == "float32"
    assert choice.rejected["multiply_add"].startswith("it is not available")


@needs_avx2
@pytest.mark.parametrize(
    "error",
    [ImportError("libgone.so"), AttributeError("gone"), subprocess.CalledProcessError(1, "g++"), OSError("full")],
)
def test_a_broken_inductor_leaves_the_float_product(monkeypatch, error):
    import torch._inductor.codecache as codecache

    def load(source):
        raise error

    native._library.cache_clear()
    monkeypatch.setattr(codecache.CppCodeCache, "load", load)
    reason = cpu._reason_against(cpu._PRODUCTS["multiply_add"])
    native._library.cache_clear()
    assert reason is not None
    assert reason.startswith("it is not available: ")


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_the_choice_is_the_same_while_a_graph_is_traced(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(cpu, "_relative_time", lambda *_: 0.5)
    chosen = cpu.cpu_choice.__wrapped__()
    with FakeTensorMode(), torch.device("meta"), torch.inference_mode():
        assert cpu.cpu_choice.__wrapped__() == chosen
