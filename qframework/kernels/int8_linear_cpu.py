"""INT8 linear on the CPU: the fastest of PyTorch's INT8 products that is exact on this machine.

``onednn``: ``torch.ops.onednn.qlinear_pointwise``. Its fast form multiplies unsigned activations, so ``a + 128`` goes
in with a zero point of 128, which oneDNN takes out again exactly; the epilogue runs inside. Weights are packed once.
``int_mm``: ``torch._int_mm``, the epilogue in torch.
``reference``: float64 products, for machines where neither is exact (u8 x s8 without VNNI saturates at INT16).
"""

from __future__ import annotations

import functools
import logging
import math
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


@functools.cache
def cpu_implementation() -> str:
    """``"onednn"``, ``"int_mm"`` or ``"reference"``: the first that this machine computes exactly, found by trying."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-127, 128, (16, 256), dtype=torch.int8, generator=generator)
    b = torch.randint(-127, 128, (64, 256), dtype=torch.int8, generator=generator)
    a[0], b[0], a[1], b[1] = 127, 127, -127, 127  # the largest sums: where a narrow accumulator saturates
    exact = a.double() @ b.double().t()
    for name, product in (("onednn", _onednn_product), ("int_mm", _int_mm)):
        try:
            if torch.equal(product(a, b).double(), exact):
                return name
            logger.warning("qframework: the CPU's %s INT8 product is not exact here and is not used", name)
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            logger.info("qframework: the CPU's %s INT8 product is not available: %s", name, error)
    return "reference"


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
    implementation = cpu_implementation()
    if implementation == "reference" or 0 in (a.numel(), b.numel()):
        return int8_linear_ref(a, a_scale, b, b_scale, bias, activation, residual, out_scale, out_dtype).contiguous()
    rows = rows_of(a).contiguous()
    fused = _Epilogue(b_scale, bias, activation, residual, out_scale, out_dtype)
    if implementation == "onednn":
        if a_period.numel() == 1:
            return _onednn_per_tensor(rows, float(a_period), b, fused, shape)
        product = _onednn(rows, 1.0, b, b_scale, None, "none", 1.0, torch.float32).view(shape)
    else:
        product = (_int_mm(rows, b).float() * b_scale).view(shape)
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
        return numerics.quantize(y, fused.out_scale)
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
    return _onednn(a, 1.0, b, torch.ones(b.shape[0]), None, "none", 1.0, torch.float32)


def _int_mm(a: Tensor, b: Tensor) -> Tensor:
    return torch._int_mm(a, b.t())


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
            StorageWeakRef(b.untyped_storage()), version, weight, torch.zeros(b.shape[0], dtype=torch.int32)
        )
        _packed[key] = entry
    return entry.weight, entry.zero_point
