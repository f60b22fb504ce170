"""Finds masks of windows that were repeated for every image (Swin with fused attention).

From::

    bias (1, H, N, N) ──────────────────────────────────────────┐
    mask (1, W, 1, N, N) -> expand (I, W, H, N, N) -> reshape ──┴> + -> attn_mask (I W, H, N, N)

To::

    two summands of the logits: bias of (I W, H, N, N), mask of (I, W, H, N, N)

so that the sum has W masks instead of I W, and nothing is repeated in memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from qframework.graph.attention.call import AttentionCall, NotAttention, Summand, shape_of
from qframework.graph.nodes import VIEWS, argument, fake_value, operation
from qframework.graph.shapes import same, splits_first
from qframework.graph.writes import written_between


def with_window_masks(call: AttentionCall) -> AttentionCall:
    """``call`` with the masks of windows as summands of their own, where its only summand repeats them."""
    if len(call.summands) != 1 or call.summands[0].fill is not None or call.summands[0].factor != 1.0:
        return call
    total = call.summands[0].value
    if operation(total) != "add" or argument(total, 2, "alpha", default=1) != 1:
        return call
    terms = [argument(total, 0, "input", "self"), argument(total, 1, "other")]
    windows = [_before_repeating(term, call.shape) for term in terms]
    if all(found is None for found in windows):
        return call
    summands = [found or Summand(term, call.shape) for term, found in zip(terms, windows, strict=True)]
    if any(not _is_float(summand.value) for summand in summands):
        return call
    read = [summand.value for summand in summands]
    if written_between(total, call.end, read, set(call.between)) is not None:
        return call
    return replace(call, summands=summands)


def _before_repeating(term: object, shape: torch.Size) -> Summand | None:
    """The mask of windows that ``term`` repeats for all images, for logits of ``shape``; None for anything else."""
    if not isinstance(term, Node) or operation(term) not in VIEWS:
        return None
    repeated = argument(term, 0, "input", "self")
    if not isinstance(repeated, Node) or operation(repeated) != "expand":
        return None
    mask = argument(repeated, 0, "input", "self")
    try:
        fine, own, before = shape_of(repeated), shape_of(term), shape_of(mask)
    except NotAttention:
        return None
    if len(before) != len(fine) or not same(before[0], 1) or not same(before[1], fine[1]):
        return None
    logits = torch.Size((*fine[:2], *shape[1:]))
    if not (splits_first(fine, own) and splits_first(logits, shape)):
        return None
    return Summand(mask, logits)


def _is_float(node: object) -> bool:
    """Whether a term is a float tensor; numbers and integers are not."""
    fake = fake_value(node) if isinstance(node, Node) else None
    return fake is not None and fake.dtype.is_floating_point
