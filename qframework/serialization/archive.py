"""Reads the archive of a saved model: known members only, uncompressed, without PyTorch's reader and without pickle."""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from qframework.errors import FileFormatError
from qframework.files import parse_json
from qframework.serialization.grammar import BOOL, DTYPES, FQN, TENSOR_META, mapping, record, text

ROOT = "archive/"
METADATA, PROGRAM = "extra/qframework.json", "models/model.json"
_WEIGHTS, _CONSTANTS = "data/weights/", "data/constants/"
_WEIGHTS_CONFIG, _CONSTANTS_CONFIG = f"{_WEIGHTS}model_weights_config.json", f"{_CONSTANTS}model_constants_config.json"
_SAMPLE_INPUTS = "data/sample_inputs/model.pt"  # never opened; empty in files of this version
# The other members of PyTorch's archives are weights and constants.
_REQUIRED = {
    *("archive_format", "archive_version", "byteorder", ".data/version", ".data/serialization_id"),
    *(_SAMPLE_INPUTS, METADATA, PROGRAM, _WEIGHTS_CONFIG, _CONSTANTS_CONFIG),
}
_OPTIONAL = {".storage_alignment"}
# What zipfile raises on damaged files.
_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, RuntimeError, ValueError, LookupError, EOFError, OSError)
_CHUNK = 2**24  # bytes
_LOCAL_HEADER = 30  # bytes, before the name and the extra field


