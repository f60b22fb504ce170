"""Gradients of a tensor that several operators read: one sum, rounded once, in every kind of graph."""

from __future__ import annotations

import copy
import functools
import operator
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from qframework.kernels.blocks.format import BLOCK_SIZES
from qframework.training import BlockTensor, quantize_blocks
from qframework.training.convert import convert_to_int8_training
from qframework.training.linear import Int8Linear
from qframework.training.norm import Int8LayerNorm, Int8RMSNorm

SUM, ADD, PRODUCT = "block_linear_sum", "block_add", "block_linear"


class Calls(TorchDispatchMode):
    """Counts calls of this package's operators by name."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "qframework":
            self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def linears(count, columns=72, block_size=(1, 128), **options):
    return [Int8Linear(columns, 40 + 8 * i, block_size=block_size, **options) for i in range(count)]


def case(columns=72, block_size=(1, 128)):
    return quantize_blocks(torch.randn(3, 50, columns), block_size).detach().requires_grad_()


def total(layers, x):
    """A scalar whose gradients differ between layers."""
    return sum((layer(x).dequantize() * torch.linspace(-1, 2, layer.out_features)).square().sum() for layer in layers)


def gradient_alone(layer, x):
    """The exact gradient of one layer's input for INT8 operands, from a float result."""
    return torch.autograd.grad(total([layer], x), x)[0]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_joined(block_size, bias):
    """More accurate than the sum of rounded gradients, against the sum of products in FP64."""
    torch.manual_seed(0)
    x, layers = case(block_size=block_size), linears(3, block_size=block_size, bias=bias)
    with Calls() as calls:
        (grad,) = torch.autograd.grad(total(layers, x), x)
        got = grad.dequantize()
    assert isinstance(grad, BlockTensor)
    assert (calls.count[SUM], calls.count[ADD]) == (1, 0)

    alone = [gradient_alone(layer, x) for layer in layers]
    exact = sum(product_in_float64(each) for each in alone)
    added = alone[0]
    for each in alone[1:]:
        added.q  # noqa: B018  (computes and rounds it)
        added = quantize_blocks(added.dequantize() + each.dequantize(), block_size)
    assert (got - exact).norm() < 0.9 * (added.dequantize() - exact).norm()


def test_two_products_are_added():
    torch.manual_seed(0)
    x, layers = case(), linears(2)
    with Calls() as calls:
        (grad,) = torch.autograd.grad(total(layers, x), x)
        got = grad.dequantize()
    assert (calls.count[SUM], calls.count[ADD]) == (0, 1)
    first, second = (gradient_alone(layer, x) for layer in layers[::-1])  # as autograd adds them
    assert torch.equal(got, quantize_blocks(first.dequantize() + second.dequantize(), (1, 128)).dequantize())


def product_in_float64(grad):
    """Of a gradient that is not computed yet."""
    ((a, a_scale, b, b_scale),) = grad.deferred.pairs
    size = grad.block_size
    of_b = size if isinstance(size, int) else (32, size[1])
    dequantize = torch.ops.qframework.block_dequantize
    return dequantize(a, a_scale, size).double() @ dequantize(b, b_scale, of_b).double().T


def test_gradients_of_parameters_do_not_change():
    torch.manual_seed(0)
    x, layers = case(), linears(3, bias=True)
    total(layers, x).backward()
    together = [parameter.grad.clone() for layer in layers for parameter in layer.parameters()]
    alone = [torch.autograd.grad(total([layer], x), list(layer.parameters())) for layer in layers]
    for got, expected in zip(together, [each for layer in alone for each in layer], strict=True):
        assert torch.equal(got, expected)


def test_more_than_three_are_summed_in_groups():
    torch.manual_seed(0)
    x, layers = case(), linears(7, bias=False)
    with Calls() as calls:
        (grad,) = torch.autograd.grad(total(layers, x), x)
        got = grad.dequantize()
    assert (calls.count[SUM], calls.count[PRODUCT], calls.count[ADD]) == (2, 2 * 7 + 1, 2)
    exact = sum(product_in_float64(gradient_alone(layer, x)) for layer in layers)
    assert (got - exact).norm() < 0.02 * exact.norm()


