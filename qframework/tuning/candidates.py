"""Quantizes one model in many ways: exports it once, then prepares, calibrates and converts each assignment."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from qframework.compat import pytree
from qframework.conversion.exported import quantize_exported
from qframework.errors import QFrameworkError
from qframework.graph.attention.call import NotAttention, Refused
from qframework.graph.attention.patterns import spelled_out_call
from qframework.graph.nodes import linear_call
from qframework.numerics import sqnr_db
from qframework.quantizer import Recipe
from qframework.quantizer.annotate_attention import is_attention, is_softmax, is_variant
from qframework.quantizer.annotate_linear import is_linear
from qframework.quantizer.quantizer import layer_name
from qframework.tuning.assignment import Assignment, Meanings
from qframework.tuning.layers import KINDS, Layer, LayerKind

Metric = Callable[[fx.GraphModule], float]


@dataclass
class Candidates:
    """A float graph and how it is quantized.

    Attributes:
        exported: the graph of ``export_model``; not modified.
        images: the batch that output errors are measured on.
        calibration: batches, read again for each assignment; None if nothing is static.
        meanings: the configurations of static and dynamic.
        recipe: steps around each calibration, without dynamic inputs of its own: assignments say what is dynamic.
        batches: maximum number of calibration batches; None uses all.
    """

    exported: fx.GraphModule
    images: Tensor
    calibration: Iterable[Any] | None = None
    meanings: Meanings = field(default_factory=Meanings)
    recipe: Recipe | None = None
    batches: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.calibration, Iterator):
            raise QFrameworkError(
                "Candidates: calibration must be a list or a DataLoader, which can be read for each assignment, got "
                f"{type(self.calibration).__name__}"
            )
        if self.recipe is not None and self.recipe.dynamic_share:
            self.recipe = replace(self.recipe, dynamic_share=0.0)

    def quantized(self, assignment: Assignment) -> fx.GraphModule:
        """The converted graph, which simulates the INT8 kernels in float.

        Raises:
            UnsupportedError, CalibrationError: as ``quantize_exported``.
        """
        exported = copy.deepcopy(self.exported)
        if assignment.is_float:
            return exported
        calibration = self.calibration if assignment.is_calibrated or self.recipe is not None else None
        return quantize_exported(
            exported, assignment.quantizer(self.meanings), calibration, recipe=self.recipe, batches=self.batches
        )

    def output_noise(self, converted: fx.GraphModule) -> float:
        """``sum |y - y'|^2 / sum |y|^2`` over all outputs ``y`` of the float graph and ``y'`` of ``converted``."""
        with torch.no_grad():
            found = _floats(converted(self.images))
        error = sum(float((y - z).double().square().sum()) for y, z in zip(self._expected, found, strict=True))
        return error / max(sum(float(y.double().square().sum()) for y in self._expected), 1e-30)

    @functools.cached_property
    def _expected(self) -> list[Tensor]:
        with torch.no_grad():
            return _floats(self.exported(self.images))

    def layer_sqnr(self, layer: Layer, converted: fx.GraphModule) -> float | None:
        """SQNR in dB of a layer's output, the lowest of its calls; None if the graphs do not correspond.

        They do not after a rotation, which changes the basis of the outputs.
        """
        if self.recipe is not None and self.recipe.rotate:
            return None
        float_nodes, nodes = (_outputs(module, layer.kind) for module in (self.exported, converted))
        if len(float_nodes) != len(nodes):
            return None
        pairs = [(a, b) for (a, name), (b, _) in zip(float_nodes, nodes, strict=True) if name == layer.name]
        if not pairs:
            return None
        expected = _values(self.exported, [a for a, _ in pairs], self.images)
        found = _values(converted, [b for _, b in pairs], self.images)
        # an operator's output may have another shape with the same elements
        return min(sqnr_db(y, z.reshape(y.shape)) for y, z in zip(expected, found, strict=True))


def _floats(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _outputs(module: fx.GraphModule, kind: LayerKind) -> list[tuple[fx.Node, str]]:
    """The outputs of all layers of a kind in the order of the graph, with the layers' names."""
    found = []
    for node in module.graph.nodes:
        end = _linear_output(node) if kind == KINDS[0] else _attention_output(node)
        if end is not None:
            found.append((end, layer_name(node)))
    return found


def _linear_output(node: fx.Node) -> fx.Node | None:
    return node if is_linear(node) or linear_call(node) is not None else None


def _attention_output(node: fx.Node) -> fx.Node | None:
    if is_attention(node):
        return node
    if is_variant(node):
        return next((user for user in node.users if user.args[1:] == (0,)), None)
    try:
        call = spelled_out_call(node) if is_softmax(node) else None
    except (NotAttention, Refused):
        return None
    return call.end if call is not None else None


def _values(module: fx.GraphModule, nodes: list[fx.Node], images: Tensor) -> list[Tensor]:
    """The values of nodes of a graph."""
    found: dict[fx.Node, Tensor] = {}

    class Keep(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            value = super().run_node(node)
            if node in nodes:
                found[node] = value
            return value

    with torch.no_grad():
        Keep(module).run(images)
    return [found[node] for node in nodes]


def noise_db(noise: float) -> float:
    """A relative output error as an SQNR in dB; infinite for no error."""
    return math.inf if noise == 0 else -10 * math.log10(noise)


@torch.no_grad()
def checked_metric(metric: Metric, module: Any) -> float:
    """The metric of a model. Raises QFrameworkError unless it is a finite number."""
    value = float(metric(module))
    if not math.isfinite(value):
        raise QFrameworkError(f"metric must return a finite number, higher is better, got {value}")
    return value
