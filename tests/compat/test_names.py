"""Every private name that the package uses exists: one test each, which says what breaks without it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from names_helpers import is_there, needed, resolve

from qframework.compat.missing import sentence
from qframework.compat.names import KNOWN, NAMES, Name

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", needed(), ids=lambda name: name.path)
def test_the_name_exists(name: Name) -> None:
    pytest.importorskip(name.library)
    assert is_there(name), sentence(name)


def test_missing_names_are_not_found() -> None:
    gone = [
        Name("torch._C._no_such_name", ""),
        Name("torch._no_such_module.name", ""),
        Name("torch.fx.node.Node._no_such_attribute", ""),
        Name("_no_such_key", "", source="torch._dynamo.output_graph"),
        Name("torch._no_such_name", "", older="_nor_this"),
    ]
    assert not any(map(is_there, gone))
    assert is_there(Name("torch._no_such_name", "", older="_int_mm"))


def test_a_function_without_the_check_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.autograd.grad", lambda: None)
    assert not is_there(NAMES["has_torch_function in torch.autograd.grad"])


def test_messages_say_what_breaks_and_what_to_do() -> None:
    for name in NAMES.values():
        text = sentence(name)
        assert name.path in text
        assert name.breaks in text
        assert (name.instead or "install one of these") in text
    with pytest.raises(AttributeError):
        resolve("torch._C._no_such_name")


@pytest.mark.parametrize("library", KNOWN)
def test_the_oldest_versions_agree(library: str) -> None:
    """Those of ``KNOWN``, of pyproject.toml and of make test-oldest."""
    oldest = KNOWN[library][0]
    (declared,) = set(re.findall(rf'"{library}>=([\d.]+)', (ROOT / "pyproject.toml").read_text()))
    (installed,) = re.findall(rf"'{library}==([\d.]+)\.\*'", (ROOT / "Makefile").read_text())
    assert declared == oldest
    assert installed == oldest if "." in oldest else installed.startswith(f"{oldest}.")
