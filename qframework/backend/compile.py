"""The backend: lowers quantized layers to INT8 operators and compiles the rest with Inductor."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.backend import passes
from qframework.backend.cache_key import cache_key
from qframework.backend.float_linear import NO_FAST_PRODUCT
from qframework.backend.launch_order import starts_early
from qframework.backend.lower_attention import NEEDS_GRADIENTS
from qframework.backend.lowering import Lowering
from qframework.backend.options import BackendOptions, parse_options
from qframework.backend.release import collecting_new_objects, release_prepared_models
from qframework.backend.report import LayerReport, Report
from qframework.backend.uncaptured import note_on
from qframework.backend.warm_up import warm_up
from qframework.backend.zero_points import left_out, zero_points_of
from qframework.compat.dispatch import below_autograd, forward_level
from qframework.compat.dynamo import arguments_of, check_hints
from qframework.compat.graph_breaks import GraphBreak, break_behind, when_skipped
from qframework.fallbacks import Fallbacks
from qframework.graph.nested import HIGHER_ORDER, nested_linears
from qframework.graph.nodes import differentiates, layer_name, linear_call, operation
from qframework.graph.rewrites.detached import NO_GRADIENT
from qframework.kernels.linear.cpu import cpu_implementation
from qframework.kernels.runtime.call_site import register_call_sites
from qframework.kernels.runtime.operator import refuse_tangents

logger = logging.getLogger(__name__)

fallbacks = Fallbacks()
"""How often a layer that should be quantized was left in float, by reason. Each layer's reason is logged once."""

_warned: set[str] = set()
_DERIVATIVES = "its graph computes derivatives (torch.func.grad or jvp, forward mode), and INT8 operators have none"
SKIPPED = "torch.compile skips code that it cannot capture"
_watching: list[Callable[[], None]] = []  # what ends it, at most one
# Inductor checks strides and alignment of every argument of every repeated block at each call. Dynamo's guards already
# check the inputs, and tests our operators.
_WITHOUT_CHECKS = {"size_asserts": False, "alignment_asserts": False}


def lower(gm: GraphModule, example_inputs: Sequence[Any], options: BackendOptions) -> list[LayerReport]:
    """Lower a graph in place; returns a report on every layer."""
    lowering = Lowering.of(gm, example_inputs, options)
    run_passes(lowering)
    return lowering.reports


def run_passes(lowering: Lowering) -> None:
    """Run the lowering passes; ``lowering.reports`` gets one report for each layer, in graph order."""
    gm, options = lowering.gm, lowering.options
    check_hints(gm)
    inside = _inside_other_graphs(gm, options)
    if differentiates(gm):
        lowering.reports = _left_whole(gm, options) + inside
        return
    for run in passes.LOWERING:
        run(lowering)
    order = lowering.order
    lowering.reports = sorted(lowering.reports + inside, key=lambda report: order.get(report.name, len(order)))
    gm.graph.lint()
    gm.recompile()
    _count_fallbacks(lowering.reports)


def _left_whole(gm: GraphModule, options: BackendOptions) -> list[LayerReport]:
    """Reports on a graph that must not contain INT8 operators."""
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
    """Reports on linears in the subgraphs of higher-order operators, which no pass enters."""
    return [_float_layer(node, HIGHER_ORDER, options) for node in nested_linears(gm)]


