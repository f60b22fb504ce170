"""Intersection over union of masks, counted in integers, so that sums do not depend on their order."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qframework.errors import QFrameworkError

# Rounding an IoU to units of 2^-32 is off by at most 2^-33, and so is the mean. The sum over 2^31 masks fits int64.
IOU_UNITS = 2**32


def count_iou(predicted: Tensor, expected: Tensor) -> dict[str, int]:
    """Counts of ``K`` masks: ``masks``, ``iou_units`` (the sum of IoUs), pixels of ``intersection`` and ``union``.

    Args:
        predicted: ``(K, H, W)`` bool.
        expected: ``(K, H, W)`` bool, each with at least one pixel.

    Raises:
        QFrameworkError: wrong dtypes or shapes, or an empty expected mask.
    """
    if predicted.shape != expected.shape or expected.dim() != 3 or {predicted.dtype, expected.dtype} != {torch.bool}:
        raise QFrameworkError(
            f"count_iou: masks must both have shape (K, H, W) and dtype torch.bool, got {tuple(predicted.shape)} "
            f"{predicted.dtype} and {tuple(expected.shape)} {expected.dtype}"
        )
    expected = expected.to(predicted.device)
    if not bool(expected.flatten(1).any(dim=1).all()):
        raise QFrameworkError("count_iou: each expected mask must have at least one pixel, got an empty one")
    intersections = (predicted & expected).sum((1, 2)).tolist()
    unions = (predicted | expected).sum((1, 2)).tolist()
    # Python integers, since pixels times 2^32 overflow int64.
    units = sum((2 * i * IOU_UNITS + u) // (2 * u) for i, u in zip(intersections, unions, strict=True))
    return {"masks": len(unions), "iou_units": units, "intersection": sum(intersections), "union": sum(unions)}


def mean_iou(counts: Mapping[str, int]) -> dict[str, float]:
    """``miou``, the mean IoU over masks, and ``pixel_iou``, the IoU of all pixels together, in percent.

    Raises:
        QFrameworkError: no mask was counted.
    """
    if not counts["masks"]:
        raise QFrameworkError(
            "mean_iou: counts must hold at least one mask, got none: every image was skipped, or none has an annotation"
        )
    return {
        "miou": 100.0 * counts["iou_units"] / (IOU_UNITS * counts["masks"]),
        "pixel_iou": 100.0 * counts["intersection"] / counts["union"],
    }
