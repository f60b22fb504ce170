"""Reading the archive: damaged and foreign files, members that ``save`` does not write, tensors that do not fit."""

from __future__ import annotations

import io
import json
import pickle
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_files import (
    CODE,
    CONSTANTS,
    PROGRAM,
    WEIGHTS,
    Members,
    changed,
    code_ran,
    members,
    pickled_bomb,
    torch_bomb,
    with_member,
    write,
)
from saved_models import Block, rewrite

import qframework
from qframework import serialization
from qframework.errors import FileFormatError
from qframework.serialization.archive import Archive

# Damaged and foreign files


@pytest.mark.parametrize("kept", [0, 1, 1000, 0.5, 0.99])
def test_a_truncated_file_is_refused(saved: Path, kept: float) -> None:
    data = saved.read_bytes()
    saved.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises(FileFormatError, match=r"model\.pt2.*empty" if kept == 0 else r"model\.pt2 is damaged"):
        qframework.load(saved)


def test_a_flipped_bit_in_any_member_is_found(saved: Path) -> None:
    original = saved.read_bytes()
    members = zipfile.ZipFile(io.BytesIO(original)).infolist()
    assert len(members) > 10
    for member in members:
        # the data follow the local header of 30 bytes, the name and the extra field
        name, extra = (int.from_bytes(original[member.header_offset + k :][:2], "little") for k in (26, 28))
        damaged = bytearray(original)
        damaged[member.header_offset + 30 + name + extra + member.file_size // 2] ^= 16
        saved.write_bytes(damaged)
        with pytest.raises(FileFormatError, match=r"model\.pt2 is damaged"):
            serialization.read_metadata(saved)


def test_a_flipped_bit_anywhere_is_found_or_harmless(saved: Path, converted: torch.fx.GraphModule) -> None:
    original, x = saved.read_bytes(), torch.randn(4, 5, 16)
    expected = converted(x)
    directory = original.rindex(b"PK\x05\x06")
    # every byte of the end of the archive, and a sample of the rest
    positions = [*range(directory, len(original)), *range(11, len(original), len(original) // 40)]
    for index, position in enumerate(positions):
        damaged = bytearray(original)
        damaged[position] ^= 1 << index % 8
        saved.write_bytes(damaged)
        try:
            restored = qframework.load(saved)
        except FileFormatError:
            continue
        assert torch.equal(restored(x), expected)


def torch_save(path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, path)


def torch_export_save(path: Path) -> None:
    with path.open("wb") as file:
        torch.export.save(torch.export.export(Block(), (torch.randn(4, 5, 16),)), file)


def other_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")


FOREIGN = {
    "torch.save": torch_save,
    "torch.export.save": torch_export_save,
    "zip": other_zip,
    "text": lambda path: path.write_text("a text\n" * 100),
    "pickle": lambda path: path.write_bytes(pickle.dumps({"a": 1})),
}


@pytest.mark.parametrize("write", FOREIGN.values(), ids=FOREIGN)
def test_files_of_other_programs_are_refused(write, tmp_path: Path) -> None:
    write(tmp_path / "foreign.pt2")
    with pytest.raises(FileFormatError, match=r"foreign\.pt2.* not written by qframework\.save"):
        qframework.load(tmp_path / "foreign.pt2")


# Pickles, and members that save does not write


def test_pickled_weights_are_refused(saved: Path) -> None:
    def pickled(data: bytes) -> bytes:
        config = json.loads(data)
        next(iter(config["config"].values()))["use_pickle"] = True
        return json.dumps(config).encode()

    rewrite(saved, "_weights_config.json", pickled)
    rewrite(saved, "/data/weights/weight_0", lambda _: torch_bomb())
    with pytest.raises(FileFormatError, match="holds pickled objects"):
        qframework.load(saved)


def test_new_files_hold_no_pickle(saved: Path) -> None:
    assert zipfile.ZipFile(saved).read("archive/data/sample_inputs/model.pt") == b""


def test_machine_code_is_refused(saved: Path) -> None:
    rewrite(saved, "/data/aotinductor/model/code.so", lambda _: b"\x7fELF")
    with pytest.raises(FileFormatError, match="holds machine code"):
        qframework.load(saved)


def pickled(config: str, folder: str) -> Members:
    def change(document: Any) -> None:
        next(iter(document["config"].values())).update(use_pickle=True, path_name=f"{folder}_0")

    content = dict(changed(config, change))
    directory = config.rsplit("/", 1)[0]
    content[f"{directory}/{folder}_0"] = torch_bomb()
    return list(content.items())


def constant_object(prefix: str, data: bytes) -> Members:
    entry = {"path_name": f"{prefix}0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    content = changed(CONSTANTS, lambda document: document["config"].update(odd=entry))
    return [*content, (f"archive/data/constants/{prefix}0", data)]


def unlike(name: str) -> bytes:
    """Different content for a member."""
    return dict(members())[name].replace(b"0", b"1") + b" "


def renamed(old: str, new: str) -> Members:
    return [(name.replace(old, new), data) for name, data in members()]


MEMBERS: dict[str, Callable[[], Members]] = {
    "legacy weights": lambda: with_member("archive/data/weights/model.pt", torch_bomb()),
    "legacy constants": lambda: with_member("archive/data/constants/model.pt", torch_bomb()),
    "pickled weight": lambda: pickled(WEIGHTS, "weight"),
    "pickled constant": lambda: pickled(CONSTANTS, "tensor"),
    "opaque object": lambda: constant_object("opaque_obj_", pickled_bomb()),
    "custom object": lambda: constant_object("custom_obj_", torch_bomb()),
    "opaque object that is no pickle": lambda: constant_object("opaque_obj_", b""),
    "machine code": lambda: with_member("archive/data/aotinductor/model/model.so", b"\x7fELF"),
    "second model": lambda: with_member("archive/models/other.json", dict(members())[PROGRAM]),
    "executorch": lambda: with_member("archive/executorch/model.pte", b"x"),
    "other case": lambda: with_member("archive/DATA/weights/model.pt", torch_bomb()),
    "other case instead": lambda: renamed("archive/data/weights/weight_0", "archive/data/weights/WEIGHT_0"),
    "all in capitals": lambda: renamed("archive/", "ARCHIVE/"),
    "other folder": lambda: renamed("archive/", "model/"),
    "no folder": lambda: renamed("archive/", ""),
    "beside the folder": lambda: with_member("data/weights/model.pt", torch_bomb()),
    "up and down": lambda: with_member("archive/data/../data/weights/model.pt", torch_bomb()),
    "backslashes": lambda: with_member("archive\\data\\weights\\model.pt", torch_bomb()),
    "empty name": lambda: with_member("", b""),
    "hidden by a null byte": lambda: with_member("archive/byteorder\0.pt", b"little"),
    "legacy archive": lambda: [
        ("serialized_exported_program.json", dict(members())[PROGRAM]),
        *((f"serialized_{what}.pt", torch_bomb()) for what in ("state_dict", "constants", "example_inputs")),
        ("version", b"5.1"),
        ("extra_files/qframework.json", dict(members())["archive/extra/qframework.json"]),
    ],
    "legacy archive inside": lambda: [
        *members(),
        ("archive/serialized_exported_program.json", dict(members())[PROGRAM]),
        ("archive/serialized_state_dict.pt", torch_bomb()),
        ("archive/version", b"5.1"),
    ],
}


for each in (name for name, _ in members()):
    MEMBERS[f"missing {each}"] = lambda each=each: [(n, d) for n, d in members() if n != each]
    for place in ("first", "last"):
        MEMBERS[f"{each} twice, {place}"] = lambda each=each, place=place: with_member(each, unlike(each), place)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("attack", MEMBERS.values(), ids=MEMBERS)
def test_members_that_save_does_not_write_are_refused(tmp_path: Path, attack: Callable[[], Members]) -> None:
    write(tmp_path / "m.pt2", attack())
    with pytest.raises(FileFormatError, match=r"m\.pt2"):
        qframework.load(tmp_path / "m.pt2")
    assert not code_ran()


@pytest.mark.parametrize("data", [torch_bomb(), pickled_bomb(), b"PK" * 99], ids=["zip", "pickle", "neither"])
def test_sample_inputs_are_never_opened(tmp_path: Path, data: bytes) -> None:
    write(tmp_path / "m.pt2", with_member("archive/data/sample_inputs/model.pt", data))
    qframework.load(tmp_path / "m.pt2")
    assert not code_ran()


# Tensors that claim more memory than the file has


def weight(**changes: Any) -> Callable[[], Members]:
    def change(document: Any) -> None:
        meta = document["config"]["blocks.0.qkv.bias"]["tensor_meta"]
        meta.update({k: [{"as_int": n} for n in v] if isinstance(v, list) else v for k, v in changes.items()})

    return lambda: changed(WEIGHTS, change)


TENSORS: dict[str, Callable[[], Members]] = {
    "2**60 elements": weight(sizes=[2**60], strides=[1]),
    "2**60 elements in one place": weight(sizes=[2**60], strides=[0]),
    "more than 64 bits": weight(sizes=[2**70], strides=[1]),
    "product over 64 bits": weight(sizes=[2**40, 2**40], strides=[0, 0]),
    "one more": weight(sizes=[49]),
    "negative size": weight(sizes=[-1]),
    "negative stride": weight(strides=[-1]),
    "negative offset": weight(storage_offset={"as_int": -1}),
    "offset": weight(storage_offset={"as_int": 1}),
    "far offset": weight(storage_offset={"as_int": 2**62}),
    "stride": weight(strides=[2]),
    "fewer strides": weight(strides=[]),
    "wider type": weight(dtype=8),
    "unknown type": weight(dtype=99),
    "no type": weight(dtype=None),
    "text for a size": weight(sizes=[CODE]),
    "symbol for a size": weight(sizes=[], storage_offset={"as_expr": {"expr_str": "Symbol('s77')", "hint": None}}),
    "rank": weight(sizes=[2**63 - 1] * 65, strides=[1] * 65),
    "no data": lambda: with_member("archive/data/weights/weight_0", b""),
    "less data": lambda: with_member("archive/data/weights/weight_0", b"abc"),
    "other end": lambda: with_member("archive/byteorder", b"big"),
    "path": lambda: changed(
        WEIGHTS, lambda d: d["config"]["blocks.0.qkv.bias"].update(path_name="../../../../etc/passwd")
    ),
    "no description": lambda: changed(WEIGHTS, lambda d: d["config"]["blocks.0.qkv.bias"].update(tensor_meta=None)),
    "another's name": lambda: changed(WEIGHTS, lambda d: d["config"].pop("blocks.0.qkv.bias") and None),
    "no object": lambda: changed(WEIGHTS, lambda d: []),
    "not a number": lambda: with_member(WEIGHTS, dict(members())[WEIGHTS].replace(b'"as_int": 48', b'"as_int": NaN')),
    "deep": lambda: with_member(WEIGHTS, b"[" * 200_000),
    "deep metadata": lambda: with_member("archive/extra/qframework.json", b'{"a":' * 200_000),
    "deep program": lambda: with_member(PROGRAM, b"[" * 200_000 + b"]" * 200_000),
    "long number": lambda: with_member(PROGRAM, b"1" * 100_000),
}


@pytest.fixture
def little_memory() -> Any:
    """Limit the process to 4 GiB more memory than now."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**32, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("attack", TENSORS.values(), ids=TENSORS)
def test_tensors_that_do_not_fit_their_data_are_refused(tmp_path: Path, attack: Callable[[], Members]) -> None:
    write(tmp_path / "m.pt2", attack())
    with pytest.raises(FileFormatError, match=r"m\.pt2"):
        qframework.load(tmp_path / "m.pt2")


def test_names_of_one_device_share_the_memory_of_one_storage(tmp_path: Path) -> None:
    def change(document: Any) -> None:
        config = document["config"]
        for index in range(4):
            entry = json.loads(json.dumps(config["blocks.0.qkv.bias"]))
            entry["tensor_meta"]["device"] = {"type": "cpu", "index": index}
            config[f"copy{index}"] = entry

    write(tmp_path / "m.pt2", changed(WEIGHTS, change))
    with open(tmp_path / "m.pt2", "rb") as file:
        archive = Archive(file, "m.pt2")
        weights, _ = archive.tensors(*archive.payloads())
    assert len({weights[name].data_ptr() for name in ("blocks.0.qkv.bias", "copy0", "copy1", "copy3")}) == 1


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_members_are_refused_before_they_are_read(tmp_path: Path, method: int) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt2", "w", method) as archive:
        for name, data in members():
            archive.writestr(name, bytes(2**22) if name.endswith("weight_0") else data)
    with pytest.raises(FileFormatError, match="is compressed"):
        qframework.load(tmp_path / "m.pt2")


def test_members_that_overlap_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    write(path, members())
    with zipfile.ZipFile(path, "a") as archive:
        first, second = archive.infolist()[:2]
        second.header_offset = first.header_offset
        second.CRC, second.file_size, second.compress_size = first.CRC, first.file_size, first.compress_size
        archive._didModify = True  # type: ignore[attr-defined]
    with pytest.raises(FileFormatError, match=r"overlaps|differ"):
        qframework.load(path)
