"""Intersection over union of masks, as integers, so that sums do not depend on the order they are added in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qframework.errors import QFrameworkError

# An IoU is counted in units of 2^-32. Rounding to one is off by 2^-33 at most, and so is the mean; the sum over 2^31
# masks still fits into int64.
IOU_UNITS = 2**32


def count_iou(predicted: Tensor, expected: Tensor) -> dict[str, int]:
    """Counts of ``K`` masks: ``masks``, ``iou_units`` (their IoUs' sum), pixels of ``intersection`` and ``union``.

    Args:
        predicted: ``(K, H, W)`` bool.
        expected: ``(K, H, W)`` bool, each with at least one pixel.

    Raises:
        QFrameworkError: another dtype or shape, or an expected mask without a pixel.
    """
    if predicted.shape != expected.shape or expected.dim() != 3 or {predicted.dtype, expected.dtype} != {torch.bool}:
        raise QFrameworkError(
            f"masks have shapes {tuple(predicted.shape)} {predicted.dtype} and {tuple(expected.shape)} "
            f"{expected.dtype}; accepted: (K, H, W) torch.bool twice"
        )
    expected = expected.to(predicted.device)
    if not bool(expected.flatten(1).any(dim=1).all()):
        raise QFrameworkError("an expected mask has no pixel, so its IoU means nothing; accepted: masks with pixels")
    intersections = (predicted & expected).sum((1, 2)).tolist()
    unions = (predicted | expected).sum((1, 2)).tolist()
    # In Python's integers: pixels times 2^32 do not fit into int64.
    units = sum((2 * i * IOU_UNITS + u) // (2 * u) for i, u in zip(intersections, unions, strict=True))
    return {"masks": len(unions), "iou_units": units, "intersection": sum(intersections), "union": sum(unions)}


def mean_iou(counts: Mapping[str, int]) -> dict[str, float]:
    """``miou``, the mean IoU of the masks, and ``pixel_iou``, that of all pixels taken together, in percent.

    Raises:
        QFrameworkError: no mask was counted.
    """
    if not counts["masks"]:
        raise QFrameworkError("mean IoU of no masks: every image was skipped, or none has an annotation")
    return {
        "miou": 100.0 * counts["iou_units"] / (IOU_UNITS * counts["masks"]),
        "pixel_iou": 100.0 * counts["intersection"] / counts["union"],
    }
