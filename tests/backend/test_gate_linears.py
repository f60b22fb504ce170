"""Which products of two linears become one operator on Hopper, and that results stay what they were."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from lowered_models import converted, count, targets
from torch import nn
from torch.nn import functional as F

import qframework
from qframework.backend import gate_linears
from qframework.backend.compile import lower
from qframework.backend.options import BackendOptions
from qframework.graph.nodes import fake_value
from qframework.kernels.linear.tile import COOPERATIVE
from qframework.quantizer import static_int8

_gated = torch.ops.qframework.int8_gated_linear.default
_int8_linear = torch.ops.qframework.int8_linear.default


class Gated(nn.Module):
    """LLaMA's MLP."""

    def __init__(self, activation=F.silu, bias: bool = False, width: int = 32, inner: int = 48) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=bias) for _ in range(2))
        self.down, self.activation = nn.Linear(inner, width), activation

    def forward(self, x):
        return x + self.down(self.activation(self.gate(x)) * self.up(x))


class Packed(nn.Module):
    """ModernBERT's, Phi's and timm's: both weights are one."""

    def __init__(self, part, gate_first: bool = True, inner: int = 48) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, 2 * inner), nn.Linear(inner, 32)
        self.part, self.gate_first = part, gate_first

    def forward(self, x):
        left, right = self.part(self.fc1(x))
        return x + self.fc2(F.gelu(left) * right if self.gate_first else left * F.gelu(right))


def chunk(y):
    return y.chunk(2, -1)


def split(y):
    return y.split(48, dim=-1)


def sizes(y):
    return y.split((48, 48), -1)


def slices(y):
    return y[..., :48], y[..., 48:]


ROWS_OF_A_TILE = gate_linears._ROWS_OF_A_TILE  # before tests change it


