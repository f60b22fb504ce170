"""What a quantized model keeps of the float model that it replaces: plain attributes of its modules.

A quantized module often takes the place of a submodule, and the code around it goes on reading attributes of the float
one: ``encoder.conv1.stride``, ``vision_tower.config.patch_size``, ``len(encoder.layers)``. These describe the model and
do not change when it is quantized, so the quantized model has them too, as they were when it was made.

Not kept are tensors, except those that its graph reads; what starts with ``_``; and computed attributes, except
``config``, ``dtype`` and ``device``. Methods raise an error: only the forward pass was exported.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import GraphModule

from qframework.compat.modules import buffers_and_parameters, submodules
from qframework.errors import UnsupportedError

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, enum.Enum)
_LISTS = (nn.ModuleList, nn.Sequential)
_OWN = frozenset((*dir(nn.Module), *vars(nn.Module())))
_COMPUTED = ("config", "dtype", "device")
_MISSING = object()


class ModuleRecord(NamedTuple):
    """The plain attributes, methods and submodules of a float module."""

    name: str
    kind: str
    is_list: bool
    attributes: dict[str, Any]
    methods: tuple[str, ...]
    children: dict[str, ModuleRecord]


def record_module(module: nn.Module, name: str = "") -> ModuleRecord:
    """The record of ``module`` and its submodules. It holds no tensor and none of the modules."""
    static = [vars(kind) for kind in reversed(type(module).__mro__) if kind not in nn.Module.__mro__]
    members = {key: value for one in static for key, value in one.items() if not key.startswith("_")}
    found = {key: value for key, value in {**members, **vars(module)}.items() if not key.startswith("_")}
    found |= {key: _computed(module, key) for key in _COMPUTED if isinstance(members.get(key), property)}
    return ModuleRecord(
        name,
        type(module).__name__,
        isinstance(module, _LISTS),
        {key: _copied(value) for key, value in found.items() if key not in _OWN and _is_kept(key, value)},
        tuple(key for key, value in members.items() if key not in _OWN and callable(value)),
        {
            key: record_module(child, f"{name}.{key}".lstrip("."))
            for key, child in submodules(module).items()
            if child is not None
        },
    )


def _computed(module: nn.Module, key: str) -> Any:
    """A property; some read the first parameter, of a module that has none."""
    try:
        return getattr(module, key)
    except Exception:  # noqa: BLE001 (the model's code may raise anything)
        return _MISSING


def _is_kept(name: str, value: Any) -> bool:
    return _is_plain(value) or (name == "device" and isinstance(value, torch.device)) or _is_configuration(name, value)


def _is_plain(value: Any) -> bool:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(_is_plain(getattr(value, field.name, None)) for field in dataclasses.fields(value))
    if isinstance(value, dict):  # other mappings may not be copied, as that of a class
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _is_configuration(name: str, value: Any) -> bool:
    """Whether it is the configuration that transformers and others share between a model and its submodules."""
    return name == "config" and callable(getattr(value, "to_dict", None)) and not isinstance(value, type)


def _copied(value: Any) -> Any:
    return copy.deepcopy(value) if _is_plain(value) else value


class PartOfModel(nn.Module):
    """The place of a submodule in a quantized model: plain attributes, and tensors of the graph."""

    def __init__(self, name: str, kind: str) -> None:
        super().__init__()
        self.training = False
        self._name, self._kind = name, kind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises UnsupportedError."""
        raise UnsupportedError(
            f"QuantizedModel: {self._name} must not be called: only the whole quantized model can be, and this "
            f"{self._kind} is a part of its graph. Quantize it by itself to call it alone"
        )


class PartsOfModel(PartOfModel):
    """The place of a list of modules: its length, and its parts by index."""

    def __len__(self) -> int:
        return len(submodules(self))

    def __getitem__(self, index: int | slice) -> Any:
        return [*submodules(self).values()][index]


class _Method:
    """In the place of a method of the float model."""

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"QuantizedModel: {self.name} of {self.kind} must not be called: the quantized model has its forward "
            "alone. Quantize a module whose forward calls it"
        )


def stand_in(model: GraphModule, record: ModuleRecord) -> None:
    """Give ``model``, a graph, what ``record`` holds and it does not have itself, at each submodule."""
    _set_attributes(model, record)
    for name in record.methods:
        if not hasattr(model, name):
            model.__dict__[name] = _Method(name, record.kind)
    _add_parts(model, record)
    move_devices(model)


def move_devices(model: nn.Module) -> None:
    """Let every attribute ``device`` say where the model is."""
    tensors = [tensor for space in (model.parameters(), model.buffers()) for tensor in space]
    for module in model.modules() if tensors else ():
        if "device" in vars(module):
            module.__dict__["device"] = tensors[0].device


def _set_attributes(module: nn.Module, record: ModuleRecord) -> None:
    for name, value in record.attributes.items():
        if not hasattr(module, name):
            module.__dict__[name] = _copied(value)


def _add_parts(module: nn.Module, record: ModuleRecord) -> None:
    own, spaces = submodules(module), buffers_and_parameters(module)
    rest = {name: own.pop(name) for name in [*own] if name not in record.children}
    for name, child in record.children.items():
        there = own.pop(name, None)
        if any(name in space for space in spaces) or name in _OWN or hasattr(type(module), name):
            if there is not None:
                own[name] = there
            continue
        part = (PartsOfModel if child.is_list else PartOfModel)(child.name, child.kind)
        if there is not None:
            if type(there) is not nn.Module:  # a graph of its own
                own[name] = there
                continue
            for new, old in zip(_spaces(part), _spaces(there), strict=True):
                new.update(old)
        own[name] = part
        _set_attributes(part, child)
        _add_parts(part, child)
    own.update(rest)


def _spaces(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return (submodules(module), *buffers_and_parameters(module))
