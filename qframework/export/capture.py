"""A model as a graph that an exporter may change, and the checks that come first."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.fx import GraphModule

from qframework.arguments import check_module
from qframework.compat.dynamo import is_compiled
from qframework.errors import UnsupportedError
from qframework.export.recorded_inputs import recorded_inputs
from qframework.graph.export_program import example_call, export_program


def check_model(model: nn.Module, what: str) -> None:
    """Raise UnsupportedError, beginning with ``what``, unless ``model`` is a module that can be exported."""
    check_module(model, f"{what}: model")
    if is_compiled(model):
        raise UnsupportedError(f"{what}: model must not be compiled. Pass the model given to torch.compile")
    if any(name.startswith("activation_post_process") for name, _ in model.named_children()):
        raise UnsupportedError(f"{what}: model must not hold observers. Pass it through convert_pt2e first")
    if model.training and not isinstance(model, GraphModule):
        raise UnsupportedError(f"{what}: model must be in eval mode, got a model in training mode. Call model.eval()")


def call_of(
    model: nn.Module, example_inputs: Any, dynamic_shapes: Any, what: str
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Positional and keyword inputs and ``dynamic_shapes``: those given, or those that an exported model records."""
    if example_inputs is not None:
        return *example_call(example_inputs, model, f"{what}: example_inputs"), dynamic_shapes
    if dynamic_shapes is not None:
        raise UnsupportedError(f"{what}: dynamic_shapes must be None without example_inputs, whose axes they name")
    if not isinstance(model, GraphModule):
        raise UnsupportedError(f"{what}: example_inputs must be given for a model that is not exported, got None")
    return recorded_inputs(model)


def own_graph(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any, what: str
) -> GraphModule:
    """The model's graph to change; it shares the model's tensors."""
    if isinstance(model, GraphModule):
        return GraphModule(model, copy.deepcopy(model.graph))
    return export_program(what, model, args, kwargs, dynamic_shapes).module()
