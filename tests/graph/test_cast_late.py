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
        node = node.all_input_nodes[0]
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
    "scaled by the number first": (lambda x, y: (0.3 * x.float()).mT @ y, ["mT", "float", "mul"]),
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


def of_a_number_divided(x, y):
    return (0.3 / x.float()).mT @ y


def of_float64(x, y):
    return (x.double().mT @ y.double()).float()


def of_float32(x, y):
    return y.float().mT @ y


def of_what_others_read(x, y):
    turned = x.float().mT
    return turned @ y + turned


def of_an_index_written(x, y):
    index = torch.arange(7, -1, -1)
    wide = x.float()[:, :, index]
    index.zero_()
    return wide @ y


def of_bits_read_anew(x, y):
    return x.float().view(torch.float32)[..., :4] @ y[:, :, :4]


def of_another_device(x, y):
    return torch.zeros((x.float().mT.to("meta") @ y.to("meta")).shape)


def of_what_is_computed_in_float32(x, y):
    return (x.float() + 1).mT @ y


STAY = [
    of_a_view_written,
    of_the_source_written,
    of_strides_that_the_source_has_not,
    of_a_number_divided,
    of_float64,
    of_float32,
    of_what_others_read,
    of_an_index_written,
    of_bits_read_anew,
    of_another_device,
    of_what_is_computed_in_float32,
]


@pytest.mark.parametrize("model", STAY)
def test_others_stay(model):
    before, after = moved(model, *operands())
    assert before == after


def cast_without_gradients(x, y):
    with torch.no_grad():
        wide = x.float()
    return wide.mT @ y


def transposed_without_gradients(x, y):
    wide = x.float()
    with torch.no_grad():
        turned = wide.mT
    return turned @ y


def repeated(x, y):
    return x[:, :1].float().repeat_interleave(3, 1).mT @ y


def read_twice(x, y):
    wide = x.float()
    return wide.mT @ y + wide.flip(-1) @ y


@pytest.mark.parametrize(
    ("model", "moves"),
    [
        (lambda x, y: (x.float() * 0.3).mT @ y, True),
        (cast_without_gradients, False),
        (transposed_without_gradients, False),
        (repeated, False),
        (read_twice, False),
    ],
    ids=["moved", "cast without gradients", "transposed without gradients", "repeated", "read twice"],
)
def test_gradients_are_the_same(model, moves):
    """Sums of gradients stay in float32, and scopes without gradients cut what they cut."""
    graphs = []

    def backend(gm, _):
        before = str(gm.graph)
        cast_late(gm)
        gm.recompile()
        graphs.append(before != str(gm.graph))
        return gm.forward

    def gradients(run):
        inputs = [x.requires_grad_() for x in operands()]
        run(*inputs).square().sum().backward()
        return [x.grad for x in inputs]

    torch._dynamo.reset()
    wanted = gradients(model)
    found = gradients(torch.compile(model, backend=backend))
    assert graphs == [moves]
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
