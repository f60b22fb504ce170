"""How an operator of ``torch.ops.qframework`` is declared: schema, arguments, implementations.

The arguments of an operator are one record: a NamedTuple with the schema's names, types and defaults, whose ``check``
raises for invalid arguments. ``declare`` builds and checks the record for each call from the dispatcher and passes it
to the implementation::

    class Arguments(NamedTuple):
        x: Tensor
        scale: Tensor

        def check(self) -> None: ...

    SCALE = declare("scale(Tensor x, Tensor scale) -> Tensor", Arguments, cpu=scale_ref, cuda=scale_triton, fake=empty)

CUDA implementations are replayed (see replay.py): a replayed call builds no record.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qframework.compat.dispatch import (
    LOSES_TANGENTS,
    DispatchKey,
    NestedTensor,
    forward_level,
    functorch_transforms_active,
    in_jvp,
    is_fwd_grad_enabled,
    is_key_excluded,
)
from qframework.compat.operators import OpOverload
from qframework.compat.operators import schema as schema_of
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.runtime.replay import replayed

P = ParamSpec("P")
R = TypeVar("R")


class OperatorLibrary(torch.library.Library):
    """A library whose operators run with autocast off, which would turn their float32 products into 16-bit ones."""

    def define(self, schema: str, *args: Any, **kwargs: Any) -> str:
        defined: str = super().define(schema, *args, **kwargs)
        name = schema.partition("(")[0].strip()
        packet, _, overload = name.partition(".")
        for kind in ("CPU", "CUDA"):
            self.impl(name, _without_autocast(packet, overload or "default", kind.lower()), f"Autocast{kind}")
        for key in ("AutogradNestedTensor", "NestedTensorCPU", "NestedTensorCUDA"):
            self.impl(name, _refuses_nested(packet), key)
        # In inference mode, jagged ones come to their class first.
        torch.library.register_torch_dispatch(f"qframework::{name}", NestedTensor, _refuses_nested(packet), lib=self)
        return defined

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **kwargs: Any) -> Any:
        """Register ``fn``, wrapped on CPUs to refuse tangents; on GPUs ``on_its_device`` refuses them."""
        if dispatch_key in ("CPU", "CompositeExplicitAutograd"):
            fn = _without_tangents(str(op_name), fn)
        return super().impl(op_name, fn, dispatch_key, **kwargs)


def _refuses_nested(operator: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"{operator}: tensors must be dense, got a nested one. Pad it with torch.nested.to_padded_tensor, or pass "
            "its values()"
        )

    return run


def _without_tangents(operator: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(implementation)
    def run(*args: Any, **kwargs: Any) -> Any:
        if forward_level() >= 0:
            refuse_tangents(operator, (*args, *kwargs.values()))
        return implementation(*args, **kwargs)

    return run


def refuse_tangents(operator: str, arguments: tuple[Any, ...]) -> None:
    """Raise UnsupportedError where an argument has a tangent, which implementations below autograd would drop.

    Call it only where a level of forward-mode AD is active, so that other calls pay for one comparison. Inside
    ``torch.func.jvp`` implementations cannot see which arguments have a tangent, so every call is refused. Code that
    Dynamo traces gets a guard on the level: compiled outside of one, it is traced anew inside.
    """
    if torch.compiler.is_dynamo_compiling():
        refuse_capture(operator)
    passed = is_key_excluded(DispatchKey.ADInplaceOrView)
    if passed or not is_fwd_grad_enabled():  # the caller is a tensor subclass or an autograd function
        return
    tensors = (x for each in arguments for x in (each if isinstance(each, list | tuple) else (each,)))
    jvp = in_jvp()
    if jvp or any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise UnsupportedError(
            f"{operator}: the call must be a plain one or under reverse-mode autograd, got "
            f"{'torch.func.jvp' if jvp else 'a forward-mode derivative'}"
        )


def _outside_dual_levels(operator: str, fake: Callable[P, R]) -> Callable[P, R]:
    """``fake``, which captures no graph inside of a level of forward-mode AD where that graph would lose tangents."""
    if not LOSES_TANGENTS:
        return fake

    @functools.wraps(fake)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if forward_level() >= 0:
            refuse_capture(operator)
        return fake(*args, **kwargs)

    return run


def refuse_capture(operator: str) -> None:
    """Raise UnsupportedError inside of a level of forward-mode AD where a graph would lose tangents."""
    if LOSES_TANGENTS:
        raise UnsupportedError(
            f"{operator}: the call must be a plain one or under reverse-mode autograd, got a forward-mode "
            "derivative, or a compilation inside of one, which loses tangents before PyTorch 2.12. Call the function "
            "outside of forward_ad.dual_level()"
        )


def _without_autocast(packet: str, overload: str, device: str) -> Callable[..., Any]:
    """The operator, called with autocast off."""

    def run(*args: Any, **kwargs: Any) -> Any:
        operator = getattr(getattr(torch.ops.qframework, packet), overload)
        with torch.autocast(device, enabled=False):
            return operator(*args, **kwargs)

    return run


LIBRARY = OperatorLibrary("qframework", "DEF")


class Arguments(Protocol):
    """The arguments of one call of an operator."""

    def check(self) -> None:
        """Raise QFrameworkError for arguments that the operator does not accept.

        Also called with fake tensors, whose values cannot be read.
        """


A = TypeVar("A", bound=Arguments)


class Operator(Generic[A]):
    """A declared operator. Its implementations take the arguments one by one, as the dispatcher passes them."""

    def __init__(
        self,
        arguments: Callable[..., A],
        implementations: Mapping[str, Callable[[A], Any]],
        warm_up: Callable[[torch.device, A], Any] | None,
    ) -> None:
        self.arguments = arguments
        self.implementations = {key: _checked(arguments, each) for key, each in implementations.items()}
        self.replayed = replayed(self.cuda) if "CUDA" in implementations else None
        self.warm_up = warm_up

    @property
    def cpu(self) -> Callable[..., Any]:
        """The CPU's implementation."""
        return self.implementations["CPU"]

    @property
    def cuda(self) -> Callable[..., Any]:
        """The GPU's implementation, without replays; in Triton's interpreter it takes CPU tensors."""
        return self.implementations["CUDA"]