class Archive:
    """The members of a saved model, whose checksums were verified."""

    def __init__(self, file: BinaryIO, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        with self._errors():
            if file.seek(0, os.SEEK_END) == 0:
                raise FileFormatError("it is empty")
            self._zip = zipfile.ZipFile(file)
            _check_layout(self._zip, file)
            if (damaged := self._zip.testzip()) is not None:
                raise FileFormatError(f"the checksum of its member {damaged!r} is wrong")

    def names(self) -> set[str]:
        """Names of the members, relative to the folder that holds all of them."""
        return {name.removeprefix(ROOT) for name in self._zip.namelist() if name.startswith(ROOT)}

    def json(self, name: str) -> Any:
        """The JSON document in a member."""
        with self._errors(f"{name}: "):
            return parse_json(self._zip.read(ROOT + name))

    def payloads(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The descriptions of weights and constants; refuses members that neither they nor PyTorch's format name."""
        with self._errors():
            weights = _config(self.json(_WEIGHTS_CONFIG), _WEIGHTS_CONFIG, "weight_")
            constants = _config(self.json(_CONSTANTS_CONFIG), _CONSTANTS_CONFIG, "tensor_")
            described = [
                (name, entry, folder + entry["path_name"])
                for folder, config in ((_WEIGHTS, weights), (_CONSTANTS, constants))
                for name, entry in config.items()
            ]
            self._check_members(_REQUIRED | {member for _, _, member in described})
            for name, entry, member in described:
                _check_extent(name, entry["tensor_meta"], self._size(member))
            if (order := self._zip.read(f"{ROOT}byteorder").decode(errors="replace")) != sys.byteorder:
                raise FileFormatError(f"its tensors must be {sys.byteorder}-endian as this machine, got {order[:10]}")
        return weights, constants

    def _check_members(self, expected: set[str]) -> None:
        found = {name.removeprefix(ROOT) if name.startswith(ROOT) else f"/{name}" for name in self._zip.namelist()}
        unknown, missing = sorted(found - expected - _OPTIONAL), sorted(expected - found)
        if code := [name for name in unknown if name.startswith("data/aotinductor/")]:
            raise FileFormatError(f"it holds machine code ({code[0][:80]}), which qframework.save does not write")
        if unknown:
            raise FileFormatError(f"qframework.save does not write its member {unknown[0][:80]!r}")
        if missing:
            raise FileFormatError(f"its member {missing[0][:80]!r} is missing")

    def tensors(self, weights: Mapping[str, Any], constants: Mapping[str, Any]) -> tuple[dict[str, Tensor], ...]:
        """The tensors that ``payloads`` describes; those that share memory in the file share it again."""
        return self._tensors(_WEIGHTS, weights), self._tensors(_CONSTANTS, constants)

    def _tensors(self, folder: str, config: Mapping[str, Any]) -> dict[str, Tensor]:
        storages: dict[tuple[str, torch.device], Tensor] = {}
        tensors = {}
        for name, entry in config.items():
            meta = entry["tensor_meta"]
            # Aliases of one device, such as cpu:3 for cpu, must share one copy of a storage.
            device = torch.empty(0, device=torch.device(meta["device"]["type"], meta["device"]["index"])).device
            key = (entry["path_name"], device)
            if key not in storages:
                storages[key] = self._bytes(folder + entry["path_name"]).to(device)
            tensor = torch.empty(0, dtype=DTYPES[meta["dtype"]], device=device)
            tensor.set_(storages[key].untyped_storage(), *_extent(meta))
            if entry["is_param"]:
                tensor = nn.Parameter(tensor, requires_grad=meta["requires_grad"])
            else:
                tensor.requires_grad_(meta["requires_grad"])
            tensors[name] = tensor
        return tensors

    def _bytes(self, name: str) -> Tensor:
        storage = torch.empty(self._size(name), dtype=torch.uint8)
        rest = storage.numpy()
        with self._errors(), self._zip.open(ROOT + name) as member:
            while chunk := member.read(_CHUNK):
                rest[: len(chunk)] = np.frombuffer(chunk, np.uint8)
                rest = rest[len(chunk) :]
        return storage

    @contextlib.contextmanager
    def _errors(self, where: str = "") -> Iterator[None]:
        """Re-raise errors in the block as a FileFormatError that names the file."""
        try:
            yield
        except FileFormatError as error:
            if str(error).startswith(self._path):
                raise
            reason = str(error)
        except _DAMAGE as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            return
        raise FileFormatError(f"{self._path} is damaged or was not written by qframework.save: {where}{reason}")

    def _size(self, name: str) -> int:
        return self._zip.getinfo(ROOT + name).file_size


def _check_layout(archive: zipfile.ZipFile, file: BinaryIO) -> None:
    """Require unique names, no compression and no overlaps, so that reading never needs more memory than the file."""
    members = sorted(archive.infolist(), key=lambda member: member.header_offset)
    # PyTorch nests archives: a truncated one can end in a complete inner one.
    if members and archive.infolist()[0].header_offset != 0:
        raise FileFormatError("the end of the archive is missing")
    names = [member.orig_filename for member in members]
    if len(set(names)) != len(names):
        raise FileFormatError(f"its member {next(n for n in names if names.count(n) > 1)!r} occurs more than once")
    if odd := [member.orig_filename for member in members if member.filename != member.orig_filename]:
        raise FileFormatError(f"its member {odd[0]!r} has an invalid name")
    end = 0
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            raise FileFormatError(f"its member {member.filename!r} is compressed; it must be stored uncompressed")
        if member.header_offset < end:
            raise FileFormatError(f"its member {member.filename!r} overlaps another")
        end = member.header_offset + _LOCAL_HEADER + len(member.orig_filename.encode()) + member.file_size
    if end > file.seek(0, 2):
        raise FileFormatError("its members are longer than the file")


def _config(document: Any, name: str, prefix: str) -> dict[str, Any]:
    entry = record(path_name=text(rf"{prefix}\d{{1,9}}"), is_param=BOOL, use_pickle=BOOL, tensor_meta=TENSOR_META)
    entries = document.get("config") if isinstance(document, dict) else None
    pickled = isinstance(entries, dict) and [
        key for key, value in entries.items() if isinstance(value, dict) and value.get("use_pickle")
    ]
    if pickled:
        raise FileFormatError(f"it holds pickled objects ({', '.join(pickled)[:200]}); it must hold plain tensors only")
    return record(config=mapping(FQN, entry))(document, name)["config"]


def _extent(meta: Mapping[str, Any]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    sizes, strides = ([each["as_int"] for each in meta[key]] for key in ("sizes", "strides"))
    return meta["storage_offset"]["as_int"], tuple(sizes), tuple(strides)


def _check_extent(name: str, meta: Mapping[str, Any], stored: int) -> None:
    """Refuse a tensor that reaches beyond its stored bytes, or has more elements than they hold."""
    if any("as_int" not in size for size in (*meta["sizes"], *meta["strides"], meta["storage_offset"])):
        raise FileFormatError(f"the tensor {name!r} must have integer sizes, got a symbol")
    offset, sizes, strides = _extent(meta)
    width = DTYPES[meta["dtype"]].itemsize
    count, last = 1, offset
    for size, stride in zip(sizes, strides, strict=False):
        count, last = count * size, last + (size - 1) * stride
    needed = (last + 1) * width if count else 0
    if len(sizes) != len(strides) or min(offset, *sizes, *strides, 0) < 0 or max(needed, count * width) > stored:
        raise FileFormatError(
            f"the tensor {name!r} of sizes {sizes}, strides {strides} and offset {offset} does not fit {stored} bytes"
        )
