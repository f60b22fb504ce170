"""Finds the blocks of a mask once for all layers that attend with it, instead of once in each.

From::

    mask -> sage_attention (layer 0) -> getitem 0
    mask -> sage_attention (layer 1) -> getitem 0, getitem 1 -> ...

To::

    mask -> mask_blocks -> masked_attention (layer 0) -> getitem 0
                        -> masked_attention (layer 1) -> getitem 0, getitem 1 -> ...

for bool masks that Hopper's kernel reads as blocks (mask_blocks.py), such as the padding of a batch of texts.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from qframework.backend.lowering import Lowering
from qframework.graph.nodes import add_call, argument, fake_value, is_sage_attention, needs_gradient
from qframework.graph.writes import written_between
from qframework.kernels.attention.arguments import SageAttentionArguments
from qframework.kernels.attention.auto import hopper_of, reads_blocks
from qframework.kernels.attention.mask_blocks import MaskSizes

_ours = torch.ops.qframework


class _Shared(NamedTuple):
    """What determines the blocks of a mask."""

    mask: Node
    queries: int
    keys: int
    is_causal: bool
    key_heads: int  # 0: the keys that are seen are not needed


def share_mask_blocks(lowering: Lowering) -> None:
    """Compute the blocks of each mask that several layers attend with before the first of them."""
    layers: dict[_Shared, list[Node]] = defaultdict(list)
    for node in filter(is_sage_attention, lowering.gm.graph.nodes):
        if (shared := _blocks_of(node)) is not None:
            layers[shared].append(node)
    for shared, nodes in layers.items():
        if len(nodes) > 1 and written_between(nodes[0], nodes[-1], [shared.mask]) is None:
            _share(shared, nodes)


def _blocks_of(node: Node) -> _Shared | None:
    """The blocks that Hopper's kernel reads in this call; None where it reads none, or if that is unknown."""
    x = _arguments(node)
    mask, causal = x.attn_mask, x.is_causal
    fakes = [fake for each in x[:4] if isinstance(each, Node) and (fake := fake_value(each)) is not None]
    if x.rel_h is not None or not isinstance(mask, Node) or len(fakes) < 4:
        return None
    query, key, value, kept = fakes
    sizes = [size for fake in fakes for size in (*fake.shape, *fake.stride())]
    static = all(isinstance(size, int) for size in sizes)
    chip = hopper_of(query.device)
    if not static or chip is None or query.ndim != 4 or kept.dtype != torch.bool or needs_gradient(fakes):
        return None
    queries, keys, key_heads = query.shape[2], key.shape[2], key.shape[1]
    if (causal and keys > queries) or not (x.enable_gqa or query.shape[1] == key_heads):
        return None
    row = _sizes_of(kept).rows == 1 and not causal
    reading = reads_blocks(query, key, value, x.variant, chip, row, x.softcap is not None, x.return_lse)
    seen = key_heads if reading == "seen" else 0
    return None if reading == "nothing" else _Shared(mask, queries, keys, bool(causal), seen)


def _arguments(node: Node) -> SageAttentionArguments:
    """The arguments of a call, nodes for tensors."""
    fields, defaults = SageAttentionArguments._fields, SageAttentionArguments._field_defaults
    given = [argument(node, i, name, default=defaults.get(name)) for i, name in enumerate(fields)]
    return SageAttentionArguments(*given)


def _sizes_of(mask: Tensor) -> MaskSizes:
    return MaskSizes.of(mask.reshape(*[1] * (4 - mask.ndim), *mask.shape))


def _share(shared: _Shared, nodes: list[Node]) -> None:
    fake = fake_value(shared.mask)
    assert fake is not None
    sizes = _sizes_of(fake)
    first = nodes[0]
    with first.graph.inserting_before(first):
        both = add_call(first, _ours.mask_blocks.default, (shared.mask, list(sizes), *shared[1:]))
        blocks = [add_call(first, operator.getitem, (both, place)) for place in range(4)]
    for node in nodes:
        given = _arguments(node)
        with node.graph.inserting_before(node):
            operands = (*given[:4], *blocks, *given[4:10], *([] if given.softcap is None else [given.softcap]))
            new = add_call(node, _ours.masked_attention.default, operands)
        node.replace_all_uses_with(new)
        node.graph.erase_node(node)
