"""Calls of a quantized model with arguments of the float model that its example had not, or had otherwise."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from quantized_models import MLP
from torch import Tensor

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


def test_constants_of_the_example_may_be_left_out() -> None:
    model = quantized(x=X, mask=None, return_dict=True, twice=True)
    expected = model(X, None, twice=True)
    assert torch.equal(model(X, twice=True), expected)
    assert torch.equal(model(X, twice=True, return_dict=None), expected)
    with pytest.raises(TypeError, match="quantized Optional is missing the argument 'twice', which the example had"):
        model(X)


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
