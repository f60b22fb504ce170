"""Inductor's kernels wait before anything else where they are launched early, which CUDA graphs ask for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._inductor.codegen.triton import TritonKernel

from qframework.compat import early_launch
from qframework.compat.launchers import Launchers

WAIT, LAUNCH = TritonKernel.GDC_WAIT, TritonKernel.GDC_LAUNCH
DEFERRED = object()  # a line that Inductor writes later


@pytest.mark.parametrize(
    "lines",
    [
        [f"    {WAIT}", "    x = tl.load(x_ptr)", f"    {LAUNCH}", DEFERRED],
        ["    x = tl.load(x_ptr)", f"    {WAIT}", f"    {LAUNCH}", DEFERRED],  # reads what an earlier kernel wrote
        ["    x = tl.load(x_ptr)", DEFERRED],  # reads nothing of the kernel before it
    ],
)
def test_a_kernel_waits_once_and_first(lines):
    code = SimpleNamespace(_lines=list(lines))
    kernel = SimpleNamespace(GDC_WAIT=WAIT, GDC_LAUNCH=LAUNCH, _enable_pdl_codegen=lambda: True)
    early_launch._wait_first(kernel, code)
    assert code._lines == [WAIT, LAUNCH, "    x = tl.load(x_ptr)", *[line for line in lines if line is DEFERRED]]


def test_other_kernels_stay_as_they_are():
    code = SimpleNamespace(_lines=["    x = tl.load(x_ptr)", DEFERRED])
    kernel = SimpleNamespace(GDC_WAIT=WAIT, GDC_LAUNCH=LAUNCH, _enable_pdl_codegen=lambda: False)
    early_launch._wait_first(kernel, code)
    assert code._lines == ["    x = tl.load(x_ptr)", DEFERRED]


def test_only_kernels_generated_inside_wait_first():
    original = TritonKernel._filter_pdl

    def generate():
        with early_launch.waiting_first():
            assert TritonKernel._filter_pdl is not original
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        generate()
    assert TritonKernel._filter_pdl is original


@pytest.mark.parametrize("early", [True, False])
def test_launchers_of_kernels_that_are_launched_early_are_compiled_ahead(early, monkeypatch):
    signatures = []
    monkeypatch.setattr(Launchers, "compile", lambda self, signature: signatures.append(signature))
    code = SimpleNamespace(_lines=[f"    {WAIT}"])
    signature = {"in_ptr0": "*fp16", "xnumel": "i32", "XBLOCK": "constexpr"}
    meta = {"signature": signature}
    kernel = SimpleNamespace(GDC_WAIT=WAIT, GDC_LAUNCH=LAUNCH, _enable_pdl_codegen=lambda: early, triton_meta=meta)
    with early_launch.waiting_first():
        TritonKernel._filter_pdl(kernel, code)
    assert code._lines == ([WAIT, LAUNCH] if early else [])
    assert signatures == ([signature] if early else [])


@pytest.mark.parametrize(
    ("options", "early"),
    [
        ({"triton.cudagraphs": True}, True),
        ({"triton.cudagraphs": True, "triton.enable_pdl": False}, False),
        ({"triton.cudagraphs": False}, None),
        ({}, None),
    ],
)
def test_cuda_graphs_launch_early(monkeypatch, options, early):
    from torch._inductor import compile_fx

    seen = {}
    monkeypatch.setattr(compile_fx, "compile_fx", lambda gm, inputs, **named: seen.update(named) or gm.forward)
    torch._dynamo.reset()
    model = torch.nn.Linear(8, 8).eval()
    with torch.no_grad():
        torch.compile(model, backend="qframework", options={"linear": "int8_dynamic", **options})(torch.randn(2, 8))
    assert seen["config_patches"].get("triton.enable_pdl") is early


def test_without_the_name_kernels_are_launched_in_order(monkeypatch):
    monkeypatch.delattr(TritonKernel, "_filter_pdl")
    assert early_launch.early_launch({"triton.cudagraphs": True}) == {}
    with early_launch.waiting_first():
        assert not hasattr(TritonKernel, "_filter_pdl")


@pytest.mark.gpu
def test_generated_kernels_wait_before_they_read():
    """All of a model with a kernel that reads nothing, under CUDA graphs; results are those without early launches."""
    from torch._inductor.utils import run_and_get_code

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = torch.nn.LayerNorm(256), torch.nn.Linear(256, 256)

        def forward(self, x):
            ones = torch.arange(256, device=x.device, dtype=x.dtype).cumsum(0).softmax(0)
            for _ in range(4):
                x = x + self.linear(self.norm(x)) * ones
            return x

    torch._dynamo.reset()
    model, x = Model().eval().half().cuda(), torch.randn(64, 256, device="cuda", dtype=torch.half)
    options = {"linear": "int8_dynamic", "freeze_weights": True, "triton.cudagraphs": True}
    with torch.no_grad():
        early, codes = run_and_get_code(torch.compile(model, backend="qframework", options=options), x)
        early = early.clone()
        torch._dynamo.reset()
        in_order = torch.compile(model, backend="qframework", options={**options, "triton.enable_pdl": False})
        assert torch.equal(early, in_order(x))
    bodies = [part for code in codes for part in code.split("def triton_")[1:]]
    assert bodies
    for body in bodies:
        lines = body.split("):", 1)[1]
        assert lines.index("gdc_wait()") < min(lines.index(each) for each in ("tl.load", "tl.store") if each in lines)
        assert lines.count("gdc_wait()") == lines.count("gdc_launch_dependents()") == 1
