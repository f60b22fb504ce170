"""``F.multi_head_attention_forward``, of ``nn.MultiheadAttention`` among others, becomes linears and one attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attention_models import VARIANT, Capture, compiled, randomize
from torch import nn

import qframework
from qframework.backend.options import BackendOptions
from qframework.numerics import sqnr_db


class TestMultiheadAttention:
    def check(self, run, model, *inputs, linears=2):
        out, capture = compiled(run, *inputs)
        assert len(capture.calls) == 1
        assert "multi_head_attention_forward" not in capture.names()
        with torch.no_grad():
            assert sqnr_db(run(*inputs), out) > 35
        names = [report.name for report in capture.reports[-1]]
        assert len(names) == len(set(names)) == linears + 1
        assert {name.rpartition(".")[2] for name in names} > {"in_proj", "out_proj"}
        return capture

    @pytest.mark.parametrize("need_weights", [True, False])
    @pytest.mark.parametrize("batch_first", [True, False])
    def test_module(self, need_weights, batch_first):
        model = randomize(nn.MultiheadAttention(32, 2, batch_first=batch_first))
        self.check(lambda x: model(x, x, x, need_weights=need_weights)[0], model, torch.randn(3, 17, 32))

    def test_weights_that_only_views_read(self):
        """As in WavLM, which gives the weights of all heads the shape that other models return."""
        model = randomize(nn.MultiheadAttention(32, 2, batch_first=True))

        def run(x):
            y, weights = model(x, x, x)
            weights[:, None].broadcast_to((weights.shape[0], 2, *weights.shape[1:]))
            return y

        self.check(run, model, torch.randn(3, 17, 32))

    def test_function_with_positional_arguments(self):
        model, x = randomize(nn.MultiheadAttention(32, 2)), torch.randn(17, 3, 32)
        weights = (model.in_proj_weight, model.in_proj_bias, None, None, False, 0.0)
        out_proj = (model.out_proj.weight, model.out_proj.bias)

        def run(x):
            need_weights = False
            return F.multi_head_attention_forward(x, x, x, 32, 2, *weights, *out_proj, False, None, need_weights)[0]

        out, capture = compiled(run, x)
        assert len(capture.calls) == 1
        with torch.no_grad():
            assert sqnr_db(run(x), out) > 35

    def test_padding_mask(self):
        model, x = randomize(nn.MultiheadAttention(32, 2, batch_first=True)), torch.randn(3, 17, 32)
        padding = torch.zeros(3, 17, dtype=torch.bool)
        padding[1, 9:] = True
        capture = self.check(lambda x, p: model(x, x, x, key_padding_mask=p)[0], model, x, padding)
        assert capture.calls[0]["attn_mask"] is not None

    def test_any_batch_size_and_int8_linears(self):
        model = randomize(nn.MultiheadAttention(32, 2, batch_first=True))
        options = {"attention": VARIANT, "linear": "int8_dynamic"}
        run = torch.compile(lambda x: model(x, x, x)[0], backend="qframework", options=options, fullgraph=True)
        with torch.no_grad():
            for batch in (2, 3, 5):
                x = torch.randn(batch, 17, 32)
                assert sqnr_db(model(x, x, x)[0], run(x)) > 25

    @pytest.mark.parametrize("average", [True, False])
    def test_weights_that_are_read(self, average):
        model, x = randomize(nn.MultiheadAttention(32, 2, batch_first=True)), torch.randn(3, 17, 32)
        out, capture = compiled(lambda x: model(x, x, x, average_attn_weights=average), x)
        assert not capture.calls  # of quantized attention
        with torch.no_grad():
            torch.testing.assert_close(out, model(x, x, x, average_attn_weights=average))

    def test_int8_linears_where_weights_are_read(self):
        model, x = randomize(nn.MultiheadAttention(32, 2, batch_first=True)), torch.randn(3, 17, 32)
        run = torch.compile(model, backend="qframework", options={"linear": "int8_dynamic"}, fullgraph=True)
        with torch.no_grad():
            for exact, found in zip(model(x, x, x), run(x, x, x), strict=True):
                assert 20 < sqnr_db(exact, found) < 60

    @pytest.mark.parametrize("frozen", [False, True])
    def test_int8_linears_of_another_tensor(self, frozen):
        """The weight of queries, and that of keys and values, are rows of one parameter."""
        model = randomize(nn.MultiheadAttention(32, 2, batch_first=True))
        x, other = torch.randn(3, 17, 32), torch.randn(3, 9, 32)
        options = {"linear": "int8_dynamic", "freeze_weights": frozen}
        report = qframework.explain(model, (x, other, other), options=options)
        linears = [layer for layer in report.layers if layer.kind == "linear"]
        assert [layer.name for layer in linears] == ["in_proj", "in_proj", "out_proj"]
        assert all(layer.lowered for layer in linears)
        run = torch.compile(model, backend="qframework", options=options, fullgraph=True)
        with torch.no_grad():
            assert sqnr_db(model(x, other, other)[0], run(x, other, other)[0]) > 25
            model.in_proj_weight.mul_(-1.5)
            assert (sqnr_db(model(x, other, other)[0], run(x, other, other)[0]) > 25) is not frozen

    @pytest.mark.parametrize("fast_path", [True, False])
    def test_encoder_layer(self, fast_path):
        model, x = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval(), torch.randn(3, 17, 32)
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(fast_path)
        try:
            _, capture = compiled(lambda x: model(x), x)
        finally:
            torch.backends.mha.set_fastpath_enabled(before)
        (report,) = capture.attention
        assert report.lowered

    def test_gradients(self):
        model, x = randomize(nn.MultiheadAttention(32, 2, batch_first=True)), torch.randn(3, 17, 32)
        gradients = []
        for run in (model, torch.compile(model, backend="qframework", options={"attention": "off"})):
            model.zero_grad()
            run(x, x, x)[0].square().sum().backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        for wanted, got in zip(*gradients, strict=True):  # sums of some 50 products, in another order
            assert (got - wanted).abs().max() <= 2.0**-19 * wanted.abs().max()


class TestFusedEncoderLayer:
    """``nn.TransformerEncoder`` without gradients: Dynamo records PyTorch's fused layer."""

    @pytest.mark.parametrize("norm_first", [True, False])
    @pytest.mark.parametrize("activation", ["relu", "gelu"])
    def test_all_layers_run_in_int8(self, norm_first, activation):
        layer = nn.TransformerEncoderLayer(
            32, 2, 48, batch_first=True, norm_first=norm_first, activation=activation, layer_norm_eps=0.1
        )
        model = randomize(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).eval()
        capture = Capture()
        capture.options = BackendOptions(attention=VARIANT, linear="int8_dynamic")
        run = torch.compile(model, backend=capture, fullgraph=True)
        with torch.no_grad():
            for batch in (2, 3):
                x = torch.randn(batch, 17, 32)
                assert sqnr_db(model(x), run(x)) > 30
        names = {report.name for report in capture.reports[-1] if report.lowered and report.kind == "linear"}
        linears = ("self_attn.in_proj", "self_attn.out_proj", "linear1", "linear2")
        assert names == {f"layers.{i}.{name}" for i in range(2) for name in linears}
        assert len(capture.calls) == 2

    @pytest.mark.parametrize("kinds", ["padding", "causal", "padding and causal", "added"])
    def test_masks(self, kinds):
        """Padding, which keys a query sees, both, and numbers that are added, with which PyTorch's layer gives NaN."""
        model = randomize(nn.TransformerEncoderLayer(32, 2, 48, batch_first=True)).eval()
        padding = torch.arange(17) >= torch.tensor([17, 12])[:, None]
        masks = {"src_key_padding_mask": padding} if "padding" in kinds else {}
        masks |= {"src_mask": torch.ones(17, 17).triu(1).bool()} if "causal" in kinds else {}
        masks |= {"src_mask": -torch.rand(17, 17)} if kinds == "added" else {}
        x, capture = torch.randn(2, 17, 32), Capture()
        capture.options = BackendOptions(attention=VARIANT, linear="int8_dynamic")
        run = torch.compile(model, backend=capture, fullgraph=True)
        before = torch.backends.mha.get_fastpath_enabled()
        with torch.no_grad():
            out = run(x, **masks)
            assert "_transformer_encoder_layer_fwd" not in capture.names()
            try:
                torch.backends.mha.set_fastpath_enabled(False)
                expected, unmasked = model(x, **masks), model(x)
            finally:
                torch.backends.mha.set_fastpath_enabled(before)
        seen = ~padding if "padding" in kinds else ...
        assert sqnr_db(expected[seen], out[seen]) > 30
        assert sqnr_db(expected[seen], unmasked[seen]) < 25
        assert sum(report.lowered for report in capture.reports[-1] if report.kind == "linear") == 4
        assert len(capture.calls) == 1
