"""Attention of whole models: timm's fused and unfused, transformers' sdpa and eager, in both dialects."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from attention_models import SAGE, VARIANT, Capture, compiled, exported, randomize
from lowered_models import converted
from test_timm_models import MODELS

from qframework import use_sage_attention
from qframework.backend import passes
from qframework.numerics import sqnr_db
from qframework.quantizer import static_int8

timm = pytest.importorskip("timm")

FAMILIES = [
    "vit_tiny_patch16_224",
    "beit_base_patch16_224",
    "eva02_base_patch14_224",
    "swin_tiny_patch4_window7_224",
    "swinv2_tiny_window8_256",
    "samvit_base_patch16",
]
SPELLED_OUT = {"swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"}  # always


@pytest.fixture(params=[True, False], ids=["sdpa", "spelled out"])
def fused(request):
    from timm.layers import set_fused_attn

    set_fused_attn(request.param)
    yield request.param
    set_fused_attn(True)


def build(name):
    kwargs = MODELS[name]
    torch.manual_seed(0)
    model = randomize(timm.create_model(name, **kwargs))
    return model, torch.randn(2, 3, kwargs["img_size"], kwargs["img_size"])


@pytest.mark.sample(1 / 2)
@pytest.mark.parametrize("dialect", ["functional", "aten"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_attention_becomes_one_call(name, dialect, fused):
    model, x = build(name)
    capture = Capture()
    with torch.no_grad():
        run = torch.compile(exported(model, x) if dialect == "aten" else model, backend=capture, fullgraph=True)
        assert sqnr_db(model(x), run(x)) > 30
        for batch in (3, 5):
            other = torch.randn(batch, *x.shape[1:])
            assert sqnr_db(model(other), run(other)) > 30
    blocks = [n for n, m in model.named_modules() if n.endswith("attn") and n]
    assert [report.name for report in capture.attention] == blocks
    assert all(report.lowered for report in capture.attention), capture.attention
    assert len(capture.calls) == len(blocks)
    assert "softmax" not in capture.names()
    assert "scaled_dot_product" not in capture.names()
    assert len(capture.graphs) <= 2


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - SPELLED_OUT))
def test_same_as_the_drop_in(name, monkeypatch):
    """The results agree except for rounding ties, far below the rounding error itself."""
    kept = [each for each in passes.LOWERING if each.__name__ != "expand_patch_embedding"]
    monkeypatch.setattr(passes, "LOWERING", kept)  # other sums before it, so other ties
    model, x = build(name)
    y, _ = compiled(model, x)
    with torch.no_grad(), use_sage_attention(VARIANT):
        expected = model(x)
    with torch.no_grad():
        assert sqnr_db(expected, y) > sqnr_db(model(x), y) + 10


def without_biases(gm):
    for node in gm.graph.nodes:
        if node.target is SAGE:
            node.args = (*node.args[:3], None, *node.args[4:10], None, None)


def without_scale(gm):
    for node in gm.graph.nodes:
        if node.target is SAGE:
            node.args = (*node.args[:5], 1e-6, *node.args[6:])


@pytest.mark.parametrize(
    ("name", "edit"),
    [(name, without_scale) for name in FAMILIES]
    + [(name, without_biases) for name in FAMILIES if "vit_tiny" not in name and "eva" not in name],
)
def test_the_comparison_would_see_a_wrong_operand(name, edit):
    model, x = build(name)
    with torch.no_grad():
        y = torch.compile(model, backend=Capture(edit=edit), fullgraph=True)(x)
        assert sqnr_db(model(x), y) < 25


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_a_quantized_model_with_float_attention(name):
    model, x = build(name)
    gm = converted(model, x, static_int8())
    y, capture = compiled(gm, x)
    assert capture.attention
    assert all(report.lowered for report in capture.attention)
    assert "qframework.int8_linear.default" in capture.names()
    with torch.no_grad():
        assert sqnr_db(gm(x), y) > 15


# transformers ---------------------------------------------------------------------------------------------------------

transformers_missing = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
PADDED = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])


def transformers_model(family, implementation):
    import transformers

    torch.manual_seed(0)
    ids = torch.randint(0, 50, (2, 9))
    text = {"input_ids": ids, "attention_mask": PADDED}
    image = {"pixel_values": torch.randn(2, 3, 32, 32)}
    families = {
        "ViT": ({"image_size": 32, "patch_size": 8}, image),
        "Bert": ({"vocab_size": 50}, text),
        "Llama": ({"vocab_size": 50, "num_key_value_heads": 1}, {**text, "use_cache": False}),
        "CLIPVision": ({"image_size": 32, "patch_size": 8}, image),
    }
    extra, inputs = families[family]
    config = getattr(transformers, f"{family}Config")(**SIZES, **extra, attn_implementation=implementation)
    return randomize(getattr(transformers, f"{family}Model")(config)), inputs


@transformers_missing
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["ViT", "Bert", "Llama", "CLIPVision"])
def test_transformers(family, implementation):
    model, inputs = transformers_model(family, implementation)
    capture = Capture()
    with torch.no_grad():
        y = torch.compile(model, backend=capture)(**inputs).last_hidden_state
        plain = model(**inputs).last_hidden_state
    if "attention_mask" in inputs:  # what a padded position computes is nobody's
        y, plain = y[PADDED.bool()], plain[PADDED.bool()]
    assert len(capture.graphs) == 1
    assert len(capture.calls) == 2
    assert all(report.lowered for report in capture.attention), capture.attention
    assert "softmax" not in capture.names()
    assert sqnr_db(plain, y) > 25
