"""The sdist and the wheel: their contents and metadata, and that the installed wheel works outside this checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from configparser import ConfigParser
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import pytest

import qframework

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


USER = """
import torch

import qframework

model = qframework.quantize_(torch.nn.Linear(8, 8), qframework.quantizer.dynamic_int8())
"""
REPOSITORY = (
    *(".ci", "benchmarks", "docs", "examples", "qframework", "tests"),
    *("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md"),
    *("mkdocs.yml", "pyproject.toml", "setup.py"),
)
GENERATED = shutil.ignore_patterns("__pycache__")


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Run a command outside this checkout, with these environment variables, and return its output."""
    outer = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "QFRAMEWORK_REPOSITORY")}
    result = subprocess.run(command, cwd=cwd, env=outer | variables, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout.strip()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, so that nothing of earlier builds is in a distribution."""
    folder = tmp_path_factory.mktemp("source")
    for name in REPOSITORY:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name, **({"ignore": GENERATED} if (ROOT / name).is_dir() else {}))
    return folder


def build(source: Path, output: Path, *which: str, **environment: str) -> list[Path]:
    """Build without isolation, and so without a network; as the build frontend does, the wheel from the sdist."""
    run(sys.executable, "-m", "build", "--no-isolation", *which, "--outdir", output, source, cwd=source, **environment)
    return sorted(output.iterdir())


@pytest.fixture(scope="module")
def distributions(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    wheel, sdist = build(source, tmp_path_factory.mktemp("dist"))
    return sdist, wheel


@pytest.fixture(scope="module")
def sdist(distributions: tuple[Path, Path]) -> Path:
    return distributions[0]


@pytest.fixture(scope="module")
def wheel(distributions: tuple[Path, Path]) -> Path:
    return distributions[1]


def install(wheel: Path, folder: Path) -> Path:
    """A new virtual environment that holds the wheel alone; returns its Python."""
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    return python


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment that holds the wheel; third-party packages come from this one's site-packages.

    A ``.pth`` line adds that folder without reading the ``.pth`` files in it: an editable install there has no effect.
    """
    folder = tmp_path_factory.mktemp("environment")
    install(wheel, folder)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "third_party.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (file,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(file).decode())


def package_files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_sdist_holds_the_whole_repository(sdist: Path, source: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    built = {name for name in names if name.startswith("qframework.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert names - built == {name for name in files(source) if not name.startswith("qframework.egg-info/")}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout: the files of the repository are unknown")
def test_the_sdist_lacks_no_tracked_file(source: Path) -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert set(tracked) - files(source) <= {".gitignore"}


def test_a_wheel_from_the_checkout_equals_one_from_the_sdist(source: Path, wheel: Path, tmp_path: Path) -> None:
    (direct,) = build(source, tmp_path, "--wheel")
    assert package_files(direct) == package_files(wheel)
    assert metadata(direct).items() == metadata(wheel).items()


def test_the_version_is_that_of_the_package(sdist: Path, wheel: Path) -> None:
    assert metadata(wheel)["Version"] == qframework.__version__
    assert sdist.name == f"qframework-{qframework.__version__}.tar.gz"
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]


def test_without_an_address_there_are_no_urls(wheel: Path) -> None:
    assert metadata(wheel).get_all("Project-URL") is None
    assert metadata(wheel).get_payload().strip() == (ROOT / "README.md").read_text().strip()


def test_an_address_becomes_urls_and_absolute_links(source: Path, tmp_path: Path) -> None:
    (sdist,) = build(source, tmp_path / "sdist", "--sdist", QFRAMEWORK_REPOSITORY="https://example.org/q/")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (wheel,) = build(tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path / "wheel", "--wheel")  # knows the address
    built = metadata(wheel)
    assert built["Description-Content-Type"] == "text/markdown"
    urls = dict(url.split(", ") for url in built.get_all("Project-URL", []))
    assert urls["Repository"] == "https://example.org/q"
    assert {"Documentation", "Changelog", "Issues"} <= urls.keys()
    targets = re.findall(r"\]\(([^)]*)\)", built.get_payload())
    assert f"{urls['Repository']}/blob/HEAD/docs/quickstart.md" in targets
    assert all(re.match("https://|#", target) for target in targets)


def test_an_address_must_be_https(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--version"]
    wrong = {**os.environ, "QFRAMEWORK_REPOSITORY": "git@example.org:q"}
    result = subprocess.run(command, cwd=source, env=wrong, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "QFRAMEWORK_REPOSITORY must start with https://, got 'git@example.org:q'" in result.stderr


def test_the_wheel_is_pure_python(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        assert "Root-Is-Purelib: true" in archive.read(metadata).decode()


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = package_files(wheel).keys()
    package = {f"qframework/{name}" for name in files(ROOT / "qframework") if "__pycache__" not in name}
    assert {"qframework/py.typed", "qframework/kernels/linear/native/int8_linear.cpp"} <= names
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


def test_the_installed_wheel_compiles_a_model(environment: Path) -> None:
    output = run(environment / "bin" / "python", "-c", COMPILE, cwd=environment)
    assert Path(output.splitlines()[-1]).is_relative_to(environment)


def test_the_installed_wheel_has_the_command(environment: Path) -> None:
    assert "quantize" in run(environment / "bin" / "qframework", "--help", cwd=environment)


def test_the_installed_wheel_has_the_digits_model_and_no_demos(environment: Path) -> None:
    run(environment / "bin" / "python", "-c", DIGITS, cwd=environment)


def test_type_checkers_see_the_types_of_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    """Of qframework alone: without third-party packages, whose types are Any here, it takes a second."""
    python = install(wheel, tmp_path / "environment")
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\nignore_missing_imports = true\n")
    (tmp_path / "right.py").write_text(USER)
    (tmp_path / "wrong.py").write_text(USER.replace("qframework.quantizer.dynamic_int8()", "8"))
    command = [sys.executable, "-m", "mypy", "--python-executable", str(python), "right.py", "wrong.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    (error, summary) = result.stdout.splitlines()
    assert 'wrong.py:6: error: Argument 2 to "quantize_" has incompatible type "int"; expected "LinearConfig"' in error
    assert summary == "Found 1 error in 1 file (checked 2 source files)"
