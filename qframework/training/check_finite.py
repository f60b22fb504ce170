"""Checks for NaN and infinity in activations and gradients, which report the layer where they first appear.

A debugging option of convert_to_int8_training: every check synchronizes with the GPU. Tensors in blocks are checked by
their scales, since a block with NaN or infinity has such a scale. The checks also run under torch.compile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qframework.compat.modules import remove_hooks, submodules
from qframework.errors import NonFiniteError
from qframework.kernels.runtime.operator import declare
from qframework.training.activation import Int8GatedMLP
from qframework.training.block_tensor import BlockTensor, wrap_blocks
from qframework.training.function import Int8Function


class CheckFiniteArguments(NamedTuple):
    """The arguments of ``qframework::check_finite``."""

    x: Tensor
    what: str

    def check(self) -> None:
        """Accept any tensor."""


def _check_finite(arguments: CheckFiniteArguments) -> Tensor:
    """A copy of ``x`` (any float tensor). Raises NonFiniteError, whose message starts with ``what``."""
    x, what = arguments
    if not bool(x.isfinite().all()):
        nan, infinite = int(x.isnan().sum()), int(x.isinf().sum())
        raise NonFiniteError(f"{what} must be finite, got {nan} NaN and {infinite} infinite of {x.numel()}")
    return x.clone()


CHECK_FINITE = declare(
    "check_finite(Tensor x, str what) -> Tensor",
    CheckFiniteArguments,
    everywhere=_check_finite,
    fake=lambda arguments: torch.empty_like(arguments.x),
)


def _checked(x: Tensor, name: str, what: str) -> Tensor:
    if not isinstance(x, BlockTensor):
        return torch.ops.qframework.check_finite(x, f"{name}: {what}")
    scale = torch.ops.qframework.check_finite(x.scale, f"{name}: {what} (scales of INT8 blocks)")
    return wrap_blocks(x.q.clone(), scale, x.block_size, x.dtype, x.statistics)


@torch.compiler.allow_in_graph
class CheckFinite(Int8Function):
    """A copy of ``x``, float or in blocks; checks ``x`` in the forward pass and its gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, what: str) -> Tensor:
        ctx.name, ctx.what = name, what
        return _checked(x, name, what)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _checked(grad, ctx.name, f"gradient of its {ctx.what}"), None, None


def _check(value: Any, name: str, what: str) -> Any:
    """``value`` with its floating-point tensors checked, also those in a tuple."""
    if isinstance(value, tuple):
        return tuple(_check(item, name, what) for item in value)
    if isinstance(value, Tensor) and value.is_floating_point():
        return CheckFinite.apply(value, name, what)
    return value


class CheckOutput:
    """Forward hook of a layer that checks its output."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return _check(output, self.name, "output")


class CheckInput:
    """Forward pre-hook that checks inputs, which may come from code that is not a module, such as attention."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_check(value, self.name, "input") for value in args)


def watch(model: nn.Module) -> None:
    """Check the outputs of all innermost modules of ``model``, and the inputs of linears."""
    parts_of_gated = {
        submodules(module).get("act_fn") for module in model.modules() if isinstance(module, Int8GatedMLP)
    }
    for name, module in model.named_modules():
        if any(True for _ in module.children()) or module in parts_of_gated:
            continue
        module.register_forward_hook(CheckOutput(name))
        if getattr(module, "weight", None) is not None and module.weight.dim() == 2 and not _looks_up(module):
            module.register_forward_pre_hook(CheckInput(name))


def _looks_up(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding)


def remove_checks(model: nn.Module) -> None:
    """Undo ``watch``."""
    for module in model.modules():
        remove_hooks(module, (CheckOutput, CheckInput))