def test_a_lone_linear_has_the_product_of_its_own():
    torch.manual_seed(0)
    x, (layer,) = case(), linears(1)
    (grad,) = torch.autograd.grad(total([layer], x), x)
    (operands,) = grad.deferred.pairs
    q, scale = torch.ops.qframework.block_linear(*operands, None, (1, 128), torch.int8)
    assert torch.equal(grad.q, q)
    assert torch.equal(grad.scale, scale)
    assert grad.deferred is None


def test_with_another_reader_of_the_input():
    """The gradient of a float operation is added to the sum, wherever it comes in between."""
    torch.manual_seed(0)
    x, layers = case(), linears(3, bias=False)
    for place in range(4):

        def loss(x, place=place):
            terms = [total([layer], x) for layer in layers]
            return sum(terms[:place]) + (x.dequantize() * 3).square().sum() + sum(terms[place:])

        (grad,) = torch.autograd.grad(loss(x), x)
        exact = sum(product_in_float64(gradient_alone(layer, x)) for layer in layers) + 18 * x.dequantize()
        assert (grad.dequantize() - exact).norm() < 0.02 * exact.norm()


def test_hooks_see_the_whole_gradient_in_blocks():
    torch.manual_seed(0)
    x, layers, seen = case(), linears(3), []
    y = x * 2.0
    y.retain_grad()
    y.register_hook(lambda grad: seen.append((grad.q.clone(), grad.scale.clone())))
    with Calls() as calls:
        total(layers, y).backward()
    assert calls.count[SUM] == 1
    assert torch.equal(seen[0][0], y.grad.q)
    assert torch.equal(seen[0][1], y.grad.scale)
    assert torch.equal(x.grad.dequantize(), 2 * y.grad.dequantize())


def test_copies_of_a_gradient_that_is_not_computed_yet(tmp_path):
    x, layers = case(), linears(2)

    def made():
        return torch.autograd.grad(total(layers, x), x)[0]

    expected = made().dequantize()
    for grad in (
        made().clone(),
        made().detach(),
        copy.deepcopy(made()),
        made().to(torch.bfloat16),
        made().view(-1, 72),
    ):
        assert torch.equal(grad.dequantize().float().view_as(expected), expected.to(grad.dtype).float())
    torch.save(made(), tmp_path / "grad.pt")
    with torch.serialization.safe_globals([BlockTensor]):
        assert torch.equal(torch.load(tmp_path / "grad.pt").dequantize(), expected)
    assert "BlockTensor(shape=(3, 50, 72)" in repr(made())
    assert not hasattr(made(), "something")


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant):
    torch.manual_seed(0)
    x, layers = case(), linears(3, bias=False)
    (expected,) = torch.autograd.grad(total(layers, x), x)
    checkpoint(lambda x: total(layers, x), x, use_reentrant=reentrant).backward()
    assert torch.equal(x.grad.dequantize(), expected.dequantize())


def test_float_inputs_have_float_gradients():
    torch.manual_seed(0)
    x, layers = torch.randn(40, 72, requires_grad=True), linears(2)
    with Calls() as calls:
        total(layers, x).backward()
    assert type(x.grad) is torch.Tensor
    assert calls.count[SUM] == 0


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "use_cache": False}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).train()
    return convert_to_int8_training(model, skip_slower=False)


def test_a_llama():
    """A sum for q, k and v of each block."""
    model, tokens = llama(), torch.randint(0, 64, (2, 16))
    with Calls() as calls, torch.autocast("cpu", torch.bfloat16):
        model(tokens, labels=tokens).loss.backward()
    assert calls.count[SUM] == 2


def bert():
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**sizes, **dropout, num_attention_heads=2, max_position_embeddings=32)).train()
    return convert_to_int8_training(model, skip_slower=False)


def test_a_bert():
    """Behind each block's sum for q, k and v the gradient of the residual stream, which they read themselves, is added.

    So is that of the MLP's input. The first block's input is float, with a gradient in blocks like all others.
    """
    model, tokens = bert(), torch.randint(0, 64, (2, 16))
    with Calls() as calls, torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, labels=tokens).loss
        forward = calls.count[ADD]
        loss.backward()
    assert (calls.count[SUM], calls.count[ADD] - forward) == (2, 4)


