"""PyTorch's private functions on nested tuples, lists and dictionaries."""

from __future__ import annotations

from qframework.compat.missing import explained

with explained():
    from torch.utils._pytree import (
        SERIALIZED_TYPE_TO_PYTHON_TYPE,
        SUPPORTED_SERIALIZED_TYPES,
        TreeSpec,
        tree_any,
        tree_leaves,
        tree_map,
        tree_map_only,
        tree_structure,
        tree_unflatten,
        treespec_loads,
    )


def children(spec: TreeSpec) -> list[TreeSpec]:
    """The structures of the children of a container; older versions of PyTorch have an attribute, newer a method."""
    below = getattr(spec, "children", None)
    return list(below()) if callable(below) else list(spec.children_specs)


__all__ = [
    "SERIALIZED_TYPE_TO_PYTHON_TYPE",
    "SUPPORTED_SERIALIZED_TYPES",
    "TreeSpec",
    "children",
    "tree_any",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_structure",
    "tree_unflatten",
    "treespec_loads",
]
