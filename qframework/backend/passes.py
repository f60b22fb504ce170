"""The backend's passes in order; each takes a ``Lowering`` and changes its graph in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from qframework.backend.align_rows import align_rows
from qframework.backend.float_linear import lower_float_linear
from qframework.backend.fold_channel_scale import fold_channel_scale
from qframework.backend.fold_constants import fold_constants
from qframework.backend.fuse_epilogue import fuse_epilogue
from qframework.backend.fuse_hadamard import fuse_hadamard
from qframework.backend.gate_linears import gate_linears
from qframework.backend.group_weights import group_weights
from qframework.backend.hoist_quantize import hoist_quantize
from qframework.backend.keep_quantize import keep_dynamic_quantize
from qframework.backend.lower_add_norm import lower_add_norm
from qframework.backend.lower_attention import lower_attention
from qframework.backend.lower_depthwise import lower_depthwise
from qframework.backend.lower_experts import lower_experts
from qframework.backend.lower_linear import lower_linear
from qframework.backend.lower_norm import lower_norm
from qframework.backend.lower_quantize import lower_quantize
from qframework.backend.lower_static_attention import lower_static_attention
from qframework.backend.lowering import Lowering, Pass
from qframework.backend.merge_linears import merge_linears
from qframework.backend.outline_blocks import outline_blocks
from qframework.backend.rearrange_early import rearrange_early
from qframework.backend.report import LayerReport
from qframework.backend.share_mask_blocks import share_mask_blocks
from qframework.backend.zero_point_bias import keep_zero_point_biases
from qframework.compat.dispatch import set_grad_enabled
from qframework.graph.attention.causal_masks import use_causal_flag
from qframework.graph.attention.dense_masks import make_masks_dense
from qframework.graph.attention.expand import expand_multi_head_attention
from qframework.graph.joined_calls import join_calls
from qframework.graph.nodes import is_assertion, layer_name, operation
from qframework.graph.rewrites.cast_late import cast_late
from qframework.graph.rewrites.detached import erase_detaches
from qframework.graph.rewrites.einsum_linears import expand_einsum_linears
from qframework.graph.rewrites.expand_einsum import expand_einsum
from qframework.graph.rewrites.expand_patch_embedding import expand_patch_embedding
from qframework.graph.rewrites.expand_products import expand_products, is_grouped, why_no_linear
from qframework.graph.rewrites.inline_grad_scopes import inline_grad_scopes
from qframework.graph.rewrites.out_of_place import write_out_of_place
from qframework.graph.rewrites.read_parts import read_parts
from qframework.graph.rewrites.scalar_constants import use_numbers
from qframework.graph.rewrites.select_early import select_early
from qframework.graph.rewrites.shorten import erase_inactive_dropouts, erase_scale_origins, erase_unread_results


def on_graph(rewrite: Callable[[GraphModule], Any]) -> Pass:
    """Make a pass of a function of ``qframework.graph`` that needs only the graph."""

    @functools.wraps(rewrite)
    def run(lowering: Lowering) -> None:
        rewrite(lowering.gm)

    return run


def expand_weighted_products(lowering: Lowering) -> None:
    """Make products with a parameter linears, where linears are quantized."""
    if lowering.options.linear != "off":
        expand_einsum_linears(lowering.gm, lowering.constants.value)
        expand_products(lowering.gm, lowering.constants.value)


def report_products(lowering: Lowering) -> None:
    """Report the products with a parameter that are no linears; lower_experts.py has reported on those of experts."""
    for node in lowering.gm.graph.nodes:
        if is_grouped(node) and lowering.options.experts_in_int8:
            continue
        if (reason := why_no_linear(node, lowering.constants.value)) is not None:
            operator = "float grouped_mm" if is_grouped(node) else f"float {operation(node)}"
            asked = lowering.options.linear == "int8_dynamic" and not is_grouped(node)
            lowering.reports.append(LayerReport(layer_name(node), False, operator, reason, fallback=asked))


def note_layer_order(lowering: Lowering) -> None:
    """Record where each layer begins, which is the order of the reports."""
    for place, node in enumerate(lowering.gm.graph.nodes):
        if node.op.startswith("call"):
            lowering.order.setdefault(layer_name(node), place)


def forget_grad_mode(lowering: Lowering) -> None:
    """Erase the nodes that switch gradients on and off: an inference graph is compiled with gradients off."""
    for node in reversed(list(lowering.gm.graph.nodes)):
        if node.target is set_grad_enabled or (node.target is torch.is_grad_enabled and not node.users):
            lowering.gm.graph.erase_node(node)
    lowering.gm.recompile()


def forget_assertions(lowering: Lowering) -> None:
    """Erase what exports assert of dtypes and devices: guards fix these, and no block with an assertion is outlined."""
    for node in filter(is_assertion, list(lowering.gm.graph.nodes)):
        lowering.gm.graph.erase_node(node)


# Quantized layers become INT8 operators.
LOWERING: tuple[Pass, ...] = (
    on_graph(inline_grad_scopes),  # all of them: a scope is opaque to the passes behind
    on_graph(erase_scale_origins),
    on_graph(erase_inactive_dropouts),
    on_graph(erase_unread_results),
    on_graph(join_calls),
    on_graph(write_out_of_place),
    on_graph(read_parts),
    on_graph(expand_multi_head_attention),
    on_graph(expand_einsum),
    on_graph(cast_late),
    expand_weighted_products,
    note_layer_order,
    fold_constants,
    on_graph(select_early),
    on_graph(use_causal_flag),
    lower_static_attention,
    lower_attention,
    on_graph(make_masks_dense),  # of what is left to PyTorch
    share_mask_blocks,
    fold_channel_scale,
    rearrange_early,
    hoist_quantize,
    fuse_epilogue,
    lower_linear,
    lower_float_linear,
    lower_experts,
    report_products,
    on_graph(expand_patch_embedding),  # after the linears: its product stays in float
    lower_quantize,
    keep_zero_point_biases,
    gate_linears,
    merge_linears,  # after the quantizations of their input are one, and after biases are known
    group_weights,
    fuse_hadamard,
    lower_depthwise,
    lower_add_norm,
    lower_norm,
    keep_dynamic_quantize,
    align_rows,  # after it is known which quantizations Inductor fuses
    fold_constants,  # what passes compute from parameters: dense masks
)

# Prepare a graph with INT8 linears for Inductor.
FOR_INDUCTOR: tuple[Pass, ...] = (
    forget_grad_mode,
    forget_assertions,
    on_graph(erase_detaches),  # the whole graph is compiled with gradients off
    on_graph(use_numbers),
    on_graph(write_out_of_place),
    outline_blocks,
)
