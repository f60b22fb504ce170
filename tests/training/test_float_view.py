"""Views and aliases of a BlockTensor and the tensor itself hold the same values, as in PyTorch."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qframework.errors import UnsupportedError
from qframework.training import BlockTensor, quantize_blocks
from qframework.training.norm import Int8LayerNorm

Program = Callable[[Tensor], Any]


def both(*programs: Program) -> Program:
    def run(x: Tensor) -> None:
        for program in programs:
            program(x)

    return run


def set_tokens(x: Tensor) -> None:
    x[:, 1:] = 0


def set_data(x: Tensor) -> None:
    x.data[:, :3] = 0.5


def set_by_index(x: Tensor) -> None:
    x[torch.tensor([0]), :2] = 0.5


def write_to_parts(x: Tensor) -> None:
    for part in x.unbind(0):
        part.mul_(0.5)


# What PyTorch allows where gradients are on, and what it allows elsewhere only.
WRITES: dict[str, Program] = {
    "setitem": set_tokens,
    "index_put": set_by_index,
    "mul": lambda x: x[:, :5].mul_(0.0),
    "view of a slice": lambda x: x[1].view(-1)[7:40].mul_(0.5),
    "transposed": lambda x: x.transpose(1, 2)[..., 7:10].zero_(),
    "select": lambda x: x.select(1, 0).fill_(0.5),
    "narrow": lambda x: x.narrow(2, 3, 9).neg_(),
    "view": lambda x: x.view(2, 33, 8, 8).add_(0.5),
    "view of a view": lambda x: x[:, :7][..., 5:][0].mul_(0.25),
    "view of leading dimensions": lambda x: x.view(66, 64)[:40].mul_(0.5),
    "unsqueeze": lambda x: x.unsqueeze(0)[..., :3].mul_(0.5),
    "copy": lambda x: x[0].copy_(x[1]),
    "two views": both(lambda x: x[:, :2].mul_(0.5), lambda x: x[:, 1:3].neg_()),
    "in place as a whole": both(lambda x: x.view(66, 64).mul_(0.5), lambda x: x[:, 1:3].neg_()),
}
UNTRACKED: dict[str, Program] = {
    "detach": lambda x: x.detach()[:, :3].mul_(0.5),
    "data": set_data,
    "unbind": write_to_parts,
    "split": lambda x: x.split(32, -1)[1].mul_(0.5),
    "out": lambda x: torch.mul(x[:, :3], 0.5, out=x[:, :3]),
    "foreach": lambda x: torch._foreach_mul_([x[:, :3], x[:, 5:]], 0.5),
}


def blocks_and_floats() -> tuple[Tensor, Tensor]:
    x = quantize_blocks(torch.randn(2, 33, 64))
    return x, x.dequantize()


def step(*tensors: Tensor) -> float:
    """The largest distance between adjacent INT8 values in ``tensors``."""
    return max(float(x.detach().abs().max()) for x in tensors) / 127


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", [*WRITES, *UNTRACKED])
def test_a_write_to_a_view_changes_the_tensor(name: str, mode: Callable[[], AbstractContextManager[None]]) -> None:
    with mode():
        x, wanted = blocks_and_floats()
        before = wanted.clone()
        for each in (x, wanted):
            {**WRITES, **UNTRACKED}[name](each)
        assert isinstance(x, BlockTensor)
        for got in (x.dequantize(), x * 1.0, x.view(66, 64).view(2, 33, 64), x[:, :20], x.sum(0)):
            exact = wanted[:, :20] if got.shape[1] == 20 else wanted.sum(0) if got.ndim == 2 else wanted
            # As many half steps as values are added up, for each time that they were quantized.
            assert (got - exact).abs().max() <= (3 if got.ndim == 3 else 6) * step(before, wanted) / 2


@pytest.mark.parametrize("name", WRITES)
def test_gradients_through_a_write_to_a_view(name: str) -> None:
    """Gradients equal PyTorch's up to the steps of a gradient in blocks."""
    x = torch.randn(2, 33, 64)
    weight = torch.randn(2, 33, 64)

    def gradient(enter: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = x.clone().requires_grad_()
        inside = enter(leaf) * 2.0
        WRITES[name](inside)
        (inside * weight).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    got, wanted = gradient(quantize_blocks), gradient(lambda leaf: leaf * 1.0)
    assert (got - wanted).abs().max() <= 4 * step(wanted, weight)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.mul_(0.5),
        lambda x: x.detach().mul_(0.5),
        lambda x: x.data.mul_(0.5),
        lambda x: x.view(66, 64).mul_(0.5),
        lambda x: x[:, 1:].mul_(0.5),
        lambda x: x.mul_(2.0).mul_(0.25),
    ],
)
def test_a_write_to_a_tensor_changes_its_views(write: Program, mode: Any) -> None:
    with mode():
        x, floats = blocks_and_floats()
        early, wanted = x[:, :3].transpose(1, 2), floats[:, :3].transpose(1, 2)
        before = floats.clone()
        write(x), write(floats)
        assert (early * 1.0 - wanted).abs().max() <= 2 * step(before)
        assert early.equal(x[:, :3].transpose(1, 2))


