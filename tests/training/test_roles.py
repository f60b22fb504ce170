"""Modules that resemble a known module but compute something else stay in float, and the report says why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_replace import distance, reasons
from torch import Tensor, nn
from torch.nn import functional as F
from training_models import inputs, llama, logits_of, vit
from transformers.activations import ClippedGELUActivation

from qframework.training import convert_to_int8_training, restore_float
from qframework.training.activation import Int8Activation
from qframework.training.linear import Int8Linear
from qframework.training.norm import Int8RMSNorm
from qframework.training.roles import linear_role
from qframework.training.scale import Int8DropPath


class LateReLU(nn.Module):
    """Bounded from its second call on."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.relu(x) if self.calls < 2 else F.relu6(x)


class TrainingSiLU(nn.Module):
    """Noisy while training."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x) + (torch.randn_like(x) if self.training else 0)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu6": nn.ReLU6,
    "clipped": lambda: ClippedGELUActivation(-10, 10),
    "clipped far": lambda: ClippedGELUActivation(-10, 5000),
    "late": LateReLU,
    "training": TrainingSiLU,
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_that_are_known_only_near_zero(name: str, training: bool) -> None:
    model = vit().train(training)
    model.blocks[0].mlp.act = ACTIVATIONS[name]()
    before = dict(vars(model.blocks[0].mlp.act))
    convert_to_int8_training(model.train(training))
    assert "near zero, but not for all inputs" in reasons(model)["blocks.0.mlp.act"]
    assert not isinstance(model.blocks[0].mlp.act, Int8Activation)
    assert vars(model.blocks[0].mlp.act).get("calls") == before.get("calls")
    assert isinstance(model.blocks[1].mlp.act, Int8Activation)
    assert logits_of(model, inputs("vit")).isfinite().all()


class Paths(nn.Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.drop_prob = p


class Weakened(Paths):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 - self.drop_prob)


class PerValue(Paths):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.drop_prob, self.training)


class PerBatch(Paths):
    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(()) > self.drop_prob) / (1 - self.drop_prob) if self.training else x


class Right(Paths):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.drop_prob == 0:
            return x
        keep = 1 - self.drop_prob
        return x / keep * torch.floor(keep + torch.rand(len(x), *[1] * (x.ndim - 1)))


@pytest.mark.parametrize("kind", [Weakened, PerValue, PerBatch, Right])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_drop_paths_are_recognized_by_what_they_compute(kind: type[Paths], p: float) -> None:
    model, random = vit(), torch.get_rng_state()
    model.blocks[0].drop_path1 = type("DropPath", (kind,), {})(p)
    random = torch.get_rng_state()
    convert_to_int8_training(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert isinstance(model.blocks[0].drop_path1, Int8DropPath) == (kind is Right)
    assert ("blocks.0.drop_path1" in reasons(model)) == (kind is not Right)


class MyRMSNorm(nn.Module):
    def __init__(self, columns: int, name: str | None, eps: float, outside: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(columns))
        self.name, self.outside, self.hidden = name, outside, [eps]
        if name is not None:
            setattr(self, name, eps)

    def forward(self, x: Tensor) -> Tensor:
        eps = self.hidden[0]
        square = x.square().mean(-1, keepdim=True)
        return self.weight * x / (square.sqrt() + eps if self.outside else (square + eps).sqrt())


@pytest.mark.parametrize("name", ["eps", "epsilon", "norm_eps", None, "outside"])
def test_the_epsilon_of_a_norm_counts(name: str | None) -> None:
    model, x = llama().eval(), inputs("llama")
    norm = MyRMSNorm(32, "eps" if name == "outside" else name, 1e-4, name == "outside")
    model.model.layers[0].input_layernorm = norm
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1e-2)  # the variance is eps's, nearly
    convert_to_int8_training(model)
    told = name in ("eps", "epsilon", "norm_eps")
    assert isinstance(norm, Int8RMSNorm) == told
    assert ("layers.0.input_layernorm" in str(reasons(model))) == (not told)
    y = torch.randn(2, 16, 32) * 1e-3
    square = y.square().mean(-1, keepdim=True)
    wanted = y / (square.sqrt() + 1e-4 if name == "outside" else (square + 1e-4).sqrt())
    got: Any = norm(y)
    assert distance(got.dequantize() if told else got, wanted) < 0.02
    assert logits_of(model, x).isfinite().all()


# Modules that work in place, and modules that say how they are rebuilt


class OwnReLU(nn.Module):
    """A ReLU that writes to its input and has no attribute ``inplace``."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu_()


class Ignoring(nn.Module):
    """An MLP that ignores the result of its activation."""

    def __init__(self, act: nn.Module, drop: nn.Module) -> None:
        super().__init__()
        self.fc1, self.act, self.drop, self.fc2 = nn.Linear(32, 64), act, drop, nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        self.act(h)
        self.drop(h)
        return self.fc2(h)


