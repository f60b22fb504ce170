"""A saved model comes back with the same outputs; a file that is not whole or not ours is a clear error."""

from __future__ import annotations

import io
import json
import pickle
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qframework
from qframework import serialization
from qframework.backend import explain
from qframework.errors import FileFormatError, QFrameworkError, UnsupportedError
from qframework.evaluation import quantize_model
from qframework.quantizer import LinearConfig, QFrameworkQuantizer, dynamic_int8, qattn_paper, static_int8

DYNAMIC_BATCH = ({0: torch.export.Dim.DYNAMIC},)
CONFIGS = {
    "static": static_int8(),
    "static_per_token": static_int8("per_token"),
    "dynamic": dynamic_int8(),
    "qattn_paper": qattn_paper(),
    "per_tensor_weight": static_int8(weight="per_tensor"),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(x)))


def convert(config: LinearConfig | None = None) -> torch.fx.GraphModule:
    images = torch.randn(4, 5, 16)
    quantizer = QFrameworkQuantizer().set_global(config or static_int8())
    return quantize_model(nn.Sequential(Block(), Block()).eval(), images, quantizer, [images]).converted


@pytest.fixture
def converted() -> torch.fx.GraphModule:
    return convert()


@pytest.fixture
def saved(converted: torch.fx.GraphModule, tmp_path: Path) -> Path:
    path = tmp_path / "model.pt2"
    qframework.save(converted, path, (torch.randn(4, 5, 16),), dynamic_shapes=DYNAMIC_BATCH, config={"note": "kept"})
    return path


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_outputs_are_identical(config: LinearConfig, tmp_path: Path) -> None:
    model, x = convert(config), torch.randn(4, 5, 16)
    qframework.save(model, tmp_path / "any.name", (x,), dynamic_shapes=DYNAMIC_BATCH)
    assert torch.equal(qframework.load(tmp_path / "any.name")(x), model(x))


def test_any_batch_size_after_loading(converted: torch.fx.GraphModule, saved: Path) -> None:
    for batch in (1, 4, 7):
        x = torch.randn(batch, 5, 16)
        assert torch.equal(qframework.load(saved)(x), converted(x))


def test_without_dynamic_shapes_the_batch_is_fixed(converted: torch.fx.GraphModule, tmp_path: Path) -> None:
    qframework.save(converted, tmp_path / "fixed.pt2", (torch.randn(4, 5, 16),))
    restored = qframework.load(tmp_path / "fixed.pt2")
    assert restored(torch.randn(4, 5, 16)).shape == (4, 5, 16)
    with pytest.raises((AssertionError, RuntimeError)):
        restored(torch.randn(3, 5, 16))


def test_layers_keep_their_names_and_are_lowered(converted: torch.fx.GraphModule, saved: Path) -> None:
    inputs = (torch.randn(4, 5, 16),)
    before, after = explain(converted, inputs), explain(qframework.load(saved), inputs)
    assert [layer.name for layer in after.layers] == ["0.fc1", "0.fc2", "1.fc1", "1.fc2"]
    assert after.layers == before.layers
    assert after.lowered == 4


def test_a_loaded_model_can_be_saved_again(saved: Path, tmp_path: Path) -> None:
    first, x = qframework.load(saved), torch.randn(4, 5, 16)
    qframework.save(first, tmp_path / "again.pt2", (x,), dynamic_shapes=DYNAMIC_BATCH)
    assert torch.equal(qframework.load(tmp_path / "again.pt2")(x), first(x))


def test_an_exported_program_can_be_saved(converted: torch.fx.GraphModule, tmp_path: Path) -> None:
    x = torch.randn(4, 5, 16)
    qframework.save(torch.export.export(converted, (x,)), tmp_path / "program.pt2", (x,))
    assert torch.equal(qframework.load(tmp_path / "program.pt2")(x), converted(x))


def test_the_file_holds_int8_weights_only(saved: Path) -> None:
    program = torch.export.load(io.BytesIO(saved.read_bytes()))
    weights = [value for value in program.state_dict.values() if value.numel() == 16 * 32]
    assert [weight.dtype for weight in weights] == [torch.int8] * 4


