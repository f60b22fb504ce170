"""GPT-2 whose blocks round to the block format in plain PyTorch: no INT8 operator, no kernel, ordinary float tensors.

It follows the data flow of INT8 training (Jetfire, sections 4 and 5): results of operators are rounded in the forward
pass, gradients of their inputs in the backward pass, and products are those of the rounded values, in the dtype of the
model. With ``qframework`` it shares only the names of block sizes. Activations and gradients may have different blocks,
or none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demos.training_tasks import TextTask
from qframework.kernels.blocks.format import BlockSize, block_shape, is_square, operand_size, transposed_size

STEPS = 127  # on each side of zero
Size = BlockSize | None  # None: not rounded


def rounded(x: Tensor, size: Size) -> Tensor:
    """``x (..., C)``, as rows, rounded to 255 multiples of a step for each block."""
    if size is None or x.numel() == 0:
        return x
    (height, width), columns = block_shape(size), x.shape[-1]
    rows = x.numel() // columns
    padded = F.pad(x.reshape(rows, columns), (0, -columns % width, 0, -rows % height))
    blocks = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width)
    step = (blocks.abs().amax((1, 3), keepdim=True) / STEPS).float().to(x.dtype)
    whole = torch.where(step > 0, torch.round(blocks / step), 0.0) * step
    return whole.reshape(padded.shape)[:rows, :columns].reshape(x.shape)


def turned(x: Tensor, size: Size) -> Tensor:
    """The rows of ``x`` as an operand of a product over rows, in other blocks where they are not square."""
    rows = x.reshape(-1, x.shape[-1])
    return rounded(rows, size) if size is None or is_square(size) else rounded(rows.mT, transposed_size(size)).mT


@dataclass(frozen=True)
class Sizes:
    """Blocks of activations, with the weights they are multiplied by, and of gradients."""

    activations: Size
    gradients: Size


class Round(torch.autograd.Function):
    """Rounds in the forward pass, in the backward pass, or in both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Size, backward: Size) -> Tensor:
        ctx.backward_size = backward
        return rounded(x, forward).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return rounded(grad, ctx.backward_size), None, None


class Product(torch.autograd.Function):
    """``x @ weight + bias`` of operands that it rounds, and its gradients, also of rounded operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, sizes: Sizes) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        w = rounded(weight.mT, _operand(sizes.activations))
        return rounded(x, sizes.activations) @ w.mT + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (x, weight), sizes = ctx.saved_tensors, ctx.sizes
        w = rounded(weight, _operand(sizes.gradients))
        of_x = rounded(grad, sizes.gradients) @ w.mT
        of_weight = turned(x, sizes.activations).mT @ turned(grad, sizes.gradients)
        return of_x, of_weight, grad.flatten(0, -2).sum(0), None


def _operand(size: Size) -> Size:
    return None if size is None else operand_size(size)


class SimulatedGPT(nn.Module):
    """A GPT-2 of transformers, without dropout, whose blocks round. Its parameters are those of ``gpt``."""

    def __init__(self, gpt: Any, sizes: Sizes) -> None:
        super().__init__()
        self.gpt, self.sizes = gpt, sizes

    def forward(self, tokens: Tensor) -> Any:
        """What transformers' model returns, as far as the loss needs it."""
        inside = self.gpt.transformer
        hidden = inside.wte(tokens) + inside.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        hidden = self._after(hidden)
        for block in inside.h:
            hidden = self._block(block, hidden)
        hidden = inside.ln_f(self._before(hidden))
        return _Logits(self.gpt.lm_head(hidden))

    def _block(self, block: Any, hidden: Tensor) -> Tensor:
        hidden = self._before(hidden)  # the sum of two gradients
        hidden = self._after(hidden + self._attention(block.attn, self._norm(block.ln_1, hidden)))
        hidden = self._before(hidden)
        inner = self._after(self._product(block.mlp.c_fc, self._norm(block.ln_2, hidden)))
        inner = self._after(F.gelu(self._before(inner), approximate="tanh"))
        return self._after(hidden + self._after(self._product(block.mlp.c_proj, inner)))

    def _attention(self, attention: Any, x: Tensor) -> Tensor:
        """In floats, between linears in blocks."""
        heads = attention.num_heads
        queries, keys, values = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in self._product(attention.c_attn, x).chunk(3, dim=-1)
        )
        found = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        joined, proj = found.transpose(1, 2).flatten(2), attention.c_proj
        return self._after(Product.apply(joined, proj.weight, proj.bias, self.sizes))

    def _product(self, linear: Any, x: Tensor) -> Tensor:
        return Product.apply(self._before(x), linear.weight, linear.bias, self.sizes)

    def _norm(self, norm: Any, x: Tensor) -> Tensor:
        """Its gradient is rounded with that of the residual stream, to which it is added."""
        return self._after(F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps))

    def _after(self, x: Tensor) -> Tensor:
        """A result, rounded."""
        return Round.apply(x, self.sizes.activations, None)

    def _before(self, x: Tensor) -> Tensor:
        """An operand whose gradient is rounded."""
        return Round.apply(x, None, self.sizes.gradients)


@dataclass
class _Logits:
    logits: Tensor


@dataclass(frozen=True)
class SimulatedTask(TextTask):
    """``TextTask`` with a SimulatedGPT of the same initial weights."""

    sizes: Sizes = Sizes(None, None)

    @property
    def settings(self) -> dict[str, Any]:
        """With the sizes of blocks."""
        return {**super().settings, "sizes": [self.sizes.activations, self.sizes.gradients]}

    def build(self, seed: int) -> nn.Module:
        """Training it rounds as INT8 training does."""
        return SimulatedGPT(super().build(seed), self.sizes)
