"""Attention in the quantizer: rules, observers, variants, errors, and the resulting graphs."""

import copy
import json

import pytest
import torch
from quantizer_models import (
    DEQUANTIZE,
    DEQUANTIZE_CHANNEL,
    QUANTIZE,
    count,
    exported,
    quantized,
    tiny_vit,
)
from torch import nn
from torch.nn import functional as F
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import ComposableQuantizer

from qframework import explain
from qframework.errors import CalibrationError, UnsupportedError
from qframework.numerics import sqnr_db
from qframework.quantizer import (
    AttentionConfig,
    QFrameworkQuantizer,
    QuantizationConfig,
    calibrate,
    dynamic_attention,
    dynamic_int8,
    fallbacks,
    static_attention,
    static_int8,
)
from qframework.quantizer.annotate_attention import AttentionAnnotation
from qframework.quantizer.annotate_linear import LinearAnnotation, annotated

SDPA = torch.ops.aten.scaled_dot_product_attention.default
SAGE = torch.ops.qframework.sage_attention.default
QUANTIZE_CHANNEL = torch.ops.quantized_decomposed.quantize_per_channel.default


class SelfAttention(nn.Module):
    """One linear computes queries, keys and values, as in timm."""

    def __init__(self, dim=16, heads=2, **arguments) -> None:
        super().__init__()
        self.heads, self.arguments = heads, arguments
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        batch, tokens, dim = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v, **self.arguments)
        return self.proj(out.transpose(1, 2).reshape(batch, tokens, dim))


class Net(nn.Module):
    def __init__(self, depth=2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SelfAttention() for _ in range(depth)])
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.fixture
def x():
    return torch.randn(2, 5, 16)


def nodes_of(model, target):
    return [node for node in model.graph.nodes if node.target == target]


def per_block(config):
    """Modes of blocks 0 and 1, None for float, and the number of quantized linears, with the rules of ``config``."""
    model = exported(Net(), torch.randn(2, 5, 16))
    quantizer = config(QFrameworkQuantizer())
    model = quantizer.annotate(quantizer.transform_for_annotation(model))
    quantizer.validate(model)
    found = {annotation.layer: "static" for _, annotation in annotated(model, AttentionAnnotation)}
    found |= {list(node.meta["nn_module_stack"].values())[-1][0]: node.args[7] for node in nodes_of(model, SAGE)}
    return found.get("blocks.0"), found.get("blocks.1"), len(annotated(model, LinearAnnotation))


def is_first(node):
    return "blocks.0" in str(node.meta["nn_module_stack"])


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (lambda q: q.set_global(static_int8()), (None, None, 5)),
        (lambda q: q.set_global(static_attention()), ("static", "static", 0)),
        (lambda q: q.set_global(static_attention()).set_global(static_int8()), ("static", "static", 5)),
        (lambda q: q.set_global(QuantizationConfig(static_int8(), static_attention())), ("static", "static", 5)),
        (lambda q: q.set_global(QuantizationConfig(static_int8())), (None, None, 5)),
        (lambda q: q.set_global(dynamic_attention("sage_b")), ("sage_b", "sage_b", 0)),
        (lambda q: q.set_global(static_attention()).set_module_name("blocks.0", None), (None, "static", 0)),
        (
            lambda q: q.set_global(static_attention()).set_module_name("blocks.0", dynamic_attention("sage_t")),
            ("sage_t", "static", 0),
        ),
        # a rule for linears leaves attention as the weaker rule has it, a rule for both does not
        (lambda q: q.set_global(static_attention()).set_module_name("*", static_int8()), ("static", "static", 5)),
        (
            lambda q: q.set_global(static_attention()).set_module_name("blocks.0", QuantizationConfig(static_int8())),
            (None, "static", 2),
        ),
        (lambda q: q.set_module_type(SelfAttention, static_attention()), ("static", "static", 0)),
        (lambda q: q.set_filter(is_first, static_attention()), ("static", None, 0)),
        (
            lambda q: q.set_global(QuantizationConfig(static_int8(), static_attention())).set_filter(is_first, None),
            (None, "static", 3),
        ),
        # the part of a name that a linear has is no name of the attention
        (
            lambda q: q.set_global(QuantizationConfig(static_int8(), static_attention())).set_module_name(
                "blocks.0.qkv", None
            ),
            ("static", "static", 4),
        ),
    ],
)
def test_rules_select(rules, expected):
    assert per_block(rules) == expected


