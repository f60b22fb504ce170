"""A saved model comes back with the same outputs; ``save`` refuses what ``load`` could not read (__init__.py)."""

from __future__ import annotations

import io
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hostile_files import MODEL, OFFSET, X
from saved_models import DYNAMIC_BATCH, Block, change_json, convert, rewrite
from torch import Tensor, nn

import qframework
from qframework import serialization
from qframework.backend import explain
from qframework.errors import FileFormatError, QFrameworkError, UnsupportedError
from qframework.quantizer import LinearConfig, QFrameworkQuantizer, dynamic_int8, qattn_paper, static_int8
from qframework.serialization import read_metadata

CONFIGS = {
    "static": static_int8(),
    "static_per_token": static_int8("per_token"),
    "dynamic": dynamic_int8(),
    "qattn_paper": qattn_paper(),
    "per_tensor_weight": static_int8(weight="per_tensor"),
}


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


@pytest.mark.parametrize("version", ["2.11", "2.15"])
def test_files_of_earlier_versions_load(version: str) -> None:
    path = MODEL.with_name(f"saved_by_torch_{version}.pt2")
    model = qframework.load(path)
    out = model(X, offset=OFFSET)
    expected = torch.tensor(read_metadata(path)["config"]["tokens"])
    # A value between two INT8 steps may round the other way on another processor; the widest step is 0.03.
    torch.testing.assert_close(out["tokens"].flatten(), expected, atol=0.06, rtol=0)
    assert out["pooled"][1] == 12
    assert model(torch.randn(4, 7, 16), offset=OFFSET)["pooled"][1] == 28
    with pytest.raises(AssertionError, match="Guard failed"):
        model(torch.randn(4, 7, 17), offset=OFFSET)


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
    with pytest.raises(QFrameworkError, match="config must hold JSON-able values only"):
        qframework.save(converted, tmp_path / "m.pt2", (torch.randn(4, 5, 16),), config={"dtype": torch.int8})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("inputs", "arguments", "message"),
    [
        ((torch.randn(4, 5, 16),), {"config": 3}, "config must be .*, got int"),
        ((torch.randn(4, 5, 16),), {"config": [(1, 2)]}, "config must be .*, got list"),
        ((torch.randn(4, 5, 16),), {"dynamic_shapes": 3}, "cannot capture the model"),
        ((), {}, "cannot capture the model"),
    ],
)
def test_save_names_bad_arguments(inputs, arguments, message, converted, tmp_path: Path) -> None:
    with pytest.raises(QFrameworkError, match=message):
        qframework.save(converted, tmp_path / "m.pt2", inputs, **arguments)
    assert not list(tmp_path.iterdir())


def test_save_refuses_other_modules(converted: torch.fx.GraphModule, tmp_path: Path) -> None:
    x = (torch.randn(4, 5, 16),)
    with pytest.raises(QFrameworkError, match=r"model must be a GraphModule .*, got Block"):
        qframework.save(Block(), tmp_path / "m.pt2", x)
    with pytest.raises(QFrameworkError, match="compile after load"):
        qframework.save(torch.compile(converted), tmp_path / "m.pt2", x)
    with pytest.raises(QFrameworkError, match=r"must be a tuple .*, got Tensor"):
        qframework.save(converted, tmp_path / "m.pt2", x[0])
    with pytest.raises(QFrameworkError, match="dynamic_shapes must be None"):
        qframework.save(torch.export.export(converted, x), tmp_path / "m.pt2", x, dynamic_shapes=DYNAMIC_BATCH)


def test_save_refuses_a_prepared_model(tmp_path: Path) -> None:
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

    x = (torch.randn(4, 5, 16),)
    prepared = prepare_pt2e(torch.export.export(Block(), x).module(), QFrameworkQuantizer().set_global(static_int8()))
    with pytest.raises(QFrameworkError, match="must not hold observers"):
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


# What load refuses


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.pt2"):
        qframework.load(tmp_path / "none.pt2")


def test_a_newer_format_is_refused(saved: Path) -> None:
    versions = {"qframework": "9.0", "torch": "4.0", "torchao": "1.0"}
    rewrite(saved, "qframework.json", change_json(format=serialization.FORMAT + 1, versions=versions))
    with pytest.raises(FileFormatError, match=r"format must be up to 1, got 2, written by qframework 9\.0.*Upgrade"):
        qframework.load(saved)


@pytest.mark.parametrize("content", [b"not json", b"[]", b"{}", b"\xff\xfe"])
def test_malformed_metadata_is_refused(saved: Path, content: bytes) -> None:
    rewrite(saved, "qframework.json", lambda _: content)
    with pytest.raises(FileFormatError, match=r"model\.pt2"):
        qframework.load(saved)


def test_a_model_saved_on_a_gpu_needs_one(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rewrite(saved, "qframework.json", change_json(devices=["cuda"]))
    with pytest.raises(QFrameworkError, match="was saved on a GPU"):
        qframework.load(saved)
