"""Prepares, calibrates and converts an exported model; keeps the float graph for comparison on request."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import Dim

from qframework.backend.release import release_prepared_models
from qframework.conversion.recipe_check import RECIPE_NOTE, compare
from qframework.errors import CalibrationError
from qframework.graph.rewrites.fold_weights import fold_weights
from qframework.graph.rewrites.shorten import shorten
from qframework.graph.state import changing_state, put_back
from qframework.quantizer import QFrameworkQuantizer, Recipe, calibrate
from qframework.quantizer.output_error import first_examples, floats, held_out

logger = logging.getLogger(__name__)

# A recipe is compared with no recipe on so many examples, or on the first batch of a model with a fixed batch size.
_JUDGED = 16
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
        recipe: steps around the calibration that keep accuracy; they read ``calibration`` several times. With
            ``guard``, the result is compared with a model without the recipe, and the better one is returned.
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
    weights = sum(tensor.nbytes for tensor in exported.state_dict().values())
    data = None if calibration is None else _FirstBatches(calibration, batches)
    state = changing_state(exported)
    if recipe is None:
        found = _once(exported, quantizer, data, None, show_progress, rewritten)
    else:
        _check_can_be_read_again(data)
        assert data is not None
        found = _with_recipe(exported, quantizer, data, recipe, show_progress, rewritten)
    put_back(found, state)
    fold_weights(found)
    shorten(found)
    release_prepared_models(of_bytes=weights)
    return found


def _once(
    exported: fx.GraphModule,
    quantizer: QFrameworkQuantizer,
    data: _FirstBatches | None,
    recipe: Recipe | None,
    show_progress: bool,
    rewritten: Callable[[fx.GraphModule], None],
) -> fx.GraphModule:
    from qframework.compat.torchao import convert_calibrated, prepare_pt2e

    if recipe is not None:
        recipe.before_prepare(exported, quantizer, data)  # type: ignore[arg-type]
    rewritten(exported)
    prepared = prepare_pt2e(exported, quantizer)
    if data is not None:
        calibrate(prepared, data, progress=show_progress)
    if recipe is not None:
        recipe.after_calibrate(prepared, data)  # type: ignore[arg-type]
    with torch.no_grad():  # it runs what depends on parameters alone, such as writes to them
        return convert_calibrated(prepared)


def _with_recipe(
    exported: fx.GraphModule,
    quantizer: QFrameworkQuantizer,
    data: _FirstBatches,
    recipe: Recipe,
    show_progress: bool,
    rewritten: Callable[[fx.GraphModule], None],
) -> fx.GraphModule:
    """With ``guard``, the better of the models with and without the recipe, which notes that in its meta."""
    if not recipe.guard:
        return _once(exported, quantizer, data, recipe, show_progress, rewritten)
    untouched = _sharing_tensors(exported)
    judged, fitted = held_out(exported, data, recipe.batches)
    inputs = first_examples(exported, judged or fitted, _JUDGED)
    expected = _outputs(exported, inputs)
    graphs: list[fx.GraphModule] = []
    keep: Callable[[fx.GraphModule], None] = lambda graph: graphs.append(_sharing_tensors(graph))  # noqa: E731
    with_recipe = _once(exported, quantizer, data, recipe, show_progress, keep)
    plain = _once(untouched, quantizer, data, None, False, keep)
    found = compare(expected, _outputs(plain, inputs), _outputs(with_recipe, inputs))
    (logger.info if found.kept else logger.warning)("qframework: %s", found.note)
    chosen = with_recipe if found.kept else plain
    chosen.meta[RECIPE_NOTE] = found.note
    rewritten(graphs[0 if found.kept else 1])
    return chosen


def _sharing_tensors(exported: fx.GraphModule) -> fx.GraphModule:
    """A copy with the same parameters and buffers, which steps of recipes replace and never change."""
    tensors = [*exported.parameters(), *exported.buffers()]
    return copy.deepcopy(exported, {id(tensor): tensor for tensor in tensors})


@torch.no_grad()
def _outputs(graph: fx.GraphModule, inputs: list[Any]) -> list[Tensor]:
    return floats(fx.Interpreter(graph).run(*inputs, enable_io_processing=False))


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
