"""Which readers of a value depend on its memory layout: those of a patch embedding (strides.py and shapes.py)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lowered_models import count
from patch_embeddings import captured, operands

from qframework.graph.shapes import same_shape, splits_first


def tokens(y):
    return y.flatten(2).transpose(1, 2)


def write_beside_a_part(y):
    part = y[:, :2]
    y.relu_()
    return y.sum() + part.sum()


def write_to_a_copy(y):
    pooled = tokens(y).contiguous()
    pooled.zero_()
    return y.sum() + pooled.sum()


def store(how):
    """Values of ``y`` in other memory, as in a cache of keys."""

    def read(y):
        cache = y.new_zeros(*y.shape[:3], y.shape[3] + 1)
        if how == "copy":
            cache[..., 1:].copy_(y)
        elif how == "index":
            cache.index_copy_(3, torch.arange(y.shape[3], device=y.device), y.relu())
        elif how == "places":
            cache[..., 1:].index_put_((torch.arange(len(y), device=y.device),), y)
        else:
            cache[..., :-1] = y
        return cache.sum(1)

    return read


def store_in_itself(y):
    y[:, :2].copy_(y[:, 2:4])
    return y.sum(1)


@torch.library.custom_op("qframework_tests::in_order", mutates_args=())
def in_order(y: torch.Tensor) -> torch.Tensor:
    """An operator of another library that reads the memory in order."""
    return y.as_strided((y.numel(),), (1,)).cumsum(0)


@in_order.register_fake
def _(y):
    return y.new_empty(y.numel())


# Readers of the convolution's result, and whether they depend on its memory layout.
READERS = {
    "output": (lambda y: y, True),
    "output, tokens": (tokens, True),
    "output, elementwise": (lambda y: tokens(y) + 1, True),
    "view": (lambda y: y.view(2, -1).sum(1), True),
    "view, elementwise": (lambda y: (y.relu() * 2).view(2, -1).sum(1), True),
    "view of tokens turned back": (lambda y: (tokens(y) + 1).mT.view(2, -1).sum(1), True),
    "view of a part": (lambda y: y.chunk(2, 1)[1].view(2, -1).sum(1), True),
    "as_strided": (lambda y: y.as_strided((4,), (1,)).clone(), True),
    "another library": (lambda y: in_order(y).sum(), True),
    "written": (write_beside_a_part, True),
    "written for itself": (lambda y: y.relu_().sum(), False),
    "written after a copy": (write_to_a_copy, True),
    "stored": (store("copy"), False),
    "stored by index": (store("index"), False),
    "stored at places": (store("places"), False),
    "stored in an item": (store("item"), False),
    "stored in itself": (store_in_itself, True),
    "possible view": (lambda y: y.view(2, 6, -1).sum(1), False),
    "sum of tokens": (lambda y: tokens(y).sum(1), False),
    "norm of tokens": (lambda y: F.layer_norm(tokens(y) + 1, (6,)).sum(1), False),
    "class token": (lambda y: torch.cat((y.new_zeros(2, 1, 6), tokens(y)), 1) * 2, False),
    "product": (lambda y: tokens(y) @ y.new_ones(6, 3), False),
    "size": (lambda y: y.sum((2, 3)) / y.shape[-1], False),
}


@pytest.mark.parametrize("name", READERS)
def test_a_result_is_copied_only_if_a_reader_depends_on_strides(name, device):
    read, matters = READERS[name]
    x, weight, bias = operands((3, 16, 16), (4, 4), device)

    def embed(x, w, b):
        return read(F.conv2d(x, w, b, stride=4))

    y, capture = captured(embed, x, weight, bias)
    expected = embed(x, weight, bias)
    assert capture.convolutions() == 0
    assert count(capture.graphs[-1], torch.ops.aten.clone.default) == matters
    torch.testing.assert_close(y, expected)
    assert y.stride() == expected.stride()
    torch.testing.assert_close(torch.compile(embed, backend="qframework", fullgraph=True)(x, weight, bias), expected)


@pytest.mark.parametrize("enabled", [False, True])
def test_readers_in_a_scope_of_autocast(enabled):
    """They are run again in it: outside of it a product of two dtypes fails, and the result would be copied."""

    def embed(x, w, b):
        y = F.conv2d(x, w, b, stride=4)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.autocast("cpu", enabled=enabled):
                y = y + 1
            return (tokens(y) @ y.new_ones(6, 3, dtype=torch.bfloat16)).sum(1)

    inputs = [x.float() for x in operands((3, 16, 16), (4, 4), "cpu")]
    y, capture = captured(embed, *inputs)
    assert capture.convolutions() == 0
    assert count(capture.graphs[-1], torch.ops.aten.clone.default) == 0
    torch.testing.assert_close(y, embed(*inputs), rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    "join",
    [
        lambda y, z: torch.cat([y.relu(), z], 1).view(2, -1).sum(1),
        lambda y, z: torch.cat([y, z]),
        lambda y, z: torch.stack([y, z]),
        lambda y, z: (z + y).view(2, -1).sum(1),
    ],
    ids=["view of both", "cat", "stack", "sum"],
)
def test_the_second_patch_embedding_sees_the_new_strides_of_the_first(join, device):
    (x, weight, bias), (other, second, _) = operands((3, 16, 16), (4, 4), device), operands((3, 16, 16), (4, 4), device)

    def embed(x, other, weight, second, bias):
        return join(F.conv2d(x, weight, bias, stride=4), F.conv2d(other, second, stride=4))

    y, capture = captured(embed, x, other, weight, second, bias)
    expected = embed(x, other, weight, second, bias)
    assert (capture.convolutions(), capture.products()) == (0, 2)
    torch.testing.assert_close(y, expected)
    assert y.stride() == expected.stride()


def test_shapes_are_compared_dimension_by_dimension():
    assert same_shape(torch.Size((2, 3)), torch.Size((2, 3)))
    assert not same_shape(torch.Size((2, 3)), torch.Size((3, 2)))
    assert not same_shape(torch.Size((2, 3)), torch.Size((2, 3, 1)))
    assert splits_first(torch.Size((2, 3, 5)), torch.Size((6, 5)))
    assert not splits_first(torch.Size((2, 3, 5)), torch.Size((2, 15)))
    assert not splits_first(torch.Size((6,)), torch.Size(()))
