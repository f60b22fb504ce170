"""cpu.py: each CPU implementation of int8_linear is right, and the first that is exact and fast is chosen."""

from __future__ import annotations

import math
import re

import pytest
import torch
from oracle import assert_float_close, assert_int8_close, linear, numpy64
from test_int8_linear import make_case
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

from qframework.errors import QFrameworkError
from qframework.kernels import int8_linear
from qframework.kernels.linear import cpu as int8_linear_cpu
from qframework.kernels.runtime.activation import ACTIVATIONS

CPU = torch.device("cpu")


@pytest.fixture(params=["amx", "vnni", "int_mm", "multiply_add", "float32"])
def forced(request, monkeypatch):
    """Force one implementation."""
    product = int8_linear_cpu._PRODUCTS.get(request.param)
    rejected = (int8_linear_cpu._reason_against(product) if product is not None else None) or ""
    if "exact" in rejected or "available" in rejected:
        pytest.skip(f"{request.param}: {rejected}")
    force(monkeypatch, request.param)


def force(monkeypatch, implementation):
    for name in ("cpu_implementation", "_implementation_for_few_rows"):
        monkeypatch.setattr(int8_linear_cpu, name, lambda: implementation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("scale", ["per_token", "per_tensor"])
def test_every_implementation_is_right(forced, activation, scale):
    a, a_scale, b, b_scale, bias, residual = make_case(CPU, (2, 7, 123), 65, scale, residual=True)
    for added in (residual, None):
        exact, error = linear(a, a_scale, b, b_scale, bias, activation, added)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            got = int8_linear(a, a_scale, b, b_scale, bias, activation, added, out_dtype=dtype)
            assert got.dtype == dtype
            assert_float_close(got, exact, error)
        out_scale = torch.tensor([0.5])
        got = int8_linear(a, a_scale, b, b_scale, bias, activation, added, out_scale)
        assert_int8_close(got, exact, error, numpy64(out_scale))
        channels = torch.linspace(0.1, 0.9, 65)
        got = int8_linear(a, a_scale, b, b_scale, bias, activation, added, channels)
        assert_int8_close(got, exact, error, numpy64(channels))
        assert got.min() >= -127


def saturating(a, b):
    """The product of a processor without VNNI: pairs of products saturate at INT16."""
    pairs = [(a.int() * row).unflatten(1, (-1, 2)).sum(-1) for row in b.int()]
    return torch.stack([pair.clamp(-32768, 32767 - 1000).sum(-1) for pair in pairs], 1)


def missing(a, b):
    raise RuntimeError("no such kernel")


def slow(a, b):
    """An exact product without vector instructions."""
    with torch.backends.mkldnn.flags(enabled=False):
        return torch._int_mm(a, b.t())


@pytest.mark.parametrize("value", [127, -128])
def test_the_longest_sum_is_exact(forced, value):
    a, b = torch.full((2, 131_071), value, dtype=torch.int8), torch.full((3, 131_071), value, dtype=torch.int8)
    b[1] = -127
    got = int8_linear(a, torch.ones(1), b, torch.ones(1))
    assert torch.equal(got, (a.double() @ b.double().t()).float())


@pytest.fixture
def choose(monkeypatch):
    """The choice between another product, in place of PyTorch's, and the float one."""

    def choose(int_mm):
        monkeypatch.setattr(int8_linear_cpu, "_PRODUCTS", {"int_mm": int_mm})
        return int8_linear_cpu.cpu_choice.__wrapped__()

    return choose


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_a_slow_product_is_not_chosen(choose):
    choice = choose(slow)
    assert choice.name == "float32"
    assert re.fullmatch(r"it takes \d+\.\d times as long as the float product", choice.rejected["int_mm"])


def test_a_fast_product_is_chosen(choose):
    products = []

    def fast(a, b):
        """Computes at its first call only, which is checked and not timed."""
        if not products:
            products.append(int8_linear_cpu._float_product(a, b))
        return products[0]

    assert choose(fast) == ("int_mm", {})


@pytest.mark.parametrize(
    ("product", "reason"),
    [(saturating, "it is not exact on this processor"), (missing, "it is not available: no such kernel")],
)
def test_an_inexact_and_a_missing_product_are_not_chosen(choose, product, reason):
    assert choose(product) == ("float32", {"int_mm": reason})


def test_the_choice_does_not_depend_on_the_default_device(monkeypatch):
    time = int8_linear_cpu._relative_time
    # Timed, but not decided by the clock: without VNNI two products may be about as fast.
    monkeypatch.setattr(int8_linear_cpu, "_relative_time", lambda *operands: time(*operands) * 0 + 0.5)
    chosen = int8_linear_cpu.cpu_choice.__wrapped__()
    with torch.device("meta"):
        assert int8_linear_cpu.cpu_choice.__wrapped__() == chosen


def whole(shape, values):
    if isinstance(values, int):
        return torch.full(shape, values, dtype=torch.int8)
    return torch.randint(*values, shape, dtype=torch.int8)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (65, 1023, 64), (64, 1024, 65), (3, 1025, 2), (5, 4099, 33)])