def test_a_write_drops_the_statistics_of_aliases() -> None:
    """Statistics of an addition belong to the values, which all aliases share."""
    torch.manual_seed(0)
    x = quantize_blocks(torch.randn(2, 33, 64))
    for alias in (lambda x: x.detach(), lambda x: x.view(66, 64), lambda x: x):
        total = x + x
        other = alias(total)
        total.mul_(100.0)
        assert other.statistics is None
        norm = Int8LayerNorm(64)
        exact = nn.functional.layer_norm(total.detach().dequantize(), (64,)).view(other.shape)
        assert (norm(other).dequantize() - exact).abs().max() < 0.1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["setitem", "view of leading dimensions", "two views", "data", "detach"])
def test_compiled(name: str, backend: str, fresh_dynamo: None) -> None:
    write = {**WRITES, **UNTRACKED}[name]

    def program(x: Tensor) -> Tensor:
        inside = quantize_blocks(x) * 2.0
        early = inside[:, :3]
        write(inside)
        return inside.dequantize() + nn.functional.pad(early, (0, 0, 0, 30))

    x = torch.randn(2, 33, 64, requires_grad=True)
    wanted = program(x)
    got = torch.compile(program, backend=backend, fullgraph=True)(x)
    assert torch.equal(got, wanted)
    grads = [torch.autograd.grad(each.square().sum(), x)[0] for each in (got, wanted)]
    assert (grads[0] - grads[1]).abs().max() <= 2 * step(grads[1])


def test_a_view_can_be_used_as_any_tensor() -> None:
    x = quantize_blocks(torch.randn(2, 33, 64))
    view, wanted = x[:, 1:3], x.dequantize()[:, 1:3]
    buffer = io.BytesIO()
    torch.save(view, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    for other in (copy.deepcopy(view), pickle.loads(pickle.dumps(view)), loaded, view.clone(), view.contiguous()):
        assert type(other) is Tensor
        assert torch.equal(other, wanted)
    assert np.array_equal(np.asarray(view), wanted.numpy())
    assert view.tolist() == wanted.tolist()
    assert view.data_ptr() != 0
    assert "FloatView(tensor(" in repr(view)


def test_a_graph_refuses_to_write_to_a_view_that_is_its_input(fresh_dynamo: None) -> None:
    """The graph reads the current blocks, but writing to them is refused."""
    x = quantize_blocks(torch.randn(2, 33, 64))
    view = x[:, :3]
    triple = torch.compile(lambda view: view * 3.0, backend="aot_eager")
    triple(view)
    x.mul_(0.5)
    assert torch.equal(triple(view), x[:, :3] * 3.0)
    with pytest.raises(
        Exception, match=r"aten::mul_.Tensor: a compiled graph must not write to its input, a view of a BlockTensor"
    ):
        torch.compile(lambda view: view.mul_(3.0), backend="aot_eager")(view)


def set_data_of(x: Tensor) -> None:
    x.data = torch.ones(x.shape)


@pytest.mark.parametrize("of", [lambda x: x, lambda x: x[:3]])
@pytest.mark.parametrize(
    "change", [set_data_of, lambda x: x.set_(torch.ones(x.shape)), lambda x: x.t_(), lambda x: x.unsqueeze_(0)]
)
def test_replacing_memory_or_shape_in_place_is_refused(of: Program, change: Program) -> None:
    x = of(quantize_blocks(torch.randn(33, 64)))
    with pytest.raises(UnsupportedError, match=r"(Block|FloatView).* must "):
        change(x)
