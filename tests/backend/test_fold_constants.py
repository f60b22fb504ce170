"""With frozen weights or a converted model, what parameters determine is computed once; all else at each call."""

from __future__ import annotations

import copy

import pytest
import torch
from lowered_models import converted, without_inductor
from torch import nn
from torch.nn import functional as F

import qframework
from qframework.backend import fold_constants
from qframework.backend.compile import lower
from qframework.backend.options import BackendOptions

FROZEN = {"linear": "int8_dynamic", "freeze_weights": True}
TOKENS, WIDTH, HEADS = 24, 32, 4
ERROR = 0.03  # of results of about 1: twice what the one INT8 linear, or INT8 attention, is off


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    pass


class Table(nn.Module):
    """A bias of attention, read from a table as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * TOKENS, HEADS))
        places = torch.arange(TOKENS)
        self.register_buffer("index", TOKENS - 1 + places[:, None] - places)
        self.fc = nn.Linear(WIDTH, WIDTH)

    def bias(self):
        return self.table[self.index].permute(2, 0, 1)

    def forward(self, x):
        x = self.fc(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, self.bias())


class Coordinates(Table):
    """A bias that an MLP computes, with an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(1, 512), nn.ReLU(inplace=True), nn.Linear(512, HEADS))

    def bias(self):
        return 16 * self.mlp(self.index[..., None] / TOKENS).sigmoid().permute(2, 0, 1)


class Elements(Table):
    """Operators on elements alone, which Inductor fuses."""

    def bias(self):
        return (self.table.sinh() * 2)[:TOKENS, :1].t().expand(TOKENS, TOKENS)


class Random(Table):
    def bias(self):
        return F.dropout(super().bias(), 0.5, training=True)


class Written(Table):
    """The graph changes the table that it reads."""

    def bias(self):
        self.table.mul_(2)
        return super().bias()


class WrittenTwice(Table):
    """Two readers of memory that one of them writes."""

    def bias(self):
        first = super().bias()
        rows = first[:1]
        return first.relu_() + rows.cumsum(1)


class OfTheInput(Table):
    def forward(self, x):
        return super().forward(x) + self.table[x.argmax(-1)].cumsum(0).mean()


class Cache(Table):
    """Memory with a fixed address that is no buffer of a module: another graph may write it."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = [torch.randn(TOKENS, TOKENS)]
        torch._dynamo.mark_static_address(self.cache[0])

    def bias(self):
        return self.cache[0].cumsum(0)


class Large(Table):
    """More values than those that it is computed from."""

    def bias(self):
        return F.embedding(self.index, self.table).permute(2, 0, 1)


class Spread(Table):
    """A bias for each image: a difference that Inductor computes where it is read, from fewer bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Parameter(torch.randn(2))

    def bias(self):
        return self.images[:, None, None, None] - super().bias()


class SpreadTwice(Spread):
    """Two readers of what becomes a buffer."""

    def forward(self, x):
        bias, images = Table.bias(self), self.images[:, None, None, None]
        x = self.fc(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return sum(F.scaled_dot_product_attention(x, x, x, each) for each in (images - bias, images + bias))


class Mapped(Table):
    """A mask that ``torch.vmap`` computes, as in transformers."""

    def bias(self):
        heads, places = torch.arange(HEADS), torch.arange(TOKENS)
        rows = torch.vmap(lambda h, i, j: j <= i + h, (None, None, 0))
        causal = torch.vmap(torch.vmap(rows, (None, 0, None)), (0, None, None))(heads, places, places)
        return super().bias().masked_fill(~causal, -1e9)


class Autocast(Coordinates):
    def bias(self):
        with torch.autocast("cpu", torch.bfloat16):
            return super().bias().float()


def count(model, name, options=FROZEN, x=None):
    """How many nodes of the lowered graph call an operation, after a comparison of the results."""
    kept = []

    def backend(gm, inputs):
        lower(gm, inputs, BackendOptions(**options))
        kept.append(gm)
        return gm.forward

    x = torch.randn(2, TOKENS, WIDTH) if x is None else x
    with torch.no_grad():
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        actual = torch.compile(model, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=ERROR)
    assert len(kept) == 1
    return sum(node.op.startswith("call") and name in str(node.target) for node in kept[0].graph.nodes)


@pytest.mark.parametrize(
    ("cls", "name"),
    [(Table, "permute"), (Coordinates, "sigmoid"), (Large, "embedding"), (Spread, "permute"), (SpreadTwice, "permute")],
)
def test_what_parameters_determine_is_a_buffer(cls, name):
    model = cls().eval()
    assert count(model, name, {"linear": "int8_dynamic"}) == 1
    torch._dynamo.reset()
    assert count(model, name) == 0


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (Elements, "sinh"),
        (Spread, "sub"),
        (Random, "dropout"),
        (WrittenTwice, "relu_"),
        (OfTheInput, "argmax"),
        (Cache, "cumsum"),
        (Autocast, "sigmoid"),
    ],
)
def test_all_else_is_computed_at_each_call(cls, name):
    assert count(cls().eval(), name) == 1


def test_calls_that_set_a_state_are_not_run():
    """Dynamo refuses a graph that leaves another state than it found, such as one more level of ``torch.vmap``."""
    assert count(Mapped().eval(), "vmap_increment") == 3


@pytest.mark.parametrize(("name", "calls"), [("dynamic_quantize", 1), ("permute", 0)])
def test_weights_beside_a_mask_of_vmap_are_frozen(name, calls):
    """What ``torch.vmap`` wraps may be any memory otherwise."""
    assert count(Mapped().eval(), name) == calls


