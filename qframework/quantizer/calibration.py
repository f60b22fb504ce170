"""Run data through a prepared model so that its observers see what the model sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from qframework.arguments import check_batches, check_number_of_batches, no_data
from qframework.batches import device_of, move, progress_bar
from qframework.compat import pytree
from qframework.compat.graphs import input_structure
from qframework.devices import checked_device
from qframework.errors import CalibrationError
from qframework.graph.state import kept_state
from qframework.quantizer.arguments import check_prepared
from qframework.quantizer.static_observer import CONSTANT_DATA, StaticObserver

Batch = Any
Forward = Callable[[GraphModule, Batch], object]


def calibrate(
    prepared: GraphModule,
    data: Iterable[Batch],
    *,
    batches: int | None = None,
    max_batches: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    forward: Forward | None = None,
) -> int:
    """Run ``data`` through ``prepared`` (from ``prepare_pt2e``) without gradients, and discard the outputs.

    Buffers that the model itself changes, such as counters and caches, get their values back.

    Args:
        prepared: the model with its observers.
        data: an iterable of batches, such as a DataLoader. A batch is a tensor; a tuple or list, of which the model
            gets as many leading items as it has inputs, positional ones first, so that ``(images, labels)`` works; a
            mapping from the names of the model's inputs, as transformers' tokenizers return it; or a tuple that begins
            with such a mapping, so that ``(inputs, labels)`` works. Other entries are ignored.
        batches: stop after this many; default: all of ``data``.
        max_batches: an alias of ``batches``.
        device: where to run; the model is moved there. Default: the model's device.
        progress: show a progress bar if standard error is a terminal.
        forward: called as ``forward(prepared, batch)``, with the batch on the device, instead of the rules above.

    Returns:
        The number of batches seen.

    Raises:
        CalibrationError: a model that is not prepared, no data, a batch that does not fit the model's inputs, NaN or
            infinity in a batch or in an activation, or both ``batches`` and ``max_batches``. The message names the
            batch and the input or layer.
    """
    check_prepared(prepared, "calibrate: prepared")
    check_batches(data, "calibrate")
    batches = _either(batches, max_batches)
    check_number_of_batches(batches)
    if forward is not None and not callable(forward):
        raise CalibrationError(
            f"calibrate: forward must be None or a function of the model and a batch, got {forward!r}"
        )
    if device is not None:
        prepared.to(device if str(device) == "meta" else checked_device(device, "calibrate: device"))
    target = torch.device(device) if device is not None else device_of(prepared)
    inputs = _Inputs(prepared)
    run = inputs.run if forward is None else lambda model, batch, _: forward(model, batch)
    observers: list[StaticObserver] = [module for module in prepared.modules() if isinstance(module, StaticObserver)]
    _check_has_values(target, observers)
    seen = 0
    with torch.no_grad(), kept_state(prepared), progress_bar("calibrating", data, batches, progress) as advance:
        for batch in islice(iter(data), batches):
            run(prepared, move(batch, target), seen)
            check_finite_activations(observers, seen)
            seen += 1
            advance()
    if seen == 0:
        raise no_data("calibrate", data)
    _keep_constant(prepared, None if forward is not None else inputs.constant)
    return seen


def _either(batches: int | None, max_batches: int | None) -> int | None:
    if batches is not None and max_batches is not None:
        raise CalibrationError(
            "calibrate: batches must be None where max_batches, its alias, is given, got "
            f"{batches!r} and {max_batches!r}"
        )
    return max_batches if batches is None else batches


def flat_inputs(prepared: GraphModule, batch: Batch, index: int) -> list[Any]:
    """What the placeholders of ``prepared`` get from a batch, as ``calibrate`` runs it, on the model's device.

    Raises:
        CalibrationError: the batch, number ``index``, does not fit the model's inputs.
    """
    return pytree.tree_leaves(_Inputs(prepared).checked_arguments(move(batch, device_of(prepared)), index))


def run_batches(
    graph: GraphModule, interpreter: Interpreter, data: Iterable[Batch], batches: int | None = None
) -> None:
    """Interpret a float graph on ``data`` without gradients, with batches as ``calibrate`` takes them.

    Raises:
        CalibrationError: no data, or a batch that does not fit.
    """
    seen = 0
    with torch.no_grad():
        for batch in islice(iter(data), batches):
            interpreter.run(*flat_inputs(graph, batch, seen), enable_io_processing=False)
            seen += 1
    if seen == 0:
        raise CalibrationError("Recipe: data must have at least one batch, got none")


def _check_has_values(device: torch.device | None, observers: list[StaticObserver]) -> None:
    if device is not None and device.type == "meta" and observers:
        raise CalibrationError(
            "calibrate: the model must be on a device that holds values, such as cpu or cuda, to calibrate layer "
            f"{observers[0].layer!r}, got meta"
        )


def _keep_constant(prepared: GraphModule, value: float | None) -> None:
    """Record for ``convert_pt2e`` whether all calibration data so far consists of one value."""
    before = prepared.meta.get(CONSTANT_DATA, value)
    prepared.meta[CONSTANT_DATA] = value if before == value else None


class _Inputs:
    """Names, shapes and dtypes of the inputs of a prepared model, and how a batch becomes its arguments."""

    def __init__(self, prepared: GraphModule) -> None:
        placeholders = [node for node in prepared.graph.nodes if node.op == "placeholder"]
        info = input_structure(prepared)
        if info is None:
            self.positional = [str(node.target) for node in placeholders]
            self.keyword: list[str] = []
            self.nested: dict[str, pytree.TreeSpec] = {}
        else:
            args, kwargs = info.in_spec.children()
            self.positional = list(info.orig_args[: args.num_children])
            self.keyword = list(kwargs.context)
            specs = zip(self.names, [*args.children(), *kwargs.children()], strict=True)
            self.nested = {name: spec for name, spec in specs if not spec.is_leaf()}
        # the one value that all tensors of all batches so far consist of; None if they vary
        self.constant: float | None = None
        self._varied = False
        # a nested input has several placeholders with other names
        self.values = {str(node.target): node.meta.get("val") for node in placeholders}

    @property
    def names(self) -> list[str]:
        return [*self.positional, *self.keyword]

    def arguments(self, batch: Batch) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments of the model; ``batch`` has been checked to hold them."""
        if isinstance(batch, Mapping):
            return [batch[name] for name in self.positional], {name: batch[name] for name in self.keyword}
        items = list(batch) if isinstance(batch, Sequence) else [batch]
        first = len(self.positional)
        return items[:first], dict(zip(self.keyword, items[first:], strict=False))

    def _mapping_in(self, batch: Batch) -> Batch:
        """The mapping at the front of ``(inputs, labels)`` if it holds the model's inputs; else ``batch`` itself."""
        first = batch[0] if isinstance(batch, Sequence) and len(batch) and not isinstance(batch, str | bytes) else None
        names = [name for name in self.names if name not in self.nested]
        return first if isinstance(first, Mapping) and names and all(name in first for name in self.names) else batch

    def run(self, prepared: GraphModule, batch: Batch, index: int) -> None:
        """Run one batch. Raises CalibrationError unless it fits the model's inputs."""
        args, kwargs = self.checked_arguments(batch, index)
        for tensor in pytree.tree_leaves((args, kwargs)):
            self._compare(tensor)
        prepared(*args, **kwargs)

    def _compare(self, tensor: Any) -> None:
        """Update ``constant``. Reads values only until two differ."""
        if self._varied or not isinstance(tensor, Tensor) or tensor.numel() == 0:
            return
        low, high = (float(value) + 0.0 for value in torch.aminmax(tensor.detach()))
        self._varied = low != high or self.constant not in (None, low)
        self.constant = None if self._varied else low

    def checked_arguments(self, batch: Batch, index: int) -> tuple[list[Any], dict[str, Any]]:
        """``arguments``. Raises CalibrationError unless the batch fits the model's inputs."""
        batch = self._mapping_in(batch)
        if isinstance(batch, Mapping):
            self._check_mapping(batch, index)
        else:
            self._check_count(batch, index)
        args, kwargs = self.arguments(batch)
        for name, value in [*zip(self.positional, args, strict=True), *kwargs.items()]:
            self._check_input(name, value, index)
        return args, kwargs

    def _check_input(self, name: str, value: Any, index: int) -> None:
        expected = self.values.get(name)
        if isinstance(expected, Tensor):
            _check_tensor(value, expected, name, index)
        if name in self.nested:
            _check_nested(value, self.nested[name], name, index)
        for leaf in pytree.tree_leaves(value):
            # an additive attention mask may hold -inf; if it reaches a quantized layer, the layer's observer reports it
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool((leaf < float("inf")).all()):
                raise CalibrationError(f"batch {index}: input {name!r} must be finite, got NaN or infinity")

    def _check_mapping(self, batch: Mapping[str, Any], index: int) -> None:
        missing = [name for name in self.names if name not in batch]
        if missing:
            raise CalibrationError(
                f"batch {index}: the mapping must have the keys {', '.join(map(repr, self.names))}, got "
                f"{', '.join(map(repr, batch))}"
            )

    def _check_count(self, batch: Batch, index: int) -> None:
        given = len(batch) if isinstance(batch, Sequence) else 1
        if self.keyword and given < len(self.names):
            raise CalibrationError(
                f"batch {index}: the batch must be a mapping with the keys {', '.join(map(repr, self.names))}, since "
                f"the model has keyword inputs, or hold all {len(self.names)} in this order, got {given} in a "
                f"{type(batch).__name__}"
            )
        if given < len(self.positional):
            raise CalibrationError(
                f"batch {index}: the batch must hold {len(self.positional)} inputs ({', '.join(self.positional)}), got "
                f"{given} in a {type(batch).__name__}"
            )


