"""options={"linear": "int8_dynamic"}: float models are quantized when they are compiled."""

from __future__ import annotations

import itertools
import operator

import pytest
import timm
import torch
from lowered_models import Block, example, without_inductor
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from qframework import numerics
from qframework.backend import float_linear, keep_quantize
from qframework.backend.compile import fallbacks, lower
from qframework.backend.options import BackendOptions
from qframework.graph.nodes import fake_value

DYNAMIC = BackendOptions(linear="int8_dynamic")


def eager_backend(record=None):
    """A backend without Inductor: runs the lowered graph in eager mode."""

    def backend(gm, example_inputs):
        reports = lower(gm, example_inputs, DYNAMIC)
        if record is not None:
            record.extend(reports)
        return gm.forward

    return backend


def quantizations(gm):
    """The nodes that quantize at each call: activations and weights."""
    return [node for node in gm.graph.nodes if node.target is torch.ops.qframework.dynamic_quantize.default]


def first_weight(gm):
    return next(n for n in gm.graph.nodes if n.op == "placeholder" and isinstance(fake_value(n), nn.Parameter))


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.usefixtures("fresh_dynamo", "no_grad")
class TestLowering:
    def test_every_linear_is_quantized(self):
        model, x, reports = Block().eval(), example(), []
        y = torch.compile(model, backend=eager_backend(reports), fullgraph=True)(x)
        assert [(r.name, r.lowered) for r in reports] == [("fc1", True), ("fc2", True)]
        assert numerics.sqnr_db(model(x), y) > 30

    @pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
    @pytest.mark.parametrize(
        "matrix",
        [
            lambda w: w.reshape(32, 32),
            lambda w: w.reshape((32, 32)),
            lambda w: w.reshape(shape=(32, 32)),
            lambda w: torch.reshape(w, shape=(32, 32)),
        ],
        ids=["sizes", "shape", "method, by name", "function, by name"],
    )
    def test_a_weight_that_is_reshaped(self, matrix, frozen):
        """One that is square would also be a weight if it were transposed."""
        weight, x = nn.Parameter(torch.randn(32, 32), requires_grad=False), example(32)
        options = {"linear": "int8_dynamic", "freeze_weights": frozen}
        kept = []
        y = torch.compile(lambda x: F.linear(x, matrix(weight)), backend=without_inductor(kept, **options))(x)
        assert any(node.target is torch.ops.qframework.int8_linear.default for node in kept[0].graph.nodes)
        assert numerics.sqnr_db(F.linear(x, weight), y) > 30

    def test_result_is_that_of_the_formula(self):
        layer, x = nn.Linear(32, 16).eval(), example()
        y = torch.compile(layer, backend=eager_backend())(x)
        scale = x.abs().amax(-1, keepdim=True) / 127
        w_scale = layer.weight.abs().amax(1, keepdim=True) / 127
        a, b = torch.round(x / scale), torch.round(layer.weight / w_scale)
        exact = (a.double() * scale) @ (b.double() * w_scale).t() + layer.bias
        torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)

    def test_follows_changed_weights(self):
        model, x = Block().eval(), example()
        compiled = torch.compile(model, backend=eager_backend())
        compiled(x)
        model.load_state_dict(Block().state_dict())
        assert numerics.sqnr_db(model(x), compiled(x)) > 30
        model.fc1.weight.mul_(-3)
        assert numerics.sqnr_db(model(x), compiled(x)) > 30

    def test_tied_weights_are_quantized_once(self):
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).eval()
        model[2].weight = model[0].weight
        graphs = []

        def backend(gm, example_inputs):
            lower(gm, example_inputs, DYNAMIC)
            graphs.append(gm)
            return gm.forward

        x = example()
        y = torch.compile(model, backend=backend)(x)
        assert [node.args[0] for node in quantizations(graphs[0])].count(first_weight(graphs[0])) == 1
        assert numerics.sqnr_db(model(x), y) > 30

    @pytest.mark.parametrize(
        "write", [lambda x: x.add_(3), lambda x: x.view(-1).mul_(2), lambda x: F.relu(x, inplace=True)]
    )
    def test_an_input_changed_between_two_linears_is_quantized_again(self, write):
        first, second = nn.Linear(32, 16).eval(), nn.Linear(32, 16).eval()

        def run(x):
            x = x * 1.0
            a = first(x)
            write(x)
            return a, second(x)

        x = example()
        for value, reference in zip(torch.compile(run, backend=eager_backend())(x), run(x), strict=True):
            assert numerics.sqnr_db(reference, value) > 30

    def test_an_in_place_sum_changes_every_alias(self):
        layer = nn.Linear(32, 32).eval()

        def run(x):
            x = x * 1.0
            other_name = x
            x += layer(x)
            return other_name

        x = example()
        y = torch.compile(run, backend=eager_backend())(x)
        assert numerics.sqnr_db(run(x), y) > 30

    def test_linears_of_one_input_share_its_quantization(self):
        q, k = nn.Linear(32, 16).eval(), nn.Linear(32, 16).eval()
        graphs = []

        def backend(gm, example_inputs):
            lower(gm, example_inputs, DYNAMIC)
            graphs.append(gm)
            return gm.forward

        torch.compile(lambda x: q(x) + k(x), backend=backend)(example())
        assert len(quantizations(graphs[0])) == 3  # the input once, and two weights

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision(self, dtype):
        model, x = Block().eval().to(dtype), example().to(dtype)
        y = torch.compile(model, backend=eager_backend())(x)
        assert y.dtype == dtype
        assert numerics.sqnr_db(model(x), y) > 30

    def test_autocast(self):
        model, x = Block().eval(), example()

        def run(x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(x)

        y = torch.compile(run, backend=eager_backend(), fullgraph=True)(x)
        assert y.dtype == run(x).dtype
        assert numerics.sqnr_db(model(x), y) > 30

    def test_a_weight_that_is_an_input_stays_in_float(self, caplog):
        reports = []
        x, w = example(), torch.randn(8, 32)
        before = sum(fallbacks.values())
        y = torch.compile(lambda x, w: F.linear(x, w), backend=eager_backend(reports))(x, w)
        assert torch.equal(y, F.linear(x, w))
        assert "computed in the graph or passed in" in reports[0].reason
        assert sum(fallbacks.values()) == before + 1
        assert "stays in float" in caplog.text

    @pytest.mark.parametrize("features", [131_071, 131_072])
    def test_a_layer_whose_sums_may_overflow_stays_in_float(self, features, caplog):
        reports = []
        model, x = nn.Sequential(nn.Linear(features, 2, bias=False), nn.Linear(2, 2)), torch.ones(1, features)
        nn.init.ones_(model[0].weight)
        before = sum(fallbacks.values())
        y = torch.compile(model, backend=eager_backend(reports))(x)
        torch.testing.assert_close(y, model(x), rtol=0.02, atol=0.0)  # the small layer's rounding
        assert [report.lowered for report in reports] == [features == 131_071, True]
        assert sum(fallbacks.values()) == before + (features == 131_072)
        if features == 131_072:
            reason = "it must have at most 131071 input features, got 131072: its INT32 sums could overflow"
            assert reports[0].reason == reason
            assert f"layer '0' stays in float: {reason}" in caplog.text

    def test_one_compilation_serves_every_batch_size(self):
        counter = CompileCounterWithBackend("eager")
        counter.backend = eager_backend()
        compiled = torch.compile(Block().eval(), backend=lambda gm, ex: (counter(gm, ex), eager_backend()(gm, ex))[1])
        for batch in (4, 5, 6, 7, 8):
            compiled(torch.randn(batch, 7, 32))
        assert counter.frame_count == 2  # the first size, then any size

    def test_training_mode_dropout_stays(self):
        model, x = Block().train(), example()
        graphs = []

        def backend(gm, example_inputs):
            lower(gm, example_inputs, DYNAMIC)
            graphs.append(gm)
            return gm.forward

        torch.compile(model, backend=backend)(x)
        assert sum(node.target is F.dropout for node in graphs[0].graph.nodes) == 2


@pytest.mark.usefixtures("fresh_dynamo", "no_grad")
class TestLeftInFloat:
    """Layers that no INT8 operator supports are compiled in float, with a reason in the report."""

    @pytest.mark.parametrize(
        ("run", "reason"),
        [
            (lambda layer, x: torch.vmap(layer)(x), "torch.vmap"),
            (lambda layer, x: torch.func.jvp(layer, (x,), (x,))[1], "computes derivatives"),
            (lambda layer, x: torch.func.grad(lambda r: F.gelu(layer(x) + r).sum())(x[..., :16] * 1.0), "derivatives"),
            (lambda layer, x: F.linear(x, layer.weight, layer.one), "shape (1,)"),
            (lambda layer, x: F.linear(x, layer.weight, layer.table), "shape (2, 7, 16)"),
            (lambda layer, x: layer(nested(x)).values(), "NestedTensor"),
            (lambda layer, x: layer.double()(x.double()), "float64"),
            (lambda layer, x: F.linear(x, layer.bias.new_parameter), "got (32,)"),
        ],
        ids=["vmap", "jvp", "grad", "bias of one", "bias for each row", "nested", "float64", "vector"],
    )
    def test_layer_is_left_whole(self, run, reason):
        layer, x, reports = nn.Linear(32, 16).eval(), example(), []
        layer.bias.new_parameter = nn.Parameter(torch.randn(32))
        layer.one, layer.table = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(2, 7, 16))
        y = torch.compile(lambda x: run(layer, x), backend=eager_backend(reports))(x)
        assert [(r.lowered, r.fallback) for r in reports] == [(False, True)]
        assert reason in reports[0].reason
        torch.testing.assert_close(y, run(layer, x))

    def test_a_linear_inside_a_higher_order_operator_is_reported(self):
        layer, x, reports = nn.Linear(32, 16).eval(), example(), []

        def run(x):
            return torch.cond(x.sum() > 0, lambda x: layer(x), lambda x: layer(x) * 2, (x,))

        y = torch.compile(run, backend=eager_backend(reports), fullgraph=True)(x)
        assert [(r.lowered, r.fallback) for r in reports] == [(False, True)] * 2
        assert "higher-order" in reports[0].reason
        torch.testing.assert_close(y, run(x))

    def test_attention_inside_vmap(self):
        q, reports = torch.randn(3, 2, 8, 16), []

        def backend(gm, example_inputs):
            reports.extend(lower(gm, example_inputs, BackendOptions(attention="sage_b")))
            return gm.forward

        y = torch.compile(torch.vmap(lambda q: F.scaled_dot_product_attention(q, q, q)), backend=backend)(q)
        assert [(r.lowered, r.fallback) for r in reports] == [(False, True)]
        assert "torch.vmap" in reports[0].reason
        torch.testing.assert_close(y, F.scaled_dot_product_attention(q, q, q))

    @pytest.mark.parametrize("name", ["token", "avg", "attention"])
    def test_a_model_inside_vmap(self, name):
        """Passes that move or expand nodes leave these alone: nothing computes with what ``torch.vmap`` wrapped."""
        reports = []
        if name == "attention":
            attention, x = nn.MultiheadAttention(16, 2, batch_first=True).eval(), torch.randn(2, 5, 16)
            model = lambda x: attention(x, x, x)[0]  # noqa: E731
        else:
            model, x = timm.create_model("test_vit", global_pool=name).eval(), torch.randn(2, 3, 160, 160)
        with torch.no_grad():
            y = torch.compile(torch.vmap(lambda one: model(one[None])[0]), backend=eager_backend(reports))(x)
            torch.testing.assert_close(y, model(x))
        assert not any(r.lowered for r in reports)
        if name == "attention":  # one node, which holds its linears too
            assert [(r.kind, r.operator) for r in reports] == [
                (kind, "multi_head_attention_forward") for kind in ("attention", "linear")
            ]
            assert all("belongs to torch.vmap" in r.reason for r in reports)

    def test_attention_beside_a_derivative_is_reported(self):
        q, reports = torch.randn(2, 2, 8, 16), []

        def run(q):
            return torch.func.grad(lambda q: F.scaled_dot_product_attention(q, q, q).sum())(q)

        def backend(gm, example_inputs):
            reports.extend(lower(gm, example_inputs, BackendOptions(attention="sage_b")))
            return gm.forward

        torch.testing.assert_close(torch.compile(run, backend=backend)(q), run(q))
        assert [(r.kind, r.lowered, r.fallback) for r in reports] == [("attention", False, True)]
        assert "computes derivatives" in reports[0].reason

    @pytest.mark.parametrize(
        ("add", "dtype"),
        [
            *itertools.product((operator.add, torch.add), (torch.float64, torch.complex64, torch.int64)),
            *itertools.product((operator.iadd,), (torch.float64, torch.int64)),  # in place, no complex number to a real
        ],
    )
    def test_a_sum_with_another_dtype_is_not_fused(self, add, dtype):
        layer, x, reports = nn.Linear(32, 16).eval(), example(), []
        other = torch.ones(2, 7, 16, dtype=dtype)

        def run(x):
            return add(F.relu(layer(x)), other)

        y = torch.compile(run, backend=eager_backend(reports))(x)
        assert reports[0].operator.startswith("qframework::int8_linear (relu)")
        assert y.dtype == run(x).dtype
        assert numerics.sqnr_db(run(x).abs(), y.abs()) > 30


