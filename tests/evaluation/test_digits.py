"""The digits: reading, splitting and normalization."""

from __future__ import annotations

import torch

from qframework.evaluation import digits


def rows(dataset: torch.utils.data.TensorDataset) -> set[tuple[float, ...]]:
    return {tuple(image.flatten().tolist()) for image in dataset.tensors[0]}


def test_every_image_is_in_one_of_the_two_sets() -> None:
    data = digits.load_digits()
    assert len(data.train) + len(data.held_out) == 1797
    assert len(rows(data.train) | rows(data.held_out)) == len(rows(data.train)) + len(rows(data.held_out))


def test_images_are_normalised() -> None:
    images, labels = digits.load_digits().train.tensors
    assert images.shape[1:] == (1, 8, 8)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert (images.min(), images.max()) == (-1.0, 1.0)


def test_held_out_is_a_stratified_third() -> None:
    data = digits.load_digits()
    train, held_out = (torch.bincount(split.tensors[1], minlength=10) for split in (data.train, data.held_out))
    # round() is at most half an image away from a third of each class
    assert ((held_out - (train + held_out) / 3).abs() <= 0.5).all()


def test_calibration_is_drawn_from_train() -> None:
    data = digits.load_digits(calibration_images=100)
    assert len(data.calibration) == 100
    assert rows(data.calibration) <= rows(data.train)


def test_the_seed_decides_the_split() -> None:
    first, again, other = digits.load_digits(1), digits.load_digits(1), digits.load_digits(2)
    assert torch.equal(first.held_out.tensors[0], again.held_out.tensors[0])
    assert not torch.equal(first.held_out.tensors[0], other.held_out.tensors[0])


def test_the_split_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    digits.load_digits()
    assert torch.equal(torch.rand(1), expected)


def test_loader_keeps_the_order_and_the_last_images() -> None:
    dataset = digits.load_digits().held_out
    batches = list(digits.loader(dataset, batch_size=128))
    assert torch.equal(torch.cat([images for images, _ in batches]), dataset.tensors[0])