def test_filters_for_linears_never_see_attention():
    seen = []
    QFrameworkQuantizer().set_filter(seen.append, static_int8()).annotate(exported(Net(), torch.randn(2, 5, 16)))
    assert {node.target for node in seen} == {torch.ops.aten.linear.default}


def test_static(x):
    model = SelfAttention().eval()
    config = QuantizationConfig(static_int8(), static_attention())
    converted = quantized(model, QFrameworkQuantizer().set_global(config), x)
    nodes = count(converted)
    assert nodes[QUANTIZE] == nodes[DEQUANTIZE] == 5  # the inputs of qkv and proj, q, k and v
    [attention] = nodes_of(converted, SDPA)
    assert [node.target for node in attention.args[:3]] == [DEQUANTIZE] * 3
    assert len({node.args[1] for node in attention.args[:3]}) == 3, "q, k and v each have their scale"
    assert [user.target for user in attention.users] == [torch.ops.aten.transpose.int], "proj quantizes, not attention"
    assert sqnr_db(model(x), converted(x)) > 25


def test_scales_are_those_of_the_data(x):
    model = SelfAttention().eval()
    converted = quantized(model, QFrameworkQuantizer().set_global(static_attention()), x)
    q, k, v = model.qkv(x).reshape(2, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
    [attention] = nodes_of(converted, SDPA)
    for operand, tensor in zip(attention.args[:3], (q, k, v), strict=True):
        assert operand.args[1] == pytest.approx(float(tensor.abs().max() / 127), rel=1e-6)


@pytest.mark.parametrize("observer", ["minmax", "moving_average"])
def test_one_scale_for_each_head(x, observer):
    model = SelfAttention().eval()
    converted = quantized(model, QFrameworkQuantizer().set_global(static_attention("per_head", observer)), x)
    nodes = count(converted)
    assert (nodes[QUANTIZE_CHANNEL], nodes[DEQUANTIZE_CHANNEL], nodes[QUANTIZE]) == (3, 3, 0)
    q, k, v = model.qkv(x).reshape(2, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
    [attention] = nodes_of(converted, SDPA)
    for operand, tensor in zip(attention.args[:3], (q, k, v), strict=True):
        _, scale, _, axis, low, high, _ = operand.args
        assert (axis, low, high) == (1, -127, 127)
        torch.testing.assert_close(getattr(converted, scale.target), tensor.abs().amax((0, 2, 3)) / 127)
    assert sqnr_db(model(x), converted(x)) > 30


def test_attention_with_an_observer_for_its_output(x):
    config = QuantizationConfig(static_int8(), AttentionConfig(output="always"))
    converted = quantized(SelfAttention(), QFrameworkQuantizer().set_global(config), x)
    [attention] = nodes_of(converted, SDPA)
    assert [user.target for user in attention.users] == [QUANTIZE]
    assert count(converted)[QUANTIZE] == 6


def test_key_and_value_that_are_one_tensor_share_their_observer(x):
    class Shared(nn.Module):
        def forward(self, q, kv):
            return F.scaled_dot_product_attention(q, kv, kv)

    q, kv = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 7, 8)
    model = exported(Shared(), q, kv)
    prepared = prepare_pt2e(model, QFrameworkQuantizer().set_global(static_attention()))
    calibrate(prepared, [(q, kv)], progress=False)
    assert count(convert_pt2e(prepared))[QUANTIZE] == 2


@pytest.mark.parametrize("smooth_k", [True, False])
def test_variants_replace_the_node_and_observe_nothing(x, smooth_k):
    model = SelfAttention().eval()
    config = dynamic_attention("sage_vt", smooth_k=smooth_k)
    prepared = prepare_pt2e(exported(model, x), QFrameworkQuantizer().set_global(config))
    assert not [name for name, _ in prepared.named_children() if name.startswith("activation_post_process")]
    converted = convert_pt2e(prepared)  # without calibration
    [node] = nodes_of(converted, SAGE)
    assert node.args[7:9] == ("sage_vt", smooth_k)
    assert not nodes_of(converted, SDPA)
    assert sqnr_db(model(x), converted(x)) > 30


@pytest.mark.parametrize("config", [static_attention(), dynamic_attention("sage_b")], ids=["static", "sage"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"is_causal": True},
        {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril()},
        {"attn_mask": torch.randn(2, 5, 5)},
        {"scale": 0.7},
    ],
    ids=["causal", "bool mask", "float mask", "scale"],
)
def test_arguments_pass_through(x, config, arguments):
    model = SelfAttention(**arguments).eval()
    converted = quantized(model, QFrameworkQuantizer().set_global(config), x)
    assert sqnr_db(model(x), converted(x)) > 28


