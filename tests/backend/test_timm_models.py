"""The whole backend on timm's ViT, DeiT, BEiT, Swin, EVA and SAM: no graph break, every linear, any batch size."""

from __future__ import annotations

import pytest
import torch
from lowered_models import converted, count, lowered

from qframework import numerics
from qframework.backend.compile import lower
from qframework.backend.options import BackendOptions
from qframework.backend.report import Report
from qframework.quantizer import static_int8

timm = pytest.importorskip("timm")

SWIN = {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2), "num_classes": 5}
SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
MODELS = {
    "vit_tiny_patch16_224": {"img_size": 32, **SMALL},
    "vit_base_patch16_siglip_224": {"img_size": 32, **SMALL},
    "vit_small_patch14_reg4_dinov2": {"img_size": 28, **SMALL},
    "deit_tiny_distilled_patch16_224": {"img_size": 32, **SMALL},
    "deit3_small_patch16_224": {"img_size": 32, **SMALL},
    "beit_base_patch16_224": {"img_size": 32, **SMALL},
    "beitv2_base_patch16_224": {"img_size": 32, **SMALL},
    "swin_tiny_patch4_window7_224": {"img_size": 56, **SWIN},
    "swinv2_tiny_window8_256": {"img_size": 64, **SWIN},
    "eva02_tiny_patch14_224": {"img_size": 28, **SMALL},
    "eva02_base_patch14_224": {"img_size": 28, **SMALL},
    "eva_giant_patch14_224": {"img_size": 28, **SMALL},
    "samvit_base_patch16": {"img_size": 64, "global_attn_indexes": (1,), "window_size": 3, **SMALL},
}


def build(name):
    torch.manual_seed(0)
    kwargs = MODELS[name]
    model = timm.create_model(name, **kwargs).eval()
    return model, torch.randn(2, 3, kwargs["img_size"], kwargs["img_size"])


def linears(model):
    return sum(isinstance(module, torch.nn.Linear) for module in model.modules())


@pytest.mark.parametrize("name", MODELS)
def test_float_model_compiles_whole(name, fresh_dynamo):
    model, x = build(name)
    reports, graphs = [], []

    def backend(gm, example_inputs):
        found = lower(gm, example_inputs, BackendOptions(linear="int8_dynamic"))
        reports.append(found)
        graphs.append(gm)
        return gm.forward

    with torch.no_grad():
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        assert numerics.sqnr_db(model(x), compiled(x)) > 15
        for batch in (3, 5, 6):
            compiled(x[:1].repeat(batch, 1, 1, 1))
    assert len(graphs) <= 2, "one compilation for the first batch size and one for all others"
    report = Report(reports[-1])
    assert report.lowered == report.total >= linears(model), [r for r in report.of("linear").layers if not r.lowered]


@pytest.mark.parametrize("name", MODELS)
def test_converted_model_is_lowered_whole(name):
    model, x = build(name)
    gm = converted(model, x, static_int8())
    with torch.no_grad():
        reference = gm(x)
        gm, reports = lowered(gm)
        assert numerics.sqnr_db(reference, gm(x)) > 25
        assert numerics.sqnr_db(model(x), gm(x)) > 10
    reports = Report(reports).of("linear").layers
    assert all(report.lowered for report in reports), [r for r in reports if not r.lowered]
    assert count(gm, torch.ops.aten.linear.default) == 0
    assert len({report.name for report in reports}) == len(reports), "every layer has a name of its own"
