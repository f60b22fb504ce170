"""Intersection over union, against NumPy and known values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qframework.errors import QFrameworkError
from qframework.evaluation.miou import IOU_UNITS, count_iou, mean_iou


def numpy_iou(predicted: torch.Tensor, expected: torch.Tensor) -> list[float]:
    pairs = zip(predicted.numpy(), expected.numpy(), strict=True)
    return [np.logical_and(p, e).sum() / np.logical_or(p, e).sum() for p, e in pairs]


def test_counts_of_masks_known_beforehand() -> None:
    expected = torch.zeros(3, 4, 4, dtype=torch.bool)
    expected[:, :2] = True  # 8 pixels
    predicted = torch.zeros_like(expected)
    predicted[0, :2] = True  # the same
    predicted[1, 1:3] = True  # 4 of 12
    counts = count_iou(predicted, expected)  # the last one is found nowhere
    assert counts == {
        "masks": 3,
        "iou_units": IOU_UNITS + (IOU_UNITS + 1) // 3,
        "intersection": 12,
        "union": 8 + 12 + 8,
    }
    figures = mean_iou(counts)
    assert figures["miou"] == pytest.approx(100 * (1 + 1 / 3) / 3, abs=100 / IOU_UNITS)
    assert figures["pixel_iou"] == pytest.approx(100 * 12 / 28)


def test_the_mean_matches_numpy() -> None:
    predicted, expected = torch.rand(2, 50, 9, 11) > 0.4
    ious = numpy_iou(predicted, expected)
    # each IoU is rounded to a unit: half of one at most, in percent
    assert mean_iou(count_iou(predicted, expected))["miou"] == pytest.approx(100 * np.mean(ious), abs=50.1 / IOU_UNITS)


def test_sums_do_not_depend_on_the_split_over_processes() -> None:
    predicted, expected = torch.rand(2, 12, 5, 7) > 0.5
    whole = count_iou(predicted, expected)
    parts = [count_iou(p, e) for p, e in zip(predicted.split(5), expected.split(5), strict=True)]
    assert whole == {key: sum(part[key] for part in parts) for key in whole}


def test_large_masks_do_not_overflow() -> None:
    mask = torch.ones(1, 2048, 2048, dtype=torch.bool)  # 2^22 pixels times 2^32 units need 54 bits, twice that 55
    assert count_iou(mask.expand(3, -1, -1), mask.expand(3, -1, -1))["iou_units"] == 3 * IOU_UNITS


def test_an_expected_mask_without_a_pixel_is_refused() -> None:
    with pytest.raises(QFrameworkError, match="each expected mask must have at least one pixel"):
        count_iou(torch.ones(2, 3, 3, dtype=torch.bool), torch.zeros(2, 3, 3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("predicted", "expected"),
    [
        (torch.ones(1, 3, 3, dtype=torch.bool), torch.ones(2, 3, 3, dtype=torch.bool)),
        (torch.ones(3, 3, dtype=torch.bool), torch.ones(3, 3, dtype=torch.bool)),
        (torch.ones(1, 3, 3), torch.ones(1, 3, 3, dtype=torch.bool)),
    ],
)
def test_other_shapes_and_dtypes_are_refused(predicted: torch.Tensor, expected: torch.Tensor) -> None:
    with pytest.raises(QFrameworkError, match=r"must both have shape \(K, H, W\) and dtype torch.bool"):
        count_iou(predicted, expected)


def test_counts_without_masks_are_refused() -> None:
    with pytest.raises(QFrameworkError, match="must hold at least one mask, got none"):
        mean_iou({"masks": 0, "iou_units": 0, "intersection": 0, "union": 0})
