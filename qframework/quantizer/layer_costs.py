"""What it costs at run time to quantize the input of a linear more accurately than with one static scale.

Seconds by which a compiled model with many rows takes longer on an H100, from its peak rates alone, of which kernels
reach about two thirds::

    product    max(operations / rate, bytes of inputs and results / memory rate)
    in float   the product in 16 bit instead of INT8. That the layer before writes its result in 16 bit is free: its own
               work takes longer than its bytes
    per token  a pass that reads inputs in 16 bit and writes them in INT8; behind a norm, whose kernel has the whole
               row, a quarter of that
    zero point an addition to each input in the layer before

So a narrow product such as ``fc2`` of a ViT-S costs less in float than its input with scales per token, one of more
than about a thousand results costs more. A layer in float is assumed to add to a residual stream; one whose result
another layer quantizes takes a pass for that as well. docs/experiments.md compares this with whole models.
"""

from __future__ import annotations

_REACHED = 2 / 3
_INT8_RATE, _FLOAT_RATE = _REACHED * 1979e12, _REACHED * 989e12  # operations a second, two in a product and its sum
_MEMORY_RATE = _REACHED * 3.35e12  # bytes a second
_ADDITIONS_RATE = _REACHED * 132 * 64 * 1.755e9  # of integers a second, on 132 multiprocessors
_BEHIND_NORM = 0.25


def float_seconds(rows: int, inputs: int, outputs: int) -> float:
    """By how much the product of ``(rows, inputs)`` and ``(inputs, outputs)`` takes longer in 16 bit than in INT8."""
    return _product(rows, inputs, outputs, 2, _FLOAT_RATE) - _product(rows, inputs, outputs, 1, _INT8_RATE)


def per_token_seconds(rows: int, inputs: int, *, behind_norm: bool) -> float:
    """Of scales per token for ``(rows, inputs)``, computed at run time."""
    return 3 * rows * inputs / _MEMORY_RATE * (_BEHIND_NORM if behind_norm else 1.0)


def zero_point_seconds(rows: int, inputs: int) -> float:
    """Of a zero point for ``(rows, inputs)``."""
    return rows * inputs / _ADDITIONS_RATE


def _product(rows: int, inputs: int, outputs: int, input_bytes: int, rate: float) -> float:
    moved = rows * (input_bytes * inputs + 2 * outputs)
    return max(2 * rows * inputs * outputs / rate, moved / _MEMORY_RATE)
