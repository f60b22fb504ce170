"""Operators: their class and schema, private ones of ATen, and the registered ones."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qframework.compat.missing import explained, optional

if TYPE_CHECKING:
    from torch._ops import OpOverload
else:
    OpOverload = type(torch.ops.aten.detach.default)  # the class has no public name
OpOverloadPacket: Any = type(torch.ops.aten.detach)  # of all overloads

schema: Callable[[Any], Any] = operator.attrgetter("_schema")
"""The schema of an operator: arguments, results and mutations."""

with explained():
    _ = schema(torch.ops.aten.detach.default).arguments[0].real_type  # checked here instead of at every call
    TO_COPY: Any = torch.ops.aten._to_copy.default
    PIN_MEMORY: Any = torch.ops.aten._pin_memory.default
    ASSERT_METADATA: Any = torch.ops.aten._assert_tensor_metadata.default  # in exported graphs
    SWAP_MEMORY: Any = torch.ops.aten._has_compatible_shallow_copy_type.default  # called first by ``x.data = y``
    BUILT_INS: Any = torch._C._nn  # where Dynamo finds what F.pad and others call
    VIEWS: tuple[Any, ...] = (torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default)


def with_dtype(argument: Any, value: Any) -> Any:
    """What is passed for a schema's argument, a dtype where it is the number that schemas and graphs have for one.

    The dispatcher converts numbers; implementations that are called without it get them as they are.
    """
    if isinstance(value, bool) or not isinstance(value, int) or "ScalarType" not in str(argument.real_type):
        return value
    return torch.ops.aten.empty.memory_format([0], dtype=value, device="meta").dtype


def _no_int_mm(a: Tensor, b: Tensor) -> Tensor:
    raise NotImplementedError("torch._int_mm is gone")


int_mm: Callable[[Tensor, Tensor], Tensor] = optional(torch, "torch._int_mm", _no_int_mm)


@explained()
def on_tensors(name: str) -> bool:
    """Whether ``name`` has a kernel for tensors, unlike Python's builtins and save, which TorchScript registers."""
    return torch._C._dispatch_has_kernel(name)


@explained()
def registered(namespace: str) -> Iterator[str]:
    """The names, without the namespace, of all operators of a namespace."""
    names = torch._C._dispatch_get_all_op_names()
    return (name.partition("::")[2] for name in names if name.startswith(f"{namespace}::"))


__all__ = [
    "ASSERT_METADATA",
    "BUILT_INS",
    "PIN_MEMORY",
    "SWAP_MEMORY",
    "TO_COPY",
    "VIEWS",
    "OpOverload",
    "OpOverloadPacket",
    "int_mm",
    "on_tensors",
    "registered",
    "schema",
    "with_dtype",
]
