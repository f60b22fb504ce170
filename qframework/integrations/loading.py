"""Layers that are quantized one by one while a library loads a model, whose weights are on "meta" until then."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from qframework.arguments import described
from qframework.errors import UnsupportedError
from qframework.integrations.configuration import QFrameworkConfig

if TYPE_CHECKING:
    from qframework.conversion import QuantizedLinear
    from qframework.conversion.in_place import Filter
    from qframework.quantizer import LinearConfig


class FloatWeights:
    """The weights to quantize that have not been read yet, by their name in the float checkpoint."""

    def __init__(self) -> None:
        self._layers: dict[str, Any] = {}

    def find(self, model: nn.Module, selected: Filter) -> None:
        """Take the layers of ``model`` for which ``selected(module, name)`` is true.

        Raises:
            UnsupportedError: there is none.
        """
        from qframework.conversion.in_place import find_layers

        layers = find_layers(model, selected)
        if not layers:
            raise UnsupportedError(
                "from_pretrained: quantization_config needs a model with linear layers that can be quantized outside "
                f"modules_to_not_convert, got none in {type(model).__name__}"
            )
        self._layers = {f"{layer.name}.weight": layer for layer in layers}

    def __contains__(self, name: str) -> bool:
        return name in self._layers

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._layers))

    def weight(self, name: str) -> Tensor:
        """The weight as it is in the model, before it is read."""
        return self._layers[name].module.weight.detach()

    def replace(self, name: str, weight: Tensor, config: QFrameworkConfig) -> QuantizedLinear:
        """Replace a layer by its quantized form, with the float weight that was read for it."""
        from qframework.conversion.in_place import replace_layer

        layer = self._layers.pop(name)
        layer.module.weight = nn.Parameter(weight, requires_grad=False)
        return replace_layer(layer, config.linear)


def quantize_empty(model: nn.Module, config: QFrameworkConfig, selected: Filter) -> None:
    """Replace layers on "meta" by quantized ones, whose values come from a quantized checkpoint."""
    from qframework.conversion.in_place import quantize_layers

    quantize_layers(model.eval(), config.linear, filter_fn=selected)


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """The quantized layers by name."""
    from qframework.conversion import QuantizedLinear

    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def float_linears(model: nn.Module) -> list[str]:
    """Names of the linear layers in float."""
    from qframework.training.roles import linear_role

    return [name for name, module in model.named_modules() if linear_role(module) is not None]


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a module has, or is inside one that has, one of these names, or such a part of a name between dots."""
    return any(f".{module}." in f".{name}." for module in modules)


def description(model: nn.Module, linear: LinearConfig, known: object) -> QFrameworkConfig | None:
    """What ``from_pretrained`` needs to know of a model that ``quantize_`` has changed; None if nothing describes it.

    Args:
        model: with quantized layers.
        linear: the configuration that ``quantize_`` got.
        known: the model's configuration before, None for a float model.
    """
    from qframework.conversion.in_place import fallbacks

    try:
        if known is not None and not (isinstance(known, QFrameworkConfig) and known.linear == linear):
            raise UnsupportedError("it was quantized in another way before")
        config = QFrameworkConfig(linear, float_linears(model))
        check_quantized(model, config)
        return config
    except UnsupportedError as error:
        reason = str(error)
    fallbacks.note(
        f"save_pretrained does not describe it: {reason}",
        f"from_pretrained will not read what save_pretrained writes of {type(model).__name__}: {reason}. Save its "
        "state dict, and load it into a model that quantize_ has quantized in the same way",
    )
    return None


# Checks of arguments --------------------------------------------------------------------------------------------------


def check_dynamic(config: QFrameworkConfig) -> None:
    """A float checkpoint has no static scales."""
    if not config.linear.activation.dynamic:
        raise UnsupportedError(
            "from_pretrained: quantization_config must have a dynamic activation, such as dynamic_int8(), got a "
            "static one. Static scales are calibrated: load the float model, call quantize_(model, static_int8(), "
            "data), and save it"
        )


def check_device_map(device_map: Any) -> None:
    """Quantized layers cannot be offloaded to files."""
    places = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    if "disk" in places:
        raise UnsupportedError(
            f"from_pretrained: device_map must map to GPUs and 'cpu' for quantized models, got {device_map!r:.60}"
        )


def check_names(model: nn.Module, modules: Collection[str]) -> None:
    """``modules_to_not_convert`` must name modules of the model."""
    for name in modules:
        if not any(is_inside(module, [name]) for module, _ in model.named_modules()):
            raise UnsupportedError(
                f"from_pretrained: modules_to_not_convert of quantization_config must name modules of "
                f"{type(model).__name__}, got {name!r}"
            )


def check_quantized(model: nn.Module, quantization_config: QFrameworkConfig) -> None:
    """``as_pretrained``: the model must be quantized as the configuration says."""
    if not isinstance(quantization_config, QFrameworkConfig):
        raise UnsupportedError(
            f"as_pretrained: quantization_config must be a QFrameworkConfig, got {described(quantization_config)}"
        )
    layers = quantized_layers(model)
    if not layers:
        raise UnsupportedError(
            f"as_pretrained: model must have been quantized by quantize_, got a {type(model).__name__} in float"
        )
    dynamic = quantization_config.linear.activation.dynamic
    for name, layer in layers.items():
        if (layer.input_scale is None) != dynamic or (not dynamic and layer.input_scale.numel() != 1):  # type: ignore[union-attr]
            raise UnsupportedError(
                f"as_pretrained: quantization_config must be that of quantize_, got "
                f"{'a dynamic' if dynamic else 'a static per-tensor'} activation, unlike layer {name!r}"
            )
