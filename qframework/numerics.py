"""Rounding, scales and granularities of INT8, defined once, in plain torch.

Symmetric INT8, unless asked otherwise. A real value is ``x = q * scale`` with ``q`` in ``[-127, 127]`` and a float32
``scale``::

    scale = max|x| / 127                              (a group of zeros gets MIN_SCALE)
    q     = clamp(round_half_even(x * (1 / scale)), -127, 127)

A static activation per tensor may have a zero point ``z``, the integer that stands for 0, so that a range ``[low,
high]`` which is not symmetric uses all integers::

    scale = (high - low) / 254                        z = round(-127 - low / scale)
    q     = clamp(round_half_even(x * (1 / scale)) + z, -127, 127)        x = (q - z) * scale

Values are multiplied by the reciprocal rounded to float32, as in PyTorch's ``quantized_decomposed`` operators. Next to
a tie the result may be one step away from that of an exact division. These functions give the same bits on every
device; the epilogue of a GPU kernel may use a reciprocal that is off in its last bit.
A group that holds NaN or infinity gets a NaN or infinite scale and dequantizes to NaN.

**Scales broadcast against the tensor they quantize.** ``()`` or ``(1,)`` is per tensor. Per token, the last dimension
is 1: ``(*x.shape[:-1], 1)`` for dynamic scales, and for static scales, one for each position, ``(N, 1)`` or
``(H, W, 1)`` for a ``(B, N, C)`` or ``(B, H, W, C)`` activation. A linear weight ``(N, K)`` has ``(1,)`` or, per
channel, ``(N,)``.

Follows QAttn eq. 1-3, with the range narrowed to the symmetric [-127, 127].
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

QMIN, QMAX = -127, 127
# Far below the scale of any normal activation, but 1 / scale and scale * scale still fit float32.
MIN_SCALE = 2.0**-60
# The INT32 sum of this many products cannot overflow: 128 * 128 * 131071 < 2**31. Weights of other quantizers may hold
# -128.
MAX_INT8_PRODUCTS = 131_071
# A group whose largest magnitude is below this gets MIN_SCALE.
MIN_AMAX = MIN_SCALE * QMAX

ActivationGranularity = Literal["per_tensor", "per_token"]
WeightGranularity = Literal["per_tensor", "per_channel"]
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def product_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which a matmul of float32 operands has float32 accuracy.

    float64 where ``torch.set_float32_matmul_precision`` allows PyTorch to round the operands to TF32 or bfloat16.
    """
    backend = torch.backends.cuda.matmul if device.type == "cuda" else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return torch.float32 if backend.fp32_precision in ("ieee", "none") else torch.float64


def exact_matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of float32 tensors at float32 accuracy, whatever ``torch.set_float32_matmul_precision`` allows."""
    dtype = product_dtype(a.device)
    return (a.to(dtype) @ b.to(dtype)).float()


def scale_from_amax(amax: Tensor) -> Tensor:
    """Scale of a symmetric INT8 group from its largest magnitude (any shape) as float32; NaN and inf pass through."""
    amax = amax.float()
    # dividing by a Python number, CUDA would multiply by its rounded reciprocal
    return (amax / amax.new_full((), QMAX)).clamp(min=MIN_SCALE)


def affine_parameters(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 scale and int32 zero point of the range ``[low, high]``, extended to hold 0; ``()`` or ``(1,)`` each.

    The zero point is an integer from -127 to 127, so that 0 is exact.
    """
    low, high = low.float().clamp(max=0), high.float().clamp(min=0)
    scale = ((high - low) / high.new_full((), QMAX - QMIN)).clamp(min=MIN_SCALE)
    return scale, torch.round(QMIN - low / scale).clamp(QMIN, QMAX).to(torch.int32)


def dynamic_scale(x: Tensor, granularity: ActivationGranularity) -> Tensor:
    """Scale from the data: ``()`` per tensor, ``(*x.shape[:-1], 1)`` per token. Empty groups get MIN_SCALE."""
    if x.numel() == 0:
        shape = () if granularity == "per_tensor" else (*x.shape[:-1], 1)
        return x.new_full(shape, MIN_SCALE, dtype=torch.float32)
    amax = x.abs().amax() if granularity == "per_tensor" else x.abs().amax(dim=-1, keepdim=True)
    return scale_from_amax(amax)


def rounded_steps(x: Tensor, scale: Tensor) -> Tensor:
    """``round(x / scale)`` in float32, before saturation; ``x`` is any float dtype and ``scale`` broadcasts."""
    return torch.round(x.float() * (1.0 / scale))


def quantize(x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """``x`` (any float dtype) to int8 with ``scale`` broadcasting against it; saturates at +-127.

    ``zero_point`` is one int32 integer, ``()`` or ``(1,)``, which is added before saturation; None for 0.
    """
    steps = rounded_steps(x, scale)
    return torch.clamp(steps if zero_point is None else steps + zero_point, QMIN, QMAX).to(torch.int8)


def quantize_in_place(x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """``quantize`` that overwrites its float32 ``x``; takes a third of the time where ``x`` is large."""
    steps = x.mul_(1.0 / scale).round_()
    return (steps if zero_point is None else steps.add_(zero_point)).clamp_(QMIN, QMAX).to(torch.int8)


def dequantize(
    q: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32, zero_point: Tensor | None = None
) -> Tensor:
    """``(q - zero_point) * scale`` computed in float32 and rounded once to ``dtype``."""
    steps = q.float() if zero_point is None else q.float() - zero_point
    return (steps * scale).to(dtype)


def weight_scale(weight: Tensor, granularity: WeightGranularity = "per_channel") -> Tensor:
    """Scale of a linear weight ``(N, K)``: ``(N,)`` per output channel or ``(1,)`` per tensor."""
    if granularity == "per_tensor":
        return dynamic_scale(weight, "per_tensor").reshape(1)
    return dynamic_scale(weight, "per_token").squeeze(-1)


def quantize_weight(weight: Tensor, granularity: WeightGranularity = "per_channel") -> tuple[Tensor, Tensor]:
    """Linear weight ``(N, K)`` to int8 and its scale, ``(N,)`` or ``(1,)``."""
    scale = weight_scale(weight, granularity)
    return quantize(weight, scale.unsqueeze(-1)), scale


def sqnr_db(reference: Tensor, value: Tensor) -> float:
    """Signal to quantization-noise ratio in dB, computed in float64; inf where they are equal."""
    reference, value = reference.detach().double(), value.detach().double()
    noise = (reference - value).square().sum()
    return float("inf") if noise == 0 else float(10 * torch.log10(reference.square().sum() / noise))
