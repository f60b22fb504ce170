"""A task's accuracy with a given module, for searches and benchmarks that make their own modules."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from qframework.evaluation.tasks import Module, Task


@torch.no_grad()
def task_counts(task: Task, module: Module, *, device: torch.device | str = "cpu") -> dict[str, int]:
    """The counts of all batches, with ``module`` in place of the task's own; see ``Task.counted``.

    Args:
        task: what is measured.
        module: float32 in and out, in eval mode, on ``device``.
        device: where to move the batches.
    """
    counts = dict.fromkeys(task.counted, 0)
    for batch in task.batches(range(len(task))):
        found: Mapping[str, int] = task.count(module, batch, torch.device(device), torch.float32)
        for name, value in found.items():
            counts[name] += value
    return counts


def task_figures(task: Task, module: Module, *, device: torch.device | str = "cpu") -> dict[str, float]:
    """The figures of these counts in percent, the most important first.

    Raises:
        QFrameworkError: nothing could be counted.
    """
    return task.figures(task_counts(task, module, device=device))
