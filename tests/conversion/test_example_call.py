"""Calls of a quantized model with arguments of the float model that its example had not, or had otherwise."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from lowered_models import count, without_inductor
from quantized_models import MLP
from torch import Tensor, nn

import qframework
from qframework.errors import UnsupportedError
from qframework.quantizer import dynamic_int8

X, MASK = torch.randn(2, 16), torch.randn(2, 16)


class Optional(MLP):
    config = SimpleNamespace(return_dict=True, use_cache=False)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, twice: bool = False, **kwargs
    ) -> Tensor:
        if kwargs.get("return_dict") is False:
            x = -x
        x = super().forward((x if mask is None else x + mask) * scale)
        return 2 * x if twice else x


def quantized(*args, **kwargs):
    return qframework.quantize(Optional().eval(), kwargs | dict(zip(("x", "mask"), args, strict=False)), dynamic_int8())


def test_arguments_that_change_nothing_may_be_passed() -> None:
    model = quantized(X)
    expected = model(X)
    for call in (
        lambda: model(X, None),
        lambda: model(x=X, mask=None, scale=1.0, twice=False),
        lambda: model(X, return_dict=True, use_cache=False, labels=None),
        lambda: torch.compile(model, backend="eager", fullgraph=True)(X, mask=None, return_dict=True),
    ):
        assert torch.equal(call(), expected)


@pytest.mark.parametrize("name", ["mask", "return_dict"])
def test_none_is_accepted_where_it_is_the_default(name) -> None:
    """Also where the model then reads its configuration, and has no ``**kwargs``."""

    class Named(MLP):
        config = SimpleNamespace(return_dict=True)

        def forward(self, x: Tensor, mask: Tensor | None = None, return_dict: bool | None = None) -> Tensor:
            return super().forward(x)

    model = qframework.quantize(Named().eval(), X, dynamic_int8())
    assert torch.equal(model(X, **{name: None}), model(X))
    with pytest.raises(UnsupportedError, match=f"QuantizedModel: input '{name}' must be left out"):
        model(X, **{name: False})


class Times(MLP):
    """With factors that only ``**kwargs`` take, and code that depends on the batch."""

    def forward(self, x: Tensor, **kwargs) -> Tensor:
        return super().forward(x) * kwargs.get("times", 2) / x.shape[0]


@pytest.mark.parametrize("value", [3, 1.5])
def test_numbers_that_only_kwargs_take_are_those_of_the_example(value) -> None:
    model = Times().eval()
    quantized = qframework.quantize(model, {"x": X, "times": value}, dynamic_int8(), dynamic_shapes=None)
    torch.testing.assert_close(quantized(X, times=value), model(X, times=value), atol=0.02, rtol=0)
    for other in (value + 1, MASK):
        with pytest.raises(UnsupportedError, match=rf"QuantizedModel: input 'times' must be {value}, .* got"):
            quantized(X, times=other)


def test_sizes_beside_what_only_kwargs_take_are_those_of_the_example() -> None:
    model, more = Times().eval(), torch.randn(5, 16)
    fixed = qframework.quantize(model, {"x": X, "times": 3}, dynamic_int8(), dynamic_shapes=None)
    for other in (more, X[0], X[:, :8]):
        with pytest.raises(
            UnsupportedError, match=r"input 'x' must be a tensor of shape \(2, 16\), .* got a tensor of"
        ):
            fixed(other, times=3)
    varied = qframework.quantize(model, {"x": X, "times": 3}, dynamic_int8())
    torch.testing.assert_close(varied(more, times=3), model(more, times=3), atol=0.02, rtol=0)
    with pytest.raises(UnsupportedError, match=r"input 'x' must be a tensor of shape \(\*, 16\), .* got a tensor of"):
        varied(X[:, :8], times=3)


def test_constants_of_the_example_may_be_left_out() -> None:
    model = quantized(x=X, mask=None, return_dict=True, twice=True)
    expected = model(X, None, twice=True)
    assert torch.equal(model(X, twice=True), expected)
    assert torch.equal(model(X, twice=True, return_dict=None), expected)
    with pytest.raises(TypeError, match="quantized Optional is missing the argument 'twice', which the example had"):
        model(X)


@pytest.mark.parametrize("call", [lambda model: model(X, None), lambda model: model(x=X, mask=None)])
def test_none_is_no_value_for_a_tensor_of_the_example(call) -> None:
    with pytest.raises(TypeError, match="quantized Optional is missing the argument 'mask', which the example had"):
        call(quantized(X, MASK))


def test_positions_are_those_of_the_float_model() -> None:
    model = quantized(mask=MASK, x=X)
    assert torch.equal(model(X, MASK), model(x=X, mask=MASK))
    assert not torch.equal(model(X, MASK), model(MASK, X * 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"mask": MASK},
            r"input 'mask' must be left out, as in the example that the Optional .* got a tensor of shape \(2",
        ),
        ({"scale": 2.0}, r"input 'scale' must be left out or 1\.0, .* got 2\.0 of type float"),
        ({"twice": True}, "input 'twice' must be left out or False, .* got True"),
        ({"return_dict": False}, "input 'return_dict' must be left out or True, .* got False"),
        ({"labels": MASK}, "input 'labels' must be left out, .* Pass example_inputs with it to quantize"),
    ],
)
def test_other_values_are_refused(arguments, message) -> None:
    with pytest.raises(UnsupportedError, match=f"QuantizedModel: {message}"):
        quantized(X)(X, **arguments)


def test_a_constant_of_the_example_has_no_other_value() -> None:
    model = quantized(x=X, return_dict=True)
    with pytest.raises(UnsupportedError, match=r"input 'return_dict' must be True, .* got False"):
        model(X, return_dict=False)


def test_wrong_calls_are_those_of_python() -> None:
    model = quantized(X)
    with pytest.raises(TypeError, match="too many positional arguments"):
        model(X, None, 1.0, False)
    with pytest.raises(TypeError, match="multiple values for argument 'x'"):
        model(X, x=X)
    plain = qframework.quantize(MLP().eval(), (X,), dynamic_int8())
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
        plain(X, mask=None)


def test_the_signature_is_that_of_the_float_model() -> None:
    assert [*inspect.signature(quantized(X).forward).parameters] == ["x", "mask", "scale", "twice", "kwargs"]


@torch.no_grad()
def test_each_model_of_a_process_is_compiled(fresh_dynamo) -> None:
    """Not only the first eight, all that Dynamo compiles of one function."""
    models = [qframework.quantize(nn.Linear(16, 4).eval(), X, dynamic_int8()) for _ in range(9)]
    graphs = []
    for model in models:
        torch.compile(model, backend=without_inductor(graphs))(X)
    linears = [count(graph, torch.ops.qframework.int8_linear.default) for graph in graphs]
    assert sum(linears) == len(models)
