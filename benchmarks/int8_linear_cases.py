"""The cases of the INT8 linear benchmark: operands, and one case for each provider.

Every provider gets the same float activations (M, K), weight (N, K), bias (N,) and residual (M, N), converted to its
own format outside the timed region. Results are compared with FP64 on whole rows: one of every ``ROW_STEP`` and the
last ``LAST_ROWS``, so that every tile of 64 rows or more has checked rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import (
    ROUNDOFF,
    Check,
    UnavailableError,
    WrongResultError,
    elements_within,
    exactly,
    one_step_apart,
    rows_within,
)
from qframework import numerics

Shape = tuple[int, int, int]  # M, N, K
Granularity = Literal["per_tensor", "per_token"]  # of the activation's scale

ROW_STEP, LAST_ROWS = 61, 128  # a prime step reaches all positions within a tile
FP8_MAX = 448.0
# Tensor cores keep about 14 bits of an FP8 sum between additions, and the result is rounded to bfloat16 (2^-8).
FP8_TOLERANCE = 2.0**-6
FP8_ROUNDOFF = 2.0**-4  # of E4M3's three bits of mantissa


@dataclass(frozen=True)
class Operands:
    """Float operands of one shape."""

    x: Tensor  # (M, K) fp32
    weight: Tensor  # (N, K) fp32
    bias: Tensor  # (N,) fp32
    rows: Tensor  # (R,) int64, the rows that are checked

    @functools.cached_property
    def product(self) -> Tensor:
        """The checked rows of the FP64 product, (R, N), bias included."""
        return _product(self.x[self.rows], self.weight) + self.bias.double()

    @functools.cached_property
    def residual(self) -> Tensor:
        """(M, N) fp16."""
        generator = torch.Generator(self.x.device).manual_seed(1)
        size = (len(self.x), len(self.weight))
        return torch.randn(size, generator=generator, device=self.x.device, dtype=torch.float16)


@dataclass(frozen=True)
class Case:
    """One provider at one shape: the timed function, the check, and the conversion of outputs to real values."""

    fn: Callable[[], Tensor]
    check: Check  # of the checked rows of the output
    dtype: str
    to_real: Callable[[Tensor], Tensor] | None = None  # the checked rows as x @ weight.T + bias, if they are that


@functools.lru_cache(maxsize=1)
def operands(shape: Shape, device: str) -> Operands:
    """Seeded operands: activations with unit variance and some rows 8 times larger, and a weight that keeps it."""
    m, n, k = shape
    generator = torch.Generator(device).manual_seed(m + n + k)
    x = torch.randn(m, k, generator=generator, device=device)
    x[::16] *= 8.0
    weight = torch.randn(n, k, generator=generator, device=device) * k**-0.5
    bias = torch.randn(n, generator=generator, device=device)
    return Operands(x, weight, bias, checked_rows(m).to(device))


def checked_rows(m: int) -> Tensor:
    """All rows of a small product, else one of every ROW_STEP and the last LAST_ROWS."""
    if m <= ROW_STEP + LAST_ROWS:
        return torch.arange(m)
    return torch.cat([torch.arange(0, m - LAST_ROWS, ROW_STEP), torch.arange(m - LAST_ROWS, m)])


def setup(shape: Shape, provider: str, device: str) -> Case:
    """The case of ``provider`` at ``shape``; raises UnavailableError if the device cannot run it."""
    return PROVIDERS[provider](operands(shape, device))


def check_output(case: Case, given: Operands, out: Tensor) -> float:
    """The relative error of an output's checked rows; raises WrongResultError if they are wrong."""
    expected = (len(given.x), len(given.weight))
    if out.shape != expected:
        raise WrongResultError(f"shape must be {expected}, got {tuple(out.shape)}")
    return case.check(out[given.rows])


def _product(a: Tensor, b: Tensor) -> Tensor:
    return a.double() @ b.double().t()


# qframework ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantized:
    """INT8 operands: activations per tensor or per token, weight per channel."""

    a: Tensor  # (M, K) int8
    a_scale: Tensor  # (1,) or (M, 1) fp32
    b: Tensor  # (N, K) int8
    b_scale: Tensor  # (N,) fp32

    @classmethod
    def of(cls, given: Operands, granularity: Granularity) -> Quantized:
        scale = numerics.dynamic_scale(given.x, granularity)
        a_scale = scale.reshape(1) if granularity == "per_tensor" else scale
        return cls(numerics.quantize(given.x, a_scale), a_scale, *numerics.quantize_weight(given.weight))

    def real(self, rows: Tensor) -> Tensor:
        """The rows of the dequantized product in FP64."""
        a_scale = self.a_scale if self.a_scale.numel() == 1 else self.a_scale[rows]
        return _product(self.a[rows], self.b) * a_scale.double() * self.b_scale.double()


