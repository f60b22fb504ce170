"""QuantizedLinear: a linear layer with an INT8 weight, in eager mode and in compiled models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, fx, nn

from qframework import numerics
from qframework.compat.modules import buffers_and_parameters
from qframework.conversion.dequantized_weight import read_only
from qframework.kernels.linear.int8_linear import INT8_LINEAR
from qframework.kernels.quantize import DYNAMIC_QUANTIZE, QUANTIZE
from qframework.kernels.runtime.direct import DirectCalls
from qframework.kernels.runtime.inference_only import scale_of
from qframework.numerics import ActivationGranularity
from qframework.quantizer.config import WeightConfig
from qframework.quantizer.observers import WeightObserver
from qframework.training.linear import result_dtype

_ours = torch.ops.qframework
Operators = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]
_DISPATCHED: Operators = _ours.quantize.default, _ours.dynamic_quantize.default, _ours.int8_linear.default
_ON_GPU: Operators = QUANTIZE.cuda, DYNAMIC_QUANTIZE.cuda, INT8_LINEAR.cuda
# Elements of a weight that are quantized at once: float32 copies of whole weights would fragment the memory in which a
# loaded model grows layer by layer, up to several times its size.
_AT_ONCE = 2**20


class QuantizedLinear(nn.Module):
    """What ``quantize_`` makes of a linear layer: ``x -> quantize -> int8_linear``, without gradients.

    In eager mode on a GPU, repeated calls launch kernels without PyTorch's dispatcher (kernels/runtime/direct.py).
    Under modes, transforms, autocast, compilers and PyTorch's profiler the two operators are called.

    Attributes:
        weight_int8: ``(out_features, in_features)`` int8.
        weight_scale: ``(out_features,)`` or ``(1,)`` float32, also after ``.half()``.
        input_scale: static: ``(1,)`` per tensor or ``(*positions, 1)`` float32; dynamic: None.
        bias: ``(out_features,)`` float, or None.
        activation: dynamic granularity of the input, ``"per_token"`` or ``"per_tensor"``.
        weight_config: how float weights are quantized that ``load_state_dict`` finds under the name ``weight``.
        conv1d: whether such weights are ``(in_features, out_features)``, as in transformers' ``Conv1D``.
    """

    weight_int8: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None
    bias: nn.Parameter | None

    def __init__(
        self,
        weight: tuple[Tensor, Tensor],
        bias: nn.Parameter | None,
        dtype: torch.dtype,
        *,
        input_scale: Tensor | None,
        activation: ActivationGranularity,
        weight_config: WeightConfig,
        conv1d: bool,
    ) -> None:
        """``weight`` holds the int8 weight and its scale; ``dtype`` is that of the float weight."""
        super().__init__()
        for name, value in zip(("weight_int8", "weight_scale"), weight, strict=True):
            self.register_buffer(name, value)
        self.register_buffer("input_scale", input_scale)
        self.register_parameter("bias", bias)
        self.out_features, self.in_features = self.weight_int8.shape
        self.activation, self.weight_config, self.conv1d = activation, weight_config, conv1d
        self.dtype = dtype
        self._direct = DirectCalls()

    def forward(self, x: Tensor) -> Tensor:
        """``x (..., in_features)`` float to ``(..., out_features)`` of its dtype, or of that of autocast."""
        # Other compilers and torch.export trace subclasses of Tensor, or under a mode.
        if torch.compiler.is_dynamo_compiling() or type(x) is not Tensor or not x.is_cuda:
            if isinstance(x, fx.Proxy):  # torch.fx.symbolic_trace: one module, as a layer of torch.nn
                return x.tracer.create_proxy("call_module", x.tracer.path_of_module(self), (x,), {})
            return self._dispatched(x)
        if torch.is_grad_enabled() and x.requires_grad:
            return self._dispatched(x)
        return self._eager(x)

    def _dispatched(self, x: Tensor) -> Tensor:
        """``forward`` by PyTorch's dispatcher, whose backward pass refuses what needs a gradient."""
        return self._linear(_DISPATCHED, x, self.weight_int8, self.weight_scale, self.input_scale, self.bias)

    def _eager(self, x: Tensor) -> Tensor:
        """``forward`` on a GPU, where the host's time limits models that are not compiled."""
        held, parameters = buffers_and_parameters(self)
        if "bias" not in parameters:  # but in another place: replicas of nn.DataParallel, pruning, parametrizations
            return self._dispatched(x)
        scale, bias = held["input_scale"], parameters["bias"]
        operands: tuple[Any, ...] = x, held["weight_int8"], held["weight_scale"]
        if scale is not None:
            operands += (scale,)
        if bias is not None:
            operands += (bias,)
        kind = self.activation, scale is None, bias is None
        y: Tensor | None = self._direct.repeat(operands, kind)
        return self._once(operands, kind) if y is None else y

    def _once(self, operands: tuple[Any, ...], kind: tuple[Any, bool, bool]) -> Tensor:
        """A call that is not known yet. ``operands`` leave out the scale and the bias that are None."""
        _, dynamic, unbiased = kind

        def compute(operators: Operators, x: Tensor, weight: Tensor, weight_scale: Tensor, *rest: Tensor) -> Tensor:
            scale = None if dynamic else rest[0]
            return self._linear(operators, x, weight, weight_scale, scale, None if unbiased else rest[-1])

        y: Tensor = self._direct.run(operands, kind, partial(compute, _DISPATCHED), partial(compute, _ON_GPU))
        return y

    def _linear(
        self,
        operators: Operators,
        x: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        quantize, dynamic_quantize, int8_linear = operators
        if scale is None:
            q, scale = dynamic_quantize(x, self.activation)
        else:
            q = quantize(x, scale)
        return int8_linear(q, scale_of(scale, x), weight, weight_scale, bias, "none", None, None, result_dtype(x))

    @property
    def weight(self) -> Tensor:
        """The dequantized weight in the layout and dtype of the float one: for code that computes with it itself.

        Writing to it is an error.
        """
        weight = numerics.dequantize(self.weight_int8, self.weight_scale.unsqueeze(-1), self.dtype)
        return read_only(weight.t() if self.conv1d else weight)

    def extra_repr(self) -> str:
        scale = f"dynamic {self.activation}" if self.input_scale is None else "static"
        return f"in_features={self.in_features}, out_features={self.out_features}, activation={scale}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """``.to()`` and its like; scales stay float32."""
        before = {name: getattr(self, name) for name in ("weight_scale", "input_scale")}
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.weight_int8.device)).dtype
        super()._apply(fn, recurse)
        for name, scale in before.items():
            after = getattr(self, name)
            if scale is not None and after.dtype != scale.dtype:
                setattr(self, name, scale.to(after.device))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Also reads a float weight, which is quantized."""
        weight = state_dict.pop(f"{prefix}weight", None)
        if weight is not None:
            weight = weight.t() if self.conv1d else weight
            q, scale = quantized_weight(weight, prefix.removesuffix("."), self.weight_config)
            state_dict[f"{prefix}weight_int8"], state_dict[f"{prefix}weight_scale"] = q, scale
        super()._load_from_state_dict(state_dict, prefix, *args)


@torch.no_grad()
def quantized_weight(weight: Tensor, layer: str, config: WeightConfig) -> tuple[Tensor, Tensor]:
    """A float weight ``(N, K)`` as int8 and its scale, ``(N,)`` or ``(1,)`` float32; on "meta" without values.

    Raises:
        CalibrationError: the weight holds NaN or infinity; the message names the layer.
    """
    if weight.is_meta:
        scales = 1 if config.granularity == "per_tensor" else weight.shape[0]
        return weight.new_empty(weight.shape, dtype=torch.int8), weight.new_empty(scales, dtype=torch.float32)
    observer = WeightObserver(layer, config)
    rows = weight.shape[0] if config.granularity == "per_tensor" else max(1, _AT_ONCE // weight.shape[1])
    quantized = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    found: list[Tensor] = []
    for part, result in zip(weight.split(rows), quantized.split(rows), strict=True):
        observer.check(part)
        found.append(observer.current_scale(part))
        result.copy_(numerics.quantize(part, found[-1].unsqueeze(-1)))
    return quantized, torch.cat(found)
