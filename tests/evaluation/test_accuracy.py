"""Ranks of labels, against a sort in plain Python, and top-1."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qframework.errors import QFrameworkError
from qframework.evaluation import top1
from qframework.evaluation.accuracy import label_ranks


def test_ranks_match_a_sort_in_python() -> None:
    logits, labels = torch.randint(-3, 4, (200, 7)).float(), torch.randint(0, 7, (200,))
    orders = [sorted(range(7), key=lambda c, row=row: (-row[c], c)) for row in logits.tolist()]
    expected = [order.index(label) for order, label in zip(orders, labels.tolist(), strict=True)]
    assert len(set(expected)) == 7
    assert label_ranks(logits, labels).tolist() == expected


def test_of_equal_logits_the_first_class_is_the_prediction() -> None:
    assert label_ranks(torch.zeros(3, 5), torch.tensor([0, 1, 4])).tolist() == [0, 1, 4]


def test_a_label_ranks_last_in_a_row_with_nan() -> None:
    logits = torch.tensor([[float("nan"), 0.0], [2.0, float("nan")], [2.0, 1.0]])
    assert label_ranks(logits, torch.zeros(3, dtype=torch.int64)).tolist() == [2, 2, 0]
    assert top1(nn.Identity(), [(logits, torch.zeros(3, dtype=torch.int64))]) == pytest.approx(100 / 3)


@pytest.mark.parametrize("label", [-1, 3, 10**9])
def test_labels_out_of_range_are_refused(label: int) -> None:
    with pytest.raises(QFrameworkError, match=f"labels must be 0 to 2, the classes of the model, got {label}"):
        top1(nn.Identity(), [(torch.eye(3), torch.tensor([0, label, 2]))])


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.int64)),
        (torch.zeros(3, 2), torch.zeros(3)),
    ],
)
def test_other_shapes_and_dtypes_are_refused(logits: torch.Tensor, labels: torch.Tensor) -> None:
    with pytest.raises(QFrameworkError, match="must have shape \\(B, classes\\) and labels \\(B,\\) of integers"):
        label_ranks(logits, labels)


def test_top1_counts_over_uneven_batches() -> None:
    logits = F.one_hot(torch.tensor([0, 1, 2, 3, 4]), 10).float()
    labels = torch.tensor([0, 1, 2, 9, 9])
    loader = [(logits[:4], labels[:4]), (logits[4:], labels[4:])]
    assert top1(nn.Identity(), loader) == pytest.approx(60.0)


def test_top1_takes_a_generator() -> None:
    assert top1(nn.Identity(), (pair for pair in [(torch.eye(3), torch.arange(3))])) == 100.0


def test_top1_refuses_an_empty_loader() -> None:
    with pytest.raises(QFrameworkError, match="loader must yield at least one image"):
        top1(nn.Identity(), [])


def test_top1_runs_without_gradients() -> None:
    seen = []

    def model(images: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return images

    top1(model, [(torch.eye(3), torch.arange(3))])
    assert seen == [False]
