"""Two INT8 linears of one input whose results are multiplied behind an activation: SwiGLU, GeGLU, ReGLU.

Formula (Shazeer 2020, arXiv 2002.05202), with the products of int8_linear.py::

    y   = activation(a @ gate.T * a_scale * gate_scale + gate_bias) * (a @ up.T * a_scale * up_scale + up_bias)
    out = y rounded once to out_dtype, or clamp(round(y / out_scale) + out_zero_point, -127, 127) as int8

Layout: ``a (..., K)``, ``gate`` and ``up (N, K)``, ``out (..., N)``, rows contiguous. Both weights may be parts of one.
On the CPU it is the formula, with two calls of ``int8_linear``. On a GPU one kernel computes both products, so that
neither is written to memory, for up to 64 rows (few_rows_gated.py) and on Hopper for more (hopper_gated.py). Elsewhere,
to float32, and where TMA cannot address an operand, two calls of ``int8_linear`` write float32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qframework import numerics
from qframework.errors import QFrameworkError, UnsupportedError, either
from qframework.kernels.linear import few_rows_gated, hopper, hopper_gated
from qframework.kernels.linear.arguments import Int8LinearArguments
from qframework.kernels.linear.cpu import int8_linear_cpu
from qframework.kernels.linear.epilogue import EpilogueForm
from qframework.kernels.linear.launch import (
    few_rows_constants,
    int8_linear_triton,
    rows_apart,
    tile_constants,
    walk_of,
    warm_up_int8_linear,
)
from qframework.kernels.linear.tile import MAX_FEW_ROWS, FewRowsTile, Tile
from qframework.kernels.linear.tiles import INTERPRETED_GATED, gated_few_rows_tile, gated_tile
from qframework.kernels.quantize import QuantizeArguments, quantize_triton
from qframework.kernels.runtime.activation import ACTIVATIONS
from qframework.kernels.runtime.checks import check_one_scale, check_shape
from qframework.kernels.runtime.chip import check_device, chip_of
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.launch import cdiv, launch, warm_up
from qframework.kernels.runtime.operator import declare, refuse_backward


class Int8GatedLinearArguments(NamedTuple):
    """The arguments of ``qframework::int8_gated_linear``, as ``int8_linear``'s; ``out_scale`` is one."""

    a: Tensor
    a_scale: Tensor
    gate: Tensor
    gate_scale: Tensor
    gate_bias: Tensor | None
    up: Tensor
    up_scale: Tensor
    up_bias: Tensor | None
    activation: str
    out_scale: Tensor | None = None
    out_dtype: torch.dtype | None = None
    out_zero_point: Tensor | None = None

    def product(self, which: str, out_dtype: torch.dtype | None = torch.float32) -> Int8LinearArguments:
        """The arguments of the linear ``"gate"``, with the activation, or ``"up"``."""
        weight, scale, bias = (getattr(self, name) for name in (which, f"{which}_scale", f"{which}_bias"))
        activation = self.activation if which == "gate" else "none"
        return Int8LinearArguments(self.a, self.a_scale, weight, scale, bias, activation, out_dtype=out_dtype)

    @property
    def result_dtype(self) -> torch.dtype:
        """int8 where the result is requantized, else ``out_dtype``, float32 by default."""
        return torch.int8 if self.out_scale is not None else self.out_dtype or torch.float32

    def empty_result(self) -> Tensor:
        """An uninitialized result."""
        return self.a.new_empty((*self.a.shape[:-1], self.gate.shape[0]), dtype=self.result_dtype)

    def check(self) -> None:
        """Raise QFrameworkError for activation, dtype, shape or device."""
        name = "int8_gated_linear"
        if self.activation not in ACTIVATIONS:
            raise UnsupportedError(f"{name}: activation must be {either(ACTIVATIONS)}, got {self.activation!r}")
        self.product("gate", self.out_dtype).check()
        self.product("up", self.out_dtype).check()
        check_shape(name, "up", self.up, tuple(self.gate.shape))
        if (self.gate_bias is None) != (self.up_bias is None):
            raise QFrameworkError(f"{name}: gate_bias and up_bias must be both given or both None")
        check_shape(name, "up_scale", self.up_scale, tuple(self.gate_scale.shape))
        if self.out_scale is not None:
            check_one_scale(name, self.a, self.out_scale)
        self._of_result().check()

    def _of_result(self) -> Int8LinearArguments:
        """A linear with the same result, whose checks are those of its scale, dtype and zero point."""
        call = self.product("gate", self.out_dtype)
        return call._replace(out_scale=self.out_scale, out_zero_point=self.out_zero_point)


