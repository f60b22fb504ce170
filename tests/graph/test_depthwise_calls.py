"""Which convolutions are depthwise, keep the size of the image, and read channels that lie side by side."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from qframework.graph.depthwise import depthwise_call


def conv(*options, shape=(2, 16, 7, 9), weight=(16, 1, 3, 3), dtypes=(torch.float16,) * 3, channels_last=True, **named):
    """A node that convolves, and its operands."""
    graph = fx.Graph()
    x, w, b = map(graph.placeholder, "xwb")
    node = graph.call_function(F.conv2d, (x, w, b, *options), named)
    order = torch.channels_last if channels_last else torch.contiguous_format
    with FakeTensorMode():
        x.meta["val"] = torch.empty(shape, dtype=dtypes[0]).contiguous(memory_format=order)
        w.meta["val"] = torch.empty(weight, dtype=dtypes[1])
        node.meta["val"] = torch.empty(shape, dtype=dtypes[2])
    return node


@pytest.mark.parametrize("padding", [1, (1, 1), "same"])
def test_a_depthwise_convolution(padding):
    node = conv(1, padding, 1, 16)
    call = depthwise_call(node)
    assert call is not None
    assert (*map(str, call.input_nodes), call.taps) == ("x", "w", "b", 3)


def test_options_by_name():
    assert depthwise_call(conv(padding=2, groups=16, weight=(16, 1, 5, 5))).taps == 5


OTHERS = {
    "without padding": conv(1, 0, 1, 16),
    "padding by name": conv(1, "valid", 1, 16),
    "too much padding in one dimension": conv(1, (1, 2), 1, 16),
    "strides": conv(2, 1, 1, 16),
    "a stride in one dimension": conv((1, 2), 1, 1, 16),
    "dilation": conv(1, 1, 2, 16),
    "groups of channels": conv(1, 1, 1, 8, weight=(16, 2, 3, 3)),
    "all channels": conv(1, 1, 1, 1, weight=(16, 16, 3, 3)),
    "several results of a channel": conv(1, 1, 1, 16, weight=(32, 1, 3, 3)),
    "a window that is no square": conv(1, "same", 1, 16, weight=(16, 1, 3, 5)),
    "a window without a middle": conv(1, 1, 1, 16, weight=(16, 1, 2, 2)),
    "channels apart": conv(1, 1, 1, 16, channels_last=False),
    "a weight of another dtype": conv(1, 1, 1, 16, dtypes=(torch.float16, torch.float32, torch.float16)),
    "autocast": conv(1, 1, 1, 16, dtypes=(torch.float32, torch.float32, torch.float16)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others(name):
    assert depthwise_call(OTHERS[name]) is None
