"""The INT8 class of each float module, and the change of a module's class in place.

A converted module is the same object with another class. Its parameters, buffers, hooks, mode and attributes stay, and
references to it stay valid. The new class is a subclass of both the INT8 module and the module's own class, whose
methods and class attributes it keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from torch import nn
from torch.nn.utils import parametrize

from qframework.compat.modules import names, parameters
from qframework.errors import QFrameworkError
from qframework.kernels.blocks.format import BlockSize
from qframework.training.activation import Int8Activation, Int8GatedMLP
from qframework.training.dropout import Int8Dropout
from qframework.training.linear import Int8Conv1D, Int8Linear
from qframework.training.linear_baselines import PerTensorConv1D, PerTensorLinear, PerTokenConv1D, PerTokenLinear
from qframework.training.norm import Int8LayerNorm, Int8RMSNorm
from qframework.training.roles import (
    ORIGIN,
    Role,
    activation_kind,
    norm_eps,
    scale_name,
    weight_offset,
    writes_input,
)
from qframework.training.scale import Int8DropPath, Int8LayerScale


@dataclass(frozen=True)
class Replacement:
    """A module's new class. ``settings`` need names that are free in it; ``shape`` is set only where it is missing."""

    kind: type[nn.Module]
    settings: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        output = self.settings.get("output")
        return self.kind.__name__ + (f" ({output} out)" if output else "")


@dataclass(frozen=True)
class _Origin:
    """The class of a module before its conversion, its INT8 class, and the attributes that the conversion added."""

    before: type[nn.Module]
    kind: type[nn.Module]
    added: tuple[str, ...]


def replacement(module: nn.Module, role: Role, output: str, mode: str, block_size: BlockSize) -> Replacement:
    """The replacement of ``module`` in ``mode``; ``output`` applies to linears."""
    if mode != "per_block":
        return Replacement(_BASELINES[mode, role])
    return _MAKERS[role](module, output, block_size)


def gated_mlp(act_fn: nn.Module, block_size: BlockSize) -> Replacement:
    """The replacement of an MLP that is ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``."""
    return Replacement(Int8GatedMLP, {"kind": activation_kind(act_fn), "block_size": block_size})


def taken_name(module: nn.Module, new: Replacement) -> str | None:
    """A name that ``new`` needs for a setting and that ``module`` already uses, or None."""
    spaces = (module.__dict__, names(module), _class_names(type(module)))
    return next((name for name in new.settings if any(name in space for space in spaces)), None)


def _class_names(kind: type) -> set[str]:
    return {name for each in kind.__mro__ for name in vars(each)}


# Changing a module and changing it back


def become(module: nn.Module, new: Replacement) -> None:
    """Change ``module`` to ``new``. Raises TypeError, without a change, if its class cannot change."""
    before = type(module)
    added = {**new.settings, **{name: value for name, value in new.shape.items() if not hasattr(module, name)}}
    module.__class__ = _joined(new.kind, before)
    module.__dict__.update(added)
    module.__dict__[ORIGIN] = _Origin(before, new.kind, tuple(added))


def float_again(module: nn.Module) -> None:
    """Undo ``become``."""
    origin: _Origin = module.__dict__.pop(ORIGIN)
    for name in origin.added:
        module.__dict__.pop(name, None)
    module.__class__ = _float_class(type(module), origin)


def check_unchanged(name: str, module: nn.Module) -> None:
    """Raise QFrameworkError if the class of a converted module was changed again."""
    origin: _Origin = module.__dict__[ORIGIN]
    if type(module) not in (_joined(origin.kind, each) for each in (origin.before, _unparametrized(origin.before))):
        raise QFrameworkError(
            f"restore_float: {name} must have the class of its conversion, {origin.kind.__name__}, got "
            f"{type(module).__name__}. Undo what changed its class first"
        )


_joined_classes: WeakValueDictionary[tuple[type, type], type[nn.Module]] = WeakValueDictionary()


