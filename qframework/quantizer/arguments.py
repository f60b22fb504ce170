"""Checks that the steps around ``prepare_pt2e`` and ``convert_pt2e`` get a model in the right state."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from qframework.arguments import described
from qframework.compat.dynamo import is_compiled
from qframework.compat.torchao import PREPARED_META, AffineQuantizedObserverBase, FakeQuantizeBase, ObserverBase
from qframework.errors import CalibrationError, UnsupportedError

OBSERVERS = (ObserverBase, FakeQuantizeBase, AffineQuantizedObserverBase)


_EXPORTED = "must be an exported model, torch.export.export(model, inputs).module()"
_PREPARED = "must be a prepared model, prepare_pt2e(exported, quantizer), before convert_pt2e"


def check_exported(model: object, what: str) -> None:
    """Raise UnsupportedError unless ``model``, the argument ``what``, is a float graph of ``torch.export``."""
    state = _state(model)
    if state != "an exported model":
        raise UnsupportedError(f"{what} {_EXPORTED}, got {state}")


def check_graph(model: object) -> None:
    """Raise UnsupportedError unless ``model``, which a quantizer got, is a graph in any state."""
    if not isinstance(model, GraphModule):
        raise UnsupportedError(f"QFrameworkQuantizer: model {_EXPORTED}, got {_state(model)}")


def check_prepared(model: object, what: str) -> None:
    """Raise CalibrationError unless ``model``, the argument ``what``, is what ``prepare_pt2e`` returns."""
    state = _state(model)
    if state != "a prepared model":
        raise CalibrationError(f"{what} {_PREPARED}, got {state}")


def _state(model: object) -> str:
    """The state of ``model`` in words, with an article."""
    if isinstance(model, ExportedProgram):
        return "an ExportedProgram"
    if not isinstance(model, torch.nn.Module):
        return described(model)
    if is_compiled(model):
        return "a compiled model"
    if not isinstance(model, GraphModule):
        return f"a {type(model).__name__} that was not exported"
    if any(isinstance(module, OBSERVERS) for module in model.modules()):
        return "a prepared model"
    if any(node.op == "call_function" and "dequantize" in str(node.target) for node in model.graph.nodes):
        return "a converted model"
    if PREPARED_META in model.meta:
        return "a prepared model"  # without anything to quantize
    known = all("val" in node.meta for node in model.graph.find_nodes(op="placeholder"))
    return "an exported model" if known else "a GraphModule that torch.export did not make"
