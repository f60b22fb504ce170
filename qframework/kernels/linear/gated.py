"""Two INT8 linears of one input whose results are multiplied behind an activation: SwiGLU, GeGLU, ReGLU.

Formula (Shazeer 2020, arXiv 2002.05202), with the products of int8_linear.py::

    y   = activation(a @ gate.T * a_scale * gate_scale + gate_bias) * (a @ up.T * a_scale * up_scale + up_bias)
    out = y rounded once to out_dtype, or clamp(round(y / out_scale) + out_zero_point, -127, 127) as int8

Layout: ``a (..., K)``, ``gate`` and ``up (N, K)``, ``out (..., N)``, rows contiguous. Both weights may be parts of one.
On the CPU it is the formula, with two calls of ``int8_linear``. On Hopper one kernel computes both products
(hopper_gated.py), so that neither is written to memory; elsewhere, and where TMA cannot address an operand, two calls
of ``int8_linear`` write float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qframework import numerics
from qframework.errors import QFrameworkError, UnsupportedError, either
from qframework.kernels.linear import hopper, hopper_gated
from qframework.kernels.linear.arguments import Int8LinearArguments
from qframework.kernels.linear.cpu import int8_linear_cpu
from qframework.kernels.linear.epilogue import EpilogueForm
from qframework.kernels.linear.launch import (
    int8_linear_triton,
    rows_apart,
    tile_constants,
    walk_of,
    warm_up_int8_linear,
)
from qframework.kernels.linear.tile import MAX_FEW_ROWS, Tile
from qframework.kernels.linear.tiles import gated_tile
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
    grid, arguments, constants = _call(x, out, device, tile)
    return [warm_up(hopper_gated.kernel, grid)(*arguments, **constants)]


def write_result(x: Int8GatedLinearArguments, out: Tensor, tile: Tile) -> None:
    """Launch Hopper's kernel with ``tile``."""
    grid, arguments, constants = _call(x, out, x.a.device, tile)
    launch(hopper_gated.kernel, grid)(*arguments, **constants)


def tile_of(x: Int8GatedLinearArguments, out: Tensor, device: torch.device) -> Tile | None:
    """The tile of Hopper's kernel; None where it cannot compute the call."""
    if not HAS_GLUON or device.type != "cuda" or out.dtype.itemsize > 2 or not out.numel():
        return None
    capability, processors = chip_of(device)
    n, k = x.gate.shape
    m = x.a.shape[:-1].numel()
    if capability != (9, 0) or m <= MAX_FEW_ROWS or k == 0:
        return None
    strides = (rows_apart(x.a) or 0, rows_apart(x.gate) or 0, rows_apart(x.up) or 0, n * out.dtype.itemsize)
    if any(step <= 0 or step % 16 for step in strides) or any(t.data_ptr() % 16 for t in (x.a, x.gate, x.up, out)):
        return None
    return gated_tile(m, n, k, processors)


def _call(
    x: Int8GatedLinearArguments, out: Tensor, device: torch.device, tile: Tile
) -> tuple[tuple[int, int, int], tuple[Any, ...], dict[str, Any]]:
    """Grid, arguments and constants of the launch; what is missing is represented by a scale."""
    n, k = x.gate.shape
    m = x.a.shape[:-1].numel()
    columns = tile.block_n // 2
    a = hopper.describe(x.a, (m, k), rows_apart(x.a) or 0, (tile.block_m, tile.block_k))
    gate, up = (hopper.describe(b, (n, k), rows_apart(b) or 0, (columns, tile.block_k)) for b in (x.gate, x.up))
    to = hopper.describe(out, (m, n), n, (hopper.ROWS, columns))
    biases = (x.gate_scale if x.gate_bias is None else x.gate_bias, x.up_scale if x.up_bias is None else x.up_bias)
    requantization = (
        x.a_scale if x.out_scale is None else x.out_scale,
        x.a_scale if x.out_zero_point is None else x.out_zero_point,
    )
    vectors = (x.a_scale, x.gate_scale, biases[0], x.up_scale, biases[1], *requantization)
    a_scale, gate_scale, gate_bias, up_scale, up_bias, out_scale, zero_point = (each.contiguous() for each in vectors)
    pointers = (a, a_scale, gate, gate_scale, gate_bias, up, up_scale, up_bias, out_scale, zero_point, to)
    tiles_m, tiles_n = cdiv(m, tile.block_m), cdiv(n, columns)
    slots = tile.programs * chip_of(device)[1]
    walk = walk_of(tile, tiles_m * tiles_n, slots)
    epilogue = EpilogueForm(
        a_scale="tensor" if x.a_scale.numel() == 1 else "row" if x.a_scale.numel() == m else "position",
        b_per_channel=x.gate_scale.numel() > 1,
        activation=x.activation,
        has_bias=x.gate_bias is not None,
        out_scale="none" if x.out_scale is None else "tensor",
        zero_point=x.out_zero_point is not None,
    )
    constants = {
        "EPILOGUE": epilogue,
        **tile_constants(tile, k, walk, weights=2),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    grid = (tiles_m, tiles_n, 1) if walk == "grid" else (slots, 1, 1)
    return grid, (*pointers, m, n, k, x.a_scale.numel()), constants


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
