"""An attention layer inside a model: its name, the scope around its module's forward, its node in an exported graph."""

from __future__ import annotations

import copy
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from qframework.attention.drop_in import use_sage_attention
from qframework.attention.handover import multi_head_attention_forward
from qframework.compat.functions import current_function_mode
from qframework.errors import QFrameworkError

ROOT = "scaled_dot_product_attention"
"""Layer name of attention that a model calls outside of any submodule; exported graphs use it as well."""

_SDPA = torch.ops.aten.scaled_dot_product_attention.default


def join_name(path: str, index: int) -> str:
    """Layer name of the ``index``-th call in one forward of the module at ``path``."""
    return (path or ROOT) + (f"#{index}" if index else "")


def split_name(name: str) -> tuple[str, int]:
    """The inverse of :func:`join_name`."""
    path, _, index = name.rpartition("#")
    return (path, int(index)) if path and index.isdigit() else (name, 0)


class LayerScope:
    """Hooks that put a module's forward into a scope of ``use_sage_attention``.

    Args:
        variants: by index of the call within one forward; calls that are not listed use the variant of the first.
    """

    def __init__(self, variants: Mapping[int, str]) -> None:
        self._variants = dict(variants)
        first = self._variants.get(0, "off")
        self._scope = use_sage_attention(first) if set(self._variants.values()) == {first} else None

    def attach(self, module: nn.Module) -> list[Any]:
        """Register the hooks and return their handles."""
        return [
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave, always_call=True),
        ]

    # PyTorch keeps a stack of scopes for each thread, and leaving pops it, so the hooks need not store entered scopes.
    def _enter(self, module: nn.Module, args: Any) -> None:
        (self._scope or _ScopeByCall(self._variants)).__enter__()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # if an earlier hook raised, this scope was not entered, and the scope on top is another one
        if torch.compiler.is_compiling() or self._is_own(current_function_mode()):
            (self._scope or _ScopeByCall(self._variants)).__exit__(None, None, None)

    def _is_own(self, scope: object) -> bool:
        if self._scope is not None:
            return scope is self._scope
        return isinstance(scope, _ScopeByCall) and scope.variants is self._variants


class AttentionCalls(TorchFunctionMode):
    """A scope that passes every attention call on its thread to :meth:`attend`."""

    def attend(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Compute one call of ``func``, PyTorch's attention, with this scope off."""
        raise NotImplementedError

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention or func is _SDPA:
            return self.attend(func, *args, **kwargs)
        if func is F.multi_head_attention_forward and multi_head_attention_forward is not None:
            with self:  # PyTorch would call the attention inside without this scope
                return multi_head_attention_forward(*args, **kwargs)
        if func is Tensor.unflatten:  # Dynamo of torch 2.11 cannot trace its super() under a function mode
            return torch.unflatten(*args, **kwargs)
        return func(*args, **kwargs)


class _ScopeByCall(AttentionCalls):
    """A scope for one forward of a module, in which each call has its own variant."""

    def __init__(self, variants: Mapping[int, str]) -> None:
        super().__init__()
        self.variants = variants
        self._scopes = {index: use_sage_attention(variant) for index, variant in variants.items()}
        self._first = self._scopes.get(0) or use_sage_attention("off")
        self._calls = 0

    def attend(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        scope = self._scopes.get(self._calls, self._first)
        self._calls += 1
        with scope:
            return func(*args, **kwargs)


def attention_nodes(graph: Graph) -> dict[str, Node]:
    """The attention nodes of an exported graph by layer name, in order."""
    seen: Counter[str] = Counter()
    nodes = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is _SDPA:
            path = _module_path(node)
            nodes[join_name(path, seen[path])] = node
            seen[path] += 1
    return nodes


def _module_path(node: Node) -> str:
    """Path of the innermost module of a node of ``torch.export``; empty for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    return next((path for path, _ in reversed(list(stack.values())) if path), "")


def rewrite_graph(gm: GraphModule, choice: Mapping[str, str]) -> list[_KeptGraph]:
    """Replace the attention nodes of an exported graph by the operator::

        scaled_dot_product_attention(q, k, v, mask)  ->  getitem(qframework.sage_attention(q, k, v, mask, variant), 0)

    Raises:
        QFrameworkError: the graph lacks a layer of ``choice``.
    """
    nodes = attention_nodes(gm.graph)
    missing = [name for name in choice if name not in nodes]
    if missing:
        raise QFrameworkError(
            f"AttentionChoice.apply: the graph must have the attention layers {', '.join(map(repr, missing))}, got "
            f"{', '.join(map(repr, nodes)) or 'none'}"
        )
    kept = _KeptGraph(gm)
    for name, node in nodes.items():
        # a module that is used twice has two nodes in the graph but one layer in the choice
        variant = choice.get(name) or choice.get(split_name(name)[0], "off")
        if variant != "off":
            _replace(node, variant)
    gm.graph.lint()
    gm.recompile()
    return [kept]


class _KeptGraph:
    """A copy of a graph, which ``remove`` restores."""

    def __init__(self, gm: GraphModule) -> None:
        self._gm, self._graph = gm, copy.deepcopy(gm.graph)

    def remove(self) -> None:
        self._gm.graph = self._graph
        self._gm.recompile()


def _replace(node: Node, variant: str) -> None:
    call = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), node.args, strict=False))
    call.update(node.kwargs)
    if call.pop("dropout_p", 0.0):
        raise QFrameworkError(
            f"attention {_module_path(node) or ROOT!r}: dropout must be 0. Export the model in eval mode"
        )
    graph = node.graph
    with graph.inserting_before(node):
        attention = graph.call_function(
            torch.ops.qframework.sage_attention.default,
            tuple(call.pop(name) for name in ("query", "key", "value")),
            {**call, "variant": variant},
        )
        out = graph.call_function(operator.getitem, (attention, 0))
    for new in (attention, out):
        new.meta = {
            key: value for key, value in node.meta.items() if re.match("nn_module_stack|stack_trace|source", key)
        }
    out.meta["val"] = node.meta.get("val")
    node.replace_all_uses_with(out)
    graph.erase_node(node)
