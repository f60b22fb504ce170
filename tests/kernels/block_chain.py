"""The operators of a GPT block in INT8, forward and backward, one after the other: every result of every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

import qframework.training  # noqa: F401  registers the operators
from qframework.kernels.blocks.format import BlockSize, block_shape, operand_size, transposed_size

Step = tuple[str, tuple[Tensor, ...]]
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
POISON = 99  # in place of an int8; floats get NaN


@dataclass
class Chain:
    """Input, gradient and weights, random and seeded; ``steps()`` computes what they make, from scratch."""

    tokens: int
    hidden: int
    block_size: BlockSize
    device: str
    made: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(0)

        def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
            values = torch.empty(shape, device=self.device).normal_(generator=generator)
            return (values * scale).to(dtype)

        n, c = self.tokens, self.hidden
        self.x, self.residual, self.dy = (normal(n, c, dtype=torch.bfloat16) for _ in range(3))
        self.qkv, self.fc1, self.fc2 = normal(3 * c, c), normal(4 * c, c), normal(c, 4 * c, scale=0.5)
        self.qkv_bias, self.fc1_bias, self.fc2_bias = normal(3 * c), normal(4 * c), normal(c)
        self.weight, self.bias = normal(c), normal(c)

    def keep(self, name: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.made.append((name, tensors))
        return tensors

    def steps(self) -> list[Step]:
        """Each step's name and results, in order."""
        ops, keep, size = torch.ops.qframework, self.keep, block_shape(self.block_size)
        other, over_tokens = operand_size(self.block_size), transposed_size(self.block_size)
        self.made = []
        x = keep("quantize x", *ops.block_quantize(self.x, size))
        residual = keep("quantize residual", *ops.block_quantize(self.residual, size))
        *z, statistics = keep("add", *ops.block_add(*x, *residual, size, True))
        norm = ops.block_layer_norm(*z, self.weight, self.bias, 1e-5, size, statistics)
        *y, mean, rstd = keep("layer_norm", *norm)
        w = keep("quantize qkv", *ops.block_quantize(self.qkv, other))
        keep("qkv", ops.block_linear(*y, *w, self.qkv_bias, size, torch.bfloat16)[0])
        w = keep("quantize fc1", *ops.block_quantize(self.fc1, other))
        h = keep("fc1", *ops.block_linear(*y, *w, self.fc1_bias, size, torch.int8))
        g = keep("gelu", *ops.block_activation(*h, "gelu_tanh", size))
        w = keep("quantize fc2", *ops.block_quantize(self.fc2, other))
        out = keep("fc2", *ops.block_linear(*g, *w, self.fc2_bias, size, torch.int8))
        out = keep("add fc2", *ops.block_add(*z, *out, size, True))
        keep("dequantize", ops.block_dequantize(*out[:2], size, torch.bfloat16))

        *dy, dyt, dyt_scale = keep("quantize dy both ways", *ops.block_quantize_both(self.dy, size))
        w = keep("quantize fc2 both ways", *ops.block_quantize_both(self.fc2, other))[2:]
        dg = keep("dX of fc2", *ops.block_linear(*dy, *w, None, size, torch.int8))
        gt = keep("transpose gelu", *ops.block_transpose(*g, size))
        keep("dW of fc2", ops.block_linear(dyt, dyt_scale, *gt, None, over_tokens, torch.float32)[0])
        dh = keep("gelu backward", *ops.block_activation_backward(*dg, *h, "gelu_tanh", size))
        dht = keep("transpose dh", *ops.block_transpose(*dh, size))
        w = keep("quantize fc1 both ways", *ops.block_quantize_both(self.fc1, other))[2:]
        d = keep("dX of fc1", *ops.block_linear(*dh, *w, None, size, torch.int8))
        keep("dX of fc1 in 16 bit", ops.block_linear(*dh, *w, None, size, torch.bfloat16)[0])
        yt = keep("transpose y", *ops.block_transpose(*y, size))
        keep("dW of fc1", ops.block_linear(*dht, *yt, None, over_tokens, torch.float32)[0])
        keep("sum of rows", ops.block_sum_rows(*dh, size))
        d = keep("layer_norm backward", *ops.block_layer_norm_backward(*d, *z, self.weight, mean, rstd, size))
        keep("add dy", *ops.block_add(*d[:2], *dy, size, False))
        return self.made


def differences(steps: list[Step], first: list[Step]) -> Iterator[str]:
    """Where results are not bit for bit what they were the first time, in the order of the steps."""
    pairs = [
        (name, i, a, b)
        for (name, x), (_, y) in zip(steps, first, strict=True)
        for i, (a, b) in enumerate(zip(x, y, strict=True))
    ]
    apart = torch.stack([(bits(a) != bits(b)).any() for _, _, a, b in pairs]).tolist()  # one wait for all of them
    for (name, i, a, b), differs in zip(pairs, apart, strict=True):
        if differs:
            yield f"{name}, result {i}, {tuple(a.shape)} {a.dtype}: {describe(a, b)}"


def describe(a: Tensor, b: Tensor) -> str:
    """How many values, between which indices, and the first of them."""
    where = torch.nonzero(bits(a) != bits(b))
    low, high, first = where.amin(0).tolist(), where.amax(0).tolist(), tuple(where[0])
    no_numbers = int((~torch.isfinite(a)).sum()) if a.is_floating_point() else 0
    return f"{len(where)} differ, {no_numbers} not finite, in {low} to {high}, {a[first].item()} was {b[first].item()}"


def bits(x: Tensor) -> Tensor:
    return x.view(INTEGERS[x.element_size()])


def poison(steps: list[Step]) -> None:
    """Overwrite all results, so that whoever gets their memory and does not write it is found out."""
    for _, tensors in steps:
        for x in tensors:
            x.fill_(float("nan") if x.is_floating_point() else POISON)
