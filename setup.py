"""The metadata that depends on where the repository is published; all other metadata is in pyproject.toml.

``QFRAMEWORK_REPOSITORY`` holds the address of the repository when a release is built. It becomes the project's URLs,
and the README's links to files become absolute, because a package index shows it without the files. Without an address,
the metadata holds no URLs. A source distribution keeps the address it was built with.
"""

from __future__ import annotations

import os
import re
from email.parser import HeaderParser
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def repository() -> str:
    """The address without a slash at its end; empty if there is none."""
    address = os.environ.get("QFRAMEWORK_REPOSITORY", "").rstrip("/")
    if not address and (ROOT / "PKG-INFO").exists():  # this is a source distribution
        headers = HeaderParser().parsestr((ROOT / "PKG-INFO").read_text(encoding="utf-8"))
        urls = dict(line.split(", ", 1) for line in headers.get_all("Project-URL", []))
        address = urls.get("Repository", "")
    if address and not address.startswith("https://"):
        raise SystemExit(f"QFRAMEWORK_REPOSITORY must start with https://, got {address!r}")
    return address


def project_urls(address: str) -> dict[str, str]:
    """The URLs that package indexes show."""
    if not address:
        return {}
    files = f"{address}/blob/HEAD"
    return {
        "Repository": address,
        "Documentation": f"{files}/docs/index.md",
        "Changelog": f"{files}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def readme(address: str) -> str:
    """The README, its relative links made absolute if there is an address."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if not address:
        return text
    images = re.compile(r"""(!\[[^\]]*\]\(|src=")(?!https?://)""")
    text = images.sub(rf"\1{address}/raw/HEAD/", text)
    return re.sub(r"\]\((?!https?://|#)", f"]({address}/blob/HEAD/", text)


setup(
    project_urls=project_urls(repository()),
    long_description=readme(repository()),
    long_description_content_type="text/markdown",
)
