"""scikit-learn's handwritten digits: 1,797 real 8x8 images that ship with the package, so nothing is downloaded.

A third is held out, stratified by class. Calibration images are drawn from the training images. The split depends on
``seed`` alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

IMAGE_SIZE = 8
CLASSES = 10
_MAX_PIXEL = 16.0
_HELD_OUT_FRACTION = 1 / 3


@dataclass(frozen=True)
class Digits:
    """Images ``(N, 1, 8, 8)`` float32 in [-1, 1] and labels ``(N,)`` int64, in three sets.

    ``calibration`` is a subset of ``train``; ``held_out`` shares no image with either.
    """

    train: TensorDataset
    calibration: TensorDataset
    held_out: TensorDataset


def load_digits(seed: int = 0, calibration_images: int = 256) -> Digits:
    """Read and split the digits.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed (``pip install scikit-learn``).
    """
    from sklearn.datasets import load_digits as sklearn_digits

    data = sklearn_digits()
    images = torch.from_numpy(data.images).float().unsqueeze(1) / (_MAX_PIXEL / 2) - 1
    labels = torch.from_numpy(data.target).long()
    generator = torch.Generator().manual_seed(seed)
    train, held_out = _stratified_split(labels, generator)
    calibration = train[:calibration_images]
    return Digits(*(TensorDataset(images[chosen], labels[chosen]) for chosen in (train, calibration, held_out)))


def _stratified_split(labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Shuffled indices of the training and the held-out images, with equal class proportions."""
    train, held_out = [], []
    for digit in labels.unique():
        indices = torch.nonzero(labels == digit).squeeze(1)
        indices = indices[torch.randperm(len(indices), generator=generator)]
        held_out_count = round(len(indices) * _HELD_OUT_FRACTION)
        held_out.append(indices[:held_out_count])
        train.append(indices[held_out_count:])
    return _shuffled(torch.cat(train), generator), _shuffled(torch.cat(held_out), generator)


def _shuffled(indices: Tensor, generator: torch.Generator) -> Tensor:
    return indices[torch.randperm(len(indices), generator=generator)]


def loader(dataset: TensorDataset, batch_size: int = 128) -> DataLoader:
    """Batches of ``(images, labels)`` in the order of the data set; the last one may be smaller."""
    return DataLoader(dataset, batch_size=batch_size)