def test_a_table_that_the_graph_writes_is_read_at_each_call():
    model = Written().eval().requires_grad_(False)
    before = model.table.clone()
    compiled = torch.compile(model, backend="qframework", options=FROZEN)
    x = torch.randn(2, TOKENS, WIDTH)
    first, second = compiled(x), compiled(x)
    torch.testing.assert_close(model.table.data, 4 * before.data)
    assert (first - second).abs().max() > 1e-3


def test_results_larger_than_their_inputs_have_a_bound(monkeypatch):
    monkeypatch.setattr(fold_constants, "_LARGEST", 100)
    assert count(Large().eval(), "embedding") == 1


def test_another_parameter_compiles_again_and_writes_have_no_effect():
    model = Coordinates().eval().requires_grad_(False)
    compiled = torch.compile(model, backend="qframework", options=FROZEN)
    x = torch.randn(2, TOKENS, WIDTH)
    first = compiled(x)
    model.mlp[2].weight.zero_()
    assert torch.equal(compiled(x), first)
    model.mlp[2].weight = nn.Parameter(torch.zeros(HEADS, 512), requires_grad=False)
    assert (compiled(x) - model(x)).abs().max() < ERROR
    assert (compiled(x) - first).abs().max() > 0.01


def test_explain_names_linears_that_are_computed_once():
    model = Coordinates().eval()
    layers = {
        each.name: each for each in qframework.explain(model, torch.randn(2, TOKENS, WIDTH), options=FROZEN).layers
    }
    assert layers["fc"].lowered
    for name in ("mlp.0", "mlp.2"):
        assert "computed once" in layers[name].reason
        assert not layers[name].lowered
        assert not layers[name].fallback


@pytest.mark.parametrize("options", [{}, {"freeze_weights": True}], ids=["default", "frozen"])
def test_a_converted_model_keeps_its_quantized_weights(options):
    model, x = Table().eval(), torch.randn(2, TOKENS, WIDTH)
    static = converted(model, x)
    assert count(static, "int8_linear", options, x) == 1
    torch._dynamo.reset()
    assert count(static, "permute", options, x) == 0


@pytest.mark.parametrize("options", [{}, {"freeze_weights": True}], ids=["default", "frozen"])
def test_constants_of_a_converted_model_follow_writes(options):
    model, x = Table().eval(), torch.randn(2, TOKENS, WIDTH)
    static = converted(model, x)
    compiled = torch.compile(static, backend="qframework", options=options)
    with torch.no_grad():
        first = compiled(x)
        static.table.mul_(-3)
        written = compiled(x)
        assert (written - first).abs().max() > 0.1
        torch.testing.assert_close(written, static(x), rtol=0, atol=ERROR)
        static.table = nn.Parameter(static.table / -3)
        torch.testing.assert_close(compiled(x), first, rtol=0, atol=1e-6)


class Moving(Table):
    """Attention writes the buffer that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("moving", torch.randn(2 * TOKENS, HEADS))

    def bias(self):
        bias = self.moving[self.index].permute(2, 0, 1)
        self.moving.mul_(1.5)
        return bias


def test_what_a_converted_model_writes_itself_is_computed_at_each_call():
    x = torch.randn(2, TOKENS, WIDTH)
    static = converted(Moving().eval(), x)
    reference, results, kept = copy.deepcopy(static), [], []
    compiled = torch.compile(static, backend=without_inductor(kept))
    with torch.no_grad():
        for _ in range(3):
            results.append(compiled(x))
            torch.testing.assert_close(results[-1], reference(x), rtol=0, atol=ERROR)
            assert torch.equal(static.moving, reference.moving)
    assert (results[-1] - results[0]).abs().max() > 2 * ERROR
    assert sum("permute" in str(node.target) for node in kept[0].graph.nodes if node.op.startswith("call")) == 1


def test_constants_of_tensors_that_count_no_writes_are_computed_at_each_call():
    model, x = Table().eval(), torch.randn(2, TOKENS, WIDTH)
    static = converted(model, x)
    with torch.inference_mode():
        static.table = nn.Parameter(torch.randn(2 * TOKENS, HEADS), requires_grad=False)
    assert count(static, "permute", {}, x) == 1
    torch._dynamo.reset()
    assert count(static, "permute", {"freeze_weights": True}, x) == 0


def test_repeated_calls_with_other_shapes():
    model = Table().eval()
    compiled = torch.compile(model, backend="qframework", options=FROZEN)
    with torch.no_grad():
        for batch in (2, 3, 5):
            x = torch.randn(batch, TOKENS, WIDTH)
            torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=ERROR)


@pytest.mark.parametrize("cls", [Table, Coordinates])
def test_attention_takes_a_bias_that_is_a_buffer(cls):
    model, x = cls().eval(), torch.randn(2, TOKENS, WIDTH)
    compiled = torch.compile(model, backend="qframework", options={**FROZEN, "attention": "sage_b"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=ERROR)
        assert "sage_attention" in str(qframework.explain(compiled, x))


def test_parameters_that_need_a_gradient_get_it():
    model, x = Table().eval(), torch.randn(2, TOKENS, WIDTH)
    model.fc.requires_grad_(False)
    (expected,) = torch.autograd.grad(model(x).square().sum(), model.table)
    compiled = torch.compile(model, backend="qframework", options={"freeze_weights": True})  # without INT8 linears
    compiled(x).square().sum().backward()
    assert model.table.grad is not None
    torch.testing.assert_close(model.table.grad, expected)