def _int8_gated_linear_cpu(x: Int8GatedLinearArguments) -> Tensor:
    return _rounded(x, int8_linear_cpu(x.product("gate")) * int8_linear_cpu(x.product("up")))


def _rounded(x: Int8GatedLinearArguments, y: Tensor) -> Tensor:
    if x.out_scale is None:
        return y.to(x.result_dtype)
    return numerics.quantize(y, x.out_scale.reshape(()), x.out_zero_point)


def int8_gated_linear_triton(x: Int8GatedLinearArguments) -> Tensor:
    """``int8_gated_linear`` on a GPU."""
    check_device(x.a.device)
    x.product("gate").check_scales()
    out = x.empty_result()
    tile = tile_of(x, out, x.a.device)
    if tile is not None:
        write_result(x, out, tile)
        return out
    y = int8_linear_triton(x.product("gate")) * int8_linear_triton(x.product("up"))
    if x.out_scale is None:
        return y.to(x.result_dtype)
    return quantize_triton(QuantizeArguments(y, x.out_scale, x.out_zero_point))


def warm_up_int8_gated_linear(device: torch.device, x: Int8GatedLinearArguments) -> list[Any]:
    """Compile what ``int8_gated_linear_triton`` launches on ``device`` for such arguments, which may be on "meta"."""
    out = x.empty_result()
    tile = tile_of(x, out, device)
    if tile is None:
        return [*warm_up_int8_linear(device, x.product("gate")), *warm_up_int8_linear(device, x.product("up"))]
    call = _call(x, out, device, tile)
    return [warm_up(call.kernel, call.grid)(*call.arguments, **call.constants)]


def write_result(x: Int8GatedLinearArguments, out: Tensor, tile: Tile | FewRowsTile) -> None:
    """Launch the kernel of ``tile``."""
    call = _call(x, out, x.a.device, tile)
    launch(call.kernel, call.grid)(*call.arguments, **call.constants)


def tile_of(x: Int8GatedLinearArguments, out: Tensor, device: torch.device) -> Tile | FewRowsTile | None:
    """The tile of one kernel; None where none can compute the call."""
    n, k = x.gate.shape
    m = x.a.shape[:-1].numel()
    if out.dtype.itemsize > 2 or not out.numel() or k == 0:
        return None
    if m <= MAX_FEW_ROWS:
        if any(rows_apart(operand) is None for operand in (x.a, x.gate, x.up)):
            return None
        return INTERPRETED_GATED if device.type != "cuda" else gated_few_rows_tile(m, n, k, chip_of(device)[1])
    if not HAS_GLUON or device.type != "cuda":
        return None
    capability, processors = chip_of(device)
    if capability != (9, 0):
        return None
    strides = (rows_apart(x.a) or 0, rows_apart(x.gate) or 0, rows_apart(x.up) or 0, n * out.dtype.itemsize)
    if any(step <= 0 or step % 16 for step in strides) or any(t.data_ptr() % 16 for t in (x.a, x.gate, x.up, out)):
        return None
    return gated_tile(m, n, k, processors)


