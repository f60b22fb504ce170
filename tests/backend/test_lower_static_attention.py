"""Static attention in INT8 from qkv through attention to proj (lower_static_attention.py, hoist_quantize.py)."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from lowered_models import count, exported, lowered, targets, without_inductor
from torch import nn
from torch.nn import functional as F
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import qframework
from qframework import numerics
from qframework.backend import merge_linears
from qframework.quantizer import (
    AttentionConfig,
    QFrameworkQuantizer,
    QuantizationConfig,
    calibrate,
    static_attention,
    static_int8,
)

QUANTIZE = torch.ops.qframework.quantize.default
DEQUANTIZE = torch.ops.qframework.dequantize.default
INT8_LINEAR = torch.ops.qframework.int8_linear.default
MIXED = torch.ops.qframework.mixed_attention.default
SDPA = torch.ops.aten.scaled_dot_product_attention.default
DIM, HEADS = 32, 4


class Fused(nn.Module):
    """LayerNorm -> qkv in one linear -> attention -> proj -> residual sum, as timm has it."""

    def __init__(self, normalize=False, drop=0.1, **arguments):
        super().__init__()
        self.arguments = arguments
        self.norm, self.qkv, self.proj = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.q_norm = self.k_norm = nn.LayerNorm(DIM // HEADS) if normalize else nn.Identity()
        self.drop = nn.Dropout(drop)

    def split(self, qkv):
        batch, tokens, _ = qkv.shape
        return qkv.reshape(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x):
        batch, tokens, dim = x.shape
        q, k, v = self.split(self.qkv(self.norm(x)))
        out = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, **self.arguments)
        return x + self.drop(self.proj(self.drop(out.transpose(1, 2).reshape(batch, tokens, dim))))


class Chunked(Fused):
    def split(self, qkv):
        return [x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in qkv.chunk(3, -1)]


class Sliced(Fused):
    """Unequal slices, the values first."""

    def split(self, qkv):
        v, q, k = (qkv[..., i * DIM : (i + 1) * DIM] for i in range(3))
        return [x.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for x in (q, k, v)]


class SplitThenSelected(Fused):
    def split(self, qkv):
        q, kv = qkv.split([DIM, 2 * DIM], dim=-1)
        q = q.reshape(*q.shape[:2], HEADS, -1).transpose(1, 2)
        kv = kv.reshape(*kv.shape[:2], HEADS, 2, -1).permute(3, 0, 2, 1, 4)
        return q, kv[0], kv.select(0, 1)


class ByHead(Fused):
    """Queries, keys and values of a head are adjacent (the order of Swin V2 and GPT-NeoX)."""

    def split(self, qkv):
        return qkv.reshape(*qkv.shape[:2], HEADS, -1).transpose(1, 2).chunk(3, dim=-1)


class Separate(nn.Module):
    """Three linears, fewer heads of keys and values, a strided memory order: as language models have it."""

    def __init__(self, kv_heads=HEADS):
        super().__init__()
        size = DIM // HEADS
        self.q_proj, self.o_proj = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(DIM, kv_heads * size, bias=bias) for bias in (False, True))
        self.gqa = kv_heads != HEADS

    def forward(self, x):
        q, k, v = (
            p(x).view(*x.shape[:2], -1, DIM // HEADS).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.gqa)
        return self.o_proj(out.transpose(1, 2).contiguous().view(*x.shape[:2], -1))


def data():
    """Channels of different magnitudes, so that q, k and v have different scales."""
    return torch.randn(3, 7, DIM) * torch.linspace(0.2, 3, DIM)


def converted(model, x, attention=None, linear=None, **rules):
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.mul_(1 + 0.3 * (i % 3))
    quantizer = QFrameworkQuantizer().set_global(
        QuantizationConfig(linear or static_int8(), attention or static_attention())
    )
    for name, rule in rules.items():
        quantizer.set_module_name(name, rule)
    prepared = prepare_pt2e(exported(model, x), quantizer)
    calibrate(prepared, [x], progress=False)
    return convert_pt2e(prepared)


def check(gm, x, model):
    """Lower ``gm``, and compare its result with the eager graph's, except for values near a tie."""
    reference = gm(x)
    gm, reports = lowered(copy.deepcopy(gm))
    got = gm(x)
    assert count(gm, MIXED) == 1
    assert count(gm, SDPA) == 0
    assert numerics.sqnr_db(reference, got) > 55
    assert numerics.sqnr_db(model(x), got) > 20
    other = torch.randn(5, 7, DIM)
    assert gm(other).shape == other.shape
    return gm, reports


