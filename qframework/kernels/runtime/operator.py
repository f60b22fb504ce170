"""How an operator is declared: the library of ``torch.ops.qframework``, and what its functions refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qframework.compat.dispatch import functorch_transforms_active
from qframework.errors import QFrameworkError, UnsupportedError


class OperatorLibrary(torch.library.Library):
    """Operators that compute what they promise inside ``torch.autocast`` as well.

    Of what an implementation calls, autocast would turn products in float32 into 16-bit ones.
    """

    def define(self, schema: str, *args: Any, **kwargs: Any) -> str:
        defined: str = super().define(schema, *args, **kwargs)
        name = schema.partition("(")[0].strip()
        packet, _, overload = name.partition(".")
        for kind in ("CPU", "CUDA"):
            self.impl(name, _without_autocast(packet, overload or "default", kind.lower()), f"Autocast{kind}")
        return defined


def _without_autocast(packet: str, overload: str, device: str) -> Callable[..., Any]:
    """What runs instead of an operator inside autocast: the operator outside of it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        operator = getattr(getattr(torch.ops.qframework, packet), overload)
        with torch.autocast(device, enabled=False):
            return operator(*args, **kwargs)

    return run


LIBRARY = OperatorLibrary("qframework", "DEF")


def transform_in_force(*tensors: Tensor | None) -> str | None:
    """What asks for derivatives or batching in a way that operators have no rule for, and would get wrong silently."""
    if functorch_transforms_active():
        return "a transform of torch.func"
    if torch.compiler.is_compiling():  # whose graph has no tangents but those of a transform
        return None
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        return "a forward-mode derivative"
    return None


def refuse_transforms(operator: str, *tensors: Tensor | None) -> None:
    """Raise UnsupportedError in a transform of torch.func and where one of ``tensors`` has a tangent."""
    transform = transform_in_force(*tensors)
    if transform is not None:
        raise UnsupportedError(f"{operator}: {transform}; accepted: plain calls, outside of both")


def refuse_gradients(operator: str, instead: str, **operands: Tensor | None) -> None:
    """Raise QFrameworkError where a gradient is wanted of an operand of an operator that gives none.

    For functions, not implementations: registered as the operator's formula for autograd, a refusal would cost the host
    7 us at every call, as much as the operator's own Python.
    """
    refuse_transforms(operator, *operands.values())
    for name, tensor in operands.items():
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise QFrameworkError(
                f"{operator}: {name} requires a gradient, and the operator gives none; accepted: {name}.detach(), or "
                f"{instead}, which has one"
            )
