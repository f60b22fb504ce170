"""Versions of installed packages, for reports and results."""

from __future__ import annotations

import importlib.metadata


def installed_version(package: str) -> str | None:
    """The version of an installed package, without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
