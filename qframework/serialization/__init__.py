"""Save a quantized model to one file and load it in another process, without its Python code.

The file is an archive of ``torch.export.save`` with one more member, ``qframework.json``::

    {"format": 1, "versions": {"qframework": ..., "torch": ..., "torchao": ...}, "devices": [...], "config": {...}}

Loading a file runs no code from it. Every member is held against its CRC-32, the set of members must be exactly the one
that ``save`` writes, nothing is unpickled, and PyTorch sees only values that a grammar accepts: operators on tensors by
name, conditions and sizes as arithmetic, containers of Python. A loaded model computes what its file says, so its
outputs deserve no more trust than the file, and what it computes may need more memory than there is.
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
from qframework.errors import FileFormatError, QFrameworkError, UnsupportedError
from qframework.files import atomic_write, open_regular
from qframework.serialization.archive import METADATA, PROGRAM, Archive
from qframework.serialization.grammar import INT, PLAIN, many, mapping, one_of, record, refuse
from qframework.serialization.program import build_model, check_program

__all__ = ["FORMAT", "load", "read_metadata", "save"]

FORMAT = 1
_LONGEST_REASON = 1000  # characters


def _config(value: Any, where: str) -> dict[str, Any]:
    return value if isinstance(value, dict) else refuse(value, where, "an object")


_METADATA_FILE = "qframework.json"
_METADATA = record(
    format=INT, versions=mapping(PLAIN, PLAIN), devices=many(one_of(("cpu", "cuda", "mps", "xpu"))), config=_config
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

    Symbolic links are followed and an existing file keeps its mode. Until the file is complete its data lie beside it
    in ``.NAME.*.partial``; where a process was killed, the next ``save`` to the same path removes that.

    Args:
        model: what ``convert_pt2e`` returned, or an exported program of it.
        path: any name; ``.pt2`` is customary.
        example_inputs: positional inputs to export a GraphModule with; not used for an ExportedProgram.
        dynamic_shapes: as in ``torch.export.export``: which dimensions of the inputs may vary. Without it the loaded
            model accepts the shapes of ``example_inputs`` only.
        config: JSON-able description to keep with the model, for example ``quantizer.to_dict()``; ``read_metadata``
            gives it back.

    Raises:
        QFrameworkError: a compiled, prepared or other module that is not a converted one, or a ``config`` that JSON
            cannot hold; a ``path`` that is a folder, a FIFO or a device.
        UnsupportedError: the model calls operators that ``load`` would refuse, such as those of other packages.
        OSError: the file cannot be written, for example because the disk is full; an existing file is intact.
    """
    program = copy.copy(_export(model, example_inputs, dynamic_shapes))
    program.example_inputs = None  # would be kept as a pickle, and are the user's data
    metadata = _describe(program, config)
    with atomic_write(path) as file:
        torch.export.save(program, file, extra_files={_METADATA_FILE: metadata})
        file.seek(0)
        try:
            archive, _ = _checked_archive(file, path)
            archive.payloads()
            checked = check_program(archive.json(PROGRAM))
            # As load does, on the tensors that are here.
            _build(checked, dict(program.state_dict), dict(program.constants))
        except FileFormatError as error:
            raise UnsupportedError(f"save: load would refuse this model: {error}") from error


def load(path: str | os.PathLike[str]) -> GraphModule:
    """Read a model that ``save`` wrote, ready for ``torch.compile(..., backend="qframework")``.

    Its outputs are those of the saved model, and its layers keep their names. No code from the file runs.

    Raises:
        FileFormatError: the file is damaged, not written by ``save``, of a newer format, or holds what no model needs.
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
            reason = (str(error).splitlines() or [""])[0][:_LONGEST_REASON]
            raise FileFormatError(
                f"{path}: PyTorch {torch.__version__} cannot load the program in it, which was written by {versions}: "
                f"{reason}"
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
    """The model; whatever PyTorch finds wrong with it is the file's fault."""
    try:
        return build_model(checked, weights, constants)
    except (MemoryError, torch.OutOfMemoryError, FileFormatError):
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0][:_LONGEST_REASON]
        raise FileFormatError(f"{type(error).__name__}: {reason}") from error


def _export(model: GraphModule | ExportedProgram, example_inputs: tuple[Any, ...], dynamic_shapes: Any) -> Any:
    if isinstance(model, ExportedProgram):
        if dynamic_shapes is not None:
            raise QFrameworkError("save: dynamic_shapes has no effect on an ExportedProgram; leave it out")
        return model
    if is_compiled(model):
        raise QFrameworkError("save: the model is compiled; save what was given to torch.compile, compile after load")
    if not isinstance(model, GraphModule):
        raise QFrameworkError(
            f"save: model is {type(model).__name__}; accepted: a GraphModule of convert_pt2e or an ExportedProgram"
        )
    if any(name.startswith("activation_post_process") for name, _ in model.named_children()):
        raise QFrameworkError("save: the model holds observers; calibrate it and pass it through convert_pt2e first")
    if not isinstance(example_inputs, tuple):
        raise QFrameworkError(
            f"save: example_inputs is {type(example_inputs).__name__}; accepted: a tuple of positional inputs"
        )
    try:
        return torch.export.export(model, example_inputs, dynamic_shapes=dynamic_shapes)
    except Exception as error:  # PyTorch raises what the model's own code does, and errors of many kinds
        reason = (str(error).strip().splitlines() or [""])[0][:_LONGEST_REASON]
        raise QFrameworkError(
            f"save: torch.export cannot trace the model with these example_inputs and dynamic_shapes: "
            f"{type(error).__name__}: {reason}"
        ) from error


def _describe(program: ExportedProgram, config: Mapping[str, Any] | None) -> str:
    import qframework

    if not isinstance(config, Mapping | None):
        raise QFrameworkError(f"save: config is {type(config).__name__}; accepted: a mapping of JSON-able values")
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
        raise QFrameworkError(
            f"save: config cannot be written as JSON ({error}); accepted: JSON-able values"
        ) from error


def _checked_archive(file: BinaryIO, path: str | os.PathLike[str]) -> tuple[Archive, dict[str, Any]]:
    """A file that is whole, ours and of a known format, and its metadata."""
    archive = Archive(file, path)
    if METADATA not in archive.names():
        raise FileFormatError(
            f"{path} was not written by qframework.save: the archive holds no {_METADATA_FILE}. Files of torch.save "
            "are read by torch.load, those of torch.export.save by torch.export.load"
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
        raise FileFormatError(f"{path}: its {_METADATA_FILE} names no format; accepted: what qframework.save writes")
    if version > FORMAT:
        versions = document.get("versions")
        writer = versions.get("qframework") if isinstance(versions, dict) else None
        raise FileFormatError(
            f"{path} has format {version}, written by qframework {str(writer)[:40]}; this version reads formats up to "
            f"{FORMAT}: upgrade qframework"
        )


def _check_devices(devices: list[str], path: str | os.PathLike[str]) -> None:
    if "cuda" in devices and not torch.cuda.is_available():
        raise QFrameworkError(
            f"{path} was saved on a GPU and there is none here; accepted: a machine with a GPU, or a model that was "
            "exported, quantized and saved on the CPU"
        )
