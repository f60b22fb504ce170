"""``quantize_``: replaces the linear layers of a model by INT8 ones, in place and without export."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.utils import parametrize

from qframework.arguments import check_in_eval_mode, check_module, described
from qframework.compat.dynamo import is_compiled
from qframework.compat.modules import has_hooks
from qframework.conversion.input_scales import input_scales
from qframework.conversion.linear_module import QuantizedLinear, quantized_weight
from qframework.errors import CalibrationError, UnsupportedError
from qframework.fallbacks import Fallbacks
from qframework.listeners import tell_quantized
from qframework.numerics import MAX_INT8_PRODUCTS
from qframework.quantizer import LinearConfig
from qframework.training.roles import (
    check_not_converted,
    children_whose_weight_is_read,
    held,
    linear_role,
    obstacle,
    own_forward,
)

Model = TypeVar("Model", bound=nn.Module)
Filter = Callable[[nn.Module, str], bool]

fallbacks = Fallbacks()
"""What ``quantize`` and ``quantize_`` could not do, by reason, such as layers left in float. Each is logged once."""


def quantize_(
    model: Model,
    config: LinearConfig,
    calibration_data: Iterable[object] | None = None,
    filter_fn: Filter | None = None,
    *,
    batches: int | None = None,
    progress: bool = False,
) -> Model:
    """Replace every ``nn.Linear`` and every ``Conv1D`` of transformers by a ``QuantizedLinear``, in place.

    The model runs in INT8 in eager mode and with every backend of torch.compile; ``backend="qframework"`` also fuses
    activations, residual sums and requantization into the layers. Its state dict holds INT8 weights and their scales; a
    model on "meta" that is quantized this way takes them with ``load_state_dict(..., assign=True)``, and also float
    weights, which it quantizes. ``save_pretrained`` of models of transformers and diffusers also writes how they were
    quantized, and ``from_pretrained`` reads it.

    These linears stay in float, with a warning: those whose weight the module around them reads instead of calling them
    (as ``nn.MultiheadAttention`` does), or that is shared with a module that stays in float (an embedding), those with
    hooks, parametrizations or another ``forward``, and with static scales those that calibration never reached.

    Args:
        model: the float model, with the device and dtype that it will run in; in eval mode for static scales.
        config: ``dynamic_int8()``, ``static_int8()`` or another LinearConfig.
        calibration_data: batches of inputs for static scales: tensors, mappings of keyword inputs, or tuples such as
            ``(images, labels)``, of which the model gets as many leading items as its ``forward`` requires. A model on
            "meta" gets its static scales, per tensor only, from the state dict instead.
        filter_fn: called with each linear layer and its name; true for those to quantize. Default: all.
        batches: maximum number of calibration batches; None for all.
        progress: draw a progress bar on a terminal while calibrating.

    Returns:
        ``model`` itself.

    Raises:
        UnsupportedError: a wrong argument, or no linear layer that can be quantized.
        CalibrationError: static scales without calibration data, data that does not fit the model, or values that are
            not finite; the message names the layer.
    """
    quantize_layers(model, config, calibration_data, filter_fn, batches=batches, progress=progress)
    tell_quantized(model, config)
    return model


def quantize_layers(
    model: nn.Module,
    config: LinearConfig,
    calibration_data: Iterable[object] | None = None,
    filter_fn: Filter | None = None,
    *,
    batches: int | None = None,
    progress: bool = False,
) -> None:
    """``quantize_``, without telling the library of the model about it."""
    _check(model, config, calibration_data, filter_fn)
    layers = _layers(model, filter_fn or (lambda module, name: True))
    if not layers:
        why = _why_none(model, filter_fn)
        raise UnsupportedError(
            "quantize_: model must hold a linear layer that filter_fn selects and that can be quantized, got none in "
            f"a {type(model).__name__}. {why}"
        )
    scales: dict[str, Tensor | None] = {}
    if not config.activation.dynamic:
        scales = _static_scales(model, layers, config, calibration_data, batches, progress)
        silent = [name for name, scale in scales.items() if scale is None]
        _note(dict.fromkeys(silent, "calibration saw nothing but zeros in its input, or never reached it"))
    uses = Counter(id(layer.weight) for layer in layers)
    shared: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
    while layers:  # a float weight is freed before the next one is quantized
        layer = layers.pop(0)
        if config.activation.dynamic or scales[layer.name] is not None:
            weight = _weight(layer, config, shared if uses[id(layer.weight)] > 1 else {})
            layer.replace(_quantized(layer, weight, config, scales.get(layer.name)))


def _why_none(model: nn.Module, filter_fn: Filter | None) -> str:
    if done := sum(isinstance(module, QuantizedLinear) for module in model.modules()):
        return f"{done} are quantized already"
    linears = [(name, module) for name, module in model.named_modules() if linear_role(module) is not None]
    if not linears:
        return "An exported model has none" if isinstance(model, GraphModule) else "It has no linear layer"
    if filter_fn is not None and not any(filter_fn(module, name) for name, module in linears):
        return f"filter_fn selects none of its {len(linears)} linear layers, such as {linears[0][0]!r}"
    return "Warnings name the layers that stay in float, and why"


def _check(model: nn.Module, config: LinearConfig, calibration_data: object, filter_fn: object) -> None:
    check_module(model, "quantize_: model")
    check_not_converted(model, "quantize_: model")
    if is_compiled(model):
        raise UnsupportedError("quantize_: model must not be compiled. Quantize it first, then compile it")
    if not isinstance(config, LinearConfig):
        raise UnsupportedError(
            "quantize_: config must be a LinearConfig such as dynamic_int8() or static_int8(), got "
            f"{described(config)}. qframework.quantize takes other configurations"
        )
    if config.output != "consumer":
        raise UnsupportedError(
            f"quantize_: config must have output='consumer', got {config.output!r}. qframework.quantize takes others"
        )
    if not config.activation.symmetric:
        raise UnsupportedError(
            "quantize_: config must have a symmetric activation, got symmetric=False. qframework.quantize takes others"
        )
    if filter_fn is not None and not callable(filter_fn):
        raise UnsupportedError(
            f"quantize_: filter_fn must be None or a function of a module and its name, got {described(filter_fn)}"
        )
    if config.activation.dynamic and calibration_data is not None:
        raise UnsupportedError("quantize_: calibration_data must be None for a dynamic configuration, which needs none")
    if not config.activation.dynamic:
        check_in_eval_mode(model, "quantize_: model")


# Layer by layer, for loaders that quantize each weight when they have read it -----------------------------------------


def find_layers(model: nn.Module, filter_fn: Filter) -> list[_Layer]:
    """The layers that ``quantize_`` would replace, each with its name and module, and ``replace_layer`` for each.

    ``model`` may be on "meta". Layers that must stay in float are noted as ``quantize_`` notes them.
    """
    return _layers(model, filter_fn)


def replace_layer(layer: _Layer, config: LinearConfig) -> QuantizedLinear:
    """Replace a layer that ``find_layers`` found in its model, with dynamic scales.

    Raises:
        CalibrationError: the weight holds NaN or infinity; the message names the layer.
    """
    quantized = _quantized(layer, _weight(layer, config, {}), config, None)
    layer.replace(quantized)
    return quantized


# Finding the layers ---------------------------------------------------------------------------------------------------


@dataclass
class _Layer:
    """A linear layer with its places in the model: a module may have several."""

    name: str
    module: nn.Module
    conv1d: bool
    encoders: list[nn.TransformerEncoder] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def weight(self) -> nn.Parameter:
        return self.module.weight  # type: ignore[return-value]

    def replace(self, new: QuantizedLinear) -> None:
        for parent, name in self.places:
            setattr(parent, name, new)
            if isinstance(parent, nn.TransformerEncoderLayer):
                parent.activation_relu_or_gelu = 0  # no fast path, which reads the float weights
        for encoder in self.encoders:
            encoder.use_nested_tensor = False  # of padded inputs, which INT8 operators do not take


def _layers(model: nn.Module, selected: Filter) -> list[_Layer]:
    """The layers to quantize; notes those that are left in float."""
    if linear_role(model) is not None:
        raise UnsupportedError(
            f"quantize_: model must contain linear layers, got a {type(model).__name__} itself, which cannot be "
            "replaced in place. Wrap it in nn.Sequential"
        )
    found: dict[int, _Layer] = {}
    refused: dict[int, str] = {}
    strange: dict[str, str] = {}
    encoders = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.TransformerEncoder)]
    for name, child, role, held_by, reason in _places(model):
        if not selected(child, name):
            continue
        if role is None:
            strange[name] = _STRANGE.format(type(child).__name__)
            continue
        around = [each for outer, each in encoders if not outer or name.startswith(f"{outer}.")]
        found.setdefault(id(child), _Layer(name, child, role == "conv1d", around)).places.append(held_by)
        if reason := reason or _obstacle(child):
            refused.setdefault(id(child), reason)
    _note(strange | {found[number].name: reason for number, reason in refused.items()})
    return _without_shared_weights(model, [layer for number, layer in found.items() if number not in refused])


class _Place(NamedTuple):
    """Where a module holds a linear, or a subclass of one that may compute something else."""

    name: str
    module: nn.Module
    role: str | None
    held_by: tuple[nn.Module, str]
    reason: str | None  # why what holds it keeps it in float


def _places(model: nn.Module) -> Iterator[_Place]:
    for outer, parent in model.named_modules(remove_duplicate=False):
        read = set() if isinstance(parent, nn.TransformerEncoderLayer) else children_whose_weight_is_read(parent)
        for name, child in held(parent):
            role = linear_role(child)
            if role is not None or isinstance(child, nn.Linear):
                reason = _READ.format(type(parent).__name__) if name in read else None
                yield _Place(f"{outer}.{name}" if outer else name, child, role, (parent, name), reason)


_STRANGE = "its class {} computes something else than nn.Linear, or holds more than weight and bias"
_READ = "the {} around it reads its weight instead of calling it"


def _obstacle(module: nn.Module) -> str | None:
    """Why a linear layer must stay in float."""
    if own_forward(module):
        return "its forward was replaced"
    if reason := obstacle(module):
        return reason
    if has_hooks(module):
        return "it has hooks"
    if parametrize.is_parametrized(module):
        return "its weight is parametrized"
    features = module.weight.shape[1 if isinstance(module, nn.Linear) else 0]  # type: ignore[index]
    if features > MAX_INT8_PRODUCTS:
        return f"it has {features} input features, over {MAX_INT8_PRODUCTS} INT32 sums can overflow"
    return None


def _without_shared_weights(model: nn.Module, layers: list[_Layer]) -> list[_Layer]:
    """Leave out layers whose weight another module, which stays in float, holds too: it would be held twice."""
    quantized = {id(layer.module) for layer in layers}
    owners = {
        id(parameter): name
        for name, module in model.named_modules()
        for parameter in module.parameters(recurse=False)
        if id(module) not in quantized
    }
    shared = {layer.name: owners[id(layer.weight)] for layer in layers if id(layer.weight) in owners}
    _note({name: f"its weight is shared with {owner!r}, which stays in float" for name, owner in shared.items()})
    return [layer for layer in layers if layer.name not in shared]


def _note(reasons: Mapping[str, str]) -> None:
    """Count layers that stay in float, and log one sentence for each reason."""
    for reason in dict.fromkeys(reasons.values()):
        names = [repr(name) for name, its in reasons.items() if its == reason]
        which = f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for _ in names:
            fallbacks.note(reason, f"quantize_: layer {which} stays in float: {reason}")


# Replacing them -------------------------------------------------------------------------------------------------------


def _static_scales(
    model: nn.Module,
    layers: list[_Layer],
    config: LinearConfig,
    data: Iterable[object] | None,
    batches: int | None,
    progress: bool,
) -> dict[str, Tensor | None]:
    if data is not None:
        if any(layer.weight.is_meta for layer in layers):
            raise CalibrationError(
                "quantize_: calibration_data must be None for a model on meta, which computes no values. Calibrate a "
                "model with weights, and load its state dict"
            )
        modules = {layer.name: layer.module for layer in layers}
        return input_scales(model, modules, config.activation, data, batches, progress)
    if config.activation.granularity == "per_tensor" and all(layer.weight.is_meta for layer in layers):
        return {layer.name: torch.empty(1, device="meta") for layer in layers}
    raise CalibrationError(
        "quantize_: calibration_data must hold batches of real inputs for static scales, got None. dynamic_int8() "
        "needs none; a model on meta takes scales per tensor from a state dict"
    )


def _weight(
    layer: _Layer, config: LinearConfig, shared: dict[nn.Parameter, tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """The INT8 weight and its scale; layers that shared a float weight share them."""
    if layer.weight not in shared:
        rows = layer.weight.detach()
        shared[layer.weight] = quantized_weight(rows.t() if layer.conv1d else rows, layer.name, config.weight)
    return shared[layer.weight]


def _quantized(
    layer: _Layer, weight: tuple[Tensor, Tensor], config: LinearConfig, input_scale: Tensor | None
) -> QuantizedLinear:
    quantized = QuantizedLinear(
        weight,
        layer.module.bias,  # type: ignore[arg-type]
        layer.weight.dtype,
        input_scale=input_scale,
        activation=config.activation.granularity,
        weight_config=config.weight,
        conv1d=layer.conv1d,
    )
    return quantized.train(layer.module.training)
