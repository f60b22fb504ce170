"""Training steps as CUDA graphs: a small model's step takes longer to launch than to compute."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Update = Callable[[Tensor, Tensor], Tensor]
_ORDINARY_STEPS = 3  # in which kernels are compiled and the optimizer's states are made


class StepGraph:
    """``update(inputs, targets)``, which returns the loss, captured in one CUDA graph after some ordinary calls.

    ``update`` makes a whole step and must not wait for the GPU. All calls must come from one stream, not the default
    one, with inputs of the same shapes.
    """

    def __init__(self, update: Update) -> None:
        self.update = update
        self.ordinary = 0
        self.captured: tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor] | None = None

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of one step."""
        if self.ordinary < _ORDINARY_STEPS:
            self.ordinary += 1
            return self.update(inputs, targets)
        self.captured = self.captured or self._capture(inputs, targets)
        graph, its_inputs, its_targets, loss = self.captured
        its_inputs.copy_(inputs)
        its_targets.copy_(targets)
        graph.replay()
        return loss.clone()

    def _capture(self, inputs: Tensor, targets: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]:
        """Record a step, without making it."""
        stream = torch.cuda.current_stream()
        inputs, targets = inputs.to(stream.device, copy=True), targets.to(stream.device, copy=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            loss = self.update(inputs, targets)
        return graph, inputs, targets, loss
