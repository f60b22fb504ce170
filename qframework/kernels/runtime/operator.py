"""How an operator of ``torch.ops.qframework`` is declared: schema, arguments, implementations.

An operator's arguments are one record, a NamedTuple with the schema's names, types and defaults, whose ``check`` raises
for what the operator does not accept. ``declare`` builds and checks the record at the dispatcher's boundary and hands
it whole to every implementation::

    class Arguments(NamedTuple):
        x: Tensor
        scale: Tensor

        def check(self) -> None: ...

    SCALE = declare("scale(Tensor x, Tensor scale) -> Tensor", Arguments, cpu=scale_ref, cuda=scale_triton, fake=empty)

A CUDA implementation is replayed, see replay.py: a call of a kind that was recorded builds no record.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qframework.compat.dispatch import (
    DispatchKey,
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
        if forward_level() >= 0:
            refuse_tangents(operator, (*args, *kwargs.values()))
        return implementation(*args, **kwargs)

    return run


def refuse_tangents(operator: str, arguments: tuple[Any, ...]) -> None:
    """Raise UnsupportedError where an argument has a tangent, which implementations, below autograd, would drop.

    For where a level of forward-mode AD is active, so that all other calls pay for one comparison. Inside
    ``torch.func.jvp`` implementations cannot see which arguments have one.
    """
    passed = is_key_excluded(DispatchKey.ADInplaceOrView)
    if passed or not is_fwd_grad_enabled():  # the caller is a tensor subclass or an autograd function
        return
    tensors = (x for each in arguments for x in (each if isinstance(each, list | tuple) else (each,)))
    jvp = in_jvp()
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


class Arguments(Protocol):
    """The arguments of one call of an operator."""

    def check(self) -> None:
        """Raise QFrameworkError for arguments that the operator does not accept.

        Also called with fake tensors, whose values cannot be read.
        """


A = TypeVar("A", bound=Arguments)


class Operator(Generic[A]):
    """A declared operator. Its implementations take what the dispatcher passes, the arguments one by one."""

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
        """The GPU's implementation, without replays; in Triton's interpreter it takes the CPU's tensors."""
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
        fake: results of the right shape, strides, dtype and device, for fake and "meta" tensors.
        cpu: on the CPU; the reference, or something faster that is as exact.
        cuda: on GPUs, with the first operand's device as the current one: what follows from shapes, strides, dtypes,
            devices, alignment and other arguments alone, since later calls replay it.
        everywhere: on every device, instead of both.
        warm_up: compiles what ``cuda`` would launch on a device for operands that may lie on "meta"; returns Triton's
            kernel or promise of one, None where nothing is launched.
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
    torch.library.register_fake(f"qframework::{name}", operator.implementations["Meta"], lib=LIBRARY)
    return operator


def _checked(arguments: Callable[..., A], implementation: Callable[[A], R]) -> Callable[..., R]:
    @functools.wraps(implementation)
    def run(*args: Any, **kwargs: Any) -> R:
        record = arguments(*args, **kwargs)
        record.check()
        return implementation(record)

    return run


def on_its_device(operator: str, implementation: Callable[P, R]) -> Callable[P, R]:
    """Make the device of the first argument, a tensor or a list of some, the current one: Triton launches there.

    Tangents, which ``implementation`` would drop, are refused.
    """

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
