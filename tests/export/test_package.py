"""``to_package``: another process runs the model, with the outputs of the compiled model, without a compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutput

import qframework
from qframework.errors import FileFormatError, QFrameworkError, UnsupportedError
from qframework.export import load_package, to_package
from qframework.export.package import write_package
from qframework.export.recorded_inputs import recorded_inputs
from qframework.kernels.linear.cpu import CpuChoice
from qframework.quantizer import QFrameworkQuantizer, dynamic_int8, static_attention, static_int8

pytestmark = pytest.mark.slow

# CXX does not exist, and the cache is empty: nothing can be compiled or taken from the first process.
OTHER_PROCESS = """
import json, sys
import torch, qframework
inputs, expected = torch.load("expected.pt")
run = qframework.export.load_package("model.pt2")
outputs = [run(**each) for each in inputs]
print(json.dumps({
    "equal": [torch.equal(found["last_hidden_state"], wanted) for found, wanted in zip(outputs, expected)],
    "types": [type(found).__name__ for found in outputs],
    "transformers": "transformers" in sys.modules,
    "checked": torch._inductor.cpu_vec_isa.valid_vec_isa_list.cache_info().currsize,
}))
"""


class Attention(nn.Module):
    """Self-attention with a mask of keys, which returns what models of transformers return."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, hidden: Tensor, mask: Tensor) -> BaseModelOutput:
        q, k, v = self.qkv(hidden).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return BaseModelOutput(last_hidden_state=hidden + self.proj(out.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


def test_another_process_computes_the_same_without_compiling(
    tmp_path: Path, fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = sys.modules["qframework.kernels.attention.mixed"]  # as without a compiler, to the last digit
    monkeypatch.setattr(mixed, "mixed_attention_choice", lambda: CpuChoice("torch", {}))
    torch.manual_seed(0)
    inputs = {"hidden": torch.randn(4, 9, 32), "mask": torch.ones(4, 9, dtype=torch.bool)}
    inputs["mask"][1, 5:] = False
    model = Attention().eval()
    quantizer = QFrameworkQuantizer().set_global(static_int8()).set_global(static_attention())
    quantized = qframework.quantize(model, inputs, quantizer, [inputs])
    report = quantized.to_package(tmp_path / "model.pt2")
    assert report.lowered == report.total == 2
    assert report.attention_lowered == report.attention_total == 1
    compiled = torch.compile(quantized, backend="qframework")
    calls = [{name: x[:size] for name, x in inputs.items()} for size in (4, 3)]
    with torch.no_grad():
        expected = [compiled(**call).last_hidden_state for call in calls]
    torch.save((calls, expected), tmp_path / "expected.pt")
    cache = tmp_path / "cache"
    cache.mkdir()
    environment = {
        **os.environ,
        "CXX": "/nonexistent/compiler",
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "PYTHONPATH": str(Path(qframework.__file__).parents[1]),
    }
    run = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found == {"equal": [True, True], "types": ["dict", "dict"], "transformers": False, "checked": 0}
    assert "outdated" not in run.stderr
    assert not [path for path in cache.rglob("*") if path.suffix in (".so", ".cpp", ".o")]


def test_a_model_quantized_in_place(tmp_path: Path, fresh_dynamo: None) -> None:
    torch.manual_seed(0)
    model, x = MLP().eval(), torch.randn(4, 16)
    qframework.quantize_(model, dynamic_int8())
    report = to_package(model, tmp_path / "mlp.pt2", x, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlp.pt2"]
    assert [layer.operator for layer in report.layers] == ["qframework::int8_linear (gelu)", "qframework::int8_linear"]
    run = load_package(tmp_path / "mlp.pt2")
    with torch.no_grad():
        for each in (x, torch.randn(9, 16)):
            torch.testing.assert_close(run(each), model(each), rtol=1e-5, atol=1e-5)


class Optional(MLP):
    def forward(self, x, mask=None, times=1, kind="a"):  # type: ignore[override]
        return super().forward(x if mask is None else x * mask) * (times if kind == "a" else 1)


def test_constant_inputs_of_a_loaded_model_are_recorded(tmp_path: Path) -> None:
    x = torch.randn(4, 16)
    quantized = qframework.quantize(Optional().eval(), (x, None, 3, "a"), dynamic_int8())
    quantized.save(tmp_path / "saved.pt2")
    (example, *constants), kwargs, shapes = recorded_inputs(qframework.load(tmp_path / "saved.pt2"))
    assert (example.shape[1:], constants, kwargs) == (x.shape[1:], [None, 3, "a"], {})
    assert shapes == ({0: torch.export.Dim.DYNAMIC}, None, None, None)


def test_errors(tmp_path: Path) -> None:
    model, x = MLP().eval(), torch.randn(4, 16)
    quantized = qframework.quantize(model, x, dynamic_int8())
    with pytest.raises(UnsupportedError, match=r"path must end in \.pt2, got 'mlp\.so'"):
        quantized.to_package("mlp.so")
    with pytest.raises(QFrameworkError, match=r"to_package: path: cannot write"):
        quantized.to_package(tmp_path / "missing" / "mlp.pt2")
    with pytest.raises(UnsupportedError, match=r"option 'liner' is unknown"):
        quantized.to_package(tmp_path / "mlp.pt2", options={"liner": "off"})
    with pytest.raises(UnsupportedError, match=r"example_inputs must be given for a model that is not exported"):
        to_package(model, tmp_path / "mlp.pt2")
    with pytest.raises(UnsupportedError, match=r"model must be in eval mode"):
        to_package(MLP(), tmp_path / "mlp.pt2", x)
    with pytest.raises(UnsupportedError, match=r"dynamic_shapes must be None without example_inputs"):
        to_package(quantized, tmp_path / "mlp.pt2", dynamic_shapes=({0: 4},))
    with pytest.raises(UnsupportedError, match=r"model must not be compiled"):
        to_package(torch.compile(model), tmp_path / "mlp.pt2", x)
    with pytest.raises(QFrameworkError, match=r"torch.export cannot capture the model"):
        to_package(model, tmp_path / "mlp.pt2", torch.randn(4, 17))
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_no_packages(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_package(tmp_path / "missing.pt2")
    (tmp_path / "text.pt2").write_text("text")
    with pytest.raises(FileFormatError, match=r"text\.pt2 is not a package that this machine can run"):
        load_package(tmp_path / "text.pt2")
    qframework.quantize(MLP().eval(), torch.randn(4, 16), dynamic_int8()).save(tmp_path / "saved.pt2")
    with pytest.raises(FileFormatError, match=r"saved\.pt2 is not a package that this machine can run"):
        load_package(tmp_path / "saved.pt2")


class Scaled(nn.Module):
    """A constant of the compiled code, an optional input, and two inputs of one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 8)

    def forward(self, x: Tensor, more: dict[str, Tensor], bias: Tensor | None = None, *, scale: float) -> Tensor:
        out = self.fc(x + more["y"] + more["twice"].unflatten(0, (-1, 2)).sum(1)) * scale
        return out if bias is None else out + bias


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory):
    """A model, its package, and the arguments of a call."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    batch = torch.export.Dim("batch", min=4, max=50)
    model = qframework.quantize_(Scaled().eval(), dynamic_int8())
    path = tmp_path_factory.mktemp("package") / "scaled.pt2"
    args, kwargs = arguments(5)
    shapes = {"x": {0: batch}, "more": {"y": {0: batch}, "twice": {0: 2 * batch}}, "bias": None, "scale": None}
    write_package(model, path, args, kwargs, shapes, None)
    return model, load_package(path)


def arguments(batch: int, scale: float = 2.0, **changes: object) -> tuple[tuple[object, ...], dict[str, object]]:
    more = {"y": torch.randn(batch, 16), "twice": torch.randn(2 * batch, 16)} | changes
    return (torch.randn(batch, 16), more, None), {"scale": scale}


@pytest.mark.parametrize("batch", [4, 5, 50])
def test_inputs_of_another_layout_are_copied(scaled, batch: int) -> None:
    model, run = scaled
    (_, more, bias), kwargs = arguments(batch)
    tensors = torch.randn(16, batch).t(), torch.randn(batch, 33)[:, 1::2], torch.randn(17 * batch)[batch:].view(-1, 16)
    for x in tensors:
        assert torch.equal(run(x, more, bias, **kwargs), model(x, more, bias, **kwargs))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (arguments(3), r"'x' must have shape \((\w+), 16\), \1 from 4 to 50, got \(3, 16\)"),
        (arguments(51), r"'x' must have shape .*, got \(51, 16\)"),
        (arguments(5, y=torch.randn(6, 16)), r"'more_y' must have shape .*, got \(6, 16\), where \w+ is 5"),
        (arguments(5, y=torch.randn(1, 16)), r"'more_y' must have shape .*, got \(1, 16\)"),
        (arguments(5, y=torch.randn(5, 17)), r"'more_y' must have shape .*, got \(5, 17\)"),
        (arguments(5, y=torch.randn(16)), r"'more_y' must have shape .*, got \(16,\)"),
        (arguments(5, twice=torch.randn(8, 16)), r"'more_twice' must have shape \(2\*\w+, 16\), .*got \(8, 16\)"),
        (arguments(5, y=torch.randn(5, 16).half()), "'more_y' must be torch.float32 on cpu, got torch.float16 on cpu"),
        (arguments(5, y=torch.randn(5, 16, device="meta")), "'more_y' must be .* on cpu, got torch.float32 on meta"),
        (arguments(5, y=2.0), r"'more_y' must be a dense tensor, got 2\.0 of type float"),
        (arguments(5, scale=3.0), r"'scale' must be 2\.0, a constant of the code, got 3\.0 of type float"),
        ((arguments(5)[0][:2], {"scale": 2.0}), "3 positional and the keywords 'scale', .* got 2 positional and the"),
        ((arguments(5)[0], {}), "3 positional and the keywords 'scale', .* got 3 positional and no keywords"),
        (((*arguments(5)[0][:2], torch.randn(8)), {"scale": 2.0}), "'bias' must be None, a constant of the code"),
        (arguments(5, z=torch.randn(5, 16)), "inputs must be nested in tuples, lists and dictionaries like"),
    ],
)
def test_inputs_that_the_code_was_not_compiled_for(scaled, call, message: str) -> None:
    args, kwargs = call
    with pytest.raises(UnsupportedError, match=f"package: .*{message}"):
        scaled[1](*args, **kwargs)


class Counts(MLP):
    """Changes its input and a buffer."""

    def __init__(self, *size: int) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x.mul_(2)) * self.calls.mean()


@pytest.mark.parametrize("size", [(9,), (2, 5)], ids=str)
def test_writes_to_inputs_and_buffers(size: tuple[int, ...], tmp_path: Path, fresh_dynamo: None) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    quantized = qframework.quantize(Counts(*size).eval(), x.clone(), dynamic_int8())
    quantized.to_package(tmp_path / "counts.pt2")
    run = load_package(tmp_path / "counts.pt2")
    for given in (x.clone(), x.t().contiguous().t(), torch.zeros(4, 32)[:, ::2].copy_(x)):
        read = x.clone()
        torch.testing.assert_close(run(given), quantized(read), rtol=1e-4, atol=1e-4)
        assert torch.equal(given, read)


@pytest.mark.parametrize("size", [(8,), (), (1, 1)], ids=str)
def test_a_buffer_whose_changes_would_be_lost(size: tuple[int, ...], tmp_path: Path) -> None:
    counts = qframework.quantize(Counts(*size).eval(), torch.randn(4, 16), dynamic_int8())
    with pytest.raises(UnsupportedError, match=r"must not change tensors of up to 8 .* the buffers 'calls'"):
        counts.to_package(tmp_path / "few.pt2")


def test_an_example_in_the_memory_of_another_tensor(tmp_path: Path, fresh_dynamo: None) -> None:
    torch.manual_seed(0)
    model, x = qframework.quantize_(MLP().eval(), dynamic_int8()), torch.randn(4, 32)[:, ::2]
    to_package(model, tmp_path / "mlp.pt2", x)
    run = load_package(tmp_path / "mlp.pt2")
    for each in (x, x.contiguous()):
        torch.testing.assert_close(run(each), model(x), rtol=1e-5, atol=1e-5)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, str], list[str]]:
    """The metadata that packages seem to have, and what is called to load them."""
    metadata, called = {}, []

    class Loader:
        load_metadata_from_package = staticmethod(lambda path, name: metadata)
        get_metadata = staticmethod(lambda: metadata)

        def __init__(self, *arguments: object) -> None:
            called.append("load")

    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", Loader)
    return metadata, called


