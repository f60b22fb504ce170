"""Prepares, calibrates and converts an exported model; keeps the float graph for comparison on request."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import Dim

from qframework.backend.release import release_prepared_models
from qframework.errors import CalibrationError
from qframework.quantizer import QFrameworkQuantizer, Recipe, calibrate

BATCH_IS_DYNAMIC = ({0: Dim.DYNAMIC},)


class FloatAndConverted(NamedTuple):
    """An exported model in float and converted to INT8.

    The float one is what was converted: its layers compute in the basis and with the scales that a recipe chose.
    """

    float_exported: fx.GraphModule
    converted: fx.GraphModule


def export_model(model: nn.Module, images: Tensor) -> fx.GraphModule:
    """Export ``model``, which must be in eval mode, as a float graph that takes any batch size.

    Args:
        model: a classifier of images, or another module of one tensor.
        images: an example ``(B, C, H, W)`` with B of at least 2: ``torch.export`` makes a batch of 1 a constant.
    """
    return torch.export.export(model, (images,), dynamic_shapes=BATCH_IS_DYNAMIC).module()


def quantize_exported(
    exported: fx.GraphModule,
    quantizer: QFrameworkQuantizer,
    calibration: Iterable[Any] | None = None,
    *,
    recipe: Recipe | None = None,
    batches: int | None = None,
    show_progress: bool = False,
) -> fx.GraphModule:
    """Prepare, calibrate and convert ``exported`` in place, with a recipe's steps around the calibration.

    Args:
        exported: the float graph of ``torch.export``.
        quantizer: the rules of what is quantized and how.
        calibration: batches as ``calibrate`` takes them, moved to the device of the graph; None if every activation is
            dynamic.
        recipe: steps around the calibration that keep accuracy; they read ``calibration`` several times.
        batches: maximum number of calibration batches.
        show_progress: draw a progress bar while calibrating.

    Raises:
        UnsupportedError: no kernel supports what the quantizer asks for.
        CalibrationError: an activation is static and ``calibration`` is None or empty, or holds NaN or infinity; or
            ``recipe`` is given and ``calibration`` cannot be read again.
    """
    return _quantized(exported, quantizer, calibration, recipe, batches, show_progress, lambda graph: None)


def _quantized(
    exported: fx.GraphModule,
    quantizer: QFrameworkQuantizer,
    calibration: Iterable[Any] | None,
    recipe: Recipe | None,
    batches: int | None,
    show_progress: bool,
    rewritten: Callable[[fx.GraphModule], None],
) -> fx.GraphModule:
    """``quantize_exported``; ``rewritten`` gets the float graph before it is prepared."""
    from qframework.compat.torchao import convert_pt2e, prepare_pt2e

    weights = sum(tensor.nbytes for tensor in exported.state_dict().values())
    data = None if calibration is None else _FirstBatches(calibration, batches)
    if recipe is not None:
        _check_can_be_read_again(data)
        recipe.before_prepare(exported, quantizer, data)  # type: ignore[arg-type]
    rewritten(exported)
    prepared = prepare_pt2e(exported, quantizer)
    if data is not None:
        calibrate(prepared, data, progress=show_progress)
    if recipe is not None:
        recipe.after_calibrate(prepared, data)  # type: ignore[arg-type]
    converted = convert_pt2e(prepared)
    release_prepared_models(of_bytes=weights)
    return converted


def _check_can_be_read_again(data: _FirstBatches | None) -> None:
    batches = None if data is None else data.all
    if batches is None or isinstance(batches, Iterator):
        raise CalibrationError(
            "quantize: a recipe reads calibration data more than once, so it must be a list or a DataLoader, got "
            f"{type(batches).__name__}"
        )


class _FirstBatches:
    """The first ``count`` batches, or all; can be iterated over repeatedly."""

    def __init__(self, batches: Iterable[Any], count: int | None) -> None:
        self.all = batches
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.all), self._count)

    def __len__(self) -> int:
        length = len(self.all)  # type: ignore[arg-type]
        return length if self._count is None else min(length, self._count)


def quantize_copy(
    exported: fx.GraphModule,
    quantizer: QFrameworkQuantizer,
    calibration: Iterable[Any] | None = None,
    *,
    recipe: Recipe | None = None,
    batches: int | None = None,
    show_progress: bool = False,
) -> FloatAndConverted:
    """``quantize_exported`` on a copy of a float graph, with the float graph that was converted.

    Arguments and errors are those of ``quantize_exported``.
    """
    kept: list[fx.GraphModule] = []
    converted = _quantized(
        copy.deepcopy(exported),
        quantizer,
        calibration,
        recipe,
        batches,
        show_progress,
        lambda graph: kept.append(copy.deepcopy(graph)),
    )
    return FloatAndConverted(kept[0], converted)
