"""The channels in a view, compared with a tensor whose elements are the numbers of their channels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qframework.graph.channels import ChannelView, quantized_everywhere

BATCH, TOKENS, CHANNELS = 3, 5, 24
QUANTIZE = torch.ops.qframework.quantize.default

CHAINS = {
    "itself": lambda x: [x],
    "heads": lambda x: [x.reshape(BATCH, TOKENS, 4, 6).transpose(1, 2)],
    "qkv": lambda x: x.reshape(BATCH, TOKENS, 3, 4, 2).permute(2, 0, 3, 1, 4).unbind(0),
    "chunks": lambda x: x.chunk(5, -1),
    "split": lambda x: x.split([4, 12, 8], -1),
    "equal splits": lambda x: x.split(10, -1),
    "slices": lambda x: [x[..., 2:8], x[..., -6:], x[:, 1:3]],
    "selected": lambda x: [x.view(BATCH, TOKENS, 4, 6)[:, :, 2], x.unflatten(-1, (4, 6)).select(-1, -1)],
    "split and joined": lambda x: [x.view(BATCH, TOKENS, 4, 6).view(BATCH, TOKENS, 2, 12), x.view(-1, CHANNELS)],
    "split elsewhere": lambda x: [x.view(BATCH, TOKENS, 4, 6).view(BATCH, TOKENS, 8, 3)],
    "dimensions of one": lambda x: [x.unsqueeze(1).squeeze(1).view(BATCH, 1, TOKENS, 1, CHANNELS, 1).squeeze()],
    "copies": lambda x: [x.transpose(0, 1).contiguous().flatten(0, 1).clone()],
    "windows": lambda x: x.view(BATCH * TOKENS, 3, 2, 4).permute(1, 2, 0, 3).unbind(0),
    "tokens among channels": lambda x: [x.reshape(BATCH, TOKENS * CHANNELS)],
    "channels first, then merged": lambda x: [x.transpose(1, 2).reshape(BATCH, CHANNELS * TOKENS)],
    "interleaved channels": lambda x: [x.view(BATCH, TOKENS, 4, 6).transpose(2, 3).reshape(BATCH, TOKENS, CHANNELS)],
    "batch and heads": lambda x: [x.view(BATCH, TOKENS, 4, 6).transpose(1, 2).reshape(BATCH * 4, TOKENS, 6)],
    "batch and heads of qkv": lambda x: x.view(BATCH, TOKENS, 3, 4, 2).permute(2, 0, 3, 1, 4).flatten(1, 2).unbind(0),
    "batch and heads apart again": lambda x: [
        x.view(BATCH, TOKENS, 4, 6).transpose(1, 2).flatten(0, 1).view(BATCH, 2, 2, TOKENS, 6)
    ],
}
MIXTURES = {
    "part of batch and heads": lambda x: x.view(BATCH, TOKENS, 4, 6).transpose(1, 2).flatten(0, 1)[2:5],
    "tokens and channels split across": lambda x: x.view(BATCH, TOKENS, 4, 6).transpose(2, 3).reshape(BATCH, 8, 15),
    "arithmetic": lambda x: x * 2,
    "read beside": lambda x: x + x.mean(),
    "every other": lambda x: x[..., ::2],
}


class Quantized(nn.Module):
    def __init__(self, chain):
        super().__init__()
        self.chain = chain

    def forward(self, x):
        found = self.chain(-x)  # a value of the graph: guards read its inputs too
        found = found if isinstance(found, (list, tuple)) else [found]
        return [torch.ops.qframework.quantize(y, torch.ones(1)) for y in found]


def follow(chain):
    x = torch.zeros(BATCH, TOKENS, CHANNELS)
    gm = torch.export.export(Quantized(chain), (x,)).module()
    [start] = (node for node in gm.graph.nodes if node.target is torch.ops.aten.neg.default)
    is_quantize = lambda node, value: node.target is QUANTIZE and node.args[0] is value  # noqa: E731
    return quantized_everywhere(start, ChannelView.of(x.shape), is_quantize), gm


@pytest.mark.parametrize("name", CHAINS)
def test_views_show_the_right_channels(name):
    (leaves, views), gm = follow(CHAINS[name])
    numbered = torch.arange(CHANNELS).expand(BATCH, TOKENS, CHANNELS).float()
    expected = dict(zip((n for n in gm.graph.nodes if n.target is QUANTIZE), CHAINS[name](numbered), strict=True))
    assert {leaf.node for leaf in leaves} == set(expected)
    assert all(isinstance(node.meta["val"], torch.Tensor) for node in views)
    for leaf in leaves:
        shown = expected[leaf.node]
        assert [dim.size for dim in leaf.view.dims] == list(shown.shape)
        assert set(leaf.view.channels().flatten().tolist()) == set(shown.flatten().int().tolist())
        for i, dim in enumerate(leaf.view.dims):
            if dim.has_channels:
                rows = [set(row.flatten().int().tolist()) for row in shown.unbind(i)]
                assert [set(row.tolist()) for row in leaf.view.channels(i)] == rows


@pytest.mark.parametrize("name", MIXTURES)
def test_other_operations_are_not_views_of_channels(name):
    found, _ = follow(MIXTURES[name])
    assert found is None
