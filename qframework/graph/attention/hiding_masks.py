"""Finds the bool masks of which models make float ones, where hiding keys is all that those do.

From::

    seen -> where(seen, 0, lowest) -> added to logits beside sinks (GPT-OSS)

To::

    seen, a bool mask

whose blocks kernels can skip. A row of the float mask that hides all keys hides none of them from the others, so that
their weights are equal, and the two masks differ; beside a sink, to which all weight goes then, they do not.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from qframework.graph.attention.call import NO_WEIGHT, AttentionCall, Summand
from qframework.graph.attention.logits import constant_number
from qframework.graph.index_formulas import as_piecewise
from qframework.graph.index_values import Values, fixed_until
from qframework.graph.nodes import argument, fake_value, operation
from qframework.graph.shapes import same_shape
from qframework.graph.writes import written_between


def with_bool_masks(call: AttentionCall, values: Values) -> AttentionCall:
    """``call`` with bool masks for the float ones that only hide keys, where it has sinks."""
    if call.sinks is None:
        return call
    return replace(call, summands=[_as_bool(summand, call, values) for summand in call.summands])


def _as_bool(summand: Summand, call: AttentionCall, values: Values) -> Summand:
    mask = summand.value
    if summand.fill is not None or operation(mask) != "where":
        return summand
    chosen, first, second = (argument(mask, i, name) for i, name in enumerate(("condition", "input", "other")))
    numbers = [_number(each, mask, values) for each in (first, second)]
    added = [None if number is None else summand.factor * number for number in numbers]
    seen = added[0] == 0.0
    hidden = added[1] if seen else added[0]
    if 0.0 not in added or hidden is None or not hidden <= NO_WEIGHT or not _is_whole(chosen, mask):
        return summand
    if written_between(mask, call.end, [mask, chosen], set(call.between)) is not None:
        return summand
    return replace(summand, value=chosen, factor=1.0, fill=-math.inf, seen=seen)


def _number(value: Any, where: Node, values: Values) -> float | None:
    """The number that a branch of ``where`` has everywhere; None if it has several, or unknown ones."""
    if not isinstance(value, Node) or value not in values:
        return constant_number(value)
    formula = as_piecewise(values[value])
    whole = formula is not None and formula.is_constant and fixed_until(value, where, values)
    return float(formula.inside) if formula is not None and whole else None


def _is_whole(chosen: Any, mask: Node) -> bool:
    """Whether a bool mask has the shape of what was chosen by it."""
    fake, result = (fake_value(each) if isinstance(each, Node) else None for each in (chosen, mask))
    if fake is None or result is None:
        return False
    return fake.dtype == torch.bool and same_shape(fake.shape, result.shape)
