"""Entry and exit of the INT8 data flow, as hooks: blocks accept floats, and modules after them get floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qframework.compat.dispatch import writes
from qframework.kernels.blocks.format import BlockSize
from qframework.training.block_tensor import BlockTensor, new_seed, put_into, quantize_blocks
from qframework.training.float_view import view_of

_STATES = ("hidden_states", "x", "src", "input")  # names under which models pass hidden states to blocks


class Lent:
    """Pairs of a replacement and the original argument, kept during a call of a module."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def __call__(self, instead: Tensor, original: Tensor) -> Tensor:
        self.pairs.append((instead, original))
        return instead


class EnterBlocks:
    """Forward pre-hook of a block: quantizes its hidden states, the first argument, if they are float."""

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
    """Forward pre-hook of a module that stays float: dequantizes the BlockTensors in its arguments.

    ``stochastic``: round their gradients stochastically while training.
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
                return view_of(torch.ops.aten.alias.default, value)  # inference tensors do not count writes
            return self.lent(dequantized(value, stochastic), value)
        return _each(value, lambda item: self._floats(item, stochastic))


class WriteBack:
    """Forward hook of a module whose arguments were replaced: copies what it wrote to them to the originals."""

    def __init__(self, lent: Lent) -> None:
        self.lent = lent

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        pairs = list(self.lent.pairs)
        self.lent.pairs.clear()  # in place: a compiled graph would return the contents of a new list
        for instead, original in pairs:
            write_back(instead, original)
            if output is instead and isinstance(original, BlockTensor):
                output = original  # so that later writes to the output reach the module's input too
        return output


class LeaveBlocks:
    """Forward hook of the last block: dequantizes its result; ``stochastic`` as in FloatInputs."""

    def __init__(self, stochastic: bool = False) -> None:
        self.stochastic = stochastic

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return dequantized(output, self.stochastic and module.training)


@torch.compiler.allow_in_graph
def write_back(instead: Tensor, original: Tensor) -> Tensor:
    """Copy ``instead`` to ``original`` if it was written to since it was created."""
    if instead.is_inference() or writes(instead) > 0:
        put_into(original, instead)
    return original


def dequantized(value: Any, stochastic: bool = False) -> Any:
    """``value`` with all BlockTensors dequantized, also those in tuples, lists and dictionaries."""
    if isinstance(value, BlockTensor):
        return value.dequantize(new_seed(value.device) if stochastic else None)
    return _each(value, lambda item: dequantized(item, stochastic))


def _each(value: Any, convert: Callable[[Any], Any]) -> Any:
    """A tuple, list or dictionary with ``convert`` applied to each item; anything else unchanged."""
    if type(value) in (tuple, list):
        return type(value)(convert(item) for item in value)
    if type(value) is dict:
        return {name: convert(item) for name, item in value.items()}
    return value


BOUNDARIES = (EnterBlocks, FloatInputs, WriteBack, LeaveBlocks)
