"""The linear layers of INT8 training: modules with the parameters and state dicts of the float layers.

Master weights stay in float and are never quantized in place. What they compute is in linear_function.py; in graphs of
``backend="qframework"``, layers that read the same tensor are computed together, see joined_linears.py.
"""

from __future__ import annotations

import sys
from typing import Any, get_args

import torch
from torch import Tensor, nn

from qframework.errors import UnsupportedError
from qframework.graph.joined_calls import joined_by
from qframework.kernels.blocks.format import DEFAULT_BLOCK_SIZE, BlockSize, CanonicalSize, check_block_size
from qframework.kernels.blocks.quantize_parts import MAX_PARTS
from qframework.training.block_tensor import new_seed
from qframework.training.joined_linears import kind_to_join, linears_in_blocks
from qframework.training.linear_function import Int8LinearFunction, Output


def result_dtype(x: Tensor) -> torch.dtype:
    """The result dtype of a float linear: that of autocast if it is enabled, otherwise that of ``x``."""
    kind = x.device.type
    if kind == "meta":  # which autocast does not know
        return x.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class HeldWeight(nn.Module):
    """A layer that knows whether each process holds only a part of its weight, as under FSDP2.

    FSDP2 sets its part as the parameter between the passes, and the whole weight while the layer runs. It sets both by
    ``setattr`` in modules with a ``__setattr__`` of their own.
    """

    weight_is_spread = False

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and is_spread(value):
            self.__dict__["weight_is_spread"] = True
        super().__setattr__(name, value)


def is_spread(x: Any) -> bool:
    """Whether ``x`` is a DTensor of which several processes hold parts."""
    tensors = sys.modules.get("torch.distributed.tensor")  # without it there are none
    if tensors is None or not isinstance(x, tensors.DTensor):
        return False
    return any(x.device_mesh.size(i) > 1 and not each.is_replicate() for i, each in enumerate(x.placements))


class Int8Linear(HeldWeight, nn.Linear):
    """``nn.Linear`` with INT8 operands in blocks in all three products (Jetfire, section 5). Same parameters.

    Args:
        in_features: columns of ``x``.
        out_features: columns of the result.
        bias: whether there is a bias.
        device: of the parameters.
        dtype: of the parameters; FP32 in the paper.
        block_size: 32, 64, 128, (32, 128), (1, 128) or (1, 256), rows and columns of ``x`` and the result that share a
            scale. More columns are faster, more values less accurate.
        output: ``"block"`` returns a BlockTensor, ``"float"`` a float tensor, for float operations after the layer.
        stochastic_gradients: while training, round float gradients stochastically, without bias, with a seed from
            torch's generator; gradients in blocks are used unchanged.
        keep_weight: keep the weight's transpose in INT8 from the forward to the backward pass; otherwise the backward
            pass quantizes the master weight again. None keeps it unless FSDP2 spreads the weight over processes.

    ``x`` is ``(..., in_features)``, a float tensor or a BlockTensor of the same block size. The result has its dtype,
    or that of autocast. The gradient of a BlockTensor is a BlockTensor; those of parameters are float.

    Raises:
        UnsupportedError: an unknown block size or output; in ``forward``, a dtype.
        QFrameworkError: a BlockTensor of another block size, or of another number of features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        block_size: BlockSize = DEFAULT_BLOCK_SIZE,
        output: Output = "block",
        stochastic_gradients: bool = False,
        keep_weight: bool | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.block_size, self.output = check_options(type(self).__name__, block_size, output)
        self.stochastic_gradients, self.keep_weight = stochastic_gradients, keep_weight

    @classmethod
    def from_float(
        cls, linear: nn.Linear, block_size: BlockSize = DEFAULT_BLOCK_SIZE, output: Output = "block"
    ) -> Int8Linear:
        """The same layer with the same parameter objects."""
        sizes = linear.in_features, linear.out_features, linear.bias is not None
        return share(cls(*sizes, "meta", block_size=block_size, output=output), linear)

    def forward(self, x: Tensor) -> Tensor:
        return apply_linear(self, x, conv1d=False)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, block_size={self.block_size}, output={self.output!r}"


def apply_linear(layer: Any, x: Tensor, conv1d: bool) -> Tensor:
    """Apply ``layer`` to ``x``. Draws the seed whether or not gradients are enabled, as checkpointing requires."""
    seed = new_seed(x.device) if layer.stochastic_gradients and layer.training else None
    keep_weight = not layer.weight_is_spread if layer.keep_weight is None else layer.keep_weight
    options = layer.block_size, result_dtype(x), layer.output, conv1d, seed, torch.is_grad_enabled(), keep_weight
    return linear_in_blocks(x, layer.weight, layer.bias, *options)


@joined_by(linears_in_blocks, own=2, most=MAX_PARTS, kind=kind_to_join)
@torch.compiler.allow_in_graph
def linear_in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """``Int8LinearFunction`` as one call in a captured graph."""
    return Int8LinearFunction.apply(x, weight, bias, *options)


class Conv1D(nn.Module):
    """transformers' ``Conv1D``: a linear layer whose weight is ``(nx, nf)``, (in_features, out_features)."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, nf: int, nx: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.empty(nx, nf, device=device, dtype=dtype).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(nf, device=device, dtype=dtype))

    def extra_repr(self) -> str:
        return f"nf={self.nf}, nx={self.nx}"


class Int8Conv1D(HeldWeight, Conv1D):
    """``Int8Linear`` with the parameters of transformers' ``Conv1D``: the weight is ``(nx, nf)``."""

    def __init__(
        self,
        nf: int,
        nx: int,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        block_size: BlockSize = DEFAULT_BLOCK_SIZE,
        output: Output = "block",
        stochastic_gradients: bool = False,
        keep_weight: bool | None = None,
    ) -> None:
        super().__init__(nf, nx, device, dtype)
        self.block_size, self.output = check_options(type(self).__name__, block_size, output)
        self.stochastic_gradients, self.keep_weight = stochastic_gradients, keep_weight

    @classmethod
    def from_float(cls, conv: Any, block_size: BlockSize = DEFAULT_BLOCK_SIZE, output: Output = "block") -> Int8Conv1D:
        """The same layer with the same parameter objects."""
        nx, nf = conv.weight.shape
        return share(cls(nf, nx, "meta", block_size=block_size, output=output), conv)

    def forward(self, x: Tensor) -> Tensor:
        return apply_linear(self, x, conv1d=True)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, block_size={self.block_size}, output={self.output!r}"


def check_options(layer: str, block_size: BlockSize, output: str) -> tuple[CanonicalSize, Any]:
    """The canonical block size and ``output``. Raises UnsupportedError if one is unknown."""
    size = check_block_size(layer, block_size)
    if output not in get_args(Output):
        raise UnsupportedError(f"{layer}: output must be 'block' or 'float', got {output!r}")
    return size, output


def share(made: Any, given: nn.Module) -> Any:
    """``made`` with the parameters and the mode of ``given``."""
    for name in ("weight", "bias"):
        setattr(made, name, getattr(given, name))
    return made.train(given.training)
