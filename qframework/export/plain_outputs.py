"""Outputs of an exported model as tuples, lists and dictionaries of Python, which need no other library to be read."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from qframework.compat import pytree
from qframework.compat.graphs import input_structure, replace_output_structure


def make_outputs_plain(gm: GraphModule) -> None:
    """Let a graph return a dict instead of an object with named values (``ModelOutput``), a tuple instead of others."""
    structure = input_structure(gm)
    if structure is not None and structure.out_spec is not None:
        replace_output_structure(gm, pytree.tree_structure(_plain(structure.out_spec)))


def _plain(spec: Any) -> Any:
    """An object of Python's containers with the leaves of ``spec`` in the same order."""
    if spec.is_leaf():
        return 0
    below = [_plain(child) for child in pytree.children(spec)]
    names = key_names(spec)
    if spec.type is list:
        return below
    return tuple(below) if names is None else dict(zip(names, below, strict=True))


def key_names(spec: Any) -> list[str] | None:
    """The names of the values of a mapping or of a class like one, by their structure; None for other containers."""
    keys = spec.context if isinstance(spec.context, list | tuple) else ()
    named = len(keys) == len(pytree.children(spec)) and all(isinstance(key, str) for key in keys)
    return list(keys) if named and (keys or spec.type is dict) else None
