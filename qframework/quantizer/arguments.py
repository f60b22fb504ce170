"""Whether the steps around ``prepare_pt2e`` and ``convert_pt2e`` got what they work on: which model, what data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torchao.quantization.pt2e import FakeQuantizeBase, ObserverBase
from torchao.quantization.pt2e.observer import AffineQuantizedObserverBase

from qframework.errors import CalibrationError, UnsupportedError

OBSERVERS = (ObserverBase, FakeQuantizeBase, AffineQuantizedObserverBase)
_PREPARED_META = "_observed_graph_module_attrs"  # torchao's; a converted model keeps it


def check_exported(model: object, what: str) -> None:
    """Raise UnsupportedError unless ``model``, the argument ``what``, is a float graph of ``torch.export``."""
    state = _state(model)
    if state != "an exported model":
        raise UnsupportedError(
            f"{what} is {state}; accepted: an exported model, torch.export.export(model, inputs).module()"
        )


def check_prepared(model: object, what: str) -> None:
    """Raise CalibrationError unless ``model``, the argument ``what``, is what ``prepare_pt2e`` returns."""
    state = _state(model)
    if state != "a prepared model":
        raise CalibrationError(
            f"{what} is {state}; accepted: a prepared model, prepare_pt2e(exported, quantizer), before convert_pt2e"
        )


def check_batches(data: object, what: str) -> None:
    """Raise CalibrationError unless ``data`` can be gone through and is not a batch by itself."""
    if isinstance(data, Mapping | str | bytes):
        raise CalibrationError(f"{what}: data is one {type(data).__name__}; accepted: a list or DataLoader of batches")
    try:
        iter(data)  # type: ignore[call-overload]
    except TypeError as error:
        raise CalibrationError(
            f"{what}: data is {_described(data)}; accepted: an iterable of batches, such as a list or a DataLoader"
        ) from error


def check_number_of_batches(batches: object) -> None:
    """Raise CalibrationError unless ``batches`` is None or a positive number."""
    if batches is not None and (not isinstance(batches, int) or isinstance(batches, bool) or batches < 1):
        raise CalibrationError(f"batches={batches!r}; accepted: None or a positive number")


def no_data(what: str, data: Iterable[Any]) -> CalibrationError:
    """The error of a step for which ``data`` had no batch."""
    used_up = " (an iterator: was it used up before?)" if iter(data) is data else ""
    return CalibrationError(f"{what} saw no data: data yielded no batch{used_up}; accepted: at least one")


def _state(model: object) -> str:
    """What ``model`` is, with its article."""
    if isinstance(model, ExportedProgram):
        return "an ExportedProgram"
    if not isinstance(model, torch.nn.Module):
        return _described(model)
    if hasattr(model, "_orig_mod"):
        return "a compiled model"
    if not isinstance(model, GraphModule):
        return f"a {type(model).__name__} that was not exported"
    if any(isinstance(module, OBSERVERS) for module in model.modules()):
        return "a prepared model"
    if any(node.op == "call_function" and "dequantize" in str(node.target) for node in model.graph.nodes):
        return "a converted model"
    if _PREPARED_META in model.meta:
        return "a prepared model"  # in which nothing is to be quantized
    known = all("val" in node.meta for node in model.graph.find_nodes(op="placeholder"))
    return "an exported model" if known else "a GraphModule that torch.export did not make"


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{value!r:.60} of type {type(value).__name__}"
