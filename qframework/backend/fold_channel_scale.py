"""Folds the product with a constant for each channel into the quantization after it.

From::

    linear -> [activation] -> [+ residual] -> mul(c (N,)) -> quantize (S)

To::

    linear -> [activation] -> [+ residual] -> qframework::quantize (S / c, one scale for each channel)

which lower_linear then moves into the linear's epilogue: both compute ``round(y * c / S)``. The quantizer writes such
products when it moves scales of channels into weights (qframework/quantizer/channel_scales.py). S is a number in the
graph. The constants are a buffer, which each call reads unless weights are frozen. They must be positive when the model
is compiled; zero or negative ones written later give the product's result. The result for NaN is undefined, as it is
for the product: INT8 has no NaN. Other products stay, and Inductor fuses them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.backend.hoist_quantize import mark_int8
from qframework.backend.lowering import Lowering, ScaleConstants, erase_unused
from qframework.backend.quantized_linear import find_epilogue, is_quantized_linear, static_quantization
from qframework.compat.dynamo import guard_identity
from qframework.graph.nodes import Constants, argument, fake_value, linear_call, operation

_ours = torch.ops.qframework


def fold_channel_scale(lowering: Lowering) -> None:
    """Fold every such product after a quantized linear."""
    gm, constants, freeze_weights = lowering.gm, lowering.constants, lowering.options.freeze_weights
    for node in list(gm.graph.nodes):
        if linear_call(node) is None or not is_quantized_linear(node, constants):
            continue
        end = find_epilogue(node).end
        product = next(iter(end.users)) if len(end.users) == 1 else None
        factor = _channel_factor(product, end, constants) if product is not None else None
        if product is not None and factor is not None:
            if freeze_weights:
                guard_identity(factor)
            _fold(gm, product, end, factor, constants.value(factor) if freeze_weights else None, lowering.scales)


def _channel_factor(node: Node, value: Node, constants: Constants) -> Node | None:
    """The positive constant ``(N,)`` that ``node`` multiplies the channels of ``value`` by; None for any other node."""
    if operation(node) != "mul":
        return None
    x, factor = argument(node, 0, "input", "self"), argument(node, 1, "other")
    if factor is value:
        x, factor = factor, x
    fake, constant = fake_value(value), constants.on_cpu(factor)
    if x is not value or constant is None or fake is None or constant.dim() != 1:
        return None
    fits = constant.numel() == fake.shape[-1] and constant.is_floating_point()
    usable = fits and fake_value(node) is not None and fake_value(node).dtype == fake.dtype  # type: ignore[union-attr]
    return factor if usable and bool(((constant > 0) & constant.isfinite()).all()) else None


def _fold(
    gm: GraphModule, product: Node, end: Node, factor: Node, frozen: Tensor | None, scales: ScaleConstants
) -> None:
    """Quantize ``end`` instead of ``product``, if all readers of the product quantize it with one scale."""
    found = {static_quantization(user, product) for user in product.users}
    first = found.pop() if found else None
    if first is None or found:
        return
    number, zero_point = first
    if not isinstance(number, float):
        return
    with gm.graph.inserting_before(product):
        device = fake_value(product).device  # type: ignore[union-attr]
        if frozen is not None:
            scale = scales.buffer(number / frozen.detach().float())
        else:
            constant = gm.graph.call_function(torch.ops.aten.to.dtype, (factor, torch.float32))
            scale = gm.graph.call_function(torch.ops.aten.div.Tensor, (scales.node(number, device), constant))
        quantized = gm.graph.call_function(_ours.quantize.default, (end, scale, scales.zero_point(zero_point, device)))
    quantized.meta = dict(product.meta)
    mark_int8([quantized])
    for user in list(product.users):
        user.replace_all_uses_with(quantized)
        erase_unused(gm, user)
