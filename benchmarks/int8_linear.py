"""INT8 linear against torch's own GEMMs: ``setup(shape, provider) -> Case`` over the shapes of vision transformers.

Every provider starts from the same float activations (M, K), weight (N, K) and bias (N,), brought to its own format
outside the timed region. ``error`` is the kernel's error against FP64 on the operands it is given,
``quantization_error`` what the format costs against the float product. ``torch_int_mm`` returns raw INT32: no scale,
no bias.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import (
    ROUNDOFF,
    Check,
    Record,
    Results,
    UnavailableError,
    argument_parser,
    check_then_time,
    comma_separated,
    elements_within,
    exactly,
    one_step_apart,
    relative_error,
    rows_within,
    time_provider,
)
from qframework import numerics

Shape = tuple[int, int, int]  # M, N, K

SMALL_SHAPES: tuple[Shape, ...] = ((197, 3072, 768), (1576, 3072, 768), (1576, 768, 3072))
SHAPES: tuple[Shape, ...] = (
    *SMALL_SHAPES,
    (12608, 2304, 768), (12608, 768, 768),
    (50432, 2304, 768), (50432, 768, 768), (50432, 3072, 768), (50432, 768, 3072),
    (50432, 3072, 1024), (50432, 4096, 1024), (50432, 1024, 4096),
    (32768, 3840, 1280), (32768, 5120, 1280), (32768, 1280, 5120),
    (8192, 8192, 8192),
)  # fmt: skip
SMOKE_SHAPES: tuple[Shape, ...] = ((32, 48, 64), (33, 64, 128))
# The best GEMM of torch at this size stands for what the chip can do in practice.
PEAK_SHAPE, SMOKE_PEAK_SHAPE = (8192, 8192, 8192), (64, 64, 64)
PEAK_PROVIDERS = {"8-bit": ("torch_int_mm", "scaled_mm_fp8_tensorwise"), "16-bit": ("torch_bf16", "torch_fp16")}
FP8_MAX = 448.0
# Tensor cores keep about 14 bits of an FP8 sum between two additions, and the result is rounded to bfloat16 (2^-8).
FP8_TOLERANCE = 2.0**-6


@dataclass(frozen=True)
class Operands:
    """Float operands of one shape, and their FP64 product."""

    x: Tensor  # (M, K) fp32
    weight: Tensor  # (N, K) fp32
    bias: Tensor  # (N,) fp32
    product: Tensor  # (M, N) fp64, bias included


@dataclass(frozen=True)
class Case:
    """One provider at one shape: what is timed, what is right, and how to read the output as a real value."""

    fn: Callable[[], Tensor]
    check: Check
    dtype: str
    to_real: Callable[[Tensor], Tensor]


@functools.lru_cache(maxsize=1)
def operands(shape: Shape, device: str) -> Operands:
    """Seeded: activations with unit variance and some rows 8 times larger, a weight that keeps the variance."""
    m, n, k = shape
    generator = torch.Generator(device).manual_seed(m + n + k)
    x = torch.randn(m, k, generator=generator, device=device)
    x[::16] *= 8.0
    weight = torch.randn(n, k, generator=generator, device=device) * k**-0.5
    bias = torch.randn(n, generator=generator, device=device)
    return Operands(x, weight, bias, x.double() @ weight.double().t() + bias.double())


def setup(shape: Shape, provider: str, device: str) -> Case:
    """The case of ``provider`` at ``shape``; raises UnavailableError where the device cannot run it."""
    return PROVIDERS[provider](operands(shape, device))


def _qframework(given: Operands) -> Case:
    """Activation scales per token, weight scales per channel, bias; fp16 out."""
    a_scale = numerics.dynamic_scale(given.x, "per_token")  # (M, 1)
    a = numerics.quantize(given.x, a_scale)
    b, b_scale = numerics.quantize_weight(given.weight)
    bias = given.bias.half()

    def fn() -> Tensor:
        return torch.ops.qframework.int8_linear(a, a_scale, b, b_scale, bias, out_dtype=torch.float16)

    def product() -> Tensor:
        return (a.double() @ b.double().t()) * a_scale.double() * b_scale.double()

    def bound(reference: Tensor) -> Tensor:
        # Four float32 roundings (accumulator, two scales, bias), then one to fp16, whose subnormals are 2^-24 apart.
        float32 = 2.0**-22 * ((reference - bias.double()).abs() + bias.double().abs())
        return 1.01 * (float32 + ROUNDOFF[torch.float16] * reference.abs() + 2.0**-25)

    check = elements_within(lambda: product() + bias.double(), bound)
    return Case(fn, check, "int8 to float16", Tensor.double)


def _qframework_int8_out(given: Operands) -> Case:
    """Static activation scale per tensor, weight scales per channel, bias; requantized to int8."""
    a_scale = numerics.dynamic_scale(given.x, "per_tensor").reshape(1)
    a = numerics.quantize(given.x, a_scale)
    b, b_scale = numerics.quantize_weight(given.weight)
    out_scale = numerics.dynamic_scale(given.product, "per_tensor").reshape(1)

    def fn() -> Tensor:
        return torch.ops.qframework.int8_linear(a, a_scale, b, b_scale, given.bias, out_scale=out_scale)

    def oracle() -> Tensor:
        real = (a.double() @ b.double().t()) * a_scale.double() * b_scale.double() + given.bias.double()
        return (real / out_scale.double()).round().clamp(numerics.QMIN, numerics.QMAX)

    # A float32 error of 2^-21 * 127 steps crosses a tie on about 1 in 10,000 elements.
    check = one_step_apart(oracle, fraction=1e-3)
    return Case(fn, check, "int8 to int8", lambda q: q.double() * out_scale.double())


def _torch_int_mm(given: Operands) -> Case:
    a_scale = numerics.dynamic_scale(given.x, "per_token")
    a = numerics.quantize(given.x, a_scale)
    b, b_scale = numerics.quantize_weight(given.weight)
    return Case(
        lambda: torch._int_mm(a, b.t()),
        exactly(lambda: a.double() @ b.double().t()),
        "int8 to int32",
        lambda acc: acc.double() * a_scale.double() * b_scale.double() + given.bias.double(),
    )


def _torch_float(given: Operands, dtype: torch.dtype) -> Case:
    x, weight, bias = given.x.to(dtype), given.weight.to(dtype), given.bias.to(dtype)

    def oracle() -> Tensor:
        return x.double() @ weight.double().t() + bias.double()

    # The sum, the sum of split-K parts and the sum with the bias may each be rounded; K additions happen in float32.
    check = rows_within(oracle, 3 * ROUNDOFF[dtype] + x.shape[1] * ROUNDOFF[torch.float32])
    return Case(lambda: F.linear(x, weight, bias), check, str(dtype).removeprefix("torch."), Tensor.double)


def _scaled_mm_fp8(given: Operands, rowwise: bool) -> Case:
    """``torch._scaled_mm`` on E4M3 operands; scales per tensor, or per row of the activation and of the weight."""
    _require_fp8(given.x.device, (9, 0) if rowwise else (8, 9))
    x, x_scale = _to_fp8(given.x, rowwise)
    weight, weight_scale = _to_fp8(given.weight, rowwise)
    bias = given.bias.bfloat16()
    scale_b = weight_scale.t().contiguous() if rowwise else weight_scale

    def fn() -> Tensor:
        return torch._scaled_mm(
            x, weight.t(), scale_a=x_scale, scale_b=scale_b, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    def oracle() -> Tensor:
        product = x.double() @ weight.double().t()
        return product * x_scale.double() * scale_b.double() + bias.double()

    return Case(fn, rows_within(oracle, FP8_TOLERANCE), "float8_e4m3fn to bfloat16", Tensor.double)


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


PROVIDERS: dict[str, Callable[[Operands], Case]] = {
    "qframework": _qframework,
    "qframework_int8_out": _qframework_int8_out,
    "torch_int_mm": _torch_int_mm,
    "torch_fp32": functools.partial(_torch_float, dtype=torch.float32),
    "torch_bf16": functools.partial(_torch_float, dtype=torch.bfloat16),
    "torch_fp16": functools.partial(_torch_float, dtype=torch.float16),
    "scaled_mm_fp8_tensorwise": functools.partial(_scaled_mm_fp8, rowwise=False),
    "scaled_mm_fp8_rowwise": functools.partial(_scaled_mm_fp8, rowwise=True),
}


def measure(shape: Shape, provider: str, device: str, peaks: dict[str, float], identity: Record) -> Record:
    """Check, then time one provider at one shape."""
    case = setup(shape, provider, device)
    error, timing, peak_mb = check_then_time(case.fn, case.check, device)
    quantization_error = relative_error(case.to_real(case.fn()), operands(shape, device).product)
    tflops = 2 * shape[0] * shape[1] * shape[2] / timing.median_s / 1e12
    peak = peaks.get(_width(provider))
    return replace(
        identity,
        dtype=case.dtype,
        **timing.fields(),
        tflops=tflops,
        percent_of_peak=100 * tflops / peak if peak else None,
        peak_mb=peak_mb,
        error=error,
        quantization_error=quantization_error,
    )


def _width(provider: str) -> str:
    """Which of the measured peaks a provider is held against."""
    if provider == "torch_fp32":
        return "32-bit"
    return "16-bit" if provider in PEAK_PROVIDERS["16-bit"] else "8-bit"


def measure_peaks(shape: Shape, device: str) -> dict[str, float]:
    """TFLOP/s of the best torch GEMM at ``shape`` for 8-bit and for 16-bit operands."""
    return {
        width: max(_tflops_or_zero(shape, name, device) for name in names) for width, names in PEAK_PROVIDERS.items()
    }


def _tflops_or_zero(shape: Shape, provider: str, device: str) -> float:
    try:
        fn = setup(shape, provider, device).fn
    except UnavailableError:
        return 0.0
    return 2 * shape[0] * shape[1] * shape[2] / time_provider(fn, device).median_s / 1e12


def _parse_shapes(text: str) -> list[Shape]:
    shapes = []
    for part in text.split():
        numbers = [int(number) for number in part.split(",")]
        if len(numbers) != 3 or min(numbers) < 1:
            raise argparse.ArgumentTypeError(f"{part!r} is no shape; accepted: M,N,K with positive integers")
        shapes.append((numbers[0], numbers[1], numbers[2]))
    return shapes


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every provider at every shape; returns the exit status."""
    parser = argument_parser("int8_linear", __doc__)
    parser.add_argument("--shapes", type=_parse_shapes, help='"M,N,K M,N,K ..." (default: those of ViT and SAM)')
    parser.add_argument("--providers", type=comma_separated(PROVIDERS), default=list(PROVIDERS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    default_shapes = SHAPES if arguments.device == "cuda" else SMALL_SHAPES
    shapes = arguments.shapes or (SMOKE_SHAPES if arguments.smoke else default_shapes)

    results = Results.start("int8_linear", arguments.device, arguments)
    if arguments.smoke or arguments.device == "cuda":
        results.peaks = measure_peaks(SMOKE_PEAK_SHAPE if arguments.smoke else PEAK_SHAPE, arguments.device)
    for shape in shapes:
        for provider in arguments.providers:
            identity = Record(benchmark="int8_linear", op="int8_linear", shape=list(shape), provider=provider)
            results.attempt(
                identity, functools.partial(measure, shape, provider, arguments.device, results.peaks, identity)
            )
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
