"""PyTorch's caches of compiled graphs: hits in a second process, and never an entry of other code (cache_key.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import compile_once
import pytest
import torch

from qframework.backend import cache_key as module
from qframework.backend.cache_key import cache_key, hash_of_package
from qframework.backend.options import BackendOptions


def _process(folder: Path, outputs: str, *cases: str) -> dict[str, dict[str, int]]:
    paths = os.pathsep.join([*map(str, Path(__file__).parents[:3]), str(Path(__file__).parents[1])])
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "caches"), "PYTHONPATH": paths}
    command = [sys.executable, compile_once.__file__, str(folder / outputs), *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def first(folder: Path) -> dict[str, dict[str, int]]:
    return _process(folder, "first.pt", *compile_once.CASES)


def test_an_entry_of_inductor_is_not_ours_and_the_reverse(first):
    for case, counted in first.items():  # the same model by both backends, and attention with and without gradients
        assert counted.get("fxgraph_cache_miss", 0) > 0, (case, counted)
        assert counted.get("autograd_cache_miss") == counted.get("autograd_cache_saved") == 1, (case, counted)
        assert not [name for name in counted if name.endswith(("hit", "bypass"))], (case, counted)


def test_a_second_process_compiles_nothing(folder, first):
    second = _process(folder, "second.pt", *compile_once.CASES)
    for case, counted in second.items():
        assert counted.get("fxgraph_cache_hit", 0) == first[case]["fxgraph_cache_miss"], (case, counted)
        assert counted.get("autograd_cache_hit") == 1, (case, counted)
        assert not [name for name in counted if name.endswith(("miss", "bypass"))], (case, counted)
    before, after = torch.load(folder / "first.pt"), torch.load(folder / "second.pt")
    for case, output in before.items():
        assert torch.equal(output, after[case]), case


def test_other_weights_hit_and_are_used(folder, first):
    cases = ("static+1", "frozen+1")
    for case, counted in _process(folder, "weights.pt", *cases).items():  # it compares them with eager mode
        assert counted.get("autograd_cache_hit") == 1, (case, counted)
    before, after = torch.load(folder / "first.pt"), torch.load(folder / "weights.pt")
    assert not any(torch.allclose(before[case.partition("+")[0]], after[case]) for case in cases)


def test_another_version_compiles_anew(folder, first):
    counted = _process(folder, "third.pt", "static@9.9", "attention@9.9")
    for case in counted.values():
        assert case.get("fxgraph_cache_miss") == case.get("autograd_cache_miss") == 1, counted


def test_the_key_holds_all_that_changes_the_code(monkeypatch):
    options = [
        BackendOptions(),
        BackendOptions(linear="int8_dynamic"),
        BackendOptions(linear="int8_dynamic", freeze_weights=True),
        BackendOptions(attention="sage_b"),
        BackendOptions(attention={"a": "sage_b"}),
        BackendOptions(attention={"a": "sage_b", "b": "off"}),
    ]
    keys = set(map(cache_key, options))
    assert len(keys) == len(options)
    assert cache_key(BackendOptions(attention={"b": "off", "a": "sage_b"})) in keys
    monkeypatch.setattr(module, "INTERPRET", not module.INTERPRET)
    assert cache_key(options[0]) not in keys
    monkeypatch.undo()
    monkeypatch.setattr("qframework.__version__", "9.9")
    assert cache_key(options[0]) not in keys


def test_the_hash_changes_with_any_file(monkeypatch, tmp_path):
    def hashed() -> str:
        monkeypatch.setattr(module, "files", lambda name: tmp_path / name)
        return hash_of_package.__wrapped__()

    (tmp_path / "qframework" / "kernels").mkdir(parents=True)
    file = tmp_path / "qframework" / "kernels" / "tiles.py"
    file.write_text("TILES = 1")
    seen = {hashed()}
    (tmp_path / "qframework" / "__pycache__").mkdir()
    (tmp_path / "qframework" / "__pycache__" / "tiles.pyc").write_bytes(b"compiled")
    assert hashed() in seen
    file.write_text("TILES = 2")
    seen.add(hashed())
    file.rename(file.with_name("other.py"))
    seen.add(hashed())
    assert len(seen) == 3


def test_the_instructions_of_the_cpu_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """By which decompositions choose whether ``int8_linear`` stays a call."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    narrow = cache_key(BackendOptions())
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert narrow != cache_key(BackendOptions())
