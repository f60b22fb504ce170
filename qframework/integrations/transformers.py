"""``quantization_config=QFrameworkConfig()`` for models of the transformers library, through its own registries::

    import qframework  # before or after transformers: its import registers the configuration
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=qframework.QFrameworkConfig())
    model.save_pretrained("int8")  # INT8 weights and their scales as safetensors, the configuration in config.json
    model = AutoModelForCausalLM.from_pretrained("int8")

The model is built on "meta". Each float weight is quantized as soon as it is read and freed before the next one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from qframework.arguments import described
from qframework.compat.transformers_quantizers import (
    ConversionOps,
    HfQuantizer,
    QuantizationConfigMixin,
    initialize,
    is_initialized,
    mark_initialized,
    register_quantization_config,
    register_quantizer,
)
from qframework.errors import FileFormatError, UnsupportedError, either

if TYPE_CHECKING:
    from qframework.conversion import QuantizedLinear
    from qframework.quantizer import LinearConfig

METHOD = "qframework"
"""``quant_method`` in ``config.json``."""


# The configuration ----------------------------------------------------------------------------------------------------


class QFrameworkConfig(QuantizationConfigMixin):
    """How ``from_pretrained`` quantizes a model: its linear layers to INT8.

    Attributes:
        linear: ``dynamic_int8()`` or another LinearConfig, or what its ``to_dict`` returns.
        modules_to_not_convert: names of modules that stay in float with all that they contain: ``"lm_head"``,
            ``"model.layers.0"``, or a part between dots such as ``"vision_model"``. None: what transformers leaves out
            by default, which is the output embeddings, tied weights, and the last module. The configuration of a
            quantized model holds the full name of every linear layer that stayed in float.

    Raises:
        UnsupportedError: a wrong field or value.
    """

    def __init__(
        self,
        linear: LinearConfig | Mapping[str, Any] | None = None,
        modules_to_not_convert: Iterable[str] | None = None,
        quant_method: str = METHOD,
        **unknown: Any,
    ) -> None:
        for name in unknown:
            raise UnsupportedError(
                f"QFrameworkConfig: fields must be {either(_FIELDS)}, got {name!r}. A file with other fields was saved "
                "by a newer qframework"
            )
        if quant_method != METHOD:
            raise UnsupportedError(f"QFrameworkConfig: quant_method must be {METHOD!r}, got {quant_method!r}")
        self.quant_method = METHOD
        self.linear = _checked_linear(linear)
        self.modules_to_not_convert = _checked_names(modules_to_not_convert)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able description, as in ``config.json``; ``from_dict`` reads it back."""
        return {
            "quant_method": self.quant_method,
            "linear": self.linear.to_dict(),
            "modules_to_not_convert": copy.copy(self.modules_to_not_convert),
        }

    def to_diff_dict(self) -> dict[str, Any]:
        """The same: transformers writes this one."""
        return self.to_dict()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self.to_dict().items()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QFrameworkConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]


_FIELDS = ("'linear'", "'modules_to_not_convert'")


def _checked_linear(linear: LinearConfig | Mapping[str, Any] | None) -> LinearConfig:
    from qframework.quantizer import LinearConfig, dynamic_int8

    if linear is None:
        return dynamic_int8()
    if isinstance(linear, Mapping):
        linear = LinearConfig.from_dict(linear)
    if not isinstance(linear, LinearConfig):
        raise UnsupportedError(
            "QFrameworkConfig: linear must be a LinearConfig such as dynamic_int8(), its dictionary or None, got "
            f"{described(linear)}"
        )
    if linear.output != "consumer":
        raise UnsupportedError(f"QFrameworkConfig: linear must have output='consumer', got {linear.output!r}")
    if not linear.activation.dynamic and linear.activation.granularity != "per_tensor":
        raise UnsupportedError(
            "QFrameworkConfig: linear must have a dynamic activation or a static one per tensor, got a static one "
            f"{linear.activation.granularity}, whose scales depend on the length of the inputs"
        )
    return linear


def _checked_names(names: Iterable[str] | None) -> list[str] | None:
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise UnsupportedError(
            f"QFrameworkConfig: modules_to_not_convert must be None or a list of names of modules, got "
            f"{described(names)}"
        )
    listed = list(names)
    for name in listed:
        if not isinstance(name, str) or not name:
            raise UnsupportedError(
                f"QFrameworkConfig: modules_to_not_convert must hold names such as 'lm_head', got {described(name)}"
            )
    return listed