def test_the_float_product_is_exact_at_any_matmul_precision(precision, m, k, n):
    """Largest sums, sums just below 2**24, above which float32 has no odd numbers, and random ones."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        for values in (-128, 127, (120, 128), (-128, 128)):
            a, b = whole((m, k), values), whole((n, k), values)
            assert torch.equal(int8_linear_cpu._float_product(a, b).double(), a.double() @ b.double().t())
    finally:
        torch.set_float32_matmul_precision(before)


def test_scales_are_checked_at_every_call():
    a, a_scale, b, b_scale, bias, _ = make_case(CPU, (4, 32), 16, "per_tensor")
    int8_linear(a, a_scale, b, b_scale, bias)
    b_scale[3] = 0
    with pytest.raises(QFrameworkError, match=r"b_scale must be positive .*, got 0.0"):
        int8_linear(a, a_scale, b, b_scale, bias)


@pytest.mark.parametrize(
    "write", [lambda b: b.copy_(b.flip(0)), lambda b: b.data.copy_(b.flip(0)), lambda b: b.numpy().fill(3)]
)
def test_no_copy_of_a_weight_is_cached(forced, write):
    a, a_scale, b, b_scale, bias, _ = make_case(CPU, (4, 32), 16, "per_tensor")
    before = int8_linear(a, a_scale, b, b_scale, bias)
    write(b)
    after = int8_linear(a, a_scale, b, b_scale, bias)
    assert not torch.equal(before, after)
    assert_float_close(after, *linear(a, a_scale, b, b_scale, bias))


@pytest.mark.parametrize("shape", [(5, 32), (2, 3, 32), (0, 32), (2, 0)])
def test_product_operator(forced, shape):
    a, b = whole((math.prod(shape[:-1]), shape[-1]), (-128, 128)), whole((7, shape[-1]), (-128, 128))
    assert torch.equal(torch.ops.qframework.int8_product(a, b), a.int() @ b.int().t())
    torch.library.opcheck(torch.ops.qframework.int8_product.default, (a, b))


def test_a_single_column_is_computed_and_not_left_as_it_was() -> None:
    """Repeated, since memory that nobody wrote may hold the right numbers; ``b.t()`` has the strides (1, 1)."""
    for rows, columns in ((1, 2), (3, 7), (16, 64)):
        for _ in range(20):
            a, b = (torch.randint(-127, 128, (n, 1), dtype=torch.int8) for n in (rows, columns))
            junk = torch.full((rows, columns), 12345, dtype=torch.int32)
            del junk
            assert torch.equal(torch.ops.qframework.int8_product(a, b), a.int() @ b.int().t())


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("implementation", "rows", "whole_layer"),
    [("multiply_add", 300, True), ("multiply_add", 200, False), ("int_mm", 300, False), ("float32", 300, False)],
)
def test_large_layers_in_cpp_stay_whole_when_compiled(monkeypatch, implementation, rows, whole_layer):
    a, a_scale, b, b_scale, bias, _ = make_case(CPU, (rows, 40), 256, "per_token")
    product = int8_linear_cpu._PRODUCTS.get(implementation)
    rejected = (int8_linear_cpu._reason_against(product) if product is not None else None) or ""
    if "exact" in rejected or "available" in rejected:
        pytest.skip(f"{implementation}: {rejected}")
    force(monkeypatch, implementation)

    def run(a):
        return int8_linear(a, a_scale, b, b_scale, bias, "gelu")

    with inductor_config.patch(force_disable_caches=True):  # their keys do not know the patch above
        y, (code,) = run_and_get_code(torch.compile(run, backend="qframework", fullgraph=True), a)
    assert ("qframework.int8_linear.default(" in code) is whole_layer
    assert ("qframework.int8_product.default(" in code) is not whole_layer
    assert_float_close(y, *linear(a, a_scale, b, b_scale, bias, "gelu"))


def test_few_rows_are_left_to_onednn_where_it_is_exact(monkeypatch):
    """C++ packs the weight, which takes longer than the product of few rows."""
    few = int8_linear_cpu._implementation_for_few_rows.__wrapped__
    used = []
    monkeypatch.setattr(int8_linear_cpu, "_relative_time", lambda *_: 0.2)
    for chosen, exact, expected in (
        ("vnni", True, "int_mm"), ("amx", True, "int_mm"), ("amx", False, "amx"), ("multiply_add", True, "multiply_add")
    ):  # fmt: skip
        product = int8_linear_cpu._float_product if exact else saturating
        monkeypatch.setattr(int8_linear_cpu, "_int_mm", product)
        monkeypatch.setattr(int8_linear_cpu, "cpu_implementation", lambda chosen=chosen: chosen)
        assert few() == expected
        monkeypatch.setattr(int8_linear_cpu, "_implementation_for_few_rows", few)
        used.append((int8_linear_cpu.implementation_for(63), int8_linear_cpu.implementation_for(64)))
    assert used == [("int_mm", "vnni"), ("int_mm", "amx"), ("amx", "amx"), ("multiply_add", "multiply_add")]
