"""Overloads of operators for packages of AOTInductor, where a dtype is a string.

The runtime of AOTInductor calls operators of other libraries by a description, in which it reads dtypes by another
enumeration than the one that wrote them: float32 arrives as float64. ``int8_linear.packaged`` takes ``"float16"`` where
``int8_linear`` takes ``torch.float16``, and does the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

import qframework.kernels.attention.mixed
import qframework.kernels.linear.gated
import qframework.kernels.linear.int8_linear  # noqa: F401  (registers operators)
from qframework.compat.operators import OpOverload, schema
from qframework.errors import UnsupportedError
from qframework.kernels.runtime.operator import LIBRARY

_OVERLOAD = "packaged"


def _add_overload(name: str) -> None:
    """Define ``qframework::{name}.packaged``."""
    operator: Any = getattr(torch.ops.qframework, name).default
    places = [place for place, each in enumerate(schema(operator).arguments) if each.name == "out_dtype"]

    def call(*args: Any, **kwargs: Any) -> Any:
        read = [_dtype(value) if place in places else value for place, value in enumerate(args)]
        return operator(*read, **{key: _dtype(value) if key == "out_dtype" else value for key, value in kwargs.items()})

    text = str(schema(operator)).partition("::")[2].replace("ScalarType?", "str?")
    LIBRARY.define(text.replace(f"{name}(", f"{name}.{_OVERLOAD}(", 1))
    LIBRARY.impl(f"{name}.{_OVERLOAD}", call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qframework::{name}.{_OVERLOAD}", call, lib=LIBRARY)


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


for _name in ("int8_linear", "int8_gated_linear", "mixed_attention"):
    _add_overload(_name)


def name_dtypes(gm: GraphModule) -> None:
    """Let the operators of a graph be called with the names of dtypes, in place.

    Raises:
        UnsupportedError: an operator takes a dtype and has no such overload.
    """
    for node in gm.graph.nodes:
        values = [*node.args, *node.kwargs.values()]
        ours = isinstance(node.target, OpOverload) and node.target.namespace == "qframework"
        if not ours or not any(isinstance(value, torch.dtype) for value in values):
            continue
        packet = getattr(torch.ops.qframework, schema(node.target).name.partition("::")[2])
        if _OVERLOAD not in packet.overloads():
            raise UnsupportedError(f"to_package: {node.target} takes a dtype, which a package cannot express")
        node.target = getattr(packet, _OVERLOAD)
        node.args = tuple(map(_named, node.args))
        node.kwargs = {key: _named(value) for key, value in node.kwargs.items()}
    gm.recompile()


def _named(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
