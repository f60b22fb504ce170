"""The wheel that users install: its contents, and that it works outside this checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
COMPILE = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).eval()
x = torch.randn(3, 8)
with torch.no_grad():
    y = torch.compile(model, backend="qframework", options={"linear": "int8_dynamic"})(x)
    assert 0 < (y - model(x)).abs().max() < 0.05 * model(x).abs().max()
import qframework
print(qframework.__file__)
"""


DIGITS = """
import importlib.util
assert all(importlib.util.find_spec(name) is None for name in ("demos", "benchmarks", "examples", "tests"))
from qframework.evaluation import checkpoint, digits, digits_vit
from qframework.evaluation.models import load_classifier
assert len(digits.load_digits().held_out) == 599
from qframework import Plan, sensitivity, tune
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command outside this checkout and return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of its sources, so that it contains nothing of earlier builds."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("qframework", "tests", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", source, cwd=source)
    (built,) = (source / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def empty_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment that holds the wheel; third-party packages come from this one's site-packages.

    A ``.pth`` line adds that folder without reading the ``.pth`` files in it: an editable install there has no effect.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "third_party.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def test_the_wheel_is_pure_python(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        assert "Root-Is-Purelib: true" in archive.read(metadata).decode()


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "qframework").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "qframework/py.typed" in names
    assert names == package


def test_the_wheel_declares_its_entry_points_and_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (file,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
        entry_points = ConfigParser()
        entry_points.read_string(archive.read(file).decode())
    assert entry_points["torch_dynamo_backends"]["qframework"] == "qframework.backend:qframework_backend"
    assert entry_points["console_scripts"]["qframework"] == "qframework.cli:main"
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_installed_wheel_compiles_a_model(empty_environment: Path) -> None:
    output = run(empty_environment / "bin" / "python", "-c", COMPILE, cwd=empty_environment)
    assert Path(output.splitlines()[-1]).is_relative_to(empty_environment)


def test_the_installed_wheel_has_the_command(empty_environment: Path) -> None:
    assert "quantize" in run(empty_environment / "bin" / "qframework", "--help", cwd=empty_environment)


def test_the_installed_wheel_has_the_digits_model_and_no_demos(empty_environment: Path) -> None:
    run(empty_environment / "bin" / "python", "-c", DIGITS, cwd=empty_environment)
