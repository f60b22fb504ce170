"""Which attention is quantized depends on the option, the device, PyTorch's own speed and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attention_models import VARIANT, Attention, Capture, compiled, qkv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from qframework.backend import compile, lower_attention
from qframework.backend.options import parse_options
from qframework.errors import UnsupportedError
from qframework.graph.attention.patterns import sdpa_call
from qframework.kernels.attention import auto
from qframework.kernels.attention.auto import Hopper, few_positions, pytorch_is_faster
from qframework.kernels.attention.hopper import dense as hopper_dense
from qframework.kernels.attention.hopper import specialized
from qframework.kernels.attention.variants import VARIANTS


class TestOptions:
    def run(self, option):
        q, k, v = qkv()
        return compiled(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), q, k, v, attention=option)[1]

    @pytest.mark.parametrize("name", VARIANTS)
    def test_every_variant_is_an_option(self, name):
        assert parse_options(None, {"attention": name}).attention == name
        assert self.run(name).calls[0]["variant"] == name

    def test_default(self):
        assert parse_options().attention == "auto"
        assert parse_options(None, {"attention": "sage"}).attention == "sage"
        assert parse_options(None, {"attention": VARIANT}).attention == VARIANT

    @pytest.mark.parametrize("value", ["sage3", "8-per_row-fp16-fp32", None, 1])
    def test_unknown_values_are_refused(self, value):
        with pytest.raises(
            UnsupportedError, match=r"option 'attention' must be one of 'auto', 'sage', 'off', 'sage_t'"
        ):
            parse_options(None, {"attention": value})

    @pytest.mark.parametrize("option", ["auto", "sage"])
    def test_auto_and_sage_leave_the_cpu_in_float(self, option):
        capture = self.run(option)
        assert not capture.calls
        (report,) = capture.attention
        assert (report.lowered, report.fallback) == (False, False)
        assert f"'{option}' quantizes attention on CUDA, this is cpu" in report.reason

    def test_off(self):
        capture = self.run("off")
        assert not capture.calls
        (report,) = capture.attention
        assert not report.fallback
        assert report.reason.startswith("the option 'attention' leaves it off")


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def masked(q, k, v):
    """With a bias that the inputs give: one of zeros alone is dropped."""
    return F.scaled_dot_product_attention(q, k, v, q.new_zeros(q.shape[-2], k.shape[-2]) + k[0, 0, :, 0])


def without_some(q, k, v):
    """A bool mask; the product is fake where the test is about sizes alone."""
    return F.scaled_dot_product_attention(q, k, v, k[:, :1, :, 0].unsqueeze(2) > -1)


def as_on_hopper(monkeypatch, cudnn):
    monkeypatch.setattr(lower_attention, "hopper_of", lambda device: Hopper(132, cudnn))


def with_relative_positions(q, k, v):
    """On a grid of 3 x 4 tokens; their sum is never built by the operator, but by PyTorch."""
    batch, heads, tokens, _ = q.shape
    grid = q.reshape(batch, heads, 3, 4, -1)
    rel_h, rel_w = grid[..., :3, None], grid[..., None, :4]
    bias = (rel_h + rel_w).reshape(batch, heads, tokens, tokens)
    return F.scaled_dot_product_attention(q, k, v, bias)


def with_positions_on_a_grid(q, k, v):
    """The same as MViTv2 has it: products written out, and logits in the shape of the grid."""
    batch, heads, tokens, _ = q.shape
    grid = q.reshape(batch, heads, 3, 4, -1)
    logits = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).view(batch, heads, 3, 4, 3, 4)
    logits = logits + grid[..., :3, None] + grid[..., None, :4]
    return logits.view(batch, heads, tokens, tokens).softmax(-1) @ v


def spelled_out_with_positions(q, k, v):
    """The same where the products alone are written out."""
    batch, heads, tokens, _ = q.shape
    grid = q.reshape(batch, heads, 3, 4, -1)
    bias = (grid[..., :3, None] + grid[..., None, :4]).reshape(batch, heads, tokens, tokens)
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v


def spelled_out(q, k, v):
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v


def with_dropout(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


class TestWherePyTorchIsFaster:
    """On a chip whose tensor cores PyTorch's 16-bit attention keeps busy."""

    @pytest.fixture(autouse=True)
    def on_hopper(self, monkeypatch):
        monkeypatch.setattr(lower_attention, "_why_not", lambda option, device: None)
        monkeypatch.setattr(hopper_dense, "HAS_GLUON", True)
        as_on_hopper(monkeypatch, cudnn=True)

    def run(self, fn, option, dtype=torch.half, shape=(1, 2, 5, 64), width=None):
        q, k = (torch.randn(shape, dtype=dtype) for _ in range(2))
        v = torch.randn(*shape[:-1], width or shape[-1], dtype=dtype)
        with torch.no_grad():
            return compiled(fn, q, k, v, attention=option)[1]

    @pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
    @pytest.mark.parametrize("fn", [F.scaled_dot_product_attention, causal])
    def test_auto_leaves_it(self, fn, dtype):
        capture = self.run(lambda *operands: fn(*operands), "auto", dtype)
        assert not capture.calls
        (report,) = capture.attention
        assert (report.lowered, report.fallback) == (False, False)
        assert "'sage'" in report.reason

    @pytest.mark.parametrize("option", ["sage", "sage_b"])
    def test_sage_and_variants_quantize_it(self, option):
        capture = self.run(causal, option)
        assert [call["variant"] for call in capture.calls] == ["auto" if option == "sage" else option]
        assert capture.attention[0].lowered

    def test_a_mapping_quantizes_it(self):
        capture = self.run(causal, {"scaled_dot_product_attention": "auto"})
        assert [call["variant"] for call in capture.calls] == ["auto"]

    @pytest.mark.parametrize(
        ("fn", "given"),
        [
            (with_relative_positions, {"shape": (2, 2, 12, 16)}),
            (spelled_out, {}),
            (causal, {"dtype": torch.float32}),
            (causal, {"shape": (1, 2, 5, 60)}),
            (causal, {"shape": (2, 5, 64)}),
            (causal, {"width": 128}),
        ],
        ids=["relative positions", "spelled out", "float32", "odd head", "3 dimensions", "wide values"],
    )
    def test_auto_quantizes_where_pytorch_has_no_fused_kernel(self, fn, given):
        assert self.run(fn, "auto", **given).calls

    @pytest.mark.parametrize("shape", [(1, 2, 48, 196), (1, 2, 32, 49)])
    def test_auto_leaves_channels_that_attend_to_channels(self, shape):
        """As in XCiT and DaViT: their logits are smaller than their operands."""
        capture = self.run(spelled_out, "auto", shape=shape)
        assert not capture.calls
        (report,) = capture.attention
        assert (report.lowered, report.fallback) == (False, False)
        assert report.reason.startswith(f"it has {shape[2]} keys of {shape[3]} channels")
        assert self.run(spelled_out, "sage", shape=shape).calls

    def test_auto_leaves_few_tokens_of_odd_heads(self):
        """As in TNT, whose inner sequences have 16 tokens and heads of 10 channels."""
        capture = self.run(spelled_out, "auto", shape=(1, 2, 16, 10))
        assert not capture.calls
        (report,) = capture.attention
        assert (report.lowered, report.fallback) == (False, False)
        assert report.reason.startswith("it has 16 queries and 16 keys")
        assert self.run(spelled_out, "sage", shape=(1, 2, 16, 10)).calls

    @pytest.mark.parametrize(
        "shape", [(1, 2, 49, 64), (1, 2, 200, 196), (1, 2, 50, 49), (1, 2, 16, 16), (1, 2, 33, 10)]
    )
    def test_auto_takes_other_products_around_a_softmax(self, shape):
        assert self.run(spelled_out, "auto", shape=shape).calls

    @pytest.mark.parametrize("shape", [(3, 2, 49, 96), (1, 2, 321, 32), (1, 2, 300, 128), (1, 2, 5, 160)])
    def test_auto_leaves_biases_to_cudnn(self, shape):
        assert not self.run(masked, "auto", shape=shape).calls

    @pytest.mark.parametrize("shape", [(3, 2, 49, 40), (1, 2, 65, 64), (1, 2, 196, 80), (2, 2, 256, 32)])
    @pytest.mark.parametrize("mask", [masked, without_some])
    def test_auto_takes_masks_that_small_programs_compute(self, shape, mask, monkeypatch):
        assert self.run(mask, "auto", shape=shape).calls
        monkeypatch.setattr(hopper_dense, "HAS_GLUON", False)
        assert not self.run(mask, "auto", shape=shape).calls

    @pytest.mark.parametrize(
        ("shape", "taken"),
        [((1, 32, 1024, 64), True), ((1, 32, 1023, 64), False), ((1, 2, 1024, 64), False)],
        ids=["many blocks", "short", "few blocks"],
    )
    def test_auto_takes_biases_over_many_tokens(self, shape, taken, monkeypatch):
        monkeypatch.setattr(specialized, "HAS_GLUON", True)
        assert bool(self.run(masked, "auto", shape=shape).calls) == taken

    @pytest.mark.parametrize("fn", [with_relative_positions, spelled_out_with_positions, with_positions_on_a_grid])
    def test_auto_leaves_relative_positions_that_only_the_general_kernel_computes(self, fn):
        capture = self.run(fn, "auto", shape=(2, 2, 12, 128))
        assert not capture.calls
        (report,) = capture.attention
        assert (report.lowered, report.fallback) == (False, False)
        assert "'sage'" in report.reason
        assert self.run(fn, "sage", shape=(2, 2, 12, 128)).calls
        torch._dynamo.reset()  # else heads have any number of channels
        assert self.run(fn, "auto", shape=(2, 2, 12, 96)).calls  # small programs compute it

    @pytest.mark.parametrize(
        ("shape", "keys", "taken"),
        [
            *[((64, 1, 3136, 96), 196, True), ((1, 1, 3136, 96), 196, True)],  # MViTv2, all keys in shared memory
            *[((64, 2, 784, 96), 784, True), ((1, 2, 784, 96), 784, False)],  # passing through, a fourth of a wave
            *[((1, 16, 1024, 80), 1024, True), ((1, 12, 1600, 64), 1600, True), ((1, 5, 784, 32), 784, True)],
            *[((1, 4, 784, 32), 784, False), ((8, 8, 130 * 130, 64), 130 * 130, False)],
            *[
                ((8, 8, 2500, 160), 2500, True),
                ((8, 8, 10000, 160), 10000, False),
            ],  # rows of 100 fill no block of 64 keys
        ],
    )
    def test_which_relative_positions_hopper_computes(self, shape, keys, taken, monkeypatch):
        monkeypatch.setattr(specialized, "HAS_GLUON", True)
        query = torch.empty(shape, dtype=torch.half, device="meta")
        assert pytorch_is_faster(query, keys, shape[3], "factors", Hopper(132, True)) == (not taken)

    @pytest.mark.parametrize(
        ("heads", "queries", "channels", "few"),
        [
            *[
                (2, 784, 96, True),
                (4, 784, 32, True),
                (5, 784, 96, False),
                (1, 196, 96, False),
            ],  # the last: all keys stay
            *[(2, 900, 264, True), (64, 900, 264, False), (1, 130 * 130, 64, False)],  # for the general kernel if many
        ],
    )
    def test_which_relative_positions_are_too_few(self, heads, queries, channels, few, monkeypatch):
        monkeypatch.setattr(specialized, "HAS_GLUON", True)
        assert few_positions(heads, queries, queries, channels, channels, Hopper(132, True)) == few

    @pytest.mark.parametrize("fn", [causal, masked, without_some, spelled_out, F.scaled_dot_product_attention])
    def test_any_sizes(self, fn, monkeypatch):
        """Graphs for any sizes have the kernels of their first ones."""
        monkeypatch.setattr(specialized, "HAS_GLUON", True)
        capture = Capture("auto")
        run = torch.compile(fn, backend=capture, dynamic=True)
        for tokens in (49, 60):
            q, k, v = torch.randn(3, 2, 3, tokens, 64, dtype=torch.half)
            with torch.no_grad():
                torch.testing.assert_close(run(q, k, v), fn(q, k, v), atol=0.05, rtol=0)  # in INT8 on a CPU
        assert len(capture.attention) == 1

    @pytest.mark.parametrize("shape", [(3, 2, 49, 32), (1, 2, 64, 64)])
    def test_auto_takes_windows_with_a_bias(self, shape):
        assert self.run(masked, "auto", shape=shape).calls

    @pytest.mark.parametrize(
        ("shape", "taken"),
        [((2, 32, 384, 64), True), ((2, 32, 383, 64), False), ((1, 2, 384, 64), False), ((2, 32, 384, 60), True)],
        ids=["many blocks", "short", "few blocks", "odd heads"],
    )
    def test_auto_takes_bool_masks_over_many_tokens(self, shape, taken, monkeypatch):
        monkeypatch.setattr(specialized, "HAS_GLUON", True)
        assert bool(self.run(without_some, "auto", shape=shape).calls) == taken

    @pytest.mark.parametrize(("tokens", "taken"), [(49, False), (65, True)])
    def test_without_cudnn_auto_leaves_windows_of_wide_heads_with_a_mask(self, monkeypatch, tokens, taken):
        as_on_hopper(monkeypatch, cudnn=False)
        assert bool(self.run(masked, "auto", shape=(3, 2, tokens, 128)).calls) == taken

    @pytest.mark.parametrize(
        ("shape", "taken"),
        [
            *[((2, 16, 4096, 128), True), ((4, 16, 4095, 96), False), ((1, 31, 4096, 128), False)],
            *[((2, 16, 4096, 72), False), ((2, 16, 8192, 256), True), ((2, 16, 8191, 256), False)],
            *[((4, 16, 4096, 160), True), ((8, 16, 4095, 160), False), ((2, 16, 8192, 192), False)],
        ],
        ids=["long", "short", "few heads", "odd heads", "wide", "wide, short", "160", "160, short", "192"],
    )
    def test_auto_takes_long_attention(self, shape, taken, monkeypatch):
        """Traced only: so much attention takes minutes on a CPU."""
        monkeypatch.setattr(specialized, "HAS_GLUON", True)
        graph = torch.fx.symbolic_trace(causal)
        FakeTensorProp(graph).propagate(*(torch.empty(shape, dtype=torch.half, device="meta") for _ in range(3)))
        (node,) = (node for node in graph.graph.nodes if node.op == "call_function")
        assert lower_attention._pytorch_is_faster(sdpa_call(node)) == (not taken)

    @pytest.mark.parametrize(
        ("fn", "shape", "taken"),
        [
            (F.scaled_dot_product_attention, (256, 12, 197, 64), True),
            (F.scaled_dot_product_attention, (16, 16, 577, 40), True),
            (F.scaled_dot_product_attention, (1, 12, 197, 64), False),
            (F.scaled_dot_product_attention, (64, 12, 256, 64), False),
            (F.scaled_dot_product_attention, (256, 12, 197, 80), False),
            (F.scaled_dot_product_attention, (8, 32, 1024, 64), True),
            (F.scaled_dot_product_attention, (1, 12, 2048, 64), False),
            (causal, (256, 12, 197, 64), False),
            (causal, (16, 32, 512, 64), True),
            (causal, (16, 32, 511, 64), False),
            (causal, (1, 2, 2048, 64), False),
            (causal, (8, 32, 1024, 128), True),
            (causal, (8, 32, 1023, 128), False),
            (causal, (4, 31, 1024, 128), False),
            (causal, (8, 32, 1024, 96), False),
            (F.scaled_dot_product_attention, (8, 32, 1024, 128), False),
            (F.scaled_dot_product_attention, (8, 32, 1024, 48), True),
            (F.scaled_dot_product_attention, (8, 32, 1024, 40), False),
        ],
        ids=[
            *["part of a block", "odd heads", "less than the host", "whole blocks", "wide heads"],
            *["many whole blocks", "few whole blocks", "causal", "causal, long", "causal, shorter"],
            *["causal, less than the host", "causal, wide heads", "causal, wide, shorter", "causal, wide, few blocks"],
            *["causal, 96 channels", "wide heads, not causal", "many whole blocks, 48", "and 40, padded"],
        ],
    )
    def test_auto_takes_calls_for_small_programs(self, fn, shape, taken):
        """Traced only, as above."""
        graph = torch.fx.symbolic_trace(lambda q, k, v: fn(q, k, v))
        FakeTensorProp(graph).propagate(*(torch.empty(shape, dtype=torch.half, device="meta") for _ in range(3)))
        (node,) = (node for node in graph.graph.nodes if node.op == "call_function")
        assert lower_attention._pytorch_is_faster(sdpa_call(node)) == (not taken)

    @pytest.mark.parametrize("tokens", [1024, 2048])
    def test_without_cudnn_only_short_attention_stays_in_float(self, monkeypatch, tokens):
        as_on_hopper(monkeypatch, cudnn=False)
        assert bool(self.run(causal, "auto", shape=(1, 1, tokens, 16)).calls) == (tokens > 1024)

    def test_a_refusal_is_a_fallback_only_if_the_option_asks_for_it(self):
        for option, wanted in (("auto", False), ("sage", True)):
            (report,) = self.run(with_dropout, option).attention
            assert (report.lowered, report.fallback) == (False, wanted)


