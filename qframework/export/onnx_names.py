"""Readable names in an ONNX document: outputs, axes that vary, and scales of weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram

from qframework.compat.pytree import TreeSpec, children
from qframework.export.plain_outputs import key_names

_NOTES = ("pkg.torch.onnx.stack_trace", "pkg.torch.onnx.fx_node", "pkg.torch.export.ExportedProgram.range_constraints")


def output_names(program: ExportedProgram) -> list[str]:
    """``output`` for a single tensor, the keys of a mapping, else ``output_0`` and so on; nested names with dots.

    Outputs that are None have no name, since a file does not hold them.
    """
    spec = program.call_spec.out_spec
    assert spec is not None
    outputs = zip(_paths(spec), program.graph_signature.user_outputs, strict=True)
    names = [".".join(path) for path, output in outputs if output is not None]
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


def given_axis_names(inputs: Sequence[Any], dynamic_shapes: Any, names: Sequence[str]) -> list[dict[int, str]]:
    """The names of ``torch.export.Dim`` for the axes of each tensor in ``inputs``, in order.

    ``names`` are the inputs' own, for a ``dynamic_shapes`` that is a mapping.
    """
    if isinstance(dynamic_shapes, Mapping):
        dynamic_shapes = [dynamic_shapes.get(name) for name in names]
    return list(_given(list(inputs), dynamic_shapes))


def _given(value: Any, spec: Any) -> Iterator[dict[int, str]]:
    if isinstance(value, Tensor):
        axes = spec.items() if isinstance(spec, Mapping) else enumerate(spec or ())
        found = {axis: getattr(dim, "__name__", "") for axis, dim in axes}
        yield {axis: name for axis, name in found.items() if name.isidentifier()}
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _given(inner, spec and spec.get(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _given(inner, spec and spec[number])


def name_axes(document: Any, first_sizes: Sequence[int | None], given: Sequence[Mapping[int, str]]) -> None:
    """Rename the symbols of axes: as in ``given``, else ``batch`` for the first axis, ``{input}_axis_{i}`` for others.

    ``first_sizes`` has the first size of each example input; those that differ from the first one's are no batch.
    """
    names: dict[str, str] = {}
    batch: int | None = None
    for value, first, known in zip(document.graph.inputs, first_sizes, given, strict=True):
        for axis, size in enumerate(value.shape or ()):
            if isinstance(size, int) or size.value is None or size.value in names:
                continue
            batch = first if axis == 0 and batch is None else batch
            default = "batch" if axis == 0 and first == batch else f"{value.name}_axis_{axis}"
            names[size.value] = known.get(axis, default)
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
