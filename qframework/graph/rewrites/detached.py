"""Detaches the outputs of a quantized model that another backend compiles, or none, as the backend's are.

Rounding to integers passes no gradient on. Autograd would follow only what goes around it, such as residual sums, and
give a wrong gradient without a word.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.compat import pytree
from qframework.compat.dispatch import forward_level, functorch_transforms_active
from qframework.compat.dynamo import is_exporting
from qframework.compat.graphs import call_on_copies
from qframework.compat.operators import OpOverload
from qframework.errors import UnsupportedError
from qframework.kernels.runtime.operator import refuse_tangents

logger = logging.getLogger(__name__)

_DETACH = torch.ops.aten.detach.default
NO_GRADIENT = "outputs of INT8 layers carry no gradient; call the model under torch.no_grad()"


def write_detaches(gm: GraphModule) -> None:
    """Detach float outputs in the graph itself, as ``convert_pt2e`` keeps no hooks; once, and without recompiling."""
    output = gm.graph.output_node()
    for node in output.all_input_nodes:
        value = node.meta.get("val")
        if node.target is _DETACH or not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        with gm.graph.inserting_before(output):
            detached = gm.graph.call_function(_DETACH, (node,))
        detached.meta = {key: node.meta[key] for key in ("val", "nn_module_stack") if key in node.meta}
        output.replace_input_with(node, detached)


def erase_detaches(gm: GraphModule) -> None:
    """Undo ``write_detaches``, for graphs whose outputs are detached otherwise; without recompiling."""
    for node in gm.graph.output_node().all_input_nodes:
        if node.target is _DETACH:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            gm.graph.erase_node(node)


def detach_outputs(gm: GraphModule) -> None:
    """Detach what calls of ``gm`` return if it quantizes activations; in eager mode, log the first that had a gradient.

    Copies of the model do the same.
    """
    if any(map(_quantizes, gm.graph.nodes)):
        erase_detaches(gm)
        gm.recompile()
        _add_hook(gm)
        call_on_copies(gm, _add_hook)


def _quantizes(node: Node) -> bool:
    """Whether the node rounds to integers. Quantized attention has a gradient: that of exact attention."""
    if not isinstance(node.target, OpOverload) or node.target.namespace not in ("quantized_decomposed", "qframework"):
        return False
    name = str(node.target)
    return "quantize" in name and "dequantize" not in name


def _add_hook(gm: GraphModule) -> None:
    gm.register_forward_hook(_detached, with_kwargs=True)


def _detached(model: Any, args: Any, kwargs: Any, outputs: Any) -> Any:
    if forward_level() >= 0:
        refuse_tangents("quantized model", tuple(pytree.tree_leaves((args, kwargs, outputs))))
    if is_exporting() or torch.jit.is_tracing() or not torch.is_grad_enabled():
        return outputs
    return pytree.tree_map_only(Tensor, _detach, outputs)


def _detach(x: Tensor) -> Tensor:
    if not x.requires_grad:
        return x
    if functorch_transforms_active():
        raise UnsupportedError("quantized model: the call must not compute derivatives, got a transform of torch.func")
    if not torch.compiler.is_dynamo_compiling():
        _tell()
    return x.detach()


@functools.cache
def _tell() -> None:
    logger.warning("qframework: %s", NO_GRADIENT)
