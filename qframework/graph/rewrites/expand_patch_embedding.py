"""Rewrites a patch embedding, a convolution whose kernel tiles the image, as a matrix product.

From::

    image (B, C, H, W) -> conv2d(weight (O, C, P, P), bias, stride=P) -> (B, O, H / P, W / P)

To::

    image -> patches (B, H / P, W / P, C * P * P) -> linear(weight.flatten(1), bias) -> movedim(-1, 1)

and likewise for one and three spatial dimensions. Convolutions of few channels are slow, above all on a GPU, where
cuDNN copies image, weight and result to its own layouts. Inductor instead cuts the patches in one copy, fused with
the operations before it, and reads the product through views. Rounding is that of a linear layer: for float32 on a
GPU, PyTorch's TF32 setting for matrix products applies, not cuDNN's. On a GPU, convolutions behind it that read some
channels of a tensor get a copy of these.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from qframework.compat.dynamo import value_key
from qframework.graph.nodes import add_call, argument, fake_value, operation, why_not_plain
from qframework.graph.selections import keeps_dimension, selection
from qframework.graph.shapes import same
from qframework.graph.strides import follow_strides

aten = torch.ops.aten

_SPATIAL_DIMENSIONS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
# Enough for images, latents, spectrograms and video. A convolution of many channels reads channels-last tensors without
# a copy, and cutting patches is a copy, which costs a CPU more than the product gains.
_MOST_CHANNELS = 16


def expand_patch_embedding(gm: GraphModule) -> None:
    """Replace, in place, every convolution of few channels whose patches neither overlap nor leave gaps.

    Run this after the passes that quantize linear layers: the product stays in float.
    """
    found = [(node, call) for node in gm.graph.nodes if (call := _patch_embedding(node)) is not None]
    for node, call in found:
        _replace(gm, node, call)
    if found:
        _copy_parts_of_channels(gm)


def _copy_parts_of_channels(gm: GraphModule) -> None:
    """Copy what convolutions on a GPU read, where that is some channels of a tensor.

    Behind the product tensors are channels-last, and Inductor passes parts of them to convolutions as they are. These
    copy them first, which takes twice as long as in a kernel of Inductor's: 3.6 instead of 1.9 us for each of 108 in
    InceptionNeXt (``other/2026-11-30-h200-models-in-turns.json``).
    """
    for node in list(gm.graph.nodes):
        part = argument(node, 0, "input") if operation(node) in _SPATIAL_DIMENSIONS else None
        if isinstance(part, Node) and _is_part_of_channels(part) and _is_on_gpu(part):
            with gm.graph.inserting_before(node):
                node.replace_input_with(part, add_call(node, aten.clone.default, (part,)))


def _is_part_of_channels(node: Node) -> bool:
    split = node.args[0] if node.target is operator.getitem else None
    if isinstance(split, Node) and operation(split) in ("chunk", "split", "split_with_sizes", "tensor_split"):
        fake = fake_value(node)
        return fake is not None and argument(split, 2, "dim", default=0) in (1, 1 - fake.ndim)
    selected = selection(node)
    return selected is not None and selected.dim == 1 and keeps_dimension(node, selected)


def _is_on_gpu(node: Node) -> bool:
    fake = fake_value(node)
    return fake is not None and fake.is_cuda


class _PatchEmbedding(NamedTuple):
    image: Node  # (B, C, *sizes)
    weight: Node  # (O, C, *kernel)
    bias: Node | None
    kernel: tuple[int, ...]


def _patch_embedding(node: Node) -> _PatchEmbedding | None:
    spatial = _SPATIAL_DIMENSIONS.get(operation(node) or "")
    if spatial is None:
        return None
    image, weight, bias = argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias")
    fakes = [fake_value(operand) if isinstance(operand, Node) else None for operand in (image, weight, node)]
    if any(fake is None or fake.ndim != spatial + 2 or not fake.is_floating_point() for fake in fakes):
        return None
    if any(map(why_not_plain, fakes)):
        return None
    _, channels, *kernel = fakes[1].shape  # type: ignore[union-attr]
    known = all(isinstance(size, int) for size in (channels, *kernel))
    if not known or channels > _MOST_CHANNELS or all(size == 1 for size in kernel) or not _tiles(node, kernel):
        return None
    return _PatchEmbedding(image, weight, bias, tuple(kernel))


def _tiles(node: Node, kernel: list[int]) -> bool:
    """Whether a convolution's patches lie side by side and cover all channels."""
    stride, padding = argument(node, 3, "stride", default=1), argument(node, 4, "padding", default=0)
    dilation, groups = argument(node, 5, "dilation", default=1), argument(node, 6, "groups", default=1)
    unpadded = padding == "valid" or _each(padding, kernel) == [0] * len(kernel)
    return _each(stride, kernel) == kernel and unpadded and _each(dilation, kernel) == [1] * len(kernel) and groups == 1


def _each(value: Any, kernel: list[int]) -> list[Any]:
    """A convolution's argument for each dimension; one number stands for all."""
    values = list(value) if isinstance(value, Iterable) else [value]
    return values * len(kernel) if len(values) == 1 else values


def _replace(gm: GraphModule, node: Node, call: _PatchEmbedding) -> None:
    key = value_key(node)
    recorded: Tensor = node.meta[key]
    spatial = len(call.kernel)

    def add(target: Any, *args: Any, value: Tensor | None = None, **kwargs: Any) -> Node:
        return add_call(node, target, args, kwargs, value)

    def patches(x: Node, axis: int, size: int) -> Node:
        """Split one axis into patches and, as the last axis, the pixels of a patch; an incomplete patch is dropped."""
        if same(fake_value(x).shape[axis] % size, 0):  # type: ignore[union-attr]
            return add(aten.movedim.int, add(aten.unflatten.int, x, axis, [-1, size]), axis + 1, -1)
        return add(aten.unfold.default, x, axis, size, size)  # for any size, but its gradient is not a view

    with gm.graph.inserting_before(node):
        x = call.image
        for axis, size in enumerate(call.kernel, start=2):
            x = patches(x, axis, size)  # (B, C, *grid, *patch)
        x = add(aten.flatten.using_ints, add(aten.movedim.int, x, 1, spatial + 1), spatial + 1, -1)
        weight = add(aten.flatten.using_ints, call.weight, 1, -1)
        # of the recorded dtype, which under autocast differs from that of the operands
        product = recorded.movedim(1, -1).clone(memory_format=torch.contiguous_format)
        x = add(F.linear, x, weight, call.bias, value=product)
        x = add(aten.movedim.int, x, -1, 1)
        moved = follow_strides(node, x.meta[key])
        if moved is None:
            x = add(aten.clone.default, x, value=recorded, memory_format=torch.contiguous_format)
    for reader, value in (moved or {}).items():  # for the next convolution, which checks strides
        reader.meta[key] = value
    x.meta = {**node.meta, key: x.meta[key]}
    node.replace_all_uses_with(x)
    gm.graph.erase_node(node)