_IN_A_FRESH_PROCESS = """
import sys, torch, qframework
model = qframework.load(sys.argv[1])
x, expected = torch.load(sys.argv[2], weights_only=True)
assert torch.equal(model(x), expected), "eager"
with torch.no_grad():
    fast = torch.compile(model, backend="qframework")(x)
torch.save(fast, sys.argv[3])
"""


def test_a_fresh_process_loads_and_compiles(converted: torch.fx.GraphModule, saved: Path, tmp_path: Path) -> None:
    x = torch.randn(3, 5, 16)
    torch.save((x, converted(x)), tmp_path / "expected.pt")
    arguments = [str(saved), str(tmp_path / "expected.pt"), str(tmp_path / "fast.pt")]
    result = subprocess.run(
        [sys.executable, "-c", _IN_A_FRESH_PROCESS, *arguments], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    with torch.no_grad():
        here = torch.compile(converted, backend="qframework")(x)
    # the same program on the same machine
    assert torch.equal(torch.load(tmp_path / "fast.pt", weights_only=True), here)


def test_metadata(saved: Path) -> None:
    metadata = serialization.read_metadata(saved)
    assert metadata["format"] == serialization.FORMAT
    assert metadata["versions"]["torch"] == torch.__version__
    assert metadata["versions"].keys() == {"qframework", "torch", "torchao"}
    assert metadata["devices"] == ["cpu"]
    assert metadata["config"] == {"note": "kept"}


# What save refuses


def test_save_refuses_a_config_that_json_cannot_hold(converted: torch.fx.GraphModule, tmp_path: Path) -> None:
    with pytest.raises(QFrameworkError, match="config cannot be written as JSON"):
        qframework.save(converted, tmp_path / "m.pt2", (torch.randn(4, 5, 16),), config={"dtype": torch.int8})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("inputs", "arguments", "message"),
    [
        ((torch.randn(4, 5, 16),), {"config": 3}, "config is int"),
        ((torch.randn(4, 5, 16),), {"config": [(1, 2)]}, "config is list"),
        ((torch.randn(4, 5, 16),), {"dynamic_shapes": 3}, "cannot trace the model"),
        ((), {}, "cannot trace the model"),
    ],
)
def test_save_names_arguments_that_cannot_be(inputs, arguments, message, converted, tmp_path: Path) -> None:
    with pytest.raises(QFrameworkError, match=message):
        qframework.save(converted, tmp_path / "m.pt2", inputs, **arguments)
    assert not list(tmp_path.iterdir())


def test_explain_names_inputs_that_the_model_does_not_take(fresh_dynamo: None) -> None:
    for inputs in (None, (), {"a": 1}):
        with pytest.raises(QFrameworkError, match="explain: the model cannot be called with inputs"):
            qframework.explain(torch.nn.Linear(4, 3), inputs)


def test_save_refuses_other_modules(converted: torch.fx.GraphModule, tmp_path: Path) -> None:
    x = (torch.randn(4, 5, 16),)
    with pytest.raises(QFrameworkError, match="Block; accepted: a GraphModule"):
        qframework.save(Block(), tmp_path / "m.pt2", x)
    with pytest.raises(QFrameworkError, match="compile after load"):
        qframework.save(torch.compile(converted), tmp_path / "m.pt2", x)
    with pytest.raises(QFrameworkError, match="Tensor; accepted: a tuple"):
        qframework.save(converted, tmp_path / "m.pt2", x[0])
    with pytest.raises(QFrameworkError, match="dynamic_shapes has no effect"):
        qframework.save(torch.export.export(converted, x), tmp_path / "m.pt2", x, dynamic_shapes=DYNAMIC_BATCH)


def test_save_refuses_a_prepared_model(tmp_path: Path) -> None:
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

    x = (torch.randn(4, 5, 16),)
    prepared = prepare_pt2e(torch.export.export(Block(), x).module(), QFrameworkQuantizer().set_global(static_int8()))
    with pytest.raises(QFrameworkError, match="holds observers"):
        qframework.save(prepared, tmp_path / "m.pt2", x)


