"""The cases of the benchmark of INT8 training's linears: one for each provider, forward and backward.

Every provider gets the same float input (M, K), weight (N, K) and gradient (M, N), converted to its own format outside
the timed region; each provider converts its master weights as often as in training. A step is ``y = layer(x);
y.backward(grad)``. ``block_linear_*`` are the kernel of the forward product alone.

A result is right if some rows of Y, dX and dW are close to the FP64 products of the float operands. A missing tile of
128 columns of 4096 would change a row by 18 percent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import ROUNDOFF, UnavailableError, require_quantized, rows_within
from benchmarks.int8_linear_cases import Shape, checked_rows
from benchmarks.torchao_training import quantize_for_fp8_training, quantize_for_training
from qframework.kernels import block_quantize
from qframework.kernels.blocks.format import BLOCK_SIZES, BlockSize, block_shape, block_size_name, operand_size
from qframework.kernels.blocks.linear.arguments import BlockLinearArguments
from qframework.kernels.blocks.linear.launch import block_linear_triton
from qframework.kernels.blocks.linear.tiles import COOPERATIVE, SINGLE, Choice
from qframework.kernels.runtime.replay import replayed
from qframework.training import BlockTensor, quantize_blocks
from qframework.training.linear import Int8Linear
from qframework.training.linear_baselines import PerTensorLinear, PerTokenLinear

# The largest of up to 10^8 normal values is 6 standard deviations, so a step is 6 / 127 of one and an operand's error
# 0.29 steps. The error of a product of two, itself rounded to INT8, is 1.7 times that: 2.4 percent.
INT8_TOLERANCE = 0.03
# An operand's error is 0.29 times 1.5 times half the step at 1: 2.7 percent in E4M3 and 5.4 in E5M2, the format of
# gradients; together 6.1. Over rows of 1,024 values its square varies by 5 percent, three times that in the worst row.
FP8_TOLERANCE = 0.07
BF16_TOLERANCE = 3 * ROUNDOFF[torch.bfloat16]
INT8_LEAST = 0.005  # twice the error of a bfloat16 product, half of an INT8 product's


@dataclass(frozen=True)
class Operands:
    """Float operands of one shape, seeded."""

    x: Tensor  # (M, K) bf16
    weight: Tensor  # (N, K) fp32
    grad: Tensor  # (M, N) bf16


@functools.lru_cache(maxsize=1)
def operands(shape: Shape, device: str) -> Operands:
    """Normal variables; the weight keeps the variance."""
    m, n, k = shape
    generator = torch.Generator(device).manual_seed(m + n + k)
    x, weight, grad = (torch.randn(size, generator=generator, device=device) for size in ((m, k), (n, k), (m, n)))
    return Operands(x.bfloat16(), weight * k**-0.5, grad.bfloat16())


@dataclass(frozen=True)
class Case:
    """One provider at one shape."""

    fn: Callable[[], Any]  # the timed function
    results: Callable[[], dict[str, Tensor]]  # its results, of "y", "dx" and "dw", as float tensors
    products: int  # of M x N x K
    tolerance: float
    dtype: str

    def check(self, given: Operands) -> float:
        """The largest relative error; raises WrongResultError if a row exceeds it, or nothing was quantized."""
        self.fn()
        error = max(check_result(given, name, result, self.tolerance) for name, result in self.results().items())
        return require_quantized(error, INT8_LEAST if "int8" in self.dtype else 0.0)


def check_result(given: Operands, name: str, result: Tensor, tolerance: float) -> float:
    """The relative error of the checked rows of Y, dX or dW."""
    a, b = {
        "y": (given.x, given.weight.t()),
        "dx": (given.grad, given.weight),
        "dw": (given.grad.t(), given.x),
    }[name]
    rows = checked_rows(len(a)).to(a.device)
    return rows_within(lambda: a[rows].double() @ b.double(), tolerance)(result[rows])


def as_float(x: Tensor) -> Tensor:
    """``x`` dequantized, if it is a BlockTensor."""
    return x.detach().dequantize() if isinstance(x, BlockTensor) else x.detach()


def training_case(layer: nn.Module, x: Tensor, grad: Tensor, tolerance: float, dtype: str) -> Case:
    """Forward and backward of ``layer``, without accumulating gradients."""
    x = x.detach().requires_grad_()
    weight = next(layer.parameters())
    latest: list[Tensor] = []

    def step() -> None:
        x.grad = weight.grad = None
        y = layer(x)
        y.backward(grad)
        latest[:] = [y]

    def results() -> dict[str, Tensor]:
        assert x.grad is not None
        assert weight.grad is not None
        return {name: as_float(t) for name, t in (("y", latest[0]), ("dx", x.grad), ("dw", weight.grad))}

    return Case(step, results, 3, tolerance, dtype)


def float_layer(given: Operands, dtype: torch.dtype = torch.float32) -> nn.Linear:
    """nn.Linear without bias, its weight in ``dtype``."""
    n, k = given.weight.shape
    layer = nn.Linear(k, n, bias=False, device="meta", dtype=dtype)
    layer.weight = nn.Parameter(given.weight.to(dtype))
    return layer


# qframework ---------------------------------------------------------------------------------------------------------


def _blocks(given: Operands, block_size: BlockSize) -> Case:
    """INT8 blocks in and out, as inside a converted model."""
    layer = Int8Linear.from_float(float_layer(given), block_size)
    x, grad = quantize_blocks(given.x, block_size), quantize_blocks(given.grad, block_size)
    return training_case(layer, x, grad, INT8_TOLERANCE, "int8 blocks")


def _floats_around_blocks(given: Operands, block_size: BlockSize) -> Case:
    """bfloat16 in and out, quantized inside, as at the ends of the INT8 data flow."""
    layer = Int8Linear.from_float(float_layer(given), block_size, "float")
    return training_case(layer, given.x, given.grad, INT8_TOLERANCE, "bfloat16, int8 blocks within")


def _baseline(given: Operands, kind: Any) -> Case:
    layer = kind.from_float(float_layer(given))
    return training_case(layer, given.x, given.grad, INT8_TOLERANCE, "bfloat16, int8 within")


def _kernel(given: Operands, block_size: BlockSize, out_dtype: torch.dtype = torch.bfloat16, tiles: Any = None) -> Case:
    """The forward product alone, with the kernel ``tiles`` if given."""
    if given.x.device.type != "cuda":
        raise UnavailableError("needs a GPU, since there is no kernel for CPUs")
    if tiles is not None and torch.cuda.get_device_capability() != (9, 0):
        raise UnavailableError("needs a GPU of compute capability 9.0")
    quantized = (*block_quantize(given.x, block_size), *block_quantize(given.weight, operand_size(block_size)))
    latest: list[tuple[Tensor, Tensor]] = []
    operands = (*quantized, None, block_size, out_dtype)
    choice = None if tiles is None else Choice(tiles[block_shape(block_size)[1]], 1)
    product = replayed(lambda *operands: block_linear_triton(BlockLinearArguments(*operands), choice))

    def step() -> None:
        latest[:] = [product(*operands)]

    def results() -> dict[str, Tensor]:
        out, scale = latest[0]
        blocks = out_dtype == torch.int8
        return {"y": BlockTensor(out, scale, block_size, torch.float32).dequantize() if blocks else out}

    name = str(out_dtype).removeprefix("torch.")
    return Case(step, results, 1, INT8_TOLERANCE, f"int8 blocks to {name}")


# Peers --------------------------------------------------------------------------------------------------------------


def _torch_bf16(given: Operands, compiled: bool = False, master: bool = False) -> Case:
    """``F.linear`` in bfloat16; with ``master``, under autocast with a float32 weight as in INT8 training."""
    layer: Any = float_layer(given, torch.float32 if master else torch.bfloat16)
    if master:
        layer.forward = torch.autocast(given.x.device.type, torch.bfloat16)(layer.forward)
    return training_case(_compiled(layer) if compiled else layer, given.x, given.grad, BF16_TOLERANCE, "bfloat16")


def _torchao_int8(given: Operands) -> Case:
    """torchao's mixed-precision INT8 training: a scale per row, all three products in INT8; compiled as it requires."""
    _require_gpu(given, "torchao's INT8 training")
    layers = quantize_for_training(nn.Sequential(float_layer(given, torch.bfloat16)))
    return training_case(_compiled(layers), given.x, given.grad, INT8_TOLERANCE, "bfloat16, int8 within")