@pytest.mark.usefixtures("fresh_dynamo", "no_grad")
class TestFewRows:
    """Where each call quantizes the weight, on a CPU without INT8 instructions."""

    @pytest.fixture(autouse=True)
    def rule(self, monkeypatch):
        monkeypatch.setattr(float_linear, "FEWEST_ROWS", 64)

    @staticmethod
    def lowered(monkeypatch, shape, product, options=DYNAMIC, dynamic=None):
        monkeypatch.setattr(float_linear, "cpu_implementation", lambda: product)
        reports = []

        def backend(gm, example_inputs):
            reports.extend(lower(gm, example_inputs, options))
            return gm.forward

        layer, x = nn.Linear(32, 16).eval(), torch.randn(*shape, 32)
        y = torch.compile(layer, backend=backend, dynamic=dynamic)(x)
        assert numerics.sqnr_db(layer(x), y) > 30
        (report,) = reports
        return report

    @pytest.mark.parametrize("dynamic", [None, True])
    def test_they_stay_in_float(self, monkeypatch, dynamic):
        report = self.lowered(monkeypatch, (3, 21), "multiply_add", dynamic=dynamic)
        assert not report.lowered
        assert not report.fallback
        assert report.reason.startswith("its input has 63 rows")
        assert "freeze_weights" in report.reason

    @pytest.mark.parametrize(
        ("shape", "product", "options"),
        [
            ((4, 16), "multiply_add", DYNAMIC),
            ((3, 21), "int_mm", DYNAMIC),
            ((3, 21), "multiply_add", BackendOptions(linear="int8_dynamic", freeze_weights=True)),
        ],
        ids=["64 rows", "INT8 instructions", "frozen"],
    )
    def test_others_are_quantized(self, monkeypatch, shape, product, options):
        assert self.lowered(monkeypatch, shape, product, options).lowered

    @pytest.mark.parametrize(("rows", "expected"), [(191, False), (192, True)])
    def test_weights_that_are_stored_transposed_need_more_rows(self, monkeypatch, rows, expected):
        monkeypatch.setattr(float_linear, "cpu_implementation", lambda: "multiply_add")
        reports = []

        def backend(gm, example_inputs):
            reports.extend(lower(gm, example_inputs, DYNAMIC))
            return gm.forward

        weight = nn.Parameter(torch.randn(32, 16))

        def run(x):
            return x @ weight

        torch.compile(run, backend=backend)(torch.randn(rows, 32))
        (report,) = reports
        assert report.lowered == expected
        assert expected or "pays from 192 rows" in report.reason

    @pytest.mark.parametrize("freeze_weights", [False, True])
    @pytest.mark.parametrize("shape", [(3, 21), (4, 512)])
    def test_all_stay_in_float_without_a_fast_product(self, monkeypatch, shape, freeze_weights):
        options = BackendOptions(linear="int8_dynamic", freeze_weights=freeze_weights)
        report = self.lowered(monkeypatch, shape, "float32", options)
        assert not report.lowered
        assert report.fallback
        assert "no INT8 product that is faster" in report.reason


