"""The backend: lower what is quantized to INT8 operators, hand the rest to Inductor."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.backend.float_linear import lower_float_linear
from qframework.backend.fold_channel_scale import fold_channel_scale
from qframework.backend.group_weights import group_weights
from qframework.backend.hoist_quantize import hoist_quantize
from qframework.backend.keep_quantize import keep_dynamic_quantize
from qframework.backend.lower_attention import NEEDS_GRADIENTS, lower_attention
from qframework.backend.lower_linear import ScaleConstants, lower_linear
from qframework.backend.lower_quantize import lower_quantize
from qframework.backend.lower_static_attention import lower_static_attention
from qframework.backend.options import BackendOptions, parse_options
from qframework.backend.outline_blocks import outline_blocks
from qframework.backend.release import release_prepared_models
from qframework.backend.report import LayerReport, Report
from qframework.backend.warm_up import warm_up
from qframework.compat.dispatch import below_autograd, set_grad_enabled
from qframework.compat.dynamo import check_hints
from qframework.graph.expand_attention import expand_multi_head_attention
from qframework.graph.expand_einsum import expand_einsum
from qframework.graph.expand_patch_embedding import expand_patch_embedding
from qframework.graph.nodes import Constants, differentiates, layer_name, linear_call, operation

logger = logging.getLogger(__name__)

# How often a layer that was to be quantized was left in float, by reason. Each (layer, reason) is logged once.
fallbacks: Counter[str] = Counter()
_warned: set[str] = set()
_DERIVATIVES = "its graph computes derivatives (torch.func.grad or jvp, forward mode), and INT8 operators have none"
_HIGHER_ORDER = "a higher-order operator holds it: torch.cond, a loop, activation checkpointing"
# Inductor checks strides and alignment at every call, of every argument of every repeated block: host time, for what
# Dynamo's guards hold of the inputs and tests of our operators.
_WITHOUT_CHECKS = {"size_asserts": False, "alignment_asserts": False}


def lower(gm: GraphModule, example_inputs: Sequence[Any], options: BackendOptions) -> list[LayerReport]:
    """Run every lowering pass over the graph, in place; report on every layer."""
    check_hints(gm)
    inside = _inside_other_graphs(gm, options)
    if differentiates(gm):
        return _left_whole(gm, options) + inside
    constants, scales = Constants(gm, example_inputs), ScaleConstants(gm)
    expand_multi_head_attention(gm)
    expand_einsum(gm)
    order = _layer_order(gm)
    attention = lower_static_attention(gm, constants, scales)
    attention = _one_for_each(attention, lower_attention(gm, options.attention))
    fold_channel_scale(gm, constants, scales, freeze_weights=options.freeze_weights)
    hoist_quantize(gm, constants, scales)
    reports = lower_linear(gm, constants, scales)
    if options.linear == "int8_dynamic":
        lowered = [report for report in reports if report.lowered]
        reports = lowered + lower_float_linear(gm, constants, scales, freeze_weights=options.freeze_weights)
    expand_patch_embedding(gm)  # after the linears, of which it is to be none
    reports = sorted(attention + reports + inside, key=lambda report: order.get(report.name, len(order)))
    lower_quantize(gm, scales)
    group_weights(gm, constants)
    keep_dynamic_quantize(gm)
    gm.graph.lint()
    gm.recompile()
    _count_fallbacks(reports)
    return reports


def _left_whole(gm: GraphModule, options: BackendOptions) -> list[LayerReport]:
    """Reports on a graph that no INT8 operator may go into."""
    reports = []
    for node in gm.graph.nodes:
        if linear_call(node) is not None:
            reports.append(_float_layer(node, _DERIVATIVES, options))
        elif operation(node) == "scaled_dot_product_attention":
            wanted = options.attention not in ("auto", "off")
            kind = "scaled_dot_product_attention"
            reports.append(LayerReport(layer_name(node), False, kind, _DERIVATIVES, wanted, kind="attention"))
    _count_fallbacks(reports)
    return reports


def _inside_other_graphs(gm: GraphModule, options: BackendOptions) -> list[LayerReport]:
    """Reports on linears in the graphs that a higher-order operator of this one calls, which no pass looks into."""
    graphs = [module for module in gm.modules() if isinstance(module, GraphModule) and module is not gm]
    nodes = [node for module in graphs for node in module.graph.nodes if linear_call(node) is not None]
    return [_float_layer(node, _HIGHER_ORDER, options) for node in nodes]


def _float_layer(node: Node, reason: str, options: BackendOptions) -> LayerReport:
    quantized = any("dequantize" in str(operand.target) for operand in node.all_input_nodes)
    return LayerReport(layer_name(node), False, "float linear", reason, fallback=quantized or options.linear != "off")


def _layer_order(gm: GraphModule) -> dict[str, int]:
    """Where each layer begins."""
    order: dict[str, int] = {}
    for place, node in enumerate(gm.graph.nodes):
        if node.op.startswith("call"):
            order.setdefault(layer_name(node), place)
    return order


def _one_for_each(static: Sequence[LayerReport], rest: Sequence[LayerReport]) -> list[LayerReport]:
    """Attention that could not be static is looked at once more: what was done in the end counts."""
    lowered = {report.name for report in rest if report.lowered}
    kept = [report for report in static if report.lowered or report.name not in lowered]
    names = {report.name for report in kept if not report.lowered}
    return kept + [report for report in rest if report.name not in names]


def qframework_backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """``torch.compile(model, backend="qframework")``.

    Args:
        gm: the graph Dynamo captured, of a float model or of one converted with PT2E.
        example_inputs: its inputs, parameters and buffers among them.
        mode: a mode of ``torch.compile``: ``"default"``, ``"reduce-overhead"``, ``"max-autotune"``, ...
        options: ``{"linear": "int8_dynamic"}`` quantizes the linear layers of a float model without calibration. Each
            call quantizes the weights as they are then; ``"freeze_weights": True`` does so when the model is
            compiled, and ignores what is written to them later.
            ``{"attention": "sage"}`` quantizes float attention on CUDA where no gradient is needed, and ``"auto"``,
            the default, does so unless PyTorch's own is faster, as on Hopper; the name of a variant does so
            everywhere, with the gradients of exact attention; ``"off"`` leaves it alone. A mapping from layer names to
            these, as ``calibrate_attention`` returns it, decides for each layer.
            Every other key is an Inductor configuration.

    Returns:
        The compiled function. A graph with INT8 linears is an inference graph, and its outputs carry no gradient.

    Raises:
        UnsupportedError: an unknown mode or option.
        QFrameworkError: a quantized layer that cannot be right, by name.
    """
    from qframework.compat.inductor import compile_graph, select_decomp_table
    from qframework.kernels.linear.cpu import DECOMPOSITIONS as int8_linear_decompositions
    from qframework.kernels.quantize import DECOMPOSITIONS as quantize_decompositions

    settings = parse_options(mode, options)
    release_prepared_models()
    report = Report(lower(gm, example_inputs, settings))
    lowered = report.lowered
    logger.info("qframework: %s", report.summary)
    decompositions: dict[Any, Callable[..., Any]] = {
        **select_decomp_table(),
        **quantize_decompositions,
        **int8_linear_decompositions,
    }
    if lowered:
        _forget_grad_mode(gm)
    if lowered and torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in example_inputs):
        _warn_once("outputs of INT8 layers carry no gradient; call the model under torch.no_grad()")
    on_cpu = all(x.device.type == "cpu" for x in example_inputs if isinstance(x, Tensor))
    with warm_up(gm), torch.no_grad() if lowered else contextlib.nullcontext():
        if lowered and not settings.inductor:  # whole: what Inductor was told something about
            outline_blocks(gm)
        patches = {**_WITHOUT_CHECKS, **settings.inductor} if lowered else settings.inductor
        compiled: Any = compile_graph(gm, list(example_inputs), patches, decompositions)
    return _below_autograd(compiled) if lowered and on_cpu else compiled


def _forget_grad_mode(gm: GraphModule) -> None:
    """Take out what switches gradients on and off inside an inference graph: it is compiled with gradients off."""
    for node in list(gm.graph.nodes):
        if node.target is set_grad_enabled:
            gm.graph.erase_node(node)
    gm.recompile()


def _below_autograd(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """An inference graph needs no autograd: without it every operator is dispatched in one step less of Python.

    For graphs on the CPU, where its gain was measured.
    """

    def run(*args: Any) -> Any:
        with below_autograd():
            return compiled(*args)

    return run


def _count_fallbacks(reports: Sequence[LayerReport]) -> None:
    for report in reports:
        if report.reason == NEEDS_GRADIENTS:
            _warn_once(f"attention stays in float: {NEEDS_GRADIENTS}")
        if report.fallback:
            fallbacks[report.reason] += 1
            _warn_once(f"layer {report.name!r} stays in float: {report.reason}")


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning("qframework: %s", message)
