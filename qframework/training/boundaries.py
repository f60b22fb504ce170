"""Entry and exit of the INT8 data flow, as hooks: blocks accept floats, and modules after them receive floats."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qframework.compat.dispatch import writes
from qframework.kernels.blocks.format import BlockSize
from qframework.training.block_tensor import BlockTensor, new_seed, put_into, quantize_blocks
from qframework.training.float_view import view_of

_STATES = ("hidden_states", "x", "src", "input")  # where models pass by name what goes from block to block


class Lent:
    """What a module was given instead of its arguments, and these, from before a call of it to after."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def __call__(self, instead: Tensor, original: Tensor) -> Tensor:
        self.pairs.append((instead, original))
        return instead


class EnterBlocks:
    """Forward pre-hook of a block: its hidden states, the first argument, quantized where they are float."""

    def __init__(self, block_size: BlockSize) -> None:
        self.block_size, self.lent = block_size, Lent()

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self._quantized(args[0]), *args[1:]), kwargs
        return args, {name: self._quantized(value) if name in _STATES else value for name, value in kwargs.items()}

    def _quantized(self, value: Any) -> Any:
        if isinstance(value, BlockTensor) or not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return self.lent(quantize_blocks(value, self.block_size), value)


class FloatInputs:
    """Forward pre-hook of a module that stays float: block tensors in its arguments dequantized, on purpose.

    ``stochastic``: while training, their gradients are rounded stochastically.
    """

    def __init__(self, stochastic: bool = False) -> None:
        self.stochastic, self.lent = stochastic, Lent()

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        stochastic = self.stochastic and module.training
        return self._floats(args, stochastic), self._floats(kwargs, stochastic)

    def _floats(self, value: Any, stochastic: bool) -> Any:
        if isinstance(value, BlockTensor):
            if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
                return view_of(torch.ops.aten.alias.default, value)  # nothing counts writes there
            return self.lent(dequantized(value, stochastic), value)
        if type(value) in (tuple, list):
            return type(value)(self._floats(item, stochastic) for item in value)
        if type(value) is dict:
            return {name: self._floats(item, stochastic) for name, item in value.items()}
        return value


class WriteBack:
    """Forward hook of a module whose arguments one of these replaces: what it writes to them, the originals get."""

    def __init__(self, lent: Lent) -> None:
        self.lent = lent

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        pairs = list(self.lent.pairs)
        self.lent.pairs.clear()  # the very list, lest a compiled graph return what was put into it
        for instead, original in pairs:
            write_back(instead, original)
            if output is instead and isinstance(original, BlockTensor):
                output = original  # what is written to it later is written to the module's input as well
        return output


class LeaveBlocks:
    """Forward hook of the last block: what it gives dequantized, on purpose; ``stochastic`` as in FloatInputs."""

    def __init__(self, stochastic: bool = False) -> None:
        self.stochastic = stochastic

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return dequantized(output, self.stochastic and module.training)


@torch.compiler.allow_in_graph
def write_back(instead: Tensor, original: Tensor) -> Tensor:
    """Put ``instead`` into ``original`` where somebody has written to it since it was made."""
    if instead.is_inference() or writes(instead) > 0:
        put_into(original, instead)
    return original


def dequantized(value: Any, stochastic: bool = False) -> Any:
    """``value`` with the block tensors in it, and in tuples, lists and dictionaries, dequantized."""
    if isinstance(value, BlockTensor):
        return value.dequantize(new_seed(value.device) if stochastic else None)
    if type(value) in (tuple, list):
        return type(value)(dequantized(item, stochastic) for item in value)
    if type(value) is dict:
        return {name: dequantized(item, stochastic) for name, item in value.items()}
    return value


BOUNDARIES = (EnterBlocks, FloatInputs, WriteBack, LeaveBlocks)
