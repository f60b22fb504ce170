"""Where the INT8 data flow begins and ends, as hooks: blocks take floats in, what lies behind them gets floats."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from qframework.kernels.blocks.format import BlockSize
from qframework.training.block_tensor import BlockTensor, new_seed, quantize_blocks

_STATES = ("hidden_states", "x", "src", "input")  # where models pass by name what goes from block to block


class EnterBlocks:
    """Forward pre-hook of a block: its hidden states, the first argument, quantized where they are float."""

    def __init__(self, block_size: BlockSize) -> None:
        self.block_size = block_size

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self._quantized(args[0]), *args[1:]), kwargs
        return args, {name: self._quantized(value) if name in _STATES else value for name, value in kwargs.items()}

    def _quantized(self, value: Any) -> Any:
        if isinstance(value, BlockTensor) or not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return quantize_blocks(value, self.block_size)


class FloatInputs:
    """Forward pre-hook of a module that stays float: block tensors in its arguments dequantized, on purpose.

    ``stochastic``: while training, their gradients are rounded stochastically.
    """

    def __init__(self, stochastic: bool = False) -> None:
        self.stochastic = stochastic

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        stochastic = self.stochastic and module.training
        return dequantized(args, stochastic), dequantized(kwargs, stochastic)


class LeaveBlocks:
    """Forward hook of the last block: what it gives dequantized, on purpose; ``stochastic`` as in FloatInputs."""

    def __init__(self, stochastic: bool = False) -> None:
        self.stochastic = stochastic

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return dequantized(output, self.stochastic and module.training)


def dequantized(value: Any, stochastic: bool = False) -> Any:
    """``value`` with the block tensors in it, and in tuples, lists and dictionaries, dequantized."""
    if isinstance(value, BlockTensor):
        return value.dequantize(new_seed(value.device) if stochastic else None)
    if type(value) in (tuple, list):
        return type(value)(dequantized(item, stochastic) for item in value)
    if type(value) is dict:
        return {name: dequantized(item, stochastic) for name, item in value.items()}
    return value


BOUNDARIES = (EnterBlocks, FloatInputs, LeaveBlocks)
