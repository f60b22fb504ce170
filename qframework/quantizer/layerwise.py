"""Run a prepared model over several batches at once, layer by layer, so that a layer can change before the next runs.

Weight rounding and bias correction change one linear after another, and each needs the inputs that the changed layers
before it compute. All batches advance to a node together. Between layers only values that are still needed stay in
memory; values inside a layer, such as attention scores, exist for one batch at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qframework.arguments import check_batches, check_number_of_batches, no_data
from qframework.compat import pytree
from qframework.graph.attributes import attribute
from qframework.graph.nodes import linear_call
from qframework.quantizer.arguments import OBSERVERS, check_prepared
from qframework.quantizer.calibration import flat_inputs
from qframework.quantizer.fake_quantize import fake_quantize, own_observer
from qframework.quantizer.observers import WeightObserver
from qframework.quantizer.static_observer import StaticObserver, check_calibrated

Inputs = list[list[Any]]


class ObservedLinear(NamedTuple):
    """A linear of a prepared model whose weight has an observer of this project."""

    node: Node
    input: Node
    weight: Node  # get_attr
    observed: Node  # call_module of the observer that reads it
    observer: WeightObserver


def quantized_linears(prepared: GraphModule) -> list[ObservedLinear]:
    """The linears that will be quantized, in graph order, without those whose weight another quantizer observes."""
    found = []
    for node in prepared.graph.nodes:
        call = linear_call(node)
        if call is None or call.weight.op != "call_module" or not node.users:
            continue
        observer = own_observer(prepared.get_submodule(str(call.weight.target)))
        weight = call.weight.args[0]
        if isinstance(observer, WeightObserver) and isinstance(weight, Node) and weight.op == "get_attr":
            found.append(ObservedLinear(node, call.input, weight, call.weight, observer))
    return found


def take_batches(prepared: GraphModule, data: Iterable[Any], batches: int | None, what: str) -> Inputs:
    """The model's inputs of each batch, on the model's device. Raises CalibrationError as ``calibrate`` does."""
    check_prepared(prepared, f"{what}: prepared")
    check_batches(data, what)
    check_number_of_batches(batches)
    inputs = [flat_inputs(prepared, batch, index) for index, batch in enumerate(islice(iter(data), batches))]
    if not inputs:
        raise no_data(what, data)
    return inputs


class LayerwiseRun:
    """All batches of a prepared model, advanced together from node to node; without gradients.

    Args:
        prepared: the calibrated model with its observers, which no longer observe.
        inputs: from ``take_batches``.
        quantized: True computes what the converted model will, quantizing and dequantizing every observed value. False
            computes the float model, with the original weights of rounded layers.

    Raises:
        CalibrationError: the model was not calibrated.
    """

    def __init__(self, prepared: GraphModule, inputs: Inputs, *, quantized: bool) -> None:
        self.prepared, self.quantized = prepared, quantized
        self._next: Node = next(iter(prepared.graph.nodes))
        placeholders = [node for node in prepared.graph.nodes if node.op == "placeholder"]
        self._values: list[dict[Node, Any]] = [dict(zip(placeholders, each, strict=True)) for each in inputs]
        self._dying = _last_reads(prepared)
        # of static activations, None for those that stay in float; cached because searching a histogram is slow
        self._scales: dict[Node, tuple[Tensor, Tensor | None] | None] = {}  # with the zero point, if there is one
        check_calibrated(prepared)

    @torch.no_grad()
    def advance(self, node: Node) -> None:
        """Run every batch up to ``node``, without ``node`` itself."""
        for values in self._values:
            current = self._next
            while current is not node:
                self._step(current, values)
                current = current.next
        self._next = node

    @torch.no_grad()
    def values(self, node: Node) -> Iterator[Any]:
        """The value of ``node`` in each batch; it must have run, and a node that has not run must still read it."""
        for values in self._values:
            yield self._value(node, values)

    def outputs(self) -> list[Tensor]:
        """The floating-point outputs of all batches; runs the model to its end."""
        output = next(iter(reversed(self.prepared.graph.nodes)))
        self.advance(output)
        leaves = [
            each
            for values in self._values
            for each in pytree.tree_leaves(map_arg(output.args[0], lambda n: self._value(n, values)))  # noqa: B023
        ]
        return [each for each in leaves if isinstance(each, Tensor) and each.is_floating_point()]

    def shift(self, node: Node, by: Tensor) -> None:
        """Add ``by`` to the value of ``node`` in every batch."""
        for values in self._values:
            values[node] = values[node] + by

    def _step(self, node: Node, values: dict[Node, Any]) -> None:
        if node.op in ("call_function", "call_method", "call_module") and not self._is_read_late(node):
            values[node] = self._run(node, values)
        for dead in self._dying.get(node, ()):
            values.pop(dead, None)

    def _is_read_late(self, node: Node) -> bool:
        """Whether ``node`` is a weight, observed or not, which is read when needed, since it may be replaced before."""
        if node.op == "get_attr":
            return True
        observes = node.op == "call_module" and isinstance(self._module(node), OBSERVERS)
        return observes and self._is_read_late(node.all_input_nodes[0])

    def _value(self, node: Node, values: dict[Node, Any]) -> Any:
        if node in values:
            return values[node]
        if node.op == "get_attr":
            return attribute(self.prepared, node)
        return self._run(node, values)

    def _run(self, node: Node, values: dict[Node, Any]) -> Any:
        args: Any = map_arg(node.args, lambda n: self._value(n, values))
        kwargs: Any = map_arg(node.kwargs, lambda n: self._value(n, values))
        if node.op == "call_function":
            return node.target(*args, **kwargs)  # type: ignore[operator]
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        module = self._module(node)
        return self._observed(node, args[0]) if isinstance(module, OBSERVERS) else module(*args, **kwargs)

    def _observed(self, node: Node, x: Tensor) -> Tensor:
        observer = own_observer(self._module(node))
        if observer is None:  # another quantizer's
            return x
        if not self.quantized:
            rounded = isinstance(observer, WeightObserver) and observer.float_weight is not None
            return observer.float_weight if rounded else x  # type: ignore[union-attr, return-value]
        if not isinstance(observer, StaticObserver):
            return fake_quantize(x, observer.broadcast_scale(x))
        if node not in self._scales:
            known = observer.has_scale()
            self._scales[node] = (observer.broadcast_scale(x), observer.zero_point()) if known else None
        found = self._scales[node]
        return x if found is None else fake_quantize(x, *found)

    def _module(self, node: Node) -> torch.nn.Module:
        return self.prepared.get_submodule(str(node.target))


def _last_reads(prepared: GraphModule) -> dict[Node, list[Node]]:
    """The values that are no longer needed after each node."""
    last: dict[Node, list[Node]] = {}
    seen: set[Node] = set()
    for node in reversed(prepared.graph.nodes):
        for read in [*node.all_input_nodes, node]:  # the node itself: its value may have no reader
            if read not in seen:
                seen.add(read)
                last.setdefault(node, []).append(read)
    return last
