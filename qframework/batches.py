"""Batches of calibration data: a model's device, batches on it, and the progress bar over them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qframework.compat import pytree


def device_of(model: nn.Module) -> torch.device | None:
    """The device of the first parameter or buffer; None for a model without any."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return None


def move(batch: Any, device: torch.device | None) -> Any:
    """``batch`` with its tensors on ``device``."""
    if isinstance(batch, Mapping):
        batch = dict(batch)  # other mappings are leaves to pytree
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


@contextlib.contextmanager
def progress_bar(
    description: str, data: Iterable[Any], batches: int | None, wanted: bool
) -> Iterator[Callable[[], None]]:
    """A transient progress bar, if wanted and standard error is a terminal; yields what to call after each batch."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=_total(data, batches))
        yield lambda: bar.advance(task)


def _total(data: Iterable[Any], batches: int | None) -> int | None:
    try:
        length = len(data)  # type: ignore[arg-type]
    except TypeError:  # an iterator, or a DataLoader over an IterableDataset
        return batches
    return length if batches is None else min(length, batches)
