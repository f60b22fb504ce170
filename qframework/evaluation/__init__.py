"""Measure what quantization costs and gains: top-1, images per second, weight bytes, SQNR per layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qframework.lazy import lazy_names

if TYPE_CHECKING:
    from qframework.evaluation.accuracy import top1
    from qframework.evaluation.outliers import transplant_outliers
    from qframework.evaluation.size import weight_bytes
    from qframework.evaluation.speed import throughput
    from qframework.evaluation.sqnr import layer_sqnr

__all__ = [
    "layer_sqnr",
    "throughput",
    "top1",
    "transplant_outliers",
    "weight_bytes",
]

_MODULE_OF = {
    "layer_sqnr": "sqnr",
    "throughput": "speed",
    "top1": "accuracy",
    "transplant_outliers": "outliers",
    "weight_bytes": "size",
}

__getattr__ = lazy_names(__name__, _MODULE_OF)
