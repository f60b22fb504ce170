"""Layers that no graph of ``torch.compile`` contains, because Dynamo skipped the code that calls them."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from qframework.backend.report import LayerReport
from qframework.compat.graph_breaks import GraphBreak
from qframework.graph.nodes import state_path

OUTSIDE = (
    "outside of the graphs of torch.compile (see the notes), or not called. qframework.quantize_ needs no graph to "
    "quantize it"
)
_NOTHING = "torch.compile captured no graph of this model: its forward is excluded, or calls no PyTorch operation."


def tensors_of(gm: GraphModule, example_inputs: Sequence[Any]) -> set[int]:
    """The identities of all tensors that a graph reads: its inputs, parameters and buffers."""
    own = (*gm.parameters(), *gm.buffers())
    return {id(tensor) for tensor in (*example_inputs, *own) if isinstance(tensor, Tensor)}


def layers_outside(model: torch.nn.Module, captured: Set[int], wanted: bool) -> list[LayerReport]:
    """A report on each ``nn.Linear`` of which no graph reads a parameter; ``wanted`` says that it should be INT8."""
    return [
        LayerReport(name, False, "float linear", OUTSIDE, fallback=wanted)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and captured.isdisjoint(map(id, module.parameters()))
    ]


def notes_on(breaks: Sequence[GraphBreak], graphs: int) -> tuple[str, ...]:
    """A sentence or two on each place that Dynamo did not capture, and on models without any graph."""
    skipped = {(each.reason, each.place) for each in breaks if each.skipped}
    placed = {each.reason for each in breaks if each.place}
    rest = [
        each
        for each in breaks
        if each.skipped or ((each.reason, each.place) not in skipped and (each.place or each.reason not in placed))
    ]
    notes = list(dict.fromkeys(map(note_on, rest)))
    return tuple(notes if graphs or notes else [_NOTHING])


def note_on(each: GraphBreak) -> str:
    """What Dynamo did not capture, where and why."""
    place = f" ({each.place})" if each.place else ""
    if each.skipped:
        return f"torch.compile skips code{place}, whose layers run as in eager mode: {each.reason}"
    return f"torch.compile splits its graph{place}: {each.reason}"


def with_names_of(
    model: torch.nn.Module, gm: GraphModule, example_inputs: Sequence[Any], reports: list[LayerReport]
) -> list[LayerReport]:
    """The reports with names of the whole model, where Dynamo captured a submodule's ``forward`` by itself."""
    prefix = _prefix(model, gm, example_inputs)
    return [replace(report, name=f"{prefix}.{report.name}") for report in reports] if prefix else reports


def _prefix(model: torch.nn.Module, gm: GraphModule, example_inputs: Sequence[Any]) -> str:
    """The path of the module whose ``forward`` a graph contains, by a parameter that it reads."""
    paths: dict[int, list[str]] = {}
    for get in (model.named_parameters, model.named_buffers):
        for path, tensor in get(remove_duplicate=False):
            paths.setdefault(id(tensor), []).append(path)
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=False):
        inner, full = state_path(node), paths.get(id(value), [])
        outer = [path.removesuffix(f".{inner}") for path in full if path.endswith(f".{inner}")]
        if inner in full or outer:
            return "" if inner in full else outer[0]
    return ""
