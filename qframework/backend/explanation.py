"""``explain``: reports for each layer whether the backend lowers it, to which operator, and if not, why."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from qframework.arguments import as_call, check_module
from qframework.backend.compile import lower
from qframework.backend.options import BackendOptions, parse_options
from qframework.backend.report import LayerReport, Report
from qframework.compat.dynamo import backend_arguments, original_module
from qframework.errors import QFrameworkError


def explain(model: torch.nn.Module, inputs: Any) -> Report:
    """Report what ``backend="qframework"`` does to each linear layer and attention of a model.

    Args:
        model: a module compiled with ``backend="qframework"`` (its options apply), a converted or plain exported
            module, or a float module (reported as compiled with default options).
        inputs: the model's input, a tuple of inputs, or a dict of keyword inputs. One call traces the model with them.

    Returns:
        A Report with one LayerReport per linear layer and attention; ``print`` it for a table.

    Raises:
        QFrameworkError: ``model`` is not a module or was compiled with another backend, it does not accept ``inputs``,
            or the backend itself raises an error.
    """
    if isinstance(model, type | torch.export.ExportedProgram) or not callable(model):
        check_module(model, "explain: model")
    original = original_module(model)
    options = _options_of(model) if original is not model else BackendOptions()
    args, kwargs = as_call(inputs)
    if isinstance(original, GraphModule) and options.linear == "off":
        return Report(lower(copy.deepcopy(original), (), options))
    layers: list[LayerReport] = []

    def report_only(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        # Lowers a copy: the original graph runs in float, so that later graphs see real inputs.
        layers.extend(lower(copy.deepcopy(gm), example_inputs, options))
        return gm.forward

    try:
        with torch.no_grad():
            torch.compile(original, backend=report_only)(*args, **kwargs)
    except TypeError as error:
        raise QFrameworkError(
            f"explain: inputs must be the model's input, a tuple of inputs, or a dict of keyword inputs, got "
            f"{inputs!r:.60}: {error}"
        ) from error
    return Report(layers)


def _options_of(compiled: Any) -> BackendOptions:
    """The options a module was compiled with."""
    arguments = backend_arguments(compiled, "qframework")
    if arguments is not None:
        return parse_options(**arguments)
    raise QFrameworkError("explain: model must be compiled with backend='qframework', got another backend")
