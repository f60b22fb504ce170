"""Inductor's C++ compiler, and its cache of what was compiled."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

from qframework.compat.missing import note_error


def cpp_compiler() -> str | None:
    """Where it is; None where Inductor finds none."""
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

    Raises RuntimeError (no compiler, an error of the compiler), OSError, or NotImplementedError where Inductor has no
    such cache.
    """
    try:
        from torch._inductor.codecache import CppCodeCache

        library: ctypes.CDLL = CppCodeCache.load(source)
    except (ImportError, AttributeError) as error:
        note_error(error)
        raise NotImplementedError("this PyTorch has no torch._inductor.codecache.CppCodeCache.load") from error
    return library
