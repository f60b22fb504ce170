"""Stochastic rounding of gradients is right on average where rounding to nearest gives zeros, and reproducible."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_models import MODELS, inputs, loss_of, vit

from qframework.errors import UnsupportedError
from qframework.kernels.blocks.format import dequantize_blocks_ref, quantize_blocks_ref
from qframework.training import BlockTensor, convert_to_int8_training, restore_float
from qframework.training.linear import Int8Conv1D, Int8Linear

SEEDS = 200
SMALL = 0.003  # of a gradient whose block's step is 1 / 127: less than half of it
ROWS, COLUMNS, OUT = 32, 24, 40


def layer(conv1d: bool = False, stochastic: bool = True) -> nn.Module:
    """Positive weights, so that equal gradients do not cancel."""
    torch.manual_seed(0)
    options = {"output": "float", "stochastic_gradients": stochastic, "block_size": 32}
    made = Int8Conv1D(OUT, COLUMNS, **options) if conv1d else Int8Linear(COLUMNS, OUT, **options)
    with torch.no_grad():
        made.weight.uniform_(0.5, 1)
    return made


def gradient() -> Tensor:
    """The first row is large; the others are small and share its block."""
    grad = torch.full((ROWS, OUT), SMALL)
    grad[0] = 1.0
    return grad


def gradients(made: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the input and the weight, in FP64."""
    x = x.detach().requires_grad_()
    made.zero_grad()
    made(x).backward(grad)
    return x.grad.double(), made.weight.grad.double()


@pytest.mark.parametrize("conv1d", [False, True])
def test_small_rows_are_right_on_average(conv1d: bool) -> None:
    """The mean over seeds is within six deviations of the float gradient; rounding to nearest gives zeros."""
    x, grad = torch.rand(ROWS, COLUMNS) + 0.5, gradient()
    made = layer(conv1d)
    found = []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        found.append(gradients(made, x, grad))
    dx, dw = (torch.stack(each).mean(0) for each in zip(*found, strict=True))
    dw = dw.t() if conv1d else dw

    def in_blocks(t: Tensor) -> Tensor:
        return dequantize_blocks_ref(*quantize_blocks_ref(t.detach(), 32), 32).double()

    weight = in_blocks(made.weight).t() if conv1d else in_blocks(made.weight)
    exact_x, exact_w = grad.double() @ weight, (grad.double()[1:]).t() @ in_blocks(x)[1:]
    deviation = 0.5 / 127 / SEEDS**0.5  # of a value's mean: rounding up or down has half a step at most
    off_x = (dx - exact_x)[1:].abs()
    off_w = (dw - grad[:1].double().t() @ in_blocks(x)[:1] - exact_w).abs()
    assert (off_x <= 6 * deviation * weight.norm(dim=0)).all()
    assert (off_w <= 6 * deviation * in_blocks(x).norm(dim=0)).all()
    nearest_x, nearest_w = gradients(layer(conv1d, stochastic=False), x, grad)
    nearest_w = nearest_w.t() if conv1d else nearest_w
    assert (nearest_x[1:] == 0).all()
    torch.testing.assert_close(nearest_w, grad[:1].double().t() @ in_blocks(x)[:1], rtol=1e-6, atol=1e-6)
    # What rounding to nearest loses is more than the mean may be off: this test can fail.
    assert (exact_x[1:] > 6 * deviation * weight.norm(dim=0)).all()
    assert (exact_w > 6 * deviation * in_blocks(x).norm(dim=0)).all()


def test_no_seed_is_drawn_when_off_or_in_eval_mode() -> None:
    for made in (layer(stochastic=False), layer().eval()):
        x = torch.rand(ROWS, COLUMNS)
        before = torch.get_rng_state()
        gradients(made, x, gradient())
        assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_repeats_it() -> None:
    x, made = torch.rand(ROWS, COLUMNS), layer()

    def of(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return gradients(made, x, gradient())[1]

    assert torch.equal(of(1), of(1))
    assert not torch.equal(of(1), of(2))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same(reentrant: bool) -> None:
    """Dropout after the layer gets the same random numbers."""
    made, drop, x = layer(), nn.Dropout(0.5), torch.rand(ROWS, COLUMNS)

    def both(x: Tensor) -> Tensor:
        return drop(made(x))

    def of(run) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        inner = x.detach().requires_grad_()
        made.zero_grad()
        y = run(inner)
        y.backward(gradient())
        return y.detach(), inner.grad, made.weight.grad

    for got, expected in zip(of(lambda x: checkpoint(both, x, use_reentrant=reentrant)), of(both), strict=True):
        assert torch.equal(got, expected)


def test_compiles_without_graph_breaks_and_draws_new_seeds(fresh_dynamo) -> None:
    made, x = layer(), torch.rand(ROWS, COLUMNS)
    compiled = torch.compile(made, fullgraph=True)

    def of(seed: int) -> Tensor:
        torch.manual_seed(seed)
        inner = x.detach().requires_grad_()
        compiled(inner).backward(gradient())
        return inner.grad

    first, second, again = of(1), of(2), of(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert (first[1:] != 0).any()


# Models


def loss_gradients(model: nn.Module, name: str, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model.zero_grad()
    loss_of(model, inputs(name)).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


LATE = {
    "vit": ("blocks.1.mlp.fc2.weight", "blocks.1.attn.qkv.weight"),
    "gpt2": ("transformer.h.1.mlp.c_proj.weight", "transformer.h.1.attn.c_attn.weight"),
    "llama": ("model.layers.1.mlp.down_proj.weight", "model.layers.1.self_attn.k_proj.weight"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_rounds_where_floats_enter(name: str) -> None:
    """After the last block, and at queries, keys and values; nowhere without the option."""
    options = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) if name == "gpt2" else {}
    model = convert_to_int8_training(MODELS[name](**options), stochastic_gradients=True)
    first, second, again = (loss_gradients(model, name, seed) for seed in (1, 2, 1))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], second[key]) for key in LATE[name])
    convert_to_int8_training(restore_float(model))
    first, second = (loss_gradients(model, name, seed) for seed in (1, 2))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_model_compiles_without_graph_breaks(fresh_dynamo) -> None:
    """Seeds differ from those of eager mode, which draws one per layer."""
    model = convert_to_int8_training(vit(), stochastic_gradients=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    first, second, again = (list(loss_gradients(compiled, "vit", seed).values()) for seed in (1, 2, 1))
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, second))


def test_gradients_after_the_last_block_are_right_on_average() -> None:
    """The gradient of the class token only, next to which those of patches are small."""
    values = BlockTensor(torch.ones(ROWS, OUT, dtype=torch.int8), torch.ones(1, 2), 32, torch.float32)
    total = torch.zeros(ROWS, OUT, dtype=torch.float64)
    for seed in range(SEEDS):
        inner = values.detach().requires_grad_()
        inner.dequantize(torch.tensor([seed])).backward(gradient())
        assert isinstance(inner.grad, BlockTensor)
        total += inner.grad.dequantize().double()
    off = (total / SEEDS - gradient()).abs()[1:]
    assert (off <= 6 * 0.5 / 127 / SEEDS**0.5).all()
    assert off.mean() < 0.3 * SMALL
    inner = values.detach().requires_grad_()
    inner.dequantize().backward(gradient())
    assert (inner.grad.dequantize()[1:] == 0).all()


def test_other_modes_are_refused() -> None:
    with pytest.raises(
        UnsupportedError, match="mode must be 'per_block' for stochastic_gradients=True, got 'per_token'"
    ):
        convert_to_int8_training(vit(), mode="per_token", stochastic_gradients=True)
