"""Attention lowering on a GPU: what "auto" does, CUDA graphs, and the memory saved on SAM's bias."""

from __future__ import annotations

import pytest
import torch
from attention_models import Attention, randomize
from test_timm_models import MODELS

import qframework
from qframework.kernels.attention.auto import choose_variant
from qframework.numerics import sqnr_db

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo")]


def build(name, dtype):
    timm = pytest.importorskip("timm")
    kwargs = MODELS[name] | {"num_classes": 0}  # features: a few logits are too few numbers to compare errors by
    torch.manual_seed(0)
    model = randomize(timm.create_model(name, **kwargs)).cuda()
    x = torch.randn(8, 3, kwargs["img_size"], kwargs["img_size"], device="cuda")
    with torch.no_grad():
        return model(x), model.to(dtype), x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_as_accurate_as_on_the_cpu(name, dtype):
    """As far from float32 as the same variant on the CPU: at worst two independent roundings are 3 dB apart."""
    exact, model, x = build(name, dtype)
    run = torch.compile(model, backend="qframework", fullgraph=True, options={"attention": "sage"})
    report = qframework.explain(run, x)
    assert report.attention_lowered == report.attention_total > 0, str(report)
    with torch.no_grad():
        on_gpu = run(x).float()
        heads = torch.empty(1, 3, 197, 32, device=x.device, dtype=dtype)
        variant = choose_variant(heads, heads, heads, 197, plain=True)
        torch._dynamo.reset()
        on_cpu = torch.compile(model.cpu(), backend="qframework", options={"attention": variant})(x.cpu())
        assert sqnr_db(exact, on_gpu) > sqnr_db(exact.cpu(), on_cpu.float()) - 3


def test_auto_is_the_default():
    """It leaves attention to PyTorch where that is faster."""
    _, model, x = build("vit_tiny_patch16_224", torch.float16)
    report = qframework.explain(torch.compile(model, backend="qframework", fullgraph=True), x)
    exact = torch.cuda.get_device_capability() == (9, 0)
    assert report.attention_total > 0
    assert report.attention_lowered == (0 if exact else report.attention_total), str(report)


def test_training_stays_exact_by_default():
    model, x = Attention().cuda(), torch.randn(3, 17, 32, device="cuda")
    run = torch.compile(model, backend="qframework")
    torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    run(x).sum().backward()
    assert model.bias.grad is not None


def test_cuda_graphs_follow_their_inputs():
    model = Attention(dim=128, heads=4, tokens=65).cuda().half().eval()
    run = torch.compile(model, backend="qframework", mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(2, 65, 128, device="cuda", dtype=torch.float16)
            assert sqnr_db(model(x), run(x).clone()) > 25


def test_sam_allocates_no_n_by_n_bias():
    """One head of 4096 x 4096 in float16 is 32 MiB; all 12 of a global layer are 384 MiB."""
    timm = pytest.importorskip("timm")
    config = {"depth": 1, "window_size": 14, "global_attn_indexes": (0,), "embed_dim": 768, "num_heads": 12}
    model = timm.create_model("samvit_base_patch16", img_size=1024, **config).cuda().half().eval()
    x = torch.randn(1, 3, 1024, 1024, device="cuda", dtype=torch.float16)
    run = torch.compile(model, backend="qframework", fullgraph=True)
    with torch.no_grad():
        y = run(x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(x)
        peak = torch.cuda.max_memory_allocated() - before
        assert peak < 12 * 4096 * 4096 * 2
        assert sqnr_db(model(x), y) > 25
