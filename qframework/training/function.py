"""Base of INT8 training's autograd functions: first derivatives in reverse mode; all others raise an error.

Their formulas call operators without derivatives, so differentiating them again would silently drop terms.
``torch.autograd.function.once_differentiable`` does not prevent this: its results are connected neither to inputs nor
to saved tensors, so ``torch.autograd.grad`` skips it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from qframework.compat.dispatch import is_batchedtensor, is_legacy_batchedtensor, peek_interpreter_stack
from qframework.errors import UnsupportedError


class Int8Function(torch.autograd.Function):
    """An autograd function called ``<operator>Function``.

    Raises:
        UnsupportedError: in a transform of ``torch.func``; in a forward-mode derivative; in a backward pass with
            ``create_graph=True`` or ``is_grads_batched=True``, or in ``torch.vmap``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "backward" in cls.__dict__:
            cls.backward = staticmethod(_first_order(cls, cls.backward))  # type: ignore[method-assign]

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        if peek_interpreter_stack() is not None:
            _refuse(cls, "it was called in a transform of torch.func")
        return super().apply(*args, **kwargs)

    @classmethod
    def jvp(cls, ctx: Any, *tangents: Any) -> Any:
        _refuse(cls, "an input has a forward-mode derivative")


def _first_order(function: type[Int8Function], backward: Callable[..., Any]) -> Callable[..., Any]:
    """``backward``, with an error if its result would be differentiated or its gradients are batched."""

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            _refuse(function, "create_graph=True asks for second derivatives")
        if any(map(_is_batch, grads)):
            _refuse(function, "torch.vmap or is_grads_batched=True asks for several gradients at once")
        return backward(ctx, *grads)

    return checked


def _is_batch(grad: Any) -> bool:
    return isinstance(grad, Tensor) and (is_legacy_batchedtensor(grad) or is_batchedtensor(grad))


def _refuse(function: type[Int8Function], why: str) -> NoReturn:
    raise UnsupportedError(
        f"{function.__name__.removesuffix('Function')}: derivatives must be first ones, by loss.backward() or "
        f"torch.autograd.grad, but {why}. For others keep the layers in float, with keep_float= of "
        "convert_to_int8_training or restore_float(model)"
    )
