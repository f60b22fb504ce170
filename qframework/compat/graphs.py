"""Graphs of ``torch.fx``: erased nodes, copies, inputs of an exported model, tracing, symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule, Node

from qframework.compat.missing import explained, note_missing

with explained():
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true


def is_erased(node: Node) -> bool:
    """Whether a node is no longer part of its graph."""
    erased: bool | None = getattr(node, "_erased", None)
    if erased is None:
        note_missing("torch.fx.node.Node._erased")
        return all(each is not node for each in node.graph.nodes)
    return erased


@explained()
def call_on_copies(gm: GraphModule, function: Callable[[GraphModule], object]) -> None:
    """Call ``function`` with each deep copy of ``gm``, to which PyTorch copies no hooks, and with copies of copies."""
    gm._register_deepcopy_hook(function)


@explained()
def input_structure(gm: GraphModule) -> Any:
    """Names (``orig_args``) and nesting (``in_spec``) of an exported model's inputs; None for any other graph."""
    return getattr(gm.graph._codegen, "pytree_info", None)


@explained()
def replace_output_structure(gm: GraphModule, structure: Any) -> None:
    """Change the nesting of an exported model's outputs, which must have as many leaves as before."""
    info = gm.graph._codegen.pytree_info  # type: ignore[attr-defined]
    gm.graph._codegen.pytree_info = info._replace(out_spec=structure)  # type: ignore[attr-defined]


__all__ = [
    "call_on_copies",
    "free_unbacked_symbols",
    "input_structure",
    "is_erased",
    "make_fx",
    "replace_output_structure",
    "statically_known_true",
]
