"""Linears with one input become one product: the same results, current biases, and nothing that reads other strides."""

from __future__ import annotations

import copy

import pytest
import torch
from lowered_models import converted
from torch import nn
from torch.fx import GraphModule
from torch.nn.functional import linear, scaled_dot_product_attention

from qframework.backend import linear_gain, passes
from qframework.backend.compile import run_passes
from qframework.backend.lowering import Lowering
from qframework.backend.merge_linears import merge_linears
from qframework.backend.options import BackendOptions
from qframework.graph.nodes import fake_value
from qframework.numerics import sqnr_db
from qframework.quantizer import QuantizationConfig, dynamic_int8, static_attention, static_int8

DECOMPOSED = torch.ops.quantized_decomposed
INT8_LINEAR = torch.ops.qframework.int8_linear.default
FROZEN = {"linear": "int8_dynamic", "freeze_weights": True}


@pytest.fixture(autouse=True)
def no_grad(fresh_dynamo):
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Attention(nn.Module):
    """Grouped heads, and a key projection without a bias."""

    def __init__(self, heads: int = 4, key_heads: int = 2, dim: int = 32, bias: bool = True) -> None:
        super().__init__()
        self.heads, self.key_heads, self.width = heads, key_heads, dim // heads
        self.q = nn.Linear(dim, dim, bias=bias)
        self.k = nn.Linear(dim, key_heads * self.width, bias=False)
        self.v = nn.Linear(dim, key_heads * self.width, bias=bias)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (part(x).view(*x.shape[:2], -1, self.width).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = scaled_dot_product_attention(q, k, v, enable_gqa=self.heads != self.key_heads)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Reads(nn.Module):
    """Two linears of one input, and what reads them."""

    def __init__(self, read) -> None:
        super().__init__()
        self.a, self.b, self.read = nn.Linear(32, 24), nn.Linear(32, 24), read

    def forward(self, x):
        return self.read(self.a(x), self.b(x), x)


def lowered(model, x, options=FROZEN, merged=True, dynamic=False, reset=True):
    """The lowered graphs, run without Inductor; and what to call."""
    found = []

    def backend(gm, inputs):
        lowering = Lowering.of(gm, inputs, BackendOptions(**options))
        run_passes(lowering)
        found.append(gm)

        def run(*args):
            for check in lowering.checks:
                check(args)
            return gm(*args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        if not merged:
            patch.setattr(passes, "LOWERING", tuple(each for each in passes.LOWERING if each is not merge_linears))
        if reset:
            torch._dynamo.reset()
        model = model if isinstance(model, GraphModule) else model.eval()
        compiled = torch.compile(model, backend=backend, dynamic=dynamic)
        compiled(x)
    return found, compiled


def products(graphs):
    return sum(node.target is INT8_LINEAR for gm in graphs for node in gm.graph.nodes)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projections_are_one_product_with_the_same_result(bias, dynamic, dtype):
    model = nn.Sequential(Attention(bias=bias), Attention(4, 4, bias=bias)).to(dtype)
    x = torch.randn(2, 7, 32, dtype=dtype)
    apart, run_apart = lowered(model, x, merged=False, dynamic=dynamic)
    expected = run_apart(x)
    together, run = lowered(model, x, dynamic=dynamic)
    assert (products(apart), products(together)) == (8, 4)
    assert torch.equal(run(x), expected)
    int8 = [buffer for gm in together for buffer in gm.buffers() if buffer.dtype == torch.int8]
    assert sorted(len(buffer) for buffer in int8) == [32, 32, 64, 96], "the separate weights are still held"


def test_inductor_compiles_the_same():
    model, x = Attention().eval(), torch.randn(2, 7, 32)
    expected = lowered(model, x, merged=False)[1](x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="qframework", options=FROZEN)(x)
    assert sqnr_db(expected, compiled) > 50, "the same integers but for a few ties"


def test_biases_follow_writes_and_new_parameters():
    model, x = Attention(), torch.randn(2, 7, 32)
    _, run = lowered(model, x)
    before = run(x)
    model.q.bias.add_(1.0)
    model.v.bias.copy_(torch.randn_like(model.v.bias))
    after = run(x)
    assert not torch.allclose(before, after, atol=1e-2)
    assert torch.equal(after, lowered(model, x, merged=False)[1](x))


@pytest.mark.parametrize("how", ["copy", "index", "item"])
def test_projections_that_write_a_cache_are_one_product(how):
    """As in decoding, where keys and values of the new token go into memory of their own."""

    class Cached(Attention):
        def __init__(self):
            super().__init__()
            for name in ("keys", "values"):
                self.register_buffer(name, torch.randn(3, self.key_heads, 5, self.width))
            self.register_buffer("place", torch.tensor([4]))

        def write(self, cache, new):
            if how == "copy":
                cache[:, :, 4:].copy_(new)
            elif how == "index":
                cache.index_copy_(2, self.place, new)
            else:
                cache[:, :, 4:] = new

        def forward(self, x):
            q, k, v = (part(x).view(3, 1, -1, self.width).transpose(1, 2) for part in (self.q, self.k, self.v))
            self.write(self.keys, k.cos())
            self.write(self.values, v)
            y = scaled_dot_product_attention(q, self.keys, self.values, enable_gqa=True)
            return self.out(y.transpose(1, 2).flatten(2))

    model, x = Cached(), torch.randn(3, 1, 32)
    apart, together = copy.deepcopy(model), copy.deepcopy(model)
    expected = lowered(apart, x, merged=False)[1](x)
    graphs, run = lowered(together, x)
    assert products(graphs) == 2
    assert torch.equal(run(x), expected)
    assert torch.equal(apart.keys, together.keys)
    assert torch.equal(apart.values, together.values)
    assert not torch.equal(model.values, together.values)


READS = {
    "an activation, which is an epilogue": lambda a, b, x: torch.relu(a) * b.sin(),
    "a sum, which is an epilogue": lambda a, b, x: (a + x[..., :24]) * b.sin(),
    "the caller": lambda a, b, x: (a, b),
    "a view that needs contiguous memory": lambda a, b, x: a.view(-1) + b.view(-1),
    "strides": lambda a, b, x: a.as_strided((2, 24), (24, 1)) + b.as_strided((2, 24), (24, 1)),
    "a write": lambda a, b, x: a.sin().add_(b) + a.mul_(2),
}


@pytest.mark.parametrize("read", READS)
def test_what_needs_its_own_result_keeps_it(read):
    model, x = Reads(READS[read]), torch.randn(2, 7, 32)
    graphs, run = lowered(model, x)
    assert products(graphs) == 2
    got, expected = run(x), lowered(model, x, merged=False)[1](x)
    for mine, theirs in zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]:
        assert torch.equal(mine, theirs)


def test_linears_that_stay_apart_keep_their_recorded_strides():
    model, x = Reads(lambda a, b, x: a.sin() * b.as_strided((2, 7, 24), (168, 24, 1))), torch.randn(2, 7, 32)
    (gm,), _ = lowered(model, x)
    values = [fake_value(node) for node in gm.graph.nodes if node.target is INT8_LINEAR]
    assert [value.stride() for value in values] == [(168, 24, 1)] * 2


def test_results_that_only_float_operations_read_are_merged():
    model, x = Reads(lambda a, b, x: a.sin() * b + a.reshape(2, 7, 24)), torch.randn(2, 7, 32)
    graphs, run = lowered(model, x)
    assert products(graphs) == 1
    assert torch.equal(run(x), lowered(model, x, merged=False)[1](x))


class Repeated(nn.Module):
    """A layer that is called twice, and one with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 24), nn.Linear(32, 24, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.a(x).sin() * self.a(x).cos() * self.b(x).exp()


class WritesItsBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 24), nn.Linear(32, 24)

    def forward(self, x):
        y = self.a(x).sin()
        self.b.bias.add_(1.0)
        return y * self.b(x).cos()


@pytest.mark.parametrize(("kind", "number"), [(Repeated, 1), (WritesItsBias, 2)])
def test_layers_that_share_or_write_their_parameters(kind, number):
    model, x = kind(), torch.randn(2, 7, 32)
    other = copy.deepcopy(model)
    graphs, run = lowered(model, x)
    assert products(graphs) == number
    results = [run(x) for _ in range(2)]
    run = lowered(other, x, merged=False)[1]
    assert all(torch.equal(result, run(x)) for result in results)


def test_weights_that_are_not_frozen_stay_apart():
    model, x = Attention(), torch.randn(2, 7, 32)
    assert products(lowered(model, x, {"linear": "int8_dynamic"})[0]) == 4


def test_linears_of_different_inputs_stay_apart():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 24), nn.Linear(32, 24)

        def forward(self, x):
            return self.a(x.sin()) * self.b(x.cos())

    assert products(lowered(Two(), torch.randn(2, 7, 32))[0]) == 2


def test_a_number_whose_buffer_was_freed_gets_another():
    gm = torch.fx.symbolic_trace(nn.Identity())
    scales = Lowering.of(gm).scales
    scales.remove(scales.node(0.5, torch.device("cpu")))
    again = scales.node(0.5, torch.device("cpu"))
    assert again in gm.graph.nodes
    assert getattr(gm, again.target).item() == 0.5


# Models that PT2E converted, whose weights remain theirs ---------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch):
    """Estimates of an H100, for tensors on the CPU."""
    monkeypatch.setattr(linear_gain, "_multiprocessors", lambda device: 132)


CONFIGURATIONS = {
    "static": static_int8(),
    "one scale for each weight": static_int8(weight="per_tensor"),
    "a scale for each token": static_int8(activation="per_token"),
    "zero points": static_int8(symmetric=False),
    "dynamic": dynamic_int8(),
    "static attention": QuantizationConfig(static_int8(), static_attention()),
}


def static_model(configuration="static", model=None, x=None):
    """A converted model with biases that matter, and its input."""
    model = model or nn.Sequential(Attention(), Attention(4, 4))
    x = torch.randn(2, 7, 32) if x is None else x
    for number, parameter in enumerate(model.parameters()):
        parameter.mul_(1 + number % 3)
    return converted(model, x, CONFIGURATIONS[configuration]), x


@pytest.mark.usefixtures("hopper")
class TestConverted:
    @pytest.mark.parametrize("configuration", CONFIGURATIONS)
    def test_projections_are_one_product_with_the_same_result(self, configuration):
        model, x = static_model(configuration)
        apart, run_apart = lowered(model, x, {}, merged=False)
        expected = run_apart(x)
        together, run = lowered(model, x, {})
        assert (products(apart), products(together)) == (8, 4)
        assert torch.equal(run(x), expected)

    def test_the_model_keeps_its_own_tensors(self):
        model, x = static_model()
        before = {name: (tensor, tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
        lowered(model, x, {})
        for name, tensor in model.state_dict().items():
            _, address, values = before[name]
            assert tensor.data_ptr() == address
            assert torch.equal(tensor, values)

    def test_other_devices_need_no_copy(self, monkeypatch):
        monkeypatch.setattr(linear_gain, "_multiprocessors", lambda device: None)
        model, x = static_model()
        graphs, _ = lowered(model, x, {})
        assert products(graphs) == 8
        assert not any(buffer.dtype == torch.int8 for gm in graphs for buffer in gm.buffers())

    def test_unused_buffers_are_freed(self):
        model, x = static_model("zero points")
        graphs, _ = lowered(model, x, {})
        assert all(node.users for gm in graphs for node in gm.graph.find_nodes(op="get_attr"))

    @pytest.mark.parametrize("assign", [False, True])
    def test_another_state_dict_is_seen(self, assign):
        (model, x), (other, _) = static_model(), static_model()
        _, run = lowered(model, x, {})
        before = run(x)
        model.load_state_dict(other.state_dict(), assign=assign)
        after = run(x)
        assert not torch.allclose(before, after, atol=1e-2)
        assert torch.equal(after, lowered(model, x, {}, merged=False)[1](x))

    @pytest.mark.parametrize("configuration", ["static", "zero points"])
    def test_a_write_to_one_tensor_is_seen(self, configuration):
        model, x = static_model(configuration, Attention())
        other = copy.deepcopy(model)
        run, run_apart = lowered(model, x, {})[1], lowered(other, x, {}, merged=False, reset=False)[1]
        ours, theirs = ([*each.named_buffers(), *each.named_parameters()] for each in (model, other))
        written = 0
        for (name, tensor), (_, same) in zip(ours, theirs, strict=True):
            if not any(part in name for part in ("frozen_param", "weight_scale", "bias")):
                continue
            before = run(x)
            for each in (tensor, same):
                each.copy_(each.flip(0) if each.dtype == torch.int8 else each * 2)
            after = run(x)
            assert not torch.equal(before, after), name
            assert torch.equal(after, run_apart(x)), name
            written += 1
        assert written == 4 + 4 + 3

    def test_inductor_compiles_the_same(self):
        model, x = static_model()
        expected = lowered(model, x, {}, merged=False)[1](x)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="qframework")
        assert sqnr_db(expected, compiled(x)) > 40, "the same integers but for a few ties"
        weight = dict(model.named_buffers())["_frozen_param2"]
        weight.copy_(weight.flip(0))
        changed = compiled(x)
        assert sqnr_db(expected, changed) < 20
        assert sqnr_db(lowered(model, x, {}, merged=False)[1](x), changed) > 40

    def test_weights_that_take_long_to_read_stay_apart(self):
        class Long(Reads):
            def __init__(self, outputs):
                super().__init__(lambda a, b, x: a.sin() * b.cos())
                self.a, self.b = nn.Linear(2048, outputs), nn.Linear(2048, outputs)

        for outputs, number in ((768, 1), (1024, 2)):
            model, x = static_model(model=Long(outputs), x=torch.randn(2, 7, 2048))
            assert products(lowered(model, x, {})[0]) == number

    @pytest.mark.parametrize("read", ["an activation, which is an epilogue", "a sum, which is an epilogue"])
    def test_different_epilogues_stay_apart(self, read):
        model, x = static_model(model=Reads(READS[read]))
        assert products(lowered(model, x, {})[0]) == 2

    def test_results_of_different_dtypes_stay_apart(self):
        class Mixed(nn.Module):
            """The result of one of two linears is INT8, which the next linear reads."""

            def __init__(self):
                super().__init__()
                self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))

            def forward(self, x):
                return self.c(self.a(x)) + self.b(x).sin()

        model, x = static_model(model=Mixed())
        assert products(lowered(model, x, {})[0]) == 3

    @pytest.mark.parametrize(("configuration", "number"), [("static", 3), ("zero points", 4)])
    def test_int8_results_with_zero_points_stay_apart(self, configuration, number):
        class Chains(nn.Module):
            """Two linears whose INT8 results have a scale and a zero point each."""

            def __init__(self):
                super().__init__()
                self.a, self.b, self.c, self.d = (nn.Linear(32, 32) for _ in range(4))

            def forward(self, x):
                return self.c(self.a(x)) + self.d(self.b(x)).sin()

        model, x = static_model(configuration, Chains())
        graphs, run = lowered(model, x, {})
        assert products(graphs) == number
        assert torch.equal(run(x), lowered(model, x, {}, merged=False)[1](x))

    def test_tensors_that_are_no_inputs_of_the_graph_are_not_copied(self):
        """They could be replaced unseen."""
        model, _ = static_model()
        lowering = Lowering.of(model)
        run_passes(lowering)
        assert products([model]) == 8

    @pytest.mark.parametrize(("outputs", "number"), [(20, 1), (22, 2)])
    def test_slices_begin_at_multiples_of_16_bytes(self, outputs, number):
        model = Reads(lambda a, b, x: a.sin() * b[..., :1])
        model.b = nn.Linear(32, outputs)
        model, x = static_model(model=model)
        assert products(lowered(model, x, {})[0]) == number

    def test_keys_and_values_of_all_layers_are_pairs(self):
        class Layers(nn.Module):
            """A decoder's layers that attend to one encoder."""

            def __init__(self):
                super().__init__()
                self.linears = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

            def forward(self, x):
                y = x.cos()
                for q, k, v in zip(*[iter(self.linears)] * 3, strict=True):
                    y = y + (q(y) * k(x)).sin() * v(x)
                return y

        model, x = static_model(model=Layers())
        graphs, run = lowered(model, x, {})
        assert products(graphs) == 4
        assert torch.equal(run(x), lowered(model, x, {}, merged=False)[1](x))


INT8 = (0, -127, 127, torch.int8)


class Direct(nn.Module):
    """Two linears as PT2E leaves them, between which the model may write; its input is int8."""

    def __init__(self, write=None) -> None:
        super().__init__()
        self.write = write or (lambda model, x: None)
        for name in "ab":
            self.register_buffer(f"{name}_weight", torch.randint(-127, 128, (32, 32), dtype=torch.int8))
            self.register_buffer(f"{name}_scale", torch.rand(32) + 0.1)
            self.register_buffer(f"{name}_bias", torch.randn(32))
        self.register_buffer("zeros", torch.zeros(32, dtype=torch.int64))

    def read(self, name, x):
        weight, scale, bias = (getattr(self, f"{name}_{part}") for part in ("weight", "scale", "bias"))
        weight = DECOMPOSED.dequantize_per_channel.default(weight, scale, self.zeros, 0, *INT8[1:])
        return linear(DECOMPOSED.dequantize_per_tensor.default(x, 0.1, *INT8), weight, bias)

    def forward(self, x):
        y = self.read("a", x).sin()
        self.write(self, x)
        return y * self.read("b", x).cos()


WRITES = {
    "weight": lambda model, x: model.b_weight.neg_(),
    "scale": lambda model, x: model.b_scale.mul_(2.0),
    "bias": lambda model, x: model.b_bias.add_(1.0),
    "input": lambda model, x: x.neg_(),
}


@pytest.mark.usefixtures("hopper")
class TestWritesOfTheModel:
    def int8_input(self):
        return torch.randint(-127, 128, (2, 7, 32), dtype=torch.int8)

    def test_nothing_written(self):
        assert products(lowered(Direct(), self.int8_input(), {})[0]) == 1

    @pytest.mark.parametrize("write", WRITES)
    def test_what_the_model_writes_is_not_copied(self, write):
        model, x = Direct(WRITES[write]), self.int8_input()
        other, same = copy.deepcopy(model), x.clone()
        graphs, run = lowered(model, x, {})
        assert products(graphs) == 2
        results = [run(x) for _ in range(2)]
        run = lowered(other, same, {}, merged=False)[1]
        assert all(torch.equal(result, run(same)) for result in results)

    def test_tensors_whose_writes_are_not_counted_are_not_copied(self):
        with torch.inference_mode():
            model = Direct()
        assert products(lowered(model, self.int8_input(), {})[0]) == 2
