"""Throughput, against a fake clock."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from qframework.errors import QFrameworkError
from qframework.evaluation import throughput


def test_throughput_is_images_over_the_median_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 0.0, 2.0, 0.0, 90.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    calls = []
    assert throughput(calls.append, torch.zeros(8, 1), warmup=2, repeats=3) == 8 / 2.0
    assert len(calls) == 2 + 3


@pytest.mark.parametrize(("images", "repeats"), [(0, 3), (2, 0)])
def test_throughput_of_nothing_is_an_error(images: int, repeats: int) -> None:
    with pytest.raises(QFrameworkError, match=f"{images} images and repeats={repeats}"):
        throughput(nn.Identity(), torch.zeros(images, 1), repeats=repeats)