class FloatHeads(Attention):
    """Static attention whose result stays in float."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return torch.tanh(F.scaled_dot_product_attention(q, k, v)).transpose(1, 2).flatten(2)


def test_a_result_keeps_its_dtype(tmp_path: Path, fresh_dynamo: None) -> None:
    """PyTorch 2.11 reads another dtype than the one that it wrote for an operator, and ends with an error."""
    torch.manual_seed(0)
    x = torch.randn(4, 9, 32, dtype=torch.bfloat16)
    quantizer = QFrameworkQuantizer().set_global(static_attention())
    quantized = qframework.quantize(FloatHeads().eval().bfloat16(), x, quantizer, [x])
    assert quantized.to_package(tmp_path / "heads.pt2").attention_lowered == 1
    with torch.no_grad():
        out, expected = load_package(tmp_path / "heads.pt2")(x), torch.compile(quantized, backend="qframework")(x)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.full
def test_a_compiler_that_links_a_standard_library_of_its_own(
    tmp_path: Path, fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As compilers do that have no shared one for development."""
    static = tmp_path / "static"
    static.write_text(
        '#!/bin/sh\ncase " $* " in *" -shared "*) exec g++ "$@" -static-libstdc++;; esac\nexec g++ "$@"\n'
    )
    static.chmod(0o755)
    model, x = MLP().eval(), torch.randn(4, 16)
    qframework.quantize_(model, dynamic_int8())
    # not by monkeypatch, which deletes options of this configuration in the end
    with inductor_config.patch({"cpp.cxx": (str(static),)}):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
        to_package(model, tmp_path / "mlp.pt2", x)
        torch.testing.assert_close(load_package(tmp_path / "mlp.pt2")(x), model(x), rtol=1e-5, atol=1e-5)

        monkeypatch.setattr("qframework.compat.inductor._shared_standard_library", dict)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "second-cache"))
        to_package(model, tmp_path / "own.pt2", x)
        with pytest.raises(FileFormatError, match=r"own\.pt2 .*holds a copy of the C\+\+ standard library"):
            load_package(tmp_path / "own.pt2")


