"""Casts to float32 move behind views, up to the product that reads them."""

from __future__ import annotations

import pytest
import torch

from qframework.graph.nodes import operation
from qframework.graph.rewrites.cast_late import cast_late


def on_the_way(gm):
    """The operations between the input ``x`` and the product, in order."""
    (product,) = (node for node in gm.graph.nodes if operation(node) in ("matmul", "bmm"))
    node, path = product.args[0], []
    while node.op.startswith("call"):
        path.insert(0, operation(node))
        node = node.args[0]
    return path


def moved(model, *inputs):
    """The operations on the way to the product before and after the pass; results must be equal."""
    paths = []

    def backend(gm, _):
        paths.append(on_the_way(gm))
        cast_late(gm)
        gm.graph.lint()
        gm.recompile()
        paths.append(on_the_way(gm))
        return gm.forward

    torch._dynamo.reset()
    expected = model(*(x.clone() for x in inputs))
    found = torch.compile(model, backend=backend)(*(x.clone() for x in inputs))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    return paths


def operands():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, 8, 8, generator=generator).half(), torch.randn(2, 3, 8, 8, generator=generator)


MOVED = {
    "transpose": (lambda x, y: x.float().transpose(2, 3) @ y, ["transpose", "float"]),
    "mT": (lambda x, y: x.float().mT @ y, ["mT", "float"]),
    "copies": (lambda x, y: x.mT.float().contiguous().clone() @ y, ["mT", "contiguous", "clone", "float"]),
    "scaled": (lambda x, y: (x.float() * 0.3).mT @ y, ["mT", "float", "mul"]),
    "scaled twice": (
        lambda x, y: (x.to(torch.float32) / 3).flatten(0, 1) * 2 @ y[0, 0],
        ["flatten", "to", "div", "mul"],
    ),
    "cast twice": (lambda x, y: x.float().type(torch.float32) @ y, ["float"]),
    "sliced": (lambda x, y: x.type_as(y)[:, :, :4] @ y, ["getitem", "type_as"]),
    "sizes": (lambda x, y: x.float().reshape(x.shape[0], -1, 8) @ y[:, 0], ["reshape", "float"]),
    "in ATen": (
        lambda x, y: torch.ops.aten.bmm(torch.ops.aten.permute.default(x[0].float(), [0, 2, 1]), y[0]),
        ["getitem", "permute", "float"],
    ),
}


@pytest.mark.parametrize("name", MOVED)
def test_the_cast_is_behind_what_moves_elements(name):
    model, expected = MOVED[name]
    before, after = moved(model, *operands())
    assert before != after == expected


def of_a_view_written(x, y):
    wide = x.float()
    turned = wide.mT
    wide[:, :, 0] = 1
    return turned @ y


def of_the_source_written(x, y):
    wide = x.float()
    x.zero_()
    return wide.mT @ y


def of_strides_that_the_source_has_not(x, y):
    return (
        x[:, :1].expand(2, 3, 8, 8).mT.to(torch.float32, memory_format=torch.contiguous_format).view(6, 8, 8) @ y[0, :1]
    )


def of_float64(x, y):
    return (x.double().mT @ y.double()).float()


def of_float32(x, y):
    return y.float().mT @ y


def of_what_others_read(x, y):
    turned = x.float().mT
    return turned @ y + turned


def of_what_is_computed_in_float32(x, y):
    return (x.float() + 1).mT @ y


STAY = [
    of_a_view_written,
    of_the_source_written,
    of_strides_that_the_source_has_not,
    of_float64,
    of_float32,
    of_what_others_read,
    of_what_is_computed_in_float32,
]


@pytest.mark.parametrize("model", STAY)
def test_others_stay(model):
    before, after = moved(model, *operands())
    assert before == after