CONFIGS = {
    "per tensor": static_attention(),
    "per head": static_attention("per_head"),
    "percentile": static_attention(observer="percentile"),
    "always": AttentionConfig(output="always"),
}


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        *((Fused, name) for name in CONFIGS),
        (Chunked, "per head"),
        (Sliced, "per tensor"),
        (SplitThenSelected, "always"),
    ],
)
def test_qkv_attention_and_proj_exchange_int8(layer, name):
    model, x = layer(), data()
    gm, reports = check(converted(model, x, CONFIGS[name]), x, model)
    assert count(gm, QUANTIZE) == 1, "of LayerNorm's output alone"
    assert [t for t in targets(gm) if "dequantize" in str(t)] == []
    assert [t for t in targets(gm) if "quantize_per" in str(t)] == []
    qkv, proj = (node for node in gm.graph.nodes if node.target is INT8_LINEAR)
    assert qkv.meta["val"].dtype == torch.int8
    assert proj.args[6] is not None, "the residual sum belongs to the epilogue"
    [attention] = (node for node in gm.graph.nodes if node.target is MIXED)
    assert attention.args[10] is not None, "attention writes int8"
    assert [(r.kind, r.lowered, r.operator) for r in reports] == [
        ("linear", True, "qframework::int8_linear (int8 out)"),
        ("attention", True, "qframework::mixed_attention (int8 out)"),
        ("linear", True, "qframework::int8_linear (residual)"),
    ]


def test_each_channel_has_the_scale_of_its_query_key_or_value():
    model, x = Fused(), data()
    graph = converted(model, x)
    scales = [node.args[1] for node in next(n for n in graph.graph.nodes if n.target == SDPA).args[:3]]
    gm, _ = lowered(graph)
    qkv = next(node for node in gm.graph.nodes if node.target is INT8_LINEAR)
    expected = torch.tensor(scales).repeat_interleave(DIM)
    assert len(set(scales)) == 3
    assert torch.equal(getattr(gm, qkv.args[7].target), expected)