class MixedChannels(nn.Module):
    """An MLP with a convolution along the tokens before its activation, as in PVT and SegFormer."""

    def __init__(self, norm=None):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)
        self.convolution, self.norm = nn.Conv1d(64, 64, 3, padding=1, groups=64), norm or nn.Identity()

    def forward(self, x):
        mixed = self.convolution(self.fc1(x).transpose(1, 2)).transpose(1, 2)
        return self.fc2(F.dropout(F.gelu(self.norm(mixed)).contiguous(), 0.1, self.training))


@pytest.mark.usefixtures("fresh_dynamo", "no_grad")
class TestQuantizationAlone:
    """On Hopper, the input of the second linear would be quantized by a kernel of its own."""

    @staticmethod
    def lowered(monkeypatch, model, chip=(9, 0), rows=14, longest=None):
        if longest is not None:
            monkeypatch.setattr(keep_quantize, "PAYS", {"gelu": (longest, 64)})
        monkeypatch.setattr(float_linear, "capability_of", lambda device: chip)
        monkeypatch.setattr(keep_quantize, "MANY_ROWS", rows)
        reports, x = [], example()
        y = torch.compile(model.eval(), backend=eager_backend(reports))(x)
        assert numerics.sqnr_db(model(x), y) > 30
        return {report.name: report for report in reports}

    def test_few_outputs_stay_in_float(self, monkeypatch):
        found = self.lowered(monkeypatch, Block())
        assert found["fc1"].lowered
        assert not found["fc2"].lowered
        assert not found["fc2"].fallback
        assert found["fc2"].reason.startswith("another INT8 layer writes its input")
        assert "this layer has 32" in found["fc2"].reason

    def test_long_rows_of_an_activation_stay_in_float(self, monkeypatch):
        monkeypatch.setattr(keep_quantize, "PAYS", {"gelu": (63, 64)})
        found = self.lowered(monkeypatch, MixedChannels())
        assert found["fc1"].lowered
        assert not found["fc2"].lowered
        assert "its input has long rows of 64 values, which a kernel of its own" in found["fc2"].reason

    @pytest.mark.parametrize("contiguous", [False, True])
    @pytest.mark.parametrize("values", [448, 449])
    def test_a_layer_over_many_tokens_stays_in_float(self, monkeypatch, values, contiguous):
        class OverTokens(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.mix = nn.LayerNorm(32), nn.Linear(7, 7)

            def forward(self, x):
                turned = self.norm(x).transpose(1, 2)
                return self.mix(turned.contiguous() if contiguous else turned).relu()

        monkeypatch.setattr(float_linear, "TURNED", values)
        found = self.lowered(monkeypatch, OverTokens())
        assert found["mix"].lowered == (values > 448)
        assert values > 448 or found["mix"].reason.startswith("its rows are columns of a tensor in memory")

    @pytest.mark.parametrize("turned", [False, True])
    def test_a_layer_behind_a_gate_over_tokens_stays_in_float(self, monkeypatch, turned):
        class Gated(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.mix, self.out = nn.LayerNorm(32), nn.Linear(7, 7), nn.Linear(32, 32)

            def forward(self, x):
                gate = self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
                return self.out(x * (gate if turned else gate.relu()))

        monkeypatch.setattr(float_linear, "TURNED", 448)
        assert self.lowered(monkeypatch, Gated())["out"].lowered != turned

    @pytest.mark.parametrize(
        ("model", "named"),
        [
            (Block(), {"chip": (8, 9)}),
            (Block(), {"chip": None}),
            (Block(), {"rows": 15}),
            (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 700)), {}),
            (nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)), {}),  # Inductor quantizes
            (MixedChannels(), {}),
            (MixedChannels(nn.LayerNorm(64)), {"longest": 63}),
        ],
        ids=[
            "another chip",
            "a CPU",
            "few rows",
            "many outputs",
            "a norm in between",
            "short rows of an activation",
            "an activation of a norm",
        ],
    )
    def test_others_are_quantized(self, monkeypatch, model, named):
        found = self.lowered(monkeypatch, model, **named)
        assert all(report.lowered for report in found.values())


def nested(x):
    return torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_graph_that_switches_gradients_off_and_on_compiles():
    layer = nn.Linear(32, 16).eval()

    def run(x):
        with torch.no_grad():
            mean = x.mean()
        return layer(x - mean)

    x = example()
    y = torch.compile(run, backend="qframework", options={"linear": "int8_dynamic"})(x)
    assert numerics.sqnr_db(run(x), y) > 30
    assert not y.requires_grad