class SpelledOut(SelfAttention):
    """matmul, softmax, matmul, as in timm without fused attention."""

    def __init__(self, mask=None):
        super().__init__()
        self.softmax, self.drop = nn.Softmax(-1), nn.Dropout(0.1)
        self.register_buffer("mask", mask)

    def forward(self, x):
        batch, tokens, dim = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        logits = (q * 0.4) @ k.transpose(-2, -1)
        if self.mask is not None and self.mask.dtype == torch.bool:
            logits.masked_fill_(self.mask.expand_as(logits), -1e9)  # as XLM does
        elif self.mask is not None:
            logits = logits + self.mask
        weights = self.softmax(logits)
        out = self.drop(weights) @ v
        return self.proj(out.transpose(1, 2).reshape(batch, tokens, dim)).softmax(-1)  # which is no attention


@pytest.mark.parametrize(
    "mask", [None, 3 * torch.randn(2, 5, 5), torch.ones(5, 5).triu(1).bool()], ids=["plain", "bias", "written"]
)
@pytest.mark.parametrize("config", [static_attention(), static_attention("per_head"), dynamic_attention("sage_b")])
def test_attention_spelled_out(x, config, mask):
    model = nn.Sequential(SpelledOut(mask)).eval()
    quantizer = QFrameworkQuantizer().set_global(static_int8()).set_module_name("0", config)
    quantizer.set_module_name("0.qkv", static_int8())
    converted = quantized(model, quantizer, x, dynamic_batch=True)
    nodes = count(converted)
    assert (nodes[SDPA], nodes[SAGE]) == ((1, 0) if config.is_static else (0, 1))
    assert nodes[torch.ops.aten.matmul.default] == 0
    assert nodes[torch.ops.aten.softmax.int] == 1, "a softmax of something else stays"
    [attention] = [*nodes_of(converted, SDPA), *nodes_of(converted, SAGE)]
    assert (attention.args[3] is None) == (mask is None)
    if config.is_static:
        assert all("dequantize" in str(node.target) for node in attention.args[:3])
    assert sqnr_db(model(x), converted(x)) > 25