def test_a_sum_with_a_residual_gradient():
    """Its value, and in whatever order autograd adds; two residual gradients are added up."""
    torch.manual_seed(0)
    x, layers = case(), linears(3, bias=False)
    other, more = (quantize_blocks(torch.randn(3, 50, 72)) for _ in range(2))
    products = [gradient_alone(layer, x) for layer in layers]
    exact = sum(map(product_in_float64, products)) + other.dequantize()
    for place in range(4):
        parts = [gradient_alone(layer, x) for layer in layers]
        parts.insert(place, other)
        with Calls() as calls, torch.no_grad():
            grad = functools.reduce(operator.add, parts)
            got = grad.dequantize()
        assert (calls.count[SUM], calls.count[ADD]) == (1, 1)
        with torch.no_grad():
            again = (functools.reduce(operator.add, parts) + more).dequantize()
        assert (got - exact).norm() < 0.01 * exact.norm()
        assert (again - exact - more.dequantize()).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("build", "expected"), [(llama, (2, 2)), (bert, (2, 4))])
def test_compiled(fresh_dynamo, autocast, build, expected):
    """Llama's gate and up are added; its norms add the residual stream's gradient."""
    graphs = []

    def backend(graph, inputs):
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.aot_autograd import make_boxed_func

        def keep(graph, inputs):
            graphs.append(Counter(getattr(node.target, "_opname", "") for node in graph.graph.nodes))
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(graph, inputs)

    model, tokens = build(), torch.randint(0, 64, (2, 16))
    grads = {}
    for name, run in {"eager": model, "compiled": torch.compile(model, backend=backend)}.items():
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            run(tokens, labels=tokens).loss.backward()
        grads[name] = [parameter.grad for parameter in model.parameters()]
    _, backward = graphs
    assert (backward[SUM], backward[ADD]) == expected
    for got, expected in zip(grads["compiled"], grads["eager"], strict=True):
        assert (got - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("kind", [Int8LayerNorm, Int8RMSNorm])
@pytest.mark.parametrize("order", [1, -1])
def test_a_residual_stream_is_added_by_its_norm(kind, order):
    """``x + layer(norm(x))``: one rounding less than adding the norm's gradient in blocks."""
    torch.manual_seed(0)
    x, norm, (layer,) = case(), kind(72, block_size=(1, 128)), linears(1)
    weights = torch.randn(3, 50, 72) / 5  # both gradients are about as large

    def loss(x):
        terms = [total([layer], norm(x)), (x * 2.0).dequantize().mul(weights).sum()]
        return sum(terms[::order])

    with Calls() as calls:
        (grad,) = torch.autograd.grad(loss(x), x)
        got = grad.dequantize()
    assert (calls.count["block_norm_gradient"], calls.count[ADD]) == (1, 0)

    (of_norm,) = torch.autograd.grad(total([layer], norm(x)), x)
    operands = of_norm.deferred.operands
    dy, values = (torch.ops.qframework.block_dequantize(*operands[i : i + 2], (1, 128)).double() for i in (0, 2))
    values.requires_grad_()
    centered = values - values.mean(-1, keepdim=True) if kind is Int8LayerNorm else values
    eps = norm.eps or torch.finfo(torch.float32).eps
    normal = centered * (centered.square().mean(-1, keepdim=True) + eps).rsqrt()
    (exact,) = torch.autograd.grad(normal * norm.weight.detach(), values, dy)
    (of_stream,) = torch.autograd.grad((x * 2.0).dequantize().mul(weights).sum(), x)
    exact = exact + of_stream.dequantize()
    added = quantize_blocks(of_norm.dequantize() + of_stream.dequantize(), (1, 128)).dequantize()
    assert (got - exact).norm() < 0.9 * (added - exact).norm()


@pytest.mark.parametrize("kind", [Int8LayerNorm, Int8RMSNorm])
def test_weights_may_change_before_a_gradient_is_read(kind):
    """As in an optimizer that steps in the backward pass; FSDP2 even frees them."""
    torch.manual_seed(0)
    x, norm, layers = case(), kind(72, block_size=(1, 128)), linears(2, keep_weight=False)

    def gradient():
        return torch.autograd.grad(total(layers, x), x)[0], torch.autograd.grad(total([layers[0]], norm(x)), x)[0]

    expected = [each.dequantize() for each in gradient()]
    later = gradient()
    with torch.no_grad():
        for layer in (norm, *layers):
            layer.weight.mul_(3)
    for got, wanted in zip(later, expected, strict=True):
        assert torch.equal(got.dequantize(), wanted)


def behind_a_norm(norm, layer):
    x = case()
    y = norm(x)
    return torch.autograd.grad(total([layer], y), (x, y))


def of_an_input(norm, layer):
    x = case()
    return torch.autograd.grad(total([layer], norm(x)), x)[0], x


def behind_a_linear(norm, layer):
    x, between = case(), linears(3)[2]
    y = between(x)
    return torch.autograd.grad(total(linears(1, columns=56), y), (x, y))


def behind_a_sum_of_linears(norm, layer):
    x, y = case(), case()
    (of_x,), (of_y,) = (torch.autograd.grad(total([layer], each), each) for each in (x, y))
    gradient, operand = behind_a_linear(norm, layer)
    with torch.no_grad():
        return of_x + gradient + of_y, operand


def of_a_residual_stream(norm, layer):
    x = case()
    (of_norm,), (of_stream,) = (torch.autograd.grad(total([layer], f(x)), x) for f in (norm, nn.Identity()))
    with torch.no_grad():
        return of_stream + of_norm, of_stream


WRITES = {
    "zero_": torch.zero_,
    "to a view in blocks": lambda x: x.detach().view(-1, x.shape[-1]).mul_(3),
    "to a view of a part": lambda x: x[:, :30].neg_(),
    "add_ to itself": lambda x: x.add_(x),
    "in a compiled graph": lambda x: torch.compile(lambda y: y.mul_(0.5), backend="aot_eager", dynamic=False)(x),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    "made", [behind_a_norm, of_an_input, behind_a_linear, behind_a_sum_of_linears, of_a_residual_stream]
)
def test_what_a_gradient_reads_may_be_written_to(made, write):
    """Between backward pass and reading: an optimizer of inputs, gradients that are clipped in place."""
    grads = []
    for writes in (False, True):
        torch.manual_seed(0)
        norm, (layer,) = Int8LayerNorm(72, block_size=(1, 128)), linears(1)
        gradient, operand = made(norm, layer)
        assert gradient.deferred is not None
        if writes:
            with torch.no_grad():
                WRITES[write](operand)
        grads.append(gradient.dequantize())
    assert torch.equal(*grads)


def test_gradients_that_are_gone_are_not_remembered():
    torch.manual_seed(0)
    x, norm, (layer,) = case(), Int8LayerNorm(72, block_size=(1, 128)), linears(1)
    for _ in range(4):
        torch.autograd.grad(total([layer], norm(x)), x)
    assert len(x.memory.readers) == 1


def test_errors_of_attributes_are_not_hidden():
    with pytest.raises(AttributeError, match="on non-CUDA tensor"):
        case().__cuda_array_interface__  # noqa: B018


def test_a_compiled_function_reads_attributes(fresh_dynamo):
    """Also of a gradient that is not computed yet."""

    def read(x):
        assert hasattr(x, "q")
        assert not hasattr(x, "another")
        return x.q.float() * x.tag + x.block_size[1]

    torch.manual_seed(0)
    x, layers = case(), linears(3)
    compiled = torch.compile(read, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        (grad,) = torch.autograd.grad(total(layers, x), x)
        grad.tag = 2
        assert grad.deferred is not None
        got = compiled(grad)
        assert torch.equal(got, grad.q.float() * 2 + 128)


def test_an_optimizer_step_with_plain_modules_between():
    """Linears of blocks behind a float module, which read one quantized input each: nothing is joined."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(72, 72), *linears(1))
    with Calls() as calls:
        model(torch.randn(40, 72)).dequantize().sum().backward()
    assert calls.count[SUM] == 0
    assert all(parameter.grad is not None for parameter in model.parameters())
