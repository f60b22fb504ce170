"""Top-1 and top-5 accuracy of a classifier, as exact counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from qframework.errors import QFrameworkError
from qframework.evaluation.progress import progress_bar


def label_ranks(logits: Tensor, labels: Tensor) -> Tensor:
    """``(B,)`` int64: the rank of each label among the logits, 0 for the largest.

    Of equal logits the class with the lower index ranks first, on every device. In a row with NaN the label ranks last.

    Args:
        logits: ``(B, classes)`` floating point.
        labels: ``(B,)`` integers in [0, classes), on the same device.

    Raises:
        QFrameworkError: wrong shapes, labels that are not integers, or a label outside of the classes.
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1] or labels.is_floating_point():
        raise QFrameworkError(
            f"label_ranks: logits must have shape (B, classes) and labels (B,) of integers, got "
            f"{tuple(logits.shape)} and {tuple(labels.shape)} of {labels.dtype}"
        )
    classes = logits.shape[1]
    outside = labels[(labels < 0) | (labels >= classes)]
    if len(outside):
        raise QFrameworkError(
            f"label_ranks: labels must be 0 to {classes - 1}, the classes of the model, got {int(outside[0])}"
        )
    labels = labels.long().unsqueeze(1)
    own = logits.gather(1, labels)
    earlier = torch.arange(classes, device=logits.device) < labels
    before = (logits > own) | ((logits == own) & earlier)
    return torch.where(logits.isnan().any(dim=1), classes, before.sum(dim=1))


@torch.no_grad()
def top1(
    model: Callable[[Tensor], Tensor],
    loader: Iterable[tuple[Tensor, Tensor]],
    *,
    device: torch.device | str = "cpu",
    show_progress: bool = False,
) -> float:
    """Top-1 accuracy in percent: the share of images whose label has the largest logit.

    Args:
        model: ``(B, ...)`` to logits ``(B, classes)``; it must already be in eval mode and on ``device``.
        loader: yields ``(images, labels)`` with labels ``(B,)`` of integers in [0, classes).
        device: where to move the images.
        show_progress: draw a progress bar on stderr.

    Raises:
        QFrameworkError: the loader was empty, or a label is outside of the model's classes.
    """
    correct = total = 0
    with progress_bar("Measuring top-1", _length(loader), show_progress) as advance:
        for images, labels in loader:
            ranks = label_ranks(model(images.to(device)), labels.to(device))
            correct += int((ranks == 0).sum())
            total += len(labels)
            advance()
    if total == 0:
        raise QFrameworkError("top1: loader must yield at least one image, got none")
    return 100.0 * correct / total


def _length(loader: Iterable[object]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # an iterable of unknown length, or an IterableDataset behind a DataLoader
        return None
