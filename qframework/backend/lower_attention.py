"""Lowers float attention to quantized attention.

From::

    q, k, v, [mask] -> scaled_dot_product_attention -> ...        or products around a softmax

To::

    q, k, v, [mask, rel_h, rel_w] -> qframework::sage_attention -> getitem 0 -> ...

Both forms are found by graph/attention/patterns.py. A mask that is the sum of decomposed relative positions
(relative_position.py) is replaced by its two factors, so that no N x N tensor is left in the graph; one that repeats
the masks of windows for every image (window_masks.py) by those of one image; one that is causal whatever the inputs
(causal_masks.py) by the flag; a float one that only hides keys by the bool mask that it was made of (hiding_masks.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.backend.lowering import Lowering
from qframework.backend.report import LayerReport
from qframework.compat.graphs import free_unbacked_symbols, is_erased
from qframework.errors import QFrameworkError
from qframework.graph.attention.call import AttentionCall, Refused
from qframework.graph.attention.causal_masks import with_causal_flag
from qframework.graph.attention.hiding_masks import with_bool_masks
from qframework.graph.attention.patterns import sdpa_call, spelled_out_call
from qframework.graph.attention.relative_position import has_positions
from qframework.graph.attention.replace import name_shapes, replace_attention
from qframework.graph.attention.window_masks import with_window_masks
from qframework.graph.index_values import Values, index_values
from qframework.graph.nodes import argument, fake_value, layer_name, needs_gradient, operation, why_not_plain
from qframework.graph.shapes import traced_size
from qframework.kernels.attention.auto import Masking, caps_logits, few_positions, hopper_of, pytorch_is_faster
from qframework.kernels.attention.variants import resolve, values_dtype
from qframework.kernels.runtime.chip import capability_of, why_unsupported

_SAGE = torch.ops.qframework.sage_attention.default
_BY_DEVICE = ("auto", "sage")  # the options with which the operator chooses its variant
NEEDS_GRADIENTS = {
    option: f"its gradients are needed, which {option!r} keeps exact. Use torch.no_grad(), or name a variant"
    for option in _BY_DEVICE
}
FASTER_EXACT = "PyTorch's 16-bit kernels are faster on this chip. Use 'sage' or the name of a variant to quantize it"
SOFTCAP = (
    "its logits have a soft cap, with which only large calls were measured, on Hopper. Use 'sage' or the name of a "
    "variant to quantize it"
)

POSITIONS = (
    "it has relative positions and too few queries for Hopper's kernels with them: products and a softmax are faster. "
    "Use 'sage' or the name of a variant to quantize it"
)

_FEW_TOKENS = 32  # queries and keys up to which products and a softmax of odd heads were faster than a fused kernel

# nn.TransformerEncoderLayer in inference is one node, which contains its attention.
_FUSED_BY_PYTORCH = {"_transformer_encoder_layer_fwd", "_native_multi_head_attention"}
_FUSED = "PyTorch's fused layer contains it. torch.backends.mha.set_fastpath_enabled(False) separates it"

_NOT_EXPANDED = "its linears and its attention could not be told apart"


def lower_attention(lowering: Lowering) -> None:
    """Replace every attention that the operator supports; report on every attention.

    The option is ``"sage"`` (on CUDA, where no gradient is needed), ``"auto"`` (as ``"sage"``, unless PyTorch's is
    faster, or there is a soft cap, with which only large calls were measured, on Hopper), the name of a variant
    (everywhere) or ``"off"``. A mapping gives one of these for each layer: ``"auto"`` then means ``"sage"``, and layers
    that it does not name stay off. The second attention of a layer ``name`` is ``name#1``; without such an entry it is
    treated like the first.
    """
    gm, option = lowering.gm, lowering.options.attention
    name_shapes(gm)
    reports: list[LayerReport] = []
    seen: Counter[str] = Counter()
    values = index_values(gm)
    for node in list(gm.graph.nodes):
        if is_erased(node) or node.op not in ("call_function", "call_method"):
            continue
        if node.target is _SAGE:
            done = _describe(argument(node, 7, "variant", default="auto"), _fake_of(argument(node, 0, "query")))
            reports.append(LayerReport(layer_name(node), True, done, "", kind="attention"))
        elif (whole := _why_whole(node)) is not None:
            name, (kind, why) = layer_name(node), whole
            wanted = _is_wanted(node, _option_of(option, name, seen[name]))
            reports.append(LayerReport(name, False, kind, why, wanted, kind="attention"))
            if lowering.options.linear != "off":
                reports.append(LayerReport(name, False, kind, why, fallback=True))
        elif (report := _lower_one(gm, node, option, seen, values)) is not None:
            reports.append(report)
            seen[report.name] += 1
    lowering.reports = _one_for_each(lowering.reports, reports)


def _why_whole(node: Node) -> tuple[str, str] | None:
    """Of a node that holds linears beside its attention, what it is, and why it was not expanded; None for others."""
    if operation(node) in _FUSED_BY_PYTORCH:
        return str(operation(node)), _FUSED
    if node.target is not F.multi_head_attention_forward:
        return None
    reasons = ((x, why_not_plain(fake_value(x))) for x in node.all_input_nodes)
    why = next((f"{x} {reason}" for x, reason in reasons if reason is not None), _NOT_EXPANDED)
    return F.multi_head_attention_forward.__name__, why


def _one_for_each(static: Sequence[LayerReport], rest: Sequence[LayerReport]) -> list[LayerReport]:
    """Merge the reports of static attention, where what it refused was tried again, with the rest."""
    lowered = {report.name for report in rest if report.lowered}
    kept = [report for report in static if report.lowered or report.name not in lowered]
    names = {report.name for report in kept if not report.lowered}
    return kept + [report for report in rest if report.name not in names]


def _describe(variant: str, query: Tensor) -> str:
    """The operator and its variant, with the arithmetic of P V if bfloat16 replaces FP16 accumulation."""
    other = ""
    if variant != "auto" and resolve(variant).accumulator == "fp16" and resolve(variant).pv == "fp16":
        stays = values_dtype(resolve(variant), query.dtype, capability_of(query.device)) == torch.bfloat16
        other = ", P and V in bfloat16, FP32 accumulator" if stays else ""
    return f"qframework::sage_attention ({variant}{other})"


def _option_of(option: str | Mapping[str, str], name: str, index: int) -> str:
    """The option of the ``index``-th attention of a layer."""
    if isinstance(option, str):
        return option
    found = option.get(f"{name}#{index}" if index else name) or option.get(name, "off")
    return "sage" if found == "auto" else found  # whoever made the mapping has chosen this layer


def _lower_one(
    gm: GraphModule, node: Node, options: str | Mapping[str, str], seen: Counter[str], values: Values
) -> LayerReport | None:
    """Lower the attention that ``node`` is, or whose softmax it is; None if it is neither."""
    spelled_out = operation(node) == "softmax"
    kind = "matmul, softmax, matmul" if spelled_out else "scaled_dot_product_attention"
    name = layer_name(argument(node, 0, "input", "self")) if spelled_out else layer_name(node)
    option = _option_of(options, name, seen[name])
    try:
        call = spelled_out_call(node) if spelled_out else sdpa_call(node)
        if call is None:
            return None
        call = with_bool_masks(with_causal_flag(call, values), values)
        if reason := _reason_to_leave(call, option):
            return LayerReport(name, False, kind, reason, kind="attention")
        variant = "auto" if option in _BY_DEVICE else option
        call = with_window_masks(call)
        replace_attention(gm, call, lambda writer: writer.write(variant))
    except (Refused, QFrameworkError) as refusal:
        return LayerReport(name, False, kind, str(refusal), fallback=_is_wanted(node, option), kind="attention")
    return LayerReport(name, True, _describe(variant, _fake_of(call.query)), "", kind="attention")


def _is_wanted(node: Node, option: str) -> bool:
    """Whether the attention of a node should be quantized."""
    fake = _fake_of(node)
    if option == "auto" and fake.dtype.itemsize == 2 and hopper_of(fake.device) is not None:
        return False
    return option != "off" and not (option in _BY_DEVICE and _reason_against(option, [fake]))


def _fake_of(node: Node) -> Tensor:
    fake = fake_value(node)
    return torch.empty(0, device="meta") if fake is None else fake


def _reason_to_leave(call: AttentionCall, option: str) -> str | None:
    """Why attention that could be lowered stays in float by choice, which is not a fallback."""
    if option == "off":
        return "the option 'attention' leaves it off. Set it to 'auto', 'sage' or the name of a variant"
    if option not in _BY_DEVICE:
        return None
    if reason := _reason_against(option, _fakes(call)):
        return reason
    if option != "auto":
        return None
    if call.softcap is not None:
        return None if _caps_on_hopper(call) else SOFTCAP
    return FASTER_EXACT if _pytorch_is_faster(call) else _reason_of_shape(call)


def _reason_of_shape(call: AttentionCall) -> str | None:
    """Why products around a softmax stay as they are: few tokens, or fewer keys than channels.

    Where channels attend to channels, the logits are smaller than the operands, so that a fused kernel, which only
    avoids writing and reading them, saves little, and rows of more than 128 channels, or of a number that is no
    multiple of 8, do not suit it. In FP16 on an H100, XCiT (48 keys of 196 channels) took 12.3 ms with the fused kernel
    and 8.2 without, DaViT 11.8 and 11.0. Each head of few tokens is a program of its own, most of it padding: with 10
    channels, as in TNT, 16 tokens took 190 us and 66 without, 32 tokens 101 and 88, 49 tokens 64 and 254
    (``other/2026-11-27-h100-short-attention.json``).
    """
    queries, keys = map(traced_size, call.shape[-2:])
    channels = traced_size(_fake_of(call.query).shape[-1])
    fused = operation(call.end) == "scaled_dot_product_attention"
    if not fused and _has_few_positions(call):
        return POSITIONS
    if fused or (channels <= 128 and channels % 8 == 0):
        return None
    if keys < channels:
        return (
            f"it has {keys} keys of {channels} channels: its logits are smaller than its operands, and a fused kernel "
            "would be slower. Use 'sage' or the name of a variant to quantize it"
        )
    if not 0 < max(queries, keys) <= _FEW_TOKENS:
        return None
    return (
        f"it has {queries} queries and {keys} keys, and up to {_FEW_TOKENS} a fused kernel would be slower. Use 'sage' "
        "or the name of a variant to quantize it"
    )


def _has_few_positions(call: AttentionCall) -> bool:
    """Whether the call has relative positions in 16 bit on Hopper, and too few queries for Hopper's kernels.

    In FP16 on an H200, the general kernel took 105 and 102 us for the calls of MViTv2 with 784 keys at batch 1, and
    products and a softmax of Inductor's 14 and 12 (``other/2026-11-30-h200-relative-positions.json``).
    """
    sizes, chip = _sizes_of(call), hopper_of(_fake_of(call.query).device)
    if chip is None or _masking(call) != "factors" or sizes.query.dtype.itemsize != 2:
        return False
    *heads, queries, channels = sizes.query.shape
    return few_positions(math.prod(heads), queries, sizes.keys, channels, sizes.values, chip)


def _pytorch_is_faster(call: AttentionCall) -> bool:
    """Whether the call is one of PyTorch's attention, whose kernel is faster than all accurate variants."""
    if operation(call.end) != "scaled_dot_product_attention":
        return False
    chip = hopper_of(_fake_of(call.query).device)
    return chip is not None and pytorch_is_faster(*_sizes_of(call), _masking(call), chip)


