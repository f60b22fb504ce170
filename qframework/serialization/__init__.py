"""Save a quantized model to one file and load it in another process, without its Python code.

The file is an archive of ``torch.export.save`` with one more member, ``qframework.json``::

    {"format": 1, "versions": {"qframework": ..., "torch": ..., "torchao": ...}, "devices": [...], "config": {...}}

Loading a file runs no code from it. Every member must match its CRC-32, the members must be exactly those that ``save``
writes, nothing is unpickled, and PyTorch receives only values that a grammar accepts: operators on tensors by name,
conditions and sizes as arithmetic, containers of Python. A loaded model computes what its file says: do not trust its
outputs more than the file, and expect that it may run out of memory.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import os
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from qframework.compat.dynamo import is_compiled
from qframework.errors import FileFormatError, QFrameworkError, UnsupportedError, first_line
from qframework.files import atomic_write, open_regular
from qframework.graph.export_program import export_program
from qframework.serialization.archive import METADATA, PROGRAM, Archive
from qframework.serialization.grammar import INT, PLAIN, many, mapping, one_of, record, refuse
from qframework.serialization.program import build_model, check_program

__all__ = ["FORMAT", "load", "read_metadata", "save"]

FORMAT = 1


def _config(value: Any, where: str) -> dict[str, Any]:
    return value if isinstance(value, dict) else refuse(value, where, "an object")


_METADATA_FILE = "qframework.json"
_METADATA = record(
    format=INT, versions=mapping(PLAIN, PLAIN), devices=many(one_of(("cpu", "cuda", "mps", "xpu"))), config=_config
)

_EXPERTS = (
    ". Experts of transformers use that operator on CPUs: call model.set_experts_implementation('batched_mm') before "
    "quantize, so that they use PyTorch's own"
)


def save(
    model: GraphModule | ExportedProgram,
    path: str | os.PathLike[str],
    example_inputs: tuple[Any, ...],
    *,
    dynamic_shapes: Any = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write ``model`` to ``path``; an existing file is replaced only once the new one is complete.

    Symbolic links are followed and an existing file keeps its mode. The data are first written to ``.NAME.*.partial``
    beside it; if the process is killed, the next ``save`` to the same path removes that file.

    Args:
        model: the result of ``convert_pt2e``, or an exported program of it.
        path: any name; ``.pt2`` is customary.
        example_inputs: positional inputs to export a GraphModule with; not used for an ExportedProgram.
        dynamic_shapes: as in ``torch.export.export``: which dimensions of the inputs may vary. Without it the loaded
            model accepts the shapes of ``example_inputs`` only.
        config: JSON-able description to keep with the model, for example ``quantizer.to_dict()``; ``read_metadata``
            returns it.

    Raises:
        QFrameworkError: ``model`` is compiled, prepared or otherwise not a converted model, ``config`` cannot be
            written as JSON, or ``path`` is a folder, a FIFO or a device.
        UnsupportedError: the model calls operators that ``load`` would refuse, such as those of other packages.
        OSError: the file cannot be written, for example because the disk is full; an existing file is intact.
    """
    program = copy.copy(_export(model, example_inputs, dynamic_shapes))
    program.example_inputs = None  # PyTorch would pickle them, and they are the user's data
    metadata = _describe(program, config)
    with atomic_write(path) as file:
        torch.export.save(program, file, extra_files={_METADATA_FILE: metadata})
        file.seek(0)
        try:
            archive, _ = _checked_archive(file, path)
            archive.payloads()
            checked = check_program(archive.json(PROGRAM))
            # as load does, on the tensors at hand
            _build(checked, dict(program.state_dict), dict(program.constants))
        except FileFormatError as error:
            remedy = _EXPERTS if "torch.ops.transformers." in str(error) else ""
            raise UnsupportedError(f"save: load would refuse this model: {error}{remedy}") from error