def _check_nested(value: Any, spec: pytree.TreeSpec, name: str, index: int) -> None:
    try:
        spec.flatten_up_to(value)
    except ValueError as error:
        raise CalibrationError(
            f"batch {index}: input {name!r} must have the structure of the example given to torch.export, got a "
            f"{type(value).__name__}: {error}"
        ) from error


def _check_tensor(value: Any, expected: Tensor, name: str, index: int) -> None:
    shape = f"({', '.join(map(str, expected.shape))})"
    if not isinstance(value, Tensor):
        raise CalibrationError(
            f"batch {index}: input {name!r} must be a tensor of shape {shape} and dtype {expected.dtype}, got a "
            f"{type(value).__name__}"
        )
    if value.dtype != expected.dtype:
        raise CalibrationError(f"batch {index}: input {name!r} must have dtype {expected.dtype}, got {value.dtype}")
    fits = value.dim() == expected.dim() and all(
        not isinstance(wanted, int) or size == wanted for size, wanted in zip(value.shape, expected.shape, strict=True)
    )
    if not fits:
        raise CalibrationError(
            f"batch {index}: input {name!r} must have shape {shape}, as exported, got {tuple(value.shape)}. Export "
            "with dynamic_shapes to vary a dimension, or use a DataLoader with drop_last=True"
        )


def check_finite_activations(observers: list[StaticObserver], index: int) -> None:
    """Check all observers with one device synchronization per batch. The error names the first one in graph order."""
    if not observers:
        return
    for observer, held in zip(observers, torch.stack([o.nonfinite() for o in observers]).tolist(), strict=True):
        if held:
            raise CalibrationError(
                f"batch {index}: the activation of layer {observer.layer!r} must be finite, got NaN or infinity"
            )
