"""Operators without a gradient in compiled models: their backward pass raises when it runs.

``torch.compile`` captures the backward pass together with the forward pass, so a formula that raises by itself ends the
compilation of a model that is only called. Here the formula is an operator, ``refuse_gradient``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from qframework.compat.dispatch import below_autograd, forward_level, functorch_transforms_active
from qframework.compat.dynamo import is_exporting
from qframework.errors import QFrameworkError
from qframework.kernels.runtime.operator import LIBRARY, declare, refuse_tangents, refuse_transforms


class RefuseGradientArguments(NamedTuple):
    """The arguments of ``qframework::refuse_gradient``."""

    grad: Tensor
    operator: str

    def check(self) -> None:
        """Accept any gradient."""


class ScaleOfArguments(NamedTuple):
    """The arguments of ``qframework::scale_of``."""

    scale: Tensor
    x: Tensor

    def check(self) -> None:
        """Accept any scale."""


def _refuse(x: RefuseGradientArguments) -> NoReturn:
    raise QFrameworkError(f"{x.operator}: inference only, without a gradient. Run the model under torch.no_grad()")


declare(
    "refuse_gradient(Tensor grad, str operator) -> Tensor",  # reads grad, so that it stays in the backward pass
    RefuseGradientArguments,
    everywhere=_refuse,
    fake=lambda x: torch.empty_like(x.grad),
)
declare(
    "scale_of(Tensor scale, Tensor x) -> Tensor",
    ScaleOfArguments,
    everywhere=lambda x: x.scale.clone(),
    fake=lambda x: torch.empty_like(x.scale),
)


def refuse_when_run(operator: str) -> None:
    """Give an operator, whose differentiable operands broadcast to its result, a backward that raises QFrameworkError.

    Autograd sums a gradient over the dimensions that were broadcast. So the formula needs no shapes: to save them would
    cost every call that autograd records as much as the operator.
    """

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(_refused(grad, operator) if needed else None for needed in ctx.needs_input_grad)

    torch.library.register_autograd(f"qframework::{operator}", backward, lib=LIBRARY)


def _refused(grad: Tensor, operator: str) -> Tensor:
    refused: Tensor = torch.ops.qframework.refuse_gradient.default(grad, operator)
    return refused


class _ScaleOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: Tensor, x: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return scale.view_as(scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, _refused(grads[0], "int8_linear").to(ctx.dtype).expand(ctx.shape)


def scale_of(scale: Tensor, x: Tensor) -> Tensor:
    """``scale``, which autograd takes to depend on ``x``: so does a product of ``x`` in integers then, if it reads it.

    Of integers themselves autograd knows no origin: the gradient of a residual would pass for that of the sum. In
    graphs below autograd it is a view. Exports and traces of TorchScript, which may be called with gradients later,
    hold the operator.

    Raises:
        UnsupportedError: inside of torch.func.grad and its like, and where ``x`` has a tangent.
    """
    if forward_level() >= 0:
        refuse_tangents("int8_linear", (x,))
    transformed = functorch_transforms_active()  # vmap hides whether x requires a gradient
    captured = is_exporting() or torch.jit.is_tracing()
    if not captured and (not torch.is_grad_enabled() or not (x.requires_grad or transformed)):
        return scale
    if captured or torch.compiler.is_dynamo_compiling() or transformed:  # by Dynamo's graphs, and below vmap
        linked: Tensor = torch.ops.qframework.scale_of.default(scale, x)
        return linked
    if scale.requires_grad and type(x) is Tensor:  # a dynamic scale, outside of compilers
        return scale
    return _scale_of(scale, x)


def _scale_of(scale: Tensor, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled() or not x.requires_grad:  # decompositions of an export keep the operator
        with below_autograd():
            copied: Tensor = torch.ops.qframework.scale_of.default(scale, x)
        return copied
    refuse_transforms("int8_linear")
    linked: Tensor = _ScaleOf.apply(scale.detach(), x)  # detached: PyTorch would warn that a dynamic one has no formula
    return linked


LIBRARY.impl("scale_of", _scale_of, "Autograd")
