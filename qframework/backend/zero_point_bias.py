"""Biases of layers whose input has a zero point, computed when a model is compiled and again when a parameter changes.

From::

    qframework::zero_point_bias (bias, scale, zero point, int8 weight, scale) -> int8_linear

To::

    buffer -> int8_linear

where the values of all operands are known. Otherwise the operator stays, and each call sums the weight.
"""

from __future__ import annotations

import torch

from qframework.backend.lowering import Lowering, erase_unused
from qframework.backend.watched_values import Operand, WatchedValues
from qframework.compat.dynamo import guard_identity

_zero_point_bias = torch.ops.qframework.zero_point_bias.default


def keep_zero_point_biases(lowering: Lowering) -> None:
    """Replace every ``zero_point_bias`` of known operands by a buffer; ``lowering.checks`` keeps it up to date.

    With frozen weights, later writes have no effect, and another parameter compiles the model again.
    """
    watched = WatchedValues()
    for node in list(lowering.gm.graph.nodes):
        if node.target is not _zero_point_bias:
            continue
        operands = [Operand(each, lowering.constants) for each in node.args]
        if any(each.value is None and each.node is not None for each in operands):
            continue
        values = [each.value for each in operands]
        with torch.no_grad():
            buffer = lowering.scales.buffer(_zero_point_bias(*values))
        if lowering.options.freeze_weights:
            for source in [each.node for each in operands if each.node is not None]:
                guard_identity(source)
        else:
            watched.add(lowering.constants.value(buffer), _zero_point_bias, operands)
        node.replace_all_uses_with(buffer)
        erase_unused(lowering.gm, node)
    if watched:
        lowering.checks.append(watched.check)
