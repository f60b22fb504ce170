"""Finds the bool masks of which models make float ones, where hiding keys is all that those do.

From::

    seen -> where(seen, 0, lowest), or zeros.masked_fill(~seen, lowest) -> added to logits

To::

    seen, a bool mask

whose blocks kernels can skip, as eager models of transformers build it. A row of the float mask that hides all keys
hides none of them from the others, so that their weights are equal, and the two masks differ. They do not beside a
sink (GPT-OSS), to which all weight goes then, nor where positions alone say that each query sees the key of its own
place, as in sliding windows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from qframework.graph.attention.call import NO_WEIGHT, AttentionCall, Summand
from qframework.graph.attention.logits import constant_number
from qframework.graph.index_formulas import Line, Piecewise, as_piecewise, padded
from qframework.graph.index_values import Values, fixed_until
from qframework.graph.nodes import argument, fake_value, operation
from qframework.graph.shapes import same, same_shape
from qframework.graph.writes import written_between


def with_bool_masks(call: AttentionCall, values: Values) -> AttentionCall:
    """``call`` with bool masks for the float ones that only hide keys."""
    return replace(call, summands=[_as_bool(summand, call, values) for summand in call.summands])


def _as_bool(summand: Summand, call: AttentionCall, values: Values) -> Summand:
    mask = summand.value
    if summand.fill is not None or operation(mask) not in ("where", "masked_fill"):
        return summand
    if operation(mask) == "where":
        chosen, first, second = (
            argument(mask, 0, "condition"),
            argument(mask, 1, "input", "self"),
            argument(mask, 2, "other"),
        )
    else:
        second, chosen, first = (
            argument(mask, 0, "input", "self"),
            argument(mask, 1, "mask"),
            argument(mask, 2, "value"),
        )
    numbers = [_number(each, mask, values) for each in (first, second)]
    added = [None if number is None else summand.factor * number for number in numbers]
    seen = added[0] == 0.0
    hidden = added[1] if seen else added[0]
    if 0.0 not in added or hidden is None or not hidden <= NO_WEIGHT or not _is_whole(chosen, mask):
        return summand
    if call.sinks is None and not _sees_itself(mask, call, values):
        return summand
    if written_between(mask, call.end, [mask, chosen], set(call.between)) is not None:
        return summand
    return replace(summand, value=chosen, factor=1.0, fill=-math.inf, seen=seen)


def _sees_itself(mask: Node, call: AttentionCall, values: Values) -> bool:
    """Whether a mask of zeros and lower numbers hides no query's own place from it."""
    choice, (queries, keys) = values.get(mask), call.shape[-2:]
    if not isinstance(choice, Piecewise) or choice.inside != 0 or not fixed_until(mask, call.end, values):
        return False
    has_place = same(queries, keys) or (isinstance(queries, int) and isinstance(keys, int) and queries <= keys)
    lines = [padded(line, 2) for line in choice.lines]
    here = [Line((*line.steps[:-2], line.steps[-2] + line.steps[-1]), line.start) for line in lines]
    return has_place and all(line.never_negative for line in here)


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