def load(path: str | os.PathLike[str]) -> GraphModule:
    """Read a model that ``save`` wrote, ready for ``torch.compile(..., backend="qframework")``.

    Its outputs are those of the saved model, and its layers keep their names. No code from the file runs.

    Raises:
        FileFormatError: the file is damaged, not written by ``save``, of a newer format, or holds something that no
            model needs.
        FileNotFoundError: there is no such file.
        QFrameworkError: the model was saved on a GPU and there is none.
    """
    with open_regular(path) as file:
        archive, metadata = _checked_archive(file, path)
        _check_devices(metadata["devices"], path)
        weights, constants = archive.payloads()
        try:
            checked = check_program(archive.json(PROGRAM))
            return _build(checked, *archive.tensors(weights, constants))
        except FileFormatError as error:
            versions = ", ".join(f"{name} {version}" for name, version in metadata["versions"].items())
            raise FileFormatError(
                f"{path}: PyTorch {torch.__version__} cannot load the program in it, which was written by {versions}: "
                f"{first_line(error)}"
            ) from error


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The ``qframework.json`` of a saved model: format, versions, devices and the ``config`` given to ``save``.

    Raises:
        FileFormatError: the file is damaged, not written by ``save``, or of a newer format.
        FileNotFoundError: there is no such file.
    """
    with open_regular(path) as file:
        return _checked_archive(file, path)[1]


def _build(checked: Mapping[str, Any], weights: dict[str, Any], constants: dict[str, Any]) -> GraphModule:
    """Build the model; any error of PyTorch means that the file is bad."""
    try:
        return build_model(checked, weights, constants)
    except (MemoryError, torch.OutOfMemoryError, FileFormatError):
        raise
    except Exception as error:
        raise FileFormatError(first_line(error)) from error


def _export(model: GraphModule | ExportedProgram, example_inputs: tuple[Any, ...], dynamic_shapes: Any) -> Any:
    if isinstance(model, ExportedProgram):
        if dynamic_shapes is not None:
            raise QFrameworkError("save: dynamic_shapes must be None for an ExportedProgram, on which it has no effect")
        return model
    if is_compiled(model):
        raise QFrameworkError(
            "save: model must not be compiled. Save the model given to torch.compile, and compile after load"
        )
    if not isinstance(model, GraphModule):
        raise QFrameworkError(
            f"save: model must be a GraphModule of convert_pt2e or an ExportedProgram, got {type(model).__name__}"
        )
    if any(name.startswith("activation_post_process") for name, _ in model.named_children()):
        raise QFrameworkError(
            "save: model must not hold observers. Calibrate it and pass it through convert_pt2e first"
        )
    if not isinstance(example_inputs, tuple):
        raise QFrameworkError(
            f"save: example_inputs must be a tuple of positional inputs, got {type(example_inputs).__name__}"
        )
    return export_program("save", model, example_inputs, {}, dynamic_shapes)


def _describe(program: ExportedProgram, config: Mapping[str, Any] | None) -> str:
    import qframework

    if not isinstance(config, Mapping | None):
        raise QFrameworkError(f"save: config must be a mapping of JSON-able values, got {type(config).__name__}")
    metadata = {
        "format": FORMAT,
        "versions": {
            "qframework": qframework.__version__,
            "torch": torch.__version__,
            "torchao": importlib.metadata.version("torchao"),
        },
        "devices": sorted({value.device.type for value in program.state_dict.values()}),
        "config": dict(config or {}),
    }
    try:
        return json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise QFrameworkError(f"save: config must hold JSON-able values only: {error}") from error


def _checked_archive(file: BinaryIO, path: str | os.PathLike[str]) -> tuple[Archive, dict[str, Any]]:
    """The archive of a complete file that ``save`` wrote in a known format, and its metadata."""
    archive = Archive(file, path)
    if METADATA not in archive.names():
        raise FileFormatError(
            f"{path} was not written by qframework.save: the archive holds no {_METADATA_FILE}. Read files of "
            "torch.save with torch.load, those of torch.export.save with torch.export.load"
        )
    document = archive.json(METADATA)
    _check_format(document, path)
    try:
        return archive, _METADATA(document, _METADATA_FILE)
    except FileFormatError as error:
        raise FileFormatError(f"{path}: {error}") from error


def _check_format(document: Any, path: str | os.PathLike[str]) -> None:
    version = document.get("format") if isinstance(document, dict) else None
    if type(version) is not int or version < 1:
        raise FileFormatError(f"{path} was not written by qframework.save: its {_METADATA_FILE} names no format")
    if version > FORMAT:
        versions = document.get("versions")
        writer = versions.get("qframework") if isinstance(versions, dict) else None
        raise FileFormatError(
            f"{path}: format must be up to {FORMAT}, got {version}, written by qframework {str(writer)[:40]}. Upgrade "
            "qframework"
        )


def _check_devices(devices: list[str], path: str | os.PathLike[str]) -> None:
    if "cuda" in devices and not torch.cuda.is_available():
        raise QFrameworkError(
            f"{path} was saved on a GPU, and this machine has none. Load it on a machine with a GPU, or export, "
            "quantize and save the model on the CPU"
        )
