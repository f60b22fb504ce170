"""The C++ compiler that Inductor uses."""

from __future__ import annotations

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
