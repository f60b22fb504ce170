"""Text that every machine with Python has: the source files of the standard library, as bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from qframework.errors import QFrameworkError

VOCABULARY = 256
# Tests, third-party code, and folders that some installations lack.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__", "ensurepip"}
_VALIDATION_EVERY = 20  # every twentieth file


@dataclass(frozen=True)
class Text:
    """Bytes ``(N,)`` uint8, split by file, and ``digest``, the SHA-256 of all of them."""

    train: Tensor
    validation: Tensor
    digest: str


@cache
def load_text(folder: str | None = None, limit: int | None = None) -> Text:
    """The sources under ``folder``, sorted by path; every twentieth file is for validation.

    Args:
        folder: searched for ``*.py``; None uses the standard library. Its sources differ between Python versions, so
            figures are comparable only for equal ``digest``.
        limit: stop after the file that reaches this many bytes.

    Raises:
        QFrameworkError: there are fewer than 20 files.
    """
    root = Path(folder or sysconfig.get_paths()["stdlib"])
    train: list[bytes] = []
    validation: list[bytes] = []
    total = 0
    for number, path in enumerate(_sources(root), 1):
        content = path.read_bytes()
        (train if number % _VALIDATION_EVERY else validation).append(content)
        total += len(content)
        if limit is not None and total >= limit and validation:
            break
    if not validation:
        raise QFrameworkError(f"{root} must hold at least {_VALIDATION_EVERY} Python files, got fewer")
    digest = hashlib.sha256(b"".join((*train, b"\0", *validation))).hexdigest()
    return Text(_tensor(b"".join(train)), _tensor(b"".join(validation)), digest)


def _sources(root: Path) -> list[Path]:
    found = (path for path in root.rglob("*.py") if path.is_file())
    return sorted(path for path in found if not _LEFT_OUT & set(path.relative_to(root).parts))


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def random_windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """``(count, length)`` int64 from random positions of ``text`` ``(N,)`` uint8."""
    starts = torch.randint(0, len(text) - length + 1, (count, 1), generator=generator)
    return text[starts + torch.arange(length)].long()


def even_windows(text: Tensor, count: int, length: int) -> Tensor:
    """``(count, length)`` int64 from evenly spaced positions of ``text`` ``(N,)`` uint8."""
    starts = torch.linspace(0, len(text) - length, count, dtype=torch.float64).long().unsqueeze(1)
    return text[starts + torch.arange(length)].long()
