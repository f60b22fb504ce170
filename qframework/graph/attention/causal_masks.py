"""Replaces masks that are causal whatever the inputs by the flag, and drops masks that hide nothing.

From::

    arange ... <= arange ... -> expand -> attn_mask of every layer's scaled_dot_product_attention

To::

    scaled_dot_product_attention(..., attn_mask=None, is_causal=True)

as language models of transformers build it for a prompt without padding. No kernel then reads a mask, and those that
leave out hidden blocks need not search for them. The same for calls of ``qframework::sage_attention``. index_values.py
says what a mask holds, for all sizes at once.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from qframework.graph.attention.call import NO_WEIGHT, AttentionCall, Summand
from qframework.graph.attention.replace import erase_unread
from qframework.graph.index_formulas import Line, Number, Piecewise
from qframework.graph.index_values import Values, fixed_until, index_values
from qframework.graph.nodes import argument, fake_value, is_sage_attention, operation

_FULL, _CAUSAL = "full", "causal"


def use_causal_flag(gm: GraphModule) -> None:
    """Rewrite, in place, every attention whose mask is causal or hides nothing."""
    calls = [(node, place) for node in gm.graph.nodes if (place := _place_of_flag(node)) is not None]
    masked = [(node, place) for node, place in calls if isinstance(argument(node, 3, "attn_mask"), Node)]
    values = index_values(gm) if masked else {}
    unchanged: dict[Node, Node] = {}  # up to which reader a mask is
    for node, place in masked:
        mask, flag = argument(node, 3, "attn_mask"), argument(node, place, "is_causal", default=False)
        if mask not in values or flag is not False:
            continue
        fake = fake_value(mask)
        kind = _kind(mask, values, False if fake is not None and fake.dtype == torch.bool else None)
        if kind is None or not fixed_until(mask, node, values, unchanged.get(mask)):
            continue
        unchanged[mask] = node
        _set_flag(node, place, kind == _CAUSAL)
        erase_unread(gm, mask)


def _place_of_flag(node: Node) -> int | None:
    """The place of ``is_causal`` among the arguments of an attention with ``attn_mask`` in place 3; None for others."""
    if is_sage_attention(node):
        return 4
    return 5 if operation(node) == "scaled_dot_product_attention" else None


def with_causal_flag(call: AttentionCall, values: Values) -> AttentionCall:
    """``call`` without the summands that are causal masks or hide nothing."""
    kinds = [_summand_kind(summand, call, values) for summand in call.summands]
    summands = [summand for summand, kind in zip(call.summands, kinds, strict=True) if kind is None]
    return replace(call, summands=summands, is_causal=call.is_causal or _CAUSAL in kinds)


def _summand_kind(summand: Summand, call: AttentionCall, values: Values) -> str | None:
    if summand.value not in values:
        return None
    hidden = None if summand.fill is None else not summand.seen
    kind = _kind(summand.value, values, hidden, summand.factor)
    return kind if kind is not None and fixed_until(summand.value, call.end, values) else None


def _kind(mask: Node, values: Values, hidden: bool | None, factor: float = 1.0) -> str | None:
    """What a mask hides: nothing, later keys, or None for anything else.

    A bool mask hides keys where it is ``hidden``; a float one, ``factor * mask`` with ``hidden`` None, where it adds a
    number that leaves no weight. One that broadcasts over queries or keys has no step there, and is not causal.
    """
    choice, fake = values[mask], fake_value(mask)
    if not isinstance(choice, Piecewise) or fake is None or fake.ndim < 2:
        return None
    inside, outside = (_keeps(number, hidden, factor) for number in (choice.inside, choice.outside))
    if choice.is_constant:
        return _FULL if inside else None
    if inside is None or outside is None or inside == outside or len(choice.lines) != 1:
        return None
    (line,) = choice.lines
    kept_where = line if inside else line.times(-1).shifted(-1)
    return _CAUSAL if kept_where == Line((0,) * (fake.ndim - 2) + (1, -1), 0) else None


def _keeps(number: Number, hidden: bool | None, factor: float) -> bool | None:
    """Whether a mask's number keeps a key; None for a bias."""
    if hidden is not None:
        return number != hidden
    added = factor * number
    return True if added == 0 else False if added <= NO_WEIGHT else None


def _set_flag(node: Node, flag: int, causal: bool) -> None:
    """Give ``node`` no mask, and the flag, its argument in place ``flag``, if ``causal``."""
    args = list(node.args)
    kwargs = dict(node.kwargs)
    for place, name, value in ((3, "attn_mask", None), (flag, "is_causal", causal)):
        if place < len(args):
            args[place] = value
        else:
            kwargs[name] = value
    node.args, node.kwargs = tuple(args), kwargs
