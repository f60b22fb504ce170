"""``quantize``: exports, prepares, calibrates and converts a model in one call."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import Parameter
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.export import Dim

from qframework.arguments import (
    check_batches,
    check_in_eval_mode,
    check_module,
    check_number_of_batches,
    described,
    names_in,
)
from qframework.compat import pytree
from qframework.compat.dynamo import is_compiled
from qframework.compat.operators import OpOverload
from qframework.conversion.exported import quantize_exported
from qframework.conversion.in_place import fallbacks
from qframework.conversion.quantized_model import QuantizedModel
from qframework.errors import CalibrationError, QFrameworkError, UnsupportedError, first_line
from qframework.graph.export_program import example_call, export_program
from qframework.graph.nested import HIGHER_ORDER, nested_linears
from qframework.graph.nodes import layer_name
from qframework.graph.shapes import same
from qframework.quantizer import QFrameworkQuantizer, Recipe, dynamic_int8, static_int8
from qframework.quantizer.quantizer import module_names
from qframework.quantizer.rules import Config
from qframework.training.roles import check_not_converted, own_forward

logger = logging.getLogger(__name__)

PRESETS = {"static_int8": static_int8, "dynamic_int8": dynamic_int8}
RECIPES = {"best": Recipe.best}
HEAD = ("head",)


@contextmanager
def _without_autocast() -> Iterator[None]:
    """``torch.export`` would record the casts of an autocast around it, and the model would run in that alone.

    What is quantized without casts runs with and without autocast.
    """
    with ExitStack() as scopes:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                scopes.enter_context(torch.autocast(device, enabled=False))
        yield


@_without_autocast()
def quantize(
    model: nn.Module,
    example_inputs: Any,
    config: Config | QFrameworkQuantizer | str,
    calibration_data: Iterable[Any] | None = None,
    *,
    recipe: Recipe | str | None = None,
    skip: Iterable[str] = HEAD,
    dynamic_shapes: Any | Literal["batch"] = "batch",
    batches: int | None = None,
    progress: bool = False,
) -> QuantizedModel:
    """Quantize a float model: ``torch.export``, ``prepare_pt2e``, ``calibrate`` and ``convert_pt2e`` in one call.

    Args:
        model: the float model, in eval mode, with the device and dtype that it will run in. It is not changed.
        example_inputs: its input, a tuple of inputs, or a mapping of keyword inputs; only shapes and dtypes matter.
        config: what to quantize linear and attention layers to: ``static_int8()``, ``dynamic_int8()`` or another
            configuration, the name of one of these two, or a QFrameworkQuantizer with rules for single layers.
        calibration_data: batches as ``qframework.calibrate`` takes them. Static configurations need a few hundred real
            inputs, dynamic ones none.
        recipe: steps that keep accuracy, a ``Recipe`` or ``"best"``; they read ``calibration_data`` several times.
        skip: modules that stay in float, by name; ``*`` is a wildcard. The default keeps a module called ``head`` in
            float if there is one, unless ``config`` is a quantizer, whose rules then apply alone.
        dynamic_shapes: ``"batch"``: the first dimension of the first tensor may vary, and that of every other tensor of
            that size, unless the model fixes it; ``None``: the model takes the shapes of ``example_inputs`` only; else
            as ``torch.export.export``.
        batches: maximum number of calibration batches; None for all.
        progress: draw a progress bar on a terminal while calibrating.

    Returns:
        An ordinary module with ``save`` and ``explain``, for ``torch.compile(..., backend="qframework")``.

    Raises:
        CalibrationError: ``config`` is static or there is a recipe, and ``calibration_data`` is None, empty or not
            finite.
        UnsupportedError: a wrong argument, a name in ``skip`` that no module has, or a configuration without a kernel.
        QFrameworkError: ``torch.export`` cannot capture the model with these inputs and shapes.
    """
    _check_float_model(model)
    skip = names_in(skip, "quantize: skip")
    chosen = _recipe(recipe)
    quantizer = _quantizer(config)
    if calibration_data is None and (chosen is not None or quantizer.needs_calibration):
        why = "a recipe" if chosen is not None else "static INT8"
        raise CalibrationError(f"quantize: calibration_data must hold batches of real inputs for {why}, got None")
    if calibration_data is not None:
        check_batches(calibration_data, "quantize", "calibration_data")
    check_number_of_batches(batches)
    args, kwargs = example_call(example_inputs, model, "quantize: example_inputs")
    args, kwargs = pytree.tree_map_only(Tensor, _dense, (args, kwargs))
    shapes = _shapes(args, kwargs, dynamic_shapes)
    exported = _exported(model, args, kwargs, _for_signature(model, shapes) if dynamic_shapes == "batch" else shapes)
    if dynamic_shapes == "batch":
        _note_fixed(exported, _tensors(args, kwargs)[0].shape[0])
    _leave_in_float(quantizer, exported, skip, config)
    converted = quantize_exported(
        exported, quantizer, calibration_data, recipe=chosen, batches=batches, show_progress=progress
    )
    _note_left_in_float(model, converted, skip)
    described_by = {"quantizer": quantizer.to_dict(), "recipe": chosen and chosen.to_dict()}
    return QuantizedModel(converted, (args, kwargs), shapes, described_by, model)


def _check_float_model(model: nn.Module) -> None:
    check_module(model, "quantize: model")
    check_not_converted(model, "quantize: model")
    if isinstance(model, QuantizedModel):
        raise UnsupportedError(
            "quantize: model must be a float model, got a QuantizedModel, which is quantized already"
        )
    if is_compiled(model):
        raise UnsupportedError("quantize: model must not be compiled. Pass the model given to torch.compile")
    check_in_eval_mode(model, "quantize: model")
    _check_weights_are_there(model)
    _check_names(model)


def _check_weights_are_there(model: nn.Module) -> None:
    for name, module in model.named_modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own_forward(module) and any(tensor.is_meta for tensor in tensors):
            raise UnsupportedError(
                f"quantize: model must hold its weights, got one that loads them at each call, in {name!r}, as "
                "accelerate offloads them. Load it onto one device, without a device_map that offloads"
            )


def _check_names(model: nn.Module) -> None:
    """The graph could not read what a method hides, nor could the model be saved if the method gave way."""
    own = {name for name, _ in [*model.named_children(), *model.named_parameters(recurse=False)]}
    own |= {name for name, _ in model.named_buffers(recurse=False)}
    if hidden := sorted(own & set(dir(QuantizedModel))):
        raise UnsupportedError(
            f"quantize: model must have no submodule, parameter or buffer with the name of a method of QuantizedModel, "
            f"got {hidden[0]!r}. Rename it, wrap the model in another module, or use quantize_"
        )


def _note_left_in_float(model: nn.Module, converted: fx.GraphModule, skip: tuple[str, ...]) -> None:
    """Note linears that the quantizer did not reach, or that nothing is quantized."""
    if unreached := [layer_name(node) for node in nested_linears(converted)]:
        fallbacks.note(
            "linear layers in a higher-order operator",
            f"quantize: linear layers such as {unreached[0]!r} stay in float ({len(unreached)} in all), since "
            f"{HIGHER_ORDER}",
        )
    elif not _is_quantized(converted):
        fallbacks.note(
            "nothing in the model is quantized",
            f"quantize: no layer of the {type(model).__name__} is quantized, so the result computes in float: it has "
            f"none that the configuration quantizes, or skip={skip!r} leaves them out",
        )


def _recipe(recipe: Recipe | str | None) -> Recipe | None:
    if isinstance(recipe, str) and recipe in RECIPES:
        return RECIPES[recipe]()
    if not isinstance(recipe, Recipe | None):
        accepted = ", ".join(map(repr, RECIPES))
        raise UnsupportedError(f"quantize: recipe must be None, a Recipe or {accepted}, got {described(recipe)}")
    return recipe


def _quantizer(config: Config | QFrameworkQuantizer | str) -> QFrameworkQuantizer:
    """A quantizer of its own for ``config``."""
    if isinstance(config, QFrameworkQuantizer):
        copied = QFrameworkQuantizer(is_qat=config.is_qat)
        copied.rules = list(config.rules)
        return copied
    if isinstance(config, str) and config in PRESETS:
        config = PRESETS[config]()
    if not isinstance(config, Config):
        accepted = ", ".join(map(repr, PRESETS))
        raise UnsupportedError(
            f"quantize: config must be a configuration such as static_int8(), one of {accepted}, or a "
            f"QFrameworkQuantizer, got {described(config)}"
        )
    return QFrameworkQuantizer().set_global(config)


def _leave_in_float(
    quantizer: QFrameworkQuantizer, exported: fx.GraphModule, skip: tuple[str, ...], config: Any
) -> None:
    if skip == HEAD and (isinstance(config, QFrameworkQuantizer) or HEAD[0] not in module_names(exported)):
        return
    for name in skip:
        quantizer.set_module_name(name, None)


def _is_quantized(converted: fx.GraphModule) -> bool:
    return any(
        isinstance(node.target, OpOverload) and node.target.namespace in ("quantized_decomposed", "qframework")
        for node in converted.graph.nodes
    )


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The inputs that have a first dimension, in order."""
    return [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.ndim]