@pytest.fixture(autouse=True)
def _on_hopper(monkeypatch):
    """Whatever the device and the number of rows, one kernel pays."""
    monkeypatch.setattr(gate_linears, "HAS_GLUON", True)
    monkeypatch.setattr(gate_linears, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(gate_linears, "chip_of", lambda device: ((9, 0), 132))
    monkeypatch.setattr(gate_linears, "_ROWS_OF_A_TILE", 1)
    monkeypatch.setattr(gate_linears, "_ROWS_OF_HALVES", 1)


def compiled(model, x, linear="int8_dynamic", **options):
    """The graph that the backend lowers, and its results."""
    graphs = []

    def backend(gm, inputs):
        lower(gm, inputs, BackendOptions(linear=linear, **options))
        graphs.append(gm)
        return gm.forward

    with torch.no_grad():
        y = torch.compile(model, backend=backend)(x)
    (gm,) = graphs
    return gm, y


def half(model):
    torch.manual_seed(0)
    return model.half().eval(), torch.randn(2, 9, 32).half()


def error(y, expected):
    y, expected = y.detach().float(), expected.detach().float()
    return float((y - expected).norm() / expected.norm())


@pytest.mark.parametrize("frozen", [False, True], ids=["weights at each call", "frozen"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "activation",
    [F.silu, F.gelu, F.relu, lambda x: F.gelu(x, approximate="tanh"), lambda x: F.silu(input=x)],
    ids=["silu", "gelu", "relu", "gelu_tanh", "by its keyword"],
)
def test_two_linears(activation, bias, frozen):
    model, x = half(Gated(activation, bias))
    gm, y = compiled(model, x, freeze_weights=frozen)
    assert (count(gm, _gated), count(gm, _int8_linear)) == (1, 1)
    assert error(y, model(x)) < 0.02


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("part", [chunk, split, sizes, slices])
def test_halves_of_one_linear(part, gate_first):
    model, x = half(Packed(part, gate_first))
    gm, y = compiled(model, x, freeze_weights=True)
    assert (count(gm, _gated), count(gm, _int8_linear)) == (1, 1)
    (node,) = gm.graph.find_nodes(op="call_function", target=_gated)
    assert fake_value(node).is_contiguous(), "as the operator's result is"
    assert error(y, model(x)) < 0.02


@pytest.mark.parametrize(("symmetric", "weight"), [(True, "per_channel"), (False, "per_channel"), (True, "per_tensor")])
@pytest.mark.parametrize("model", [Gated(bias=True), Packed(chunk)], ids=["two", "one"])
def test_static(model, symmetric, weight):
    """The quantization behind the product is in the operator; so is its zero point."""
    model, x = half(copy.deepcopy(model))
    graph, y = compiled(converted(model, x, static_int8(weight=weight, symmetric=symmetric)), x, linear="off")
    assert (count(graph, _gated), count(graph, _int8_linear)) == (1, 1)
    (node,) = graph.graph.find_nodes(op="call_function", target=_gated)
    assert node.args[9] is not None
    assert (node.args[11] is None) == symmetric
    assert torch.ops.qframework.quantize.default not in [user.target for user in node.users]
    assert error(y, model(x)) < 0.1


REFUSED = {
    "other reader": lambda m, x: F.silu(m.gate(x)) * (up := m.up(x)) + up,
    "other input": lambda m, x: F.silu(m.gate(x + 1)) * m.up(x),
    "twice an activation": lambda m, x: F.silu(m.gate(x)) * F.silu(m.up(x)),
    "two activations in a row": lambda m, x: F.relu(F.silu(m.gate(x))) * m.up(x),
    "an activation of both halves": lambda m, x: math.prod(F.silu(m.both(x)).chunk(2, -1)),
    "a residual": lambda m, x: (m.gate(x) + F.pad(x, (0, 16))) * m.up(x),
    "same half": lambda m, x: F.silu((halves := m.both(x).chunk(2, -1))[0]) * halves[0] + halves[1],
    "the other half elsewhere": lambda m, x: F.silu((halves := m.both(x).chunk(2, -1))[0]) * halves[1] + halves[1],
    "halves of two linears": lambda m, x: F.silu(m.both(x).chunk(2, -1)[0]) * m.other(x).chunk(2, -1)[0],
    "uneven parts": lambda m, x: (F.silu((y := m.odd(x))[..., :96]) * y[..., 96:])[..., :48],
    "halves of a batch": lambda m, x: F.silu((halves := m.gate(x).chunk(2, 0))[0]) * halves[1],
    "the first two of three": lambda m, x: F.silu((thirds := m.third(x).chunk(3, -1))[0]) * thirds[1],
    "the last two of three": lambda m, x: F.silu((thirds := m.third(x).chunk(3, -1))[1]) * thirds[2],
    "the outer two of three": lambda m, x: F.silu((thirds := m.third(x).chunk(3, -1))[0]) * thirds[2],
    "a sum with the third": lambda m, x: F.silu((thirds := m.third(x).chunk(3, -1))[0]) * thirds[1] + thirds[2],
    "a number": lambda m, x: F.silu(m.gate(x)) * 2.0,
    "itself": lambda m, x: (gate := F.silu(m.gate(x))) * gate,
    "one bias": lambda m, x: F.silu(m.gate(x)) * m.without(x),
    "another shape": lambda m, x: F.silu(m.gate(x)) * m.up(x)[:, :1],
    "another activation": lambda m, x: torch.sigmoid(m.gate(x)) * m.up(x),
    "a float linear": lambda m, x: F.silu(m.gate(x)) * F.linear(x, m.up.weight.tanh()),
}


class Refused(nn.Module):
    """Products that are no gated MLP, each by its name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.gate, self.up, self.both, self.other = (nn.Linear(32, size) for size in (48, 48, 96, 96))
        self.odd, self.third, self.without = nn.Linear(32, 97), nn.Linear(32, 144), nn.Linear(32, 48, bias=False)
        self.down = nn.Linear(48, 32)

    def forward(self, x):
        return self.down(REFUSED[self.kind](self, x))


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_gated_mlp(kind):
    model, x = half(Refused(kind))
    gm, y = compiled(model, x, freeze_weights=True)
    assert count(gm, _gated) == 0
    assert error(y, model(x)) < 0.02


def test_a_sum_of_products_without_an_activation_is_gated_too():
    model, x = half(Gated(lambda y: y))
    gm, y = compiled(model, x)
    assert count(gm, _gated) == 1
    assert error(y, model(x)) < 0.02


def test_only_where_it_pays(monkeypatch):
    for name, value in (("_ROWS_OF_A_TILE", 19), ("capability_of", lambda device: (8, 0)), ("HAS_GLUON", False)):
        with monkeypatch.context() as patch:
            patch.setattr(gate_linears, name, value)
            torch._dynamo.reset()
            assert count(compiled(*half(Gated()))[0], _gated) == 0, name
    torch._dynamo.reset()
    model = Gated(inner=40)  # bytes of an INT8 result that are no multiple of 16
    assert count(compiled(*half(model))[0], _gated) == 1
    torch._dynamo.reset()
    model, x = half(model)
    narrow = Gated(width=24).half().eval()  # inputs whose rows are no multiple of 16 bytes
    assert count(compiled(narrow, x[..., :24])[0], _gated) == 0
    torch._dynamo.reset()
    assert count(compiled(converted(model, x), x, linear="off")[0], _gated) == 0
    torch._dynamo.reset()
    assert count(compiled(Gated(), torch.randn(2, 9, 32))[0], _gated) == 0  # float32


def test_a_scale_for_each_position_stays_behind():
    """The operator requantizes with one scale."""
    model, x = half(Gated())
    gm, y = compiled(converted(model, x, static_int8(activation="per_token")), x, linear="off")
    (node,) = gm.graph.find_nodes(op="call_function", target=_gated)
    assert node.args[9] is None
    assert [user.target for user in node.users] == [torch.ops.qframework.quantize.default]
    assert error(y, model(x)) < 0.05


def test_weights_with_scales_of_two_kinds():
    """The operator takes one kind."""
    model, x = half(Gated())
    gm, y = compiled(converted(model, x, up=static_int8(weight="per_tensor")), x, linear="off")
    assert (count(gm, _gated), count(gm, _int8_linear)) == (0, 3)
    assert error(y, model(x)) < 0.05


class TwoInputs(Gated):
    """Static scales of both inputs are one number."""

    def forward(self, x):
        return self.activation(self.gate(x)) * self.up(x.flip(1))


def test_two_inputs_of_one_scale():
    model, x = half(TwoInputs())
    gm, y = compiled(converted(model, x), x, "off")
    assert (count(gm, _gated), count(gm, _int8_linear)) == (0, 2)
    scales = [node.args[1] for node in gm.graph.find_nodes(op="call_function", target=_int8_linear)]
    assert scales[0] is scales[1]
    assert error(y, model(x)) < 0.05


@pytest.mark.parametrize(("kind", "gated"), [("two", 0), ("one", 1), ("static", 1)])
def test_two_large_linears_stay_apart(kind, gated, monkeypatch):
    """Unless the result is INT8: in 16 bit it would be written and read again."""
    monkeypatch.setattr(gate_linears, "gated_tile", lambda *sizes: COOPERATIVE)
    model, x = half(Packed(chunk) if kind == "one" else Gated())
    gm = converted(model, x) if kind == "static" else model
    assert count(compiled(gm, x, "off" if kind == "static" else "int8_dynamic")[0], _gated) == gated


@pytest.mark.parametrize(("rows", "expected"), [(16, 0), (127, 0), (128, 1)])
def test_rows_fill_a_tile(monkeypatch, rows, expected):
    monkeypatch.setattr(gate_linears, "_ROWS_OF_A_TILE", ROWS_OF_A_TILE)
    model, _ = half(Gated())
    assert count(compiled(model, torch.randn(rows, 32).half())[0], _gated) == expected


def test_few_rows_of_halves(monkeypatch):
    """They are one product already; only with the quantization in its epilogue is another kernel faster."""
    monkeypatch.setattr(gate_linears, "_ROWS_OF_HALVES", 19)
    model, x = half(Packed(chunk))
    for linear, expected in (("int8_dynamic", 0), ("off", 1)):
        gm = model if linear == "int8_dynamic" else converted(model, x)
        assert count(compiled(gm, x, linear)[0], _gated) == expected
        torch._dynamo.reset()


class Writes(nn.Module):
    """Writes the other linear's bias between the two linears, or the input behind both."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.gate, self.up = what, nn.Linear(32, 48), nn.Linear(32, 48)
        self.register_buffer("shift", torch.ones(48))

    def forward(self, x):
        gate = F.silu(F.linear(x, self.gate.weight, self.shift))
        if self.what == "between":
            self.shift.add_(1)
        up = F.linear(x, self.up.weight, self.shift)
        if self.what == "behind":
            self.shift.add_(1)
        return gate * up


@pytest.mark.parametrize(("what", "gated"), [("nothing", 1), ("between", 0), ("behind", 0)])
def test_written_operands_are_read_in_time(what, gated):
    model, x = half(Writes(what))
    again = copy.deepcopy(model)
    gm, y = compiled(model, x)
    assert count(gm, _gated) == gated
    assert error(y, again(x)) < 0.02


def test_an_activation_in_place():
    model, x = half(Gated(nn.SiLU(inplace=True)))
    gm, y = compiled(model, x)
    assert count(gm, _gated) == 1
    assert error(y, model(x)) < 0.02


def test_a_quantization_behind_it_is_not_fused_by_inductor(monkeypatch):
    """Nothing of Inductor's computes its input any more."""
    seen = []

    class Meta:
        device = torch.device("cuda")

    from qframework.backend import keep_quantize

    monkeypatch.setattr(keep_quantize, "fake_value", lambda node: seen.append(node) or Meta())
    gm, _ = compiled(*half(Gated()))
    quantize = next(iter(gm.graph.find_nodes(op="call_function", target=_gated)[0].users))
    assert quantize.target is torch.ops.qframework.dynamic_quantize.alone


def test_explain_names_the_operator():
    model, x = half(Gated())
    with torch.no_grad():
        report = qframework.explain(model, x, options={"linear": "int8_dynamic", "freeze_weights": True})
    names = {layer.name: layer.operator for layer in report.layers}
    behind = " after dynamic_quantize, weight quantized once"
    assert names["gate"] == names["up"] == "qframework::int8_gated_linear (silu)" + behind
    assert names["down"] == "qframework::int8_linear (residual)" + behind


def test_symbolic_rows():
    model, x = half(Gated())
    torch._dynamo.mark_dynamic(x, 1)
    gm, y = compiled(model, x)
    assert _gated in targets(gm)
    assert error(y, model(x)) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["static", "frozen", "weights at each call"])
@pytest.mark.parametrize("kind", ["two", "one"])
def test_on_a_gpu(kind, mode, monkeypatch):
    """As close to the float model as two linears are, in plain calls, in CUDA graphs, and for few rows."""
    torch.manual_seed(0)
    model = (Gated(bias=True) if kind == "two" else Packed(chunk)).half().eval().cuda()
    x = torch.randn(6, 100, 32, device="cuda", dtype=torch.float16)
    source = converted(model, x) if mode == "static" else model
    options = {"linear": "off"} if mode == "static" else {"linear": "int8_dynamic", "freeze_weights": mode == "frozen"}
    found, replace = [], gate_linears._replace

    def note(gated, lowering):
        found.append(gated)
        replace(gated, lowering)

    def compile(**more):
        torch._dynamo.reset()
        return torch.compile(copy.deepcopy(source), backend="qframework", options={**options, **more}, dynamic=False)

    monkeypatch.setattr(gate_linears, "_replace", note)
    with torch.no_grad():
        gated = compile()
        results = [gated(x) for _ in range(4)]  # the later ones are replays
        assert all(torch.equal(each, results[0]) for each in results)
        graphed = compile(**{"triton.cudagraphs": True})
        for _ in range(4):  # warm up, record, replay
            assert torch.equal(graphed(x), results[0])
        assert len(found) == 2
        with monkeypatch.context() as patch:
            patch.setattr(gate_linears, "capability_of", lambda device: (8, 0))
            apart = compile()(x)
        assert len(found) == 2
        assert error(results[0], model(x)) < 1.05 * error(apart, model(x))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_symbolic_rows_on_a_gpu(mode):
    """Compiled for many rows, called with few, for which other kernels are made."""
    model, x = half(Gated(bias=True))
    model, x = model.cuda(), x.cuda().repeat(8, 1, 1)
    source = converted(model, x) if mode == "static" else model
    options = {"linear": "off" if mode == "static" else "int8_dynamic"}
    with torch.no_grad():
        compiled = torch.compile(source, backend="qframework", options=options, dynamic=True)
        for rows in (16, 3, 16, 2):
            assert error(compiled(x[:rows]), model(x[:rows])) < 0.1
