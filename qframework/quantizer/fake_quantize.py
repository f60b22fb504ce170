"""Fake quantization: the values of the converted model, with weights that can still be trained.

    y = dequantize(quantize(x, scale), scale)          dy/dx = 1 where |round(x / scale) + z| <= 127, else 0

with the zero point z, 0 for symmetric quantization.

The gradient is the straight-through estimator (Bengio et al. 2013) with clipping, as in Jacob et al. 2018, section 3.
The arithmetic is that of qframework.numerics, so the converted model computes the same values.
``QFrameworkQuantizer(is_qat=True)`` wraps each of its observers in a FakeQuantize.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.compat.torchao import FakeQuantizeBase
from qframework.kernels.runtime.operator import refuse_transforms
from qframework.numerics import QMAX, QMIN, rounded_steps
from qframework.quantizer.observers import DynamicObserver, WeightObserver
from qframework.quantizer.static_observer import StaticObserver

Observer = StaticObserver | DynamicObserver | WeightObserver


class _FakeQuantizeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        steps = rounded_steps(x, scale)
        steps = steps if zero_point is None else steps + zero_point
        ctx.save_for_backward(steps.abs() <= QMAX)
        steps = steps.clamp(QMIN, QMAX)
        y = (steps if zero_point is None else steps - zero_point) * scale
        # with a final cast that is a no-op, PyTorch 2.11 compiles this to a function without a gradient
        return y if y.dtype == x.dtype else y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (inside,) = ctx.saved_tensors
        return grads[0] * inside, None, None


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """``x`` (any float dtype) rounded to multiples of ``scale`` (float32, broadcasts) in -127..127; same dtype.

    With a ``zero_point`` (one int32 integer) the multiples go from ``-127 - zero_point`` to ``127 - zero_point``. The
    gradient is 1 where ``x`` is not clipped and 0 where it is; ``scale`` gets none.

    Raises:
        UnsupportedError: in a transform of ``torch.func`` or a forward-mode derivative.
    """
    refuse_transforms("fake_quantize", x, scale)
    return _FakeQuantizeFunction.apply(x, scale, zero_point)


class FakeQuantize(FakeQuantizeBase):
    """An observer that also quantizes what it observes, for ``prepare_qat_pt2e``.

    It supports torchao's switches: ``prepared.apply(disable_observer)`` freezes the scales of static activations,
    ``prepared.apply(disable_fake_quant)`` passes float values. Weights and dynamic activations always use the scale of
    the current data. It converts to the nodes of its observer. With its observer disabled it needs no device
    synchronization and compiles without graph breaks.

    Raises:
        CalibrationError: in forward, for a static activation that held NaN or infinity while it was observed, or whose
            observer is disabled before it saw anything.
    """

    scale: Tensor
    zero_point: Tensor | None
    observing: bool = True
    quantizing: bool = True
    always_zero: bool = False

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self.observer: Any = observer
        self.layer, self.dtype = observer.layer, torch.int8
        # of a static activation, cached while its observer is disabled, because searching a histogram is slow
        self.register_buffer("scale", torch.empty(0), persistent=False)
        self.register_buffer("zero_point", None, persistent=False)
        self.register_load_state_dict_post_hook(_after_loading)

    def enable_observer(self, enabled: bool = True) -> None:
        """torchao's switch: whether a static activation's scale follows the data."""
        super().enable_observer(enabled)
        self.observing = enabled

    def enable_fake_quant(self, enabled: bool = True) -> None:
        """torchao's switch: whether values are quantized."""
        super().enable_fake_quant(enabled)
        self.quantizing = enabled

    def forward(self, x: Tensor) -> Tensor:
        if self.observing:
            self.observer(x.detach())
        if not self.quantizing:
            return x
        scale = self._scale(x)
        return x if scale is None else fake_quantize(x, scale, self.zero_point)

    def _scale(self, x: Tensor) -> Tensor | None:
        """The scale, or None for a static activation that was always zero, which stays in float when converted."""
        if not isinstance(self.observer, StaticObserver):
            return self.observer.broadcast_scale(x)
        if self.observing or (self.scale.numel() == 0 and not self.always_zero):
            self.always_zero = self.observer.observed() and not self.observer.has_scale()
            self.scale = self.scale.new_empty(0) if self.always_zero else self.observer.broadcast_scale(x)
            self.zero_point = None if self.always_zero else self.observer.zero_point()
        return None if self.always_zero else self.scale

    def calculate_qparams(self, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.observer.calculate_qparams(**kwargs)

    def convert(self, model: GraphModule, node: Node) -> None:
        """Replace this module by the nodes of its observer."""
        self.observer.convert(model, node)


def _after_loading(module: Any, incompatible: Any) -> None:
    """Update the Python copies of torchao's switches: reading buffers synchronizes and breaks a compiled graph."""
    module.observing, module.quantizing = bool(module.observer_enabled), bool(module.fake_quant_enabled)
    module.scale, module.always_zero = module.scale.new_empty(0), False


def wrap_observers(observers: dict[Any, Any]) -> None:
    """Wrap each of this project's observers in a FakeQuantize, in place; a shared observer gets a shared one."""
    wrapped: dict[int, FakeQuantize] = {}
    for place, observer in observers.items():
        if isinstance(observer, Observer):
            observers[place] = wrapped.setdefault(id(observer), FakeQuantize(observer))


def own_observer(module: object) -> Observer | None:
    """The observer of this project that ``module`` is or wraps, or None."""
    module = module.observer if isinstance(module, FakeQuantize) else module
    return module if isinstance(module, Observer) else None