def _float16_out(given: Operands, granularity: Granularity, add_residual: bool = False) -> Case:
    """Scales and bias, optionally a residual; fp16 output."""
    q, bias = Quantized.of(given, granularity), given.bias.half()
    residual = given.residual if add_residual else None
    added = bias.double() if residual is None else bias.double() + residual[given.rows].double()
    magnitude = bias.double().abs() if residual is None else bias.double().abs() + residual[given.rows].double().abs()

    def fn() -> Tensor:
        return torch.ops.qframework.int8_linear(
            q.a, q.a_scale, q.b, q.b_scale, bias, residual=residual, out_dtype=torch.float16
        )

    def bound(reference: Tensor) -> Tensor:
        # Five float32 roundings at most (accumulator, two scales, bias, residual), each of no more than the sum of all
        # magnitudes, then one to fp16, whose subnormals are 2^-24 apart.
        float32 = 2.0**-21 * ((reference - added).abs() + magnitude)
        return 1.01 * (float32 + ROUNDOFF[torch.float16] * reference.abs() + 2.0**-25)

    check = elements_within(lambda: q.real(given.rows) + added, bound)
    return Case(fn, check, "int8 to float16", None if add_residual else Tensor.double)


def _int8_out(given: Operands, activation: str = "none") -> Case:
    """Static scale per tensor, bias, optionally an activation; requantized to int8."""
    q = Quantized.of(given, "per_tensor")
    activate: Callable[[Tensor], Tensor] = F.gelu if activation == "gelu" else lambda y: y
    out_scale = numerics.dynamic_scale(activate(given.product), "per_tensor").reshape(1)

    def fn() -> Tensor:
        return torch.ops.qframework.int8_linear(
            q.a, q.a_scale, q.b, q.b_scale, given.bias, activation=activation, out_scale=out_scale
        )

    def oracle() -> Tensor:
        real = activate(q.real(given.rows) + given.bias.double())
        return (real / out_scale.double()).round().clamp(numerics.QMIN, numerics.QMAX)

    # A float32 error of 2^-21 * 127 steps crosses a tie on about 1 in 10,000 elements, one of 2^-12 |x| by the
    # hardware's tanh, of at most 0.03 steps, on up to 1 in 60.
    check = one_step_apart(oracle, fraction=1e-3 if activation == "none" else 2e-2)
    to_real = None if activation != "none" else lambda out: out.double() * out_scale.double()
    return Case(fn, check, "int8 to int8", to_real)


# Peers --------------------------------------------------------------------------------------------------------------


def _torch_int_mm(given: Operands) -> Case:
    """Raw INT32: no scale, no bias."""
    q = Quantized.of(given, "per_tensor")

    def to_real(acc: Tensor) -> Tensor:
        return acc.double() * q.a_scale.double() * q.b_scale.double() + given.bias.double()

    check = exactly(lambda: _product(q.a[given.rows], q.b))
    return Case(lambda: torch._int_mm(q.a, q.b.t()), check, "int8 to int32", to_real)


def _torch_float(given: Operands, dtype: torch.dtype) -> Case:
    x, weight, bias = given.x.to(dtype), given.weight.to(dtype), given.bias.to(dtype)

    def oracle() -> Tensor:
        return _product(x[given.rows], weight) + bias.double()

    # The sum, the sum of split-K parts and the sum with the bias may each be rounded; K additions happen in float32.
    check = rows_within(oracle, 3 * ROUNDOFF[dtype] + x.shape[1] * ROUNDOFF[torch.float32])
    return Case(lambda: F.linear(x, weight, bias), check, str(dtype).removeprefix("torch."), Tensor.double)


@dataclass(frozen=True)
class Float8:
    """E4M3 operands, with scales per tensor, or per row of the activation and of the weight."""

    x: Tensor  # (M, K) float8_e4m3fn
    x_scale: Tensor  # () or (M, 1) fp32
    weight: Tensor  # (N, K) float8_e4m3fn
    weight_scale: Tensor  # () or (1, N) fp32

    @classmethod
    def of(cls, given: Operands, rowwise: bool = False) -> Float8:
        _require_fp8(given.x.device, (9, 0) if rowwise else (8, 9))
        weight, scale = _to_fp8(given.weight, rowwise)
        return cls(*_to_fp8(given.x, rowwise), weight, scale.t().contiguous() if rowwise else scale)

    def product(self, bias: Tensor | None, fast: bool = True) -> Tensor:
        """(M, N) bf16; with ``fast`` the whole sum stays in the tensor cores, else parts are added in float32."""
        return torch._scaled_mm(
            self.x, self.weight.t(), scale_a=self.x_scale, scale_b=self.weight_scale, bias=bias,
            out_dtype=torch.bfloat16, use_fast_accum=fast,
        )  # fmt: skip

    def real(self, rows: Tensor) -> Tensor:
        """The rows of the dequantized product in FP64."""
        x_scale = self.x_scale[rows] if self.x_scale.ndim else self.x_scale
        x = self.x.view(torch.uint8)[rows].view(self.x.dtype)
        return _product(x, self.weight) * x_scale.double() * self.weight_scale.double()


