"""Calibrates the static scales of linear layers in a model that is not exported, with hooks on the layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from qframework.arguments import check_batches, check_number_of_batches, no_data
from qframework.attention.model_inputs import call_model
from qframework.batches import move, progress_bar
from qframework.errors import CalibrationError
from qframework.numerics import FLOAT_DTYPES, QMAX, QMIN
from qframework.quantizer.calibration import check_finite_activations
from qframework.quantizer.config import ActivationConfig
from qframework.quantizer.observers import activation_observer
from qframework.quantizer.static_observer import StaticObserver

_WHAT = "quantize_"


def input_scales(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    config: ActivationConfig,
    data: Iterable[Any],
    batches: int | None,
    progress: bool,
) -> dict[str, Tensor | None]:
    """The scale of each layer's input, ``(1,)`` or ``(*positions, 1)``; None if calibration gave none.

    Raises:
        CalibrationError: no data, a batch that does not fit the model, an input that is not finite, that changes the
            number of its positions with scales per token, or no layer that saw anything but zeros.
    """
    check_batches(data, _WHAT)
    check_number_of_batches(batches)
    device = next((parameter.device for parameter in model.parameters()), None)
    watched = {name: _Watched(name, config) for name in layers}
    hooks = [layers[name].register_forward_pre_hook(each, with_kwargs=True) for name, each in watched.items()]
    seen = 0
    try:
        with (
            torch.no_grad(),
            _without_nested_tensors(model),
            progress_bar("calibrating", data, batches, progress) as advance,
        ):
            for batch in islice(iter(data), batches):
                call_model(model, move(batch, device))
                check_finite_activations([each.observer for each in watched.values() if each.observer], seen)
                seen += 1
                advance()
    finally:
        for hook in hooks:
            hook.remove()
    if seen == 0:
        raise no_data(_WHAT, data)
    scales = {name: each.scale() for name, each in watched.items()}
    if all(scale is None for scale in scales.values()):
        raise CalibrationError(
            f"{_WHAT}: calibration_data must reach the linear layers with other values than zero, and none of the "
            f"{len(scales)} layers saw one, {next(iter(scales))!r} among them. Calibrate with real inputs"
        )
    return scales


@contextlib.contextmanager
def _without_nested_tensors(model: nn.Module) -> Iterator[None]:
    """``nn.TransformerEncoder`` makes them of padded inputs, which observers and the INT8 layers do not take."""
    encoders = [each for each in model.modules() if isinstance(each, nn.TransformerEncoder) and each.use_nested_tensor]
    for each in encoders:
        each.use_nested_tensor = False
    try:
        yield
    finally:
        for each in encoders:
            each.use_nested_tensor = True


class _Watched:
    """The observer of one layer's input, made when the layer is first called."""

    def __init__(self, layer: str, config: ActivationConfig) -> None:
        self.layer, self.config = layer, config
        self.observer: StaticObserver | None = None
        self._positions: tuple[int, ...] = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        if not isinstance(x, Tensor) or x.dtype not in FLOAT_DTYPES:
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise CalibrationError(
                f"layer {self.layer!r}: its input must be float32, float16 or bfloat16 for static INT8, got {got}"
            )
        positions = tuple(x.shape[1:-1] if x.ndim > 2 else x.shape[:-1])
        if self.observer is None:
            self._positions = positions
            make = activation_observer(self.config, self.layer, positions)
            limits = {"dtype": torch.int8, "quant_min": QMIN, "quant_max": QMAX}
            self.observer = make(qscheme=torch.per_tensor_symmetric, **limits).to(x.device)
        if self.config.granularity == "per_token" and positions != self._positions:
            raise CalibrationError(
                f"layer {self.layer!r}: its input must always have the same positions for static scales per token, got "
                f"{self._positions} and {positions}. Use per_tensor, or dynamic_int8()"
            )
        self.observer(x.detach())  # type: ignore[operator]

    def scale(self) -> Tensor | None:
        if self.observer is None or not self.observer.has_scale():
            return None
        scale = self.observer.scale()
        return scale.reshape(*self._positions, 1) if self.config.granularity == "per_token" else scale.reshape(1)