def _caps_on_hopper(call: AttentionCall) -> bool:
    """Whether Hopper's kernel computes a call with a soft cap; False for sizes that follow from data."""
    chip = hopper_of(_fake_of(call.query).device)
    if any(free_unbacked_symbols(fake) for fake in _fakes(call)):
        return False
    return chip is not None and caps_logits(*_sizes_of(call), _masking(call), chip, call.sinks is not None)


class _Sizes(NamedTuple):
    """What kernels are chosen by: sizes when the graph was captured, which are numbers whatever the inputs' may be."""

    query: Tensor  # without data
    keys: int
    values: int


def _sizes_of(call: AttentionCall) -> _Sizes:
    query, value = _fake_of(call.query), _fake_of(call.value)
    traced = torch.empty(list(map(traced_size, query.shape)), dtype=query.dtype, device="meta")
    return _Sizes(traced, traced_size(call.shape[-1]), traced_size(value.shape[-1]))


def _masking(call: AttentionCall) -> Masking:
    """What is added to the logits."""
    if not call.summands:
        return "causal" if call.is_causal else "none"
    if has_positions(call):
        return "factors"
    return "bool" if all(summand.fill == -torch.inf for summand in call.summands) else "float"


def _reason_against(option: str, operands: Sequence[Tensor]) -> str | None:
    """Why the device, or gradients, which are those of exact attention, rule out ``option``; None if nothing does."""
    if (reason := _why_not(option, operands[0].device)) is not None:
        return reason
    return NEEDS_GRADIENTS[option] if needs_gradient(operands) else None


def _why_not(option: str, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"{option!r} quantizes attention on CUDA, this is {device.type}. Name a variant to quantize it here"
    return why_unsupported(device)


def _fakes(call: AttentionCall) -> list[Tensor]:
    nodes = [call.query, call.key, call.value, *(summand.value for summand in call.summands)]
    return [fake for node in nodes if (fake := fake_value(node)) is not None]
