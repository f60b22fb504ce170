"""Save a quantized model to one file and load it in another process, without its Python code.

The file is an archive of ``torch.export.save`` with one more member, ``qframework.json``::

    {"format": 1, "versions": {"qframework": ..., "torch": ..., "torchao": ...}, "devices": [...], "config": {...}}

Before PyTorch sees a file, every member is held against its CRC-32, and whatever PyTorch would unpickle without
restrictions or load as machine code is refused. A saved model is still a program: load files that you trust.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import pickle
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from qframework.errors import FileFormatError, QFrameworkError

FORMAT = 1
_METADATA = "qframework.json"
# What zipfile, json and torch raise on bytes that are not what they claim to be.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    pickle.UnpicklingError,
    RuntimeError,  # NotImplementedError too: a compression method or flag that nobody wrote
    ValueError,  # UnicodeDecodeError and JSONDecodeError too
    AttributeError,
    AssertionError,
    LookupError,
    TypeError,
    EOFError,
    OSError,
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
            cannot hold.
    """
    program = _export(model, example_inputs, dynamic_shapes)
    metadata = _describe(program, config)
    with atomic_write(Path(path)) as file:
        torch.export.save(program, file, extra_files={_METADATA: metadata})


def load(path: str | os.PathLike[str]) -> GraphModule:
    """Read a model that ``save`` wrote, ready for ``torch.compile(..., backend="qframework")``.

    Its outputs are those of the saved model, and its layers keep their names.

    Raises:
        FileFormatError: the file is damaged, not written by ``save``, or of a newer format.
        FileNotFoundError: there is no such file.
        QFrameworkError: the model was saved on a GPU and there is none.
    """
    path = Path(path)
    with path.open("rb") as file:
        metadata = _checked_metadata(file, path)
        _check_devices(metadata.get("devices", []), path)
        file.seek(0)
        # Registers the operators of converted graphs; here, so that importing this module stays cheap.
        import torchao.quantization.pt2e.quantize_pt2e  # noqa: F401

        try:
            return _load_program(file).module()
        except _DAMAGE as error:
            versions = ", ".join(f"{name} {version}" for name, version in metadata["versions"].items())
            raise FileFormatError(
                f"{path}: PyTorch {torch.__version__} cannot load the program in it, which was written by {versions}: "
                f"{_first_line(error)}"
            ) from error


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The ``qframework.json`` of a saved model: format, versions, devices and the ``config`` given to ``save``.

    Raises:
        FileFormatError: the file is damaged, not written by ``save``, or of a newer format.
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    with path.open("rb") as file:
        return _checked_metadata(file, path)


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write ``path`` through: it takes that name when the block ends and is removed when the block raises."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _export(model: GraphModule | ExportedProgram, example_inputs: tuple[Any, ...], dynamic_shapes: Any) -> Any:
    if isinstance(model, ExportedProgram):
        if dynamic_shapes is not None:
            raise QFrameworkError("save: dynamic_shapes has no effect on an ExportedProgram; leave it out")
        return model
    if hasattr(model, "_orig_mod"):
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
    return torch.export.export(model, example_inputs, dynamic_shapes=dynamic_shapes)


def _describe(program: ExportedProgram, config: Mapping[str, Any] | None) -> str:
    import qframework

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


def _checked_metadata(file: BinaryIO, path: Path) -> dict[str, Any]:
    """The metadata of a file that is whole, ours, of a known format and free of code to execute."""
    try:
        with zipfile.ZipFile(file) as archive:
            # A cut-off archive can end in another one that it holds: PyTorch nests them.
            if archive.infolist() and archive.infolist()[0].header_offset != 0:
                raise FileFormatError(f"{path} is damaged: the end of the archive is missing")
            damaged = archive.testzip()
            if damaged is not None:
                raise FileFormatError(f"{path} is damaged: the checksum of its member {damaged!r} is wrong")
            metadata = _metadata_of(archive, path)
            _check_no_code(archive, path)
    except FileFormatError:
        raise
    except _DAMAGE as error:
        empty = os.fstat(file.fileno()).st_size == 0
        reason = "it is empty" if empty else _first_line(error)
        raise FileFormatError(f"{path} is damaged or was not written by qframework.save: {reason}") from error
    return metadata


def _metadata_of(archive: zipfile.ZipFile, path: Path) -> dict[str, Any]:
    members = [name for name in archive.namelist() if name.endswith(f"/extra/{_METADATA}")]
    if len(members) != 1:
        raise FileFormatError(
            f"{path} was not written by qframework.save: the archive holds no {_METADATA}. Files of torch.save are "
            "read by torch.load, those of torch.export.save by torch.export.load"
        )
    metadata = json.loads(archive.read(members[0]))
    if not isinstance(metadata, dict) or not isinstance(metadata.get("format"), int):
        raise FileFormatError(f"{path}: its {_METADATA} names no format; accepted: what qframework.save writes")
    if metadata["format"] > FORMAT:
        raise FileFormatError(
            f"{path} has format {metadata['format']}, written by qframework "
            f"{metadata.get('versions', {}).get('qframework')}; this version reads formats up to {FORMAT}: "
            "upgrade qframework"
        )
    return metadata


def _check_no_code(archive: zipfile.ZipFile, path: Path) -> None:
    """Refuse members that ``torch.export.load`` would unpickle without restrictions or load as machine code."""
    for name in archive.namelist():
        if "/data/aotinductor/" in name:
            raise FileFormatError(f"{path} holds machine code ({name}); accepted: what qframework.save writes")
        if name.endswith(("_weights_config.json", "_constants_config.json")):
            entries = json.loads(archive.read(name))["config"]
            pickled = [key for key, entry in entries.items() if entry["use_pickle"]]
            if pickled:
                raise FileFormatError(f"{path} holds pickled objects ({', '.join(pickled)}); accepted: plain tensors")
        if "/data/sample_inputs/" in name:
            torch.load(io.BytesIO(archive.read(name)), weights_only=True)


def _check_devices(devices: list[str], path: Path) -> None:
    if "cuda" in devices and not torch.cuda.is_available():
        raise QFrameworkError(
            f"{path} was saved on a GPU and there is none here; accepted: a machine with a GPU, or a model that was "
            "exported, quantized and saved on the CPU"
        )


def _load_program(file: BinaryIO) -> ExportedProgram:
    with warnings.catch_warnings():
        # The weights of a loaded program are read-only views of the file's bytes; inference does not write them.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.export.load(file)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
