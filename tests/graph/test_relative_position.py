"""Decomposed relative positions, as in SAM: the operator gets two factors, and no N x N bias is computed."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from attention_models import VARIANT, Capture, compiled, error_bound, exported, randomize
from torch import nn

from qframework import use_sage_attention
from qframework.numerics import sqnr_db

GRID, HEADS, DIM, WINDOW = 14, 2, 16, 5
TOKENS = GRID * GRID
SIZES = {"embed_dim": HEADS * DIM, "depth": 2, "num_heads": HEADS, "num_classes": 0}


def timm_sam(fused=True):
    timm = pytest.importorskip("timm")
    timm.layers.set_fused_attn(fused)
    try:
        model = timm.create_model(
            "samvit_base_patch16",
            img_size=16 * GRID,
            window_size=WINDOW,
            global_attn_indexes=(1,),
            neck_chans=8,
            **SIZES,
        )
    finally:
        timm.layers.set_fused_attn(True)
    return randomize(model), 16 * GRID


def transformers_sam(implementation="sdpa"):
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    from transformers import SamVisionConfig, SamVisionModel

    config = SamVisionConfig(
        hidden_size=HEADS * DIM, num_hidden_layers=2, num_attention_heads=HEADS, mlp_dim=64, output_channels=8,
        image_size=16 * GRID, patch_size=16, window_size=WINDOW, global_attn_indexes=[1],
        attn_implementation=implementation,
    )  # fmt: skip
    model = randomize(SamVisionModel(config))

    class LastHiddenState(nn.Module):
        def __init__(self):
            super().__init__()
            self.sam = model

        def forward(self, x):
            return self.sam(x).last_hidden_state

    return LastHiddenState().eval(), 16 * GRID


BUILDERS = {
    "timm sdpa": timm_sam,
    "timm spelled out": lambda: timm_sam(False),
    "transformers sdpa": transformers_sam,
    "transformers eager": lambda: transformers_sam("eager"),
}


def largest(gm, image):
    """The size of the largest recorded tensor other than the image and its patches."""
    fakes = [
        node.meta.get("example_value", node.meta.get("val")) for node in gm.graph.nodes if node.op != "placeholder"
    ]
    return max(fake.numel() for fake in fakes if isinstance(fake, torch.Tensor) and fake.numel() != image.numel())


@pytest.mark.parametrize("dialect", ["functional", "aten"])
@pytest.mark.parametrize("name", BUILDERS)
def test_windows_and_global_layers(name, dialect):
    model, size = BUILDERS[name]()
    x = torch.randn(2, 3, size, size)
    with torch.no_grad():
        plain = model(x)
    y, capture = compiled(exported(model, x) if dialect == "aten" else model, x)
    assert len(capture.calls) == 2
    for call, side in zip(capture.calls, (WINDOW, GRID), strict=True):
        assert call["attn_mask"] is None
        for factor in ("rel_h", "rel_w"):
            fake = call[factor].meta.get("example_value", call[factor].meta.get("val"))
            assert tuple(fake.shape[-2:]) == (side * side, side)
    assert all(report.lowered for report in capture.attention), capture.attention
    assert sqnr_db(plain, y) > 30


@pytest.mark.parametrize("name", BUILDERS)
def test_no_n_by_n_tensor_is_left(name):
    model, size = BUILDERS[name]()
    x = torch.randn(1, 3, size, size)
    before = Capture("off")
    _, after = compiled(model, x)
    with torch.no_grad():
        torch._dynamo.reset()
        torch.compile(model, backend=before, fullgraph=True)(x)
    assert largest(before.graphs[0], x) == HEADS * TOKENS * TOKENS
    assert largest(after.graphs[0], x) < HEADS * TOKENS * TOKENS / 2
    assert not [shape for shape in shapes(after.graphs[0]) if shape[-2:] == (TOKENS, TOKENS)]


def shapes(gm):
    fakes = [node.meta.get("example_value", node.meta.get("val")) for node in gm.graph.nodes]
    return [tuple(fake.shape) for fake in fakes if isinstance(fake, torch.Tensor)]


@pytest.mark.parametrize("name", BUILDERS)
def test_one_compilation_serves_every_batch_size(name):
    model, size = BUILDERS[name]()
    capture = Capture()
    run = torch.compile(model, backend=capture, fullgraph=True)
    with torch.no_grad():
        for batch in (1, 2, 3, 4):
            x = torch.randn(batch, 3, size, size)
            assert sqnr_db(model(x), run(x)) > 30
    assert len(capture.graphs) <= 3  # a batch of one, the second size, any size
    assert all(call["rel_h"] is not None for call in capture.calls)


def test_the_factors_matter():
    """Without relative positions the model's output is far off."""
    model, size = timm_sam()
    x = torch.randn(1, 3, size, size)
    with torch.no_grad():
        plain = model(x)
        for block in model.blocks:
            block.attn.use_rel_pos = False
        assert sqnr_db(plain, model(x)) < 20