def test_a_failed_save_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch, converted) -> None:
    before = saved.read_bytes()

    def fail(program: object, file: io.BytesIO, **_: object) -> None:
        file.write(b"half of a model")
        raise OSError("disk full")

    monkeypatch.setattr(torch.export, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        qframework.save(converted, saved, (torch.randn(4, 5, 16),))
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


_ON_A_FULL_DISK = """
import resource, sys, torch, qframework
path, model = sys.argv[1], qframework.load(sys.argv[2])
inputs, kept = (torch.randn(4, 5, 16),), open(path, "rb").read()
qframework.save(model, path + ".whole", inputs)
whole, hard = len(open(path + ".whole", "rb").read()), resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for part in range(0, 10):
    resource.setrlimit(resource.RLIMIT_FSIZE, (whole * part // 10, hard))
    try:
        qframework.save(model, path, inputs)
    except OSError:
        assert open(path, "rb").read() == kept
    else:
        raise SystemExit(f"nothing was raised at {part} tenths")
"""


def test_a_full_disk_is_an_exception_and_leaves_the_old_file(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.write_bytes(b"old")
    arguments = [sys.executable, "-c", _ON_A_FULL_DISK, str(path), str(saved)]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == [saved.name, "old", "old.whole"]


def test_save_keeps_the_mode_and_follows_links(converted: torch.fx.GraphModule, saved: Path, tmp_path: Path) -> None:
    saved.chmod(0o600)
    (tmp_path / "link.pt2").symlink_to(saved)
    qframework.save(converted, tmp_path / "link.pt2", (torch.randn(4, 5, 16),))
    assert (tmp_path / "link.pt2").is_symlink()
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    assert serialization.read_metadata(saved)["config"] == {}


def test_save_refuses_what_load_would_refuse(tmp_path: Path) -> None:
    class Detector(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.torchvision.nms(x, x[:, 0], 0.5)

    import torchvision  # noqa: F401 (registers the operator)

    program = torch.export.export(Detector(), (torch.rand(5, 4),))
    with pytest.raises(UnsupportedError, match=r"save: load would refuse.*torchvision\.nms"):
        qframework.save(program, tmp_path / "m.pt2", ())
    assert not list(tmp_path.iterdir())


def test_save_refuses_outputs_that_pytorch_cannot_read_back(tmp_path: Path) -> None:
    class Labelled(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, str]:
            return x + 1, "a"

    program = torch.export.export(Labelled(), (torch.rand(2),))
    with pytest.raises(UnsupportedError, match="save: load would refuse"):
        qframework.save(program, tmp_path / "m.pt2", ())
    assert not list(tmp_path.iterdir())


def test_sizes_of_convolutions_tuples_of_pytorch_and_odd_names_are_kept(tmp_path: Path) -> None:
    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("x(1)", nn.Sequential(*(nn.Conv2d(3, 3, 3, stride=2) for _ in range(4))))

        def forward(self, x: Tensor) -> tuple[Tensor, torch.return_types.topk]:
            x = self.get_submodule("x(1)")(x)
            return x.flatten(2).transpose(1, 2).reshape(-1, 3), torch.topk(x.flatten(), 2)

    dynamic = torch.export.Dim.DYNAMIC
    shapes = ({0: dynamic, 2: dynamic, 3: dynamic},)
    stem, x = Stem(), torch.rand(2, 3, 95, 101)
    qframework.save(torch.export.export(stem, (x,), dynamic_shapes=shapes), tmp_path / "m.pt2", ())
    loaded = qframework.load(tmp_path / "m.pt2")
    x = torch.rand(3, 3, 80, 70)
    torch.testing.assert_close(loaded(x), stem(x))
    assert type(loaded(x)[1]) is torch.return_types.topk


def test_conditions_on_inputs_are_kept(tmp_path: Path) -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor, y: dict[str, Tensor]) -> Tensor:
            if x.shape[0] == 2 * y["a"].shape[0]:
                return x.sum() + y["a"].sum()
            return x

    x, y = torch.randn(4, 3), {"a": torch.randn(2, 3)}
    shapes = {"x": {0: torch.export.Dim.DYNAMIC}, "y": {"a": {0: torch.export.Dim.DYNAMIC}}}
    qframework.save(torch.export.export(Pair(), (x, y), dynamic_shapes=shapes), tmp_path / "m.pt2", ())
    model = qframework.load(tmp_path / "m.pt2")
    assert torch.equal(model(x, y), Pair()(x, y))
    with pytest.raises((AssertionError, RuntimeError)):
        model(torch.randn(5, 3), y)


# What load refuses


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.pt2"):
        qframework.load(tmp_path / "none.pt2")


@pytest.mark.parametrize("kept", [0, 1, 1000, 0.5, 0.99])
def test_truncated(saved: Path, kept: float) -> None:
    data = saved.read_bytes()
    saved.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises(FileFormatError, match=r"model\.pt2.*empty" if kept == 0 else r"model\.pt2 is damaged"):
        qframework.load(saved)


def test_a_flipped_bit_in_any_member_is_found(saved: Path) -> None:
    original = saved.read_bytes()
    members = zipfile.ZipFile(io.BytesIO(original)).infolist()
    assert len(members) > 10
    for member in members:
        # the data stands after the local header of 30 bytes, the name and the extra field
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
    # the end of the archive bit by bit in turn, and a sample of everything else
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
def test_foreign_file(write, tmp_path: Path) -> None:
    write(tmp_path / "foreign.pt2")
    with pytest.raises(FileFormatError, match=r"foreign\.pt2.* not written by qframework\.save"):
        qframework.load(tmp_path / "foreign.pt2")


def rewrite(path: Path, suffix: str, change) -> None:
    """Replace one member of the archive by ``change(its bytes)``, with a right checksum; a new member gets b""."""
    archive = zipfile.ZipFile(io.BytesIO(path.read_bytes()))
    members = {name: archive.read(name) for name in archive.namelist()}
    name = next((name for name in members if name.endswith(suffix)), f"archive{suffix}")
    members[name] = change(members.get(name, b""))
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def change_json(**values: object):
    return lambda data: json.dumps({**json.loads(data), **values}).encode()


def test_newer_format(saved: Path) -> None:
    versions = {"qframework": "9.0", "torch": "4.0", "torchao": "1.0"}
    rewrite(saved, "qframework.json", change_json(format=serialization.FORMAT + 1, versions=versions))
    with pytest.raises(FileFormatError, match=r"has format 2, written by qframework 9\.0.*up to 1: upgrade"):
        qframework.load(saved)


@pytest.mark.parametrize("content", [b"not json", b"[]", b"{}", b"\xff\xfe"])
def test_metadata_that_is_none(saved: Path, content: bytes) -> None:
    rewrite(saved, "qframework.json", lambda _: content)
    with pytest.raises(FileFormatError, match=r"model\.pt2"):
        qframework.load(saved)


def test_a_program_that_torch_cannot_read(saved: Path) -> None:
    rewrite(saved, "/models/model.json", lambda data: data.replace(b"torch.ops.aten.linear", b"torch.ops.aten.lineal"))
    with pytest.raises(FileFormatError, match=r"model\.pt2: PyTorch .* cannot load the program.*written by qframework"):
        qframework.load(saved)


def test_saved_on_a_gpu(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rewrite(saved, "qframework.json", change_json(devices=["cuda"]))
    with pytest.raises(QFrameworkError, match="was saved on a GPU"):
        qframework.load(saved)


# Nothing in a file is executed while it is read


class Bomb:
    def __reduce__(self):
        return (exec, ("raise SystemExit('a pickle was executed')",))


def bomb(_: bytes) -> bytes:
    buffer = io.BytesIO()
    torch.save(Bomb(), buffer)
    return buffer.getvalue()


def test_sample_inputs_are_not_unpickled(saved: Path) -> None:
    rewrite(saved, "/data/sample_inputs/model.pt", bomb)
    qframework.load(saved)


def test_pickled_weights_are_refused(saved: Path) -> None:
    def pickled(data: bytes) -> bytes:
        config = json.loads(data)
        next(iter(config["config"].values()))["use_pickle"] = True
        return json.dumps(config).encode()

    rewrite(saved, "_weights_config.json", pickled)
    rewrite(saved, "/data/weights/weight_0", bomb)
    with pytest.raises(FileFormatError, match="holds pickled objects"):
        qframework.load(saved)


def test_new_files_hold_no_pickle(saved: Path) -> None:
    assert zipfile.ZipFile(saved).read("archive/data/sample_inputs/model.pt") == b""


def test_machine_code_is_refused(saved: Path) -> None:
    rewrite(saved, "/data/aotinductor/model/code.so", lambda _: b"\x7fELF")
    with pytest.raises(FileFormatError, match="holds machine code"):
        qframework.load(saved)
