"""Finds the layers of a model that can be quantized one by one, and their operands."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx

from qframework.compat.graphs import is_erased
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.graph.attention.replace import name_shapes
from qframework.graph.nodes import argument
from qframework.graph.rewrites.cast_late import cast_late
from qframework.graph.rewrites.expand_einsum import expand_einsum
from qframework.graph.rewrites.out_of_place import write_out_of_place
from qframework.graph.rewrites.shorten import erase_unread_results
from qframework.numerics import FLOAT_DTYPES
from qframework.quantizer import AttentionConfig, dynamic_attention, static_attention
from qframework.quantizer.annotate_attention import (
    check_attention,
    is_attention,
    is_softmax,
    is_variant,
    transform_attention,
)
from qframework.quantizer.annotate_linear import is_linear
from qframework.quantizer.quantizer import layer_name, module_stack

LayerKind = Literal["linear", "attention"]
KINDS: tuple[LayerKind, ...] = ("linear", "attention")


@dataclass(frozen=True)
class TensorShape:
    """Shape and dtype of an operand."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor | None) -> TensorShape | None:
        """The shape and dtype of a tensor; None for None."""
        return None if tensor is None else cls(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class LinearOperands:
    """One call of a linear: input ``(..., K)``, weight ``(N, K)``, bias ``(N,)`` or None."""

    input: TensorShape
    weight: TensorShape
    bias: TensorShape | None

    def __str__(self) -> str:
        return f"linear {self.input}, {self.weight}{', bias' if self.bias else ''}"


@dataclass(frozen=True)
class AttentionOperands:
    """One call of attention: query, key and value ``(..., H, N, D)``, mask and relative positions."""

    query: TensorShape
    key: TensorShape
    value: TensorShape
    mask: TensorShape | None = None
    rel_h: TensorShape | None = None
    rel_w: TensorShape | None = None
    is_causal: bool = False
    enable_gqa: bool = False
    softcap: float | None = None

    def __str__(self) -> str:
        bias = [f"{name} {value}" for name in ("mask", "rel_h", "rel_w") if (value := getattr(self, name))]
        flags = [name for name in ("is_causal", "enable_gqa") if getattr(self, name)]
        cap = [] if self.softcap is None else [f"softcap {self.softcap:g}"]
        return ", ".join([f"attention {self.query}, {self.key}, {self.value}", *bias, *flags, *cap])


Operands = LinearOperands | AttentionOperands


@dataclass
class Layer:
    """A linear or an attention, named as ``QFrameworkQuantizer.set_module_name`` takes it.

    Attributes:
        kind: ``"linear"`` or ``"attention"``.
        name: of the module. A module can be both, and can be called several times.
        calls: its calls in the order of the graph.
        static: whether it can be quantized with calibrated scales.
        reads: the tensor that the first call of a linear reads, by its name in the graph.
    """

    kind: LayerKind
    name: str
    calls: list[Operands] = field(default_factory=list)
    static: bool = True
    reads: str | None = None

    @property
    def key(self) -> tuple[LayerKind, str]:
        """Identifies the layer."""
        return self.kind, self.name


@torch.no_grad()
def find_layers(exported: fx.GraphModule, images: Tensor) -> list[Layer]:
    """The linears and attentions that can be quantized, in the order of the graph.

    Attention may be spelled out as matmul, softmax, matmul. Layers that no operator supports are not listed.

    Args:
        exported: a float graph of ``torch.export``; not modified.
        images: an input, with the batch size to measure times at.

    Raises:
        QFrameworkError: there is nothing to quantize.
    """
    with_static = copy.deepcopy(exported)
    static = set(_write_attentions(with_static, static_attention()).values())
    graph = copy.deepcopy(exported)
    names = _write_attentions(graph, dynamic_attention("sage_b"))
    names |= {node: layer_name(node) for node in graph.graph.nodes if is_linear(node)}
    layers: dict[tuple[LayerKind, str], Layer] = {}

    def record(node: fx.Node, operands: Operands) -> None:
        kind: LayerKind = "linear" if isinstance(operands, LinearOperands) else "attention"
        is_static = kind == "linear" or names[node] in static
        reads = str(node.args[0]) if kind == "linear" else None
        layer = Layer(kind, names[node], static=is_static, reads=reads)
        layers.setdefault(layer.key, layer).calls.append(operands)

    _Recorder(graph, names, record).run(images)
    if not layers:
        raise QFrameworkError("model must have an attention or a linear with a parameter as its weight, got neither")
    return list(layers.values())


def _write_attentions(gm: fx.GraphModule, config: AttentionConfig) -> dict[fx.Node, str]:
    """Replace every attention that ``config`` supports by its operator; returns the nodes with their layers' names."""
    write_out_of_place(gm)
    name_shapes(gm)
    erase_unread_results(gm)
    expand_einsum(gm)
    cast_late(gm)
    names: dict[fx.Node, str] = {}
    for node in list(gm.graph.nodes):
        if is_erased(node) or not (is_attention(node) or is_softmax(node)) or not module_stack(node)[1:]:
            continue
        name, before = layer_name(node), set(gm.graph.nodes)
        try:
            transform_attention(gm, node, name, config)
            written = [node] if not is_erased(node) else []
            written += [new for new in gm.graph.nodes if new not in before]
            attentions = [new for new in written if is_attention(new) or is_variant(new)]
            for attention in attentions:
                if config.is_static:
                    check_attention(attention, name, config)
        except UnsupportedError:
            continue
        names |= dict.fromkeys(attentions, name)
    gm.recompile()
    return names


class _Recorder(fx.Interpreter):
    """Runs a graph and passes the operands of each named node to ``record``."""

    def __init__(
        self, module: fx.GraphModule, names: dict[fx.Node, str], record: Callable[[fx.Node, Operands], None]
    ) -> None:
        super().__init__(module)
        self._names = names
        self._record = record

    def run_node(self, node: fx.Node) -> Any:
        if node in self._names:
            operands = self._linear(node) if is_linear(node) else self._attention(node)
            if operands is not None:
                self._record(node, operands)
        return super().run_node(node)

    def _linear(self, node: fx.Node) -> LinearOperands | None:
        found = [self._shape(argument(node, i, name)) for i, name in enumerate(("input", "weight", "bias"))]
        if found[0] is None or found[1] is None or found[0].dtype not in FLOAT_DTYPES:
            return None
        return LinearOperands(found[0], found[1], found[2])

    def _attention(self, node: fx.Node) -> AttentionOperands:
        tensors = ((0, "query"), (1, "key"), (2, "value"), (3, "attn_mask"), (10, "rel_h"), (11, "rel_w"))
        query, key, value, mask, rel_h, rel_w = (self._shape(argument(node, *place)) for place in tensors)
        assert query is not None
        assert key is not None
        assert value is not None
        causal, grouped = (argument(node, i, name, default=False) for i, name in ((4, "is_causal"), (6, "enable_gqa")))
        softcap = argument(node, 12, "softcap") if is_variant(node) else None
        return AttentionOperands(query, key, value, mask, rel_h, rel_w, causal, grouped, softcap)

    def _shape(self, node: Any) -> TensorShape | None:
        return TensorShape.of(self.env[node]) if isinstance(node, fx.Node) else None