def test_same_as_the_bias_as_a_mask():
    model, size = timm_sam()
    x = torch.randn(1, 3, size, size)
    y, _ = compiled(model, x)
    with torch.no_grad(), use_sage_attention(VARIANT):
        expected = model(x)  # SDPA's attn_mask, N x N
    with torch.no_grad():
        assert sqnr_db(expected, y) > sqnr_db(model(x), y) + 10


def operands(batch=2, heads=2, height=3, width=4, dim=16):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, batch * heads, height * width, dim, generator=generator)
    rel_h = torch.randn(batch * heads, height, width, height, generator=generator)
    rel_w = torch.randn(batch * heads, height, width, width, generator=generator)
    return q, k, v, rel_h, rel_w


def as_bias(rel_h, rel_w):
    return (rel_h[..., :, None] + rel_w[..., None, :]).reshape(-1, 12, 12)


def reference(q, k, v, rel_h, rel_w):
    return (q @ k.transpose(-2, -1) * 0.25 + as_bias(rel_h, rel_w)).softmax(-1) @ v


def added_one_after_the_other(q, k, v, rel_h, rel_w):
    """The form of the first ViTDet and SAM code: both factors are added to logits in the shape of the grid."""
    logits = (q * 0.25) @ k.transpose(-2, -1)
    logits = logits.view(-1, 3, 4, 3, 4) + rel_h[..., :, None] + rel_w[..., None, :]
    return logits.view(-1, 12, 12).softmax(-1) @ v


def width_first(q, k, v, rel_h, rel_w):
    bias = (rel_w[..., None, :] + rel_h[..., :, None]).reshape(-1, 12, 12)
    return (q @ k.transpose(-2, -1) * 0.25 + bias).softmax(-1) @ v


def before_the_scale(q, k, v, rel_h, rel_w):
    return ((q @ k.transpose(-2, -1) + as_bias(rel_h * 4, rel_w * 4)) * 0.25).softmax(-1) @ v


def heads_apart(q, k, v, rel_h, rel_w):
    q, k, v = (x.view(-1, 2, 12, 16) for x in (q, k, v))
    bias = as_bias(rel_h, rel_w).view(-1, 2, 12, 12)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, bias).flatten(0, 1)


def written_into_the_logits(q, k, v, rel_h, rel_w):
    """The form of MViTv2, whose slices leave out a class token if there is one."""
    logits = (q * 0.25) @ k.transpose(-2, -1)
    logits[:, 0:, 0:] = (logits[:, 0:, 0:].view(-1, 3, 4, 3, 4) + rel_h[..., :, None] + rel_w[..., None, :]).view(
        -1, 12, 12
    )
    return logits.softmax(-1) @ v


FORMS = [added_one_after_the_other, width_first, before_the_scale, heads_apart, written_into_the_logits]


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_become_two_factors(form):
    inputs = operands()
    out, capture = compiled(form, *inputs)
    (call,) = capture.calls
    assert call["attn_mask"] is None
    assert call["rel_h"] is not None
    assert (12, 12) not in {shape[-2:] for shape in shapes(capture.graphs[0])}
    plain = reference(*inputs)
    assert (out - plain).abs().max() < error_bound(*inputs[:3], 0.25)
    no_positions = torch.nn.functional.scaled_dot_product_attention(*inputs[:3])
    assert (no_positions - plain).abs().max() > error_bound(*inputs[:3], 0.25)


def test_a_mask_beside_relative_positions_stays_a_mask():
    q, k, v, rel_h, rel_w = operands()
    mask = torch.randn(12, 12)

    def attend(q, k, v, rel_h, rel_w):
        return (q @ k.transpose(-2, -1) * 0.25 + as_bias(rel_h, rel_w) + mask).softmax(-1) @ v

    out, capture = compiled(attend, q, k, v, rel_h, rel_w)
    (call,) = capture.calls
    assert call["attn_mask"].meta["example_value"].shape == (12, 12)
    assert call["rel_h"] is not None
    assert (out - attend(q, k, v, rel_h, rel_w)).abs().max() < error_bound(q, k, v, 0.25)


def test_a_bias_with_another_reader_is_still_computed_for_it():
    q, k, v, rel_h, rel_w = operands()

    def attend(q, k, v, rel_h, rel_w):
        bias = as_bias(rel_h, rel_w)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, bias), bias.sum()

    (out, total), capture = compiled(attend, q, k, v, rel_h, rel_w)
    assert capture.calls[0]["rel_h"] is not None
    assert (out - reference(q, k, v, rel_h, rel_w)).abs().max() < error_bound(q, k, v, 0.25)
    torch.testing.assert_close(total, as_bias(rel_h, rel_w).sum())


def test_factors_of_other_shapes_stay_a_mask():
    """A sum of other factors is added as a bias."""
    q, k, v, rel_h, rel_w = operands()

    def attend(q, k, v, rel_h, rel_w):
        bias = (rel_h[..., :, None] + rel_w[..., None, :] * rel_h[..., :, None]).reshape(-1, 12, 12)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, bias)

    out, capture = compiled(attend, q, k, v, rel_h, rel_w)
    (call,) = capture.calls
    assert call["rel_h"] is None
    assert call["attn_mask"] is not None
    assert (out - attend(q, k, v, rel_h, rel_w)).abs().max() < error_bound(q, k, v, 0.25)