def _dense(x: Tensor) -> Tensor:
    """``x``, or a copy if it is a slice of another tensor: an exported model would take no tensor of other strides."""
    return x if torch.empty_like(x, device="meta").stride() == x.stride() else x.contiguous()


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any) -> Any:
    """``dynamic_shapes`` for ``torch.export.export``."""
    if not isinstance(dynamic_shapes, str):
        return dynamic_shapes
    if dynamic_shapes != "batch":
        raise UnsupportedError(
            f"quantize: dynamic_shapes must be 'batch', None or as in torch.export.export, got {dynamic_shapes!r}"
        )
    tensors = _tensors(args, kwargs)
    size = tensors[0].shape[0] if tensors else 0
    if size < 2:
        seen = f"{size}: torch.export makes 1 a constant" if tensors else "a tensor without dimensions"
        raise UnsupportedError(
            f"quantize: example_inputs must have a first dimension of at least 2, got {seen}. Pass a larger batch, or "
            "dynamic_shapes=None for a model that takes this shape only"
        )

    def of(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.ndim or x.shape[0] != size:
            return None
        # Another tensor may have that size by chance, as a mask of as many tokens: then AUTO makes it a constant.
        return {0: Dim.DYNAMIC if x is tensors[0] else Dim.AUTO}

    positional = pytree.tree_map(of, args)
    named = {name: pytree.tree_map(of, value) for name, value in kwargs.items()}
    return named if kwargs and not args else positional


def _note_fixed(exported: fx.GraphModule, size: int) -> None:
    """Log the inputs of the batch's size whose first dimension the model does not let vary."""
    for node in exported.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.ndim and same(value.shape[0], size):
            logger.warning(
                "qframework: quantize: the first dimension of input %r is fixed to %d: the model does not let it vary "
                "with the batch",
                node.name,
                size,
            )


def _exported(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any) -> fx.GraphModule:
    """A float graph with weights of its own, since recipes change weights in place."""
    try:
        program = export_program("quantize", model, args, kwargs, shapes, "qframework.quantize_ needs no export")
    except QFrameworkError:
        _check_runs(model, args, kwargs)
        raise
    # PyTorch's checks of the inputs call those of **kwargs by names that the graph's module does not have.
    is_named = kwargs.keys() <= inspect.signature(model.forward).parameters.keys()
    return copy.deepcopy(program.module(check_guards=is_named))


def _check_runs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise UnsupportedError if the float model itself fails with these inputs, which says more than the export."""
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except Exception as error:  # the model's code may raise anything
        raise UnsupportedError(
            f"quantize: example_inputs must be inputs that the {type(model).__name__} computes with, but it raises "
            f"{first_line(error)}"
        ) from error


def _for_signature(model: nn.Module, shapes: tuple[Any, ...] | dict[str, Any]) -> tuple[Any, ...] | dict[str, Any]:
    """Nest the shapes of ``*args`` and ``**kwargs`` as ``torch.export`` expects; others stay as they are."""
    positional, named = (shapes, {}) if isinstance(shapes, tuple) else ((), shapes)
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*positional, **named).arguments
    except TypeError:  # inputs that the model does not accept, which torch.export says better
        return shapes
    kinds = {signature.parameters[name].kind for name in bound}
    return bound if kinds & {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD} else shapes
