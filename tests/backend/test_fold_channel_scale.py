"""A product with a constant for each channel is folded into the quantization in a linear's epilogue."""

from __future__ import annotations

import copy

import pytest
import torch
from lowered_models import count, example, exported, lowered, targets
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from qframework.numerics import sqnr_db
from qframework.quantizer import QFrameworkQuantizer, Recipe, Smooth, calibrate, static_int8

MUL = torch.ops.aten.mul.Tensor
INT8_LINEAR = torch.ops.qframework.int8_linear.default
DIM = 32


class Scaled(nn.Module):
    """The graph that the quantizer writes: linear -> activation -> a constant for each channel -> linear."""

    def __init__(self, constant: Tensor, beside: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2, self.beside = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM), beside
        self.register_buffer("constant", constant)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.fc1(x)) * self.constant
        out = self.fc2(y)
        return out + y.mean(-1, keepdim=True) if self.beside else out


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(DIM, DIM)
        self.register_buffer("constant", torch.linspace(0.5, 2, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.layer_norm(x, (DIM,)) * self.constant)


def converted(model: nn.Module, x: Tensor, recipe: Recipe | None = None):
    graph, quantizer = exported(model, x), QFrameworkQuantizer().set_global(static_int8())
    (recipe or Recipe()).before_prepare(graph, quantizer, [x])
    prepared = prepare_pt2e(graph, quantizer)
    calibrate(prepared, [x], progress=False)
    return convert_pt2e(prepared)


@pytest.mark.parametrize("freeze_weights", [False, True])
def test_product_goes_into_the_epilogue(freeze_weights: bool) -> None:
    x, constant = example(DIM), torch.linspace(0.1, 10, 2 * DIM)
    gm = converted(Scaled(constant), x)
    expected = gm(x)
    assert count(gm, MUL) == 1
    gm, reports = lowered(gm, freeze_weights=freeze_weights)
    assert [report.operator for report in reports] == [
        "qframework::int8_linear (gelu, int8 out)",
        "qframework::int8_linear",
    ]
    assert count(gm, MUL) == 0
    assert count(gm, torch.ops.qframework.quantize.default) == 1  # of the input of the model
    first = next(node for node in gm.graph.nodes if node.target is INT8_LINEAR)
    assert (first.args[7].op == "get_attr") is freeze_weights
    # near a tie the two ways of rounding differ by one step
    assert sqnr_db(expected, gm(x)) > 45


def test_a_written_constant_is_followed_unless_it_is_frozen() -> None:
    x = example(DIM)
    gm = converted(Scaled(torch.linspace(0.1, 10, 2 * DIM)), x)
    before = gm(x)
    live, frozen = lowered(copy.deepcopy(gm))[0], lowered(copy.deepcopy(gm), freeze_weights=True)[0]
    for model in (gm, live, frozen):
        model.constant.data.mul_(0.5)
    assert sqnr_db(gm(x), live(x)) > 45
    assert sqnr_db(before, frozen(x)) > 45
    assert sqnr_db(gm(x), before) < 20


@pytest.mark.parametrize(
    ("model", "products"),
    [
        (Scaled(torch.linspace(-1, 1, 2 * DIM)), 1),
        (Scaled(torch.linspace(0, 1, 2 * DIM)), 1),
        (Scaled(torch.tensor([2.0])), 1),
        (Scaled(torch.linspace(0.1, 10, 2 * DIM), beside=True), 1),
        (Normed(), 1),
    ],
    ids=["negative", "one of zero", "one number", "read beside", "behind a norm"],
)
def test_other_products_are_left(model: nn.Module, products: int) -> None:
    x = example(DIM)
    gm = converted(model, x)
    expected = gm(x)
    gm, reports = lowered(gm)
    assert all(report.lowered for report in reports)
    assert count(gm, MUL) == products
    torch.testing.assert_close(gm(x), expected, rtol=1e-4, atol=1e-4 * float(expected.detach().abs().max()))


def test_recipe_compiles_to_as_many_operators_as_without() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM)).eval()
    with torch.no_grad():
        model[1].weight[::7] *= 30
    x = torch.randn(64, 7, DIM)  # half of it is held out
    plain, scaled = converted(model, x), converted(model, x, Recipe(Smooth(), channel_scales=True))
    assert count(scaled, MUL) == 1
    with torch.no_grad():
        expected = scaled(x)
        assert sqnr_db(model(x), expected) > sqnr_db(model(x), plain(x)) + 3
        got = torch.compile(scaled, backend="qframework")(x)
    assert sqnr_db(expected, got) > 45
    frozen, _ = lowered(scaled, freeze_weights=True)
    assert sorted(map(str, targets(lowered(plain)[0]))) == sorted(map(str, targets(frozen)))