# Loading --------------------------------------------------------------------------------------------------------------


class QFrameworkHfQuantizer(HfQuantizer):
    """transformers calls this while it loads a model: before its weights are read, for each weight, and after."""

    quantization_config: QFrameworkConfig

    def __init__(self, quantization_config: QFrameworkConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._layers: dict[str, Any] = {}  # found in float, and not yet replaced, by the name of their weight

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Check the configuration and ``device_map`` before anything is read."""
        activation = self.quantization_config.linear.activation
        if not self.pre_quantized and not activation.dynamic:
            raise UnsupportedError(
                "from_pretrained: quantization_config must have a dynamic activation, such as dynamic_int8(), got a "
                "static one. Static scales are calibrated: load the float model, call quantize_(model, static_int8(), "
                "data) and as_pretrained(model, QFrameworkConfig(static_int8())), and save it"
            )
        places = device_map.values() if isinstance(device_map, Mapping) else [device_map]
        if "disk" in places:
            raise UnsupportedError(
                f"from_pretrained: device_map must map to GPUs and 'cpu' for quantized models, got {device_map!r:.60}"
            )

    @property
    def quantized_element_size(self) -> float:
        """Bytes per element of a quantized weight, for ``device_map="auto"``."""
        return 1

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether ``param_name`` is a float weight that ``get_quantize_ops`` replaces."""
        return param_name in self._layers

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> None:
        from qframework.conversion import quantize_
        from qframework.conversion.in_place import find_layers

        config = self.quantization_config
        if self.pre_quantized:
            in_float = [*(config.modules_to_not_convert or ()), *_new_layers(model, checkpoint_files)]
            quantize_(
                model.eval(), config.linear, filter_fn=lambda module, name: not _names_one_of(model, name, in_float)
            )
            return
        left_out = _left_out(model, config)
        layers = find_layers(model, lambda module, name: not _is_inside(name, left_out))
        if not layers:
            raise UnsupportedError(
                "from_pretrained: quantization_config needs a model with linear layers that can be quantized outside "
                f"modules_to_not_convert, got none in {type(model).__name__}"
            )
        self._layers = {f"{layer.name}.weight": layer for layer in layers}

    def get_quantize_ops(self) -> Any:
        """The operation on each float weight that is read."""
        return _QuantizeWeight(self)

    def replace(self, weight_name: str, weight: Tensor) -> None:
        """Replace a layer by its quantized form, with the float weight that was read for it."""
        from qframework.conversion.in_place import replace_layer

        layer = self._layers.pop(weight_name)
        layer.module.weight = nn.Parameter(weight, requires_grad=False)
        quantized = replace_layer(layer, self.quantization_config.linear)
        for buffer in quantized.buffers():
            mark_initialized(buffer)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Quantize layers that the checkpoint lacks, which transformers has initialized; record what stays in float."""
        for name in list(self._layers):
            self.replace(name, self._layers[name].module.weight.detach())
        if self.pre_quantized:
            for layer in _quantized_layers(model).values():
                if not all(map(is_initialized, layer.buffers())):
                    _initialize(model, layer)
        self.quantization_config.modules_to_not_convert = _float_linears(model)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """``save_pretrained`` works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """``QuantizedLinear`` has no gradients."""
        return False

    @property
    def is_compileable(self) -> bool:
        """``generate`` may compile the model."""
        return True


class _QuantizeWeight(ConversionOps):
    """Consumes the float weights of linear layers, and passes other tensors on."""

    def __init__(self, quantizer: QFrameworkHfQuantizer) -> None:
        self.hf_quantizer = quantizer

    def convert(
        self, input_dict: dict[str, Any], *args: Any, missing_keys: set[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """``{"layer.weight": tensor}`` to an empty dictionary: the layer is in the model."""
        others = {}
        for name in list(input_dict):
            value = input_dict.pop(name)
            if not self.hf_quantizer.param_needs_quantization(None, name):
                others[name] = value
                continue
            self.hf_quantizer.replace(name, value[0] if isinstance(value, list) else value)
            if missing_keys is not None:
                missing_keys.discard(name)
        return others


def _quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    from qframework.conversion import QuantizedLinear

    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def _initialize(model: Any, layer: QuantizedLinear) -> None:
    """Give a layer that the quantized checkpoint lacks the weights that transformers gives to a new one, in INT8."""
    device = layer.weight_int8.device
    fresh = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device, layer.dtype)
    initialize(model, fresh)
    state = fresh.state_dict()
    layer.load_state_dict({**state, "weight": state["weight"].t() if layer.conv1d else state["weight"]})


# Which layers stay in float -------------------------------------------------------------------------------------------


def _left_out(model: Any, config: QFrameworkConfig) -> list[str]:
    """Names of modules that stay in float. Tied weights always do: the other module reads them in float."""
    named = config.modules_to_not_convert
    kept = [*(getattr(model, "_keep_in_fp32_modules", None) or ()), *_tied(model)]
    if named is None:
        return [*kept, *_left_out_by_default(model)]
    for name in named:
        if not any(_is_inside(module, [name]) for module, _ in model.named_modules()):
            raise UnsupportedError(
                f"from_pretrained: modules_to_not_convert of quantization_config must name modules of "
                f"{type(model).__name__}, got {name!r}"
            )
    return [*kept, *named]


def _left_out_by_default(model: Any) -> list[str]:
    return [_module_of(name) for name in HfQuantizer.get_modules_to_not_convert(model)]


def _tied(model: Any) -> list[str]:
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return [_module_of(name) for name in (*tied, *tied.values())]


def _module_of(parameter: str) -> str:
    return parameter.removesuffix(".weight").removesuffix(".bias")


def _is_inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a module has, or is inside one that has, one of these names, or such a part of a name between dots."""
    return any(f".{module}." in f".{name}." for module in modules)


def _names_one_of(model: Any, name: str, modules: Iterable[str]) -> bool:
    """Whether ``name`` is one of ``modules``, which may be those of the model with a head, or of its base model."""
    base = getattr(model, "base_model_prefix", "")
    return not {name, f"{base}.{name}", name.removeprefix(f"{base}.")}.isdisjoint(modules)


def _float_linears(model: nn.Module) -> list[str]:
    from qframework.training.roles import linear_role

    return [name for name, module in model.named_modules() if linear_role(module) is not None]


def _new_layers(model: Any, files: Any) -> list[str]:
    """Names of layers, such as heads, that a checkpoint of another class lacks and that stay in float by default."""
    if type(model).__name__ in (model.config.architectures or ()):
        return []
    in_files = _quantized_in(files)
    return [name for name in _left_out_by_default(model) if not _names_one_of(model, name, in_files)]


def _quantized_in(files: Any) -> list[str]:
    """Names of the layers whose INT8 weights are in these safetensors files."""
    from safetensors import SafetensorError, safe_open

    keys: list[str] = []
    for file in files or ():
        if not str(file).endswith(".safetensors"):
            continue
        try:
            with safe_open(file, framework="pt") as opened:
                keys += opened.keys()
        except SafetensorError as error:
            raise FileFormatError(f"from_pretrained: {file} must be a safetensors file: {error}") from error
    return [key.removesuffix(".weight_int8") for key in keys if key.endswith(".weight_int8")]


# Saving a model that was quantized in place ---------------------------------------------------------------------------


def as_pretrained(model: Any, quantization_config: QFrameworkConfig) -> Any:
    """Make ``save_pretrained`` of a model that ``quantize_`` has quantized write what ``from_pretrained`` reads.

    Args:
        model: a model of transformers after ``quantize_(model, quantization_config.linear, ...)``.
        quantization_config: says how the model was quantized.

    Returns:
        ``model``.

    Raises:
        UnsupportedError: the model is not quantized, or otherwise than the configuration says.
    """
    if not isinstance(quantization_config, QFrameworkConfig):
        raise UnsupportedError(
            f"as_pretrained: quantization_config must be a QFrameworkConfig, got {described(quantization_config)}"
        )
    layers = _quantized_layers(model)
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
    quantizer = QFrameworkHfQuantizer(quantization_config, pre_quantized=True)
    quantization_config.modules_to_not_convert = _float_linears(model)
    model.hf_quantizer, model.is_quantized, model.quantization_method = quantizer, True, METHOD
    model.config.quantization_config = quantization_config
    return model


# Registration ---------------------------------------------------------------------------------------------------------

_registered: list[str] = []


def register() -> None:
    """Register attention and quantization with transformers, once. ``import qframework`` does this."""
    if _registered:
        return
    from qframework.attention.transformers import register as register_attention

    register_attention()
    register_quantization_config(METHOD)(QFrameworkConfig)
    register_quantizer(METHOD)(QFrameworkHfQuantizer)
    _registered.append(METHOD)
