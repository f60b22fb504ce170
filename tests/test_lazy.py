"""Packages that import their names at first use (lazy.py) offer what they say, from where they say."""

from __future__ import annotations

import ast
import importlib
import inspect

import pytest

PACKAGES = ("evaluation", "quantizer", "tuning")


def imported_for_types(source: str) -> dict[str, str]:
    """The module of each name that is imported ``if TYPE_CHECKING``."""
    (block,) = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


@pytest.mark.parametrize("name", PACKAGES)
def test_every_name_is_offered_from_its_module(name: str) -> None:
    package = importlib.import_module(f"qframework.{name}")
    expected = imported_for_types(inspect.getsource(package))
    assert set(package.__all__) == set(expected)
    for public, module in expected.items():
        assert getattr(package, public) is vars(importlib.import_module(module))[public]
        assert package._MODULE_OF[public] == module.removeprefix(f"{package.__name__}.")
    assert set(package._MODULE_OF) == set(expected)


def test_an_unknown_name_lists_those_there_are() -> None:
    package = importlib.import_module("qframework.evaluation")
    with pytest.raises(AttributeError, match=r"has no attribute 'top5'; it offers .*top1"):
        _ = package.top5
