"""Finds what a graph computes from parameters and buffers alone, such as a bias of attention read from a table.

Each node is run on fake tensors to see which operators it calls. It is constant if its inputs are, and if no operator
writes what others read, draws random numbers or belongs to another library. Inductor fuses views and elementwise
operators into the kernels that read them; all others take a kernel of their own in each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.compat import pytree
from qframework.compat.dispatch import TorchDispatchMode
from qframework.compat.operators import TO_COPY, VIEWS, OpOverload, schema
from qframework.graph.nodes import fake_value
from qframework.graph.writes import KNOWN_LIBRARIES, MOST_KINDS, allocates, kind_of, run_on_fakes, written_inputs

aten = torch.ops.aten
_LIBRARIES = ("prim", *KNOWN_LIBRARIES)  # prim reads the device of a fake tensor
_FUSED = (
    *(TO_COPY, aten.clone.default, aten.copy.default, aten.copy_.default, aten.lift_fresh_copy.default, *VIEWS),
    *(aten.repeat.default, aten.flip.default, aten.constant_pad_nd.default, aten.tril.default, aten.triu.default),
    *(aten.floor_divide.default, aten.full_like.default, aten.ones_like.default, aten.zeros_like.default),
    *(aten.new_full.default, aten.new_ones.default, aten.new_zeros.default, aten.fill.Scalar, aten.fill_.Scalar),
)
_kernels_of_kinds: dict[Any, bool | None] = {}  # what _takes_a_kernel returns, by kind_of


class Constant(NamedTuple):
    """What computing a constant node takes."""

    own_kernel: bool  # of the node itself
    kernel: bool  # of the node, or of a constant that it is computed from


def constant_nodes(gm: GraphModule, is_source: Callable[[Node], bool]) -> dict[Node, Constant]:
    """The nodes whose values ``is_source`` nodes and numbers determine; the sources are among them."""
    found: dict[Node, Constant] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            if is_source(node):
                found[node] = Constant(False, False)
        elif node.op in ("call_function", "call_method") and all(x in found for x in node.all_input_nodes):
            own = _takes_a_kernel(node)
            if own is not None:
                found[node] = Constant(own, own or any(found[x].kernel for x in node.all_input_nodes))
    return found


def _takes_a_kernel(node: Node) -> bool | None:
    """Whether a node calls operators that are not fused into their readers; None if its value is not constant."""
    fake = fake_value(node)
    if fake is not None and not all(isinstance(size, int) for size in (*fake.shape, *fake.stride())):
        return None
    if not node.all_input_nodes and not isinstance(fake, Tensor):
        return None  # it sets a state, as a scope without gradients and a level of torch.vmap do
    if not all(_is_private(x, node) for x in written_inputs(node)):
        return None
    kind = kind_of(node)
    if kind is None or kind not in _kernels_of_kinds:
        found = _observed(node)
        if kind is None or len(_kernels_of_kinds) >= MOST_KINDS:
            return found
        _kernels_of_kinds[kind] = found
    return _kernels_of_kinds[kind]


def _observed(node: Node) -> bool | None:
    """``_takes_a_kernel`` by running the node on fake tensors."""
    operators = _Operators()
    try:
        run_on_fakes(node, operators)
    except Exception:  # noqa: BLE001 (any failure on fake tensors: its value may depend on anything)
        return None
    return operators.take_a_kernel


def _is_private(x: Node, reader: Node) -> bool:
    """Whether ``reader`` alone sees the memory of ``x``, so that it may write it."""
    return set(x.users) == {reader} and x.op.startswith("call") and allocates(x)


class _ImpureError(Exception):
    pass


class _Operators(TorchDispatchMode):
    """Whether operators called while the mode is active take a kernel; raises _ImpureError for those with effects."""

    def __init__(self) -> None:
        super().__init__()
        self.take_a_kernel = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace not in _LIBRARIES or torch.Tag.nondeterministic_seeded in func.tags:
            raise _ImpureError
        result = func(*args, **(kwargs or {}))
        reads = any(isinstance(x, Tensor) for x in pytree.tree_leaves((args, kwargs)))
        writes = any(isinstance(x, Tensor) for x in pytree.tree_leaves(result))
        self.take_a_kernel |= reads and writes and not _is_fused(func)
        return result


def _is_fused(func: OpOverload) -> bool:
    is_view = any(result.alias_info is not None for result in schema(func).returns)
    return is_view or torch.Tag.pointwise in func.tags or func in _FUSED
