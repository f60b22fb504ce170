"""BlockTensor under torch.compile: whole graphs, the same values, INT8 saved for the backward pass."""

from __future__ import annotations

import pytest
import torch
from block_models import Block, BlockLinear, Residual, loss_and_gradients
from torch import nn
from torch.nn import functional as F

from qframework.training import BlockTensor, fallbacks, new_seed, quantize_blocks

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def assert_close(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Equal up to the order of float sums, which changes no INT8 value here."""
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("recompute", [None, False], ids=["saved", "checkpointed"])
@pytest.mark.parametrize(("backend", "block_size"), [("aot_eager", 32), ("inductor", 32), ("inductor", (1, 128))])
def test_whole_graph(backend, block_size, recompute, device):
    model, x = Residual(block_size=block_size).to(device), torch.randn(2, 5, 40, device=device)
    expected = loss_and_gradients(model, model, x)
    fallbacks.clear()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert_close(loss_and_gradients(lambda x: compiled(x, recompute), model, x), expected)
    assert not fallbacks


@pytest.mark.parametrize("block_size", [32, (1, 128)])
def test_any_batch_and_length(block_size):
    model = Residual(block_size=block_size)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in ((2, 5), (3, 40), (2, 70)):
        x = torch.randn(*rows, 40)
        assert_close(loss_and_gradients(compiled, model, x), loss_and_gradients(model, model, x))


def test_float_operators_inside():
    """In third-party models operators without an INT8 implementation compute in float, in the same graph."""

    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.norm = Block(40), nn.LayerNorm(40)

        def forward(self, x):
            x = self.block(quantize_blocks(x))
            x = x * torch.sigmoid(x) + x.transpose(0, 1).mean(1)
            return F.silu(self.norm(x))

    model, x = Strange(), torch.randn(2, 5, 40)
    expected = loss_and_gradients(model, model, x)
    assert_close(loss_and_gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), model, x), expected)
    assert fallbacks["aten::transpose.int"] >= 1


def test_writing_in_place():
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = BlockLinear(40, 40), BlockLinear(40, 40)

        def forward(self, x):
            x = quantize_blocks(x)
            y = self.first(x)
            y += x
            y = self.second(y)
            y.clamp_(min=-1)
            return y.dequantize()

    model, x = InPlace(), torch.randn(2, 5, 40)
    expected = loss_and_gradients(model, model, x)
    assert_close(loss_and_gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), model, x), expected)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def double(x):
        x += x

    blocks = quantize_blocks(x)
    exact = 2 * blocks.dequantize()
    double(blocks)
    assert torch.equal(blocks.dequantize(), exact), "an operand of the graph"


@pytest.mark.parametrize("block_size", [32, (1, 128)])
def test_graphs_pass_blocks_to_each_other(block_size):
    """With each block compiled separately, blocks and their gradients pass from graph to graph."""
    model, x = Residual(block_size=block_size), torch.randn(2, 5, 40)
    expected = loss_and_gradients(model, model, x)
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    assert_close(loss_and_gradients(model, model, x), expected)


def test_graphs_save_int8():
    """No float tensor of an activation's size passes from the forward to the backward graph."""
    from functorch.compile import aot_module_simplified, make_boxed_func

    saved = []

    def forward_compiler(graph, example_inputs):
        (output,) = graph.graph.find_nodes(op="output")
        placeholders = {node for node in graph.graph.nodes if node.op == "placeholder"}
        kept = [node for node in output.args[0] if isinstance(node, torch.fx.Node) and node not in placeholders]
        saved.extend(node.meta["val"] for node in kept)
        return make_boxed_func(graph)

    def backend(graph, example_inputs):
        return aot_module_simplified(graph, example_inputs, fw_compiler=forward_compiler, bw_compiler=plain)

    def plain(graph, example_inputs):
        return make_boxed_func(graph)

    model, x = Residual(depth=3), torch.randn(2, 64, 40, requires_grad=True)
    torch.compile(model, fullgraph=True, backend=backend)(x).sum().backward()
    floats = [value for value in saved if value.is_floating_point() and value.numel() >= x.numel()]
    assert [tuple(value.shape) for value in floats] == [tuple(x.shape)], "the result alone"
    assert sum(value.dtype == torch.int8 for value in saved) >= 3 * 3


def test_stochastic_rounding_draws_a_new_seed_in_each_call(device):
    def rounded(x):
        return quantize_blocks(x, 32, new_seed(x.device)).dequantize()

    x = torch.randn(64, 64, device=device)
    compiled = torch.compile(rounded, fullgraph=True, backend="aot_eager")
    first, second = compiled(x), compiled(x)
    assert not torch.equal(first, second)
    step = x.abs().max() / 127
    assert (first - x).abs().max() <= 1.001 * step


@pytest.mark.parametrize("block_size", [32, (1, 128)])
def test_blocks_are_an_input_and_a_result(block_size):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def double(x):
        assert isinstance(x, BlockTensor)
        return x + x

    x = quantize_blocks(torch.randn(4, 40), block_size).requires_grad_()
    y = double(x)
    assert isinstance(y, BlockTensor)
    assert y.statistics is not None
    assert y.block_size == block_size
    grad = quantize_blocks(torch.randn(4, 40), block_size)
    for gradient in (grad, grad + grad):  # the second with statistics, which the graph does not expect
        x.grad = None
        double(x).backward(gradient)
        assert isinstance(x.grad, BlockTensor)
        assert torch.equal(x.grad.dequantize(), (gradient + gradient).dequantize())


@pytest.mark.parametrize("given", [(1, 128), 64])
def test_a_gradient_in_other_blocks_is_quantized_again(given):
    """A compiled backward pass expects gradients in the blocks of its forward pass."""

    @torch.compile(fullgraph=True, backend="aot_eager")
    def double(x):
        return x + x

    expected = 64 if given == (1, 128) else (1, 128)
    x = quantize_blocks(torch.randn(70, 140), expected).requires_grad_()
    grad = quantize_blocks(torch.randn(70, 140), given)
    double(x).backward(grad)
    again = quantize_blocks(grad.dequantize(), expected)
    assert x.grad.block_size == expected
    assert torch.equal(x.grad.dequantize(), (again + again).dequantize())
