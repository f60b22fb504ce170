"""Export, prepare, calibrate and convert a classifier in one call, keeping the float graph to compare with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import Dim

from qframework.quantizer import QFrameworkQuantizer, calibrate

BATCH_IS_DYNAMIC = ({0: Dim.DYNAMIC},)


class QuantizedModel(NamedTuple):
    """The same exported program in float and as converted to INT8; both take any batch size."""

    float_exported: fx.GraphModule
    converted: fx.GraphModule


def quantize_model(
    model: nn.Module,
    images: Tensor,
    quantizer: QFrameworkQuantizer,
    calibration: Iterable[Any] | None = None,
    *,
    batches: int | None = None,
    show_progress: bool = False,
) -> QuantizedModel:
    """Quantize ``model``, which must be in eval mode and on the device of ``images``.

    Args:
        model: a classifier of images.
        images: an example ``(B, C, H, W)`` with B of at least 2, since PyTorch takes a batch of 1 for a constant.
        quantizer: says what is quantized and how.
        calibration: batches of images or of ``(images, labels)``; None where every activation is dynamic.
        batches: use only so many of them.
        show_progress: draw a progress bar while calibrating.

    Raises:
        UnsupportedError: no kernel can do what the quantizer asks for.
        CalibrationError: an activation is static and there was nothing, NaN or infinity to calibrate it with.
    """
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    program = torch.export.export(model, (images,), dynamic_shapes=BATCH_IS_DYNAMIC)
    prepared = prepare_pt2e(program.module(), quantizer)
    if calibration is not None:
        calibrate(prepared, calibration, batches=batches, device=images.device, progress=show_progress)
    return QuantizedModel(program.module(), convert_pt2e(prepared))
