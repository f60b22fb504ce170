"""Gradients in blocks that are computed when they are first read, after autograd has added others to them.

Autograd adds the gradients of a tensor that several operations read, two at a time, wherever these are: in modules of
third-party models, in eager mode and in graphs. A sum of gradients that are not computed yet is another one of these,
so that one operator computes the whole sum in float32 and rounds it once::

    of q, k and v            Q(dq Wq + dk Wk + dv Wv)      instead of    Q(Q(Q(dq Wq) + Q(dk Wk)) + Q(dv Wv))
    of a residual stream     Q(norm'(dy) + dx)             instead of    Q(Q(norm'(dy)) + dx)

Where q, k and v read the residual stream itself, as in BERT, dx is added to their rounded sum.

What nothing is added to is computed as ever, and what reads a BlockTensor is computed before this is written to. Other
operands must stay as they are until then: not parameters, which FSDP2 frees and optimizers may change behind a layer's
backward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from qframework.kernels.blocks.format import BlockSize
from qframework.kernels.blocks.linear.arguments import MAX_PAIRS

Blocks = tuple[Tensor, Tensor]
Product = tuple[Tensor, Tensor, Tensor, Tensor]
"""The operands of a product: a, its scale, b and its scale, as ``block_linear`` takes them."""
MIN_PAIRS = 3  # that one kernel sums: on an H100, two products and an addition are faster than a sum of two


class Deferred(Protocol):
    """A gradient that is not computed yet."""

    @property
    def reads(self) -> tuple[Any, ...]:
        """The memory of the BlockTensors that it reads."""

    @property
    def device(self) -> torch.device:
        """Where it will be."""

    def compute(self, block_size: BlockSize) -> Blocks:
        """The gradient in blocks."""

    def plus(self, other: Any) -> Deferred | None:
        """The sum with a BlockTensor of the same shape and blocks, or None if it does not take it."""


class Products(NamedTuple):
    """A sum of products, the gradients of a tensor that linears read, and one more gradient of it."""

    pairs: tuple[Product, ...]
    reads: tuple[Any, ...] = ()
    added: Blocks | None = None

    @property
    def device(self) -> torch.device:
        return self.pairs[0][0].device

    def compute(self, block_size: BlockSize) -> Blocks:
        """Rounded after every MAX_PAIRS products; fewer than MIN_PAIRS are each rounded."""
        together = MAX_PAIRS if len(self.pairs) >= MIN_PAIRS else 1
        first, rest = self.pairs[:together], self.pairs[together:]
        if len(first) == 1:
            total = torch.ops.qframework.block_linear(*first[0], None, block_size, torch.int8)
        else:
            operands = [operand for pair in first for operand in pair]
            total = torch.ops.qframework.block_linear_sum(operands, block_size, torch.int8)
        if rest:
            *total, _ = torch.ops.qframework.block_add(*total, *Products(rest).compute(block_size), block_size)
        if self.added is not None:
            *total, _ = torch.ops.qframework.block_add(*total, *self.added, block_size)
        return tuple(total)

    def plus(self, other: Any) -> Products | None:
        """Joined with the products of another sum, or with one gradient that is computed."""
        more = other.deferred
        if isinstance(more, Products) and None in (self.added, more.added):
            return Products(self.pairs + more.pairs, self.reads + more.reads, self.added or more.added)
        if more is not None or self.added is not None:
            return None
        return self._replace(added=(other.q, other.scale), reads=(*self.reads, other.memory))


class NormGradient(NamedTuple):
    """The gradient of a normalization's input, and one that is added to it, that of the residual stream."""

    operands: tuple[Any, ...]  # of block_norm_gradient: dy, its scale, x, its scale, weight, mean, rstd and sums
    reads: tuple[Any, ...] = ()
    added: Blocks | tuple[None, None] = (None, None)

    @property
    def device(self) -> torch.device:
        return self.operands[0].device

    def compute(self, block_size: BlockSize) -> Blocks:
        """In one operator with what is added."""
        return torch.ops.qframework.block_norm_gradient(*self.operands, *self.added, block_size)

    def plus(self, other: Any) -> NormGradient | None:
        """With one more gradient, which is computed if it is not yet."""
        if self.added[0] is not None:
            return None
        return self._replace(added=(other.q, other.scale), reads=(*self.reads, other.memory))
