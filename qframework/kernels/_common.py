"""What every operator needs: the library handle, checks, the device, row-wise scales and shared Triton functions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels._triton import tl, triton
from qframework.numerics import FLOAT_DTYPES, MIN_SCALE

MIN_CAPABILITY = (8, 0)


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

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **kwargs: Any) -> Any:
        """Registers ``fn``, which refuses tangents; on GPUs ``on_its_device`` does that, without another call."""
        if dispatch_key in ("CPU", "CompositeExplicitAutograd"):
            fn = _without_tangents(str(op_name), fn)
        return super().impl(op_name, fn, dispatch_key, **kwargs)


def _without_tangents(operator: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(implementation)
    def run(*args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0:
            refuse_tangents(operator, (*args, *kwargs.values()))
        return implementation(*args, **kwargs)

    return run


def refuse_tangents(operator: str, arguments: tuple[Any, ...]) -> None:
    """Raise UnsupportedError where an argument has a tangent, which implementations, below autograd, would drop.

    For where a level of forward-mode AD is active, so that all other calls pay for one comparison. Inside
    ``torch.func.jvp`` implementations cannot see which arguments have one.
    """
    passed = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.ADInplaceOrView)
    if passed or not torch._C._is_fwd_grad_enabled():  # the caller is a tensor subclass or an autograd function
        return
    tensors = (x for each in arguments for x in (each if isinstance(each, list | tuple) else (each,)))
    jvp = eager_transforms.JVP_NESTING > 0
    if jvp or any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise UnsupportedError(
            f"{operator}: {'called in torch.func.jvp' if jvp else 'a forward-mode derivative'}; accepted: plain calls, "
            "and reverse-mode gradients where the operator has some"
        )


def _without_autocast(packet: str, overload: str, device: str) -> Callable[..., Any]:
    """What runs instead of an operator inside autocast: the operator outside of it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        operator = getattr(getattr(torch.ops.qframework, packet), overload)
        with torch.autocast(device, enabled=False):
            return operator(*args, **kwargs)

    return run


LIBRARY = OperatorLibrary("qframework", "DEF")


@functools.cache
def check_device(device: torch.device) -> None:
    """Raise UnsupportedError for a GPU older than sm_80: it has no INT8 tensor cores that Triton can use."""
    if device.type != "cuda" or torch.version.hip:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise UnsupportedError(
            f"{name} ({device}) is sm_{capability[0]}{capability[1]}; qframework's kernels need sm_80 or newer. "
            "Run the model on the CPU or on a newer GPU."
        )


@functools.cache
def chip_of(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability, (0, 0) for an AMD GPU, and number of multiprocessors."""
    properties = torch.cuda.get_device_properties(device)
    capability = (0, 0) if torch.version.hip else (properties.major, properties.minor)
    return capability, properties.multi_processor_count


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability, (0, 0) for an AMD GPU, None for a CPU."""
    return chip_of(device)[0] if device.type == "cuda" else None


def check_dtype(operator: str, argument: str, tensor: Tensor, accepted: tuple[torch.dtype, ...]) -> None:
    """Raise UnsupportedError unless ``tensor`` has one of the accepted dtypes."""
    if tensor.dtype not in accepted:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in accepted)
        raise UnsupportedError(f"{operator}: {argument} has dtype {tensor.dtype}; accepted: {names}")


def check_same_device(operator: str, reference: Tensor, **others: Tensor | None) -> None:
    """Raise QFrameworkError naming the first tensor that lives on another device than ``reference``."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != reference.device:
            raise QFrameworkError(
                f"{operator}: {name} is on {tensor.device} but the input is on {reference.device}; move them together"
            )


def transform_in_force(*tensors: Tensor | None) -> str | None:
    """What asks for derivatives or batching in a way that operators have no rule for, and would get wrong silently."""
    if torch._C._are_functorch_transforms_active():
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


def check_float_input(operator: str, x: Tensor) -> None:
    """Raise UnsupportedError unless ``x`` is fp32, fp16 or bf16 with at least one dimension."""
    check_dtype(operator, "x", x, FLOAT_DTYPES)
    if x.ndim == 0:
        raise UnsupportedError(f"{operator}: x has shape (); accepted: one dimension or more")


def row_scale(operator: str, argument: str, scale: Tensor, shape: torch.Size, also: str = "") -> Tensor:
    """Flatten a scale that broadcasts against ``shape`` into one of period P: row m uses element m % P.

    P is 1 per tensor, the number of positions for static per-token scales and the number of rows for dynamic ones.
    Raises QFrameworkError when the scale does not broadcast row-wise; ``also`` names what else the caller accepts.
    """
    check_dtype(operator, argument, scale, (torch.float32,))
    if scale.numel() == 1:
        return scale.reshape(1)
    positions = tuple(scale.shape[:-1])
    while positions[:1] == (1,) and positions != _trailing(shape, len(positions)):
        positions = positions[1:]
    if scale.shape[-1] != 1 or positions != _trailing(shape, len(positions)):
        per_row = (*tuple(shape[:-1]), 1)
        raise QFrameworkError(
            f"{operator}: {argument} has shape {tuple(scale.shape)}, which is no scale per tensor or per row of "
            f"{tuple(shape)}; accepted: {also}(1,), {per_row} or a trailing part of {per_row}"
        )
    return scale.reshape(-1).contiguous()


def _trailing(shape: torch.Size, n: int) -> tuple[int, ...] | None:
    """The n dimensions before the last one, or None where there are fewer."""
    return tuple(shape[len(shape) - 1 - n : -1]) if n < len(shape) else None


def check_positive_scale(operator: str, argument: str, scale: Tensor) -> None:
    """Raise QFrameworkError for a zero or negative scale. CPU only: on a GPU the look would cost a synchronization."""
    if scale.device.type == "cpu" and bool((scale <= 0).any()):
        raise QFrameworkError(
            f"{operator}: {argument} holds {float(scale.min())}; scales must be positive (at least {MIN_SCALE:.3g})"
        )


def rows_of(x: Tensor) -> Tensor:
    """View ``(..., C)`` as ``(rows, C)`` with a contiguous last dimension, copying only where no view exists."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


@triton.jit
def round_half_even(x):
    """Round a float32 of magnitude below 2**22 to an integer by pushing the fraction out of its mantissa."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def round_to_int8(x):
    """Saturate to [-127, 127], then round half to even: added to 1.5 * 2**23, the integer is the lowest byte."""
    return (tl.minimum(tl.maximum(x, -127.0), 127.0) + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
