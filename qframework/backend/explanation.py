"""``explain``: reports for each layer whether the backend lowers it, to which operator, and if not, why."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from qframework.arguments import as_call, check_module
from qframework.backend.compile import lower
from qframework.backend.options import BackendOptions, parse_options
from qframework.backend.report import LayerReport, Report
from qframework.backend.uncaptured import layers_outside, notes_on, tensors_of, with_names_of
from qframework.compat.dynamo import backend_arguments, original_module
from qframework.compat.graph_breaks import GraphBreak, break_behind, recorded_breaks
from qframework.errors import QFrameworkError


def explain(
    model: torch.nn.Module, inputs: Any, *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Report:
    """Report what ``backend="qframework"`` does to each linear layer and attention of a model.

    Args:
        model: a module compiled with ``backend="qframework"``, whose options apply, or any module that could be: a
            float module, one of ``quantize`` or ``quantize_``, or a converted or plain exported one.
        inputs: the model's input, a tuple of inputs, or a mapping of keyword inputs. One call traces the model with
            them, unless it is an exported one.
        mode: as for ``torch.compile``, for a model that is not compiled.
        options: as for ``torch.compile``, for a model that is not compiled: ``{"linear": "int8_dynamic"}`` reports what
            dynamic quantization would do to a float model.

    Returns:
        A Report with one LayerReport per linear layer and attention; ``print`` it for a table.

    Raises:
        QFrameworkError: ``model`` is not a module, was compiled with another backend, or was compiled and ``mode`` or
            ``options`` are given too; it does not accept ``inputs``; or the backend itself raises an error.
    """
    if isinstance(model, type | torch.export.ExportedProgram) or not callable(model):
        check_module(model, "explain: model")
    original = original_module(model)
    chosen = _options_of(model, mode, options) if original is not model else parse_options(mode, options)
    args, kwargs = as_call(inputs)
    if isinstance(original, GraphModule) and chosen.linear == "off":
        return Report(lower(copy.deepcopy(original), (), chosen))
    layers: list[LayerReport] = []
    between: list[GraphBreak | None] = []
    captured: set[int] = set()

    def report_only(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        # Lowers a copy: the original graph runs in float, so that later graphs see real inputs.
        found = lower(copy.deepcopy(gm), example_inputs, chosen)
        layers.extend(with_names_of(original, gm, example_inputs, found))
        between.append(break_behind(gm))
        captured.update(tensors_of(gm, example_inputs))
        return gm.forward

    try:
        with torch.no_grad(), recorded_breaks() as breaks:
            torch.compile(original, backend=report_only)(*args, **kwargs)
    except TypeError as error:
        raise QFrameworkError(
            f"explain: inputs must be the model's input, a tuple of inputs, or a dict of keyword inputs, got "
            f"{inputs!r:.60}: {error}"
        ) from error
    breaks = [*filter(None, between), *breaks]
    if breaks or not between:
        layers += layers_outside(original, captured, wanted=chosen.linear != "off")
    return Report(layers, notes_on(breaks, graphs=len(between)))


def _options_of(compiled: Any, mode: str | None, options: Mapping[str, Any] | None) -> BackendOptions:
    """The options a module was compiled with; ``mode`` and ``options`` must be None."""
    if mode is not None or options is not None:
        raise QFrameworkError(
            "explain: mode and options must be None for a compiled model, whose own apply, got "
            f"mode={mode!r} and options={options!r}. Pass the model given to torch.compile"
        )
    arguments = backend_arguments(compiled, "qframework")
    if arguments is not None:
        return parse_options(**arguments)
    raise QFrameworkError("explain: model must be compiled with backend='qframework', got another backend")