class _Call(NamedTuple):
    """A launch."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


def _call(x: Int8GatedLinearArguments, out: Tensor, device: torch.device, tile: Tile | FewRowsTile) -> _Call:
    """The launch; what is missing is represented by a scale."""
    n, k = x.gate.shape
    m = x.a.shape[:-1].numel()
    sizes = (m, n, k, x.a_scale.numel())
    epilogue = EpilogueForm(
        a_scale="tensor" if x.a_scale.numel() == 1 else "row" if x.a_scale.numel() == m else "position",
        b_per_channel=x.gate_scale.numel() > 1,
        activation=x.activation,
        has_bias=x.gate_bias is not None,
        out_scale="none" if x.out_scale is None else "tensor",
        zero_point=x.out_zero_point is not None,
    )
    strides = tuple(rows_apart(operand) or 0 for operand in (x.a, x.gate, x.up))
    if isinstance(tile, FewRowsTile):
        aligned = math.gcd(16, k, *strides)
        prefetch = aligned == 16 and (x.gate.data_ptr() | x.up.data_ptr()) % 16 == 0
        constants = {
            "EPILOGUE": epilogue,
            **few_rows_constants(tile, k, aligned, prefetch),
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }
        arguments = (*_pointers(x, x.a, x.gate, x.up, out), *sizes, *strides)
        return _Call(few_rows_gated.kernel, (cdiv(n, tile.block_n), 1, 1), arguments, constants)
    columns = tile.block_n // 2
    a = hopper.describe(x.a, (m, k), strides[0], (tile.block_m, tile.block_k))
    gate, up = (
        hopper.describe(b, (n, k), row, (columns, tile.block_k))
        for b, row in zip((x.gate, x.up), strides[1:], strict=True)
    )
    to = hopper.describe(out, (m, n), n, (hopper.ROWS, columns))
    tiles_m, tiles_n = cdiv(m, tile.block_m), cdiv(n, columns)
    slots = tile.programs * chip_of(device)[1]
    walk = walk_of(tile, tiles_m * tiles_n, slots)
    constants = {
        "EPILOGUE": epilogue,
        **tile_constants(tile, k, walk, weights=2),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    grid = (tiles_m, tiles_n, 1) if walk == "grid" else (slots, 1, 1)
    return _Call(hopper_gated.kernel, grid, (*_pointers(x, a, gate, up, to), *sizes), constants)


def _pointers(x: Int8GatedLinearArguments, a: Any, gate: Any, up: Any, to: Any) -> tuple[Any, ...]:
    """What both kernels read and write: matrices or their descriptors, and between them vectors."""
    biases = (x.gate_scale if x.gate_bias is None else x.gate_bias, x.up_scale if x.up_bias is None else x.up_bias)
    requantization = (
        x.a_scale if x.out_scale is None else x.out_scale,
        x.a_scale if x.out_zero_point is None else x.out_zero_point,
    )
    vectors = (x.a_scale, x.gate_scale, biases[0], x.up_scale, biases[1], *requantization)
    a_scale, gate_scale, gate_bias, up_scale, up_bias, out_scale, zero_point = (each.contiguous() for each in vectors)
    return a, a_scale, gate, gate_scale, gate_bias, up, up_scale, up_bias, out_scale, zero_point, to


INT8_GATED_LINEAR = declare(
    "int8_gated_linear(Tensor a, Tensor a_scale, Tensor gate, Tensor gate_scale, Tensor? gate_bias, Tensor up, "
    "Tensor up_scale, Tensor? up_bias, str activation, Tensor? out_scale=None, ScalarType? out_dtype=None, "
    "Tensor? out_zero_point=None) -> Tensor",
    Int8GatedLinearArguments,
    cpu=_int8_gated_linear_cpu,
    cuda=int8_gated_linear_triton,
    fake=Int8GatedLinearArguments.empty_result,
    warm_up=warm_up_int8_gated_linear,
)
refuse_backward("int8_gated_linear")
