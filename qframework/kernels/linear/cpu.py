"""int8_linear on the CPU: the first implementation that is exact and fast on this machine.

``amx``, ``vnni``: C++ of the package (native.py), product and epilogue in one pass.
``int_mm``: ``torch._int_mm``, oneDNN's product, for few rows, without a compiler, and on other processors with INT8
instructions.
``multiply_add``: as ``vnni``, by 16-bit multiply-add for x86 processors without INT8 instructions. oneDNN's product
saturates at INT16 there or takes 24 times as long. With AVX2, ViT-B's linears are 1.4 to 1.6 times as fast as floats.
``float32``: the float product of the same integers, for all others. Sums over 1024 columns are exact in float32 and
are then added as INT32. Each call converts the weight: a cached float copy would take four times its memory.

In a compiled model the operator stays a call where it is C++ and large. Else it is decomposed:
``qframework::int8_product`` is a call, and Inductor fuses the epilogue. No converted or packed weight is cached, so
none can be stale: packing one takes a small part of the product with hundreds of rows.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from qframework import numerics
from qframework.compat.operators import int_mm
from qframework.kernels.linear.arguments import Int8LinearArguments, is_per_channel
from qframework.kernels.linear.native import native_linear, native_product
from qframework.kernels.linear.reference import epilogue_ref, int8_linear_ref
from qframework.kernels.runtime.checks import check_positive_scale, rows_of
from qframework.kernels.runtime.native import NATIVE
from qframework.kernels.runtime.operator import declare

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class CpuChoice(NamedTuple):
    """The chosen implementation, and why a preferred one was rejected."""

    name: str
    rejected: dict[str, str]


def cpu_implementation() -> str:
    """``"amx"``, ``"vnni"``, ``"int_mm"``, ``"multiply_add"`` or ``"float32"``: what computes ``int8_linear`` here."""
    return cpu_choice().name


@functools.cache
def cpu_choice() -> CpuChoice:
    """The first product that is exact and faster than the float one on this machine; tried once per process.

    Products take a quarter of the float product's time with INT8 instructions, and ``int_mm`` 24 times as much without,
    so noise does not change the choice.
    """
    return in_a_clean_thread(_choose)


def _choose() -> CpuChoice:
    rejected: dict[str, str] = {}
    for name, product in _PRODUCTS.items():
        reason = _reason_against(product)
        if reason is None:
            return CpuChoice(name, rejected)
        logger.info("qframework: the CPU's INT8 product %s is not used: %s", name, reason)
        rejected[name] = reason
    return CpuChoice("float32", rejected)


# oneDNN's product need not pack b, which pays with fewer rows: with AMX and with VNNI, ours takes as long with 64 to 96
# rows of 768 to 4,096 channels, epilogue included, and up to 1.8 times as long with 16.
_FEWEST_ROWS = 64
_LARGE_WEIGHT = 1 << 22


def implementation_for(rows: int) -> str:
    """``cpu_implementation`` for a number of rows of ``a``."""
    return cpu_implementation() if rows >= _FEWEST_ROWS else _implementation_for_few_rows()


@functools.cache
def _implementation_for_few_rows() -> str:
    chosen = cpu_implementation()
    if chosen not in ("amx", "vnni"):
        return chosen
    return "int_mm" if in_a_clean_thread(_reason_against, _int_mm) is None else chosen


def in_a_clean_thread(run: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call ``run`` without the dispatch modes of this thread, such as those that trace a graph."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run, *args, **kwargs).result()


def _reason_against(product: Callable[[Tensor, Tensor], Tensor]) -> str | None:
    generator = torch.Generator("cpu").manual_seed(0)  # also under torch.set_default_device
    a = torch.randint(-127, 128, (64, 512), dtype=torch.int8, generator=generator, device="cpu")
    b = torch.randint(-127, 128, (512, 512), dtype=torch.int8, generator=generator, device="cpu")
    a[0], b[0], a[1], b[1] = 127, 127, -127, 127  # the largest sums, which a narrow accumulator would saturate
    try:
        if not torch.equal(product(a, b).double(), a.double() @ b.double().t()):
            return "it is not exact on this processor"
    except (RuntimeError, AttributeError, NotImplementedError, OSError) as error:
        return f"it is not available: {error}"
    ratio = _relative_time(product, a, b)
    return None if ratio < 1 else f"it takes {ratio:.1f} times as long as the float product"


def _relative_time(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> float:
    """Time of a product over that of the float product: the minimum of ten alternating calls after a warm-up.

    Measured as CPU time of one thread, which other threads and processes do not distort.
    """
    products = product, _float_product
    seconds: tuple[list[float], list[float]] = [], []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(11):
            for run, found in zip(products, seconds, strict=True):
                start = time.thread_time()
                run(a, b)
                found.append(time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    return min(seconds[0][1:]) / max(min(seconds[1][1:]), 1e-9)


class ProductArguments(NamedTuple):
    """The arguments of ``qframework::int8_product``, ``(M, K)`` and ``(N, K)`` int8."""

    a: Tensor
    b: Tensor

    def empty_result(self) -> Tensor:
        """(M, N) int32 before it is computed."""
        return self.a.new_empty((self.a.shape[0], self.b.shape[0]), dtype=torch.int32)

    def check(self) -> None:
        """Nothing to check: this operator replaces an ``int8_linear`` that was checked."""


def int8_product_cpu(x: ProductArguments) -> Tensor:
    """``a @ b.T``, exact for K up to 131,071."""
    if 0 in (x.a.numel(), x.b.numel()):
        return x.empty_result().zero_()
    return _product(x.a.contiguous(), x.b).int()


INT8_PRODUCT = declare(
    "int8_product(Tensor a, Tensor b) -> Tensor",
    ProductArguments,
    cpu=int8_product_cpu,
    fake=ProductArguments.empty_result,
)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The exact product, int32, or float32 where that holds every sum."""
    return _PRODUCTS.get(implementation_for(a.shape[0]), _float_product)(a, b)


