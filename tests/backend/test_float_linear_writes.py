"""A compiled float model reads its weights at each call, so that INT8 layers follow every write (float_linear.py)."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from lowered_models import example
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.func import functional_call
from torch.nn import functional as F

from qframework import numerics
from qframework.backend.compile import lower
from qframework.backend.options import BackendOptions


def backend(gm, example_inputs, freeze_weights=False):
    """The lowering, then AOTAutograd as in Inductor, which functionalizes writes inside the graph."""
    lower(gm, example_inputs, BackendOptions(linear="int8_dynamic", freeze_weights=freeze_weights))
    return aot_eager(gm, example_inputs)


frozen = functools.partial(backend, freeze_weights=True)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def assert_follows(compiled, model, x):
    reference = model(x)
    assert numerics.sqnr_db(reference, compiled(x)) > 30


def other(weight):
    return torch.randn_like(weight) * 3


WRITES = {
    "in place": lambda layer: layer.weight.mul_(-3),
    "through .data": lambda layer: layer.weight.data.add_(other(layer.weight)),
    ".data.copy_": lambda layer: layer.weight.data.copy_(other(layer.weight)),
    ".data.normal_": lambda layer: layer.weight.data.normal_(),
    "new .data": lambda layer: setattr(layer.weight, "data", other(layer.weight)),
    "new parameter": lambda layer: setattr(layer, "weight", nn.Parameter(other(layer.weight))),
    "detach": lambda layer: layer.weight.detach().copy_(other(layer.weight)),
    "numpy": lambda layer: layer.weight.numpy().fill(0.25),
    "load_state_dict": lambda layer: layer.load_state_dict(nn.Linear(32, 16).state_dict()),
    "assigning load_state_dict": lambda layer: layer.load_state_dict(nn.Linear(32, 16).state_dict(), assign=True),
    "one element": lambda layer: layer.weight.data[3, 5].fill_(50.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_between_two_calls_is_followed(write):
    layer, x = nn.Linear(32, 16).eval(), example()
    compiled = torch.compile(layer, backend=backend)
    assert_follows(compiled, layer, x)
    for _ in range(2):
        WRITES[write](layer)
        assert_follows(compiled, layer, x)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_fused_optimizers_are_followed(optimizer):
    layer, x = nn.Linear(32, 16).eval(), example()
    steps = optimizer(layer.parameters(), lr=0.5, fused=True)
    compiled = torch.compile(layer, backend=backend)
    for _ in range(3):
        assert_follows(compiled, layer, x)
        layer.weight.grad, layer.bias.grad = torch.randn(16, 32), torch.randn(16)
        steps.step()


def test_a_new_weight_in_reused_memory_is_quantized_again():
    layer, x = nn.Linear(32, 16).eval(), example()
    compiled = torch.compile(layer, backend=backend)
    for _ in range(4):
        layer.weight.data = torch.empty(0)  # offloaded
        layer.weight.data = torch.randn(16, 32)
        assert_follows(compiled, layer, x)


def test_functional_call_with_other_parameters():
    layer, x = nn.Linear(32, 16).eval(), example()
    compiled = torch.compile(lambda state, x: functional_call(layer, state, (x,)), backend=backend)
    for _ in range(4):
        state = {"weight": nn.Parameter(torch.randn(16, 32)), "bias": nn.Parameter(torch.randn(16))}
        assert numerics.sqnr_db(functional_call(layer, state, (x,)), compiled(state, x)) > 30


def test_weights_made_and_written_in_inference_mode():
    with torch.inference_mode():
        layer, x = nn.Linear(32, 16).eval(), example()
        compiled = torch.compile(layer, backend=backend)
        for _ in range(3):
            assert_follows(compiled, layer, x)
            layer.weight.normal_()


def test_a_frozen_weight_is_what_it_was_when_the_model_was_compiled():
    layer, x = nn.Linear(32, 16).eval(), example()
    live, compiled = torch.compile(layer, backend=backend)(x), torch.compile(layer, backend=frozen)
    assert torch.equal(compiled(x), live)
    layer.weight.data.normal_()
    assert torch.equal(compiled(x), live)


def test_frozen_weights_are_those_of_their_own_model():
    """Dynamo shares compiled code between models of the same class."""
    x, layers = example(), [nn.Linear(32, 16).eval() for _ in range(3)]
    for layer in layers:
        assert_follows(torch.compile(layer, backend=frozen), layer, x)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).eval()
    wanted = model(x)
    for layer in model:
        layer.compile(backend=frozen)
    assert numerics.sqnr_db(wanted, model(x)) > 30


def test_another_parameter_in_place_of_a_frozen_one_recompiles():
    layer, x = nn.Linear(32, 16).eval(), example()
    compiled = torch.compile(lambda state, x: functional_call(layer, state, (x,)), backend=frozen)
    for _ in range(3):
        state = {"weight": nn.Parameter(torch.randn(16, 32)), "bias": nn.Parameter(torch.randn(16))}
        assert numerics.sqnr_db(functional_call(layer, state, (x,)), compiled(state, x)) > 30
    compiled = torch.compile(layer, backend=frozen)
    compiled(x)
    layer.weight = nn.Parameter(torch.randn(16, 32))
    assert_follows(compiled, layer, x)


# Written inside forward -----------------------------------------------------------------------------------------------


class Clamped(nn.Linear):
    def forward(self, x):
        self.weight.clamp_(-0.05, 0.05)
        return super().forward(x)


class Growing(nn.Linear):
    def forward(self, x):
        self.weight.mul_(1.5)
        y = super().forward(x)
        self.weight.data.add_(0.1)
        return y


class WrittenBetween(nn.Linear):
    """Two products with one weight and one input, both written between them."""

    def forward(self, x):
        x = x * 1.0
        first = super().forward(x)
        self.weight.mul_(-2)
        x += 1
        return first + 0.5 * super().forward(x)


class BiasBeforeActivation(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        self.bias.add_(10)
        return F.gelu(y)


class BiasThroughAView(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        self.bias.data.view(4, 4)[0].fill_(10)
        return F.relu(y) + 1


class ResidualWritten(nn.Linear):
    """The residual changes after the sum and before its quantization."""

    def forward(self, x):
        residual = x[..., :16] * 5.0
        y = super().forward(x) + residual
        residual.zero_()
        return torch.ops.qframework.quantize.default(y, torch.tensor([0.15])).float() + residual


class Buffer(nn.Module):
    """A weight that is a buffer, and a running mean of it that is used as bias."""

    def __init__(self, *_):
        super().__init__()
        self.register_buffer("weight", torch.randn(16, 32))
        self.register_buffer("bias", torch.randn(16))

    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        torch.add(self.bias, 1.0, out=self.bias)
        return torch.relu(y)


@pytest.mark.parametrize("freeze_weights", [False, True])
@pytest.mark.parametrize(
    "kind", [Clamped, Growing, WrittenBetween, BiasBeforeActivation, BiasThroughAView, ResidualWritten, Buffer]
)
def test_writes_inside_forward_keep_their_order(kind, freeze_weights):
    model, reference, x = kind(32, 16).eval(), kind(32, 16).eval(), example()
    reference.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend=functools.partial(backend, freeze_weights=freeze_weights), fullgraph=True)
    for _ in range(3):
        assert_follows(compiled, reference, x)
    for ours, wanted in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
        assert torch.equal(ours, wanted)


WRITES_OF_ACTIVATIONS = {
    "LeakyReLU": nn.LeakyReLU(0.1, inplace=True),
    "ReLU6": nn.ReLU6(inplace=True),
    "ELU": nn.ELU(inplace=True),
    "CELU": nn.CELU(inplace=True),
    "Hardswish": nn.Hardswish(inplace=True),
    "Hardtanh": nn.Hardtanh(inplace=True),
    "Threshold": nn.Threshold(0.5, 7.0, inplace=True),
    "Mish": nn.Mish(inplace=True),
    "Hardsigmoid": nn.Hardsigmoid(inplace=True),
    "SELU": nn.SELU(inplace=True),
    "__iadd__": lambda x: x.__iadd__(3.0),
    "out=": lambda x: torch.mul(x, -2.0, out=x),
    "part": lambda x: x[:, 0].fill_(5.0),
    "foreach": lambda x: torch._foreach_add_([x.view(-1)], 3.0),
}


@pytest.mark.parametrize("name", WRITES_OF_ACTIVATIONS)
def test_an_input_changed_between_two_linears_is_quantized_again(name):
    first, second = nn.Linear(32, 16).eval(), nn.Linear(32, 16).eval()

    def run(x):
        x = x * 1.0
        a = first(x)
        WRITES_OF_ACTIVATIONS[name](x)
        return a, second(x)

    x = example()
    for value, reference in zip(torch.compile(run, backend=backend)(x), run(x), strict=True):
        assert numerics.sqnr_db(reference, value) > 30


@torch.library.custom_op("qframework_test::doubles", mutates_args=())
def doubles(weight: torch.Tensor) -> torch.Tensor:
    """Writes an input that it declares as read-only."""
    weight.data.mul_(2)
    return weight.new_zeros(())


@doubles.register_fake
def _(weight):
    return weight.new_empty(())


class CallsForeignOperator(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(32, 32)

    def forward(self, x):
        before = self.fc(x)
        return before + self.fc(x + 1) + doubles(self.fc.weight) + self.fc(x - 1)


@pytest.mark.parametrize("compiler", [backend, frozen])
def test_undeclared_writes_of_custom_operators_are_followed(compiler):
    torch.manual_seed(0)
    model, x = CallsForeignOperator().eval(), example()
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend=compiler)
    for _ in range(2):
        assert numerics.sqnr_db(reference(x), compiled(x)) > 30
