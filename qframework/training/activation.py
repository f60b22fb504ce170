"""Activations, and the gated activations of Llama-type models, from blocks to blocks (Jetfire, algorithm 2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qframework.compat.modules import has_hooks, submodules
from qframework.kernels.blocks.activation import check_kind
from qframework.kernels.blocks.format import DEFAULT_BLOCK_SIZE, BlockSize, canonical_size, check_block_size
from qframework.training.block_tensor import BlockTensor, as_blocks, put_into, wrap_blocks
from qframework.training.function import Int8Function
from qframework.training.norm import input_gradient


@torch.compiler.allow_in_graph
class Int8ActivationFunction(Int8Function):
    """``f(x)`` of blocks; saves them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, block_size: BlockSize) -> BlockTensor:
        blocks = as_blocks(x, block_size)
        q, scale = torch.ops.qframework.block_activation(blocks.q, blocks.scale, kind, block_size)
        ctx.save_for_backward(blocks)
        ctx.kind, ctx.in_blocks = kind, isinstance(x, BlockTensor)
        return wrap_blocks(q, scale, block_size, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        grad = as_blocks(grad, x.block_size)
        q, scale = torch.ops.qframework.block_activation_backward(
            grad.q, grad.scale, x.q, x.scale, ctx.kind, x.block_size
        )
        return input_gradient(ctx.in_blocks, q, scale, x), None, None


@torch.compiler.allow_in_graph
class Int8GatedActivationFunction(Int8Function):
    """``f(gate) * up`` of blocks; saves both operands and computes both gradients in one pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str, block_size: BlockSize) -> BlockTensor:
        gates, ups = as_blocks(gate, block_size), as_blocks(up, block_size)
        q, scale = torch.ops.qframework.block_gated_activation(gates.q, gates.scale, ups.q, ups.scale, kind, block_size)
        ctx.save_for_backward(gates, ups)
        ctx.kind = kind
        ctx.gate_in_blocks, ctx.up_in_blocks = isinstance(gate, BlockTensor), isinstance(up, BlockTensor)
        return wrap_blocks(q, scale, block_size, gate.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate, up = ctx.saved_tensors
        grad = as_blocks(grad, gate.block_size)
        dgate, dgate_scale, dup, dup_scale = torch.ops.qframework.block_gated_activation_backward(
            grad.q, grad.scale, gate.q, gate.scale, up.q, up.scale, ctx.kind, gate.block_size
        )
        of_gate = input_gradient(ctx.gate_in_blocks, dgate, dgate_scale, gate)
        return of_gate, input_gradient(ctx.up_in_blocks, dup, dup_scale, up), None, None


class Int8Activation(nn.Module):
    """GELU, its tanh approximation, SiLU or ReLU, from blocks to blocks; a float input is quantized.

    Args:
        kind: ``"gelu"``, ``"gelu_tanh"``, ``"silu"`` or ``"relu"``.
        block_size: 32, 64, 128, (32, 128), (1, 128) or (1, 256).

    Raises:
        UnsupportedError: an unknown kind or block size.
    """

    writes_input = False  # set when the converted module wrote its result to its input

    def __init__(self, kind: str, block_size: BlockSize = DEFAULT_BLOCK_SIZE) -> None:
        super().__init__()
        check_kind("Int8Activation", kind)
        self.kind, self.block_size = kind, check_block_size("Int8Activation", block_size)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., C)`` to the same shape, in blocks."""
        if self.writes_input:  # the gradient needs the original ``x``
            return put_into(x, Int8ActivationFunction.apply(x.clone(), self.kind, self.block_size))
        return Int8ActivationFunction.apply(x, self.kind, self.block_size)

    def extra_repr(self) -> str:
        return f"{self.kind!r}, block_size={self.block_size}"


class Int8GatedMLP(nn.Module):
    """``down_proj(f(gate_proj(x)) * up_proj(x))``, as in LlamaMLP, with one operator between the linears.

    A converted module keeps its ``act_fn`` and calls it only if it has hooks.

    Args:
        gate_proj: a linear that returns blocks, such as Int8Linear. All three keep their names in transformers.
        up_proj: like ``gate_proj``.
        down_proj: like ``gate_proj``.
        kind: the function f, as for Int8Activation.
        block_size: 32, 64, 128, (32, 128), (1, 128) or (1, 256).

    Raises:
        UnsupportedError: an unknown kind or block size.
    """

    def __init__(
        self,
        gate_proj: nn.Module,
        up_proj: nn.Module,
        down_proj: nn.Module,
        kind: str = "silu",
        block_size: BlockSize = DEFAULT_BLOCK_SIZE,
    ) -> None:
        super().__init__()
        check_kind("Int8GatedMLP", kind)
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        self.kind, self.block_size = kind, check_block_size("Int8GatedMLP", block_size)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., C)`` to the result of ``down_proj``."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        act_fn = submodules(self).get("act_fn")
        if act_fn is not None and _is_observed(act_fn):
            return self.down_proj(act_fn(gate) * up)
        return self.down_proj(gated_activation(gate, up, self.kind, self.block_size))

    def extra_repr(self) -> str:
        return f"{self.kind!r}, block_size={self.block_size}"


def _is_observed(module: nn.Module) -> bool:
    """Whether calling ``module`` does more than its class's ``forward``, so that it must be called."""
    return has_hooks(module) or "forward" in module.__dict__


def gated_activation(
    gate: Tensor, up: Tensor, kind: str = "silu", block_size: BlockSize = DEFAULT_BLOCK_SIZE
) -> Tensor:
    """``f(gate) * up`` of two tensors of one shape, float or in blocks; the result is in blocks. Differentiable."""
    return Int8GatedActivationFunction.apply(gate, up, kind, canonical_size(block_size))