def _float_layer(node: Node, reason: str, options: BackendOptions) -> LayerReport:
    quantized = any("dequantize" in str(operand.target) for operand in node.all_input_nodes)
    return LayerReport(layer_name(node), False, "float linear", reason, fallback=quantized or options.linear != "off")


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
            call quantizes the current weights; with ``"freeze_weights": True`` they are quantized when the model is
            compiled, and later writes to them have no effect, nor to what only parameters and buffers of modules
            determine: a bias of attention, say, is computed once. Linears that read the same input are then one
            product, whose bias follows writes to theirs, except through ``.data`` and to tensors created in inference
            mode. What parameters and buffers of a converted model determine is computed once without this option, and
            follows the same writes. On Hopper, linears of a converted model are one product where that saves time by
            estimate: their weights, scales and biases are copied, and the copies follow these writes too.
            With both options, linears of experts are quantized in the same way where that is faster by estimate, on
            Hopper. ``{"experts": "int8_dynamic", "freeze_weights": True}`` quantizes them wherever it is possible, and
            ``"experts": "off"`` nowhere.
            ``{"attention": "sage"}`` quantizes float attention on CUDA where no gradient is needed. ``"auto"``, the
            default, does so unless PyTorch's own attention is faster, as on Hopper. The name of a variant quantizes
            everywhere, with the gradients of exact attention. ``"off"`` leaves attention in float. A mapping from layer
            names to these, such as ``calibrate_attention`` returns, decides for each layer.
            Every other key is an Inductor option.

    Returns:
        The compiled function. A graph with INT8 linears is an inference graph: its outputs carry no gradient.

    Raises:
        UnsupportedError: an unknown mode or option.
        QFrameworkError: a quantized layer has an invalid scale or dtype; the message names the layer.
    """
    from qframework.compat.inductor import start_processes

    devices = {x.device.type for x in example_inputs if isinstance(x, Tensor)}
    if "cuda" in devices:
        start_processes()
    register_call_sites()
    settings = parse_options(mode, options)
    watch_skipped_code()
    _note_skipped(break_behind(gm), settings)
    release_prepared_models()
    with collecting_new_objects():
        return _lowered_and_compiled(gm, example_inputs, settings, devices)


def _lowered_and_compiled(
    gm: GraphModule, example_inputs: Sequence[Any], settings: BackendOptions, devices: Set[str]
) -> Callable[..., Any]:
    from qframework.compat.early_launch import early_launch
    from qframework.compat.inductor import compile_graph

    zero_points = zero_points_of(gm)
    lowering = Lowering.of(gm, example_inputs, settings)
    run_passes(lowering)
    report = Report(lowering.reports)
    watched = left_out(zero_points, lowering.constants)
    checks = [_refuse_tangents, *([watched.check] if watched is not None else []), *lowering.checks]
    lowered = report.lowered
    logger.info("qframework: %s", report.summary)
    if lowered and torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in example_inputs):
        _warn_once(NO_GRADIENT)
    on_cpu = devices <= {"cpu"}
    if on_cpu:
        _note_slow_products(report)
    with warm_up(gm), torch.no_grad() if lowered else contextlib.nullcontext():
        for run in passes.FOR_INDUCTOR if lowered else ():
            run(lowering)
        early = early_launch(settings.inductor) if starts_early(gm, lowered + report.attention_lowered) else {}
        ours = {**_WITHOUT_CHECKS, **early} if lowered else {}
        patches = {**ours, **settings.inductor}
        compiled: Any = compile_graph(gm, list(example_inputs), patches, decompositions, cache_key(settings))
    compiled = _below_autograd(compiled) if lowered and on_cpu else compiled
    return _checked(compiled, checks)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's decompositions, and those of our operators that it fuses with their neighbors.

    PyTorch's caches of compiled graphs store this function by its name.
    """
    from qframework.compat.inductor import select_decomp_table

    return {**select_decomp_table(), **own_decompositions()}


def own_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions of our operators that Inductor fuses with their neighbors."""
    from qframework.kernels.hadamard import DECOMPOSITIONS as hadamard_decompositions
    from qframework.kernels.linear.int8_linear import DECOMPOSITIONS as int8_linear_decompositions
    from qframework.kernels.linear.zero_point_bias import DECOMPOSITIONS as bias_decompositions
    from qframework.kernels.quantize import DECOMPOSITIONS as quantize_decompositions

    ours = (quantize_decompositions, int8_linear_decompositions, bias_decompositions, hadamard_decompositions)
    return {operator: function for each in ours for operator, function in each.items()}


def _checked(compiled: Callable[..., Any], checks: Sequence[Callable[[Sequence[Any]], None]]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        for check in checks:
            check(args)
        return compiled(*args)

    return run


def _refuse_tangents(args: Sequence[Any]) -> None:
    """Raise UnsupportedError where an input has a tangent, which Inductor's code would drop."""
    if forward_level() >= 0:
        refuse_tangents("model compiled with backend='qframework'", tuple(args))


def _below_autograd(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Run an inference graph below autograd, which saves one dispatch step of every operator.

    For graphs on the CPU, where the gain was measured.
    """

    def run(*args: Any) -> Any:
        with below_autograd():
            return compiled(*args)

    return run


def watch_skipped_code() -> None:
    """Log and count functions that Dynamo skips as a whole, for which it never calls a backend."""
    while _watching:
        _watching.pop()()
    _watching.append(when_skipped(_note_skipped_function))  # anew, since torch._dynamo.reset() ends it


def _note_skipped_function(skipped: GraphBreak, backend: Any) -> None:
    arguments = arguments_of(backend, "qframework")
    if arguments is not None:
        _note_skipped(skipped, parse_options(**arguments))


def _note_skipped(skipped: GraphBreak | None, options: BackendOptions) -> None:
    if skipped is not None and skipped.skipped and options.linear != "off":
        fallbacks.note(SKIPPED, f"{note_on(skipped)} qframework.explain lists them")


def _note_slow_products(report: Report) -> None:
    """Tell that layers which were quantized before are slower than float ones here; their integers stay the same."""
    if report.lowered and cpu_implementation() == "float32":
        fallbacks.note(NO_FAST_PRODUCT, f"INT8 layers take longer than float ones: {NO_FAST_PRODUCT}")


def _count_fallbacks(reports: Sequence[LayerReport]) -> None:
    for report in reports:
        if report.reason in NEEDS_GRADIENTS.values():
            _warn_once(f"attention stays in float: {report.reason}")
        if report.fallback:
            fallbacks.note(report.reason, f"layer {report.name!r} stays in float: {report.reason}")


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning("qframework: %s", message)
