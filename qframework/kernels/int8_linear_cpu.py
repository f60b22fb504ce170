"""INT8 linear on the CPU: the fastest product of int8 values that is exact on this machine.

``onednn``: ``torch.ops.onednn.qlinear_pointwise``. Its fast form multiplies unsigned activations, so ``a + 128`` goes
in with a zero point of 128, which oneDNN takes out again exactly; the epilogue runs inside. Weights are packed once.
``int_mm``: ``torch._int_mm``, the epilogue in torch.
``float32``: the float product of the same integers, for processors without INT8 instructions (VNNI), where the two
above saturate at INT16 or take 24 times as long. 1024 inner columns at a time are exact in float32, and their sums are
added as INT32. The weight is converted at each call: a float copy kept beside it would take four times its memory.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from qframework import numerics
from qframework.kernels._common import LIBRARY, check_positive_scale, row_scale, rows_of
from qframework.kernels.int8_linear import int8_linear_ref
from qframework.kernels.int8_linear_arguments import Activation, check_arguments, flat_out_scale, is_per_channel
from qframework.numerics import QMIN

logger = logging.getLogger(__name__)

# How oneDNN spells an activation: (post-op, algorithm).
_ONEDNN_ACTIVATIONS = {
    "none": ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
}


# What an activation never falls below.
_MINIMUM = {"gelu": -0.171, "gelu_tanh": -0.171, "relu": 0.0, "silu": -0.279}


class CpuChoice(NamedTuple):
    """The chosen implementation, and why each of those that come before it was not taken."""

    name: str
    rejected: dict[str, str]


def cpu_implementation() -> str:
    """``"onednn"``, ``"int_mm"`` or ``"float32"``: the one that computes ``int8_linear`` on this machine."""
    return cpu_choice().name


@functools.cache
def cpu_choice() -> CpuChoice:
    """The first INT8 product that is exact here and faster than the float one; found by trying, once a process.

    With INT8 instructions a product takes a quarter of the float product's time, without them 24 times as much: noise
    does not change the choice.
    """
    rejected: dict[str, str] = {}
    for name, product in (("onednn", _onednn_product), ("int_mm", _int_mm)):
        reason = _reason_against(product)
        if reason is None:
            return CpuChoice(name, rejected)
        logger.info("qframework: the CPU's %s INT8 product is not used: %s", name, reason)
        rejected[name] = reason
    return CpuChoice("float32", rejected)


def _reason_against(product: Callable[[Tensor, Tensor], Tensor]) -> str | None:
    generator = torch.Generator("cpu").manual_seed(0)  # whatever torch.set_default_device says
    a = torch.randint(-127, 128, (64, 512), dtype=torch.int8, generator=generator, device="cpu")
    b = torch.randint(-127, 128, (512, 512), dtype=torch.int8, generator=generator, device="cpu")
    a[0], b[0], a[1], b[1] = 127, 127, -127, 127  # the largest sums: where a narrow accumulator saturates
    try:
        if not torch.equal(product(a, b).double(), a.double() @ b.double().t()):
            return "it is not exact on this processor"
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return f"it is not available: {error}"
    ratio = _fastest(product, a, b) / _fastest(_float_product, a, b)
    return None if ratio < 1 else f"it takes {ratio:.1f} times as long as the float product"


def _fastest(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> float:
    """Seconds of the fastest of five calls, none of which is the first."""
    product(a, b)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        product(a, b)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@torch.library.impl(LIBRARY, "int8_linear", "CPU")
def _int8_linear_cpu(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    activation: Activation = "none",
    residual: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    check_arguments(a, a_scale, b, b_scale, bias, activation, residual, out_scale, out_dtype)
    _check_scales(b_scale, out_scale)
    a_period = row_scale("int8_linear", "a_scale", a_scale, a.shape)
    shape = torch.Size((*a.shape[:-1], b.shape[0]))
    if out_scale is not None:
        flat_out_scale(out_scale, shape)
    if 0 in (a.numel(), b.numel()):
        return int8_linear_ref(a, a_scale, b, b_scale, bias, activation, residual, out_scale, out_dtype).contiguous()
    rows = rows_of(a).contiguous()
    fused = _Epilogue(b_scale, bias, activation, residual, out_scale, out_dtype)
    implementation = cpu_implementation()
    if implementation == "onednn":
        if a_period.numel() == 1:
            return _onednn_per_tensor(rows, float(a_period), b, fused, shape)
        product = _onednn(rows, 1.0, b, b_scale, None, "none", 1.0, torch.float32).view(shape)
    else:
        multiply = _int_mm if implementation == "int_mm" else _float_product
        product = multiply(rows, b).float().mul_(b_scale).view(shape)
    return _finish(product, a_scale if a_period.numel() > 1 else a_period, fused)


_checked: dict[tuple[object, ...], tuple[StorageWeakRef, int]] = {}


def _check_scales(b_scale: Tensor, out_scale: Tensor | None) -> None:
    """Refuse scales that are not positive. A weight's scales are looked at once for as long as they live unchanged."""
    if out_scale is not None:
        check_positive_scale("int8_linear", "out_scale", out_scale)
    key = (b_scale.data_ptr(), b_scale.shape, b_scale.stride())
    seen = _checked.get(key)
    if seen is None or seen[0].expired() or seen[1] != _version(b_scale):
        check_positive_scale("int8_linear", "b_scale", b_scale)
        _drop_expired(_checked)
        _checked[key] = StorageWeakRef(b_scale.untyped_storage()), _version(b_scale)


