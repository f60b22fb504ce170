"""Depthwise convolutions of images whose channels lie side by side in memory, as those of tokens do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch.fx import Node

from qframework.graph.nodes import argument, fake_value, operation


class DepthwiseCall(NamedTuple):
    """A convolution of each channel by itself, with stride 1 and a result as large as the image."""

    input: Node  # (N, C, H, W)
    weight: Node  # (C, 1, taps, taps)
    bias: Node | None
    taps: int

    @property
    def input_nodes(self) -> list[Node]:
        """The nodes among the operands."""
        return [each for each in (self.input, self.weight, self.bias) if each is not None]


def depthwise_call(node: Node) -> DepthwiseCall | None:
    """What a node computes, None for other nodes; its operands and result have one dtype."""
    if operation(node) != "conv2d":
        return None
    image, weight, bias = argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias")
    x, w, y = (fake_value(each) if isinstance(each, Node) else None for each in (image, weight, node))
    if x is None or w is None or y is None or x.ndim != 4 or w.ndim != 4 or not x.dtype == w.dtype == y.dtype:
        return None
    channels, taps = w.shape[0], w.shape[-1]
    alone = w.shape[1] == 1 and x.shape[1] == channels == argument(node, 6, "groups", default=1)
    if not alone or w.shape[2] != taps or taps % 2 == 0 or not _keeps_the_size(node, taps) or x.stride(1) != 1:
        return None
    return DepthwiseCall(image, weight, bias, taps)


def _keeps_the_size(node: Node, taps: int) -> bool:
    stride, padding = argument(node, 3, "stride", default=1), argument(node, 4, "padding", default=0)
    dilation = argument(node, 5, "dilation", default=1)
    return _both(stride, 1) and _both(dilation, 1) and (padding == "same" or _both(padding, taps // 2))


def _both(value: Any, wanted: int) -> bool:
    """Whether an argument of a convolution, a number for each dimension or one for all, is ``wanted``."""
    values = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    return all(each == wanted for each in values)