def package(path: Path, library: bytes) -> Path:
    """A package with ``library`` as its compiled model."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{path.stem}/model.so", library)
    return path


def check_loading(path: Path, message: str | None, called: list[str]) -> None:
    """PyTorch's loader is called, or with a ``message`` an error is raised before that."""
    if message is None:
        load_package(path)
        assert called == ["load"]
        return
    with pytest.raises(FileFormatError, match=message):
        load_package(path)
    assert not called


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"AOTI_DEVICE_KEY": "cuda"}, "was compiled for CUDA, and no CUDA device is available"),
        ({"AOTI_MACHINE": "aarch65"}, "was compiled for aarch65, and this is "),
        ({"AOTI_CPU_ISA": "AVX512 AVX512_VNNI"}, "was compiled for processors with AVX512, and this one has AVX2"),
        ({"AOTI_CPU_ISA": "AVX2"}, None),
        ({"AOTI_CPU_ISA": "INVALID_VEC_ISA"}, None),
    ],
)
def test_packages_of_other_machines(opened, tmp_path: Path, monkeypatch, other, message) -> None:
    metadata, called = opened
    metadata.update({"AOTI_DEVICE_KEY": "cpu", **other})
    path = package(tmp_path / "other.pt2", b"\0libstdc++.so.6\0")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    check_loading(path, message, called)


def test_a_library_with_a_standard_library_of_its_own(opened, tmp_path: Path) -> None:
    _metadata, called = opened
    path = package(tmp_path / "own.pt2", b"\0libc.so.6\0")
    check_loading(path, r"own\.pt2 .*holds a copy of the C\+\+ standard library", called)


@pytest.mark.parametrize(
    ("capability", "message"),
    [
        ("90", None),
        ("100", r"for GPUs of compute capability 10\.0, and this one has 9\.0"),
        ("89", r"for GPUs of compute capability 8\.9, and this one has 9\.0"),
    ],
)
def test_packages_of_other_gpus(opened, tmp_path: Path, monkeypatch, capability: str, message: str | None) -> None:
    metadata, called = opened
    metadata.update({"AOTI_DEVICE_KEY": "cuda", "AOTI_COMPUTE_CAPABILITY": capability})
    path = package(tmp_path / "other.pt2", b"\0libstdc++.so.6\0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    check_loading(path, message, called)
