"""What it costs at run time to quantize the input of a linear more accurately than with one static scale.

Seconds by which a compiled model with many rows takes longer, from rates of the device that it runs on::

    product    max(operations / rate, bytes of inputs and results / memory rate)
    in float   the product in the model's dtype instead of INT8. What the layer before writes counts nothing: on a GPU
               its own work takes longer than its bytes
    per token  for each value a pass over the input; behind a norm, whose loop has the whole row, a part of that
    zero point for each value an addition in the layer before

For a GPU they are the peak rates of an H100, of which kernels reach about two thirds. A narrow product such as ``fc2``
of a ViT-S costs less in 16 bit than its input with scales per token, one of more than about a thousand results costs
more.

For a CPU they are those of one thread, measured with a ViT-S; several threads divide all of them alike. With AMX or
VNNI, INT8 products are so much faster than float32 ones that ``fc2`` in float costs five times as much as its input
with scales per token. Zero points are free: the product adds them to sums in registers.

A layer in float is assumed to add to a residual stream; one whose result another layer quantizes takes a pass for that
as well. docs/experiments.md compares both devices with whole models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qframework.kernels.runtime.native import NATIVE, instructions_of

DEVICES = {"cpu": torch.float32, "cuda": torch.float16}
"""The devices that have prices, and the dtype of models that are going to run there."""


@dataclass(frozen=True)
class Costs:
    """Rates of a device with models of one dtype, as far as kernels reach them.

    Attributes:
        int8_rate: operations of INT8 products a second, two in a product and its sum.
        float_rate: those of products in the model's dtype.
        memory_rate: bytes a second.
        value_bytes: of a value in the model's dtype.
        token_seconds: of scales per token for each value.
        behind_norm: the part of them that is left behind a norm.
        zero_point_seconds: of a zero point for each value.
    """

    int8_rate: float
    float_rate: float
    memory_rate: float
    value_bytes: int
    token_seconds: float
    behind_norm: float
    zero_point_seconds: float

    def in_float(self, rows: int, inputs: int, outputs: int) -> float:
        """By how many seconds the product of ``(rows, inputs)`` and ``(inputs, outputs)`` takes longer than in INT8."""
        in_float = self._product(rows, inputs, outputs, self.value_bytes, self.float_rate)
        return in_float - self._product(rows, inputs, outputs, 1, self.int8_rate)

    def per_token(self, rows: int, inputs: int, *, behind_norm: bool) -> float:
        """Seconds of scales per token for ``(rows, inputs)``, computed at run time."""
        return rows * inputs * self.token_seconds * (self.behind_norm if behind_norm else 1.0)

    def zero_point(self, rows: int, inputs: int) -> float:
        """Seconds of a zero point for ``(rows, inputs)``."""
        return rows * inputs * self.zero_point_seconds

    def _product(self, rows: int, inputs: int, outputs: int, input_bytes: int, rate: float) -> float:
        moved = rows * (input_bytes * inputs + self.value_bytes * outputs)
        return max(2 * rows * inputs * outputs / rate, moved / self.memory_rate)


def costs_for(device: str | None, x: Tensor) -> Costs:
    """The prices of a named device, or of that and the dtype of ``x``, a value in the model."""
    return costs_on(x.device.type, x.dtype) if device is None else costs_on(device, DEVICES[device])


def costs_on(device: str, dtype: torch.dtype) -> Costs:
    """The prices of a type of device for models of ``dtype``: of a GPU for all but ``"cpu"``."""
    return _on_a_cpu(dtype, _instructions()) if device == "cpu" else _on_a_gpu(dtype)


# An H100 --------------------------------------------------------------------------------------------------------------

_REACHED = 2 / 3
_MEMORY_RATE = _REACHED * 3.35e12
_ADDITIONS_RATE = _REACHED * 132 * 64 * 1.755e9  # of integers a second, on 132 multiprocessors


def _on_a_gpu(dtype: torch.dtype) -> Costs:
    return Costs(
        int8_rate=_REACHED * 1979e12,
        float_rate=_REACHED * (989e12 if dtype.itemsize == 2 else 67e12),
        memory_rate=_MEMORY_RATE,
        value_bytes=dtype.itemsize,
        token_seconds=(dtype.itemsize + 1) / _MEMORY_RATE,
        behind_norm=0.25,
        zero_point_seconds=1 / _ADDITIONS_RATE,
    )


# One thread of a CPU --------------------------------------------------------------------------------------------------

# Operations a second of products in INT8 and float32, by instruction set.
_CPU_RATES = {
    "amx": (1600e9, 135e9),
    "vnni": (650e9, 135e9),
    "avx512": (180e9, 135e9),
    "avx2": (95e9, 65e9),
}
_AMX_BFLOAT16_RATE = 800e9


def _on_a_cpu(dtype: torch.dtype, instructions: str) -> Costs:
    int8_rate, float_rate = _CPU_RATES[instructions]
    if instructions == "amx" and dtype == torch.bfloat16:
        float_rate = _AMX_BFLOAT16_RATE
    return Costs(
        int8_rate=int8_rate,
        float_rate=float_rate,
        memory_rate=10e9,
        value_bytes=dtype.itemsize,
        token_seconds=1.0e-9,
        behind_norm=0.4,
        zero_point_seconds=0.0,
    )


def _instructions() -> str:
    """What INT8 products use here; those of other processors than x86 are priced as AVX2's."""
    for name in NATIVE:
        try:
            return instructions_of(name)
        except NotImplementedError:
            continue
    return "avx2"
