"""The product for processors without VNNI: exact for every shape and width, and chosen where oneDNN's is not."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest
import torch

from qframework.kernels.linear import cpu
from qframework.kernels.linear import multiply_add as room
from qframework.kernels.linear.multiply_add import multiply_add

CAPABILITY = torch.backends.cpu.get_cpu_capability()
WIDTHS = {"AVX2": ["AVX2"], "AVX512": ["AVX2", "AVX512"]}.get(CAPABILITY, [])
pytestmark = pytest.mark.skipif(not WIDTHS, reason=f"the processor's capability is {CAPABILITY}")
# Rows: few, one panel, more than one block. Columns: less than a panel, several. Inner: odd, around a step and a panel.
SHAPES = [
    (1, 1, 1), (1, 40, 33), (6, 17, 65), (7, 15, 16), (8, 16, 15), (9, 33, 32), (13, 511, 31), (16, 512, 64),
    (5, 513, 7), (21, 1025, 47), (769, 3, 17), (1543, 35, 5),
]  # fmt: skip


@pytest.fixture(params=WIDTHS)
def width(request, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_exact(width, shape):
    m, k, n = shape
    for low, high in ((-128, 128), (-128, -127), (127, 128)):
        a, b = torch.randint(low, high, (m, k), dtype=torch.int8), torch.randint(low, high, (n, k), dtype=torch.int8)
        assert torch.equal(multiply_add(a, b), (a.double() @ b.double().t()).int())


@pytest.mark.parametrize("rows", [2, 9])
def test_the_longest_sum_is_exact(width, rows):
    a, b = torch.full((rows, 131_071), -128, dtype=torch.int8), torch.full((3, 131_071), -128, dtype=torch.int8)
    b[1] = 127
    assert torch.equal(multiply_add(a, b), (a.double() @ b.double().t()).int())


def test_strided_operands_and_several_threads(width):
    a = torch.randint(-128, 128, (70, 300), dtype=torch.int8)[::2, 1::3]
    b = torch.randint(-128, 128, (100, 90), dtype=torch.int8).t()
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(multiply_add(a, b), (a.double() @ b.double().t()).int())
    finally:
        torch.set_num_threads(threads)


def test_nothing_beside_the_result_is_written(width):
    """Tiles at the edges of the result, between guards."""
    for m, n in ((5, 3), (9, 17), (11, 33)):
        a, b = torch.ones(m, 40, dtype=torch.int8), torch.ones(n, 40, dtype=torch.int8)
        memory = torch.full((m * n + 128,), -1, dtype=torch.int32)
        product = room._compiled(torch.backends.cpu.get_cpu_capability())
        product(a.data_ptr(), b.data_ptr(), memory[64:].data_ptr(), m, n, 40, 1)
        assert memory[64:-64].unique().tolist() == [40]
        assert memory[:64].unique().tolist() == memory[-64:].unique().tolist() == [-1]


def test_other_processors_have_none(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NEON")
    assert cpu._reason_against(multiply_add) == (
        "it is not available: the processor has neither AVX2 nor AVX-512: its capability is NEON"
    )


def choice_in_a_process(relative_time: float, **environment: str) -> cpu.CpuChoice:
    """What a new process without INT8 instructions chooses if that is the time of an exact product."""
    code = f"from qframework.kernels.linear import cpu; cpu._relative_time = lambda *_: {relative_time}"
    code += "; print(tuple(cpu.cpu_choice()))"
    variables = os.environ | {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"} | environment
    out = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    return cpu.CpuChoice(*ast.literal_eval(out.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("relative_time", "chosen", "rejected"),
    [(0.9, "multiply_add", ["int_mm"]), (1.1, "float32", ["int_mm", "multiply_add"])],
)
def test_it_is_chosen_without_vnni_where_it_is_faster(relative_time, chosen, rejected):
    """Not by the clock: on a processor with AVX-512 float products use it, and other work decides which is faster."""
    choice = choice_in_a_process(relative_time)
    assert choice.name == chosen
    assert list(choice.rejected) == rejected


def test_without_a_compiler_the_float_product_is_chosen(tmp_path):
    choice = choice_in_a_process(0.9, CXX="/no/such/compiler", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert choice.name == "float32"
    assert choice.rejected["multiply_add"].startswith("it is not available")


@pytest.mark.parametrize(
    "error",
    [ImportError("libgone.so"), AttributeError("gone"), subprocess.CalledProcessError(1, "g++"), OSError("full")],
)
def test_a_broken_inductor_leaves_the_float_product(monkeypatch, error):
    import torch._inductor.codecache as codecache

    def load(source):
        raise error

    room._compiled.cache_clear()
    monkeypatch.setattr(codecache.CppCodeCache, "load", load)
    reason = cpu._reason_against(multiply_add)
    room._compiled.cache_clear()
    assert reason is not None
    assert reason.startswith("it is not available: ")
