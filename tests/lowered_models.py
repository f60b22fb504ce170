"""Small models and the PT2E steps that bring them to the backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from qframework.backend.compile import lower, run_passes
from qframework.backend.lowering import Lowering
from qframework.backend.options import BackendOptions
from qframework.backend.report import LayerReport
from qframework.quantizer import LinearConfig, QFrameworkQuantizer, calibrate, static_int8


class Block(nn.Module):
    """LayerNorm -> linear -> activation -> dropout -> linear -> dropout -> residual sum, as in a transformer."""

    def __init__(self, activation: nn.Module | None = None, dim: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, 2 * dim)
        self.act = activation or nn.GELU()
        self.drop = nn.Dropout(0.1)
        self.fc2 = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.fc2(self.drop(self.act(self.fc1(self.norm(x))))))


def example(dim: int = 32) -> Tensor:
    return torch.randn(2, 7, dim)


def exported(model: nn.Module, x: Tensor) -> GraphModule:
    batch = torch.export.Dim("batch", min=1, max=512)
    return torch.export.export(model.eval(), (x,), dynamic_shapes=({0: batch},)).module()


def converted(model: nn.Module, x: Tensor, config: LinearConfig | None = None, **rules: None) -> GraphModule:
    quantizer = QFrameworkQuantizer().set_global(config or static_int8())
    for name, rule in rules.items():
        quantizer.set_module_name(name, rule)
    prepared = prepare_pt2e(exported(model, x), quantizer)
    calibrate(prepared, [x], progress=False)
    return convert_pt2e(prepared)


def lowered(gm: GraphModule, **options: str | bool) -> tuple[GraphModule, list[LayerReport]]:
    reports = lower(gm, (), BackendOptions(**options))
    return gm, reports


def without_inductor(kept: list[GraphModule] | None = None, **options: str | bool) -> Callable[..., Any]:
    """The backend, except that the lowered graph runs as it is, after its checks; ``kept`` gets each graph."""

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        lowering = Lowering.of(gm, inputs, BackendOptions(**options))
        run_passes(lowering)
        if kept is not None:
            kept.append(gm)

        def run(*args: Any) -> Any:
            for check in lowering.checks:
                check(args)
            return gm(*args)

        return run

    return backend


def lowered_graph(
    model: nn.Module, x: Tensor, dynamic: bool = False, **options: str
) -> tuple[GraphModule, Sequence[Any]]:
    """The graph of a model that Dynamo captured, lowered as by the backend, and its inputs."""
    found = []

    def keep(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        lower(gm, inputs, BackendOptions(**options))
        found.append((gm, inputs))
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=keep, dynamic=dynamic)(x)
    return found[0]


def targets(gm: GraphModule) -> list[object]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def count(gm: GraphModule, target: object) -> int:
    return targets(gm).count(target)