def _torchao_fp8(given: Operands) -> Case:
    """torchao's FP8 training; compiled."""
    _require_gpu(given, "FP8 training")
    layers = quantize_for_fp8_training(nn.Sequential(float_layer(given, torch.bfloat16)))
    return training_case(_compiled(layers), given.x, given.grad, FP8_TOLERANCE, "bfloat16, float8 within")


def _require_gpu(given: Operands, what: str) -> None:
    if given.x.device.type != "cuda":
        raise UnavailableError(f"{what} needs a GPU")


def _compiled(layer: nn.Module) -> Any:
    """Compile for one shape; the reset avoids Dynamo's recompile limit and symbolic sizes."""
    torch._dynamo.reset()
    return torch.compile(layer, dynamic=False)


def _for_sizes(
    name: str, case: Any, sizes: Sequence[BlockSize] = BLOCK_SIZES, **fixed: Any
) -> dict[str, Callable[[Operands], Case]]:
    """A provider for each block size, whose name replaces ``{}``."""
    return {name.format(block_size_name(size)): functools.partial(case, block_size=size, **fixed) for size in sizes}


_FAST: tuple[BlockSize, ...] = (128, (1, 128), (1, 256))
_FORCED: tuple[BlockSize, ...] = (32, 64, 128, (1, 128))


PROVIDERS: dict[str, Callable[[Operands], Case]] = {
    **_for_sizes("qframework_blocks_{}", _blocks),
    **_for_sizes("qframework_floats_{}", _floats_around_blocks, _FAST),
    "qframework_per_tensor": functools.partial(_baseline, kind=PerTensorLinear),
    "qframework_per_token": functools.partial(_baseline, kind=PerTokenLinear),
    **_for_sizes("block_linear_{}", _kernel),
    **_for_sizes("block_linear_{}_int8", _kernel, _FAST, out_dtype=torch.int8),
    **_for_sizes("block_linear_{}_cooperative", _kernel, _FORCED, tiles=COOPERATIVE),
    **_for_sizes("block_linear_{}_single", _kernel, _FORCED, tiles=SINGLE),
    "torch_bf16": _torch_bf16,
    "torch_bf16_autocast": functools.partial(_torch_bf16, master=True),
    "inductor_bf16": functools.partial(_torch_bf16, compiled=True),
    "torchao_int8": _torchao_int8,
    "torchao_fp8": _torchao_fp8,
}


def setup(shape: Shape, provider: str, device: str) -> Case:
    """The case of ``provider`` at ``shape``; raises UnavailableError if the device cannot run it."""
    return PROVIDERS[provider](operands(shape, device))