def test_channels_that_interleave():
    model, x = ByHead(), data()
    graph = converted(model, x)
    scales = [node.args[1] for node in next(n for n in graph.graph.nodes if n.target == SDPA).args[:3]]
    gm, _ = check(graph, x, model)
    qkv = next(node for node in gm.graph.nodes if node.target is INT8_LINEAR)
    expected = torch.tensor(scales).repeat_interleave(DIM // HEADS).repeat(HEADS)
    assert torch.equal(getattr(gm, qkv.args[7].target), expected)


@pytest.mark.parametrize(
    ("kv_heads", "name"), [(HEADS, "per tensor"), (2, "per tensor"), (2, "per head"), (1, "per head"), (1, "always")]
)
def test_separate_projections_and_grouped_queries(name, kv_heads):
    model, x = Separate(kv_heads), data()
    gm, _ = check(converted(model, x, CONFIGS[name]), x, model)
    assert count(gm, QUANTIZE) == 1
    assert [t for t in targets(gm) if "dequantize" in str(t)] == []
    linears = [node for node in gm.graph.nodes if node.target is INT8_LINEAR]
    assert [node.args[7] is not None for node in linears] == [True, True, True, False]
    [attention] = (node for node in gm.graph.nodes if node.target is MIXED)
    assert attention.args[7] is True
    assert attention.args[9] is (kv_heads != HEADS)


@pytest.mark.parametrize(
    "arguments",
    [
        {"is_causal": True},
        {"attn_mask": torch.ones(7, 7, dtype=torch.bool).tril()},
        {"attn_mask": 3 * torch.randn(HEADS, 7, 7)},
        {"scale": 0.9},
    ],
    ids=["causal", "bool mask", "float mask", "scale"],
)
def test_arguments_pass_through(arguments):
    model, x = Fused(**arguments), data()
    gm, _ = check(converted(model, x), x, model)
    plain = Fused()
    plain.load_state_dict(model.state_dict())
    assert numerics.sqnr_db(plain(x), gm(x)) < 20, "the argument matters here"


def test_steps_in_between_keep_their_quantize():
    """Queries and keys are normalized in float, so that qkv has to write float."""
    model, x = Fused(normalize=True), data()
    gm, reports = check(converted(model, x), x, model)
    assert count(gm, QUANTIZE) == 4  # LayerNorm's output, q, k and v
    assert [t for t in targets(gm) if "dequantize" in str(t)] == []
    qkv = next(node for node in gm.graph.nodes if node.target is INT8_LINEAR)
    assert qkv.args[7] is None
    assert "qframework::mixed_attention (int8 out)" in [r.operator for r in reports]


class SpelledOut(Fused):
    def forward(self, x):
        batch, tokens, dim = x.shape
        q, k, v = self.split(self.qkv(self.norm(x)))
        weights = ((q @ k.transpose(-2, -1)) / (dim / HEADS) ** 0.5).softmax(-1)
        return x + self.proj((weights @ v).transpose(1, 2).reshape(batch, tokens, dim))


def test_attention_written_as_products_is_lowered():
    model, x = SpelledOut(), data()
    gm, _ = check(converted(model, x), x, model)
    assert count(gm, QUANTIZE) == 1
    assert [t for t in targets(gm) if "dequantize" in str(t)] == []
    assert count(gm, torch.ops.aten.softmax.int) == 0


class Relative(Fused):
    """Decomposed relative positions as a bias (SAM): computed in float, they keep the queries in float as well."""

    def __init__(self, form="bias"):
        super().__init__()
        self.form, self.grid = form, (3, 4)
        self.table_h, self.table_w = (nn.Parameter(torch.randn(n, n, DIM // HEADS)) for n in self.grid)

    def forward(self, x):
        batch, tokens, dim = x.shape
        h, w = self.grid
        q, k, v = self.split(self.qkv(self.norm(x)))
        on_grid = q.reshape(batch, HEADS, h, w, -1)
        rel_h = torch.einsum("bnhwc,hkc->bnhwk", on_grid, self.table_h)
        rel_w = torch.einsum("bnhwc,wkc->bnhwk", on_grid, self.table_w)
        if self.form == "bias":
            bias = (rel_h[..., None] + rel_w[..., None, :]).reshape(batch, HEADS, tokens, tokens)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            logits = q * (DIM // HEADS) ** -0.5 @ k.transpose(-2, -1)
            total = logits[:, :, 0:].view(batch, -1, h, w, h, w) + rel_h.unsqueeze(-1) + rel_w.unsqueeze(-2)
            if self.form == "written":
                logits[:, :, 0:] = total.view(batch, -1, tokens, tokens)
            else:
                logits = total.view(batch, -1, tokens, tokens)
            out = logits.softmax(-1) @ v
        return x + self.proj(out.transpose(1, 2).reshape(batch, tokens, dim))


@pytest.mark.parametrize("form", ["bias", "grid", "written"])  # as SAM, ViTDet and MViTv2 have them
def test_relative_positions_become_two_factors(form):
    model, x = Relative(form), torch.randn(3, 12, DIM)
    gm = converted(model, x)
    reference = gm(x)
    assert numerics.sqnr_db(model(x), reference) > 25
    gm, _ = lowered(gm)
    [attention] = (node for node in gm.graph.nodes if node.target is MIXED)
    assert attention.args[6] is None
    assert [tuple(node.meta["val"].shape[1:]) for node in attention.args[12:]] == [(HEADS, 12, 3), (HEADS, 12, 4)]
    assert not [n for n in gm.graph.nodes if getattr(n.meta.get("val"), "shape", ())[-2:] == (12, 12)]
    assert numerics.sqnr_db(reference, gm(x)) > 50


class Rotary(Separate):
    def forward(self, x):
        q, k, v = (p(x).view(*x.shape[:2], -1, 8).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        angle = torch.arange(x.shape[1])[:, None] * 0.1 * torch.arange(1, 9)
        q, k = (y * angle.cos() + torch.cat((-y[..., 4:], y[..., :4]), -1) * angle.sin() for y in (q, k))
        out = F.scaled_dot_product_attention(q, k, v)
        return self.o_proj(out.transpose(1, 2).reshape(*x.shape[:2], -1))


def test_values_stay_in_int8_beside_rotated_queries_and_keys():
    model, x = Rotary(), data()
    gm, _ = check(converted(model, x), x, model)
    linears = [node for node in gm.graph.nodes if node.target is INT8_LINEAR]
    assert [node.args[7] is not None for node in linears] == [False, False, True, False]


class ReadElsewhere(Fused):
    """The output of attention is read in float as well, and so are the queries."""

    def forward(self, x):
        q, k, v = self.split(self.qkv(self.norm(x)))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.proj(out) + out.mean(-1, keepdim=True) + q.mean()


def test_values_with_other_readers_stay_in_float():
    model, x = ReadElsewhere(), data()
    gm, reports = check(converted(model, x), x, model)
    qkv = next(node for node in gm.graph.nodes if node.target is INT8_LINEAR)
    [attention] = (node for node in gm.graph.nodes if node.target is MIXED)
    assert qkv.args[7] is None
    assert attention.args[10:12] == (None, torch.float32)
    assert "qframework::mixed_attention" in [r.operator for r in reports]


def test_float_linears_around_static_attention():
    model, x = Fused(), data()
    gm, reports = check(converted(model, x, qkv=QuantizationConfig(), proj=QuantizationConfig()), x, model)
    assert count(gm, QUANTIZE) == 3
    assert [r.lowered for r in reports if r.kind == "linear"] == [False, False]


def test_a_per_token_projection_quantizes_its_own_input():
    model, x = Fused(), data()
    gm, _ = check(converted(model, x, linear=static_int8("per_token")), x, model)
    [attention] = (node for node in gm.graph.nodes if node.target is MIXED)
    assert attention.args[10] is None
    assert count(gm, QUANTIZE) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    model, x = Fused().to(dtype), data().to(dtype)
    gm, _ = lowered(converted(model, x, proj=None))
    y = gm(x)
    assert count(gm, MIXED) == 1
    assert y.dtype == dtype
    assert next(node for node in gm.graph.nodes if node.target is MIXED).args[11] == dtype
    assert numerics.sqnr_db(model(x), y) > 20


def rewrite(gm, operand, change):
    """Change the arguments of the quantize and dequantize nodes of one operand of attention."""
    [attention] = (node for node in gm.graph.nodes if node.target == SDPA)
    dequantize = attention.args[operand]
    for node in (dequantize, dequantize.args[0]):
        node.args = change(node.args)
    gm.recompile()
    return gm


def test_asymmetric_queries_are_left_whole_and_explained():
    x = data()
    gm = rewrite(converted(Fused(), x), 0, lambda args: (*args[:2], 3, *args[3:]))
    reference = copy.deepcopy(gm)(x)
    gm, reports = lowered(gm)
    [report] = [r for r in reports if r.kind == "attention"]
    assert (report.lowered, report.fallback) == (False, True)
    assert "its query must have zero point 0 (symmetric quantization), got 3" in report.reason
    assert count(gm, SDPA) == 1
    torch.testing.assert_close(gm(x), reference)


def test_queries_alone_are_left_whole_and_explained():
    x = data()
    gm = converted(Fused(), x)
    [attention] = (node for node in gm.graph.nodes if node.target == SDPA)
    for i in (1, 2):
        attention.replace_input_with(attention.args[i], attention.args[i].args[0].args[0])
    gm.graph.eliminate_dead_code()
    gm.recompile()
    gm, reports = lowered(gm)
    [report] = [r for r in reports if r.kind == "attention"]
    assert not report.lowered
    assert "must be quantized together; not quantized: key, value" in report.reason


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_scale_is_an_error_that_names_the_layer(scale):
    gm = rewrite(converted(Fused(), data()), 1, lambda args: (args[0], scale, *args[2:]))
    with pytest.raises(qframework.errors.QFrameworkError, match=r"the scale of its key must be positive"):
        lowered(gm)


def test_lowering_twice_changes_nothing():
    gm, _ = lowered(converted(Fused(), data()))
    once = targets(gm)
    gm, reports = lowered(gm)
    assert targets(gm) == once
    assert all(report.lowered for report in reports)


@pytest.mark.parametrize("name", ["per tensor", "per head"])
def test_compiled_saved_and_loaded(name, tmp_path):
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=10
    ).eval()
    images = torch.randn(4, 3, 32, 32)
    batch = torch.export.Dim.DYNAMIC
    quantizer = QFrameworkQuantizer().set_global(QuantizationConfig(static_int8(), CONFIGS[name]))
    exported_ = torch.export.export(model, (images,), dynamic_shapes=({0: batch},)).module()
    prepared = prepare_pt2e(exported_, quantizer)
    calibrate(prepared, [images], progress=False)
    gm = convert_pt2e(prepared)
    report = qframework.explain(gm, (images,))
    assert (report.lowered, report.attention_lowered) == (report.total, 1)
    reference = gm(images)
    qframework.save(gm, tmp_path / "vit.pt2", (images,), dynamic_shapes=({0: batch},), config=quantizer.to_dict())
    loaded = qframework.load(tmp_path / "vit.pt2")
    assert qframework.explain(loaded, (images,)).attention_lowered == 1
    with torch.no_grad():
        fast = torch.compile(gm, backend="qframework")(images)
        restored = torch.compile(loaded, backend="qframework", dynamic=True)
        assert numerics.sqnr_db(reference, fast) > 55
        assert torch.equal(restored(images), fast)
        assert numerics.sqnr_db(model(images[:1]), restored(images[:1])) > 20


class TestScalesPerHead:
    """The scales of a linear's channels are gathered once, and again when the model's scales are written."""

    @pytest.fixture
    def model(self, fresh_dynamo):
        torch.manual_seed(0)
        return converted(Fused(), data(), static_attention("per_head"))

    @staticmethod
    def compiled(model, kept):
        return torch.compile(model, backend=without_inductor(kept), fullgraph=True)

    def test_nothing_gathers_them_at_each_call(self, model):
        kept = []
        with torch.no_grad():
            self.compiled(model, kept)(data())
        assert count(kept[0], INT8_LINEAR) == 2
        assert [target for target in targets(kept[0]) if "cat" in str(target) or "index_select" in str(target)] == []

    @pytest.mark.parametrize("replaces", [False, True])
    def test_a_write_is_seen(self, model, replaces):
        x, kept = data(), []
        compiled = self.compiled(model, kept)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
            scales = [name for name, value in model.named_buffers() if "_scale_" in name and value.shape == (HEADS,)]
            before = compiled(x)
            for name in scales:
                if replaces:
                    owner, _, last = name.rpartition(".")
                    setattr(model.get_submodule(owner), last, 7 * model.get_buffer(name))
                else:
                    model.get_buffer(name).mul_(7)
            after = compiled(x)
            torch.testing.assert_close(after, model(x))
        assert len(scales) == 3
        assert (after - before).abs().max() > 0.01
        assert len(kept) == 1

    def test_a_write_is_seen_by_joined_projections(self, fresh_dynamo, monkeypatch):
        monkeypatch.setattr(merge_linears, "pays_to_join", lambda x, outputs: True)
        torch.manual_seed(0)
        model, x, kept = converted(Separate(), data(), static_attention("per_head")), data(), []
        compiled = self.compiled(model, kept)
        with torch.no_grad():
            before = compiled(x)
            for name, value in model.named_buffers():
                if "_scale_" in name and value.shape == (HEADS,):
                    value.mul_(7)
            after = compiled(x)
            torch.testing.assert_close(after, model(x))
        assert count(kept[0], INT8_LINEAR) == 2, "q, k and v are one product"
        assert (after - before).abs().max() > 0.01
