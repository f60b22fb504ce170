"""Triton, or placeholders that let a machine without Triton import every kernel."""

from __future__ import annotations

import importlib.util
import os
import re
from typing import Any

from qframework.errors import UnsupportedError

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRET = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")

if HAS_TRITON:
    import triton
    import triton.language as tl

    from qframework.compat.triton import TensorDescriptor

    VERSION = tuple(map(int, re.findall(r"\d+", triton.__version__)[:2]))
else:  # CPU-only platforms: definitions succeed, launches do not

    class _NoTriton:
        def __getattr__(self, name: str) -> Any:
            return self

        def __getitem__(self, grid: Any) -> Any:
            raise UnsupportedError("Triton is not installed. Install it for the GPU kernels, or run on the CPU.")

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self

    triton = tl = TensorDescriptor = _NoTriton()
    VERSION = (0, 0)

__all__ = ["HAS_TRITON", "INTERPRET", "VERSION", "TensorDescriptor", "tl", "triton"]