OPERATORS: dict[str, Operator[Any]] = {}  # by name, with the overload where there is one


def operator_of(target: Any) -> Operator[Any] | None:
    """The declared operator that a node's target, an ``OpOverload``, stands for."""
    if not isinstance(target, OpOverload) or target.namespace != "qframework":
        return None
    return OPERATORS.get(
        schema_of(target).name.partition("::")[2] + ("." + schema_of(target).overload_name).rstrip(".")
    )


def declare(
    schema: str,
    arguments: Callable[..., A],
    *,
    fake: Callable[[A], Any],
    cpu: Callable[[A], Any] | None = None,
    cuda: Callable[[A], Any] | None = None,
    everywhere: Callable[[A], Any] | None = None,
    warm_up: Callable[[torch.device, A], Any] | None = None,
) -> Operator[A]:
    """Define an operator and register its implementations, all of which take the checked record.

    Args:
        schema: as for ``torch.library``, without the namespace.
        arguments: the record's class.
        fake: returns results of the right shape, strides, dtype and device, for fake and "meta" tensors.
        cpu: runs on CPUs: the reference, or a faster implementation that is as exact.
        cuda: runs on GPUs, with the first operand's device as the current one. It may depend on the shapes, strides,
            dtypes, devices and alignment of tensors and on the other arguments only, since later calls replay it.
        everywhere: runs on every device, instead of ``cpu`` and ``cuda``.
        warm_up: compiles what ``cuda`` would launch on a device for operands that may be on "meta"; returns Triton's
            kernel or a promise of it, a list of them, or None where nothing is launched.
    """
    name = schema.partition("(")[0]
    keys = {"CPU": cpu, "CUDA": cuda, "CompositeExplicitAutograd": everywhere, "Meta": fake}
    given = {key: each for key, each in keys.items() if each is not None}
    operator = OPERATORS[name] = Operator(arguments, given, warm_up)
    LIBRARY.define(schema)
    for key in given.keys() - {"CUDA", "Meta"}:
        LIBRARY.impl(name, operator.implementations[key], key)
    if operator.replayed is not None:
        LIBRARY.impl(name, on_its_device(name, operator.replayed), "CUDA")
    torch.library.register_fake(
        f"qframework::{name}", _outside_dual_levels(name, operator.implementations["Meta"]), lib=LIBRARY
    )
    return operator


def _checked(arguments: Callable[..., A], implementation: Callable[[A], R]) -> Callable[..., R]:
    @functools.wraps(implementation)
    def run(*args: Any, **kwargs: Any) -> R:
        record = arguments(*args, **kwargs)
        record.check()
        return implementation(record)

    return run


def on_its_device(operator: str, implementation: Callable[P, R]) -> Callable[P, R]:
    """Make the device of the first argument, a tensor or list of tensors, current, and refuse tangents."""

    @functools.wraps(implementation)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if forward_level() >= 0:
            refuse_tangents(operator, (*args, *kwargs.values()))
        first: Any = args[0]
        device: torch.device = (first[0] if isinstance(first, list) else first).device
        if device.index == torch.cuda.current_device():
            return implementation(*args, **kwargs)
        with torch.cuda.device(device):
            return implementation(*args, **kwargs)

    return run


def transform_in_force(*tensors: Tensor | None) -> str | None:
    """A transform or derivative in effect that operators have no rule for and would silently get wrong, or None."""
    if functorch_transforms_active():
        return "a transform of torch.func"
    if torch.compiler.is_compiling():  # only a transform brings tangents into a graph
        return None
    if forward_level() < 0:  # no tensor has a tangent
        return None
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        return "a forward-mode derivative"
    return None


def refuse_transforms(operator: str, *tensors: Tensor | None) -> None:
    """Raise UnsupportedError inside a transform of torch.func and where one of ``tensors`` has a tangent."""
    transform = transform_in_force(*tensors)
    if transform is not None:
        raise UnsupportedError(f"{operator}: the call must be a plain one, got {transform}")


def refuse_gradients(operator: str, instead: str, **operands: Tensor | None) -> None:
    """Raise QFrameworkError where an operand requires a gradient that the operator cannot compute.

    For use in functions: registered as an autograd formula, it would cost the host 7 us at every call, as much as the
    operator's own Python.
    """
    refuse_transforms(operator, *operands.values())
    for name, tensor in operands.items():
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise QFrameworkError(
                f"{operator}: {name} must not require a gradient, which the operator does not compute. Pass "
                f"{name}.detach(), or use {instead}"
            )


def refuse_backward(*operators: str) -> None:
    """Give inference operators a backward that raises QFrameworkError."""

    def backward(ctx: Any, *grads: Tensor) -> None:
        names = " and ".join(operators)
        raise QFrameworkError(f"{names}: inference only, without a gradient. Run the model under torch.no_grad()")

    for operator in operators:
        torch.library.register_autograd(f"qframework::{operator}", backward, lib=LIBRARY)
