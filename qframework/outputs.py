"""Checks that an output file can be written before the work that produces it starts."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from qframework.errors import QFrameworkError


def check_output_file(path: Path, argument: str, *, make_folder: bool = False) -> None:
    """Raise QFrameworkError, naming ``argument``, unless a file can be created at ``path`` or replaced there.

    A trial file is created beside ``path`` and removed; an existing file stays as it is. Permission bits would not do:
    root has all of them, also on file systems that refuse root.

    Args:
        path: the output file.
        argument: how the user gave it, such as ``"--output"``.
        make_folder: create a missing folder, as the writer would.
    """
    try:
        if path.is_dir():
            raise _refusal(path, argument, "it is a folder")
        if path.exists() and not path.is_file():
            raise _refusal(path, argument, "it is not a regular file")
        _check_folder(path, argument, make_folder)
        # as long as the name of the temporary file of an atomic write
        trial = path.with_name(f".{path.name}.{os.getpid()}.writable")
        trial.open("xb").close()
        trial.unlink()
    except OSError as error:
        raise _refusal(path, argument, error.strerror or str(error)) from error


def check_output_folder(path: Path, argument: str) -> None:
    """Raise QFrameworkError, naming ``argument``, unless ``path`` is a folder to write into; create it if missing."""
    if path.exists() and not path.is_dir():
        raise QFrameworkError(f"{argument}: cannot write into {path}: it is not a folder")
    check_output_file(path / "output", argument, make_folder=True)


def output_file(text: str) -> Path:
    """An argparse type: a file that can be written; a missing folder is created."""
    return _argparse_path(text, folder=False)


def output_folder(text: str) -> Path:
    """An argparse type: a folder that can be written into, created if missing."""
    return _argparse_path(text, folder=True)


def _argparse_path(text: str, *, folder: bool) -> Path:
    path = Path(text)
    try:
        if folder:
            check_output_folder(path, "argument")
        else:
            check_output_file(path, "argument", make_folder=True)
    except QFrameworkError as error:  # argparse names the option itself
        raise argparse.ArgumentTypeError(str(error).removeprefix("argument: ")) from error
    return path


def _check_folder(path: Path, argument: str, make: bool) -> None:
    folder = path.parent
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir():
        raise _refusal(path, argument, f"{existing} is not a folder")
    if make:
        folder.mkdir(parents=True, exist_ok=True)
    elif existing != folder:
        raise _refusal(path, argument, f"the folder {folder} does not exist")


def _refusal(path: Path, argument: str, reason: str) -> QFrameworkError:
    return QFrameworkError(f"{argument}: cannot write {path}: {reason}. Name a file in an existing, writable folder")