def _joined(kind: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    """A class with the computation of ``kind`` and everything else of ``own``; ``kind`` if it is a subclass already."""
    if issubclass(kind, own):
        return kind
    joined = _joined_classes.get((kind, own))
    if joined is None and own is not _unparametrized(own):
        body = {name: value for name, value in vars(own).items() if name not in ("__module__", "__doc__")}
        base = _joined(kind, _unparametrized(own))
        joined = _joined_classes[kind, own] = type(base.__name__, (base,), body)
    if joined is None:
        body = {"__module__": kind.__module__, "__reduce_ex__": _reduce_ex(kind, own)}
        joined = _joined_classes[kind, own] = type(kind.__name__, (kind, own), body)
    return joined


def _unparametrized(own: type[nn.Module]) -> type[nn.Module]:
    """The class before ``torch.nn.utils.parametrize`` derived ``own`` from it for one module, otherwise ``own``.

    Joined classes have the same structure, so that ``remove_parametrizations`` restores the right one.
    """
    base = own.__bases__[0]
    return base if own.__module__ == parametrize.__name__ and own.__name__ == f"Parametrized{base.__name__}" else own


def _float_class(joined: type[nn.Module], origin: _Origin) -> type[nn.Module]:
    """The class of a module before its conversion, without parametrizations that were removed since."""
    base = _unparametrized(origin.before)
    if base is origin.before or joined is _joined(origin.kind, base):
        return base
    for name in [name for name, value in vars(origin.before).items() if isinstance(value, property)]:
        if name not in vars(joined):
            delattr(origin.before, name)
    return origin.before


def _reduce_ex(kind: type[nn.Module], own: type[nn.Module]) -> Callable[..., Any]:
    """Pickle and copy by the two classes, since a joined class cannot be imported by name."""

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        joined = _joined(kind, own)
        build, args, *rest = super(joined, self).__reduce_ex__(max(protocol, 2))
        build, *args = (own if value is joined else value for value in (build, *args))
        origin: _Origin = self.__dict__[ORIGIN]
        brought = {name: self.__dict__[name] for name in (*origin.added, ORIGIN) if name in self.__dict__}
        return _rebuilt, (kind, own, build, tuple(args), brought), *rest

    return __reduce_ex__


def _rebuilt(
    kind: type[nn.Module], own: type[nn.Module], build: Callable[..., Any], args: tuple[Any, ...], brought: Any
) -> nn.Module:
    """Rebuild a module as ``own`` does, with the joined class and the attributes that the conversion added."""
    module: nn.Module = build(*args)
    object.__setattr__(module, "__class__", _joined(kind, own))
    module.__dict__.update(brought)
    return module


# What each role becomes


def _linear(module: Any, output: str, block_size: BlockSize) -> Replacement:
    flags = {"stochastic_gradients": False, "keep_weight": None, "weight_is_spread": False}
    return Replacement(Int8Linear, {"block_size": block_size, "output": output, **flags})


def _conv1d(module: Any, output: str, block_size: BlockSize) -> Replacement:
    weight = parameters(module).get("weight")  # none where it is computed by a hook or a parametrization
    shape = {"nx": None if weight is None else weight.shape[0]}
    return Replacement(Int8Conv1D, _linear(module, output, block_size).settings, shape)


def _layer_norm(module: Any, output: str, block_size: BlockSize) -> Replacement:
    return Replacement(Int8LayerNorm, {"block_size": block_size}, {**_norm_shape(module), "bias": None})


def _rms_norm(module: Any, output: str, block_size: BlockSize) -> Replacement:
    offset = weight_offset(module)
    settings = {"block_size": block_size, **({"weight_offset": offset} if offset else {})}
    return Replacement(Int8RMSNorm, settings, _norm_shape(module))


def _norm_shape(module: Any) -> dict[str, Any]:
    weight = getattr(module, "weight", None)
    shape = None if weight is None else tuple(weight.shape)  # without one, of any width
    affine = weight is not None
    return {"weight": weight, "normalized_shape": shape, "eps": norm_eps(module), "elementwise_affine": affine}


def _activation(module: Any, output: str, block_size: BlockSize) -> Replacement:
    return Replacement(Int8Activation, {"kind": activation_kind(module), "block_size": block_size, **_writes(module)})


def _writes(module: Any) -> dict[str, bool]:
    return {"writes_input": True} if writes_input(module) else {}


def _dropout(module: Any, output: str, block_size: BlockSize) -> Replacement:
    return Replacement(Int8Dropout, {"block_size": block_size})


def _layer_scale(module: Any, output: str, block_size: BlockSize) -> Replacement:
    name = scale_name(module)
    named = {} if name == "gamma" else {"scale_name": name}
    return Replacement(Int8LayerScale, {"block_size": block_size, **named, **_writes(module)})


def _drop_path(module: Any, output: str, block_size: BlockSize) -> Replacement:
    return Replacement(Int8DropPath, {"block_size": block_size}, {"scale_by_keep": True})


_MAKERS: dict[str, Callable[[Any, str, BlockSize], Replacement]] = {
    "linear": _linear,
    "conv1d": _conv1d,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "activation": _activation,
    "dropout": _dropout,
    "layer_scale": _layer_scale,
    "drop_path": _drop_path,
}
_BASELINES: dict[tuple[str, str], type[nn.Module]] = {
    ("per_tensor", "linear"): PerTensorLinear,
    ("per_tensor", "conv1d"): PerTensorConv1D,
    ("per_token", "linear"): PerTokenLinear,
    ("per_token", "conv1d"): PerTokenConv1D,
}