def _drop_expired(cache: dict[Any, Any]) -> None:
    """Forget entries whose tensor is gone; each entry begins with a weak reference. Other threads may do the same."""
    for key, entry in list(cache.items()):
        if entry[0].expired():
            cache.pop(key, None)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _Epilogue(NamedTuple):
    b_scale: Tensor
    bias: Tensor | None
    activation: str
    residual: Tensor | None
    out_scale: Tensor | None
    out_dtype: torch.dtype | None


def _finish(product: Tensor, a_scale: Tensor, fused: _Epilogue) -> Tensor:
    """Epilogue in torch of ``acc * b_scale``, float32 and owned by us, so that it is overwritten."""
    if fused.bias is None:
        product.mul_(a_scale)
    else:
        torch.addcmul(fused.bias.float(), product, a_scale, out=product)
    return _store(_activate_in_place(product, fused.activation), fused)


def _activate_in_place(y: Tensor, activation: str) -> Tensor:
    """As ``apply_activation``; a new tensor of this size would cost more in page faults than the arithmetic."""
    if activation == "gelu":
        return torch.ops.aten.gelu_(y)
    if activation == "gelu_tanh":
        return torch.ops.aten.gelu_(y, approximate="tanh")
    if activation == "silu":
        return torch.ops.aten.silu_(y)
    return y.relu_() if activation == "relu" else y


def _store(y: Tensor, fused: _Epilogue) -> Tensor:
    if fused.residual is not None:
        y = y.add_(fused.residual)
    if fused.out_scale is not None:
        return numerics.quantize_in_place(y, fused.out_scale)
    return y.to(fused.out_dtype or torch.float32)


def _onednn_per_tensor(rows: Tensor, a_scale: float, b: Tensor, fused: _Epilogue, shape: torch.Size) -> Tensor:
    if fused.residual is None and fused.activation == "none" and _requantizes_channels(fused, b.shape[0]):
        return _onednn_per_channel(rows, a_scale, b, fused).view(shape)
    bias = fused.bias.float() if fused.bias is not None else None
    call = functools.partial(_onednn, rows, a_scale, b, fused.b_scale, bias, fused.activation)
    if fused.residual is None and fused.out_scale is not None and fused.out_scale.numel() == 1:
        out_scale = float(fused.out_scale)
        q = call(out_scale, torch.int8)
        if _MINIMUM.get(fused.activation, -math.inf) < QMIN * out_scale:
            q.clamp_(min=QMIN)  # oneDNN saturates at -128; the project's range is symmetric
        return q.view(shape)
    if fused.residual is None and fused.out_scale is None and fused.out_dtype == torch.bfloat16:
        return call(1.0, torch.bfloat16).view(shape)
    return _store(call(1.0, torch.float32).view(shape), fused)


def _requantizes_channels(fused: _Epilogue, n: int) -> bool:
    return fused.out_scale is not None and is_per_channel(fused.out_scale, n)


def _onednn_per_channel(rows: Tensor, a_scale: float, b: Tensor, fused: _Epilogue) -> Tensor:
    """oneDNN requantizes with one scale: a channel's own goes into the scale of its weight and into its bias."""
    assert fused.out_scale is not None
    out_scale = fused.out_scale.reshape(-1)
    bias = fused.bias.float() / out_scale if fused.bias is not None else None
    return _onednn(rows, a_scale, b, fused.b_scale / out_scale, bias, "none", 1.0, torch.int8).clamp_(min=QMIN)


def _onednn(
    rows: Tensor,
    a_scale: float,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    out_scale: float,
    out_dtype: torch.dtype,
) -> Tensor:
    unsigned = rows.view(torch.uint8) ^ 128  # two's complement: flipping the top bit adds 128
    post_op, algorithm = _ONEDNN_ACTIVATIONS[activation]
    packed, zero_point = _packed_weight(b)
    return torch.ops.onednn.qlinear_pointwise(
        unsigned, a_scale, 128, packed, b_scale, zero_point, bias, out_scale, 0, out_dtype, post_op, [], algorithm
    )


def _onednn_product(a: Tensor, b: Tensor) -> Tensor:
    return _onednn(a, 1.0, b, a.new_ones(b.shape[0], dtype=torch.float32), None, "none", 1.0, torch.float32)


def _int_mm(a: Tensor, b: Tensor) -> Tensor:
    return torch._int_mm(a, b.t())


# 128 * 128 * 1024 is 2**24: to there float32 holds every integer, so that no order of adding products rounds. Where the
# user lets oneDNN multiply in bfloat16 or TF32 (torch.set_float32_matmul_precision), it still is exact: both hold every
# int8, and they are added in float32.
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


class _Packed(NamedTuple):
    storage: StorageWeakRef
    version: int
    weight: Tensor
    zero_point: Tensor


_packed: dict[tuple[object, ...], _Packed] = {}


def _packed_weight(b: Tensor) -> tuple[Tensor, Tensor]:
    """oneDNN's layout of a weight, made once for as long as the weight lives unchanged, and a zero point of zeros."""
    key = (b.data_ptr(), b.shape, b.stride())
    version = _version(b)
    entry = _packed.get(key)
    if entry is None or entry.storage.expired() or entry.version != version:
        _drop_expired(_packed)
        weight = torch.ops.onednn.qlinear_prepack(b.contiguous(), None)
        entry = _Packed(
            StorageWeakRef(b.untyped_storage()), version, weight, b.new_zeros(b.shape[0], dtype=torch.int32)
        )
        _packed[key] = entry
    return entry.weight, entry.zero_point