@pytest.mark.parametrize("config", [static_attention(), dynamic_attention("sage_b")])
def test_attention_that_returns_weights_which_nothing_reads(x, config):
    """``nn.MultiheadAttention`` returns them by default."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x):
            out, _ = self.attention(x, x, x)
            return x + out

    model = Model().eval()
    converted = quantized(model, QFrameworkQuantizer().set_global(config), x, dynamic_batch=True)
    nodes = count(converted)
    assert (nodes[SDPA], nodes[SAGE]) == ((1, 0) if config.is_static else (0, 1))
    assert nodes[torch.ops.aten.softmax.int] == 0
    assert sqnr_db(model(x), converted(x)) > 25


@pytest.mark.parametrize("config", [static_attention(), dynamic_attention("sage_b")])
def test_attention_whose_hidden_weights_are_set_to_zero(x, config):
    """As CPM-Ant does, which computes its mask twice from constants."""

    class Zeroed(SpelledOut):
        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            logits = torch.masked_fill(q @ k.mT * 0.4, self.mask.eq(torch.tensor(False)), torch.tensor(-torch.inf))
            weights = torch.masked_fill(logits.softmax(-1), self.mask.eq(torch.tensor(False)), torch.tensor(0.0))
            return self.proj((weights @ v).transpose(1, 2).reshape(x.shape))

    model = nn.Sequential(Zeroed(torch.ones(5, 5).tril(-1).bool())).eval()  # the first token sees nothing
    converted = quantized(model, QFrameworkQuantizer().set_global(config), x)
    nodes = count(converted)
    assert (nodes[SDPA], nodes[SAGE]) == ((1, 0) if config.is_static else (0, 1))
    assert sqnr_db(model(x), converted(x)) > 25
    torch.testing.assert_close(converted(x)[:, 0], model(x)[:, 0])


class KeptByProduct(SpelledOut):
    """As GPT-1 writes it."""

    written = False

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        keep = self.mask[None, None, : x.shape[1], : x.shape[1]]
        if self.written:
            self.mask.mul_(0.5)
        logits = (q @ k.mT / 3) * keep + -1e4 * (1 - keep)
        return self.proj((logits.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("config", [static_attention(), dynamic_attention("sage_b")])
def test_keys_that_a_product_hides(x, config):
    """Only zeros and ones hide keys or leave their logits as they are."""
    for mask, found in ((torch.ones(7, 7).tril(), True), (torch.rand(7, 7), False)):
        fallbacks.clear()
        model = nn.Sequential(KeptByProduct(mask)).eval()
        converted = quantized(model, QFrameworkQuantizer().set_global(config), x)
        nodes = count(converted)
        assert (nodes[SDPA], nodes[SAGE]) == ((config.is_static, not config.is_static) if found else (0, 0))
        assert len(fallbacks) == (not found)
        assert sqnr_db(model(x), converted(x)) > 25
    model[0].written, model[0].mask = True, torch.ones(7, 7)
    assert count(quantized(model, QFrameworkQuantizer().set_global(config), x))[torch.ops.aten.softmax.int] == 1


@pytest.mark.parametrize("config", [static_attention(), dynamic_attention("sage_b")])
def test_a_row_of_which_a_product_hides_all_keys(x, config):
    """There all keys have equal weights, which a mask does not give."""
    fallbacks.clear()
    model = nn.Sequential(KeptByProduct(torch.ones(7, 7).tril(-1))).eval()
    converted = quantized(model, QFrameworkQuantizer().set_global(config), x)
    nodes = count(converted)
    assert (nodes[SDPA], nodes[SAGE], nodes[torch.ops.aten.softmax.int]) == (0, 0, 1)
    assert len(fallbacks) == 1
    torch.testing.assert_close(converted(x), model(x))


def test_attention_spelled_out_stays_where_no_rule_wants_it(x):
    quantizer = QFrameworkQuantizer().set_global(static_attention()).set_module_name("0", None)
    converted = quantized(nn.Sequential(SpelledOut()), quantizer, x)
    assert count(converted)[torch.ops.aten.matmul.default] == 2


class Clamped(SpelledOut):
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.transpose(-2, -1)).clamp(-1, 1).softmax(-1) @ v


class LogitsRead(SpelledOut):
    """Others read the logits too, as the writes to a part of them do that add relative positions without a token."""

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        logits = q @ k.transpose(-2, -1)
        return logits.softmax(-1) @ v + logits.mean()


class Wide(SpelledOut):
    """With more channels in a head than a kernel takes."""

    def forward(self, x):
        q = self.qkv(x).repeat(1, 1, 6)
        return F.scaled_dot_product_attention(q, q, q)[..., :16]


NO_KERNEL = {
    Clamped: "clamp",
    LogitsRead: "its matmul has other readers too: mean, softmax",
    Wide: "at most 256 channels per head, got 288",
}


@pytest.mark.parametrize("kind", NO_KERNEL)
def test_attention_that_no_kernel_computes(x, kind, caplog):
    """It stays in float for a reason that is told once and that explain gives; it is an error where a rule names it."""
    reason = NO_KERNEL[kind]
    model = nn.Sequential(kind(), kind(), SpelledOut())
    fallbacks.clear()
    converted = quantized(model, QFrameworkQuantizer().set_global(static_attention()), x)
    assert count(converted)[QUANTIZE] == 3  # of the last attention
    assert [(reason in text, times) for text, times in fallbacks.items()] == [(True, 2)]
    (message,) = [record.message for record in caplog.records if "stays in float" in record.message]
    assert "QFrameworkQuantizer: attention such as '0' stays in float (2 in all): " in message
    left = [layer for layer in explain(converted, x).of("attention").layers if not layer.lowered]
    assert [(layer.name, layer.fallback, reason in layer.reason) for layer in left] == [
        ("0", True, True),
        ("1", True, True),
    ]
    with pytest.raises(UnsupportedError, match=rf"layer '1': .*{reason}.*set_module_name\('1', None\)"):
        quantized(model, QFrameworkQuantizer().set_module_name("1", static_attention()), x)


def test_dynamic_linears_and_attention_need_no_calibration(x):
    config = QuantizationConfig(dynamic_int8(), dynamic_attention("sage_b"))
    model = Net().eval()
    prepared = prepare_pt2e(exported(model, x, dynamic_batch=True), QFrameworkQuantizer().set_global(config))
    converted = convert_pt2e(prepared)
    for batch in (2, 3, 7):
        images = torch.randn(batch, 5, 16)
        assert sqnr_db(model(images), converted(images)) > 25


def test_composes_with_another_quantizer(x):
    """One quantizer for linears, another for attention."""
    linears = QFrameworkQuantizer().set_global(static_int8())
    attention = QFrameworkQuantizer().set_global(static_attention())
    converted = quantized(SelfAttention(), ComposableQuantizer([linears, attention]), x)
    assert count(converted)[QUANTIZE] == 5
    variant = QFrameworkQuantizer().set_global(dynamic_attention("sage_b"))
    assert count(quantized(SelfAttention(), ComposableQuantizer([linears, variant]), x))[SAGE] == 1


def test_uncalibrated_is_an_error_that_names_the_tensor(x):
    prepared = prepare_pt2e(exported(Net(), x), QFrameworkQuantizer().set_global(static_attention()))
    with pytest.raises(CalibrationError, match=r"layer 'blocks.0:query': the activation was never observed"):
        convert_pt2e(prepared)


def test_nan_is_an_error_that_names_the_tensor(x):
    class Divides(SelfAttention):
        def forward(self, x):
            return super().forward(x / x[..., :1])

    model = nn.Sequential(Divides()).eval()
    prepared = prepare_pt2e(exported(model, x), QFrameworkQuantizer().set_global(static_attention()))
    with pytest.raises(CalibrationError, match=r"layer '0:(query|key|value)'"):
        calibrate(prepared, [x, torch.zeros_like(x)], progress=False)


class Call(nn.Module):
    def __init__(self, **arguments):
        super().__init__()
        self.arguments = arguments

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **self.arguments)


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, q, k, v):
        return self.inner(q, k, v)


@pytest.mark.parametrize("config", [static_attention(), dynamic_attention("sage_b")], ids=["static", "sage"])
@pytest.mark.parametrize(
    ("arguments", "shape", "dtype", "words"),
    [
        ({"dropout_p": 0.1}, (2, 2, 5, 8), torch.float32, ["dropout_p must be 0", "got 0.1"]),
        ({}, (2, 2, 5, 8), torch.float64, ["query must have dtype float32", "got torch.float64"]),
        ({}, (5, 8), torch.float32, ["query must have 3 to 5 dimensions, got shape (5, 8)"]),
        ({}, (2, 2, 5, 264), torch.float32, ["query must have at most 256 channels per head, got 264"]),
    ],
    ids=["dropout", "double", "2-D", "wide"],
)
def test_attention_that_no_kernel_supports_is_refused(config, arguments, shape, dtype, words):
    operands = [torch.randn(shape).to(dtype) for _ in range(3)]
    model = torch.export.export(Outer(Call(**arguments)), tuple(operands)).module()
    with pytest.raises(UnsupportedError) as error:
        prepare_pt2e(model, QFrameworkQuantizer().set_module_name("inner", config))
    for word in ["layer 'inner'", *words, "set_module_name('inner', None)"]:
        assert word in str(error.value)
    prepare_pt2e(model, QFrameworkQuantizer().set_global(config).set_module_name("inner", None))


def test_a_model_without_attention_warns(x):
    with pytest.warns(UserWarning, match="found no attention"):
        QFrameworkQuantizer().set_global(static_attention()).annotate(exported(nn.Linear(16, 16), x))


def test_heads_must_be_known():
    operands = [torch.randn(4, 5, 8) for _ in range(3)]
    model = torch.export.export(Call(), tuple(operands)).module()
    with pytest.raises(UnsupportedError, match=r"query must have shape .* for granularity='per_head', got \(4, 5, 8\)"):
        QFrameworkQuantizer().set_global(static_attention("per_head")).annotate(model)


def test_rules_as_json():
    quantizer = QFrameworkQuantizer().set_global(static_int8()).set_module_name("a", dynamic_attention("sage_b"))
    quantizer.set_module_name("b", QuantizationConfig(None, static_attention()))
    rules = json.loads(json.dumps(quantizer.to_dict()))["rules"]
    assert AttentionConfig.from_dict(rules[1]["config"]) == dynamic_attention("sage_b")
    assert QuantizationConfig.from_dict(rules[2]["config"]) == QuantizationConfig(None, static_attention())


@pytest.mark.parametrize("config", [static_attention(), static_attention("per_head"), dynamic_attention("sage_b")])
def test_vit(config):
    model = tiny_vit()
    images = torch.randn(3, 3, 32, 32)
    quantizer = QFrameworkQuantizer().set_global(static_int8()).set_global(config)
    converted = quantized(model, quantizer, images, dynamic_batch=True)
    assert len(nodes_of(converted, SAGE)) == (0 if config.is_static else 2)
    assert sqnr_db(model(images), converted(images)) > 20


def test_float_models_are_unchanged(x):
    """Without rules for attention the quantizer does not change the graph."""
    model = exported(Net(), x)
    quantizer = QFrameworkQuantizer().set_global(static_int8())
    before = [node.target for node in model.graph.nodes]
    after = quantizer.transform_for_annotation(copy.deepcopy(model))
    assert [node.target for node in after.graph.nodes] == before
