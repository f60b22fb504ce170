"""Judges steps on a prepared model by the error of its output on a batch that the steps do not see.

Weight rounding and bias correction fit calibration data. With little of it, or with more padding than text, they fit
what the output does not depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from qframework.quantizer.bias_correction import corrected_linears
from qframework.quantizer.layerwise import Inputs, LayerwiseRun, quantized_linears, take_batches
from qframework.quantizer.output_error import typical_error


class HeldOut:
    """A calibrated model and inputs on which steps are judged; the reference is its float output now.

    Args:
        prepared: from ``prepare_pt2e``, after ``calibrate``.
        data: the batches to judge on, as ``calibrate`` takes them.
    """

    def __init__(self, prepared: GraphModule, data: Iterable[Any]) -> None:
        self._prepared = prepared
        self._inputs: Inputs = take_batches(prepared, data, None, "Recipe.after_calibrate")
        self._expected = LayerwiseRun(prepared, self._inputs, quantized=False).outputs()
        self._least = self._error()

    def keep_if_better(self, step: Callable[[], None]) -> bool:
        """Run ``step``, which changes weights and biases; undo it unless the error is smaller. Whether it stays."""
        before = _Snapshot(self._prepared)
        step()
        error = self._error()
        if error < self._least:
            self._least = error
            return True
        before.restore()
        return False

    def _error(self) -> float:
        return typical_error(LayerwiseRun(self._prepared, self._inputs, quantized=True).outputs(), self._expected)


class _Snapshot:
    """Weights, biases and what reads them, as they are now. Steps replace tensors, not values."""

    def __init__(self, prepared: GraphModule) -> None:
        self._prepared = prepared
        self._tensors: dict[str, Tensor] = dict(prepared.named_parameters(remove_duplicate=False))
        self._tensors.update(prepared.named_buffers(remove_duplicate=False))
        self._linears = quantized_linears(prepared)
        nodes = [*corrected_linears(prepared), *(linear.observed for linear in self._linears)]
        self._arguments = {node: (node.args, node.kwargs) for node in nodes}
        self._nodes = set(prepared.graph.nodes)
        self._rounded = [
            (each.observer, each.observer.weight_scale, each.observer.float_weight) for each in self._linears
        ]

    def restore(self) -> None:
        for name, tensor in self._tensors.items():
            owner, _, leaf = name.rpartition(".")
            setattr(self._prepared.get_submodule(owner), leaf, tensor)
        for observer, scale, weight in self._rounded:
            observer.weight_scale, observer.float_weight = scale, weight
        for node, (args, kwargs) in self._arguments.items():
            node.args, node.kwargs = args, kwargs
        for node in reversed([node for node in self._prepared.graph.nodes if node not in self._nodes]):
            self._prepared.graph.erase_node(node)
        self._prepared.recompile()
