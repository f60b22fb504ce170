"""Top-1 accuracy of a classifier."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from qframework.errors import QFrameworkError
from qframework.evaluation.progress import progress_bar


@torch.no_grad()
def top1(
    model: Callable[[Tensor], Tensor],
    loader: Iterable[tuple[Tensor, Tensor]],
    *,
    device: torch.device | str = "cpu",
    show_progress: bool = False,
) -> float:
    """Share of images whose largest logit is at the label, in percent.

    Args:
        model: ``(B, ...)`` to logits ``(B, classes)``; it must already be in eval mode and on ``device``.
        loader: yields ``(images, labels)`` with labels ``(B,)`` int64.
        device: where to move the images.
        show_progress: draw a progress bar on stderr.

    Raises:
        QFrameworkError: the loader was empty.
    """
    correct = total = 0
    with progress_bar("Measuring top-1", _length(loader), show_progress) as advance:
        for images, labels in loader:
            predicted = model(images.to(device)).argmax(dim=-1).cpu()
            correct += int((predicted == labels.cpu()).sum())
            total += len(labels)
            advance()
    if total == 0:
        raise QFrameworkError("top1 saw no images: the loader is empty; give one with at least one batch")
    return 100.0 * correct / total


def _length(loader: Iterable[object]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # an iterable of unknown length, or an IterableDataset behind a DataLoader
        return None
