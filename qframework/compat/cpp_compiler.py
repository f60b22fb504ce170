"""Inductor's C++ compiler and its cache of compiled libraries."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess

from qframework.compat.missing import note_error


def cpp_compiler() -> str | None:
    """The path of the compiler; None if Inductor finds none."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler
    except ImportError as error:
        note_error(error)
        return None
    try:
        return shutil.which(get_cpp_compiler())
    except (InvalidCxxCompiler, subprocess.SubprocessError, OSError):
        return None


def load_cpp(source: str) -> ctypes.CDLL:
    """The library that ``source`` compiles to, from Inductor's cache on disk if it is there.

    Raises RuntimeError or OSError if there is no compiler or it fails, NotImplementedError if Inductor cannot be asked.
    """
    try:
        from torch._inductor.codecache import CppCodeCache

        library: ctypes.CDLL = CppCodeCache.load(source)
    except (ImportError, AttributeError) as error:
        with contextlib.suppress(ImportError, AttributeError):  # a broken Inductor, beside a name that is gone
            note_error(error)
        raise NotImplementedError(f"Inductor cannot compile C++: {error}") from error
    except subprocess.SubprocessError as error:
        raise RuntimeError(f"the C++ compiler failed: {error}") from error
    return library
