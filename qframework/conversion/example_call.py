"""Calls of a quantized model with the arguments of the float one.

``torch.export`` records the inputs of its example only, by name. Code that calls the model passes others as well, such
as ``attention_mask=None`` or ``return_dict=True``, or leaves out what the example had. Arguments that say what the
example said are accepted; all others are an error, since the graph would ignore them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qframework.arguments import described
from qframework.errors import UnsupportedError

_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_CONSTANTS = (bool, str, type(None))
# What models of transformers read from their configuration where an argument is left out or None.
_OF_CONFIGURATION = ("output_attentions", "output_hidden_states", "return_dict", "use_cache")


class FloatCall(NamedTuple):
    """How the float model is called."""

    kind: str
    signature: Signature
    positional: tuple[str, ...]
    defaults: dict[str, Any]
    """By name; of ``**kwargs`` those of the model's configuration."""
    any_name: bool
    """Whether there are ``**kwargs``."""

    def is_default(self, name: str, value: Any) -> bool:
        """Whether the model does the same without this argument."""
        parameter = self.signature.parameters.get(name)
        if value is None and (self.any_name if parameter is None else parameter.default is None):
            return True  # as if left out
        return name in self.defaults and _is_same(value, self.defaults[name])


def float_call(model: nn.Module) -> FloatCall | None:
    """How ``model`` is called; None if its ``forward`` has ``*args``, whose names are not known."""
    signature = inspect.signature(model.forward)
    parameters = signature.parameters.values()
    if any(parameter.kind is Parameter.VAR_POSITIONAL for parameter in parameters):
        return None
    any_name = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
    defaults = {one.name: one.default for one in parameters if one.default is not Parameter.empty}
    config = getattr(model, "config", None)
    for name in _OF_CONFIGURATION:
        value = getattr(config, name, None)
        if isinstance(value, bool) and (any_name or name in defaults) and defaults.get(name) is None:
            defaults[name] = value
    return FloatCall(
        type(model).__name__,
        signature.replace(
            parameters=[one.replace(annotation=Parameter.empty) for one in parameters],
            return_annotation=Signature.empty,
        ),
        tuple(one.name for one in parameters if one.kind not in (*_VARIADIC, Parameter.KEYWORD_ONLY)),
        defaults,
        any_name,
    )


def accept_float_calls(
    forward: Callable[..., Any], call: FloatCall, example: Mapping[str, Any], traced: Mapping[str, Any]
) -> Callable[..., Any] | None:
    """``forward``, a function of ``self`` and the inputs of ``example`` in that order, for calls of the float model.

    ``traced`` has the values that the graph was captured with: symbols for what may vary. Returns None if the float
    model has no inputs of these names.
    """
    names, count = tuple(example), len(example)
    if not all(name in call.signature.parameters or call.any_name for name in names):
        return None
    # PyTorch checks no input of a model of which the example names one that only its **kwargs take (one_call.py).
    unchecked = not all(name in call.signature.parameters for name in names)
    symbols = {name for name, value in traced.items() if isinstance(value, torch.SymInt | torch.SymFloat)}
    kinds = (*_CONSTANTS, int, float) if unchecked else _CONSTANTS
    constants = {name: value for name, value in example.items() if isinstance(value, kinds) and name not in symbols}
    tensors = {name: value for name, value in traced.items() if isinstance(value, Tensor) and unchecked}
    sizes = {name: tuple(n if isinstance(n, int) else None for n in value.shape) for name, value in tensors.items()}
    in_order = not constants and names == call.positional[:count]

    def forward_like_float(self: Any, *args: Any, **kwargs: Any) -> Any:
        if in_order and len(args) == count and not kwargs and not any(each is None for each in args):
            return forward(self, *args)
        values = _values(call, names, constants, args, kwargs)
        if sizes:
            _check_sizes(call, sizes, dict(zip(names, values, strict=True)))
        return forward(self, *values)

    # Dynamo counts compilations by code object, and runs the ninth one without compiling it: each model has its own.
    forward_like_float.__code__ = forward_like_float.__code__.replace()
    forward_like_float.__signature__ = _signature(call, names)  # type: ignore[attr-defined]
    return forward_like_float


def _signature(call: FloatCall, names: tuple[str, ...]) -> Signature:
    """The float model's, with ``self`` and with all inputs of the graph by name, as ``torch.export`` needs them."""
    own = call.signature.parameters
    first = Parameter.POSITIONAL_ONLY if _has_positional_only(call) else Parameter.POSITIONAL_OR_KEYWORD
    named = [Parameter(name, Parameter.KEYWORD_ONLY) for name in names if name not in own]
    others = [one for one in own.values() if one.kind is not Parameter.VAR_KEYWORD]
    rest = [one for one in own.values() if one.kind is Parameter.VAR_KEYWORD]
    return Signature([Parameter("self", first), *others, *named, *rest])


def _has_positional_only(call: FloatCall) -> bool:
    return any(one.kind is Parameter.POSITIONAL_ONLY for one in call.signature.parameters.values())


def _values(
    call: FloatCall, names: tuple[str, ...], constants: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    """The inputs of the graph, in order."""
    given = dict(zip(call.positional, args, strict=False))
    if len(args) > len(call.positional) or any(name in given for name in kwargs):
        call.signature.bind(*args, **kwargs)  # raises the TypeError of Python
    given.update(kwargs)
    values = []
    for name in names:
        if name not in given:
            if name not in constants or not call.is_default(name, constants[name]):
                raise _missing(call, name)
            values.append(constants[name])
            continue
        value = given.pop(name)
        if value is None and name not in constants:
            raise _missing(call, name)
        if name in constants and not _is_same(value, constants[name]):
            if value is not None or not call.is_default(name, constants[name]):
                raise _unlike_example(call, name, f"be {constants[name]!r}", value)
            value = constants[name]
        values.append(value)
    for name, value in given.items():
        if not call.any_name and name not in call.signature.parameters:
            raise TypeError(f"forward() of a quantized {call.kind} got an unexpected keyword argument {name!r}")
        if not call.is_default(name, value):
            default = call.defaults.get(name)
            left_out = "be left out" if default is None else f"be left out or {default!r}"
            raise _unlike_example(call, name, left_out, value)
    return values


def _check_sizes(call: FloatCall, sizes: Mapping[str, tuple[int | None, ...]], values: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for a tensor of which a size that is fixed is not the example's; None is any size."""
    for name, wanted in sizes.items():
        x = values[name]
        found = x.shape if isinstance(x, Tensor) else ()
        same = isinstance(x, Tensor) and len(found) == len(wanted)
        if not same or not all(n is None or size == n for size, n in zip(found, wanted, strict=True)):
            shape = ", ".join("*" if n is None else str(n) for n in wanted)
            raise _unlike_example(call, name, f"be a tensor of shape ({shape})", x)


def _is_same(value: Any, other: Any) -> bool:
    """Equal constants of one type. Tensors are never the same as a constant."""
    return value is other or (
        type(value) is type(other) and isinstance(value, bool | int | float | str) and value == other
    )


def _missing(call: FloatCall, name: str) -> TypeError:
    return TypeError(
        f"forward() of a quantized {call.kind} is missing the argument {name!r}, which the example had. Pass it, or "
        "quantize with example_inputs without it"
    )


def _unlike_example(call: FloatCall, name: str, wanted: str, value: Any) -> UnsupportedError:
    return UnsupportedError(
        f"QuantizedModel: input {name!r} must {wanted}, as in the example that the {call.kind} was quantized with, got "
        f"{described(value)}: its graph has no code for another value. Pass example_inputs with it to quantize"
    )