IN_PLACE: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "relu": (lambda: nn.ReLU(inplace=True), ()),
    "silu": (lambda: nn.SiLU(inplace=True), ()),
    "own": (OwnReLU, ()),
    "relu6": (lambda: nn.ReLU6(inplace=True), ()),
    "kept": (lambda: nn.ReLU(inplace=True), ("blocks.*.mlp.act",)),
    "in float": (lambda: nn.ReLU(inplace=True), ("blocks.*.mlp.fc1",)),
    "mish": (lambda: nn.Mish(inplace=True), ("blocks.*.mlp.act",)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_activations_that_write_to_their_input_still_do(name: str) -> None:
    torch.manual_seed(0)
    act, keep_float = IN_PLACE[name]
    mlp = Ignoring(act(), nn.Identity())
    model, x = vit(), torch.randn(2, 16, 32)
    model.blocks[0].mlp = mlp
    model.blocks[1].mlp = Ignoring(act(), nn.Identity())

    def run() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        y = model.blocks(x)
        y.square().mean().backward()
        return y.detach(), mlp.fc1.weight.grad.clone()

    wanted = run()
    convert_to_int8_training(model, keep_float=keep_float)
    got = run()
    # 12 quantizations in each of 2 blocks, 0.01 of the norm each, twice that
    assert distance(got[0], wanted[0]) < 0.01 * (2 * 12) ** 0.5 * 2
    assert distance(got[1], wanted[1]) < 0.01 * (2 * 12) ** 0.5 * 2


def test_dropout_in_place() -> None:
    model = vit()
    model.blocks[0].mlp = Ignoring(nn.ReLU(inplace=True), nn.Dropout(1.0, inplace=True))
    convert_to_int8_training(model)
    mlp = model.blocks[0].mlp
    assert torch.equal(mlp(torch.randn(2, 16, 32)).dequantize()[0, 0], mlp(torch.randn(2, 16, 32)).dequantize()[1, 3])


class Reduced(nn.Linear):
    def __reduce__(self) -> Any:
        return rebuild, (self.in_features, self.out_features, self.state_dict())


class Called(nn.Linear):
    def __reduce__(self) -> Any:
        return type(self), (self.in_features, self.out_features), {"_parameters": self._parameters}


class New(nn.Linear):
    def __new__(cls, *args: Any) -> Any:
        return super().__new__(cls)

    def __getnewargs__(self) -> Any:
        return (1, 2)


def rebuild(columns: int, features: int, state: Any) -> Reduced:
    layer = Reduced(columns, features)
    layer.load_state_dict(state)
    return layer


@pytest.mark.parametrize("kind", [Reduced, Called, New])
def test_classes_with_their_own_reduce_are_copied(kind: type[nn.Linear], tmp_path: Any) -> None:
    model, x = vit().eval(), inputs("vit")
    model.blocks[0].mlp.fc1 = kind(32, 128)
    before = logits_of(model, x)
    wanted = logits_of(convert_to_int8_training(model), x)
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(logits_of(other, x), wanted)
        assert isinstance(other.blocks[0].mlp.fc1, Int8Linear)
        assert torch.equal(logits_of(restore_float(other), x), before)
        assert type(other.blocks[0].mlp.fc1) is kind


class Product(nn.Linear):
    """As Falcon's: the same in another way."""

    name, tuned = "product", True

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Offset(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class ClampedWeight(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.5, 0.5)
        return super().forward(x)


class Decaying(nn.Linear):
    """Writes its weight behind its result."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.weight.data.mul_(1 - 1e-7)
        return y


class NoisyLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x) if self.training else x)


class Matrices(nn.Linear):
    """Takes matrices only."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight.T)


class Bounded(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-50, 50)


class Holding(Product):
    """Product with something that could change the result."""

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(8, 8)
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            self.register_buffer(name, value)
        else:
            setattr(self, name, value)


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_of_another_class_that_computes_the_same(bias: bool) -> None:
    layer = Product(8, 8, bias=bias)
    layer.mark = "a name"
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    state = torch.get_rng_state()
    assert linear_role(layer) == "linear"
    assert torch.equal(torch.get_rng_state(), state)
    assert layer.training
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@pytest.mark.parametrize(
    "layer",
    [
        *(kind(8, 8) for kind in (Offset, ClampedWeight, Decaying, NoisyLinear, Matrices, Bounded)),
        Holding("down", nn.Linear(8, 4)),
        Holding("scale", nn.Parameter(torch.ones(()))),
        Holding("mask", torch.ones(8, 8)),
        Holding("state", {"a": 1}),
    ],
    ids=lambda layer: f"{type(layer).__name__} {next(reversed(vars(layer)))}",
)
def test_a_linear_of_another_class_that_may_compute_something_else(layer: nn.Linear) -> None:
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    assert linear_role(layer) is None
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_blocks_with_such_linears_are_converted() -> None:
    model = vit()
    own = model.blocks[0].mlp.fc1
    other = Product(own.in_features, own.out_features)
    other.load_state_dict(own.state_dict())
    model.blocks[0].mlp.fc1 = other
    wanted = model(inputs("vit"))
    convert_to_int8_training(model)
    assert isinstance(model.blocks[0].mlp.fc1, Int8Linear)
    assert isinstance(model.blocks[0].mlp.fc1, Product)
    assert 0 < distance(model(inputs("vit")), wanted) < 0.2
    assert type(restore_float(model).blocks[0].mlp.fc1) is Product
