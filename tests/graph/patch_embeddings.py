"""Operands of patch embeddings, and a backend that keeps the lowered graphs."""

from __future__ import annotations

import torch
from lowered_models import count
from torch.nn import functional as F

from qframework.backend.compile import lower
from qframework.backend.options import BackendOptions
from qframework.backend.report import Report


class Capture:
    """A backend that keeps the lowered graphs and runs them in eager mode."""

    def __init__(self, linear="off"):
        self.options, self.graphs, self.reports = BackendOptions(linear=linear), [], []

    def __call__(self, gm, example_inputs):
        reports = lower(gm, example_inputs, self.options)
        self.graphs.append(gm)
        self.reports.append(Report(reports))
        return gm.forward

    def convolutions(self):
        names = [str(node.target) + getattr(node.target, "__name__", "") for node in self.graphs[-1].graph.nodes]
        return sum("conv" in name for name in names)

    def products(self):
        return count(self.graphs[-1], F.linear)


def captured(function, *inputs, linear="off"):
    capture = Capture(linear)
    return torch.compile(function, backend=capture, fullgraph=True)(*inputs), capture


def operands(sizes, kernel, device="cpu", bias=True, features=6):
    x, weight = torch.randn(2, *sizes, dtype=torch.float64), torch.randn(features, sizes[0], *kernel).double()
    b = torch.randn(features, dtype=torch.float64) if bias else None
    return x.to(device), weight.to(device), b if b is None else b.to(device)
