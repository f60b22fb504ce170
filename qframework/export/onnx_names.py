"""Readable names in an ONNX document: outputs, axes that vary, and scales of weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch.export import ExportedProgram

from qframework.compat.pytree import TreeSpec, children
from qframework.export.plain_outputs import key_names

_NOTES = ("pkg.torch.onnx.stack_trace", "pkg.torch.onnx.fx_node", "pkg.torch.export.ExportedProgram.range_constraints")


def output_names(program: ExportedProgram) -> list[str]:
    """``output`` for a single tensor, the keys of a mapping, else ``output_0`` and so on; nested names with dots."""
    spec = program.call_spec.out_spec
    assert spec is not None
    names = [".".join(path) for path in _paths(spec)]
    named = [f"output_{name}" if name[:1].isdigit() else name or "output" for name in names]
    taken = {node.name for node in program.graph.nodes if node.op == "placeholder"}
    return [f"{name}_out" if name in taken else name for name in named]


def _paths(spec: TreeSpec) -> Iterator[tuple[str, ...]]:
    below = children(spec)
    if not below:
        if spec.is_leaf():
            yield ()
        return
    names = key_names(spec) or [str(number) for number in range(len(below))]
    for name, child in zip(names, below, strict=True):
        for path in _paths(child):
            yield (name, *path)


def name_axes(document: Any, first_sizes: Sequence[int | None]) -> None:
    """Rename the symbols of axes: ``batch`` for the first axis of an input, ``{input}_axis_{i}`` for others.

    ``first_sizes`` has the first size of each example input; those that differ from the first one's are no batch.
    """
    names: dict[str, str] = {}
    batch: int | None = None
    for value, first in zip(document.graph.inputs, first_sizes, strict=True):
        for axis, size in enumerate(value.shape or ()):
            if isinstance(size, int) or size.value is None or size.value in names:
                continue
            batch = first if axis == 0 and batch is None else batch
            names[size.value] = "batch" if axis == 0 and first == batch else f"{value.name}_axis_{axis}"
    if not names:
        return
    symbol = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names))
    for value in _values(document):
        for axis, size in enumerate(value.shape or ()):
            if not isinstance(size, int) and size.value is not None:
                value.shape[axis] = symbol.sub(lambda match: names[match[0]], size.value)


def _values(document: Any) -> Iterator[Any]:
    yield from document.graph.inputs
    for node in document.graph.all_nodes():
        yield from node.outputs


def name_scales(document: Any) -> None:
    """Call the scale of ``blocks.0.fc1.weight_int8`` ``blocks.0.fc1.weight_scale``; constant folding numbers them."""
    taken = set(document.graph.initializers)
    for node in document.graph:
        if node.op_type != "DequantizeLinear" or "weight_int8" not in node.inputs[0].name:
            continue
        name = node.inputs[0].name.replace("weight_int8", "weight_scale")
        scale = node.inputs[1]
        if scale.name in document.graph.initializers and name not in taken:
            taken.add(name)
            scale.name = name


def remove_private_notes(document: Any) -> None:
    """Remove stack traces, which name folders of this machine, and other notes that are larger than the graph."""
    for node in document.graph.all_nodes():
        for note in _NOTES:
            node.metadata_props.pop(note, None)
    for note in _NOTES:
        document.metadata_props.pop(note, None)