def _scaled_mm_fp8(given: Operands, rowwise: bool = False, add_bias: bool = True, fast: bool = True) -> Case:
    """``torch._scaled_mm``, with or without bias."""
    q = Float8.of(given, rowwise)
    bias = given.bias.bfloat16() if add_bias else None
    added = 0.0 if bias is None else bias.double()
    to_real = Tensor.double if add_bias else lambda out: out.double() + given.bias.double()
    check = rows_within(lambda: q.real(given.rows) + added, FP8_TOLERANCE)
    return Case(lambda: q.product(bias, fast), check, "float8_e4m3fn to bfloat16", to_real)


def _compiled(fn: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """``fn`` under Inductor, for this shape alone: without the reset, the ninth shape would run uncompiled."""
    torch.compiler.reset()
    return torch.compile(fn, dynamic=False)


def _scaled_mm_fp8_residual(given: Operands) -> Case:
    """FP8's product with bias, and the addition of a residual as Inductor compiles it."""
    q, bias, residual = Float8.of(given), given.bias.bfloat16(), given.residual.bfloat16()

    def oracle() -> Tensor:
        return q.real(given.rows) + bias.double() + residual[given.rows].double()

    fn = _compiled(lambda: q.product(bias) + residual)
    return Case(fn, rows_within(oracle, FP8_TOLERANCE), "float8_e4m3fn to bfloat16")


def _scaled_mm_fp8_gelu(given: Operands) -> Case:
    """FP8's product with bias, and GELU and a static quantization to E4M3 as Inductor compiles them."""
    q, bias = Float8.of(given), given.bias.bfloat16()

    def oracle() -> Tensor:
        return F.gelu(q.real(given.rows) + bias.double())

    scale = (oracle().abs().amax() / FP8_MAX).float()

    def fn() -> Tensor:
        values = F.gelu(q.product(bias).float()) / scale
        return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)  # which can be indexed

    def to_real(out: Tensor) -> Tensor:
        return out.view(torch.float8_e4m3fn).double() * scale.double()

    within = rows_within(oracle, FP8_TOLERANCE + FP8_ROUNDOFF)
    return Case(_compiled(fn), lambda out: within(to_real(out)), "float8_e4m3fn to float8_e4m3fn")


def _require_fp8(device: torch.device, capability: tuple[int, int]) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability() < capability:
        raise UnavailableError(
            f"needs a GPU of compute capability {capability[0]}.{capability[1]}, runs on {device.type}"
        )


def _to_fp8(tensor: Tensor, rowwise: bool) -> tuple[Tensor, Tensor]:
    """E4M3 values and their fp32 scale, ``(rows, 1)`` or ``()``."""
    amax = tensor.abs().amax(dim=-1, keepdim=True) if rowwise else tensor.abs().amax()
    scale = (amax / FP8_MAX).clamp(min=numerics.MIN_SCALE)
    return (tensor / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


FP8_TENSORWISE: dict[str, Callable[[Operands], Case]] = {
    "scaled_mm_fp8": functools.partial(_scaled_mm_fp8, add_bias=False),
    "scaled_mm_fp8_precise": functools.partial(_scaled_mm_fp8, add_bias=False, fast=False),
    "scaled_mm_fp8_bias": _scaled_mm_fp8,
    "scaled_mm_fp8_bias_precise": functools.partial(_scaled_mm_fp8, fast=False),
}
PROVIDERS: dict[str, Callable[[Operands], Case]] = {
    "qframework_static": functools.partial(_float16_out, granularity="per_tensor"),
    "qframework_per_token": functools.partial(_float16_out, granularity="per_token"),
    "qframework_residual": functools.partial(_float16_out, granularity="per_tensor", add_residual=True),
    "qframework_int8_out": _int8_out,
    "qframework_gelu_int8_out": functools.partial(_int8_out, activation="gelu"),
    "torch_int_mm": _torch_int_mm,
    "torch_bf16": functools.partial(_torch_float, dtype=torch.bfloat16),
    "torch_fp16": functools.partial(_torch_float, dtype=torch.float16),
    "torch_fp32": functools.partial(_torch_float, dtype=torch.float32),
    **FP8_TENSORWISE,
    "scaled_mm_fp8_residual": _scaled_mm_fp8_residual,
    "scaled_mm_fp8_gelu_fp8": _scaled_mm_fp8_gelu,
    "scaled_mm_fp8_rowwise": functools.partial(_scaled_mm_fp8, rowwise=True),
}
OPTIONAL = ("torch_fp32",)  # only run when named
