"""``quantization_config=QFrameworkConfig()`` for models of the diffusers library, through its registries::

    import qframework  # before or after diffusers: its import registers the configuration
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel.from_pretrained(folder, quantization_config=qframework.QFrameworkConfig())
    model.save_pretrained("int8")  # INT8 weights and their scales as safetensors, the configuration in config.json
    model = FluxTransformer2DModel.from_pretrained("int8")

The model is built on "meta", and each float weight is quantized as soon as it is read.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qframework.compat.diffusers_quantizers import DiffusersQuantizer, register_method, sensitive_modules
from qframework.errors import FileFormatError, UnsupportedError
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
from qframework.numerics import FLOAT_DTYPES

if TYPE_CHECKING:
    from qframework.conversion import QuantizedLinear
    from qframework.quantizer import LinearConfig


# Loading --------------------------------------------------------------------------------------------------------------


class QFrameworkDiffusersQuantizer(DiffusersQuantizer):
    """diffusers calls this while it loads a model: before its weights are read, for each weight, and after."""

    quantization_config: QFrameworkConfig
    use_keep_in_fp32_modules = True  # diffusers keeps these modules in float32, as it does without quantization

    def __init__(self, quantization_config: QFrameworkConfig, **kwargs: Any) -> None:
        super().__init__(copy.deepcopy(quantization_config), **kwargs)  # several models may be loaded with one
        self._weights = FloatWeights()
        self._tensors: dict[str, tuple[QuantizedLinear, str]] = {}  # of quantized layers, and not yet read

    def validate_environment(
        self, *args: Any, device_map: Any = None, torch_dtype: torch.dtype | None = None, **kwargs: Any
    ) -> None:
        """Check what is installed, ``device_map`` and ``torch_dtype`` before anything is read."""
        if importlib.util.find_spec("accelerate") is None:
            raise ImportError("from_pretrained: quantization_config needs accelerate. Run: pip install accelerate")
        if torch_dtype is not None and torch_dtype not in FLOAT_DTYPES:
            raise UnsupportedError(
                "from_pretrained: torch_dtype must be torch.float32, torch.float16 or torch.bfloat16 for quantized "
                f"models, got {torch_dtype}"
            )
        check_device_map(device_map)
        _check_not_split(device_map)

    def adjust_target_dtype(self, torch_dtype: torch.dtype) -> torch.dtype:
        """The dtype of a quantized weight, for ``device_map="auto"``."""
        return torch.int8

    def get_special_dtypes_update(self, model: Any, torch_dtype: torch.dtype | None) -> dict[str, torch.dtype]:
        """The dtypes of the parameters that are not quantized, for ``device_map="auto"``."""
        names = (name for name, _ in model.named_parameters() if name not in self._weights)
        return dict.fromkeys(names, torch_dtype or torch.float32)

    @property
    def supports_parallel_loading(self) -> bool:
        """Layers are replaced while the files are read, which threads must not do at the same time."""
        return False

    def _process_model_before_weight_loading(
        self,
        model: Any,
        keep_in_fp32_modules: list[str] | None = None,
        state_dict: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        config, in_float32 = self.quantization_config, keep_in_fp32_modules or []
        if state_dict is not None:  # of from_single_file, which does not say whether the file is quantized
            self.pre_quantized = any(name.endswith(".weight_int8") for name in state_dict)
        if not self.pre_quantized:
            check_dynamic(config)
            in_float = _left_out(model, config)
            self._weights.find(model, lambda module, name: name not in in_float and not is_inside(name, in_float32))
            return
        kept = config.modules_to_not_convert or ()
        quantize_empty(model, config, lambda module, name: name not in kept)
        for name, layer in quantized_layers(model).items():
            self._tensors |= {f"{name}.{own}": (layer, own) for own, _ in layer.named_buffers()}

    def check_if_quantized_param(
        self, model: Any, param_value: Tensor, param_name: str, state_dict: Any, **kwargs: Any
    ) -> bool:
        """Whether ``create_quantized_param`` takes a tensor of a file."""
        return param_name in self._weights or param_name in self._tensors

    def check_quantized_param_shape(self, param_name: str, current_param: Tensor, loaded_param: Tensor) -> bool:
        """Called if the shapes differ."""
        raise FileFormatError(
            f"from_pretrained: {param_name} must have shape {tuple(current_param.shape)}, got "
            f"{tuple(loaded_param.shape)} in the file"
        )

    def create_quantized_param(
        self,
        model: Any,
        param_value: Tensor,
        param_name: str,
        target_device: Any,
        state_dict: Any,
        *args: Any,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        """Quantize the float weight of a layer, or set a tensor of a quantized one."""
        if param_name in self._weights:
            self._weights.replace(param_name, param_value.to(target_device), self.quantization_config)
            return
        layer, own = self._tensors.pop(param_name)
        layer.dtype = dtype or layer.dtype
        # param_value is this tensor in the dtype of the model, but scales are float32.
        layer.register_buffer(own, state_dict[param_name].to(target_device))

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Check that all layers have been read; record what stays in float."""
        missing = [*self._weights, *self._tensors]
        if missing:
            raise FileFormatError(
                f"from_pretrained: the files of a {type(model).__name__} must hold the weights of all layers to "
                f"quantize, got none for {', '.join(missing[:3])}{f' and {len(missing) - 3} more' * (len(missing) > 3)}"
            )
        self.quantization_config.modules_to_not_convert = float_linears(model)
        model.register_to_config(quantization_config=self.quantization_config)
        return model

    def _dequantize(self, model: Any) -> Any:
        raise UnsupportedError(
            f"dequantize: a quantized {type(model).__name__} has lost its float weights. Load the float model instead"
        )

    @property
    def is_serializable(self) -> bool:
        """``save_pretrained`` works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """``QuantizedLinear`` has no gradients."""
        return False

    @property
    def is_compileable(self) -> bool:
        """The model may be compiled."""
        return True


def _check_not_split(device_map: Any) -> None:
    """accelerate copies weights back and forth between devices, but not buffers, which INT8 weights are."""
    if not isinstance(device_map, Mapping):
        return
    kinds = {torch.device(place).type if isinstance(place, str) else str(place) for place in device_map.values()}
    if "cpu" in kinds and len(kinds) > 1:
        raise UnsupportedError(
            f"from_pretrained: device_map must not split quantized models between GPUs and 'cpu', got "
            f"{device_map!r:.60}. Load the model on the CPU and call its enable_group_offload"
        )


def _left_out(model: Any, config: QFrameworkConfig) -> set[str]:
    """Names of modules that stay in float."""
    named = config.modules_to_not_convert
    if named is None:
        return sensitive_modules(model)
    check_names(model, named)
    return {name for name, _ in model.named_modules() if is_inside(name, named)}


# Saving a model that was quantized in place ---------------------------------------------------------------------------


def as_pretrained(model: Any, quantization_config: QFrameworkConfig) -> Any:
    """Check a model that ``quantize_`` has quantized against a configuration, and mark it as quantized.

    ``save_pretrained`` writes the configuration without this, too. diffusers treats a marked model as one that
    ``from_pretrained`` has quantized.

    Args:
        model: a model of diffusers after ``quantize_(model, quantization_config.linear, ...)``.
        quantization_config: says how the model was quantized.

    Returns:
        ``model``.

    Raises:
        UnsupportedError: the model is not quantized, or otherwise than the configuration says.
    """
    check_quantized(model, quantization_config)
    quantizer = QFrameworkDiffusersQuantizer(quantization_config, pre_quantized=True)
    quantizer.quantization_config.modules_to_not_convert = float_linears(model)
    model.hf_quantizer, model.is_quantized, model.quantization_method = quantizer, True, METHOD
    model.register_to_config(quantization_config=quantizer.quantization_config)
    return model


def describe(model: Any, linear: LinearConfig) -> None:
    """Give a model that ``quantize_`` has changed the configuration that ``save_pretrained`` writes."""
    if not hasattr(model, "save_pretrained"):
        return
    from diffusers import ModelMixin  # takes seconds, but not if there is such a model

    if isinstance(model, ModelMixin):
        config = description(model, linear, model.config.get("quantization_config"))
        if config is not None:
            model.register_to_config(quantization_config=config)


# Registration ---------------------------------------------------------------------------------------------------------


when_quantized("diffusers", describe)
register_method(METHOD, QFrameworkConfig, QFrameworkDiffusersQuantizer)