def int8_linear_cpu(x: Int8LinearArguments) -> Tensor:
    """``int8_linear`` on the CPU; raises QFrameworkError for scales that are not positive."""
    implementation = cpu_implementation()
    if x.b.numel() >= _LARGE_WEIGHT:  # else ten operators of an epilogue in torch take longer than packing
        implementation = implementation_for(math.prod(x.shape[:-1]))
    if implementation in NATIVE and 0 not in (x.a.numel(), x.b.numel()):
        return native_linear(x, implementation)
    x.check_scales()
    check_positive_scale("int8_linear", "b_scale", x.b_scale)
    if x.out_scale is not None:
        check_positive_scale("int8_linear", "out_scale", x.out_scale, signed=is_per_channel(x.out_scale, x.b.shape[0]))
    if 0 in (x.a.numel(), x.b.numel()):
        return int8_linear_ref(x).contiguous()
    y = _product(rows_of(x.a).contiguous(), x.b).float().mul_(x.b_scale).view(x.shape)
    a_scale = x.a_scale if x.a_scale.numel() > 1 else x.a_scale.reshape(1)
    if x.bias is None:
        y.mul_(a_scale)
    else:
        torch.addcmul(x.bias.float(), y, a_scale, out=y)
    y = _activate_in_place(y, x.activation)
    if x.residual is not None:
        y.add_(x.residual)
    if x.out_scale is None:
        return y.to(x.result_dtype)
    return numerics.quantize_in_place(y, x.out_scale, x.out_zero_point)


# A call of int8_linear takes the host about 20 us longer than one of int8_product: as much as it saves with so many
# results, by the time of both in compiled models of eight layers, from 4 x 64 x 128 to 197 x 384 x 1,536.
_FEWEST_RESULTS = 1 << 16


def decompose_int8_linear(*args: Any, **kwargs: Any) -> Any:
    """``int8_linear`` as the operator ``int8_product`` and torch; whole on other devices, and where C++ is faster."""
    x = Int8LinearArguments(*args, **kwargs)
    if x.a.device.type == "cpu" and _stays_whole(x.shape):
        return NotImplemented
    return decompose_int8_linear_anywhere(*args, **kwargs)


def _stays_whole(shape: torch.Size) -> bool:
    if not all(isinstance(size, int) for size in shape):  # unknown sizes count as large
        return cpu_implementation() in NATIVE
    return shape.numel() >= _FEWEST_RESULTS and implementation_for(math.prod(shape[:-1])) in NATIVE


def decompose_int8_linear_anywhere(*args: Any, **kwargs: Any) -> Any:
    """``decompose_int8_linear`` for code that also runs on a machine without a C++ compiler."""
    x = Int8LinearArguments(*args, **kwargs)
    if x.a.device.type != "cpu":
        return NotImplemented
    acc = torch.ops.qframework.int8_product(x.a.reshape(-1, x.a.shape[-1]), x.b)
    return epilogue_ref(acc.reshape(x.shape).float(), x)


def _activate_in_place(y: Tensor, activation: str) -> Tensor:
    """``apply_activation`` in place: page faults of a new tensor would cost more than the arithmetic."""
    if activation == "gelu":
        return torch.ops.aten.gelu_(y)
    if activation == "gelu_tanh":
        return torch.ops.aten.gelu_(y, approximate="tanh")
    if activation == "silu":
        return torch.ops.aten.silu_(y)
    return y.relu_() if activation == "relu" else y


def _int_mm(a: Tensor, b: Tensor) -> Tensor:
    if a.shape[1] == 1:  # PyTorch 2.14 leaves the result of a single column uninitialized
        return _float_product(a, b)
    return int_mm(a, b.t())


def _native(implementation: str) -> Callable[[Tensor, Tensor], Tensor]:
    return functools.partial(native_product, implementation=implementation)


# In the order in which they are tried.
_PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "amx": _native("amx"),
    "vnni": _native("vnni"),
    "int_mm": _int_mm,
    "multiply_add": _native("multiply_add"),
}
HAVE_INT8_INSTRUCTIONS = ("amx", "vnni", "int_mm")


# 128 * 128 * 1024 is 2**24, up to which float32 holds every integer, so sums are exact in any order. They stay exact
# where torch.set_float32_matmul_precision allows bfloat16 or TF32: both hold every int8, and sums are float32.
_EXACT_COLUMNS = 1024


def _float_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T`` of int8 values, exact: float32, or int32 where the sum needs it."""
    if a.shape[1] <= _EXACT_COLUMNS:
        return a.float() @ b.float().t()
    product = a.new_zeros((a.shape[0], b.shape[0]), dtype=torch.int32)
    for start in range(0, a.shape[1], _EXACT_COLUMNS):
        part = slice(start, start + _EXACT_COLUMNS)
        product += (a[:, part].float() @ b[:, part].float().t()).int()
    return product