@pytest.mark.parametrize(("capability", "faster"), [((9, 0), True), ((8, 9), False), ((10, 0), False)])
def test_pytorch_keeps_up_on_hopper(monkeypatch, capability, faster):
    monkeypatch.setattr(auto, "chip_of", lambda device: (capability, 100))
    assert auto.hopper_of(torch.device("cuda")) == (Hopper(100, cudnn=True) if faster else None)
    assert auto.hopper_of(torch.device("cpu")) is None


class TestGradients:
    @pytest.fixture
    def as_on_cuda(self, monkeypatch):
        monkeypatch.setattr(lower_attention, "_why_not", lambda option, device: None)

    def test_auto_keeps_training_exact(self, as_on_cuda, caplog):
        capture = Capture("auto")
        model, x = Attention(), torch.randn(3, 17, 32)
        torch.compile(model, backend=capture)(x).sum().backward()
        assert not capture.calls
        (report,) = capture.attention
        assert not report.fallback
        assert "its gradients are needed" in report.reason
        with torch.no_grad():
            torch.compile(model, backend=capture)(x)
        assert capture.calls[0]["variant"] == "auto"

    @pytest.mark.parametrize("option", ["auto", "sage"])
    def test_attention_left_exact_for_its_gradients_is_logged_once(self, option, as_on_cuda, caplog, monkeypatch):
        monkeypatch.setattr(compile, "_warned", set())
        for _ in range(2):
            torch._dynamo.reset()
            torch.compile(Attention(), backend=Capture(option))(torch.randn(3, 17, 32))
        said = [record.getMessage() for record in caplog.records if "gradients" in record.getMessage()]
        assert said == [
            f"qframework: attention stays in float: its gradients are needed, which {option!r} keeps exact. Use "
            "torch.no_grad(), or name a variant"
        ]

    def test_a_named_variant_has_the_gradients_of_exact_attention(self):
        torch.manual_seed(0)
        model, x = Attention(), torch.randn(3, 17, 32)
        weights = torch.randn(3, 17, 32)
        gradients = []
        for option in ("off", VARIANT):
            model.zero_grad()
            torch._dynamo.reset()
            y = torch.compile(model, backend="qframework", options={"attention": option}, fullgraph=True)(x)
            (y * weights).sum().backward()
            gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        for name, exact in gradients[0].items():
            # Below proj the gradient is the same function of the same values; proj's own sees the quantized output.
            tolerance = 1e-5 if name != "proj.weight" else 1e-2
            assert (gradients[1][name] - exact).norm() <= tolerance * exact.norm(), name
