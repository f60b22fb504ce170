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
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from qframework.attention.transformers import register as register_attention
from qframework.compat.transformers_quantizers import (
    ConversionOps,
    HfQuantizer,
    initialize,
    is_initialized,
    mark_initialized,
    register_quantization_config,
    register_quantizer,
)
from qframework.errors import FileFormatError
from qframework.integrations.configuration import METHOD, QFrameworkConfig
from qframework.integrations.loading import (
    FloatWeights,
    check_device_map,
    check_dynamic,
    check_names,
    check_quantized,
    description,
    float_linears,
    is_inside,
    quantize_empty,
    quantized_layers,
)
from qframework.listeners import when_quantized

if TYPE_CHECKING:
    from qframework.conversion import QuantizedLinear
    from qframework.quantizer import LinearConfig


# Loading --------------------------------------------------------------------------------------------------------------


class QFrameworkHfQuantizer(HfQuantizer):
    """transformers calls this while it loads a model: before its weights are read, for each weight, and after."""

    quantization_config: QFrameworkConfig

    def __init__(self, quantization_config: QFrameworkConfig, **kwargs: Any) -> None:
        super().__init__(copy.deepcopy(quantization_config), **kwargs)  # several models may be loaded with one
        self._weights = FloatWeights()

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Check the configuration and ``device_map`` before anything is read."""
        if not self.pre_quantized:
            check_dynamic(self.quantization_config)
        check_device_map(device_map)

    @property
    def quantized_element_size(self) -> float:
        """Bytes per element of a quantized weight, for ``device_map="auto"``."""
        return 1

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether ``param_name`` is a float weight that ``get_quantize_ops`` replaces."""
        return param_name in self._weights

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> None:
        config = self.quantization_config
        if self.pre_quantized:
            in_float = [*(config.modules_to_not_convert or ()), *_new_layers(model, checkpoint_files)]
            quantize_empty(model, config, lambda module, name: not _names_one_of(model, name, in_float))
        else:
            left_out = _left_out(model, config)
            self._weights.find(model, lambda module, name: not is_inside(name, left_out))

    def get_quantize_ops(self) -> Any:
        """The operation on each float weight that is read."""
        return _QuantizeWeight(self)

    def replace(self, weight_name: str, weight: Tensor) -> None:
        """Replace a layer by its quantized form, with the float weight that was read for it."""
        quantized = self._weights.replace(weight_name, weight, self.quantization_config)
        for buffer in quantized.buffers():
            mark_initialized(buffer)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Quantize layers that the checkpoint lacks, which transformers has initialized; record what stays in float."""
        for name in self._weights:
            self.replace(name, self._weights.weight(name))
        if self.pre_quantized:
            for layer in quantized_layers(model).values():
                if not all(map(is_initialized, layer.buffers())):
                    _initialize(model, layer)
        self.quantization_config.modules_to_not_convert = float_linears(model)
        model.config.quantization_config = self.quantization_config
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
    check_names(model, named)
    return [*kept, *named]


def _left_out_by_default(model: Any) -> list[str]:
    return [_module_of(name) for name in HfQuantizer.get_modules_to_not_convert(model)]


def _tied(model: Any) -> list[str]:
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return [_module_of(name) for name in (*tied, *tied.values())]


def _module_of(parameter: str) -> str:
    return parameter.removesuffix(".weight").removesuffix(".bias")


def _names_one_of(model: Any, name: str, modules: Iterable[str]) -> bool:
    """Whether ``name`` is one of ``modules``, which may be those of the model with a head, or of its base model."""
    base = getattr(model, "base_model_prefix", "")
    return not {name, f"{base}.{name}", name.removeprefix(f"{base}.")}.isdisjoint(modules)


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
    """Check a model that ``quantize_`` has quantized against a configuration, and mark it as quantized.

    ``save_pretrained`` writes the configuration without this, too. transformers treats a marked model as one that
    ``from_pretrained`` has quantized: it refuses to train it, for example.

    Args:
        model: a model of transformers after ``quantize_(model, quantization_config.linear, ...)``.
        quantization_config: says how the model was quantized.

    Returns:
        ``model``.

    Raises:
        UnsupportedError: the model is not quantized, or otherwise than the configuration says.
    """
    check_quantized(model, quantization_config)
    quantizer = QFrameworkHfQuantizer(quantization_config, pre_quantized=True)
    quantizer.quantization_config.modules_to_not_convert = float_linears(model)
    model.hf_quantizer, model.is_quantized, model.quantization_method = quantizer, True, METHOD
    _set_configuration(model, quantizer.quantization_config)
    return model


def describe(model: Any, linear: LinearConfig) -> None:
    """Give a model that ``quantize_`` has changed the configuration that ``save_pretrained`` writes."""
    if not hasattr(model, "save_pretrained"):
        return
    from transformers import PreTrainedModel  # takes seconds, but not if there is such a model

    if isinstance(model, PreTrainedModel):
        config = description(model, linear, getattr(model.config, "quantization_config", None))
        if config is not None:
            _set_configuration(model, config)


def _set_configuration(model: Any, quantization_config: QFrameworkConfig) -> None:
    """In a copy of the model's configuration, which other models may share."""
    before, after = model.config, copy.copy(model.config)
    after.quantization_config = quantization_config
    for module in model.modules():
        if module.__dict__.get("config") is before:
            module.config = after


# Registration ---------------------------------------------------------------------------------------------------------

register_attention()
when_quantized("transformers", describe)
register_quantization_config(METHOD)(QFrameworkConfig)
register_quantizer(METHOD)(QFrameworkHfQuantizer)
